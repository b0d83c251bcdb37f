"""Who may import whom, and the other rules that scripts/house.py checks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import house

ROOT = Path(__file__).parent.parent
FILES = house.python_files("fms_fsdp")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    assert not list(house.upward_imports(path))


def test_the_house_keeps_its_rules() -> None:
    ended = subprocess.run([sys.executable, "scripts/house.py"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.findall(r"^(\w+): [\d,]+ lines of code", ended.stdout, re.MULTILINE) == [*house.CEILINGS]


def test_each_broken_rule_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "fms_fsdp", tmp_path / "fms_fsdp", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    shutil.copyfile(ROOT / "main_training.py", tmp_path / "main_training.py")
    package = tmp_path / "fms_fsdp"
    (package / "models/new.py").write_text("def build() -> None:\n    from fms_fsdp.run import plan\n")
    (package / "models/named.py").write_text('LATER = ("fms_fsdp.train", 1)\nclass OptimConfig: ...\n')
    (package / "data/long.py").write_text("\n" * 400 + "# " + "x" * 109)
    (package / "data/longer.py").write_text("def build() -> None:" + "\n    pass" * 60)
    (package / "models/dense.py").write_text("x = [[y for y in z] for z in w]\na[1:], b = c\n")
    (package / "strange.py").touch()
    (package / "train.py").write_text("import fms_fsdp.tools.trace\n" + "x = 0\n" * 13000)
    (package / "mesh.py").write_text("def late() -> None:\n    import fms_fsdp.extras.factored\n")
    (package / "extras/new.py").write_text("from fms_fsdp.tools import trace\n")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(house, "STILL_LONG", [])
    text = "\n".join(house.broken_rules())
    for fault in (
        "models/new.py: models must not import fms_fsdp.run",
        "models/named.py: models must not import fms_fsdp.train",
        "class OptimConfig: must be defined once",
        "data/long.py: 401 lines, at most 400",
        "data/long.py:401: 111 characters, at most 110",
        "data/longer.py:1: build has 61 lines, at most 60",
        "models/dense.py:1: a comprehension stands within a comprehension",
        "models/dense.py:2: a slice is assigned to in a tuple",
        "fms_fsdp/strange: must have a line in LAYERS",
        "tools/trace.py: must not be imported by what trains",
        "mesh.py: mesh must not import fms_fsdp.extras.factored",
        "extras/factored.py: must not be imported by what trains",
        "extras/new.py: extras must not import fms_fsdp.tools",
        "core: ",
    ):
        assert fault in text


def test_what_trains_counts_imports_inside_functions_and_modules_loaded_by_name(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        'import json\n\ndef run() -> None:\n    from a import b\n    load("fms_fsdp.train:run")\n'
    )
    assert house.imported(path) == {"json", "a", "a.b", "fms_fsdp.train"}
    path = tmp_path / "other.py"
    path.write_text('load(f"fms_fsdp.optim.{name}")\n')
    modules = {f".{file.stem}" for file in (ROOT / "fms_fsdp" / "optim").glob("*.py")} - {".__init__"}
    assert len(modules) > 1
    assert house.imported(path) == {f"fms_fsdp.optim{name}" for name in modules | {""}}


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text('"""Doc\n\nstring."""\n\n# comment\nx = """\ntext\n"""  # this counts\n')
    assert house.lines_of_code(path) == 3


def test_config_imports_the_standard_library_alone() -> None:
    """And the class of its errors, whose module does the same."""
    for path in [*(ROOT / "fms_fsdp" / "config").glob("*.py"), ROOT / "fms_fsdp" / "errors.py"]:
        for name in house.imported(path):
            own = name.startswith(("fms_fsdp.config.", "fms_fsdp.errors"))
            assert own or name.split(".")[0] in sys.stdlib_module_names, name


def test_data_knows_no_process_group_and_no_model() -> None:
    for path in (ROOT / "fms_fsdp" / "data").glob("*.py"):
        assert not any(name.startswith("torch.distributed") for name in house.imported(path)), path


def test_nothing_that_trains_imports_an_extra_or_a_tool() -> None:
    """Not even indirectly or inside a function: what must be trusted ends below `extras/`."""
    found = house.import_closure(ROOT / "main_training.py")
    assert ROOT / "fms_fsdp/train.py" in found and ROOT / "fms_fsdp/data/shards/shard.py" in found
    for folder in house.APART:
        assert not [path for path in found if path.is_relative_to(ROOT / "fms_fsdp" / folder)]


def test_code_is_imported_by_name_in_one_place_alone() -> None:
    for path in FILES:
        if path.stem != "parts" and house.unit(path) != "tools":
            assert not {"importlib", "importlib.import_module"} & house.imported(path), path


def test_no_star_imports_and_no_junk_drawers() -> None:
    for path in FILES:
        assert path.stem not in ("utils", "common", "helpers", "base"), path
        assert not any(name.endswith(".*") for name in house.imported(path)), path


def test_dummy_data_and_the_whole_loop_need_neither_pyarrow_nor_sentencepiece() -> None:
    code = (
        "import sys, main_training\n"
        "print([name for name in ('pyarrow', 'sentencepiece', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_mistyped_flag_is_answered_before_torch_is_imported() -> None:
    code = (
        "import runpy, sys; sys.argv = ['main_training.py', '--model_varient=7b']\n"
        "try: runpy.run_path('main_training.py', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "2 False" and "--model_variant" in result.stderr
