"""Bounds: memory, open files, time to any step."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.corpora import write_corpus

MEASURE = """
import resource, sys
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.data.stream import build_stream
from fms_fsdp.config import DataConfig
import pyarrow.ipc
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
section = DataConfig(data_path=sys.argv[1], seq_length=1024, sep_token=3)
corpus, sizes = open_corpus(section), dict(global_batch_size=8, dp_rank=0, dp_size=1)
stream = build_stream(section, corpus, seed=1, vocab_size=5000, **sizes)
stream.next_batch()
before = resident()
for _ in range(int(sys.argv[2])):
    stream.next_batch()
import os
print(resident() - before, len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["lists", "scalars"])
def test_memory_and_open_files_are_bounded(tmp_path: Path, layout: str) -> None:
    files = write_corpus(tmp_path, {"web": [2500] * 300}, layout=layout)
    command = [sys.executable, "-c", MEASURE, str(files.root), "200"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    mebibytes, open_files = ended.stdout.split()
    assert float(mebibytes) < 40 and int(open_files) <= 64 + 16


def test_any_step_is_reached_in_constant_time(tmp_path: Path) -> None:
    stream = write_corpus(tmp_path, {"web": [20_000], "code": [9000]}).stream(4, seq_length=64)
    times = []
    for step in (1, 1000, 200_000, 10_000_000, 10**9):
        start = time.perf_counter()
        stream.batch_at(step)
        times.append(time.perf_counter() - start)
    assert max(times) < 2, times  # replaying even one step in a thousand would take hours
