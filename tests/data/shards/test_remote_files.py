"""The stream from an object store: a real S3 protocol server on loopback, and connections that break."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import fs

from fms_fsdp.data.shards.ipc import ArrowFile
from fms_fsdp.data.shards.manifest import open_corpus
from fms_fsdp.errors import UserError
from fms_fsdp.extras.fms_layout import gather_int64
from fms_fsdp.extras.remote_files import PAGE, RemoteFiles
from fms_fsdp.extras.remote_uri import start_errors
from tests.data.corpora import Files, write_corpus

SIZES = {"web": [90_000, 300, 40_000], "lang=en/dataset=code": [50_000]}
LAYOUTS = ("lists", "scalars")
needs_moto = pytest.mark.skipif(
    importlib.util.find_spec("moto") is None, reason="needs moto's S3 server: pip install -e '.[dev]'"
)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    return {
        name: write_corpus(tmp_path_factory.mktemp(name), SIZES, layout=name, mean=300) for name in LAYOUTS
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


def check_same_batches(files: Files, data_path: str, steps: int = 4) -> Any:
    """Compares batches from another place with those of the local copy; returns the storage's counters."""
    settings = {"seq_length": 64, "logical_shards": 4}
    with files.stream(8, **settings) as here, files.stream(8, data_path=data_path, **settings) as there:
        for _ in range(steps):
            for a, b in zip(here.next_batch(), there.next_batch(), strict=True):
                assert torch.equal(a, b)
        assert here.state_dict() == there.state_dict()
        assert here.rows.files.counters is None  # type: ignore[attr-defined]
        return there.rows.files.counters  # type: ignore[attr-defined]


@needs_moto
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_from_s3_are_those_of_the_local_copy(
    local: dict[str, Files], s3_port: int, layout: str
) -> None:
    counters = check_same_batches(local[layout], s3_uri(f"corpus/{layout}", s3_port))
    size = sum(path.stat().st_size for path in local[layout].root.rglob("*.*"))
    assert 0 < counters.num_bytes <= size  # each page at most once
    assert counters.stall_s > 0 and counters.retries == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_from_a_file_uri_are_those_of_the_local_copy(local: dict[str, Files], layout: str) -> None:
    check_same_batches(local[layout], local[layout].root.as_uri())


class Proxy:
    """Passes TCP connections on to a port; the first `num_cuts` answers with a large body are cut after
    `cut_at` bytes."""

    def __init__(self, port: int, num_cuts: int, cut_at: int = 20_000) -> None:
        self._target, self.cuts_left, self._cut_at = port, num_cuts, cut_at
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._open: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                passed += len(data)
                if answers and passed > self._cut_at and self.cuts_left > 0:
                    self.cuts_left -= 1
                    break
                sink.sendall(data)
        for side in (source, sink):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for side in self._open:
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()


@needs_moto
def test_a_connection_that_drops_in_the_middle_of_a_body_is_tried_again(
    local: dict[str, Files], s3_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = Proxy(s3_port, num_cuts=3)
    try:
        with caplog.at_level(logging.WARNING, "fms_fsdp"):
            counters = check_same_batches(local["lists"], s3_uri("corpus/lists", proxy.port))
    finally:
        proxy.close()
    assert proxy.cuts_left == 0 and counters.retries >= 1
    assert "corpus/lists/" in caplog.text and "try 1 of 8 failed" in caplog.text


def test_a_dead_endpoint_is_refused_in_one_line_within_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(
        OSError, match=r"^--data_path \(s3://corpus/lists\) cannot be listed: .*failed 4 times.*; check"
    ) as e:
        RemoteFiles(s3_uri("corpus/lists", port))
    assert time.monotonic() - start < 10 and "\n" not in str(e.value)


@needs_moto
def test_what_is_not_there_is_refused_in_one_line(local: dict[str, Files], s3_port: int) -> None:
    for path in ("nobucket/x", "corpus/nowhere"):
        with pytest.raises(
            FileNotFoundError, match=rf"^--data_path \(s3://{path}\) does not exist: .*; correct"
        ) as e:
            open_corpus(local["lists"].section(data_path=s3_uri(path, s3_port)))
        assert "\n" not in str(e.value)
    with pytest.raises(FileNotFoundError, match=r"not in s3://corpus/lists"):
        RemoteFiles(s3_uri("corpus/lists", s3_port)).size("web/shard-00009.arrow")


@pytest.mark.parametrize("uri", ["ftp://host/x", "s4://corpus"])
def test_unknown_schemes_are_refused(local: dict[str, Files], uri: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^--data_path \({uri}\) must be a folder or begin with one of s3://"
    ):
        open_corpus(local["lists"].section(data_path=uri))


class Flaky:
    """One file of random bytes, opened through a filesystem that fails as told: fails[i] is raised at the
    i-th read."""

    def __init__(self, size: int, fails: list[Exception] | None = None) -> None:
        self.data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
        self.fails, self.num_reads = fails or [], 0

    def get_file_info(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        if self.fails and isinstance(self.fails[0], PermissionError):
            raise self.fails[0]
        return [
            fs.FileInfo(f"top/{name}", type=fs.FileType.File, size=len(self.data))
            for name in ("a/b", ".hidden")
        ]

    def open_input_file(self, path: str) -> Flaky:
        return self

    def read_at(self, size: int, offset: int) -> bytes:
        self.num_reads += 1
        if self.fails:
            raise self.fails.pop(0)
        return self.data[offset : offset + size]

    def files(self, **settings: Any) -> RemoteFiles:
        return RemoteFiles("s3://top", filesystem=(self, "top"), **{"backoff_s": 0.001, **settings})


def test_reads_are_exact_and_the_cache_is_bounded() -> None:
    store = Flaky(100 * PAGE + 77)
    files, rng = store.files(cache_bytes=16 * PAGE), np.random.default_rng(1)
    assert list(files.walk("")) == ["a/b"] and list(files.walk("a")) == ["a/b"]
    for _ in range(400):
        offset, size = int(rng.integers(0, len(store.data) + 9)), int(rng.choice([1, 500, PAGE, 5 * PAGE]))
        if rng.random() < 0.3:
            files.prefetch("a/b", np.array([offset, -5]), np.array([3 * PAGE, 5]))
        assert files.pread("a/b", size, offset) == store.data[offset : offset + size]
        assert len(files._slots) <= 15 and len(files._in_flight) <= 100
    offsets = np.sort(rng.integers(0, len(store.data) - 8, 300))
    expected = [int.from_bytes(store.data[at : at + 8], "little", signed=True) for at in offsets.tolist()]
    assert gather_int64(ArrowFile(files, "a/b"), offsets).tolist() == expected
    files.close()
    assert files.pread("a/b", 9, 3 * PAGE - 4) == store.data[3 * PAGE - 4 : 3 * PAGE + 5]


def test_prefetch_joins_pages_and_later_reads_cost_no_request() -> None:
    store = Flaky(64 * PAGE)
    files = store.files(cache_bytes=128 * PAGE)
    files.prefetch("a/b", np.array([0, PAGE, 40 * PAGE]), np.array([PAGE, 7 * PAGE, 10]))
    for _ in range(2):
        assert files.pread("a/b", 8 * PAGE, 0) == store.data[: 8 * PAGE]
        assert files.pread("a/b", 10, 40 * PAGE) == store.data[40 * PAGE : 40 * PAGE + 10]
    assert store.num_reads == 2 and files.counters.num_bytes == 9 * PAGE


def test_errors_are_tried_again_a_bounded_number_of_times_and_named() -> None:
    files = Flaky(PAGE, [OSError("reset\nby peer"), OSError("again")]).files(max_tries=3)
    assert len(files.pread("a/b", 10, 0)) == 10 and files.counters.retries == 2
    store = Flaky(PAGE, [OSError("reset\nby peer")] * 9)
    with pytest.raises(OSError, match=r"^s3://top/a/b failed 3 times, at last with: reset by peer$"):
        store.files(max_tries=3).pread("a/b", 10, 0)
    assert store.num_reads == 3
    for error in (FileNotFoundError("gone"), OSError("AWS Error ACCESS_DENIED during GetObject")):
        store = Flaky(PAGE, [error])
        with pytest.raises(type(error), match=str(error)):
            store.files().pread("a/b", 10, 0)
        assert store.num_reads == 1


def test_refused_credentials_are_named_with_a_remedy() -> None:
    with pytest.raises(
        UserError, match=r"^--data_path \(s3://top\) cannot be opened .*; set AWS_ACCESS_KEY_ID"
    ):
        Flaky(1, [PermissionError("ACCESS_DENIED")]).files()


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("az://container/x", "must name an account; set AZURE_STORAGE_ACCOUNT"),
        ("az://nobody@container/x", "cannot be opened with these credentials"),
        ("gs://", "must name a bucket"),
        ("s3:///folder", "must name a bucket"),
    ],
)
def test_other_stores_are_refused_in_one_line(uri: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an account to test them with: URIs are understood, and what is missing is said."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT", raising=False)
    with pytest.raises((ValueError, OSError), match=text) as caught:
        RemoteFiles(uri)
    assert str(caught.value).startswith("--data_path (") and "\n" not in str(caught.value)


def test_google_without_credentials_is_named_so() -> None:
    refused = pytest.raises(UserError, match=r"\(gs://top\) cannot .*; set GOOGLE_APPLICATION_CREDENTIALS")
    with refused, start_errors("gs://top"):
        raise OSError(
            "google::cloud::Status(UNAVAILABLE: Could not create a OAuth2 access token to authenticate"
        )


def test_a_secret_in_the_uri_is_not_shown(tmp_path: Path) -> None:
    files = RemoteFiles("s3://key:secret@top/x?region=r", filesystem=(Flaky(1), "top"))
    assert files.root == "s3://top/x"
