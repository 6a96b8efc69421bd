"""The runtimes of the extra report home as they are imported; what saturate imports of them does not."""

import os
import subprocess
import sys
import textwrap

import pytest

from saturate.inference.formats import onnx as files

onnxruntime = pytest.importorskip("onnxruntime", reason="the extra saturate[inference]")
pytest.importorskip("openvino", reason="the extra saturate[inference]")

BOTH = """
    require("onnxruntime.quantization"), require("openvino")
    from saturate.inference.formats.openvino import core
    core()
"""


def _written(home, code):
    """The files in the home of a process that ran `code`, outside of any CI: there the runtimes report nothing by themselves."""
    home.mkdir()
    environ = {name: value for name, value in os.environ.items()
               if name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")} | {"HOME": str(home)}
    code = "from saturate.inference.formats.onnx import require, unreported" + textwrap.dedent(code)
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True, text=True, timeout=120)
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


def test_nothing_is_reported_or_kept_of_the_user(tmp_path):
    assert _written(tmp_path / "home", BOTH) == []


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_the_same_import_without_it_would(tmp_path, name):
    written = _written(tmp_path / "home", f"\nimport {name}, time; time.sleep(1)")
    if not written:
        pytest.skip(f"this {name} reports nothing: the test above cannot fail by it")
    assert all("Microsoft" in one or "intel" in one for one in written)


def test_what_the_process_has_stays_as_it_was(monkeypatch):
    monkeypatch.setitem(sys.modules, files.REPORTER, "the user's")
    monkeypatch.setenv(files.UNREPORTED, "0")
    with files.unreported():
        assert os.environ[files.UNREPORTED] == "1" and sys.modules[files.REPORTER] == "the user's"
    assert os.environ[files.UNREPORTED] == "0" and sys.modules[files.REPORTER] == "the user's"
    monkeypatch.delenv(files.UNREPORTED)
    monkeypatch.delitem(sys.modules, files.REPORTER)
    with pytest.raises(ValueError), files.unreported():
        assert sys.modules[files.REPORTER] is None
        raise ValueError
    assert files.UNREPORTED not in os.environ and files.REPORTER not in sys.modules
