"""Which decoder is chosen, and that choosing never changes what is delivered."""

from __future__ import annotations

import pytest

from pipegraph import operators as ops
from pipegraph.errors import GraphError
from pipegraph.operators import DecodeImage, RandomResizedCrop
from pipegraph.operators.images import backends
from pipegraph.operators.images.backends import BACKENDS, installed, note_of, open_backend


def with_installed(monkeypatch, *names):
    """As if of the faster decoders only these were installed, and nothing was compiled."""
    monkeypatch.setattr(backends, "library", lambda: None)
    monkeypatch.setattr(backends, "_DECODERS", {name: backends._DECODERS[name] for name in names})


def opened(**options):
    return [
        type(each).__name__.removesuffix("Regions").lower()
        for each in open_backend("auto", **options)._decoders
    ]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("nvimgcodec", "simplejpeg"), "auto: nvimgcodec, and simplejpeg at reduced scale"),
        (("nvimgcodec",), "auto: nvimgcodec, and opencv at reduced scale"),
        (("simplejpeg",), "auto: simplejpeg"),
        ((), "auto: opencv"),
    ],
)
def test_auto_is_the_fastest_decoder_that_is_installed_and_a_plan_says_which(monkeypatch, names, said):
    with_installed(monkeypatch, *names)
    if not all(installed(backends._DECODERS[name][0]) for name in names):
        pytest.skip("one of them is not installed")
    assert note_of("auto") == said
    assert said in DecodeImage(32, crop=RandomResizedCrop()).traits.notes()
    assert opened() == [*names, "opencv"]
    assert note_of("pillow") == "decodes with pillow, as asked"
    others = [name for name in names if name != "nvimgcodec"]  # which decodes whole images no faster
    assert opened(whole=True) == [*others, "opencv"]
    assert f"auto: {[*others, 'opencv'][0]}" in DecodeImage(32).traits.notes()


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(GraphError, match=f"backend must be one of {', '.join(BACKENDS)}, got 'pil'"):
        ops.DecodeImage(8, backend="pil")
