"""The commands of `python -m fms_fsdp` other than training."""

from fms_fsdp.packages import check_installed

check_installed()
