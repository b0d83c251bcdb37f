"""The configuration of a run: frozen section dataclasses with one flat namespace of flags.

`--seq_length` is `config.data.seq_length`: a name is unique over all sections. `None` means derived
at startup: from the variant, the data, the world or the hardware. Standard library and fire only.
"""

from fms_fsdp.config.batch_plan import BatchPlan as BatchPlan
from fms_fsdp.config.batch_plan import plan_batch as plan_batch
from fms_fsdp.config.checkpoint import CheckpointConfig as CheckpointConfig
from fms_fsdp.config.data import DataConfig as DataConfig
from fms_fsdp.config.evaluation import EvalConfig as EvalConfig
from fms_fsdp.config.flag import flag as flag
from fms_fsdp.config.flag import flag_table as flag_table
from fms_fsdp.config.log import LogConfig as LogConfig
from fms_fsdp.config.log import ProfilerConfig as ProfilerConfig
from fms_fsdp.config.model import ModelConfig as ModelConfig
from fms_fsdp.config.optim import OptimConfig as OptimConfig
from fms_fsdp.config.parallel import ParallelConfig as ParallelConfig
from fms_fsdp.config.precision import BF16 as BF16
from fms_fsdp.config.precision import FP32 as FP32
from fms_fsdp.config.precision import NUM_BYTES as NUM_BYTES
from fms_fsdp.config.precision import Precision as Precision
from fms_fsdp.config.precision import PrecisionConfig as PrecisionConfig
from fms_fsdp.config.train_config import TrainConfig as TrainConfig
from fms_fsdp.config.train_config import as_dict as as_dict
from fms_fsdp.config.train_config import from_dict as from_dict
from fms_fsdp.config.training import TrainingConfig as TrainingConfig
