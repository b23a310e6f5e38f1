"""Which decoder is chosen, and that choosing never changes what is delivered."""

from __future__ import annotations

import pytest

from pipegraph.errors import GraphError, MissingExtraError
from pipegraph.operators import DecodeImage
from pipegraph.operators.images import BACKENDS, choice, family_of, known_calibration, note_of, open_backend
from pipegraph.operators.images.choice import Calibration, fastest, installed


def test_the_fastest_is_chosen_and_an_earlier_one_wins_a_near_tie():
    assert fastest({"a": 100.0, "b": 120.0, "c": 110.0}) == "b"
    assert fastest({"a": 100.0, "b": 102.0}) == "a"
    assert fastest({"a": 100.0, "b": 0.0}) == "a"


def test_auto_is_calibrated_once_and_says_what_it_chose():
    backend = open_backend("auto")
    assert backend is open_backend("auto")
    measured = known_calibration()
    assert next(iter(measured.exact)) == "opencv"
    assert min(*measured.exact.values(), *measured.reduced.values()) > 0
    assert note_of("auto") == f"auto: {measured}"
    assert fastest(measured.exact) in note_of("auto")


@pytest.mark.parametrize(
    ("exact", "reduced", "said"),
    [
        ((100, 130, 150), (100, 120), "c (1.50 x a by calibration), reduced scale b (1.20 x a)"),
        ((100, 98, 90), (100, 80), "a (b 0.98 x by calibration), reduced scale a (b 0.80 x)"),
        ((100, 120), (100,), "b (1.20 x a by calibration), reduced scale a"),
        ((100,), (100,), "a (no other could be used)"),
    ],
)
def test_a_calibration_says_in_a_line_what_was_chosen_and_why(exact, reduced, said):
    rates = [dict(zip("abc", each, strict=False)) for each in (exact, reduced)]
    assert str(Calibration(*rates)) == said
    assert str(Calibration(*rates, broken=("d",))) == f"{said}; d could not be loaded"


def test_a_plan_says_what_auto_chose_as_soon_as_it_is_known_and_measures_nothing_itself(monkeypatch):
    monkeypatch.setattr(choice, "_auto", None)
    monkeypatch.setattr(choice, "_measured", None)
    operator = DecodeImage(32)
    assert any(
        "auto: the decoder is chosen by calibration when it opens" in note for note in operator.notes()
    )
    assert known_calibration() is None
    open_backend("auto")
    assert note_of("auto") == f"auto: {known_calibration()}"
    assert note_of("auto") in operator.notes()
    assert note_of("pillow") == "decodes with pillow, as asked"


def test_auto_does_without_a_decoder_that_is_installed_but_cannot_be_loaded(monkeypatch):
    def broken():
        raise MissingExtraError("simplejpeg", "images", "a test")

    monkeypatch.setattr(choice, "_auto", None)
    monkeypatch.setattr(choice, "_measured", None)
    monkeypatch.setitem(choice._DECODERS, "simplejpeg", ("simplejpeg", broken))
    open_backend("auto")
    assert note_of("auto").endswith("; simplejpeg could not be loaded")
    assert "simplejpeg" not in known_calibration().exact


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
    monkeypatch.setattr(choice, "_auto", None)
    monkeypatch.setattr(choice, "_measured", None)
    assert note_of("auto") == "auto: pillow, because OpenCV is not installed"
    assert open_backend("auto").name == "pillow"


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(GraphError, match=f"backend must be one of {', '.join(BACKENDS)}, got 'pil'"):
        open_backend("pil")


def test_a_module_below_a_missing_package_is_not_installed():
    assert installed("cv2")
    assert not installed("no_such_package.part")


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
