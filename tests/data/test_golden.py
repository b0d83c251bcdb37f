"""The order of the data, pinned.

A failure means that a resumed run would see other tokens than the run before it: restore the
formula, or raise ORDER_VERSION (which rejects old checkpoints) and renew the values below with
`python -m tests.data.test_golden`.
"""

from pathlib import Path

import pytest

from fms_fsdp.data.batch import fingerprint
from fms_fsdp.data.permute import ORDER_VERSION
from tests.data.corpora import Files, write_corpus
from tests.data.test_synthetic import stream as synthetic_stream

SIZES = {"web": [30_000, 7, 20_000], "lang=en/dataset=code": [15_000], "tiny": [900]}
STEPS = (1, 2, 3, 10, 100, 1000, 2000, 12_345, 200_000, 1_000_000)

GOLDEN = {
    "concat": (
        "3e14776ea6933ae9 49ae3334eed6d3f5 9a258adc4e575e2e 5e856257220aea42 631367ce571f0cb0 "
        "84971dcc6e76f334 0c44774a4b712a73 f123d75f408fdbd3 4f52f9de22191d85 a8cd1c38c2f318d8"
    ),
    "bestfit": (
        "21da0e2a2c26c839 2510e5e3be67766a 138db4fcb1969fba 8512a6cb6e3291a9 bb8e50519cc7bc8b "
        "6097c7aa0d4fb68b ccf223802b3c1db5 04fa65ac2c679b7f 694430c1c49e7126 b434722d0e5bdbd7"
    ),
    "synthetic": (
        "f89ac878b5c7288a f3d14b7d55d8d5f3 9968ecc236f0047e 1e6d572ea45b1bc9 2f6fb29ea47cb4ab "
        "f0271a4dc3fedaa1 494e18b8e64d8aaf 6400d1dcd5312051 b524c718fe6e58fb ff7735d83984e98e"
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
def test_ten_batches_of_order_version_2(tmp_path: Path, kind: str) -> None:
    assert ORDER_VERSION == 2
    assert fingerprints(write_corpus(tmp_path, SIZES, fixed=True), kind) == GOLDEN[kind]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder), SIZES, fixed=True)
        for name in GOLDEN:
            print(f'    "{name}": "{fingerprints(corpus, name)}",')
