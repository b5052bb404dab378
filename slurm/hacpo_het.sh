#!/bin/bash
# A run on different kinds of nodes: sbatch slurm/hacpo_het.sh CONFIG [options of `hacpo launch`]
# A heterogeneous job: component k, from one `hetjob` line to the next, has the nodes of the configuration's agent k. Add
# partitions, constraints and kinds of GPUs to the components, and one more component for every further agent.
#SBATCH --job-name=hacpo --ntasks-per-node=1 --mem=0 --exclusive --time=24:00:00
#SBATCH --nodes=1 --gpus-per-node=8
#SBATCH --signal=B:USR1@900 --requeue --no-kill --open-mode=append --output=hacpo-%j.out
#SBATCH hetjob
#SBATCH --ntasks-per-node=1 --mem=0 --exclusive --time=24:00:00 --requeue --no-kill
#SBATCH --nodes=1 --gpus-per-node=8
set -euo pipefail
trap '' USR1
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch, from the folder of the repository}"
source slurm/env.sh
exec "$HACPO_LAUNCHER_PYTHON" -m megatron_hacpo launch --slurm "${@:?which CONFIG?}"
