"""`python -m fms_fsdp import`: converts a checkpoint of upstream fms-fsdp to a Hugging Face checkpoint.

Hugging Face checkpoints need no import: training (--init_from_hf), generate and evaluate read them
in place.
"""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote

from fms_fsdp.errors import UserError
from fms_fsdp.files import check_output_is_new, write_folder
from fms_fsdp.hf.families import config_to_hf
from fms_fsdp.hf.hf_flags import ImportConfig
from fms_fsdp.hf.upstream import find_upstream_checkpoint, open_upstream_checkpoint
from fms_fsdp.hf.weights import save_weights, weight_map
from fms_fsdp.models.flops import num_params
from fms_fsdp.parallel.dtypes import DTYPES


def main(config: ImportConfig) -> None:
    """Converts into a temporary folder and renames it when it is complete; one weight is in memory at a time.

    Raises:
        UserError: the checkpoint is incomplete or of another model, or --output exists.
        OSError: the output cannot be written.
    """
    source = Path(config.path).expanduser()
    output = Path(config.output).expanduser()
    check_output_is_new(output)
    if not source.exists():
        raise UserError(f"--path ({source}) does not exist; name a checkpoint of upstream fms-fsdp")
    found = find_upstream_checkpoint(source)
    if found is None:
        rule = "is no checkpoint of upstream fms-fsdp (step_N_ckp or a .pth file)"
        raise UserError(
            f"--path ({source}) {rule}; a Hugging Face checkpoint is read in place: --init_from_hf"
        )
    checkpoint = open_upstream_checkpoint(found, config.model, config.ntk_alpha)
    model = checkpoint.config
    dtype = DTYPES[config.dtype]
    shapes = {name: weight.shape for name, weight in weight_map(model).items()}
    with write_folder(output) as partial:
        save_weights(partial, shapes, dtype, int(config.max_shard_gb * 1e9), checkpoint.read)
        content = config_to_hf(model, str(dtype).removeprefix("torch."))
        (partial / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"{output}: {num_params(model):,} parameters")
    print(f"train on with: --init_from_hf={quote(str(output))}")
