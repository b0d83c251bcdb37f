"""Imports follow the layers of tests/layers.py, and other rules of the code's structure."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests import layers

ROOT = Path(__file__).parent.parent
FILES = layers.python_files("fms_fsdp")


def test_layers_hold() -> None:
    assert not list(layers.broken_layers())


def test_no_module_imports_itself_through_others() -> None:
    modules = {layers.module_name(path): path for path in FILES}
    imports: dict[str, set[str]] = {}
    for name, path in modules.items():
        imports[name] = set(layers.imported(path) & modules.keys() - {name})
    list(TopologicalSorter(imports).static_order())  # raises CycleError with the circle


def test_forbidden_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(
        ROOT / "fms_fsdp", tmp_path / "fms_fsdp", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copyfile(ROOT / "main_training.py", tmp_path / "main_training.py")
    package = tmp_path / "fms_fsdp"
    (package / "models/new.py").write_text(
        "def build() -> None:\n    from fms_fsdp.run import plan\n"
    )
    (package / "models/named.py").write_text('LATER = ("fms_fsdp.train", 1)\n')
    (package / "optim/new.py").write_text("from fms_fsdp.parallel import fsdp\n")
    (package / "strange.py").touch()
    (package / "train.py").write_text("import fms_fsdp.tools.report_command\n")
    (package / "distributed/mesh.py").write_text("from fms_fsdp.tools import inspect_command\n")
    late = "def late() -> None:\n    from fms_fsdp.hf import weights\n"
    (package / "data/order.py").write_text("from fms_fsdp.hf import weights\n")
    (package / "distributed/late.py").write_text(late)
    (package / "models/late.py").write_text(late)
    monkeypatch.setattr(layers, "ROOT", tmp_path)
    text = "\n".join(layers.broken_layers())
    for fault in (
        "models/new.py: models must not import fms_fsdp.run",
        "models/named.py: models must not import fms_fsdp.train",
        "optim/new.py: optim must not import fms_fsdp.parallel",
        "fms_fsdp/strange: must have a place in LAYERS",
        "tools/report_command.py: must not be imported by main_training.py",
        "distributed/mesh.py: distributed must not import fms_fsdp.tools.inspect_command",
        "data/order.py: data must not import fms_fsdp.hf",
        "distributed/late.py: distributed must not import fms_fsdp.hf",
    ):
        assert fault in text
    assert "models/late.py" not in text


def test_imports_in_functions_and_strings_count(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        'import json\n\ndef run() -> None:\n    from a import b\n    load("fms_fsdp.train:run")\n'
    )
    assert layers.imported(path) == {"json", "a", "a.b", "fms_fsdp.train"}
    path = tmp_path / "other.py"
    path.write_text('load(f"fms_fsdp.optim.{name}")\n')
    files = (ROOT / "fms_fsdp" / "optim").glob("*.py")
    modules = {f"fms_fsdp.optim.{file.stem}" for file in files if file.stem != "__init__"}
    assert layers.imported(path) == modules | {"fms_fsdp.optim"}


def test_config_imports_standard_library_and_fire() -> None:
    names = ("errors", "process", "console", "files")
    small = [ROOT / "fms_fsdp" / f"{name}.py" for name in names]
    for path in [*(ROOT / "fms_fsdp" / "config").glob("*.py"), *small]:
        for name in layers.imported(path):
            own = name.startswith(("fms_fsdp.config.", *(f"fms_fsdp.{each}" for each in names)))
            assert own or name.split(".")[0] in {*sys.stdlib_module_names, "fire"}, name


def printed(code: str) -> tuple[str, str]:
    """Returns what Python prints and reports in the repository."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


def test_data_knows_no_process_group() -> None:
    for path in (ROOT / "fms_fsdp" / "data").glob("*.py"):
        assert not any(name.startswith("torch.distributed") for name in layers.imported(path)), path


def test_one_place_imports_by_name() -> None:
    for path in FILES:
        if path.stem not in ("packages", "__main__") and layers.unit(path) != "tools":
            assert not {"importlib", "importlib.import_module"} & layers.imported(path), path


def test_no_star_imports_nor_utils() -> None:
    for path in FILES:
        assert path.stem not in ("utils", "common", "helpers", "base"), path
        assert not any(name.endswith(".*") for name in layers.imported(path)), path


def test_text_files_name_their_encoding() -> None:
    """ruff (PLW1514) finds such a call only if it knows that the object is a path."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in ("read_text", "write_text", "FileHandler"):
                    names = [keyword.arg for keyword in node.keywords]
                    assert "encoding" in names, f"{path}:{node.lineno}"


def test_training_imports_no_optional_package() -> None:
    optional = ("pyarrow", "sentencepiece", "transformers")
    code = f"import sys, main_training\nprint([n for n in {optional} if n in sys.modules])"
    assert printed(code)[0] == "[]"


def test_wrong_flag_is_answered_before_torch() -> None:
    code = (
        "import runpy, sys; sys.argv = ['main_training.py', '--model_varient=7b']\n"
        "try: runpy.run_path('main_training.py', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    shown, error = printed(code)
    assert shown == "2 False" and "--model_variant" in error
