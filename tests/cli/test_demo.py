"""The demo: trains, stops, resumes exactly, reports. On drawn shapes and on a user's own images."""

import re
import tarfile

import numpy as np
import pytest

from pipegraph.cli import main
from pipegraph.cli.demo import CLASSES, draw, run_demo


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    # One for all tests of this file: the images are drawn once.
    folder = tmp_path_factory.getbasetemp() / "demo-cache"
    monkeypatch.setenv("PIPEGRAPH_CACHE", str(folder))
    return folder


def means(out):
    return [float(found) for found in re.findall(r"mean loss ([0-9.]+)", out)]


def test_the_demo_trains_stops_resumes_and_ends_with_the_profile(capsys):
    run_demo(None, epochs=4, images=320)
    out = capsys.readouterr().out
    assert len(means(out)) == 4
    assert means(out)[-1] < means(out)[0]
    assert "stopped on purpose after step 25 of 40, inside epoch 3" in out
    assert "resumed in a new loader, model and optimizer: continues with step 26, in epoch 3" in out
    assert "each of the 320 images was delivered exactly once in every epoch" in out
    for stage in ("select", "load", "batch", "decode", "pin", "copy", "scatter"):
        assert re.search(rf"^{stage} ", out, re.M)
    after = out.partition("\nscatter ")[2]
    assert re.search(r"holds training back|sets the pace|comes in bursts", " ".join(after.split()))


def images_in(folder, names):
    import cv2

    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), draw(number % len(CLASSES), np.random.default_rng(number)))


def test_a_folder_of_class_folders_is_trained_on_by_its_classes(tmp_path, capsys):
    images_in(tmp_path, [f"{kind}/{n}.png" for n in range(12) for kind in ("cat", "dog")])
    assert main(["demo", "--data", str(tmp_path), "--epochs", "2"]) == 0
    out = capsys.readouterr().out
    assert "folder of 2 class folders: 24 images" in out
    assert "each of the 24 images was delivered exactly once" in out


def test_a_flat_folder_is_learnt_without_labels_and_a_broken_file_is_left_out_and_named(tmp_path, capsys):
    images_in(tmp_path, [f"{n:02d}.jpg" for n in range(20)])
    (tmp_path / "07.jpg").write_bytes(b"not an image")
    assert main(["demo", "--data", str(tmp_path), "--epochs", "2"]) == 0
    out = capsys.readouterr().out
    assert "flat folder of images: 20 images" in out
    assert "learning the images' labels" in out
    assert "'07.jpg' at position" in out


def test_tar_shards_are_taken_as_a_folder_and_as_a_pattern(tmp_path, capsys):
    images_in(tmp_path / "images", [f"{n:02d}.jpg" for n in range(16)])
    for shard in range(2):
        with tarfile.open(tmp_path / f"part-{shard}.tar", "w") as tar:
            for n in range(shard, 16, 2):
                tar.add(tmp_path / "images" / f"{n:02d}.jpg", f"{n:02d}.jpg")
    for data in (str(tmp_path), str(tmp_path / "part-{0..1}.tar")):
        assert main(["demo", "--data", data, "--epochs", "2"]) == 0
        assert "2 tar shards: 16 images" in capsys.readouterr().out


def test_the_files_of_the_examples_are_drawn_the_same_each_time(tmp_path, capsys):
    assert main(["demo", "--make", str(tmp_path)]) == 0
    assert "512 labelled JPEG images in 2 tar shards" in capsys.readouterr().out
    first = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["demo", "--make", str(tmp_path)]) == 0
    assert first == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(first) == 2 + 8 * 24 + 1
