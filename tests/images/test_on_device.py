"""Images decoded on the device: the CPU's windows, its pixels within a stated distance, and its failures.

On the simulated device nvImageCodec decodes on the CPU, and torch's operators do the rest as late as they may.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import simulated_device
import torch
from accelerators import delay, here, new_stream

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DecodeError, MissingExtraError
from pipegraph.testing import assert_resumes_exactly

pytest.importorskip("nvidia.nvimgcodec", reason="make test-all installs it")
pytestmark = [pytest.mark.matrix, pytest.mark.accelerator, pytest.mark.usefixtures("accelerator")]
CROP = ops.RandomResizedCrop((0.1, 1.0))
SIZE = (40, 56)


def decoded(
    files: list[bytes], *below: Any, device: str | None, policy: Any = "raise", **options: Any
) -> pg.Node:
    samples = [{"key": f"{n}", "jpg": data, "label": n} for n, data in enumerate(files)]
    node = pg.Graph("images", seed=5).add(ops.FromSequence(samples)).then(ops.Batch(options.pop("rows", 8)))
    decode = ops.DecodeImage(options.pop("size", SIZE), device=device, **options)
    node = node.then(decode, name="decode", on_error=policy)
    for each in below:
        node = node.then(each)
    return node


def batches(node: pg.Node) -> list[dict[str, Any]]:
    with node.graph.loader() as loader:
        return list(loader)


def images(node: pg.Node) -> torch.Tensor:
    return torch.cat([batch["image"].cpu() for batch in batches(node)])


def distance(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Mean and greatest difference."""
    away = (a.float() - b.float()).abs()
    return away.mean().item(), away.max().item()


def near(a: torch.Tensor, b: torch.Tensor, most: int = 1) -> bool:
    """Within ``most`` grey levels where nvImageCodec decodes as Pillow does, on the CPU; nvJPEG's own steps differ."""
    mean, furthest = distance(a, b)
    if torch.accelerator.current_accelerator() == torch.device(simulated_device.NAME):
        return mean < 0.3 and furthest <= most
    return mean < 2


@pytest.fixture
def scenes(make_scene: Any, encode: Any) -> list[bytes]:
    """Of many sizes, small and large, wide and tall."""
    sizes = [
        (30, 41),
        (64, 300),
        (500, 90),
        (211, 200),
        (1200, 900),
        (17, 9),
        (480, 640),
        (96, 96),
        (233, 77),
    ]
    return [encode(make_scene(*size, seed), "JPEG", quality=95) for seed, size in enumerate(sizes * 2)]


@pytest.mark.parametrize(
    ("crop", "interpolation", "most"),
    [(CROP, "linear", 1), (None, "linear", 1), (ops.CenterCrop(64), "antialias", 1), (CROP, "cubic", 6)],
)
def test_windows_are_those_of_the_cpu_and_pixels_near_pillows(
    scenes: list[bytes], crop: Any, interpolation: Any, most: int
) -> None:
    options: dict[str, Any] = {"crop": crop, "flip": 0.5, "interpolation": interpolation, "region": "cut"}
    there = batches(decoded(scenes, device=here(), **options))
    ours = batches(decoded(scenes, device=None, backend="pillow", **options))
    assert [len(batch["image"]) for batch in there] == [8, 8, 2]
    for a, b in zip(there, ours, strict=True):
        assert all(
            value.device == torch.device(here()) for value in (a["image"], a["label"], *a["cut"].values())
        )
        assert a["key"] == b["key"] and a["label"].tolist() == b["label"].tolist()
        assert {name: value.tolist() for name, value in a["cut"].items()} == {
            name: value.tolist() for name, value in b["cut"].items()
        }
        assert near(a["image"].cpu(), b["image"], most)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("flip", [0, 1])
def test_unusual_images_and_orientations_are_those_of_the_cpu(
    odd_files: dict[str, bytes], mode: Any, flip: int
) -> None:
    """Grey, CMYK, palettes, PNG and WebP, every EXIF orientation, one pixel."""
    options: dict[str, Any] = {"crop": ops.CenterCrop(48), "flip": flip, "mode": mode, "size": 32}
    files, options["interpolation"] = list(odd_files.values()), "antialias"
    there, ours = (images(decoded(files, device=each, **options)) for each in (here(), None))
    for name, a, b in zip(odd_files, there, ours, strict=True):
        assert near(a, b), (name, distance(a, b))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_normalize_behind_it_works_in_the_same_stage(
    scenes: list[bytes], odd_files: dict[str, bytes], layout: Any
) -> None:
    normalize = ops.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.25), torch.float32, layout)
    files = [*scenes, odd_files["cmyk.jpg"], odd_files["palette.png"]]
    options: dict[str, Any] = {"crop": CROP, "flip": 0.5, "interpolation": "antialias"}
    node = decoded(files, normalize, device=here(), **options)
    ours = images(decoded(files, normalize, device=None, **options))
    assert "normalize" in str(node.graph.plan()) and near(images(node) * 50, ours * 50)


def test_a_loop_and_a_stage_below_that_never_wait_see_whole_batches(scenes: list[bytes]) -> None:
    """On a stream of the loop's own, with every batch let go at once, so that slabs come back while they are read."""
    one = images(decoded(scenes[:1] * 64, device=here()))[:1].to(here()).float()
    for below in ([], [lambda batch: {"image": batch["image"] * 1}]):
        wrong = torch.zeros((), dtype=torch.int64, device=here())
        torch.accelerator.synchronize()
        with decoded(scenes[:1] * 64, *below, device=here()).graph.loader() as loader, new_stream(here()):
            for batch in loader:
                delay()
                wrong += (batch["image"].float() != one).any()
                del batch
            assert wrong.item() == 0


def test_a_resumed_pass_has_the_same_crops(scenes: list[bytes]) -> None:
    def whole(batch: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in batch.items()
        }

    assert_resumes_exactly(
        lambda: decoded(scenes[:10], whole, device=here(), crop=CROP, flip=0.5, size=16, rows=4).graph
    )


def test_broken_images_are_skipped_one_by_one_and_nothing_is_lost_or_twice(scenes: list[bytes]) -> None:
    broken = {
        2: b"no image",
        5: scenes[5][:-200],  # cut short
        11: b"",
        12: scenes[12][:160] + b"\xff\xc4\x00" * 9 + scenes[12][190:],  # its tables
    }
    files = [broken.get(n, data) for n, data in enumerate(scenes)]
    with pytest.raises(DecodeError, match="8 bytes"):
        batches(decoded(files, device=here()))
    options: dict[str, Any] = {"crop": CROP, "flip": 0.5}
    node = decoded(files, device=here(), policy=pg.Skip(4), **options)
    with node.graph.loader() as loader:
        found = list(loader)
        lost = sorted(int(each.key) for each in loader.profile().quarantined)
    assert lost == list(broken)
    kept = [n for n in range(len(files)) if n not in broken]
    assert [n for batch in found for n in batch["label"].tolist()] == kept
    whole = images(decoded(scenes, device=here(), **options))
    assert torch.equal(torch.cat([batch["image"].cpu() for batch in found]), whole[kept])


def test_without_nvimagecodec_the_install_line_is_said_before_the_first_batch(
    scenes: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "nvidia.nvimgcodec")
    monkeypatch.setitem(sys.modules, "nvidia", None)
    with pytest.raises(
        MissingExtraError, match=r"DecodeImage\(device=.*pip install \"nvidia-nvimgcodec-cu13"
    ):
        batches(decoded(scenes, device=here()))
