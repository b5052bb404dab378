#!/bin/bash
# A run on all nodes of a job: sbatch slurm/hacpo_multinode.sh [CONFIG] [options of `hacpo launch`]
# `hacpo submit CONFIG` asks for as many nodes as the run needs.
#SBATCH --job-name=hacpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=hacpo-%j.out
set -euo pipefail
trap '' USR1   # until the launcher listens: near the time limit it saves, and has the job requeued
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch, from the folder of the repository}"
source slurm/env.sh
if [ $# -eq 0 ]; then
    set -- examples/paper/qwen7b_llama8b_2nodes.yaml
    echo "no CONFIG given: $1"
fi
exec "$HACPO_LAUNCHER_PYTHON" -m megatron_hacpo launch --slurm "$@"
