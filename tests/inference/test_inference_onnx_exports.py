"""One export of the model for all candidates: who has it, who must not, and that nobody changes it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch")
for name in ("onnx", "onnxruntime", "onnxscript", "cloudpickle"):
    pytest.importorskip(name, reason="the extra saturate[inference]")

from process_kit import Pair  # noqa: E402 - after the checks

from saturate import plugins  # noqa: E402
from saturate.inference.candidates import Candidate, Part  # noqa: E402
from saturate.inference.facts import cpu_flags, installed  # noqa: E402
from saturate.inference.lab import Lab  # noqa: E402
from saturate.inference.process import Worker  # noqa: E402
from saturate.inference.source import Source  # noqa: E402
from saturate.inference.techniques import (  # noqa: E402
    _onnx,
    _onnx_exports,
    nhwc_layout,
    onnx_int8_dynamic,
    onnx_int8_static,
    onnx_runtime,
    openvino_bf16,
    openvino_int8_static,
    openvino_runtime,
    sdpa_kernel,
    threads,
    torchao_weight_only,
)
from saturate.inference.techniques._api import FOR_ALL_S, Context, NotApplied, variants_of  # noqa: E402
from saturate.inference.worker import Server  # noqa: E402
from saturate.records.inference import ModelFacts  # noqa: E402

X = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass
class Answer:
    scores: Any
    kind: str = "answer"


class Net(torch.nn.Module):
    """Two layers whose answer is a class of this file, and which writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x: Any) -> Answer:
        x.mul_(2.0)
        return Answer(self.second(self.first(x).relu()))


@pytest.fixture
def context(tmp_path: Path) -> Callable[..., Context]:
    """Contexts of different processes of one search: each has a folder of its own."""
    torch.manual_seed(0)
    model = Net().eval().requires_grad_(False)
    facts = ModelFacts(torch=torch.__version__, dtypes=("float32",), linears=2, batch_size=4, cores=1, installed=installed(), cpu_flags=cpu_flags(),
                       calibration_samples=8)

    def made(name: str, **more: Any) -> Context:
        folder = tmp_path / name
        folder.mkdir()
        return dataclasses.replace(Context(torch, model, "cpu", [(X.clone(),)], [(X.clone(),), (X.flip(1),)], facts, folder, 1, exports=tmp_path / "exports"), **more)

    return made


def never(folder: Path) -> Any:
    raise AssertionError("it was exported again")


def digests(folder: Path) -> dict[str, tuple[str, int]]:
    return {path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_the_second_has_what_the_first_exported(context, monkeypatch):
    first, alone = _onnx.export(context("first")), _onnx.export(context("alone", exports=None))
    monkeypatch.setattr(_onnx, "_exported", lambda context, model, folder: never(folder))
    other = context("other")
    again = _onnx.export(other)
    assert again == first
    assert dataclasses.replace(again, path=alone.path) == alone         # what is kept says what the export itself says
    assert first.path.parent == other.exports
    assert again.classes == {f"{__name__}:Answer": Answer} and again.owners
    assert torch.equal(other.inputs[0][0], X)                # asked for its classes, the model wrote to a copy
    assert not any(other.folder.iterdir())


def test_all_that_is_known_of_it_is_known_to_the_second(context):
    """OpenVINO is not given a graph that gathers pixels, and a layer that stays in float32 is found by its owners."""
    signature = {"tensors": [{"dtype": "float32", "shape": ["batch", 6]}], "ranges": {"batch": [1, None]}, "outputs": [0]}
    made = _onnx_exports.Exported(Path("elsewhere"), signature, {}, {"y": frozenset({"first", "second"}), "z": frozenset()}, gathered=True)
    first = _onnx_exports.once(context("first"), lambda folder: made)
    for one in (first, _onnx_exports.once(context("other"), never)):
        assert (one.signature, one.owners, one.gathered) == (made.signature, made.owners, True)


def test_every_runtime_reads_it_and_none_changes_it(context, tmp_path):
    parts = [onnx_runtime, onnx_int8_dynamic, onnx_int8_static]
    if "openvino" in installed():
        parts += [openvino_runtime, openvino_bf16, openvino_int8_static]
    expected, found = Net.forward(context("model").model, X.clone()).scores, None
    for place, part in enumerate(parts * 2):
        mine = context(f"process-{place}")
        part.apply(mine, variants_of(part, mine.facts)[0])
        answer = mine.call(X.clone())
        assert isinstance(answer, Answer) and answer.kind == "answer"
        torch.testing.assert_close(answer.scores, expected, atol=0.05, rtol=0.05)
        assert mine.save is not None
        (mine.folder / "stored").mkdir()
        mine.save(mine.folder / "stored")
        found = found or digests(tmp_path / "exports")
        assert digests(tmp_path / "exports") == found, part.TECHNIQUE.id


def test_a_model_that_was_given_is_exported_by_itself(context):
    """TensorRT's is one in float16."""
    mine = context("first")
    made = _onnx.export(mine, torch.nn.Sequential(torch.nn.Linear(6, 3)).eval())
    assert made.path.parent == mine.folder and not mine.exports.exists()


def test_a_refusal_is_kept_in_its_own_words(context):
    def refuse(folder: Path) -> Any:
        raise NotApplied("the ONNX exporter: no translation of aten.frexp")

    for made, name in ((refuse, "first"), (never, "other")):
        with pytest.raises(NotApplied, match=r"^the ONNX exporter: no translation of aten\.frexp$"):
            _onnx_exports.once(context(name), made)


@pytest.mark.parametrize("cause", [MemoryError(), OSError(28, "No space left on device"), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_refusal_for_want_of_memory_or_room_is_for_that_one_only(context, cause):
    def refuse(folder: Path) -> Any:
        raise NotApplied("the ONNX exporter") from cause

    def refuse_deeply(folder: Path) -> Any:
        try:
            raise RuntimeError("step 3 failed") from cause
        except RuntimeError as error:
            raise NotApplied("the ONNX exporter") from error

    for number, one in enumerate((refuse, refuse_deeply)):
        with pytest.raises(NotApplied):
            _onnx_exports.once(context(f"first-{number}"), one)
    assert _onnx.export(context("other")).path.exists()


def test_what_breaks_in_the_middle_is_nothing_for_the_others(context):
    """A process that is killed has written half a file, into its own folder."""
    def broken(folder: Path) -> Any:
        (folder / _onnx_exports.NAME).write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _onnx_exports.once(context("first"), broken)
    made = _onnx.export(context("other"))
    assert made.path.stat().st_size > 100


def test_of_two_at_the_same_time_the_first_counts(context):
    def slow(folder: Path) -> Any:
        _onnx.export(context("other"))
        return _onnx._exported(mine, mine.model, folder)

    mine = context("first")
    made = _onnx_exports.once(mine, slow)
    assert made.path.parent == mine.exports and made == _onnx.export(context("third"))


def test_a_folder_that_cannot_be_made_is_said(context, tmp_path):
    """Not what a candidate answers for."""
    with pytest.raises(OSError):
        _onnx.export(context("first", exports=tmp_path / "removed" / "exports"))


def test_what_is_kept_is_plain(context, tmp_path):
    """Nothing in it is unpickled."""
    _onnx.export(context("first"))
    assert {path.name for path in (tmp_path / "exports").iterdir()} == {"model.onnx", "export.json"}
    about = json.loads((tmp_path / "exports" / "export.json").read_text())
    assert set(about) == {"signature", "gathered", "owners"}


@pytest.mark.parametrize(("before", "own"), [
    ((), False), ((threads,), False), ((sdpa_kernel,), True), ((nhwc_layout,), True), ((torchao_weight_only,), True),
])
def test_a_model_that_is_another_by_now_is_not_taken_for_the_others(context, before, own, monkeypatch):
    """Its export would be kept under the model's name, and that of the model be served in its place."""
    server = Server()
    server.torch, server.context = torch, context("first")
    for part in before:
        monkeypatch.setattr(part, "apply", lambda context, options: "done")
        server._apply(*plugins.origin(part), dataclasses.asdict(part.Options()))
    assert (server.context.exports is None) == own
    server._apply(*plugins.origin(onnx_runtime), {})
    assert server.context.exports is None       # what is called is a program now
    assert (server.context.folder / "model.onnx").exists() == own


def test_a_technique_that_says_nothing_of_what_it_changes_is_not_trusted(context, monkeypatch):
    for stage, kept in (("number", False), ("session", True)):
        server = Server()
        server.torch, server.context = torch, context(f"first-{kept}")
        monkeypatch.setattr(threads, "TECHNIQUE", dataclasses.replace(threads.TECHNIQUE, stage=stage))
        monkeypatch.setattr(threads, "apply", lambda context, options: "done")
        server._apply(*plugins.origin(threads), {})
        assert (server.context.exports is not None) == kept


def test_processes_of_a_search_share_it(tmp_path):
    source = Source.write(tmp_path / "source", Pair(), [(torch.rand(2, 6),) for _ in range(4)])
    with Worker(source, Candidate(), folder=tmp_path, threads=1, prepare_s=120.0) as worker:
        facts, observed_s = worker.ready.facts, float(worker.ready.notes[FOR_ALL_S])
        assert 0.1 < observed_s < worker.ready.prepare_s, "the first finds out what the others are told"
    with Worker(source, Candidate(), folder=tmp_path, threads=1, prepare_s=120.0, facts=facts) as worker:
        assert not worker.ready.notes
    seen, told = None, []
    for part in (onnx_runtime, onnx_runtime):
        with Worker(source, Candidate.of([Part(part, part.Options())]), folder=tmp_path, threads=1, prepare_s=120.0, facts=facts) as worker:
            seen = seen or digests(source.exports)
            assert digests(source.exports) == seen and worker.ready.proofs[0].active
            assert (FOR_ALL_S in worker.ready.notes) == (len(told) == 0)
            told.append(float(worker.ready.notes.get(FOR_ALL_S, 0.0)))
            assert told[-1] < worker.ready.prepare_s
            assert worker.ready.done == ["ONNX Runtime on 1 thread(s); 1 free size(s)"]


def test_another_model_in_the_same_folder_has_none(tmp_path):
    Source.write(tmp_path / "source", Pair(), [(torch.rand(2, 6),) for _ in range(4)]).exports.mkdir()
    (tmp_path / "source" / "exports" / "export.json").write_text("{}")
    source = Source.write(tmp_path / "source", torch.nn.Linear(6, 2), [(torch.rand(2, 6),) for _ in range(4)])
    assert not source.exports.exists()


def test_behind_a_search_they_are_gone(tmp_path):
    source = Source.write(tmp_path / "source", torch.nn.Linear(6, 2), [(torch.rand(2, 6),) for _ in range(4)])
    source.exports.mkdir()
    (source.exports / "model.onnx").write_bytes(b"weights")
    lab = Lab(source, tmp_path, 1, time.monotonic() + 10)
    lab.discard(None)
    assert not source.exports.exists()
    lab.discard(None)       # `pick` may have needed none
