"""ListFiles: labels never depend on which files happen to be there."""

from pathlib import Path

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError, StateError


def folder(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
    return root


def samples(*args, **options):
    graph = pg.Graph("files")
    graph.add(ops.ListFiles(*args, **options))
    with graph.loader() as loader:
        return list(loader)


def labels(*args, **options):
    return {sample["key"]: sample.get("label") for sample in samples(*args, **options)}


def test_an_empty_class_folder_is_an_error_and_keeps_its_number_where_that_is_meant(tmp_path):
    root = folder(tmp_path, "bus/1.jpg", "car/", "dog/1.jpg", "car/notes.txt")
    for classes in ("auto", True):
        with pytest.raises(DataError, match=r"'car' matches '\*\.jpg'.*allow_empty=True"):
            labels(root, "*.jpg", classes)
        assert labels(root, "*.jpg", classes, allow_empty=True) == {"bus/1.jpg": 0, "dog/1.jpg": 2}


def test_names_give_the_numbering(tmp_path):
    root = folder(tmp_path, "bus/1.jpg", "dog/1.jpg")
    assert labels(root, classes=["dog", "bus"]) == {"bus/1.jpg": 1, "dog/1.jpg": 0}
    with pytest.raises(DataError, match="'car'"):
        labels(root, classes=["bus", "car", "dog"])
    assert labels(root, classes=["bus", "car", "dog"], allow_empty=True)["dog/1.jpg"] == 2
    with pytest.raises(DataError, match="does not name the folder 'dog'"):
        labels(root, classes=["bus"])
    assert ops.ListFiles(root).classes == ("bus", "dog")


def test_a_state_of_other_classes_is_refused(tmp_path):
    def graph(root):
        graph = pg.Graph("files")
        graph.add(ops.ListFiles(root), name="list")
        return graph

    one = folder(tmp_path / "one", "bus/1.jpg", "dog/1.jpg")
    two = folder(tmp_path / "two", "bus/1.jpg", "cat/1.jpg")
    with graph(one).loader() as loader:
        state = loader.state_dict()
    with graph(two).loader() as loader, pytest.raises(StateError, match="list"):
        loader.load_state_dict(state)
