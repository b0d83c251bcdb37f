"""What `python -m fms_fsdp` runs beside training."""

from fms_fsdp.errors import check_installed

check_installed()
