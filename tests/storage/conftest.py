"""Shards made on the spot."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

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
