"""The flags of `export` and `import`. Loads no torch: `--help` and wrong flags are answered at once."""

from __future__ import annotations

from dataclasses import dataclass

from fms_fsdp.config import NUM_BYTES, ModelConfig, flag
from fms_fsdp.errors import UserError


@dataclass(frozen=True)
class ExportConfig:
    """Which checkpoint to export, and how to write it."""

    path: str = flag(
        "",
        "run, checkpoint folder (its newest checkpoint) or checkpoint",
        positional=True,
        form="path",
        required=True,
    )
    step: int | None = flag(None, "step of the checkpoint", min=1)
    output: str = flag("", "folder to create", form="path", required=True)
    dtype: str = flag("bf16", "dtype of the weights", choices=tuple(NUM_BYTES))
    max_shard_gb: float = flag(5.0, "maximum size of a weight file in 10^9 bytes", above=0)

    def __post_init__(self) -> None:
        if not self.output:
            raise UserError("--output is missing; name the folder to create")


@dataclass(frozen=True)
class ImportConfig:
    """Which checkpoint to import, and into which folder; the model flags describe its model."""

    path: str = flag(
        "",
        "checkpoint of upstream fms-fsdp: step_N_ckp, a .pth file or a folder of these",
        form="path",
        required=True,
    )
    output: str = flag("", "Hugging Face checkpoint to create", form="path", required=True)
    ntk_alpha: int = flag(1, "factor of upstream's NTK scaling of RoPE; 1 is none", min=1)
    dtype: str = flag("fp32", "dtype of the weights", choices=tuple(NUM_BYTES))
    max_shard_gb: float = flag(5.0, "maximum size of a weight file in 10^9 bytes", above=0)
    model: ModelConfig = ModelConfig()

    def __post_init__(self) -> None:
        for name in ("path", "output"):
            if not getattr(self, name):
                raise UserError(f"--{name} is missing; name the folder")
        if self.model.init_from_hf or self.model.hf_config:
            raise UserError("--init_from_hf and --hf_config are flags of training; use --path")
