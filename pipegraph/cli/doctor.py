"""``pipegraph doctor``: what this machine offers, and how to install what is missing."""

from __future__ import annotations

import platform
import shutil
import sys
from importlib import metadata

from pipegraph.errors import MissingExtraError, distribution_of, install_line, requirements_of
from pipegraph.machine import available_memory, cores, lacking_for_processes, open_files_limit
from pipegraph.units import format_bytes

EXTRAS = {
    "images": "decoding images",
    "nvimgcodec": "decoding images with nvImageCodec",
    "dali": "decoding with DALI",
    "cloud": "object stores (S3, GCS, Azure, HTTP)",
    "fsspec": "other stores (hf://, hdfs://, ftp://)",
    "shards": "Parquet, Arrow, zstd, checksums",
    "ray": "stages on a Ray cluster",
    "report": "report pages",
    "metrics": "metrics for Prometheus",
    "hf": "Hugging Face datasets",
    "cli": "the command line",
}
"""What each extra is for."""


def report() -> str:
    """Facts and optional parts as aligned text; of the parts it imports only the decoders."""
    lines = [f"{name:<12}{value}" for name, value in [*_facts(), *_processes(), *_devices(), *_decoders()]]
    lines += ["", "optional parts"]
    for extra, purpose in EXTRAS.items():
        for name in map(distribution_of, requirements_of(extra)):
            lines.append(
                f"  {name:<22}  {purpose:<38}{_version(name) or f'missing: {install_line(extra, name)}'}"
            )
    return "\n".join(lines)


def _facts() -> list[tuple[str, str]]:
    import numpy
    import torch

    import pipegraph
    from pipegraph.reader.manifests import cache_folder

    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    system = f"{platform.system()} {platform.machine()}"
    python = f"{platform.python_version()} ({'with' if gil else 'without'} the GIL), {system}"
    folder = cache_folder()
    near = next(each for each in (folder, *folder.parents) if each.exists())
    return [
        ("pipegraph", pipegraph.__version__),
        ("python", python),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("numpy", numpy.__version__),
        ("cores", f"{cores():g} that this process may use"),
        ("memory", f"{format_bytes(available_memory())} available; memory_limit defaults to half of it"),
        ("cache", f"{folder}, {format_bytes(shutil.disk_usage(near).free)} free"),
    ]


def _processes() -> list[tuple[str, str]]:
    missing = lacking_for_processes()
    if missing:
        return [("processes", f"backend='process' does not work here: no {', '.join(missing)}")]
    return [
        ("processes", "backend='process' works; shared memory has no names, and counts as memory"),
        ("open files", f"{open_files_limit():,} at most (ulimit -n)"),
    ]


def _devices() -> list[tuple[str, str]]:
    from pipegraph.device.accelerator import backend_for, offers, unpinned
    from pipegraph.device.backend import devices

    found = devices()
    if not found:
        return [("devices", "cpu (torch finds no accelerator; device='cpu' follows the same code path)")]
    rows = [("devices", f"{len(found)} x {found[0].type}, and cpu")]
    for device in found:
        given = offers(device)
        with backend_for(device) as backend:
            sums = "summed by NCCL" if backend.sums_together else "summed by copies"
        copies = given.lacking or "copies on a stream of their own"
        pinned = unpinned() or "pinned memory"
        rows.append((str(device), f"{copies}; {pinned}; replicas' gradients are {sums}"))
    return rows


def _decoders() -> list[tuple[str, str]]:
    from pipegraph.operators.images.backends import note_of, open_backend

    try:
        open_backend("auto")
    except MissingExtraError as error:
        return [("decoder", f"none: {error}")]
    return [("decoder", note_of("auto"))]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
