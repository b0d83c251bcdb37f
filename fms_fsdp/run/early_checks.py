"""Errors that flags, environment and folders decide: reported before torch is loaded, which takes seconds."""

from __future__ import annotations

from contextlib import suppress

from fms_fsdp.config import DataConfig, TrainConfig
from fms_fsdp.distributed.dims import plan_dims
from fms_fsdp.distributed.world import World
from fms_fsdp.errors import ReadFailed
from fms_fsdp.models.variants import resolve_model


def check_before_torch(cfg: TrainConfig) -> None:
    """Raises the first of some errors that planning the launch would raise, too.

    Raises:
        UserError: the model's flags, the axes or the variables of torchrun are wrong, or this node
            lacks the folder of the data.
    """
    resolve_model(cfg.model, seq_length=cfg.data.seq_length)
    plan_dims(cfg.parallel, cfg.model.name, World.from_env())
    _check_data_folder(cfg.data)


def _check_data_folder(data: DataConfig) -> None:
    if data.dataset_builder or data.use_dummy_dataset:
        return
    if "://" in data.data_path:  # an object store takes longer to ask than torch to load
        return
    from fms_fsdp.data.open_storage import open_storage

    with suppress(ReadFailed):  # reported when the ranks are connected, by one of them
        open_storage(data.data_path)
