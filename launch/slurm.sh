#!/usr/bin/env bash
# A pipeline over two nodes with four devices each, started by Slurm; the bubbles are squeezed on every node.
#
#   sbatch slurm.sh
#
# run.directory in squeezer.toml must lie on a file system that all nodes share. XDG_RUNTIME_DIR is often missing under
# Slurm, so pages and sockets get a private directory in memory on each node.
#SBATCH --job-name=pretrain-squeezed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
set -euo pipefail

export SQUEEZER_DIR="/dev/shm/squeezer-$UID-$SLURM_JOB_ID"
hostfile="$SLURM_SUBMIT_DIR/hostfile.$SLURM_JOB_ID"
trap 'rm -f "$hostfile"' EXIT
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/ slots=4/' >"$hostfile"

ds_squeeze --squeezer squeezer.toml --hostfile "$hostfile" --launcher slurm \
    --master_addr "$(head -n 1 "$hostfile" | cut -d ' ' -f 1)" \
    train.py --deepspeed_config ds_config.json
