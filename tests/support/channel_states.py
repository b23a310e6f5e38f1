"""Waiting for a state of a channel, and never for time."""

import threading


def wait_until(channel, condition):
    """Blocks until ``condition`` holds for what ``channel.stats()`` would give, and fails where it does not come to that."""
    met = threading.Event()
    with channel._lock:
        if condition(channel.look()):
            return
        before = channel.changed

        def changed():
            if before is not None:
                before()
            if condition(channel.look()):
                met.set()

        channel.changed = changed
    came = met.wait(60)
    with channel._lock:
        channel.changed = before
        assert came, channel.look()
