#!/usr/bin/env bash
# From a bare machine to a trained model: environment, data, training.
#
#   bash scripts/train.sh                                          # the quickstart: a small Llama on text that every machine has
#   bash scripts/train.sh --num_steps=3000                         # any flag of main_training.py replaces the default below
#   bash scripts/train.sh --model_variant=7b --data_path=/data/tokens --datasets=web,code --weights=4,1
#   srun bash scripts/train.sh ...                                 # one task per node of a SLURM job
#
# Paths in flags are relative to the repository. With --config, --data_path or --use_dummy_dataset no text is prepared; with --config none of the
# defaults below are passed, so that the file decides.
# Exit status: 0 finished, 2 bad input, 75 stopped early (the same command goes on), 1 failed.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

# ---- What to train: edit here, or set from the environment, or pass flags ------------------------------------------------------
DATA_DIR="${DATA_DIR:-data/quickstart}"        # token shards, made below when missing
MODEL_ARGS=(
    --model_variant="${MODEL_VARIANT:-quickstart}"    # a name of the table of variants: quickstart, 194m, llama3.2_1b, 7b, ...
    --seq_length="${SEQ_LENGTH:-128}"                 # tokens of context
)
DATA_ARGS=(
    --data_path="$DATA_DIR"                           # folder with one subfolder per source
    --datasets="${DATASETS:-stdlib,packages,prose}"   # the sources
    --weights="${WEIGHTS:-2,2,1}"                     # their shares of the tokens
)
TRAIN_ARGS=(
    --batch_size="${BATCH_SIZE:-8}"                   # rows per device and micro-step
    --num_steps="${NUM_STEPS:-900}"                   # optimizer steps in total
    --learning_rate="${LEARNING_RATE:-4e-3}"          # peak, after the warm-up
    --report_interval="${REPORT_INTERVAL:-20}"        # steps between report lines
    --checkpoint_interval="${CHECKPOINT_INTERVAL:-300}"  # steps between checkpoints
)
# ---- Where: detected, or set from the environment ------------------------------------------------------------------------------
# NPROC_PER_NODE   processes on this machine (default: one per GPU; without GPUs one that uses all cores)
# MASTER_PORT      port of the rendezvous between nodes

given() { # whether the user passed flag $1, as --name, --name=..., with - or _
    local flag
    for flag in "${USER_ARGS[@]}"; do
        flag="${flag%%=*}"
        [[ "${flag//-/_}" == "__$1" ]] && return 0
    done
    return 1
}

prepare_data() {
    local prose="data/quickstart_text/prose.jsonl" inputs skip
    [[ -f "$DATA_DIR/meta/counts.csv" ]] && return
    if ! is_first_task; then
        wait_until "the data in $DATA_DIR" test -f "$DATA_DIR/meta/counts.csv"
        return
    fi
    say "preparing text of this machine in $DATA_DIR; once, under a minute"
    inputs="$("$PYTHON" scripts/quickstart_text.py "$prose")"
    skip='site-packages/*,dist-packages/*,test/*,tests/*,*/test/*,*/tests/*,idlelib/*,lib2to3/*'
    skip+=',_vendor/*,*/_vendor/*,encodings/*,html/entities.py,locale.py,*_pb2*.py,*_mappings.py' # tables, not text
    "$PYTHON" -m fms_fsdp prepare --input="$inputs" --output="$DATA_DIR" --include='*.py,*.jsonl' --exclude="$skip" \
        --train_tokenizer --vocab_size=1024 --tokenizer_sample_mb=16 --shard_tokens=1M --split=98,2 --dedup
}

# The run folder that the flags name; a mistyped flag ends the script here, before any work.
find_run_folder() {
    "$PYTHON" - "$@" <<'PYTHON_CODE'
import sys

from fms_fsdp.config import TrainConfig
from fms_fsdp.flags import parse_flags

try:
    print(parse_flags(TrainConfig, sys.argv[1:]).output_dir)
except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
PYTHON_CODE
}

count_gpus() {
    if command -v nvidia-smi >/dev/null || [[ -e /dev/kfd ]]; then
        "$PYTHON" -c 'import torch; print(torch.cuda.device_count())'
    else
        echo 0
    fi
}

# Sets LAUNCH: python alone for one process, else torchrun.
choose_launch() {
    local gpus nodes="${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}" first port
    gpus="$(count_gpus)"
    if ((gpus > 0)); then
        export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
    fi
    local processes="${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}"
    LAUNCH=("$PYTHON" -m torch.distributed.run --nproc_per_node="$processes")
    if [[ -n "${SLURM_JOB_ID:-}" ]] && ((nodes > 1)); then
        first="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
        first="${first%%$'\n'*}" # not `| head`: that kills scontrol, and pipefail this script
        port="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
        LAUNCH+=(--nnodes="$nodes" --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$first:$port")
    elif ((processes > 1)); then
        LAUNCH+=(--standalone)
    else
        LAUNCH=("$PYTHON")
    fi
    LAUNCH+=(main_training.py)
}

# Runs the launch with its output on the terminal and appended to console.txt. A stop asked of this script is passed on.
launch() {
    local code=0 before=0 interrupted
    mkfifo "$SCRATCH/output"
    tee -ia "$RUN_DIR/console.txt" <"$SCRATCH/output" &
    local tee_pid=$!
    PYTHONUNBUFFERED=1 "${LAUNCH[@]}" "$@" >"$SCRATCH/output" 2>&1 &
    local child=$!
    trap 'interrupted=yes; kill -TERM "$child" 2>/dev/null || true' TERM INT USR1
    while true; do # a trapped signal ends a wait early
        interrupted="" before="$code" code=0
        wait "$child" || code=$?
        ((code == 127)) && code="$before" # it ended just before the signal
        [[ -z "$interrupted" ]] && break
    done
    wait "$tee_pid" || true
    trap - TERM INT USR1
    return "$code"
}

# Sets STATUS from the code of a launch and from status.json, which knows what torchrun hides; REASON is what it says.
read_status() {
    local code="$1" told=""
    REASON="see $RUN_DIR/console.txt"
    if [[ "$RUN_DIR/status.json" -nt "$SCRATCH/started" ]]; then
        told="$("$PYTHON" -c 'import json, sys
content = json.load(open(sys.argv[1]))
print(content["status"], content["reason"])' "$RUN_DIR/status.json")"
        REASON="${told#* }; $REASON"
    fi
    case "$code:${told%% *}" in
        *:resume_me) STATUS=75 ;;
        *:bad_input) STATUS=2 ;;
        0:* | 2:* | 75:*) STATUS="$code" ;;
        *) STATUS=1 ;;
    esac
}

tell_results() {
    "$PYTHON" - "$RUN_DIR" <<'PYTHON_CODE'
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
lines = folder.joinpath("metrics.jsonl").read_text().splitlines() if folder.joinpath("metrics.jsonl").is_file() else []
losses = {record["step"]: record["loss"] for record in map(json.loads, lines) if record.get("loss") is not None}
if losses:
    first, last = min(losses), max(losses)
    print(f"loss {losses[first]:.3f} at step {first}, {losses[last]:.3f} at step {last}")
PYTHON_CODE
    local python="${PYTHON#"$ROOT"/}" argument longer=(bash scripts/train.sh)
    for argument in "${USER_ARGS[@]}"; do
        [[ "$argument" == --num[_-]steps=* ]] || longer+=("$argument")
    done
    cat <<TEXT
made    $RUN_DIR/metrics.jsonl      loss, speed and memory, one JSON object a line
        $RUN_DIR/checkpoints/       what a longer run goes on from
        $RUN_DIR/console.txt        everything printed
look    $python -m fms_fsdp report "$RUN_DIR"      one page of curves; needs matplotlib
        $python -m tensorboard.main --logdir "$RUN_DIR/tensorboard"
longer  ${longer[*]} --num_steps=3000
yours   $python -m fms_fsdp prepare --input=web=FOLDER --output=data/web --tokenizer=$DATA_DIR/tokenizer.model
        bash scripts/train.sh --data_path=data/web --datasets=web --weights=1
TEXT
}

main() {
    USER_ARGS=("$@")
    # shellcheck disable=SC2119 # no extras: the flags of this script are not meant
    use_environment
    case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" main_training.py --help ;; esac
    local args=("${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${TRAIN_ARGS[@]}") own_data=""
    if given config; then
        args=() own_data=yes
    elif given data_path || given use_dummy_dataset || given dataset_builder; then
        args=("${MODEL_ARGS[@]}" "${TRAIN_ARGS[@]}") own_data=yes
    fi
    args+=("$@")
    RUN_DIR="$(find_run_folder "${args[@]}")" || exit 2
    if [[ -z "$own_data" ]]; then
        prepare_data
    fi
    choose_launch
    mkdir -p "$RUN_DIR"
    SCRATCH="$(mktemp -d)"
    trap 'rm -rf "$SCRATCH"' EXIT
    touch "$SCRATCH/started"
    local code=0
    launch "${args[@]}" || code=$?
    read_status "$code"
    case "$STATUS" in
        0) is_first_task && tell_results ;;
        2) say "bad input: $REASON" ;;
        75) say "stopped early, the same command goes on: $REASON" ;;
        *) say "failed: $REASON" ;;
    esac
    exit "$STATUS"
}

main "$@"
