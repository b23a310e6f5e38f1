"""The finalizer of a loader that was not closed: it is garbage-collected, or the interpreter exits."""

from __future__ import annotations

import sys

from pipegraph import concurrency
from pipegraph.engine.runtime import Runtime


def finalize(runtime: Runtime) -> None:
    """End the threads of a loader that was collected, or whose interpreter exits."""
    if concurrency.current_thread() is concurrency.main_thread():
        runtime.close()
    elif not sys.is_finalizing():
        # The garbage collector may run in any thread, even in a worker of ours that holds one of our locks.
        concurrency.start_new_thread(_close_elsewhere, (runtime,))


def _close_elsewhere(runtime: Runtime) -> None:
    # From a thread made by ``threading``: joining in any other would leave a dummy thread object there.
    concurrency.Thread(target=runtime.close, name="pipegraph-closer", daemon=True).start()
