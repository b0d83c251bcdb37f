"""Tests the guarantees of the data stream against a naive reading of the documents in memory."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fms_fsdp.data import order as order_module
from fms_fsdp.data.batch import Batch, fingerprint
from fms_fsdp.data.inspection import end_of_epochs
from fms_fsdp.data.order import SourceOrder, fit_logical_shards
from fms_fsdp.data.stream import TokenStream
from fms_fsdp.errors import ReadFailed, read_failed
from fms_fsdp.run.startup_log import describe_sources
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
        at, pieces = 0, s.sequence_segments(address)
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
@pytest.mark.parametrize("mask", [False, True])
def test_each_epoch_has_each_token_once(tmp_path: Path, packing: str, mask: bool) -> None:
    files = write_corpus(tmp_path, {"web": [9_000, 7, 6_000], "tiny": [400]})
    s, used = files.stream(4, seq_length=32, packing=packing, document_mask=mask), Used()
    for step in itertools.count(1):
        check_step(files, s, step, used)
        if min(v["epoch"] for v in s.consumption(step).values()) >= 3:
            break
    for name in files.documents:
        for epoch in range(3):
            counts = used[name, epoch]
            assert counts.max() == 1 and counts.sum() == len(counts) // 32 * 32, (name, epoch)
    unread = [np.flatnonzero(used["web", epoch] == 0)[:1].tolist() for epoch in range(3)]
    assert unread[0] != unread[1] or unread[1] != unread[2]


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_world_size_does_not_change_batches(files: Files, packing: str) -> None:
    for batch, step, worlds in ((24, 1, (2, 3, 8)), (24, 1000, (2, 3, 8)), (35, 9, (5, 7))):
        flags = {"seq_length": 32, "packing": packing}
        whole = files.stream(batch, **flags).batch_at(step)
        for world in worlds:
            parts = [files.stream(batch, r, world, **flags).batch_at(step) for r in range(world)]
            assert same(tuple(torch.cat(c) for c in zip(*parts, strict=True)), whole)


def test_resume_at_every_step_and_world_size(files: Files) -> None:
    whole = run(files.stream(4, seq_length=64), 30)
    s = files.stream(4, seq_length=64)
    for step in range(30):
        state = json.loads(json.dumps(s.state_dict()))
        again = files.stream(4, seq_length=64)
        assert again.load_state_dict(state, step) == []
        assert run(again, min(2, 30 - step)) == whole[step : step + 2]
        total = 0
        for rank in range(2):
            part = files.stream(4, rank, 2, seq_length=64)
            part.load_state_dict(state, step)
            total += fingerprint(part.next_batch(), 2 * rank)
        assert total % 2**64 == whole[step]
        s.next_batch()


def test_resume_forgets_windows_read_before(files: Files) -> None:
    """Their numbers are those of the flags; the checkpoint has other logical shards."""
    first = files.stream(4, seq_length=8, datasets=("web",), logical_shards=2)
    with files.stream(4, seq_length=8, datasets=("web",), logical_shards=8) as resumed:
        for step in range(1, 20):
            resumed.batch_at(step)
        assert resumed.load_state_dict(first.state_dict(), 0) == []
        for step in range(1, 20):
            assert same(resumed.batch_at(step), first.batch_at(step)), step


def keys(s: TokenStream, first: int, last: int) -> list[tuple[str, int]]:
    return [(a.source, a.n) for step in range(first, last + 1) for a in s.order.addresses(step)]


def test_random_histories_lose_and_repeat_nothing(files: Files) -> None:
    for seed in range(8):
        draw, seen, step, state = random.Random(seed), [], 0, None
        for _ in range(7):
            chosen = draw.sample(list(SIZES), draw.randint(1, 3))
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
        gaps = sum(s.order.history.position(step).values()) - len(seen)
        assert gaps >= 0
        if not any(segment.get("skip") for segment in state["phases"]):
            assert gaps == 0


def test_changes_keep_earlier_steps(files: Files) -> None:
    changed = {"datasets": ("web", "tiny", "lang=en/dataset=code"), "weights": (1, 2, 3)}
    a = files.stream(4, seq_length=32, datasets=("web", "tiny"), weights=(1, 1))
    before = [fingerprint(a.batch_at(step), 0) for step in range(1, 11)]
    b = files.stream(6, seq_length=32, **changed)
    changes = b.load_state_dict(a.state_dict(), 10)
    assert len(changes) == 4, changes
    c = files.stream(6, seq_length=32, **changed)
    assert c.load_state_dict(json.loads(json.dumps(b.state_dict())), 20) == []
    for resumed in (b, c):
        assert [fingerprint(resumed.batch_at(step), 0) for step in range(1, 11)] == before
    assert same(c.batch_at(21), b.batch_at(21))


def test_skip_steps_skips_the_planned_sequences(files: Files) -> None:
    plain = files.stream(4, seq_length=32)
    s, late, again = (files.stream(4, seq_length=32, skip_steps="5:8,20:21") for _ in range(3))
    late.load_state_dict(plain.state_dict(), 4)
    assert again.load_state_dict(late.state_dict(), 10) == []
    for step in range(1, 30):
        planned = plain.batch_at(step if step < 5 else step + 3 if step < 20 else step + 4)
        assert all(same(stream.batch_at(step), planned) for stream in (s, late, again)), step
    with pytest.raises(ValueError, match="must begin after step 10"):
        files.stream(4, seq_length=32, skip_steps="5:8").load_state_dict(plain.state_dict(), 10)
    assert sum(v["tokens"] for v in s.consumption(10).values()) == 10 * 4 * 32


def test_untrained_skips_follow_the_flag(files: Files) -> None:
    first = files.stream(4, seq_length=32, skip_steps="6:8,20:21")
    for step in (4, 5):
        for now in ("6:10", "20:21", "", "6:8,20:21"):
            resumed = files.stream(4, seq_length=32, skip_steps=now)
            changes = resumed.load_state_dict(json.loads(json.dumps(first.state_dict())), step)
            expected = files.stream(4, seq_length=32, skip_steps=now)
            assert keys(resumed, 1, 30) == keys(expected, 1, 30)
            assert ("skip: steps 6 to 7 are no longer skipped" in changes) == ("6:8" not in now)
    trained = files.stream(4, seq_length=32, skip_steps="")
    trained.load_state_dict(first.state_dict(), 6)
    assert keys(trained, 7, 9) == keys(first, 7, 9)
    with pytest.raises(
        ValueError, match="^--skip_steps=8:9 must not overlap 6:10; set one range, 6"
    ):
        files.stream(4, seq_length=32, skip_steps="8:9,6:10")


def test_max_epochs_ends_at_a_known_step(files: Files) -> None:
    s = files.stream(4, seq_length=64, datasets=("web", "tiny"), weights=(1.0, 1.0), max_epochs=2.0)
    rows = files.num_tokens("tiny") // 64
    assert s.last_step == 2 * rows * 2 // 4
    run(s, s.last_step)
    with pytest.raises(ValueError, match=r"--max_epochs=2 ends with step \d+ for source tiny"):
        s.next_batch()
    end = end_of_epochs(s, "tiny", 1, 1)
    assert s.consumption(end)["tiny"]["epoch"] >= 1 > s.consumption(end - 1)["tiny"]["epoch"]


def test_max_epochs_reads_the_step_before_a_skip(files: Files) -> None:
    """Not one step less, though the skipped steps go beyond the last epoch."""
    whole = files.stream(4, seq_length=64, datasets=("tiny",), max_epochs=2.0)
    last = whole.last_step
    assert last is not None
    skip = f"{last}:{last + 3}"
    skipped = files.stream(4, seq_length=64, datasets=("tiny",), max_epochs=2.0, skip_steps=skip)
    assert skipped.last_step == last - 1
    run(skipped, last - 1)
    with pytest.raises(ValueError, match=rf"--max_epochs=2 ends with step {last - 1}"):
        skipped.next_batch()


def test_source_without_sequence_counts_zero(files: Files) -> None:
    """Also after a resume that adds it, and one that removes it before its first sequence."""
    nothing = {"epoch": 0.0, "tokens": 0}
    s = files.stream(4, seq_length=32, datasets=("tiny", "web"), weights=(1, 1000))
    assert s.consumption(0) == {"tiny": nothing, "web": nothing}
    assert s.consumption(1)["tiny"] == nothing
    rows = describe_sources(s, 1).splitlines()
    assert rows[0].split() == "source tokens weight read to step 1 epochs".split()
    assert rows[1].split() == ["tiny", "916", "0.000999", "0", "0"]
    only_web = files.stream(4, seq_length=32, datasets=("web",))
    for resumed, state in ((s, only_web.state_dict()), (only_web, s.state_dict())):
        resumed.load_state_dict(state, 1)
        assert resumed.consumption(2)["tiny"] == nothing


def test_read_error_is_known_before_its_step(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps before it have their batches."""
    batch_at = TokenStream.batch_at

    def failing(self: TokenStream, step: int) -> Batch:
        if step == 3:
            raise read_failed("a.arrow", "Stale file handle")
        return batch_at(self, step)

    monkeypatch.setattr(TokenStream, "batch_at", failing)
    with files.stream(4, seq_length=32) as stream:
        assert stream.read_error_ahead(2) is None
        error = stream.read_error_ahead(3)
        assert error is not None
        assert str(error).startswith("a.arrow cannot be read: Stale file handle; ")
        assert len(stream.next_batch().tokens_BS) == len(stream.next_batch().tokens_BS) == 4
        with pytest.raises(ReadFailed):
            stream.next_batch()


def test_bestfit_splits_few_documents(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, {"web": [375_000]}, mean=50)
    fraction = {}
    for packing in ("concat", "bestfit"):
        s = files.stream(64, seq_length=256, packing=packing, logical_shards=1)
        is_split = [
            stop - start < length
            for step in range(1, 6)
            for address in s.order.addresses(step)
            for shard, document, start, stop in s.sequence_segments(address)
            if (length := len(files.documents["web"][shard][document])) <= 256
        ]
        fraction[packing] = sum(is_split) / len(is_split)
    assert 4 * fraction["bestfit"] < fraction["concat"]


def test_state_is_small_and_identical_on_ranks(files: Files, tmp_path: Path) -> None:
    names, others = tuple(SIZES), ("tiny", "web/", "./lang=en/dataset=code")
    a = files.stream(6, seq_length=32, datasets=names, weights=(0.5, 0.3, 0.2))
    b = files.stream(6, 2, 3, seq_length=32, datasets=others, weights=(2.0, 5.0, 3.0))
    assert a.state_dict() == b.state_dict()
    many = write_corpus(tmp_path, {f"source-{i:02d}": [2000] for i in range(20)})
    assert len(json.dumps(many.stream(8, seq_length=32).state_dict())) <= 4096


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_shard_layouts_give_the_same_batches(tmp_path: Path, packing: str) -> None:
    batches = []
    cases = [("lists", False, True), ("lists", True, True), ("scalars", False, True)]
    for layout, stored, counts in [*cases, ("scalars", True, True), ("lists", False, False)]:
        root = tmp_path / f"{layout}{stored}{counts}"
        files = write_corpus(root, SIZES, layout=layout, stored=stored, counts=counts)
        s = files.stream(8, seq_length=64, packing=packing)
        batches.append([s.batch_at(step) for step in (1, 20)])
    for other in batches[1:]:
        assert all(same(*pair) for pair in zip(batches[0], other, strict=True))


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
                pieces = a.sequence_segments(address)
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
    flags = {"seq_length": 32, "on_missing": "mask"}
    s, *halves = files.stream(8, **flags), *(files.stream(8, r, 2, **flags) for r in (0, 1))
    masked = 0
    for plain in whole:
        batch = s.next_batch()
        hidden = (batch.labels_BS == -100).all(dim=1)
        masked += int(hidden.sum())
        assert torch.equal(batch.tokens_BS[~hidden], plain.tokens_BS[~hidden])
        parts = [half.next_batch() for half in halves]
        assert same(tuple(torch.cat(c) for c in zip(*parts, strict=True)), batch)
    assert 0 < masked == s.num_masked_rows
    for step in range(1, 9):
        s.batch_at(step)  # a step that is read twice counts once
    assert masked == s.num_masked_rows
    assert all(step > s.step for step in s._masked)  # bounded, whatever the length of the run


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
    path.rename(tmp_path / "away")  # a launch without the shard does not forget its content
    blind = files.stream(4, seq_length=32, on_missing="mask")
    blind.load_state_dict(state, 3)
    state = blind.state_dict()
    (tmp_path / "away").rename(path)
    with pytest.raises(ValueError, match="shard web/shard-00002.arrow has other content"):
        files.stream(4, seq_length=32).load_state_dict(state, 3)
    os.truncate(path, len(data) // 2)  # corrupt, it is no other shard: the run goes on without it
    files.stream(4, seq_length=32, on_missing="mask").load_state_dict(state, 3)
    other = write_corpus(tmp_path / "other", SIZES | {"web": [30_000]})
    with pytest.raises(ValueError, match=r"source .* has \d+ shards .* in the checkpoint"):
        other.stream(4, seq_length=32).load_state_dict(state, 3)


@pytest.mark.parametrize(
    "flag", [{"seed": 2}, {"seq_length": 32}, {"packing": "bestfit"}, {"sep_token": 4}]
)
def test_fixed_flags_must_match_the_checkpoint(files: Files, flag: dict[str, Any]) -> None:
    state = files.stream(4, seq_length=64).state_dict()
    ((name, value),) = flag.items()
    with pytest.raises(ValueError, match=f"--{name}={value} does not match the checkpoint"):
        files.stream(4, **{"seq_length": 64, **flag}).load_state_dict(state, 3)


def test_begin_after_resumes_like_a_checkpoint(files: Files) -> None:
    plain, late, again = (files.stream(4, seq_length=32) for _ in range(3))
    late.begin_after(7)
    assert all(same(late.next_batch(), plain.batch_at(step)) for step in range(1, 6))
    assert late.step == 12
    again.load_state_dict(late.state_dict(), 12)
    assert all(same(again.next_batch(), plain.batch_at(step)) for step in range(6, 9))
    with pytest.raises(ValueError, match="--step=7 must be at least 8"):
        late.batch_at(7)


def test_shuffle_is_random_across_chunks(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, {"web": [600_000]}, mean=12)
    s = files.stream(1, seq_length=64, logical_shards=1)
    order = s.order.sources["web"]
    cells = np.zeros((16, 16))
    starts = np.cumsum([0] + [len(document) for document in files.documents["web"][0]])
    for window in range(order.layout.rounds):
        begins, length = order.ranges(0, window)
        assert len(begins) == 16
        pieces = s.segments("web", 0, window)
        position = starts[pieces["document"]] + pieces["start"]
        in_chunk = (position[:, None] - np.array(begins)) % order.num_tokens < length
        chunk = in_chunk.argmax(axis=1)
        np.add.at(cells, (chunk[:-1], chunk[1:]), 1)
    expected = np.outer(cells.sum(axis=1), cells.sum(axis=0)) / cells.sum()
    assert 0.6 < ((cells - expected) ** 2 / expected).sum() / 225 < 1.4


def test_ranks_keep_their_windows(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, {"web": [400_000], "code": [200_000]}, mean=300)
    s = files.stream(16, seq_length=32, logical_shards=64, datasets=("web", "code"), weights=(2, 1))
    addresses = [a for step in range(1, 200) for a in s.order.addresses(step, 4, 8)]  # rank 1 of 4
    assert len({(a.source, a.epoch, a.window) for a in addresses}) < 0.35 * len(addresses)


def test_weight_0_removes_a_source(files: Files, tmp_path: Path) -> None:
    flags = [f"--data_path={files.root}", "--datasets=web,tiny", "--seq_length=16"]
    flags += ["--weights=1,0", "--sep_token=3", "--model_variant=tiny", "--vocab_size=5000"]
    flags += ["--num_steps=2", "--global_batch_size=2", "--trackers=none"]
    lines = trained(*flags, f"--output_dir={tmp_path / 'run'}").splitlines()
    assert any("tiny is not read" in line for line in lines)
    (head,) = (number for number, line in enumerate(lines) if "read to step 2" in line)
    assert lines[head + 1].split()[::3] == ["web", "64"]
    assert not any(line.split()[:1] == ["tiny"] for line in lines)


def test_default_weights_follow_the_tokens(files: Files) -> None:
    quotas = files.stream(1, seq_length=16).state_dict()["phases"][0]["quotas"]
    total = sum(files.num_tokens(name) for name in SIZES)
    for name in SIZES:
        assert quotas[name] == pytest.approx(65536 * files.num_tokens(name) / total, abs=1)


def test_epochs_and_seeds_differ(files: Files) -> None:
    orders = []
    for seed, epoch in ((1, 0), (1, 1), (2, 0)):
        s = files.stream(1, seed=seed, seq_length=32, datasets=("web",))
        total = files.num_tokens("web") // 32
        steps = range(epoch * total + 1, (epoch + 1) * total + 1)
        orders.append([tuple(s.batch_at(step).tokens_BS[0].tolist()) for step in steps])
    assert len({*orders[0]} & {*orders[1]}) < total / 20
    assert orders[0] != orders[2]


def test_version_1_is_rejected_with_a_command(files: Files) -> None:
    s = files.stream(4, seq_length=64)
    state = s.state_dict() | {"order_version": 1}
    with pytest.raises(ValueError, match="version 1 of the data order.*--load_model_only=True"):
        s.load_state_dict(state, 3)


def test_state_of_a_custom_stream_is_named(files: Files) -> None:
    """It was called version 1 of the data order."""
    match = "^the checkpoint has the data state of --dataset_builder.*--load_model_only=True"
    with pytest.raises(ValueError, match=match):
        files.stream(4, seq_length=64).load_state_dict({"stride": 1}, 3)


def test_renamed_source_is_rejected(tmp_path: Path) -> None:
    """Its tokens were read again from the first."""
    files = write_corpus(tmp_path, {"web": [3000], "code": [1500]}, counts=False)
    state = files.stream(4, seq_length=32).state_dict()
    (tmp_path / "code").rename(tmp_path / "programs")
    renamed = {"datasets": ("programs", "web"), "seq_length": 32}
    match = "source programs has the shards of source code .*; rename its folder to code"
    with pytest.raises(ValueError, match=match):
        files.stream(4, **renamed).load_state_dict(state, 20)
    shutil.copytree(tmp_path / "programs", tmp_path / "code")  # a copy as another source
    files.stream(4, seq_length=32).load_state_dict(state, 20)


def test_fingerprint_depends_on_order_tokens_and_labels(files: Files) -> None:
    batch = files.stream(4, seq_length=32).batch_at(1)
    found = {fingerprint(batch, 0), fingerprint(batch, 1)}
    for column in (0, 1):
        changed = type(batch)(*(tensor.clone() for tensor in batch))
        changed[column][2, 5] += 1
        found.add(fingerprint(changed, 0))
    found.add(fingerprint(type(batch)(*(tensor.flip(0) for tensor in batch)), 0))
    assert len(found) == 5


def test_random_geometries_have_each_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100):
        draw = random.Random(seed)
        monkeypatch.setattr(order_module, "CHUNK_TOKENS", draw.choice([64, 512, 4096, 1 << 18]))
        tokens = draw.randint(*draw.choice([(5, 200), (200, 5000), (5000, 120_000)]))
        size = draw.randint(1, max(1, min(tokens, draw.choice([4, 40, 400]))))
        total, epoch = tokens // size, draw.randint(0, 5)
        fitted = fit_logical_shards(total, draw.random(), draw.choice([1, 8, 64, 1000]))
        shards = draw.choice([1, fitted, draw.randint(1, max(1, min(total, 40)))])
        order = SourceOrder(f"s{seed}", tokens, size, shards, seed)
        epochs, windows, positions = order.locate(np.arange(total) + epoch * total)
        assert (epochs == epoch).all()
        pairs, expected = set(zip(windows.tolist(), positions.tolist(), strict=True)), set()
        seen = np.zeros(tokens, np.int64)
        for window in set(windows.tolist()):
            starts, length = order.ranges(epoch, window)
            expected |= {(window, i) for i in range(len(starts) * length // size)}
            for start in starts:
                seen[(start + np.arange(length)) % tokens] += 1
        assert pairs == expected and len(pairs) == total, seed
        assert seen.max() == 1 and seen.sum() == total * size, seed
