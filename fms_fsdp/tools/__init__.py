"""The commands of `python -m fms_fsdp` other than training."""

from fms_fsdp.errors import check_installed

check_installed()
