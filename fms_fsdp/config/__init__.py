"""The configuration of a run: frozen section dataclasses, one flat name space of flags.

    TrainConfig ── model · data · parallel · optim · training · eval · checkpoint · log · profiler

Every field is declared with `flag(default, help, …)`, which is the only source of `--help` and of docs/configuration.md. A name is unique over
all sections, so `--seq_length` means `config.data.seq_length`. `None` means "derived": from the variant, the data, the world or the hardware.
Checks that need a single section run when it is made; `TrainConfig` adds those across sections. Imports nothing but the standard library.
"""

from fms_fsdp.config.flag import flag
from fms_fsdp.config.surroundings import CheckpointConfig, EvalConfig, LogConfig, ProfilerConfig
from fms_fsdp.config.training import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainingConfig,
    parse_selective_checkpointing,
)
from fms_fsdp.config.whole import (
    BatchPlan,
    TrainConfig,
    as_dict,
    from_dict,
    keep_global_batch,
    non_defaults,
    resolve_batch,
)

__all__ = [
    "BatchPlan",
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "ProfilerConfig",
    "TrainConfig",
    "TrainingConfig",
    "as_dict",
    "flag",
    "from_dict",
    "keep_global_batch",
    "non_defaults",
    "parse_selective_checkpointing",
    "resolve_batch",
]
