"""Which decoder is chosen, and that choosing never changes what is delivered."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from pipegraph.errors import GraphError, MissingExtraError, PipegraphWarning
from pipegraph.operators import DecodeImage, RandomResizedCrop
from pipegraph.operators.images import choice
from pipegraph.operators.images.choice import BACKENDS, family_of, installed, note_of, open_backend


def with_installed(monkeypatch, *names):
    """As if of the faster decoders only these were installed."""
    monkeypatch.setattr(choice, "_DECODERS", {name: choice._DECODERS[name] for name in names})


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
    if not all(installed(choice._DECODERS[name][0]) for name in names):
        pytest.skip("one of them is not installed")
    assert note_of("auto") == said
    assert said in DecodeImage(32, crop=RandomResizedCrop()).traits.notes()
    assert [each.name for each in open_backend("auto")._decoders] == [*names, "opencv"]
    assert note_of("pillow") == "decodes with pillow, as asked"
    others = [name for name in names if name != "nvimgcodec"]  # which decodes whole images no faster
    assert [each.name for each in open_backend("auto", whole=True)._decoders] == [*others, "opencv"]
    assert f"auto: {[*others, 'opencv'][0]}" in DecodeImage(32).traits.notes()


def test_auto_does_without_a_decoder_that_is_installed_but_cannot_be_loaded(monkeypatch):
    def broken():
        raise MissingExtraError("simplejpeg", "images", "a test") from ImportError("no libturbojpeg")

    monkeypatch.setattr(choice, "_DECODERS", {"simplejpeg": ("simplejpeg", broken)})
    with pytest.warns(
        PipegraphWarning, match="without simplejpeg, which is .* cannot be loaded: no libturbo"
    ):
        assert [each.name for each in open_backend("auto")._decoders] == ["opencv"]
    with pytest.raises(MissingExtraError):
        open_backend("simplejpeg")


@pytest.mark.parametrize("name", ["pillow", "opencv", "simplejpeg"])
def test_a_named_backend_is_opened_by_its_name(name):
    assert open_backend(name).name == name


def test_the_family_is_known_without_opening_a_backend(monkeypatch):
    assert {name: family_of(name) for name in BACKENDS} == {
        "auto": "opencv",
        "pillow": "pillow",
        "opencv": "opencv",
        "simplejpeg": "opencv",
        "nvimgcodec": "opencv",
    }
    monkeypatch.setattr(choice, "installed", lambda module: False)
    assert family_of("auto") == "pillow"
    assert note_of("auto") == "auto: pillow, because OpenCV is not installed"
    assert open_backend("auto").name == "pillow"


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(GraphError, match=f"backend must be one of {', '.join(BACKENDS)}, got 'pil'"):
        open_backend("pil")


def test_a_module_below_a_missing_package_is_not_installed():
    assert installed("cv2")
    assert not installed("no_such_package.part")


def test_a_module_that_another_thread_is_importing_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", ModuleType("cv2"))  # without a spec, as OpenCV is for that time
    assert installed("cv2")
    assert family_of("auto") == "opencv"


@pytest.mark.skipif(not installed("nvidia.nvimgcodec"), reason="nvidia-nvimgcodec is not installed")
def test_loading_nvimgcodec_prints_nothing_and_loses_nothing(programs):
    code = (
        "import os\n"
        "from pipegraph.operators.images import nvimgcodec\n"
        "make = nvimgcodec._decoder\n"
        "def speaking(nv):\n"
        "    os.write(2, b'a line of somebody else\\n')\n"
        "    return make(nv)\n"
        "nvimgcodec._decoder = speaking\n"
        "nvimgcodec._load()\n"
        "os.write(2, b'after\\n')\n"
    )
    result = programs.run(code)
    assert result.returncode == 0 and result.stderr == "a line of somebody else\nafter\n"
