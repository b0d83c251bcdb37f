"""The order of the data, pinned. A failure here means that every run resumed from a checkpoint would see
other tokens than the run before it: restore the formula, or raise ORDER_VERSION (which refuses old
checkpoints) and renew the numbers below with `python -m tests.data.test_golden`.
"""

from pathlib import Path

import pytest

from fms_fsdp.data.batch import fingerprint
from fms_fsdp.data.order.permute import ORDER_VERSION
from tests.data.corpora import Files, write_corpus
from tests.data.test_synthetic import stream as synthetic_stream

SIZES = {"web": [30_000, 7, 20_000], "lang=en/dataset=code": [15_000], "tiny": [900]}
STEPS = (1, 2, 3, 10, 100, 1000, 2000, 12_345, 200_000, 1_000_000)

GOLDEN = {
    "concat": (
        "7f4fd8126838a912 060e6bbba7a3724c 9da9baa250574323 61aa35d94c05fb95 e357d89f84fb6de2 "
        "83b10aa18466cd14 b43b55b9258d7ac8 e74a9a0f66454cb4 8d98623f03f057e3 79cfba16fc28af92"
    ),
    "bestfit": (
        "682fe48c09468490 9f77aeb1c898c9d7 ca15523cc9f8b1fc 08c2f694bc138c8a bbbecc63a8923ee0 "
        "f368742e6ca04c5b 4a3ef77732a683bf 22179951dfbce1aa 9b2f5ed741443dfc 2f03d6a9ca8843a2"
    ),
    "synthetic": (
        "76568693077bbb1e 7dc9eba00a5f4a57 fa391d9bda89a089 ff25226a1c353063 4dc0320d3bd0852a "
        "59e9366463b4cb16 1370580e215172e1 aada423a3587d5e2 e3f480267d9a50ec d46b31343982340a"
    ),
}


def fingerprints(files: Files, kind: str) -> str:
    if kind == "synthetic":
        stream = synthetic_stream(batch=6, seed=7, vocab=50, seq_length=128)
    else:
        flags = {"datasets": tuple(SIZES), "weights": (0.5, 0.3, 0.2), "packing": kind}
        stream = files.stream(6, seed=7, seq_length=32, logical_shards=16, **flags)
    return " ".join(f"{fingerprint(stream.batch_at(step), 0):016x}" for step in STEPS)


@pytest.mark.parametrize("kind", GOLDEN)
def test_ten_batches_are_those_of_order_version_1(tmp_path: Path, kind: str) -> None:
    assert ORDER_VERSION == 1
    assert fingerprints(write_corpus(tmp_path, SIZES, fixed=True), kind) == GOLDEN[kind]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder), SIZES, fixed=True)
        for name in GOLDEN:
            print(f'    "{name}": "{fingerprints(corpus, name)}",')
