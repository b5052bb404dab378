#!/bin/bash
# How good agents and checkpoints are: sbatch slurm/eval.sh CONFIG [options of `hacpo eval`]
#SBATCH --job-name=hacpo-eval
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=64G
#SBATCH --time=04:00:00
#SBATCH --output=hacpo-eval-%j.out
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch, from the folder of the repository}"
source slurm/env.sh
# shellcheck disable=SC2086 # both are several words
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" ${HACPO_SRUN_OPTIONS:-} ${HACPO_WRAPPER:-} "$HACPO_PYTHON" -m megatron_hacpo eval "$@"
