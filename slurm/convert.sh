#!/bin/bash
# Checkpoints from one format to the other: sbatch slurm/convert.sh to-megatron HF_DIR OUT_DIR [--tp 2 ...]
#                                           sbatch slurm/convert.sh to-hf MEGATRON_DIR OUT_DIR
#SBATCH --job-name=hacpo-convert
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2
#SBATCH --mem=32G
#SBATCH --time=02:00:00
#SBATCH --output=hacpo-convert-%j.out
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch, from the folder of the repository}"
source slurm/env.sh
# shellcheck disable=SC2086 # both are several words
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" ${HACPO_SRUN_OPTIONS:-} ${HACPO_WRAPPER:-} "$HACPO_PYTHON" -m megatron_hacpo convert "$@"
