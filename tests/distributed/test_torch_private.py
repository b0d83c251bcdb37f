"""Private names of torch are in `distributed/torch_private.py` alone."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fms_fsdp.distributed import torch_private
from tests import layers

MODULE = Path(torch_private.__file__)
FILES = [path for path in layers.python_files("fms_fsdp", layers.ENTRY) if path != MODULE]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def names_of_torch(tree: ast.Module) -> dict[str, str]:
    """The full name of each name of a file that an import, or `name = torch.…`, gives it."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    found[alias.asname or name] = name
            case ast.ImportFrom(module=str(module), level=0):
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{module}.{alias.name}"
    found = {own: name for own, name in found.items() if f"{name}.".startswith("torch.")}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=own)], value=ast.Attribute() as value):
                if name := dotted(value, found):
                    found[own] = name
    return found


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The full name of `a.b.c` if `a` is a name of torch, otherwise ""."""
    match node:
        case ast.Name(id=own):
            return names.get(own, "")
        case ast.Attribute(value=value, attr=attr):
            above = dotted(value, names)
            return above and f"{above}.{attr}"
    return ""


def private_names(tree: ast.Module) -> Iterator[str]:
    """Private names of torch: of imports, of `torch.a._b`, and attributes of other objects that
    torch_private uses, such as `group._get_backend`."""
    names = names_of_torch(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom(level=0):
                module = getattr(node, "module", None)
                for alias in node.names:
                    full = f"{module}.{alias.name}" if module else alias.name
                    if full.startswith("torch.") and any(map(is_private, full.split("."))):
                        yield full
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=attr) if is_private(attr):
                full = dotted(node, names)
                if full or attr in attributes_of_module():
                    yield full or attr


@cache
def attributes_of_module() -> set[str]:
    tree = layers.parsed(MODULE)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if is_private(node.attr)}


def test_private_names_are_in_one_module() -> None:
    found = {path.name: list(private_names(layers.parsed(path))) for path in FILES}
    assert not {name: names for name, names in found.items() if names}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._inductor import config", "torch._inductor.config"),
        ("from torch.optim import _functional", "torch.optim._functional"),
        ("import torch\ntorch._foreach_mul_([], 1)", "torch._foreach_mul_"),
        ("import torch\nA = torch.ops.aten\nA._scaled_mm()", "torch.ops.aten._scaled_mm"),
        ("import torch.distributed as dist\ndist._x", "torch.distributed._x"),
        ("from torch.cuda import memory\nmemory._snapshot()", "torch.cuda.memory._snapshot"),
        ("mesh[names]._flatten()", "_flatten"),
        ("import torch\ntorch.__version__", ""),
        ("import os\nos._exit(0)", ""),
        ("self._group", ""),
    ],
)
def test_private_name_is_found(line: str, name: str) -> None:
    assert ", ".join(private_names(ast.parse(line))) == name


def test_docstrings_name_public_way() -> None:
    names = vars(torch_private).values()
    own = [each for each in names if inspect.getmodule(each) is torch_private]
    assert len(own) > 10
    for each in own:
        assert "Public: " in (each.__doc__ or ""), each
