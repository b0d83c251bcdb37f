"""Names of files that were read from other files, which anyone may have written.

Invariant: such a name is used below its own folder or not at all; to open it never waits, and opens a regular
file. Links on the disk are followed, because the user made them. Standard library only.
"""

from __future__ import annotations

import os
import re
import stat

from fms_fsdp.errors import StorageError, UserError

# ASCII and Latin-1 controls, lone surrogates, the two separators that end a line
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")


def safe_name(name: object, told_by: str, *, folders: bool = False) -> str:
    """Returns a name from the file `told_by`, if the name leads below a folder. `folders`: the name may hold
    "/".

    Raises:
        UserError: it does not; the line names `told_by`.
    """
    if not isinstance(name, str) or not name:
        rule = "must be a text that is not empty"
    elif _UNPRINTABLE.search(name):
        rule = "must hold no control character"
    elif name.startswith("/") or (not folders and "/" in name):
        rule = "must be a relative path" if folders else "must be a bare name without '/'"
    elif ".." in name.split("/") or name == ".":
        rule = "must not lead out of the folder"
    else:
        return name
    raise UserError(
        f"{told_by} names a file ({shown_name(name)}) that {rule}; correct or remove the entry"
    )


def has_control_character(text: str) -> bool:
    """Says whether a text can break a line of a log or move the cursor of a terminal."""
    return _UNPRINTABLE.search(text) is not None


def shown_name(name: object) -> str:
    """Returns a name of any origin as one short line of ASCII."""
    text = ascii(name)
    return text if len(text) <= 80 else f"{text[:76]}…{text[-1]}"


def open_regular(path: str | os.PathLike[str]) -> int:
    """Returns a descriptor to read a regular file; a pipe or a device is refused at once.

    Raises:
        OSError: it is no regular file, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StorageError(f"{os.fspath(path)} must be a regular file; remove what stands there")
    return descriptor
