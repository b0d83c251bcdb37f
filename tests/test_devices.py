"""Which devices the tests use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.cli import ROOT
from tests.gpu.launch import with_gpu


def test_no_test_sees_a_gpu_and_those_that_need_one_are_told_which() -> None:
    """A run of two ranks would be refused on a machine with one, and golden values are of the CPU."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()
    assert with_gpu()["CUDA_VISIBLE_DEVICES"] == os.environ["GPUS_OF_TESTS"].partition(",")[0]


@pytest.mark.parametrize(
    ("given", "first"), [(None, "0"), ("3,1", "3"), ("GPU-8f,GPU-1a", "GPU-8f")]
)
def test_the_gpu_of_the_tests_is_the_first_that_the_user_gave(
    given: str | None, first: str
) -> None:
    names = ("CUDA_VISIBLE_DEVICES", "GPUS_OF_TESTS")
    environment = {name: text for name, text in os.environ.items() if name not in names}
    environment |= {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    code = "import tests.conftest, tests.gpu.launch as gpu; print(gpu.with_gpu()['CUDA_VISIBLE_DEVICES'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == first
