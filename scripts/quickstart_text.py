"""Finds text that every machine with Python has, and tokenizes it for the quickstart.

    stdlib     the sources of the standard library, read in place
    packages   sources of installed packages, read in place
    prose      their docstrings and documentation files, collected into a file of at most 8 MB

The same installation gives the same text.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from fms_fsdp.errors import UserError
from fms_fsdp.launch import say
from fms_fsdp.run.run_dir import lock_folder

PACKAGES = (
    "torch/nn",
    "torch/optim",
    "torch/utils",
    "torch/distributed",
    "torch/fx",
    "numpy",
    "pyarrow",
    "tensorboard",
)
DOCUMENTED = ("torch", "sympy", "pandas", "networkx", "numpy")
PREPARE = (
    "--include=*.py,*.jsonl",
    "--train_tokenizer",
    "--vocab_size=2048",
    "--tokenizer_sample_mb=16",
    "--shard_tokens=1M",
    "--split=98,2",
    "--dedup",
)
NO_TEXT = (
    *("site-packages/*", "dist-packages/*", "test/*", "tests/*", "*/test/*", "*/tests/*"),
    *("idlelib/*", "lib2to3/*"),
    # These files hold tables.
    *("_vendor/*", "*/_vendor/*", "encodings/*", "html/entities.py", "locale.py", "*_pb2*.py"),
    *("*_mappings.py", "_sysconfigdata*", "pydoc_data/*", "stringprep.py", "*_casefix.py"),
    *("*_char_codes.py", "*opcode*.py", "_compat_pickle.py"),
)
PROSE = Path("data/quickstart_text/prose.jsonl")
LOCK_PATIENCE_S = 1800.0
PROSE_BYTES = 8_000_000
MIN_BYTES = 400
TRIPLE_QUOTED = re.compile(rb'"""(.*?)"""', re.DOTALL)
TESTS = re.compile(r"/(site-packages|dist-packages|tests?|idlelib|testing|_vendor)/")


def package_folder(name: str) -> Path | None:
    """The folder of an installed package; does not import the package."""
    top, _, rest = name.partition("/")
    spec = importlib.util.find_spec(top)
    folder = Path(spec.origin).parent / rest if spec and spec.origin else None
    return folder if folder and folder.is_dir() else None


def files(root: Path, pattern: str) -> Iterator[Path]:
    """Files below `root` in byte order of their paths, without tests and nested packages."""
    for path in sorted(root.rglob(pattern)):
        if path.is_file() and not TESTS.search(f"/{path.relative_to(root).parent.as_posix()}/"):
            yield path


def docstrings(path: Path) -> Iterator[str]:
    """Triple-quoted strings that begin a line, without their indentation."""
    source = path.read_bytes()
    for match in TRIPLE_QUOTED.finditer(source):
        before = source[source.rfind(b"\n", 0, match.start()) + 1 : match.start()].strip()
        if before in (b"", b"r", b"R") and len(match[1]) >= MIN_BYTES:
            yield inspect.cleandoc(match[1].decode(errors="ignore"))


def prose(stdlib: Path, site: Path | None) -> Iterator[str]:
    """Documentation files of the packages, then docstrings."""
    for pattern in ("METADATA", "*.rst", "*.md"):
        for path in files(site, pattern) if site else ():
            yield path.read_bytes().decode(errors="ignore")
    for path in files(stdlib, "*.py"):
        yield from docstrings(path)
    for name in DOCUMENTED:
        folder = package_folder(name)
        for path in files(folder, "*.py") if folder else ():
            yield from docstrings(path)


def collect(stdlib: Path, site: Path | None, target: Path) -> None:
    """Writes each text of the prose once; if they have more than PROSE_BYTES, a sample by hash."""
    texts = {
        hashlib.sha256(text.encode()).digest(): text
        for text in prose(stdlib, site)
        if len(text) >= MIN_BYTES
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".tmp")
    size = 0
    with open(temporary, "w", encoding="utf-8") as out:
        for digest in sorted(texts):
            size += len(texts[digest].encode())
            if size > PROSE_BYTES:
                break
            out.write(json.dumps({"text": texts[digest]}) + "\n")
    os.replace(temporary, target)


def find_inputs(prose_file: Path) -> str:
    """Writes the prose; returns the `--input` of `fms-fsdp prepare` with all sources."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    torch = package_folder("torch")
    collect(stdlib, torch.parent if torch else None, prose_file)
    inputs = [f"stdlib={stdlib}"]
    for name in PACKAGES:
        folder = package_folder(name)
        if folder is not None:
            inputs.append(f"packages={folder}")
    inputs.append(f"prose={prose_file}")
    return ",".join(inputs)


def prepare_text(target: Path) -> None:
    """Tokenizes the text into `target`; once for all processes and nodes that share the folder.

    Raises:
        UserError: `fms-fsdp prepare` failed, and has said why.
    """
    counts = target / "meta/counts.csv"
    if counts.is_file():
        return
    PROSE.parent.mkdir(parents=True, exist_ok=True)
    with lock_folder(PROSE.parent, LOCK_PATIENCE_S, "wait until it ends"):
        if counts.is_file():  # made by another process in the meantime
            return
        say(f"Tokenizing Python sources of this machine into {target} (once, less than a minute) …")
        command = [sys.executable, "-m", "fms_fsdp", "prepare", *PREPARE]
        command += [f"--input={find_inputs(PROSE)}", f"--output={target}"]
        ended = subprocess.run([*command, f"--exclude={','.join(NO_TEXT)}"], stdout=sys.stderr)
    if ended.returncode != 0:
        raise UserError(f"{target} could not be prepared; see the message above")
