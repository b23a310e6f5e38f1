"""A dependency that is installed and cannot be imported is not reported as missing: its own error is shown."""

import copy
import pickle
import sys

import pytest

from pipegraph.errors import MissingExtraError, extra_module

LIBGL = "libGL.so.1: cannot open shared object file: No such file or directory"


def module_that_says(monkeypatch, tmp_path, name, text):
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_library_that_it_lacks_is_named(monkeypatch, tmp_path):
    module_that_says(monkeypatch, tmp_path, "broken_decoder", f"raise ImportError({LIBGL!r})")
    with pytest.raises(MissingExtraError) as caught:
        extra_module("broken_decoder", "images", "DecodeImage")
    text = str(caught.value)
    assert text.startswith(
        f"DecodeImage needs broken_decoder, which is installed and cannot be imported ({LIBGL}); "
    )
    assert "not installed" not in text and "pip install --force-reinstall" in text
    assert str(copy.copy(caught.value)) == str(pickle.loads(pickle.dumps(caught.value))) == text


@pytest.mark.parametrize("module", ["surely_not_there", "surely_not_there.within", "email.surely_not_there"])
def test_what_is_not_there_is_not_installed(module):
    with pytest.raises(MissingExtraError, match=f"needs {module}, which is not installed: pip install"):
        extra_module(module, "images", "a test")
