"""How a run is refused, or ends before its time: errors whose text is for the user, one line each. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class BadInput(Exception):
    """What the user gave cannot be used; the text is one line: name (value) rule; remedy.

    `on_one_rank`: only this rank met it (a shard that cannot be read), so this rank must speak. `data_step`: the step
    whose data are wrong; a further attempt looks at them first.
    """

    def __init__(self, text: str, *, on_one_rank: bool = False, data_step: int | None = None) -> None:
        super().__init__(" ".join(text.split()))
        self.on_one_rank, self.data_step = on_one_rank, data_step


class RunFailed(Exception):
    """The run cannot go on for a reason that is no fault of the code: told in one line, exit status 1.

    `on_one_rank`: only this rank met it (out of memory), so this rank must speak.
    """

    def __init__(self, text: str, *, on_one_rank: bool = False) -> None:
        super().__init__(text)
        self.on_one_rank = on_one_rank


@contextmanager
def checking_input() -> Iterator[None]:
    """Inside, an error about values, files or permissions is the user's to mend: it becomes BadInput, its text one line."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise BadInput(str(error)) from error
