"""Who may import whom: downward only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# from the bottom; a module may import its own package and whatever stands on an earlier line
LAYERS = [
    ["config", "safe_names", "errors", "atomic", "cpu_threads"],
    ["flags"],
    ["runtime"],
    ["mesh"],
    ["data"],
    ["models"],
    ["predict"],
    ["parallel", "optim", "checkpoint"],
    ["run"],
    ["observe", "evaluate", "saving"],
    ["train"],
    ["tools"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted((ROOT / "fms_fsdp").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Full names of every module that `path` imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def unit(path: Path) -> str:
    return path.relative_to(ROOT / "fms_fsdp").with_suffix("").parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    own = unit(path)
    if own == "__init__":
        return
    for name in imported(path):
        if name.startswith("fms_fsdp."):
            other = name.split(".")[1]
            if other in LEVEL and other != own:
                assert LEVEL[other] < LEVEL[own], f"{own} imports {other}"


def test_config_imports_the_standard_library_alone() -> None:
    for path in (ROOT / "fms_fsdp" / "config").glob("*.py"):
        for name in imported(path):
            assert name.split(".")[0] in sys.stdlib_module_names or name.startswith("fms_fsdp.config."), name


def test_data_knows_no_process_group_and_no_model() -> None:
    for path in (ROOT / "fms_fsdp" / "data").glob("*.py"):
        assert not any(name.startswith("torch.distributed") for name in imported(path)), path


def test_nothing_that_trains_imports_a_tool() -> None:
    """Not even indirectly or inside a function: what must be trusted ends below `tools/`."""
    found, todo = set[Path](), [ROOT / "main_training.py"]
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            modules = (ROOT / name.replace(".", "/") for name in imported(path))
            todo += [
                file for module in modules for file in FILES if file in (module.with_suffix(".py"), module)
            ]
    assert ROOT / "fms_fsdp/train.py" in found and ROOT / "fms_fsdp/data/shards/shard.py" in found
    assert not [path for path in found if path.is_relative_to(ROOT / "fms_fsdp/tools")]


def test_no_star_imports_and_no_junk_drawers() -> None:
    for path in FILES:
        assert path.stem not in ("utils", "common", "helpers", "base"), path
        assert not any(name.endswith(".*") for name in imported(path)), path


def test_dummy_data_and_the_whole_loop_need_neither_pyarrow_nor_sentencepiece() -> None:
    code = (
        "import sys, main_training, fms_fsdp.run.plan, fms_fsdp.train, fms_fsdp.data.stream, fms_fsdp.observe.report\n"
        "print([name for name in ('pyarrow', 'sentencepiece', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_mistyped_flag_is_answered_before_torch_is_imported() -> None:
    code = (
        "import sys, main_training; main_training.main(['--model_varient=7b']); print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False" and "--model_variant" in result.stderr
