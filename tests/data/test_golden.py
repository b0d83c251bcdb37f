"""The order of the data, pinned. A failure here means that every run resumed from a checkpoint would see
other tokens than the run before it: restore the formula, or raise ORDER_VERSION (which refuses old
checkpoints) and renew the numbers below with `python -m tests.data.test_golden`.

FIRST_CUT is the cut that these sources got before small sources had several tapes. A run keeps the cut of its
checkpoint, so its numbers stay as well.
"""

from pathlib import Path

import pytest

from fms_fsdp.data.batch import fingerprint
from fms_fsdp.data.order.permute import ORDER_VERSION
from tests.data.corpora import Files, write_corpus
from tests.data.test_synthetic import stream as synthetic_stream

SIZES = {"web": [30_000, 7, 20_000], "lang=en/dataset=code": [15_000], "tiny": [900]}
STEPS = (1, 2, 3, 10, 100, 1000, 2000, 12_345, 200_000, 1_000_000)

FIRST_CUT = {"web": [1, 4, 1056], "lang=en/dataset=code": [1, 4, 256], "tiny": [1, 1, 960]}
GOLDEN = {
    "concat": (
        "2c22ee365d104809 5d96e4889bbb53b2 79f0918c7434b2d1 81e60210bd5975df 2ca8eea95dd89c8b "
        "6f73d2b61ab6d277 e8782d585cde7ef6 ad2ff7b9c89d3a7f 413e63cfadf9d980 8aae3b8a0bcac11a"
    ),
    "bestfit": (
        "96c73305e3b42cf6 b6f94120423f4343 1ceb8265a5ea575d df0b3ec4e216c62f 63e67d650d336e4f "
        "6a05789fd4dbf12a 158fcc7e65937820 b4da62bca1465096 086d89fef302560d f103b93264a4b166"
    ),
    "concat from a checkpoint": (
        "7f4fd8126838a912 060e6bbba7a3724c 9da9baa250574323 61aa35d94c05fb95 e357d89f84fb6de2 "
        "83b10aa18466cd14 b43b55b9258d7ac8 e74a9a0f66454cb4 8d98623f03f057e3 79cfba16fc28af92"
    ),
    "bestfit from a checkpoint": (
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
        packing, _, resumed = kind.partition(" ")
        flags = {"datasets": tuple(SIZES), "weights": (0.5, 0.3, 0.2), "packing": packing}
        stream = files.stream(6, seed=7, seq_length=32, logical_shards=16, **flags)
        if resumed:
            stream.load_state_dict(stream.state_dict() | {"fit": {"32": FIRST_CUT}}, 0)
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
