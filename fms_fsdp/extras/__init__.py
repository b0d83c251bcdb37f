"""Parts that a run has only if it chooses them; `fms_fsdp.parts` loads each by its name."""
