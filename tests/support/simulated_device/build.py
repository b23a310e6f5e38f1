"""Compiles the simulated device, once per machine and version of its source: test processes share what one has built."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

SOURCES = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipegraph-tests"
NAME = "simulated_device_native"


def compiler() -> str | None:
    """The C++ compiler; None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def native(cache: Path = CACHE) -> ModuleType:
    """The compiled module, built by the first process that asks for it while the others wait.

    Raises:
        RuntimeError: it does not compile.
    """
    digest = hashlib.sha256(f"{torch.__version__} {sysconfig.get_config_var('SOABI')}".encode())
    for source in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(source.read_bytes())
    built = cache / f"{NAME}-{digest.hexdigest()[:16]}.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not built.exists():
                _compile(built)
    spec = importlib.util.spec_from_file_location(NAME, built)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(target: Path) -> None:
    from torch.utils import cpp_extension

    flags = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
    flags += [f"-L{path}" for path in cpp_extension.library_paths()]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        # Unoptimised: compiling is most of the time that the device costs the tests.
        command = [
            str(compiler()),
            "-std=c++20",
            "-O0",
            "-fPIC",
            "-shared",
            "-w",
            f"-DTORCH_EXTENSION_NAME={NAME}",
        ]
        command += [*flags, str(SOURCES / "module.cpp"), "-o", str(made)]
        command += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"the simulated device does not compile:\n{done.stderr[-4000:]}")
        made.rename(target)
