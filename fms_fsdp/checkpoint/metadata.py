"""Reads the pickle of DCP's metadata without running code that it asks for."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from fms_fsdp.distributed.torch_private import memory_formats

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata ChunkStorageMetadata TensorStorageMetadata Metadata MetadataIndex "
        "StorageMeta TensorProperties _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",
    "torch.serialization": "_get_layout",
    "torch": "Size",
}


def unpickle_metadata(content: bytes) -> Metadata:
    """Returns the metadata in the content of `.metadata`.

    Raises:
        Exception: of any type. The content is no pickle, or it names anything but DCP's own classes.
    """
    metadata = _Unpickler(io.BytesIO(content)).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds {type(metadata)}")
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.2 writes enum members so
            return _memory_format
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def _memory_format(kind: Any, name: str) -> Any:
    if kind is not memory_formats():
        raise pickle.UnpicklingError("getattr is not allowed")
    return kind[name]
