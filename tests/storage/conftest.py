"""Shards made on the spot."""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MakeTar = Callable[..., Path]


@pytest.fixture
def make_tar(tmp_path: Path) -> MakeTar:
    """Write named bytes as a tar with Python's own writer."""

    def make(files: list[tuple[str, bytes]], name: str = "a.tar", form: int = tarfile.PAX_FORMAT) -> Path:
        path = tmp_path / name
        with tarfile.open(path, "w", format=form) as archive:
            for member, data in files:
                info = tarfile.TarInfo(member)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return path

    return make


@pytest.fixture
def open_descriptors() -> Callable[[], list[str]]:
    """What this process has open now."""
    return lambda: sorted(os.listdir("/proc/self/fd"))


@pytest.fixture
def url(s3_port: int, connect: Callable[..., Any], request: pytest.FixtureRequest) -> str:
    """An object of a million random bytes."""
    address = f"s3://data/{request.node.name}/object.bin"
    connect(s3_port).put(address, random.Random(0).randbytes(1_000_000))
    return address
