"""CPU, memory and file limits of this machine; of the cgroup where there is one."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def cores() -> float:
    """Cores this process may use: the least of affinity and the cgroup's quota."""
    count = (
        float(len(os.sched_getaffinity(0)))
        if hasattr(os, "sched_getaffinity")
        else float(os.cpu_count() or 1)
    )
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()[:2]
        if quota != "max":
            count = min(count, int(quota) / int(period))
    except (OSError, ValueError):
        pass
    return count


def available_memory() -> int:
    """Bytes that can still be taken: the least of the machine's and the cgroup's."""
    available = 8 << 30
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    limit = _read_int(_CGROUP / "memory.max")
    used = _read_int(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def scheduled(process: int | str = "self", thread: int | None = None) -> tuple[int, int] | None:
    """Nanoseconds that a thread (by default a process's first) ran on a core, and was ready to run and had none.

    None where the system does not say, or where the thread has ended.
    """
    task = "" if thread is None else f"task/{thread}/"
    try:
        with open(f"/proc/{process}/{task}schedstat", "rb") as file:
            ran, waited = file.read().split()[:2]
        return int(ran), int(waited)
    except (OSError, ValueError):
        return None


def open_files_limit() -> int:
    """Files that this process may have open at once (``ulimit -n``)."""
    try:
        import resource
    except ImportError:
        return 512  # Windows: what its C library opens by default
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if limit == resource.RLIM_INFINITY else limit


def lacking_for_processes() -> list[str]:
    """What worker processes need of the system and this one does not offer; empty on Linux 5.4 and later."""
    return [name for name in ("fork", "pidfd_open") if not hasattr(os, name)]
