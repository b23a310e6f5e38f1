"""An iterator of numbers, with a state."""


class Counting:
    """An iterator with a state."""

    end = 1000

    def __init__(self):
        self.next = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.end:
            raise StopIteration
        self.next += 1
        return self.next - 1

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class CountingOn:
    """An iterable of ``count`` numbers an epoch, each epoch the following ones; its place is its state."""

    def __init__(self, count):
        self.count, self.next = count, 0

    def __iter__(self):
        for number in range(self.next, self.next // self.count * self.count + self.count):
            self.next = number + 1
            yield number

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]
