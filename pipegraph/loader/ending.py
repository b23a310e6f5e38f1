"""How a loader ends that nobody closes: it is collected, or the interpreter ends."""

from __future__ import annotations

import _thread
import sys
import threading

from pipegraph.engine.runtime import Runtime


def finalize(runtime: Runtime) -> None:
    """The loader is gone, or the interpreter ends."""
    if threading.current_thread() is threading.main_thread():
        runtime.close()
    elif not sys.is_finalizing():
        # The garbage collector runs anywhere, also in one of our own workers that holds a lock of ours.
        _thread.start_new_thread(_close_elsewhere, (runtime,))


def _close_elsewhere(runtime: Runtime) -> None:
    # In a thread that the threading module knows: joining from any other would leave a dummy entry there.
    threading.Thread(target=runtime.close, name="pipegraph-closer", daemon=True).start()
