"""Programs that call operators of a library, which registers them in machine code when it is imported (torchvision's do)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch")

from saturate.errors import ArtifactDamaged, EnvironmentProblem  # noqa: E402 - after the check for torch
from saturate.inference.formats import _program, _vetting, exported, onnx  # noqa: E402
from saturate.inference.techniques import bf16  # noqa: E402
from saturate.inference.techniques._api import Context, Entry  # noqa: E402
from saturate.records.inference import ModelFacts  # noqa: E402

LIBRARY = """
import torch
kept = torch.library.Library("aided", "DEF")
kept.define("twice(Tensor x) -> Tensor")
kept.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
kept.impl("twice", lambda x: torch.empty_like(x), "Meta")
"""


class Calls(torch.nn.Module):
    def forward(self, x):
        return torch.ops.aided.twice(x) + 1


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """An artifact's entry and folder, in a process that has not imported the library any more; its name, as a file that can be imported."""
    (tmp_path / "aided.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_program, "LIBRARIES", ("aided",))
    import aided  # type: ignore[import-not-found]

    facts = ModelFacts(torch=torch.__version__, dtypes=("float32",), cores=1, batch_size=2)
    inputs = [(torch.randn(2, 3),)]
    (folder := tmp_path / "artifact").mkdir()
    entry = exported.save(Context(torch, Calls(), "cpu", inputs, inputs, facts, tmp_path, 1), folder)
    forget(aided)
    yield entry, folder
    forget(sys.modules.get("aided"))


def forget(library):
    if library is not None:
        library.kept._destroy()
        sys.modules.pop("aided", None)
        if hasattr(torch.ops, "aided"):
            delattr(torch.ops, "aided")


def test_what_loads_a_program_imports_what_its_operators_come_from(stored):
    """Nobody had: the winner did not serve in a fresh process, and what a user had stored was called damaged."""
    entry, folder = stored
    assert entry.settings["libraries"] == ["aided"] and "import aided " in exported.lines(entry, 1, repr).splitlines()[0]
    loaded = exported.load(torch, folder, entry)
    assert "aided" in sys.modules and torch.equal(loaded(torch.ones(2, 3)), torch.full((2, 3), 3.0))


def test_a_library_that_is_not_installed_is_named(stored, tmp_path: Path):
    entry, folder = stored
    (tmp_path / "aided.py").unlink()
    with pytest.raises(EnvironmentProblem, match="calls operators of aided, which cannot be imported here"):
        exported.load(torch, folder, entry)


def test_a_file_does_not_choose_what_is_imported(stored, monkeypatch):
    entry, folder = stored
    monkeypatch.setattr(_program, "LIBRARIES", ())
    with pytest.raises(EnvironmentProblem, match="is not loaded") as refused:
        exported.load(torch, folder, Entry(entry.format, entry.files, {**entry.settings, "libraries": ["aided"]}))
    assert "aided" not in sys.modules and "torch.ops.aided.twice.default" in refused.value.cause
    assert refused.value.remedy == "import the library that registers it, and load again"


def test_a_program_of_torchs_own_operators_says_nothing_of_libraries(tmp_path):
    facts = ModelFacts(torch=torch.__version__, dtypes=("float32",), cores=1, batch_size=2)
    inputs = [(torch.randn(2, 3),)]
    entry = exported.save(Context(torch, torch.nn.Linear(3, 3).eval(), "cpu", inputs, inputs, facts, tmp_path, 1), tmp_path)
    assert "libraries" not in entry.settings and not exported.lines(entry, 1, repr).startswith("import aided")


class Conditional(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, (self.layer(x),))


@pytest.mark.parametrize("how", ["cond", "autocast"])
def test_operators_around_graphs_are_torchs_own(how, tmp_path):
    facts = ModelFacts(torch=torch.__version__, dtypes=("float32",), cores=1, batch_size=2, linears=1)
    model = Conditional() if how == "cond" else torch.nn.Sequential(torch.nn.Linear(3, 3))
    context = Context(torch, model.eval(), "cpu", [(torch.randn(2, 3),)], [], facts, tmp_path, 1)
    if how == "autocast":
        bf16.apply(context, bf16.Options(autocast=True))
    entry = context.save(tmp_path) if context.save else exported.save(context, tmp_path)
    loaded = exported.load(torch, tmp_path, entry)
    for x in (torch.ones(2, 3), -torch.ones(2, 3)):
        assert torch.equal(loaded(x), (context.call or context.model)(x))


@pytest.mark.parametrize("name", ["image.write_file.default", "image.read_file.default", "video_reader.read_video_from_file.default"])
def test_operators_of_a_library_that_reach_into_files_are_none(name):
    """A program may have torchvision imported; what it registers beside its layers is not for programs."""
    assert not _vetting._names_operator(torch, f"torch.ops.{name}") and _vetting._names_operator(torch, "torch.ops.torchvision.nms.default")


def test_an_onnx_program_is_read_as_its_runtime_reads_it(tmp_path: Path):
    """By another name the check chose another parser, and saw another model."""
    pytest.importorskip("onnx", reason="the extra saturate[inference]")
    (tmp_path / "model.textproto").write_bytes(b"# nothing\n")
    with pytest.raises(ArtifactDamaged, match="is no name of an ONNX file"):
        onnx.stored(tmp_path, Entry("onnx", ["model.textproto"], {}))
