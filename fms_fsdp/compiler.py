"""What torch.compile needs on this machine. Imports nothing but the standard library."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path


def missing_for_compilation(device_type: str) -> str:
    """Returns why code for a device cannot be compiled, with a fix; "" if nothing is missing.

    Only names and folders are looked up, because every rank asks at each launch. On a CPU, inductor
    compiles C++. On a GPU, Triton compiles a launcher in C for each kernel. Both include Python.h
    and load the result from their cache.

    Source: torch/_inductor/cpp_builder.py, torch/_inductor/runtime/cache_dir_utils.py;
    https://github.com/triton-lang/triton/blob/main/python/triton/runtime/build.py
    """
    if device_type == "cpu":
        variable = "CXX"
        compilers = ["g++"]
    else:
        variable = "CC"
        compilers = ["gcc", "clang"]  # Triton takes the first that is installed
    if variable in os.environ:
        compilers = [os.environ[variable]]
    if not any(map(shutil.which, compilers)):
        return f"{compilers[0]} is not on the PATH; install a compiler, or set {variable}"

    headers = sysconfig.get_path("include")
    if not any(Path(folder, "Python.h").is_file() for folder in _include_folders(device_type)):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"Python.h is missing in {headers}; install Python's headers (python{version}-dev "
            f"or python{version}-devel)"
        )

    variable = "TORCHINDUCTOR_CACHE_DIR"
    if device_type != "cpu" and os.environ.get("TRITON_CACHE_DIR"):
        variable = "TRITON_CACHE_DIR"
    cache = Path(os.environ.get(variable) or tempfile.gettempdir())
    folder = cache.absolute()
    while not folder.exists():  # torch creates it
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return f"{cache} cannot be written; set {variable} to another folder"
    if sys.platform == "linux" and os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return f"{cache} is mounted noexec; set {variable} to a folder of another file system"
    return ""


def _include_folders(device_type: str) -> list[str]:
    """Returns the folders in which the compiler looks for Python.h."""
    folders = [sysconfig.get_path("include"), sysconfig.get_path("include", "posix_prefix")]
    language = "CPLUS_INCLUDE_PATH" if device_type == "cpu" else "C_INCLUDE_PATH"
    for variable in ("CPATH", language):  # GCC and Clang read them
        folders += os.environ.get(variable, "").split(os.pathsep)
    return folders
