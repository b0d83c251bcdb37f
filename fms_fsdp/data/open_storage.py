"""The storage of an address: a folder, or an object store."""

from __future__ import annotations

from fms_fsdp.data.object_store import ObjectStore
from fms_fsdp.data.storage import Listing, Storage


def open_storage(data_path: str, listing: Listing | None = None) -> Storage:
    """Returns the files of a folder, or of an address such as s3://BUCKET/FOLDER.

    Raises:
        UserError: the folder does not exist.
        ReadFailed: a local storage does not answer.
    """
    if "://" not in data_path:
        return Storage(data_path, listing)
    return ObjectStore(data_path, listing)
