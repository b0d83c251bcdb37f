#!/usr/bin/env bash
# Trains a model on a bare machine: makes the environment, prepares the data, starts the training.
#
#   bash scripts/train.sh                   # the quickstart: a small Llama on text that every machine has
#   bash scripts/train.sh --num_steps=3000  # any flag of main_training.py replaces the preset's
#   bash scripts/train.sh --model_variant=7b --data_path=/data/tokens --datasets=web,code --weights=4,1
#   sbatch --nodes=2 scripts/train.slurm ...      # on SLURM; or srun bash scripts/train.sh, one task per node
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node1 bash scripts/train.sh ...     # on each node, without a scheduler
#
# Paths in flags are relative to the repository. With --config, --data_path or --use_dummy_dataset the script
# prepares no text. With own data for another model it uses no preset; with --config it passes none of its
# flags either.
# Exit status: 0 finished, 2 bad input, 75 stopped early (the same command continues the run), 1 failed.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

# ---- What to train: edit here, set variables of the environment, or pass flags ----
FLAGS=(                                               # an empty one leaves the decision to the preset
    --model_variant="${MODEL_VARIANT:-}"              # a variant: quickstart_2m, 194m, llama3.2_1b, 7b, ...
    --seq_length="${SEQ_LENGTH:-}"                    # tokens of context
    --batch_size="${BATCH_SIZE:-}"                    # sequences per device and accumulation step
    --num_steps="${NUM_STEPS:-}"                      # optimizer steps in total
    --learning_rate="${LEARNING_RATE:-}"              # peak, after the warm-up
    --report_interval="${REPORT_INTERVAL:-}"          # steps between report lines
    --checkpoint_interval="${CHECKPOINT_INTERVAL:-}"  # steps between checkpoints
    # Only with the quickstart's text; the last two also with your own data that have what they need.
    --data_path="${DATA_DIR:-data/quickstart-2}"      # token shards of the text, made once
    --datasets="${DATASETS:-}"                        # the sources
    --weights="${WEIGHTS:-}"                          # their shares of the tokens
    --eval_interval="${EVAL_INTERVAL:-}"              # steps between validations on held-out text
    --sample_interval="${SAMPLE_INTERVAL:-}"          # steps between texts that the model writes
)
# ---- Where to train: detected, or set by variables of the environment ----
# NPROC_PER_NODE   processes on this machine (default: one per GPU; without GPUs one that uses all cores)
# NNODES, NODE_RANK, MASTER_ADDR   number of nodes, this node's number from 0, name of the first node
#                  (default: from SLURM). With NNODES=MIN:MAX nodes may fail and come back; NODE_RANK then
#                  only says, with 0, which node hosts the rendezvous
# MAX_RESTARTS     how often failed processes start again, from the last checkpoint (default: 0; MIN:MAX: 100)
# More: MASTER_PORT, LOCAL_ADDR and RDZV_CONF, at the top of fms_fsdp/launch.py
# RUN_NAME         name of the run, if no flag and no file of --config names it
# PREPARE_ONLY=1   make environment and data, print the run directory and end: for a login node, if the other
#                  nodes have no internet

# shellcheck disable=SC2119 # it needs no extras; the arguments of this script are flags
use_environment
exec "$PYTHON" -m scripts.quickstart "${FLAGS[@]}" -- "$@" # signals reach Python
