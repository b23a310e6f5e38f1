"""Models of the queue between two stages: a few threads on one object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scheduler.model import Model

from pipegraph import concurrency
from pipegraph.chunk import Chunk
from pipegraph.engine.activity import Activity, Cancelled
from pipegraph.engine.channel import Channel

LAST = -1


def chunk(number: int, nbytes: int = 0) -> Chunk:
    made = Chunk(number, (("s", number),), 0, number, number + 1)
    made.nbytes = nbytes
    return made


class Threads(Model):
    """A model with threads that an ``Activity`` counts."""

    activity: Activity
    cancels = False
    weight = 30

    def begin(self, body: Callable[..., None], *args: Any) -> Any:
        self.activity.attach()
        thread = concurrency.Thread(target=self._live, args=(body, args), name=body.__name__)
        thread.start()
        return thread

    def _live(self, body: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            body(*args)
        except Cancelled:
            assert self.cancels, "cancelled by nobody"
        finally:
            self.activity.pause()


class ChannelModel(Threads):
    """Putters and getters on one channel, with resizes, nudges, or a cancel in the middle; Ctrl-C in one getter.

    Each item arrives once, in the order of tickets; the bounds are never exceeded; all ends.
    """

    sequenced = False

    def run(self) -> None:
        draw = self.draw
        self.items = draw.randrange(3, 8)
        self.most = capacity = draw.randrange(1, 4)
        self.sizes = [draw.randrange(0, 40) for _ in range(self.items)]
        self.activity = Activity()
        self.channel = channel = Channel(capacity, draw.choice([None, 30]), self.activity, self.sequenced)
        channel.readers = readers = draw.randrange(1, 3)
        channel.changed = self.check
        self.cancels = draw.random() < 0.2
        self.lock = concurrency.Lock()
        self.next = 0
        self.got: list[tuple[int, int]] = []
        putters = [self.begin(self.put) for _ in range(draw.randrange(1, 4))]
        closer = self.begin(self.close, putters)
        others = [self.begin(self.get) for _ in range(readers - 1)]
        if draw.random() < 0.3:
            others.append(self.begin(self.resize, capacity))
        if self.cancels:
            others.append(self.begin(channel.cancel))
        self.activity.attach()
        if draw.random() < 0.5:
            self.interrupt_in(draw.randrange(60))
        try:
            self.get()
        except KeyboardInterrupt:  # a pass that was interrupted is over: its queues are cancelled
            self.cancels = True
            channel.cancel()
        except Cancelled:
            assert self.cancels, "cancelled by nobody"
        self.interrupt_in(None)
        for thread in (*putters, *others):
            thread.join()
        closer.join()
        if self.cancels:
            return
        arrived = [item for _, item in sorted(self.got)]
        assert sorted(arrived) == list(range(self.items)), f"arrived: {arrived}"
        if self.sequenced:
            assert arrived == sorted(arrived), f"order: {arrived}"

    def put(self) -> None:
        while True:
            with self.lock:
                number, self.next = self.next, self.next + 1
            if number >= self.items:
                return
            item = chunk(number, self.sizes[number])
            if self.sequenced:
                self.channel.put_at(number, item)
            elif self.sizes[number] % 3 == 0:
                self.channel.put(item, more=True)
                self.channel.nudge()
            else:
                self.channel.put(item)

    def close(self, putters: list[Any]) -> None:
        """One end for each reader."""
        for thread in putters:
            thread.join()
        for number in range(self.channel.readers):
            self.channel.put_at(self.items + number, chunk(LAST))

    def get(self) -> None:
        while True:
            ticket, item = self.channel.take()
            if item.data == LAST:
                return
            self.got.append((ticket, item.data))

    def resize(self, capacity: int) -> None:
        self.most = capacity + 2
        self.channel.resize(capacity + 2)
        self.channel.nudge_all()
        self.channel.resize(capacity)

    def check(self) -> None:
        contents = self.channel._contents
        assert 0 <= contents.held <= self.most, f"{contents.held} items in a queue of {self.most}"
        assert contents.nbytes >= 0


class SequencedChannelModel(ChannelModel):
    """The same with numbered items, as the workers of an ordered stage put them."""

    sequenced = True
