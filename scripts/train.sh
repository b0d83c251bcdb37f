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
# prepares no text. Presets hold the values of the quickstart (quickstart and quickstart_text in
# fms_fsdp/config/presets). With own data for another model the script uses none of them; with --config it
# passes none of its flags either.
# Exit status: 0 finished, 2 bad input, 75 stopped early (the same command continues the run), 1 failed.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

# ---- What to train: edit here, set variables of the environment, or pass flags ----
DATA_DIR="${DATA_DIR:-data/quickstart}"               # token shards; prepare_data makes them if needed
FLAGS=(                                               # where one is empty, the preset decides
    --model_variant="${MODEL_VARIANT:-}"              # a variant: quickstart, 194m, llama3.2_1b, 7b, ...
    --seq_length="${SEQ_LENGTH:-}"                    # tokens of context
    --batch_size="${BATCH_SIZE:-}"                    # sequences per device and accumulation step
    --num_steps="${NUM_STEPS:-}"                      # optimizer steps in total
    --learning_rate="${LEARNING_RATE:-}"              # peak, after the warm-up
    --report_interval="${REPORT_INTERVAL:-}"          # steps between report lines
    --checkpoint_interval="${CHECKPOINT_INTERVAL:-}"  # steps between checkpoints
    # Only with the quickstart's text; the last two also with your own data that have what they need.
    --data_path="$DATA_DIR"                           # folder with one subfolder per source
    --datasets="${DATASETS:-}"                        # the sources
    --weights="${WEIGHTS:-}"                          # their shares of the tokens
    --eval_interval="${EVAL_INTERVAL:-}"              # steps between validations on held-out text
    --sample_interval="${SAMPLE_INTERVAL:-}"          # steps between texts that the model writes
)
# ---- Where to train: the script detects it, or variables of the environment say it ----
# NPROC_PER_NODE   processes on this machine (default: one per GPU of the job or machine; without GPUs one
#                  process that uses all cores)
# NNODES, NODE_RANK, MASTER_ADDR   number of nodes, this node's number from 0, name of the first node
#                  (default: from SLURM). NNODES=MIN:MAX trains on as many nodes as there are, as nodes fail
#                  and come back; NODE_RANK then only says, with 0, which node hosts the rendezvous
# MASTER_PORT      port of the rendezvous between nodes (default: from the number of the SLURM job)
# RDZV_CONF        settings of torchrun's rendezvous, such as last_call_timeout=60: the seconds for which
#                  MIN:MAX waits for more nodes (default: 30)
# LOCAL_ADDR       address of this node for the others (default: its name)
# MAX_RESTARTS     how often torchrun starts failed workers again, from the last checkpoint (default: 0, with
#                  MIN:MAX 100)
# RUN_NAME         name of the run, if no flag and no file of --config names it
# PREPARE_ONLY=1   make environment and data, print the run directory and end: for a login node, if the other
#                  nodes have no internet

# shellcheck disable=SC2329 # called through under_lock
prepare_data() {
    local prose="data/quickstart_text/prose.jsonl" inputs skip
    [[ -f "$DATA_DIR/meta/counts.csv" ]] && return
    say "prepares text of this machine in $DATA_DIR; this happens once and takes less than a minute"
    inputs="$("$PYTHON" scripts/quickstart_text.py "$prose")"
    skip='site-packages/*,dist-packages/*,test/*,tests/*,*/test/*,*/tests/*,idlelib/*,lib2to3/*'
    # These files hold tables, not text.
    skip+=',_vendor/*,*/_vendor/*,encodings/*,html/entities.py,locale.py,*_pb2*.py,*_mappings.py'
    skip+=',_sysconfigdata*,pydoc_data/*,stringprep.py,*_casefix.py,*_char_codes.py,*opcode*.py'
    skip+=',_compat_pickle.py'
    "$PYTHON" -m fms_fsdp prepare --input="$inputs" --output="$DATA_DIR" --include='*.py,*.jsonl' \
        --exclude="$skip" --train_tokenizer --vocab_size=1024 --tokenizer_sample_mb=16 --shard_tokens=1M \
        --split=98,2 --dedup
}

count_gpus() {
    if [[ -n "${SLURM_GPUS_ON_NODE:-}" ]]; then
        echo "$SLURM_GPUS_ON_NODE"
    elif command -v nvidia-smi >/dev/null || [[ -e /dev/kfd ]]; then
        "$PYTHON" -c 'import torch; print(torch.cuda.device_count())'
    else
        echo 0
    fi
}

# Sets LAUNCH: python alone for one process, otherwise torchrun, whose rendezvous is on the first node.
choose_launch() {
    local gpus restarts="${MAX_RESTARTS:-0}" is_host=0
    # In a SLURM step, SLURM knows the number of nodes; the start-up file of a shell may have set another
    # NNODES.
    local nodes="${SLURM_STEP_NUM_NODES:-$MOST_NODES}" first="${MASTER_ADDR:-}"
    if [[ -n "$ELASTIC" ]]; then
        nodes="$MOST_NODES" restarts="${MAX_RESTARTS:-100}"
    fi
    # Rank 0 of each attempt opens a store of its own. The store of torchrun's agent keeps the keys of the last
    # attempt, and an agent that has been in a round does not tell newcomers of it (2.13).
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    gpus="$(count_gpus)"
    if ((gpus > 0)); then
        export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
    fi
    local processes="${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}"
    # torchrun waits 10 minutes for a save after SIGTERM (its default is 30 s; older torch ignores the
    # variable).
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
    LAUNCH=("$PYTHON" -m torch.distributed.run --nproc_per_node="$processes" --max_restarts="$restarts"
        --signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    if ((nodes > 1)) || [[ -n "$ELASTIC" ]]; then
        if [[ -n "${SLURM_STEP_NODELIST:-}" ]]; then
            first="$(scontrol show hostnames "$SLURM_STEP_NODELIST")"
            first="${first%%$'\n'*}" # `| head` would kill scontrol, and pipefail would then end this script
        fi
        is_first_node && is_host=1
        [[ -z "$ELASTIC" ]] || nodes="$LEAST_NODES:$MOST_NODES"
        # The port is below those that Linux gives to programs that ask for any port.
        RENDEZVOUS="$first:${MASTER_PORT:-$((12000 + ${SLURM_JOB_ID:-0} % 20000))}"
        LAUNCH+=(--nnodes="$nodes" --rdzv_id="${SLURM_JOB_ID:-run}" --rdzv_backend=c10d
            --rdzv_endpoint="$RENDEZVOUS"
            --rdzv_conf="is_host=$is_host,read_timeout=600${RDZV_CONF:+,$RDZV_CONF}")
        [[ -z "${LOCAL_ADDR:-}" ]] || LAUNCH+=(--local-addr="$LOCAL_ADDR")
    elif ((processes > 1 || restarts > 0)); then
        LAUNCH+=(--standalone --local-addr=127.0.0.1) # the name of a machine need not resolve
    else
        LAUNCH=("$PYTHON")
    fi
    LAUNCH+=(main_training.py)
}

# Ends the script, before any work, if a variable that must be a number is not one. Without SLURM three
# variables describe several nodes, and the script also ends if one of them is missing.
check_environment() {
    local name
    read_nodes
    for name in NPROC_PER_NODE SLURM_STEP_NUM_NODES; do check_number "$name" "" 1 999999; done
    for name in SLURM_GPUS_ON_NODE SLURM_JOB_ID SLURM_PROCID; do check_number "$name" "" 0 999999999; done
    check_number MAX_RESTARTS "" 0 999999
    check_number MASTER_PORT "" 1 65535
    local is_missing=""
    if [[ -n "$ELASTIC" ]]; then
        check_number NODE_RANK "" 0 999999
        NODE_RANK="${NODE_RANK:-1}"
    elif [[ -z "${SLURM_PROCID:-}" ]]; then
        check_number NODE_RANK "" 0 "$((MOST_NODES - 1))"
    fi
    [[ -n "${NODE_RANK:-}" && -n "${MASTER_ADDR:-}" ]] || is_missing=yes
    if [[ -z "${SLURM_JOB_ID:-}" && -n "$is_missing" ]] &&
        { ((MOST_NODES > 1)) || [[ -n "$ELASTIC" ]]; }; then
        say "error: NNODES ($NNODES) needs NODE_RANK, this node's number from 0, and MASTER_ADDR, the name" \
            "of the first node; set both"
        exit 2
    fi
}

# The launch writes into a file of its own whether it owns the run directory, and how it ended.
outcome() { sed -n "s/.*\"$1\": \"\{0,1\}\([^\",}]*\).*/\1/p" "$SCRATCH/outcome.json" 2>/dev/null || true; }
claimed() { [[ "$(outcome claimed)" == true ]]; }

# Passes a request to stop on to the launch, once: SLURM and terminals signal whole process groups, several
# times. If the launch owns the run directory, torchrun gets the request by the file STOP, because after a signal
# the other nodes would wait for it. Before that a signal ends the launch at once. A second Ctrl-C is passed
# on as a signal.
# shellcheck disable=SC2329 # called by traps
pass_on() {
    interrupted=yes
    if [[ -n "$stopping" ]]; then
        [[ "$1" != INT ]] || kill -INT "$child" 2>/dev/null || true
    elif [[ "${LAUNCH[*]}" == *torch.distributed.run* ]] && claimed; then
        # It touches the file again and again, because a launch removes a file that is older than itself.
        (
            trap '' TERM INT HUP USR1
            while kill -0 "$child"; do touch "$RUN_DIR/STOP" && sleep 1; done
            rm -f "$RUN_DIR/STOP"
        ) >/dev/null 2>&1 &
    else
        kill -TERM "$child" 2>/dev/null || true
    fi
    stopping=yes
}

# Appends the launch's output to console.txt, from its first line on and without colours, as soon as the
# launch owns the run directory.
copy_to_console() {
    until claimed; do
        kill -0 "$1" 2>/dev/null || break
        sleep 0.2
    done
    ! claimed || tail -n +1 -s 0.1 -f --pid="$1" "$SCRATCH/console.txt" |
        sed -u 's/\x1b\[[0-9;]*m//g' >>"$RUN_DIR/console.txt"
}

# Runs the launch with its output on the terminal and in console.txt. A signal to the process group reaches
# neither the launch, which has a session of its own, nor tee, which ignores it.
launch() {
    local code=0 before=0 interrupted="" stopping=""
    mkfifo "$SCRATCH/output"
    touch "$SCRATCH/console.txt"
    (
        trap '' TERM INT HUP USR1
        exec tee -a --output-error=warn-nopipe "$SCRATCH/console.txt" <"$SCRATCH/output"
    ) &
    (trap '' TERM INT HUP USR1 && copy_to_console "$!") &
    local session=() terminal=""
    command -v setsid >/dev/null && session=(setsid)
    # The launch shows its live line on the terminal itself, next to the pipe.
    [[ ! -t 1 ]] || terminal="$(readlink "/proc/$$/fd/1")"
    LAUNCH_TERMINAL="$terminal" LAUNCH_OUTCOME="$SCRATCH/outcome.json" PYTHONUNBUFFERED=1 \
        "${session[@]}" "${LAUNCH[@]}" "$@" \
        >"$SCRATCH/output" 2>&1 &
    local child=$!
    trap 'pass_on TERM' TERM HUP USR1
    trap 'pass_on INT' INT
    while true; do # a trapped signal ends a wait early
        interrupted="" before="$code" code=0
        wait "$child" || code=$?
        ((code == 127)) && code="$before" # the launch ended just before the signal
        [[ -z "$interrupted" ]] && break
    done
    wait || true # for tee, and until the file STOP is removed
    trap - TERM INT HUP USR1
    return "$code"
}

# Sets STATUS from the exit code of a launch and from the outcome that it wrote, because torchrun replaces the
# exit codes of its workers. Sets REASON from the outcome.
read_outcome() {
    local code="$1" written read_reason='import json, sys; print(json.load(open(sys.argv[1]))["reason"])'
    written="$(outcome status)"
    REASON="$("$PYTHON" -c "$read_reason" "$SCRATCH/outcome.json" 2>/dev/null || true)"
    ! claimed || REASON="${REASON:+$REASON; }see $RUN_DIR/console.txt"
    if [[ -n "$ELASTIC" && "$code" != 0 ]] && grep -q RendezvousConnectionError "$SCRATCH/console.txt" &&
        ! grep -q ChildFailedError "$SCRATCH/console.txt"; then
        written=resume_me REASON="the node that hosts the rendezvous ($RENDEZVOUS) is gone"
    fi
    case "$code:$written" in
        *:resume_me) STATUS=75 ;;
        *:bad_input) STATUS=2 ;;
        0:* | 2:* | 75:*) STATUS="$code" ;;
        *) STATUS=1 ;;
    esac
}

# Prints the command of a longer run: this one with another length, over which the learning rate falls.
longer_command() {
    local argument length="" longer=(bash scripts/train.sh)
    for argument in "${USER_ARGS[@]}"; do
        if [[ "$argument" != -* ]]; then
            [[ -n "$length" ]] || longer+=("$(printf '%q' "$argument")")
            continue
        fi
        length=""
        case "$argument" in
            *num[_-]steps | *num[_-]tokens | *num[_-]samples | *lr[_-]decay) length=yes ;; # then its value
            *num[_-]steps=* | *num[_-]tokens=* | *num[_-]samples=* | *lr[_-]decay=*) ;;
            *) longer+=("$(printf '%q' "$argument")") ;;
        esac
    done
    [[ "$REASON" =~ [0-9]+ ]] || BASH_REMATCH=(1000) # "finished 900 steps"
    length="$((3 * BASH_REMATCH[0]))"
    longer+=("--num_steps=$length")
    [[ "${USER_ARGS[*]}" == *lr[_-]schedule* ]] || longer+=("--lr_decay=$length")
    echo "${longer[*]}"
}

# Prints the last text that the run has written, if it writes samples. The page shows the text too.
tell_sample() {
    [[ -f "$RUN_DIR/samples.txt" ]] || return 0
    awk '/^--- step [0-9]+ ---$/ { text = ""; next } { text = text $0 "\n" } END { printf "%s", text }' \
        "$RUN_DIR/samples.txt" | sed '1s/^/sample  /; 2,$s/^/        /'
}

# Enters the seconds since the last part of the script ended under the name $1, if there are any.
part_done() {
    local now="$SECONDS"
    ((now == PART_BEGAN)) || PARTS+="${PARTS:+, }$1 $((now - PART_BEGAN)) s"
    PART_BEGAN="$now"
}

# Prints the results of a finished run, a sample of its text, the address of its page, which takes at most 8
# seconds, how long each part of the script took, and what to do next.
tell_results() {
    "$PYTHON" - "$RUN_DIR/metrics.jsonl" <<'PYTHON_CODE' || say "note: $RUN_DIR/metrics.jsonl cannot be read"
import json
import sys

with open(sys.argv[1]) as file:
    last = {key: value for line in file for key, value in json.loads(line).items() if value is not None}
parts = [f"loss {last['loss_mean']:.4f}, the mean since the last report"] if "loss_mean" in last else []
for name in ("validation", "test"):
    key = name.replace("validation", "eval")
    if f"{key}/loss" in last:
        bits = last.get(f"{key}/bits_per_byte")
        bits = "" if bits is None else f" ({bits:.3f} bits per byte)"
        parts.append(f"{name} loss {last[f'{key}/loss']:.4f}{bits}")
print("result ", "; ".join(parts))
PYTHON_CODE
    tell_sample
    local page="$RUN_DIR/report.html"
    if timeout 60 "$PYTHON" -m fms_fsdp report "$RUN_DIR" >"$SCRATCH/report" 2>&1; then
        echo "report  file://$(realpath "$page")"
    else
        echo "it took more than 60 s" >>"$SCRATCH/report"
        say "note: the page of curves could not be made: $(head -n 1 "$SCRATCH/report")"
    fi
    part_done "page"
    echo "time    ${PARTS:+$PARTS: }$SECONDS s in total"
    echo "folder  $RUN_DIR: metrics.jsonl, checkpoints, log.txt, console.txt"
    if [[ -z "${VIRTUAL_ENV:-}" && "$PYTHON" == "$ROOT/.venv/bin/python" ]]; then
        echo "next    source .venv/bin/activate"
    fi
    cat <<TEXT
curves  tensorboard --logdir $(printf '%q' "$RUN_DIR/tensorboard")
longer  $(longer_command)
yours   python -m fms_fsdp prepare --input=docs --output=data/docs --split=98,2 \\
            --tokenizer=$(printf '%q' "$DATA_DIR/tokenizer.model")
        bash scripts/train.sh --data_path=data/docs --datasets=docs     (replace docs with your folder)
TEXT
}

main() {
    USER_ARGS=("$@") PARTS="" PART_BEGAN=0 SECONDS=0
    check_environment
    # shellcheck disable=SC2119 # it needs no extras; the arguments of this script are flags
    use_environment
    part_done "environment"
    local question
    for question in "$@"; do
        case "$question" in
        --help | --help=* | -h | --version | --list[_-]variants)
            exec "$PYTHON" main_training.py "$question"
            ;;
        esac
    done
    local found args
    found="$(mktemp)"
    "$PYTHON" -m scripts.quickstart "${FLAGS[@]}" -- "$@" >"$found" || { rm -f "$found"; exit 2; }
    mapfile -d '' -t args <"$found"
    rm -f "$found"
    RUN_DIR="${args[0]}"
    local reads_text="${args[1]}"
    args=("${args[@]:2}")
    if [[ -n "$reads_text" && ! -f "$DATA_DIR/meta/counts.csv" ]]; then
        under_lock prepare_data >&2
    fi
    part_done "text"
    if [[ -n "${PREPARE_ONLY:-}" ]]; then
        echo "$RUN_DIR"
        exit
    fi
    choose_launch
    SCRATCH="$(mktemp -d)"
    trap 'rm -rf "$SCRATCH"' EXIT
    local code=0
    launch "${args[@]}" || code=$?
    part_done "training"
    read_outcome "$code"
    case "$STATUS" in
        0) is_first_node && tell_results ;;
        2) say "bad input: $REASON" ;;
        75) say "stopped early, the same command continues the run: $REASON" ;;
        *) say "failed: $REASON" ;;
    esac
    exit "$STATUS"
}

main "$@"
