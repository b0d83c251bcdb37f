#!/usr/bin/env bash
# Tells how a run is: TRAINING, WAITING, FINISHED, STALLED or GONE. Adds the line to the run's console.txt. For cron, or by hand.
#
#   bash scripts/pulse.sh RUN_FOLDER [--job JOBID] [--stalled-after-min N] [--alert 'COMMAND']
#
# JOBID: the SLURM job (default: the one that train.slurm noted in the run folder; none: a run without SLURM). N: minutes without a report until the
# run counts as stalled (default 30; more than --report_interval steps take). COMMAND runs when it is stalled or gone; the line is its $1:
#   --alert 'mail -s "$1" me@example.org </dev/null'
# Exit status: 0 training, waiting or finished, 1 stalled, 2 bad input, 3 gone, 4 SLURM does not answer.
set -euo pipefail

usage() { echo "pulse.sh: $*; usage: pulse.sh RUN_FOLDER [--job JOBID] [--stalled-after-min N] [--alert 'COMMAND']" >&2; exit 2; }

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
[[ "$minutes" =~ ^[0-9]{1,9}$ ]] || usage "--stalled-after-min ($(printf '%.100q' "$minutes")) must be a whole number of minutes"
minutes="$((10#$minutes))"
[[ -n "$job" || ! -f "$folder/slurm_job" ]] || job="$(<"$folder/slurm_job")"

# The value of a key of status.json: a number, or a text up to the quote that ends it; escapes are read, control characters left out.
told() {
    local found
    found="$(sed -nE "s/.*\"$1\": (\"(([^\"\\]|\\\\.)*)\"|([0-9]+)).*/\2\4/p" "$folder/status.json" 2>/dev/null | tail -n 1)" || true
    found="$(sed -E 's:(\\\\)|\\(["/]):\1\2:g' <<<"$found")" # printf reads the other escapes
    printf '%b' "$found" | LC_ALL=C tr -d '\000-\037\177'
}

# Sets BODY: running, waiting or gone; and WHY.
find_process() {
    local listed
    if [[ -z "$job" ]]; then # the process holds a lock as long as it lives
        BODY=gone WHY="no process writes there"
        if [[ -f "$folder/.lock" ]] && ! flock -sn "$folder/.lock" true; then BODY=running; fi
    elif listed="$(squeue -h -j "$job" -o '%T %r' 2>&1)"; then
        case "$listed" in
            *RUNNING* | *COMPLETING*) BODY=running ;;
            "") BODY=gone WHY="job $job is not in the queue" ;;
            *) BODY=waiting WHY="job $job: ${listed%%$'\n'*}" ;;
        esac
    elif [[ "$listed" == *"Invalid job id"* ]]; then
        BODY=gone WHY="job $job is not in the queue"
    else
        BODY=unknown WHY="${listed%%$'\n'*}"
    fi
}

newest="$(stat -c %Y "$folder"/{metrics.jsonl,status.json,slurm_job} 2>/dev/null | sort -n | tail -n 1 || true)"
age=$((($(date +%s) - ${newest:-$(stat -c %Y "$folder")}) / 60))
step="$(tail -n 100 "$folder/metrics.jsonl" 2>/dev/null | sed -n 's/.*"step": \([0-9]*\).*/\1/p' | tail -n 1 || true)"
find_process
code=0
case "$(told status):$BODY" in
    finished:*) line="FINISHED step $(told step)" ;;
    *:unknown) line="UNKNOWN $WHY" code=4 ;;
    *:waiting) line="WAITING $WHY" ;;
    *:gone) line="GONE $WHY; status $(told status): $(told reason)" code=3 ;;
    *)
        line=TRAINING
        ((age < minutes)) || { line=STALLED && code=1; }
        line+=" step ${step:-0}, last sign $age min ago"
        ;;
esac
line="$(date '+%F %T') pulse: $folder $line"
echo "$line" | tee -a "$folder/console.txt"
if [[ -n "$alert" ]] && ((code == 1 || code == 3)); then
    bash -c "$alert" pulse "$line" || echo "pulse.sh: --alert ($alert) failed" >&2
fi
exit "$code"
