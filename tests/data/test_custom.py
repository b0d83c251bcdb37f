"""A stream of the user's own: what it must have, and what is answered for it."""

from __future__ import annotations

from typing import Any

import pytest

from fms_fsdp.config import DataConfig
from fms_fsdp.data.custom import CustomStream, load_builder
from fms_fsdp.data.stream import Stream
from fms_fsdp.errors import UserError

SETTINGS: dict[str, Any] = {
    "seed": 1,
    "vocab_size": 100,
    "global_batch_size": 4,
    "dp_rank": 1,
    "dp_size": 2,
    "pin_memory": False,
}


class Blind:
    """Has no place to go on from."""

    def next_batch(self) -> None: ...
    def close(self) -> None: ...


def blind(section: DataConfig, **settings: Any) -> Blind:
    return Blind()


class Buggy:
    @property
    def last_step(self) -> int:
        return self.total  # type: ignore[attr-defined, no-any-return]


def build(section: DataConfig) -> Stream:
    return load_builder(section)(section, **SETTINGS)


def test_custom_stream_gets_the_other_methods() -> None:
    stream = build(DataConfig(dataset_builder="tests.data.custom_stream:build", seq_length=8))
    stream.begin_after(5)
    assert stream.next_batch().tokens_BS.shape == (2, 8)
    assert stream.load_state_dict(stream.state_dict(), 1) == [] == stream.documents(1)
    assert (stream.batch_at(1), stream.last_step) == (None, None)
    assert (stream.num_masked_rows, stream.consumption()) == (0, {})
    stream.close()


def test_bug_in_a_property_is_not_hidden() -> None:
    """The stream had no last step."""
    with pytest.raises(AttributeError, match="total"):
        _ = CustomStream(Buggy()).last_step


def test_arguments_of_the_program_are_not_taken() -> None:
    """It was a TypeError with a traceback."""
    section = DataConfig(
        dataset_builder="tests.data.custom_stream:build", data_kwargs=("stride=2", "seed=3")
    )
    with pytest.raises(UserError, match="^--data_kwargs=seed=3 must not name an argument .*rename"):
        build(section)


def test_stream_without_state_is_rejected() -> None:
    match = r"--dataset_builder \(tests.data.test_custom:blind\) .* add state_dict, load_state_dict to Blind"
    with pytest.raises(ValueError, match=match):
        build(DataConfig(dataset_builder="tests.data.test_custom:blind"))
