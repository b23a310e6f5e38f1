"""However a stage begins and ends: its open() and close() are called once, and what they raise is said alike."""

import pytest

import pipegraph as pg

pytestmark = pytest.mark.usefixtures("no_leaks")


class Numbers(pg.Source):
    """A random-access source that counts how often each of its copies is opened and closed."""

    random_access = True
    opened: list
    closed: list

    def __init__(self, fails=(), breaks_at="never"):
        self.opened, self.closed, self.fails, self.breaks_at = [], [], fails, breaks_at

    def length(self, epoch, rank, world_size):
        return 8

    def positions(self, epoch, rank, world_size, start):
        return iter(range(start, 8))

    def read(self, position, epoch):
        if position in self.fails:
            raise ValueError(position)
        return position

    def open(self, context):
        if self.breaks_at == "open":
            raise OSError("cannot open")
        self.opened.append(id(self))

    def close(self):
        self.closed.append(id(self))
        if self.breaks_at == "close":
            raise OSError("cannot close")


@pytest.mark.parametrize("options", [{"backend": "inline"}, {"workers": 3}], ids=str)
def test_every_copy_that_was_opened_is_closed_once(options):
    source = Numbers(fails=(2, 5))
    graph = pg.Graph("g")
    graph.add(source, name="source", on_error=pg.Skip(), **options)
    with graph.loader() as loader:
        assert len(list(loader)) == 6
    assert sorted(source.closed) == sorted(source.opened)
    assert len(set(source.closed)) == len(source.closed)


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_source_that_cannot_be_opened_names_its_stage(backend):
    graph = pg.Graph("g")
    graph.add(Numbers(breaks_at="open"), name="numbers", backend=backend)
    with graph.loader() as loader, pytest.raises(OSError, match="cannot open") as caught:
        list(loader)
    assert any("stage 'numbers'" in text for text in caught.value.__notes__)


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_source_that_cannot_be_closed_is_a_warning(backend):
    graph = pg.Graph("g")
    graph.add(Numbers(breaks_at="close"), name="numbers", backend=backend)
    loader = graph.loader()
    assert list(loader) == list(range(8))
    with pytest.warns(
        pg.errors.PipegraphWarning, match=r"stage 'numbers': close\(\) raised OSError: cannot close"
    ):
        loader.close()
    loader.close()
