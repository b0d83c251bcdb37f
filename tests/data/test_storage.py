"""The stream from an object store: a real S3 protocol server on loopback, and reads that fail."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import select
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import pytest
import torch
from pyarrow import fs

from fms_fsdp.checkpoint.folders import checkpoint_steps
from fms_fsdp.data import object_store, storage
from fms_fsdp.data.corpus import open_corpus
from fms_fsdp.data.object_store import PAGE, ObjectStore
from fms_fsdp.data.open_storage import open_storage
from fms_fsdp.data.sequences import SourceReader
from fms_fsdp.data.storage import Storage, max_open_files
from fms_fsdp.errors import ReadFailed, StorageError
from tests.cases import cases
from tests.data.corpora import Files, write_corpus

SIZES = {"web": [90_000, 300, 40_000], "lang=en/dataset=code": [50_000]}
LAYOUTS = ("lists", "scalars")
needs_moto = pytest.mark.skipif(
    importlib.util.find_spec("moto") is None,
    reason="needs moto's S3 server: pip install -e '.[dev]'",
)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    return {
        name: write_corpus(tmp_path_factory.mktemp(name), SIZES, layout=name, mean=300)
        for name in LAYOUTS
    }


@pytest.fixture(scope="module")
def s3_port(local: dict[str, Files]) -> Iterator[int]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        store = fs.S3FileSystem(
            access_key="test",
            secret_key="test",
            region="us-east-1",
            scheme="http",
            endpoint_override=f"127.0.0.1:{port}",
            allow_bucket_creation=True,
        )
        store.create_dir("corpus")
        for name, files in local.items():
            fs.copy_files(
                str(files.root),
                f"corpus/{name}",
                destination_filesystem=store,
                source_filesystem=fs.LocalFileSystem(),
            )
        yield port
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def s3_uri(path: str, port: int) -> str:
    return f"s3://{path}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"


def check_same_batches(files: Files, data_path: str, steps: int = 4) -> Storage:
    """Compares the batches of a store with those of the local copy; returns the store."""
    settings = {"seq_length": 64, "logical_shards": 4}
    with (
        files.stream(8, **settings) as here,
        files.stream(8, data_path=data_path, **settings) as there,
    ):
        for _ in range(steps):
            for a, b in zip(here.next_batch(), there.next_batch(), strict=True):
                assert torch.equal(a, b)
        assert here.state_dict() == there.state_dict()
        assert not here.corpus.storage.is_remote
        return cast(Storage, there.corpus.storage)


@pytest.mark.slow
@needs_moto
@pytest.mark.parametrize("layout", LAYOUTS)
def test_s3_batches_equal_local_ones(local: dict[str, Files], s3_port: int, layout: str) -> None:
    store = check_same_batches(local[layout], s3_uri(f"corpus/{layout}", s3_port))
    pages = sum(-(-store.size(path) // PAGE) for path in store.sizes)
    assert store._pages is not None and 0 < store._pages.num_fetched <= pages  # each at most once


class CuttingProxy(socketserver.ThreadingTCPServer):
    """Passes connections on to a port of this machine, and closes some of them within an answer."""

    def __init__(self, port: int, cuts: int) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.target = port
        self.cuts_left = cuts
        self.is_closing = False

    def close(self) -> None:
        self.is_closing = True
        self.shutdown()
        self.server_close()  # waits for the threads of the connections


class Passing(socketserver.BaseRequestHandler):
    server: CuttingProxy

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.target)) as store:
            others = {self.request: store, store: self.request}
            while not self.server.is_closing:
                ready, _, _ = select.select(list(others), [], [], 0.1)
                for source in ready:
                    data = source.recv(65536)
                    if not data:
                        return
                    # An answer this long has a piece of a file, not only headers or a listing.
                    if source is store and len(data) > 20_000 and self.server.cuts_left > 0:
                        self.server.cuts_left -= 1
                        self.request.sendall(data[:10_000])
                        return
                    others[source].sendall(data)


@pytest.mark.slow
@needs_moto
def test_cut_answers_are_read_again(local: dict[str, Files], s3_port: int) -> None:
    proxy = CuttingProxy(s3_port, cuts=3)
    threading.Thread(target=proxy.serve_forever, args=(0.05,)).start()
    try:
        check_same_batches(local["lists"], s3_uri("corpus/lists", proxy.server_address[1]))
        assert proxy.cuts_left == 0
    finally:
        proxy.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_file_uri_batches_equal_local_ones(local: dict[str, Files], layout: str) -> None:
    check_same_batches(local[layout], local[layout].root.as_uri())


@pytest.mark.slow
def test_dead_endpoint_is_rejected_within_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    start, match = time.monotonic(), "^--data_path=s3://corpus/lists cannot be listed: .*; check"
    with pytest.raises(OSError, match=match) as caught:
        _ = open_storage(s3_uri("corpus/lists", port)).sizes
    assert time.monotonic() - start < 10 and "\n" not in str(caught.value)


@pytest.mark.parametrize("uri", ["s3://key:se cret@top/x", "s3://key:se/cret@top/x"])
def test_address_in_an_error_has_no_secret(uri: str) -> None:
    """pyarrow's error repeats the address."""
    with pytest.raises(StorageError, match="cannot be listed: Cannot parse URI: 's3://") as caught:
        open_storage(uri)
    assert "cret" not in str(caught.value)


@pytest.mark.slow
@needs_moto
def test_missing_bucket_folder_and_file_are_named(local: dict[str, Files], s3_port: int) -> None:
    for path in ("nobucket/x", "corpus/nowhere"):
        match = f"^--data_path=s3://{path} does not exist; correct"
        with pytest.raises(FileNotFoundError, match=match) as caught:
            open_corpus(local["lists"].section(data_path=s3_uri(path, s3_port)))
        assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"not in s3://corpus/lists"):
        open_storage(s3_uri("corpus/lists", s3_port))._open("web/shard-00009.arrow")


class Flaky:
    """A file of random bytes in a file system whose reads fail: fails[i] is raised by read i."""

    def __init__(self, size: int, fails: list[Exception] | None = None) -> None:
        self.data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
        self.fails, self.num_reads = fails or [], 0

    def get_file_info(self, wanted: fs.FileSelector | str) -> fs.FileInfo | list[fs.FileInfo]:
        files = [
            fs.FileInfo(f"top/{name}", type=fs.FileType.File, size=len(self.data))
            for name in ("a/b", ".hidden")
        ]
        return files if isinstance(wanted, fs.FileSelector) else files[0]

    def open_input_file(self, path: str) -> Flaky:
        return self

    def read_at(self, size: int, offset: int) -> bytes:
        self.num_reads += 1
        if self.fails:
            raise self.fails.pop(0)
        return self.data[offset : offset + size]


@pytest.fixture
def open_flaky(monkeypatch: pytest.MonkeyPatch) -> Callable[[Flaky], Storage]:
    def opened(store: Flaky) -> Storage:
        monkeypatch.setattr(ObjectStore, "_open_filesystem", lambda _: (store, "top"))
        return open_storage("s3://key:secret@top/x?region=r")

    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    return opened


def test_reads_are_exact_and_the_cache_is_bounded(
    open_flaky: Callable[[Flaky], Storage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "CACHE_BYTES", 16 * PAGE)
    store, rng = Flaky(100 * PAGE + 77), np.random.default_rng(1)
    files = open_flaky(store)
    assert list(files.sizes) == ["a/b"] and files.root == "s3://top/x"  # no secret
    assert files._pages is not None
    for _ in range(400):
        offset = int(rng.integers(0, len(store.data)))
        size = int(rng.choice([1, 500, PAGE, 5 * PAGE]))
        if rng.random() < 0.3:
            files.prefetch("a/b", [(offset, min(offset + 3 * PAGE, len(store.data)))])
        assert files.read("a/b", size, offset) == store.data[offset : offset + size]
        assert len(files._pages._slots) <= 16 and len(files._pages._coming) <= 100
    files.close()
    assert files.read("a/b", 9, 3 * PAGE - 4) == store.data[3 * PAGE - 4 : 3 * PAGE + 5]


def test_prefetched_pages_are_read_once(open_flaky: Callable[[Flaky], Storage]) -> None:
    store = Flaky(64 * PAGE)
    files = open_flaky(store)
    files.prefetch("a/b", [(0, PAGE), (PAGE, 8 * PAGE), (40 * PAGE, 40 * PAGE + 10)])
    cast(ObjectStore, files)._pages._pool.shutdown()  # from here on, no page can be fetched
    assert store.num_reads == 9
    for _ in range(2):
        assert files.read("a/b", 8 * PAGE, 0) == store.data[: 8 * PAGE]
        assert files.read("a/b", 10, 40 * PAGE) == store.data[40 * PAGE : 40 * PAGE + 10]
    assert store.num_reads == 9


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_tokens_of_a_window_are_prefetched(
    local: dict[str, Files], monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    ranges: dict[str, list[tuple[int, int]]] = {}
    read = SourceReader._read
    num_reads = 0

    def recorded(self: ObjectStore, path: str, found: Iterable[tuple[int, int]]) -> None:
        ranges.setdefault(path, []).extend(found)

    def checked(self: SourceReader, number: int, width: int, count: int, offset: int) -> Any:
        nonlocal num_reads
        num_reads += 1
        stop = offset + count * width
        prefetched = ranges[self.source.paths[number]]
        assert any(a <= offset and stop <= b for a, b in prefetched), (offset, stop)
        return read(self, number, width, count, offset)

    monkeypatch.setattr(ObjectStore, "prefetch", recorded)
    monkeypatch.setattr(SourceReader, "_read", checked)
    files = local["lists"]
    with files.stream(8, data_path=files.root.as_uri(), seq_length=600, packing=packing) as stream:
        stream.batch_at(1)
    assert num_reads > 8


def test_close_drops_queued_pages(open_flaky: Callable[[Flaky], Storage]) -> None:
    class Waiting(Flaky):
        may_read = threading.Event()

        def read_at(self, size: int, offset: int) -> bytes:
            assert self.may_read.wait(60)
            return super().read_at(size, offset)

    store = Waiting(64 * PAGE)
    files = open_flaky(store)
    files.prefetch("a/b", [(0, 64 * PAGE)])
    reader = threading.Thread(target=lambda: read.append(files.read("a/b", 9, 63 * PAGE)))
    read: list[bytes] = []
    reader.start()
    files.close()
    store.may_read.set()
    reader.join(60)
    assert read == [store.data[63 * PAGE : 63 * PAGE + 9]]  # a read under way is not lost
    cast(ObjectStore, files)._pages._pool.shutdown()
    assert store.num_reads <= 17


def test_failed_cache_writes_lose_no_page(
    open_flaky: Callable[[Flaky], Storage],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(object_store, "CACHE_BYTES", 16 * PAGE)
    rng, pwrite = np.random.default_rng(1), os.pwrite

    def failing(descriptor: int, data: bytes, offset: int) -> int:
        match rng.integers(4):
            case 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case 1:
                return pwrite(descriptor, data[: len(data) // 2], offset)
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(object_store.os, "pwrite", failing)
    store = Flaky(40 * PAGE + 77)
    files = open_flaky(store)
    for number in rng.integers(0, 40, 200).tolist():
        files.prefetch("a/b", [((number + 1) * PAGE, (number + 1) * PAGE + 1)])
        start = number * PAGE + 9
        assert files.read("a/b", PAGE, start) == store.data[start : start + PAGE]
    assert caplog.text.count("the page cache in") == 1


def test_failed_reads_are_retried_and_named(
    open_flaky: Callable[[Flaky], Storage], caplog: pytest.LogCaptureFixture
) -> None:
    store = Flaky(PAGE, [OSError("reset\nby peer"), OSError("again")])
    with caplog.at_level(logging.WARNING, "fms_fsdp"):
        assert len(open_flaky(store).read("a/b", 10, 0)) == 10 and store.num_reads == 3
    assert "try 1 of 8 failed: s3://top/x/a/b: reset by peer" in caplog.text
    store = Flaky(PAGE, [OSError("reset\nby peer")] * 9)
    with pytest.raises(ReadFailed, match="^s3://top/x/a/b cannot be read: reset by peer; the file"):
        open_flaky(store).read("a/b", 10, 0)
    assert store.num_reads == object_store.NUM_TRIES
    denied = OSError("AWS Error ACCESS_DENIED during GetObject")
    for error in (FileNotFoundError("gone"), PermissionError("no"), denied):
        store = Flaky(PAGE, [error])
        with pytest.raises(type(error), match=str(error)):
            open_flaky(store).read("a/b", 10, 0)
        assert store.num_reads == 1


def test_object_shorter_than_its_listing_is_rejected(
    open_flaky: Callable[[Flaky], Storage],
) -> None:
    """A short page would shift the bytes of the pages after it."""
    store = Flaky(3 * PAGE)
    files = open_flaky(store)
    assert files.size("a/b") == 3 * PAGE
    store.data = store.data[: PAGE + 5]
    match = f"^s3://top/x/a/b: received 5 of {PAGE} bytes at {PAGE}$"
    with pytest.raises(StorageError, match=match):
        files.read("a/b", 3 * PAGE, 0)
    assert files.read("a/b", 9, 0) == store.data[:9]


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shard").write_bytes(b"tokens of a shard")
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 4), offset))
    files = open_storage(str(tmp_path))
    assert files.read("shard", 10, 2) == b"kens of a " and files.read("shard", 99, 12) == b"shard"


def test_stale_handle_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One failed read of a local shard ended the run as bad input. No disk that fails can be mounted in
    CI, so the call answers as its: a handle that is stale stays stale."""
    (tmp_path / "shard").write_bytes(b"tokens")
    files, pread, open_regular = open_storage(str(tmp_path)), os.pread, storage.open_regular
    num_opened = 0
    code = errno.ESTALE
    waits: list[float] = []

    def counted_open(path: str) -> int:
        nonlocal num_opened
        num_opened += 1
        return open_regular(path)

    def failing(descriptor: int, size: int, offset: int) -> bytes:
        if num_opened == 1 or code != errno.ESTALE:
            raise OSError(code, os.strerror(code))
        return pread(descriptor, size, offset)

    monkeypatch.setattr(storage, "open_regular", counted_open)
    monkeypatch.setattr(os, "pread", failing)
    monkeypatch.setattr(storage.time, "sleep", waits.append)
    with caplog.at_level(logging.WARNING, "fms_fsdp"):
        assert files.read("shard", 3, 0) == b"tok"
    assert (num_opened, len(waits)) == (2, 1)
    assert f"try 1 of 6 failed: {tmp_path}/shard: Stale file handle" in caplog.text
    code = errno.EIO
    match = f"^{tmp_path}/shard cannot be read: Input/output error; the file is not corrupt"
    with pytest.raises(ReadFailed, match=match):
        files.read("shard", 3, 0)
    assert 5 < sum(waits[1:]) < 10
    code = errno.EACCES  # no further try helps
    with pytest.raises(PermissionError):
        files.read("shard", 3, 0)


@pytest.mark.parametrize("code", sorted(storage.SHORTAGES))
def test_shortage_of_the_machine_masks_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The valid shard was masked, or without --on_missing=mask the run ended as bad input."""
    files, waits, pread = write_corpus(tmp_path, {"web": [3000]}), list[float](), os.pread
    num_failures = 1

    def failing(descriptor: int, size: int, offset: int) -> bytes:
        if len(waits) < num_failures:
            raise OSError(code, os.strerror(code))
        return pread(descriptor, size, offset)

    with files.stream(4, seq_length=32, on_missing="mask") as stream:
        monkeypatch.setattr(os, "pread", failing)
        monkeypatch.setattr(storage.time, "sleep", waits.append)
        stream.batch_at(1)
        assert len(waits) == 1 and not stream._masked
        num_failures = 99
        with pytest.raises(ReadFailed, match="the file is not corrupt"):
            stream.batch_at(2)


@pytest.mark.parametrize("uri", [False, True])
def test_listing_follows_links_without_a_stat_of_files(tmp_path: Path, uri: bool) -> None:
    root = tmp_path / "data"
    hidden = (".hidden/4", "a/.5", "lost+found/8")
    for name in ("b/2", "a/1", "a/deep/3", "b/shard.arrow", *hidden):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"tokens")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "6").write_bytes(b"six")
    (root / "linked").symlink_to("../elsewhere")
    (root / "a" / "7").symlink_to("1")
    (root / "a" / "broken").symlink_to("nowhere")
    (root / "a" / "itself").symlink_to("itself")
    os.mkfifo(root / "a" / "pipe")
    address = root.as_uri() if uri else str(root)
    files = open_storage(address)
    expected = ["a/1", "a/7", "a/deep/3", "b/2", "b/shard.arrow", "linked/6"]
    assert files.sizes == dict.fromkeys(expected)
    assert [files.size(path) for path in ("a/7", "linked/6")] == [6, 3]
    real = files.real_paths(expected)
    changed = {path for path in expected if real[path] != str(root / path)}
    assert changed == {"a/7", "linked/6"} and real["a/7"] == str(root / "a/1")
    assert real["linked/6"] == str(tmp_path / "elsewhere/6")
    with pytest.raises(FileNotFoundError):
        files.size("a/8")
    inner = open_storage(f"{address}/a", files.listing.below("a"))
    assert list(inner.sizes) == ["1", "7", "deep/3"] and inner.real_paths(["7"])["7"] == real["a/7"]
    assert not open_storage(address).is_listed and inner.read("deep/3", 3, 1) == b"oke"


def test_links_to_folders_above_end_the_listing(tmp_path: Path) -> None:
    root = tmp_path / "data"
    for name in ("a/deep/1", "b/2"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"tokens")
    for link, target in (("a/x", ".."), ("a/y", "."), ("a/deep/z", "../../.."), ("a/deep/w", "/")):
        (root / link).symlink_to(target)
    (root / "a/to_b").symlink_to("../b")  # each is a folder of its own, but they lead in a circle
    (root / "b/to_a").symlink_to("../a")
    found = list(Storage(str(root)).sizes)
    assert found == ["a/deep/1", "a/to_b/2", "b/2", "b/to_a/deep/1"]


def test_long_listing_reports_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storage, "PROGRESS_S", 0.02)
    reached: list[int] = []
    with storage.reporting_progress(lambda: f"listing x: {len(reached)} files"):
        reached.append(1)
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [f"note: listing x: 1 files after {s} s" for s in (0.02, 0.04)]
    time.sleep(0.1)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("code", [errno.EIO, errno.ESHUTDOWN, errno.EACCES])
def test_failing_folder_is_not_a_missing_one(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was "is not a folder; make one with prepare"; for checkpoints, a run would start from scratch."""

    def failing(path: object, **settings: object) -> NoReturn:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "stat", failing)
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    expected = StorageError if code == errno.EACCES else ReadFailed
    with pytest.raises(expected, match=f"cannot be .*{os.strerror(code)}"):
        open_storage(str(tmp_path))
    with pytest.raises(OSError, match=os.strerror(code)):
        checkpoint_steps(tmp_path)


@cases("""
    uri | text
    ftp://host/x | ftp://host/x must be a folder or begin with one of s3://
    s3a://KEY:SECRET@host/x | s3a://host/x must be a folder
    az://container/x | cannot be listed
    gs:// | must name a bucket
    s3:///folder | must name a bucket
""")
def test_wrong_uri_is_rejected(uri: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT", raising=False)
    with pytest.raises((ValueError, OSError), match=f"^--data_path=.*{text}") as caught:
        open_storage(uri)
    assert "\n" not in str(caught.value) and "SECRET" not in str(caught.value)


def test_open_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 16 <= max_open_files() <= 256
    monkeypatch.setattr(storage, "max_open_files", lambda: 4)
    for i in range(20):
        (tmp_path / f"{i}").write_bytes(bytes([i] * 8))
    files = open_storage(str(tmp_path))
    for i in [*range(20), 3, 17]:
        assert files.read(f"{i}", 4, 2) == bytes([i] * 4)
        assert files._open.cache_info().currsize <= 4
    files.close()
    assert files._open.cache_info().currsize == 0
