"""Ends with 0 if this Python has the packages of pyproject.toml: has_packages.py [EXTRA ...].

Takes less than a second. Pythons before 3.11 must be able to read it.
"""

import importlib.metadata
import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 - any Python may run this file
    sys.exit(1)

import tomllib

try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]


def has_packages(extras: list[str]) -> bool:
    """Returns whether all packages are installed in versions that the project takes."""
    with open(Path(__file__).parent.parent / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    for line in lines:
        needed = Requirement(line)
        if needed.name == project["name"]:  # an extra that includes another one
            if not has_packages(sorted(needed.extras)):
                return False
            continue
        try:
            version = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            return False
        if not needed.specifier.contains(version, prereleases=True):
            return False
    return True


if __name__ == "__main__":
    sys.exit(not has_packages(sys.argv[1:]))
