"""Which decoder is chosen, and that choosing never changes what is delivered."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipegraph.errors import GraphError
from pipegraph.operators.images import BACKENDS, choice, family_of, open_backend
from pipegraph.operators.images.choice import fastest, installed


def test_the_fastest_is_chosen_and_an_earlier_one_wins_a_near_tie():
    assert fastest({"a": 100.0, "b": 120.0, "c": 110.0}) == "b"
    assert fastest({"a": 100.0, "b": 102.0}) == "a"
    assert fastest({"a": 100.0, "b": 0.0}) == "a"


def test_auto_is_calibrated_once_and_says_what_it_chose():
    backend = open_backend("auto")
    assert backend is open_backend("auto")
    assert backend.family == "opencv"
    assert backend.describe().startswith("auto: JPEG regions by ")
    assert "regions/s of one thread at calibration: exact opencv " in backend.describe()


@pytest.mark.parametrize("name", ["pillow", "opencv", "simplejpeg"])
def test_a_named_backend_says_what_it_does(name):
    backend = open_backend(name)
    assert backend.name == name
    assert backend.describe().startswith(f"{name}: ")


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
    monkeypatch.setattr(choice, "_calibrated", None)
    assert open_backend("auto").family == "pillow"


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(GraphError, match=f"backend must be one of {', '.join(BACKENDS)}, got 'pil'"):
        open_backend("pil")


def test_a_module_below_a_missing_package_is_not_installed():
    assert installed("cv2")
    assert not installed("no_such_package.part")


def test_importing_the_package_loads_no_decoder():
    code = (
        "import sys, pipegraph.operators.images\n"
        "print([m for m in ('cv2', 'PIL', 'simplejpeg', 'nvidia') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.skipif(not installed("nvidia.nvimgcodec"), reason="nvidia-nvimgcodec is not installed")
def test_loading_nvimgcodec_prints_nothing_and_loses_nothing():
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
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == "a line of somebody else\nafter\n"
