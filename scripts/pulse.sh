#!/usr/bin/env bash
# Prints the state of a run: TRAINING, WAITING, FINISHED, STALLED or GONE, and adds the line to the run's
# console.txt if that can be written. Call it from cron or by hand.
#
#   bash scripts/pulse.sh RUN_FOLDER [--job JOBID] [--stalled-after-min N] [--alert 'COMMAND']
#
# JOBID is the SLURM job (default: the one that train.slurm wrote into the run directory, if any). N is the
# number of minutes without a report after which the run counts as stalled (default 30; it must be more than
# the time of --report_interval steps). COMMAND runs if the run is stalled or gone; it gets the line as $1:
#   --alert 'mail -s "$1" me@example.org </dev/null'
# Exit status: 0 training, waiting or finished, 1 stalled, 2 bad input, 3 gone, 4 SLURM does not answer.
set -euo pipefail

usage() {
    local flags="[--job JOBID] [--stalled-after-min N] [--alert 'COMMAND']"
    echo "pulse.sh: $*; usage: pulse.sh RUN_FOLDER $flags" >&2
    exit 2
}

folder="" job="" minutes=30 alert=""
while (($#)); do
    case "$1" in
        --job | --stalled-after-min | --alert)
            (($# > 1)) || usage "$1 needs a value"
            case "$1" in --job) job="$2" ;; --alert) alert="$2" ;; *) minutes="$2" ;; esac
            shift 2
            ;;
        -*) usage "$1 is not a flag" ;;
        *) folder="$1" && shift ;;
    esac
done
[[ -d "$folder" ]] || usage "RUN_FOLDER ($folder) must be the folder of a run"
[[ "$minutes" =~ ^[0-9]{1,9}$ ]] ||
    usage "--stalled-after-min ($(printf '%.100q' "$minutes")) must be a whole number of minutes"
minutes="$((10#$minutes))"
if [[ -z "$job" ]]; then
    job="$(cat "$folder/slurm_job" 2>/dev/null)" || true
fi

# Prints the value of a key of status.json: a number, or a text up to the quote that ends it. It resolves
# escapes and leaves out control characters.
status_value() {
    local found pattern="s/.*\"$1\": (\"(([^\"\\]|\\\\.)*)\"|([0-9]+)).*/\2\4/p"
    found="$(sed -nE "$pattern" "$folder/status.json" 2>/dev/null | tail -n 1)" || true
    # printf resolves the other escapes.
    found="$(printf '%s' "$found" | sed -E 's:(\\\\)|\\(["/]):\1\2:g')"
    printf '%b' "$found" | LC_ALL=C tr -d '\000-\037\177'
}

# Sets BODY: running, waiting or gone; and WHY.
find_process() {
    local listed
    if [[ -z "$job" ]]; then # a launch holds a lock while it runs
        BODY=gone WHY="no process writes there"
        if [[ -f "$folder/.lock" ]] && ! flock -sn "$folder/.lock" true; then BODY=running; fi
    elif listed="$(timeout 60 squeue -h -j "$job" -o '%T %r' 2>&1)"; then
        case "$listed" in
            *RUNNING* | *SIGNALING* | *COMPLETING*) BODY=running ;;
            "") BODY=gone WHY="job $job is not in the queue" ;;
            *) BODY=waiting WHY="job $job: ${listed%%$'\n'*}" ;;
        esac
    elif [[ "$listed" == *"Invalid job id"* ]]; then
        BODY=gone WHY="job $job is not in the queue"
    else
        BODY=unknown WHY="${listed%%$'\n'*}"
        WHY="${WHY:-squeue does not answer within 60 s}"
    fi
}

signs=("$folder"/{metrics.jsonl,status.json,slurm_job})
newest="$(stat -c %Y "${signs[@]}" 2>/dev/null | sort -n | tail -n 1 || true)"
age=$((($(date +%s) - ${newest:-$(stat -c %Y "$folder")}) / 60))
# No here-strings: bash keeps long ones in a temporary file, and the disk may be full.
step="$(tail -n 100 "$folder/metrics.jsonl" 2>/dev/null | sed -n 's/.*"step": \([0-9]*\).*/\1/p' | tail -n 1)" ||
    true
find_process
code=0
case "$(status_value status):$BODY" in
    finished:*) line="FINISHED step $(status_value step)" ;;
    *:unknown) line="UNKNOWN $WHY" code=4 ;;
    *:waiting) line="WAITING $WHY" ;;
    *:gone) line="GONE $WHY; status $(status_value status): $(status_value reason)" code=3 ;;
    *)
        line=TRAINING
        ((age < minutes)) || { line=STALLED && code=1; }
        line+=" step ${step:-0}, last sign $age min ago"
        ;;
esac
line="$(date '+%F %T') pulse: $folder $line"
# The alert comes first: a full disk, a folder of another user or a closed output must not prevent it.
if [[ -n "$alert" ]] && ((code == 1 || code == 3)); then
    bash -c "$alert" pulse "$line" || echo "pulse.sh: --alert ($alert) failed" >&2 || true
fi
trap '' PIPE # a closed output does not change the exit status
echo "$line" 2>/dev/null || true
# The outer redirection also hides the shell's own message, if the file cannot be opened.
{ echo "$line" >>"$folder/console.txt"; } 2>/dev/null ||
    echo "pulse.sh: note: $folder/console.txt cannot be written" >&2 || true
exit "$code"
