"""How threads wait, by what shares the cores."""

from __future__ import annotations

import os

import pytest

from fms_fsdp.cpu_threads import set_thread_waiting


@pytest.mark.parametrize(
    ("given", "spins"),
    [
        ({}, True),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"LOCAL_WORLD_SIZE": "2"}, False),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "8"}, False),
        ({"OMP_NUM_THREADS": "zero"}, True),
    ],
)
def test_threads_spin_only_where_each_has_a_core(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], spins: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "environ", dict(given))
    set_thread_waiting()
    chosen = {name: text for name, text in os.environ.items() if name not in given}
    assert chosen == ({"GOMP_SPINCOUNT": "3000"} if spins else {"OMP_WAIT_POLICY": "PASSIVE"})


@pytest.mark.parametrize("given", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    set_thread_waiting()
    assert os.environ == given
