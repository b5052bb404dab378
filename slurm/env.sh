# shellcheck shell=bash
# What is particular to your cluster; every script here reads it, and so does `hacpo submit`. The scripts are started in
# the folder of the repository.

# Options of sbatch itself, for `hacpo submit` (before an sbatch by hand: source slurm/env.sh). Any variable that
# `man sbatch` lists under INPUT ENVIRONMENT VARIABLES.
#export SBATCH_PARTITION=gpu
#export SBATCH_ACCOUNT=project

# Modules, on the job's first node.
#module load cuda

# The Python of the launcher, on the job's first node: this project installed, torch without CUDA will do.
export HACPO_LAUNCHER_PYTHON="${HACPO_LAUNCHER_PYTHON:-$PWD/.venv/bin/python}"

# The Python of all processes that compute. In a container, the container's.
export HACPO_PYTHON="${HACPO_PYTHON:-$HACPO_LAUNCHER_PYTHON}"

# A container with pyxis and enroot: options of every srun. With --container-name=hacpo the steps of a node share one.
#export HACPO_PYTHON=python
#export HACPO_SRUN_OPTIONS="--container-image=$PWD/megatron-hacpo.sqsh --container-mounts=$PWD --container-workdir=$PWD"

# A container with apptainer: what runs a command in it.
#export HACPO_PYTHON=python
#export HACPO_WRAPPER="apptainer exec --nv --bind $PWD megatron-hacpo.sif"

# The network interface on which processes meet, if it is not the one that leads from node to node by itself.
#export HACPO_INTERFACE=ib0

# For NCCL and CUDA.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
#export NCCL_IB_HCA=mlx5
