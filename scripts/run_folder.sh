#!/usr/bin/env bash
# Runs the scripts that lie in FOLDER/cron.hourly and FOLDER/cron.daily, each when its hour or day is over.
# Call it from cron or scripts/cron.slurm, as often as you like; scripts may come and go at any time.
#
#   bash scripts/run_folder.sh FOLDER
#
# A script is an executable file; names that begin with a dot are passed over. FOLDER/cron.hourly/.stamps has
# a file for each script, with the time of its last start. A script that fails is tried again after its hour
# or day. Exit status: 0, 1 if a script failed, 2 bad input.
set -euo pipefail
if [[ $# -ne 1 || ! -d "$1" ]]; then
    echo "run_folder.sh: FOLDER (${1:-}) must be a folder; usage: run_folder.sh FOLDER" >&2
    exit 2
fi
status=0
run_due() { # of the folder $1 the scripts whose last start is $2 minutes old
    local script stamp
    for script in "$1"/*; do
        [[ -f "$script" && -x "$script" ]] || continue
        stamp="$1/.stamps/${script##*/}"
        [[ ! -e "$stamp" || -n "$(find "$stamp" -mmin "+$2")" ]] || continue
        # Without a stamp it would run again at once; the other scripts run.
        if ! mkdir -p "$1/.stamps" || ! touch "$stamp"; then
            status=1
            continue
        fi
        echo "$(date '+%F %T') run_folder: $script"
        "$script" && continue
        echo "run_folder.sh: $script failed with status $?" >&2
        status=1
    done
}
run_due "$1/cron.hourly" 59
run_due "$1/cron.daily" 1439
exit "$status"
