#!/bin/bash
# Run with: sbatch --wait slurm.sh. Timed tests need the host alone, hence --exclusive.
#SBATCH --job-name=aorta
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --output=aorta-%j.log
set -euo pipefail

# Slurm gives a task some of the CPUs; the ranks need all of them.
exec srun --ntasks=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" \
    .venv/bin/python -m pytest -m overlap --aorta-gpus=8 --aorta-without-gpus=fail --aorta-ab=origin/main \
    --aorta-results="$SLURM_SUBMIT_DIR/results" --junitxml="$SLURM_SUBMIT_DIR/junit.xml"
