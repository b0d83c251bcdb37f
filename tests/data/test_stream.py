"""Tests the guarantees of the data stream against a naive reading of the documents in memory."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fms_fsdp.data import order as order_module
from fms_fsdp.data.batch import fingerprint
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.data.order import SourceOrder, fit_logical_shards
from fms_fsdp.data.stream import TokenStream
from tests.cli import trained
from tests.data import corpora
from tests.data.corpora import SEP, VOCAB, Files, write_corpus

SIZES = {"web": [30_000, 7, 20_000], "lang=en/dataset=code": [15_000], "tiny": [900]}
Used = dict[tuple[str, int], np.ndarray]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_corpus(tmp_path_factory.mktemp("corpus"), SIZES)


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_step(files: Files, s: TokenStream, step: int, used: Used | None = None) -> None:
    batch, mask = s.batch_at(step), s.section.document_mask
    for row, address in enumerate(s.order.addresses(step)):
        documents = files.documents[address.source]
        tokens, labels, positions, ids = (tensor[row].numpy() for tensor in batch)
        at, pieces = 0, s.documents_of(address)
        assert sum(stop - start for *_, start, stop in pieces) == len(tokens)
        for number, (shard, document, start, stop) in enumerate(pieces):
            text, length = documents[shard][document], stop - start
            assert (tokens[at : at + length] == text[start:stop]).all()
            assert (labels[at : at + length - 1] == text[start + 1 : stop]).all()
            assert (positions[at : at + length] == np.arange(length)).all()
            assert (ids[at : at + length] == number).all()
            last = labels[at + length - 1]
            if stop < len(text):
                assert last == text[stop]
            elif number + 1 < len(pieces) and pieces[number + 1][2] == 0 and not mask:
                follower = documents[pieces[number + 1][0]][pieces[number + 1][1]]
                assert last == follower[0]
            else:
                assert last == -100
            if used is not None:
                key = (address.source, address.epoch)
                counts = used.setdefault(key, np.zeros(files.num_tokens(address.source), np.int64))
                first = files.offset(address.source, shard, document) + start
                counts[first : first + length] += 1
            at += length


def run(s: TokenStream, steps: int) -> list[int]:
    return [fingerprint(s.next_batch(), 0) for _ in range(steps)]


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
@pytest.mark.parametrize(
    "layout,stored", [("lists", False), ("lists", True), ("scalars", False), ("scalars", True)]
)
@pytest.mark.parametrize("mask", [False, True])
def test_each_epoch_has_each_token_once(tmp_path: Path, packing, layout, stored, mask) -> None:
    files = write_corpus(
        tmp_path, {"web": [9_000, 7, 6_000], "tiny": [400]}, layout=layout, stored=stored
    )
    s, used = files.stream(4, seq_length=32, packing=packing, document_mask=mask), Used()
    for step in itertools.count(1):
        check_step(files, s, step, used)
        if min(v["epoch"] for v in s.consumption(step).values()) >= 3:
            break
    for name in files.documents:
        for epoch in range(3):
            counts = used[name, epoch]
            assert counts.max() == 1 and counts.sum() == len(counts) // 32 * 32, (name, epoch)
    rests = [np.flatnonzero(used["web", epoch] == 0)[:1].tolist() for epoch in range(3)]
    assert len({str(rest) for rest in rests}) > 1 or files.num_tokens("web") % 32 == 0


@pytest.mark.parametrize("seq_length", [1, 5, 31, 512, 20_000])
@pytest.mark.parametrize("shards", [1, 8, 1024])
def test_windows_cover_each_epoch_once(files: Files, seq_length: int, shards: int) -> None:
    s = files.stream(1, seq_length=seq_length, datasets=("web",), logical_shards=shards)
    order = s.order.sources["web"]
    for epoch in range(3):
        n = np.arange(order.num_sequences) + epoch * order.num_sequences
        epochs, windows, places = order.locate(n)
        assert (epochs == epoch).all()
        seen = np.zeros(order.num_tokens, int)
        rows = {}
        for window, row in zip(windows.tolist(), places.tolist(), strict=True):
            rows.setdefault(window, set()).add(row)
        for window, mine in rows.items():
            starts, length = order.ranges(epoch, window)
            assert mine == set(range(len(starts) * length // seq_length)), window
            for start in starts:
                seen[(start + np.arange(length)) % order.num_tokens] += 1
        assert seen.max() == 1 and seen.sum() == order.num_sequences * seq_length


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_world_size_does_not_change_batches(files: Files, packing: str) -> None:
    for step in (1, 2, 57, 1000):
        whole = files.stream(24, seq_length=32, packing=packing).batch_at(step)
        for world in range(1, 9):
            if 24 % world == 0:
                parts = [
                    files.stream(24, r, world, seq_length=32, packing=packing).batch_at(step)
                    for r in range(world)
                ]
                assert same(tuple(torch.cat(c) for c in zip(*parts, strict=True)), whole)
    for world in (5, 7):
        b = 5 * 7
        whole = files.stream(b, seq_length=32).batch_at(9)
        parts = [files.stream(b, r, world, seq_length=32).batch_at(9) for r in range(world)]
        assert same(tuple(torch.cat(c) for c in zip(*parts, strict=True)), whole)


def test_resume_at_every_step_and_world_size(files: Files) -> None:
    s = files.stream(4, seq_length=64)
    whole = run(s, 30)
    s = files.stream(4, seq_length=64)
    for step in range(30):
        state = json.loads(json.dumps(s.state_dict()))
        again = files.stream(4, seq_length=64)
        assert again.load_state_dict(state, step) == []
        assert run(again, min(2, 30 - step)) == whole[step : step + 2]
        again.load_state_dict(state, step)
        assert run(again, 1) == whole[step : step + 1]
        total = 0
        for rank in range(2):
            part = files.stream(4, rank, 2, seq_length=64)
            part.load_state_dict(state, step)
            total += fingerprint(part.next_batch(), 2 * rank)
        assert total % 2**64 == whole[step]
        s.next_batch()


def keys(s: TokenStream, first: int, last: int) -> list[tuple[str, int]]:
    return [(a.source, a.n) for step in range(first, last + 1) for a in s.order.addresses(step)]


def test_random_histories_lose_and_repeat_nothing(
    files: Files,
) -> None:
    names = list(SIZES)
    for seed in range(8):
        draw, seen, step, state = random.Random(seed), [], 0, None
        for _ in range(7):
            chosen = draw.sample(names, draw.randint(1, 3))
            weights = tuple(draw.randint(1, 9) for _ in chosen)
            batch = draw.choice([4, 8, 12])
            ramp = draw.choice([(), (4, 4, 40)]) if batch > 4 else ()
            flags = {"datasets": tuple(chosen), "weights": weights, "seq_length": 32}
            if draw.random() < 0.5:
                a = step + draw.randint(1, 12)
                flags["skip_steps"] = f"{a}:{a + draw.randint(1, 5)}"
            s = files.stream(batch, rampup=ramp, **flags)
            if state is not None:
                s.load_state_dict(state, step)
            elif step:
                s.begin_after(step)
            steps = draw.randint(0, 9)
            seen += keys(s, step + 1, step + steps)
            step += steps
            state = json.loads(json.dumps(s.state_dict()))
            position, consumed = s.order.history.position(step), s.order.history.consumed(step)
            for name in SIZES:
                mine = sorted(n for source, n in seen if source == name)
                assert len(set(mine)) == len(mine)
                assert consumed[name] == len(mine)
                assert not mine or mine[-1] < position[name]
        total = {name: state["phases"] and s.order.history.position(step)[name] for name in SIZES}
        gaps = sum(total.values()) - len(seen)
        assert gaps >= 0
        if not any(segment.get("skip") for segment in state["phases"]):
            assert gaps == 0


def test_changes_keep_earlier_steps(files: Files) -> None:
    a = files.stream(4, seq_length=32, datasets=("web", "tiny"), weights=(1, 1))
    before = [fingerprint(a.batch_at(step), 0) for step in range(1, 11)]
    b = files.stream(
        6, seq_length=32, datasets=("web", "tiny", "lang=en/dataset=code"), weights=(1, 2, 3)
    )
    changes = b.load_state_dict(a.state_dict(), 10)
    assert len(changes) == 4, changes
    assert [fingerprint(b.batch_at(step), 0) for step in range(1, 11)] == before
    c = files.stream(
        6, seq_length=32, datasets=("web", "tiny", "lang=en/dataset=code"), weights=(1, 2, 3)
    )
    assert c.load_state_dict(json.loads(json.dumps(b.state_dict())), 20) == []
    assert [fingerprint(c.batch_at(step), 0) for step in range(1, 11)] == before
    assert same(c.batch_at(21), b.batch_at(21))


def test_skip_steps_skips_the_planned_sequences(files: Files) -> None:
    plain = files.stream(4, seq_length=32)
    s = files.stream(4, seq_length=32, skip_steps="5:8,20:21")
    for step in range(1, 30):
        planned = step if step < 5 else step + 3 if step < 20 else step + 4
        assert same(s.batch_at(step), plain.batch_at(planned)), step
    late = files.stream(4, seq_length=32, skip_steps="5:8,20:21")
    late.load_state_dict(plain.state_dict(), 4)
    assert all(same(late.batch_at(t), s.batch_at(t)) for t in range(1, 30))
    again = files.stream(4, seq_length=32, skip_steps="5:8,20:21")
    assert again.load_state_dict(late.state_dict(), 10) == []
    assert all(same(again.batch_at(t), s.batch_at(t)) for t in range(1, 30))
    with pytest.raises(ValueError, match="must begin after step 10"):
        files.stream(4, seq_length=32, skip_steps="5:8").load_state_dict(plain.state_dict(), 10)
    assert sum(v["tokens"] for v in s.consumption(10).values()) == 10 * 4 * 32


def test_ramp_changes_only_the_batch_size(files: Files) -> None:
    s = files.stream(12, seq_length=32, rampup=(4, 4, 40), datasets=("web",))
    sizes = [len(s.batch_at(t).tokens_BS) for t in range(1, 12)]
    assert sizes[0] == 4 and sizes[-1] == 12 and sizes == sorted(sizes)
    assert sorted(n for _, n in keys(s, 1, 11)) == list(range(sum(sizes)))


def test_sources_stay_near_their_weights(files: Files) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        weights = tuple(draw.random() + 0.01 for _ in SIZES)
        s = files.stream(7, seq_length=32, datasets=tuple(SIZES), weights=weights)
        for step in range(1, 60):
            used = s.order.history.consumed(step)
            for name, weight in zip(SIZES, weights, strict=True):
                assert abs(used[name] - 7 * step * weight / sum(weights)) <= 1.25 + 1e-3 * step


def test_max_epochs_ends_at_a_known_step(files: Files) -> None:
    s = files.stream(4, seq_length=64, datasets=("web", "tiny"), weights=(1.0, 1.0), max_epochs=2.0)
    rows = files.num_tokens("tiny") // 64
    assert s.last_step == 2 * rows * 2 // 4
    run(s, s.last_step)
    with pytest.raises(ValueError, match=r"--max_epochs=2 ends with step \d+ for source tiny"):
        s.next_batch()
    end = s.end_of_epochs("tiny", 1, 1)
    assert s.consumption(end)["tiny"]["epoch"] >= 1 > s.consumption(end - 1)["tiny"]["epoch"]


def test_bestfit_splits_few_documents(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, {"web": [1_500_000]}, mean=200)
    share = {}
    for packing in ("concat", "bestfit"):
        s = files.stream(64, seq_length=1024, packing=packing, logical_shards=1)
        split = whole = 0
        for step in range(1, 10):
            for address in s.order.addresses(step):
                for shard, document, start, stop in s.documents_of(address):
                    n = len(files.documents["web"][shard][document])
                    if n <= 1024:
                        whole, split = whole + (stop - start == n), split + (stop - start < n)
        share[packing] = split / (split + whole)
    assert 4 * share["bestfit"] < share["concat"]


def test_state_is_small_and_identical_on_ranks(files: Files, tmp_path: Path) -> None:
    a = files.stream(
        6,
        seq_length=32,
        datasets=("web", "lang=en/dataset=code", "tiny"),
        weights=(0.5, 0.3, 0.2),
    )
    b = files.stream(
        6,
        2,
        3,
        seq_length=32,
        datasets=("tiny", "web/", "./lang=en/dataset=code"),
        weights=(2.0, 5.0, 3.0),
    )
    assert a.state_dict() == b.state_dict()
    many = write_corpus(tmp_path, {f"source-{i:02d}": [2000] for i in range(20)})
    assert len(json.dumps(many.stream(8, seq_length=32).state_dict())) <= 4096


def test_shard_layouts_give_the_same_batches(tmp_path: Path) -> None:
    batches = []
    for layout, stored in itertools.product(("lists", "scalars"), (False, True)):
        files = write_corpus(tmp_path / f"{layout}{stored}", SIZES, layout=layout, stored=stored)
        batches.append(files.stream(8, seq_length=64).batch_at(20))
    files = write_corpus(tmp_path / "nocounts", SIZES, counts=False)
    batches.append(files.stream(8, seq_length=64).batch_at(20))
    assert all(same(batches[0], batch) for batch in batches[1:])


def test_masked_prompts_are_not_labels(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    plain = [rng.integers(SEP + 1, VOCAB, size=rng.integers(2, 60)) for _ in range(300)]
    prompts = [int(rng.integers(0, len(d))) for d in plain]
    marked = [
        np.where(np.arange(len(d)) < p, d | 1 << 31, d) for d, p in zip(plain, prompts, strict=True)
    ]
    for name, documents, masks in (("a", plain, "false"), ("b", marked, "true")):
        path = tmp_path / name / "web" / "shard-0.arrow"
        corpora.write_lists(path, documents, dtype="uint32", has_masks=masks)
    for packing, mask, size in itertools.product(("concat", "bestfit"), (False, True), (7, 64)):
        flags = {"seq_length": size, "packing": packing, "document_mask": mask}
        a, b = (Files(tmp_path / n).stream(3, **flags) for n in "ab")
        c = Files(tmp_path / "b").stream(3, loss_on="all", **flags)
        for step in range(1, 12):
            x, y, z = a.batch_at(step), b.batch_at(step), c.batch_at(step)
            assert same(x, z) and torch.equal(x.tokens_BS, y.tokens_BS)
            for row, address in enumerate(a.order.addresses(step)):
                expected, at = x.labels_BS[row].tolist(), 0
                pieces = a.documents_of(address)
                for i, (_, d, start, stop) in enumerate(pieces):
                    for t in range(start, stop):
                        n = len(plain[d])
                        if t + 1 < n and t + 1 < prompts[d]:
                            expected[at] = -100
                        if t == n and i + 1 < len(pieces) and prompts[pieces[i + 1][1]]:
                            expected[at] = -100
                        at += 1
                assert y.labels_BS[row].tolist() == expected


def test_missing_shards_mask_sequences(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, {"web": [3000] * 8})
    whole = [files.stream(8, seq_length=32).batch_at(step) for step in range(1, 9)]
    (tmp_path / "web/shard-00003.arrow").unlink()
    with pytest.raises(ValueError, match="shard-00003.arrow.*does not exist"):
        files.stream(8, seq_length=32)
    s = files.stream(8, seq_length=32, on_missing="mask")
    masked = 0
    for step in range(1, 9):
        batch = s.next_batch()
        hidden = (batch.labels_BS == -100).all(dim=1)
        masked += int(hidden.sum())
        assert torch.equal(batch.tokens_BS[~hidden], whole[step - 1].tokens_BS[~hidden])
        halves = [
            files.stream(8, r, 2, seq_length=32, on_missing="mask").batch_at(step) for r in (0, 1)
        ]
        assert same(tuple(torch.cat(c) for c in zip(*halves, strict=True)), batch)
    assert 0 < masked == s.num_masked_rows


def test_changed_shards_are_rejected(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, SIZES)
    state = files.stream(4, seq_length=32).state_dict()
    path = tmp_path / "web/shard-00002.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match="shard web/shard-00002.arrow has other content than in the checkpoint"
    ):
        files.stream(4, seq_length=32).load_state_dict(state, 3)
    other = write_corpus(tmp_path / "other", SIZES | {"web": [30_000]})
    with pytest.raises(ValueError, match=r"source .* has \d+ shards .* in the checkpoint"):
        other.stream(4, seq_length=32).load_state_dict(state, 3)


def test_token_beyond_vocabulary_names_its_document(tmp_path: Path) -> None:
    documents = [np.arange(10, 60)] * 40
    documents[17] = np.full(50, VOCAB + 5)
    corpora.write_lists(tmp_path / "web/shard-0.arrow", documents)
    with pytest.raises(
        ValueError,
        match=r"has token 5005 in document 17, which must be below --vocab_size=5000.*step",
    ):
        s = Files(tmp_path).stream(1, seq_length=16)
        [s.batch_at(step) for step in range(1, 200)]


@pytest.mark.parametrize("layout", ["lists", "scalars"])
def test_corrupt_shards_end_in_one_line(tmp_path: Path, layout: str) -> None:
    files = write_corpus(tmp_path / "b", {"web": [5000] * 3}, layout=layout)
    path = tmp_path / "b/web/shard-00001.arrow"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="shard-00001.arrow is not a complete Arrow IPC file"):
        files.stream(1, seq_length=16)
    for draw in range(200):
        rng = random.Random(draw)
        hurt = bytearray(data)
        for _ in range(3):
            place = rng.choice([rng.randrange(len(data) - 3000, len(data)), rng.randrange(600)])
            hurt[place] = rng.randrange(256)
        path.write_bytes(hurt)
        try:
            s = files.stream(1, seq_length=16)
            [s.batch_at(step) for step in range(1, 30)]
        except ValueError as error:
            assert "\n" not in str(error) and "shard" in str(error), error


def test_unusual_token_types_are_read(tmp_path: Path) -> None:
    """Signed ids of 8 bytes, a negative one, shards without documents, short lists, many a batch."""
    rng = np.random.default_rng(1)
    documents = [rng.integers(10, 90, size=rng.integers(0, 50)) for _ in range(60)]
    corpora.write_lists(tmp_path / "a/web/shard-0.arrow", documents, dtype="uint16")
    for i, kind in enumerate(
        ({"dtype": "int64", "large": False}, {"dtype": "uint8", "chunk": 1000})
    ):
        root = tmp_path / f"b{i}"
        corpora.write_lists(root / "web/shard-0.arrow", [], **kind)
        corpora.write_lists(root / "web/shard-1.arrow", documents, **kind)
        corpora.write_scalars(root / "web/shard-2.arrow", [], dtype="uint32")
        a, b = (Files(r).stream(2, seq_length=16) for r in (tmp_path / "a", root))
        assert all(same(a.batch_at(step), b.batch_at(step)) for step in range(1, 60))
    documents[7] = np.array([20, -7, 30])
    corpora.write_lists(tmp_path / "c/web/shard-0.arrow", documents, dtype="int64")
    s = Files(tmp_path / "c").stream(2, seq_length=16)
    with pytest.raises(ValueError, match="in document [67], which must be below --vocab_size"):
        [s.batch_at(step) for step in range(1, 60)]


def test_errors_are_one_line(files: Files, tmp_path: Path) -> None:
    cases = {
        "is not a folder": {"data_path": str(tmp_path / "none")},
        "did you mean web": {"datasets": ("webb",)},
        "must be named once": {"datasets": ("web", "web/")},
        "is inside": {"datasets": ("lang=en", "lang=en/dataset=code")},
        "must have at least one sequence": {"seq_length": 2000},
        "must be at least 1/65536": {"datasets": ("web", "tiny"), "weights": (1e9, 1)},
        "must be at most": {"batch": 10**6},
        "must be below --vocab_size": {"sep_token": VOCAB},
    }
    for rule, flags in cases.items():
        with pytest.raises(ValueError, match=rule) as caught:
            files.stream(flags.pop("batch", 4), **{"seq_length": 64, **flags})
        assert "\n" not in str(caught.value) and ";" in str(caught.value)
    corpora.write_lists(tmp_path / "web/a.arrow", [np.arange(10, 60)] * 40)
    (tmp_path / "meta").mkdir()
    for text in ("../x.arrow,1,1", "web/a.arrow,x,1", "web/a.arrow,-1,1"):
        (tmp_path / "meta/counts.csv").write_text(f"dataset/filename,documents,tokens\n{text}\n")
        with pytest.raises(ValueError, match="counts") as caught:
            Files(tmp_path).stream(1)
    for key, value in {"seed": 2, "seq_length": 32, "packing": "bestfit"}.items():
        state = files.stream(4, seq_length=64).state_dict()
        flags = {"seq_length": 64, key: value}
        with pytest.raises(ValueError, match=f"--{key}={value} does not match the checkpoint"):
            files.stream(4, **flags).load_state_dict(state, 3)


def test_begin_after(files: Files) -> None:
    plain, late = files.stream(4, seq_length=32), files.stream(4, seq_length=32)
    late.begin_after(7)
    assert (
        all(same(late.next_batch(), plain.batch_at(step)) for step in range(1, 6))
        and late.step == 12
    )
    again = files.stream(4, seq_length=32)
    again.load_state_dict(late.state_dict(), 12)
    assert all(same(again.next_batch(), plain.batch_at(step)) for step in range(6, 9))
    with pytest.raises(ValueError, match="--step=7 must be at least 8"):
        late.batch_at(7)


def test_unpickled_corpus_opens_no_file(files: Files) -> None:
    import pickle

    section = files.section(seq_length=32)
    corpus = pickle.loads(pickle.dumps(open_corpus(section)))
    sizes = {"seed": 1, "vocab_size": VOCAB, "global_batch_size": 4, "dp_rank": 0, "dp_size": 1}
    again = TokenStream(section, corpus, **sizes)
    assert again.corpus.storage._open.cache_info().currsize == 0
    assert same(again.batch_at(3), files.stream(4, seq_length=32).batch_at(3))


def test_shuffle_is_random_across_chunks(tmp_path: Path) -> None:

    files = write_corpus(tmp_path, {"web": [600_000]}, mean=12)
    s = files.stream(1, seq_length=64, logical_shards=1)
    order = s.order.sources["web"]
    cells = np.zeros((16, 16))
    starts = np.cumsum([0] + [len(document) for document in files.documents["web"][0]])
    for window in range(order.cut.rounds):
        begins, length = order.ranges(0, window)
        assert len(begins) == 16
        pieces = s.segments("web", 0, window)
        position = starts[pieces["document"]] + pieces["start"]
        block = [
            int(np.flatnonzero([(p - b) % order.num_tokens < length for b in begins])[0])
            for p in position.tolist()
        ]
        np.add.at(cells, (block[:-1], block[1:]), 1)
    expected = np.outer(cells.sum(axis=1), cells.sum(axis=0)) / cells.sum()
    assert 0.6 < ((cells - expected) ** 2 / expected).sum() / 225 < 1.4


def test_ranks_keep_their_windows(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, {"web": [400_000], "code": [200_000]}, mean=30)
    s = files.stream(16, seq_length=32, logical_shards=64, datasets=("web", "code"), weights=(2, 1))
    seen, fresh, total = set(), 0, 0
    for step in range(1, 200):
        for a in s.order.addresses(step, 4, 8):  # rank 1 of 4
            key = (a.source, a.epoch, a.window)
            fresh, total = fresh + (key not in seen), total + 1
            seen.add(key)
    assert fresh < 0.35 * total


def test_weight_0_removes_a_source(files: Files, tmp_path: Path) -> None:
    flags = [f"--data_path={files.root}", "--datasets=web,tiny", "--seq_length=16"]
    flags += ["--weights=1,0", "--sep_token=3", "--model_variant=tiny", "--vocab_size=5000"]
    flags += ["--num_steps=2", "--global_batch_size=2", "--trackers=none"]
    lines = trained(*flags, f"--output_dir={tmp_path / 'run'}").splitlines()
    sources = [line for line in lines if line.startswith("source ")]
    assert any("tiny is not read" in line for line in lines)
    assert [line.startswith("source web: ") for line in sources] == [True]
    assert "64 tokens" in sources[0] and sources[0].endswith("are read to step 2")


def test_default_weights_follow_the_tokens(files: Files) -> None:
    quotas = files.stream(1, seq_length=16).state_dict()["phases"][0]["quotas"]
    total = sum(files.num_tokens(name) for name in SIZES)
    for name in SIZES:
        assert quotas[name] == pytest.approx(65536 * files.num_tokens(name) / total, abs=1)


def test_epochs_and_seeds_differ(files: Files) -> None:
    s = files.stream(1, seq_length=32, datasets=("web",), weights=(1.0,))
    total = files.num_tokens("web") // 32
    first, second = (
        {tuple(s.batch_at(epoch * total + i + 1).tokens_BS[0].tolist()) for i in range(total)}
        for epoch in (0, 1)
    )
    assert len(first & second) < total / 20
    a, b = (files.stream(4, seed=seed, seq_length=64).batch_at(1) for seed in (1, 2))
    assert not torch.equal(a.tokens_BS, b.tokens_BS)


def test_version_1_is_rejected_with_a_command(files: Files) -> None:
    s = files.stream(4, seq_length=64)
    state = s.state_dict() | {"order_version": 1}
    with pytest.raises(ValueError, match="version 1 of the data order.*--load_model_only=True"):
        s.load_state_dict(state, 3)


def test_fingerprint_depends_on_order_tokens_and_labels(files: Files) -> None:
    batch = files.stream(4, seq_length=32).batch_at(1)
    value = fingerprint(batch, 0)
    assert fingerprint(batch, 1) != value
    for column in (0, 1):
        changed = type(batch)(*(tensor.clone() for tensor in batch))
        changed[column][2, 5] += 1
        assert fingerprint(changed, 0) != value
    assert fingerprint(type(batch)(*(tensor.flip(0) for tensor in batch)), 0) != value


@pytest.mark.parametrize("seed", range(100))
def test_random_geometries_have_each_sequence_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(order_module, "CHUNK_TOKENS", draw.choice([64, 512, 4096, 1 << 18]))
    tokens = draw.randint(*draw.choice([(5, 200), (200, 5000), (5000, 120_000)]))
    size = draw.randint(1, max(1, min(tokens, draw.choice([4, 40, 400]))))
    total, epoch = tokens // size, draw.randint(0, 5)
    fitted = fit_logical_shards(total, draw.random(), draw.choice([1, 8, 64, 1000]))
    shards = draw.choice([1, fitted, draw.randint(1, max(1, min(total, 40)))])
    order = SourceOrder(f"s{seed}", tokens, size, shards, seed)
    epochs, windows, positions = order.locate(np.arange(total) + epoch * total)
    pairs = set(zip(windows.tolist(), positions.tolist(), strict=True))
    assert (epochs == epoch).all() and len(pairs) == total
    seen, filled = np.zeros(tokens, np.int64), 0
    for window in set(windows.tolist()):
        starts, length = order.ranges(epoch, window)
        count = len(starts) * length // size
        assert {(window, i) for i in range(count)} <= pairs
        filled += count
        for start in starts:
            seen[(start + np.arange(length)) % tokens] += 1
    assert filled == total and seen.max() == 1 and seen.sum() == total * size
