"""Compile `device.cpp` for the installed torch, once for each version of both."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SOURCE = Path(__file__).with_name("device.cpp")
FOLDER = ROOT / "build" / "emulated_gpu"
# The version of torch for which the emulated GPU was written. Others may work: its first use after a build tells.
TORCH = "2.13"
# The library is compiled and tried again if one of these files has changed.
FILES = ("activation.py", "build.py", "device.cpp", "graphs.py", "order.h", "streams.py")
OPTIONS = ("-O1", "-std=c++20", "-fPIC", "-shared")


class CannotEmulateError(Exception):
    """This machine cannot have an emulated GPU, for a reason that is no fault of the project."""


class MisfitError(Exception):
    """The emulated GPU does not fit the installed torch."""


def find_compiler():
    """Return the path of a C++ compiler, the one in the environment variable CXX if it is set."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise CannotEmulateError(f"no C++ compiler ({', '.join(names)}) is installed to build the emulated GPU")
    return compiler


def find_torch():
    """Return the version and the folder of torch, without importing it."""
    version = importlib.metadata.version("torch")
    folder = Path(importlib.util.find_spec("torch").origin).parent
    if (folder / "lib" / "libtorch_cuda.so").exists():
        raise CannotEmulateError(f"torch {version} is built for CUDA, so it cannot have an emulated GPU")
    return version, folder


def build():
    """Return the path of the library with the emulated GPU, which is compiled and tried if it is new.

    Raises:
        CannotEmulateError: There is no compiler, or torch is built for CUDA.
        MisfitError: The library cannot be compiled for the installed torch, or does not work with it.
    """
    compiler, (version, torch) = find_compiler(), find_torch()
    parts = [path.read_bytes() for path in sorted(SOURCE.parent.iterdir()) if path.name in FILES]
    key = hashlib.sha256(b"\0".join([*parts, version.encode()])).hexdigest()[:16]
    library = FOLDER / f"torch-{version}-{key}.so"
    if library.exists():
        return library
    FOLDER.mkdir(parents=True, exist_ok=True)
    new = library.with_suffix(f".{os.getpid()}.new")
    try:
        run_for(version, "compiled", [
            compiler, *OPTIONS, str(SOURCE), "-o", str(new), f"-I{torch / 'include'}",
            f"-I{torch / 'include' / 'torch' / 'csrc' / 'api' / 'include'}", f"-L{torch / 'lib'}", "-ltorch_cpu",
            "-lc10", f"-Wl,-rpath,{torch / 'lib'}"])
        # in a process of its own, because a library that does not fit may crash it
        run_for(version, "used", [sys.executable, "-m", "tests.emulated_gpu.activation", str(new)])
        for old in FOLDER.glob("*.so"):
            old.unlink()
        new.replace(library)
    finally:
        new.unlink(missing_ok=True)
    return library


def run_for(version, what, command):
    """Run a command that fails if the emulated GPU does not fit torch."""
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "rror" in line] or result.stderr.splitlines()[-5:]
        raise MisfitError(
            f"The emulated GPU was written for torch {TORCH}, and cannot be {what} with torch {version}, so no test "
            f"has run on it. Adapt tests/emulated_gpu to this torch. Exit code {result.returncode}:\n"
            + "\n".join(lines[:10]))
