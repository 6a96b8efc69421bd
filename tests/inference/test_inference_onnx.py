"""ONNX Runtime: export, quantization, what serves, what is stored, and what is refused."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import json
import os
import pickle
import re
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch")
for name in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(name, reason="the extra saturate[inference]")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from saturate.errors import ArtifactDamaged  # noqa: E402
from saturate.inference import structure  # noqa: E402
from saturate.inference.facts import cpu_flags  # noqa: E402
from saturate.inference.formats import onnx as files  # noqa: E402
from saturate.inference.techniques import (  # noqa: E402
    _onnx,
    _onnx_int8,
    onnx_int8_dynamic,
    onnx_int8_static,
    onnx_runtime,
    tensorrt,
    torch_tensorrt,
)
from saturate.inference.techniques._api import Context, NotApplied  # noqa: E402
from saturate.records.inference import ModelFacts  # noqa: E402

#: Without VNNI sums of full ranges saturate.
NARROW = not _onnx.vnni(ModelFacts(cpu_flags=cpu_flags()))

INSTALLED = {"onnx": "1.23", "onnxruntime": "1.30", "onnxscript": "0.7"}
FACTS = ModelFacts(torch=torch.__version__, dtypes=("float32",), linears=4, convolutions=2, attentions=1, installed=INSTALLED,
                   cpu_flags=frozenset({"avx512_vnni"}), calibration_samples=8, cores=2)


def context_of(model, inputs, folder, calibration=(), keep=(), **facts) -> Context:
    folder.mkdir(exist_ok=True)
    first = next((tensor for tensor in structure.flatten(torch, inputs[0])[1] if tensor.dim()), None)
    facts.setdefault("batch_size", None if first is None else first.shape[0])
    return Context(torch, model.eval().requires_grad_(False), "cpu", inputs, list(calibration), dataclasses.replace(FACTS, **facts),
                   folder, 1, keep=frozenset(keep))


def agreement_db(expected, found) -> float:
    """Signal to noise of `found` against `expected`."""
    expected, found = expected.detach(), found.detach()
    return float(10 * torch.log10(expected.square().sum() / (expected - found).square().sum().clamp(min=1e-30)))


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    hidden: tuple = ()
    loss: torch.Tensor | None = None


Pair = collections.namedtuple("Pair", "first second")


def tensors_of(value):
    return structure.flatten(torch, value)[1]


class Words(nn.Module):
    """Integer inputs, a mask that may be missing, an input that nothing depends on, nested outputs."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layer = nn.Linear(16, 16)

    def forward(self, ids, mask=None, unused=None):
        x = self.words(ids)
        if mask is not None:
            x = x * mask[..., None]
        y = torch.tanh(self.layer(x))
        return {"last": y, "more": (y.mean(1), None, [ids + 1, 3]), "answer": Answer(y, (Pair(y * 2, mask),))}


class Net(nn.Module):
    """Convolutions with batch normalization and a residual, then a classifier."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.conv(x))
        return self.head(x.mean((2, 3)))


class LogCumSumExp(nn.Module):
    def forward(self, x):
        return torch.logcumsumexp(x, 1)


class LogCumSumExpInABranch(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: torch.logcumsumexp(x, 1), lambda x: x * 2, (x,))


class Tied(nn.Module):
    """One matrix used twice as a product, as a functional layer, and once as an embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(32, 32)
        self.layer = nn.Linear(32, 32)

    def forward(self, ids):
        x = self.words(ids).mean(1)
        x = F.gelu(self.layer(x))
        x = F.gelu(self.layer(x))
        return F.linear(x, self.words.weight)


def images(count=4, batch=1):
    torch.manual_seed(1)
    return [(torch.randn(batch, 3, 16, 16),) for _ in range(count)]


def ids(count=4):
    torch.manual_seed(1)
    return [(torch.randint(32, (2, 6)),) for _ in range(count)]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    torch.manual_seed(0)
    batch = (torch.randint(50, (2, 5)), torch.rand(2, 5), torch.rand(2, 3))
    other = (torch.randint(50, (2, 7)), torch.rand(2, 7), torch.rand(2, 3))
    context = context_of(Words(), [batch, other], tmp_path_factory.mktemp("words"))
    said = onnx_runtime.apply(context, onnx_runtime.Options())
    return context, said


# -- the runtime ---------------------------------------------------------------------------------------------------------


class PooledTo(nn.Module):
    """Means over as many places as a given number of them makes of the size at hand."""

    def forward(self, x):
        return F.adaptive_avg_pool2d(x, (3, 4))


def test_sizes_that_the_exporter_fixes_are_not_open(tmp_path):
    """Pooling to a given size is written out for one size, and answered for all others what it is not."""
    context = context_of(PooledTo(), [(torch.randn(2, 4, 8, 9),), (torch.randn(2, 4, 7, 11),)], tmp_path, varying_shapes=True)
    with pytest.raises(NotApplied, match=r"sizes are open, and what is made of the program is right where Eq\(.*padded to one size"):
        onnx_runtime.apply(context, onnx_runtime.Options())
    context = context_of(PooledTo(), [(torch.randn(2, 4, 8, 9),)], tmp_path)
    onnx_runtime.apply(context, onnx_runtime.Options())
    x = torch.randn(5, 4, 8, 9)
    torch.testing.assert_close(context.call(x), context.model(x))


class Chunks(nn.Module):
    def forward(self, x):
        return torch.cat(x.chunk(3, 3)[::-1], 3)


def test_a_graph_that_the_exporter_cannot_tidy_up_is_refused_by_name(tmp_path):
    """Splitting an open size ended its optimizer, which raises an error of another library than the export."""
    context = context_of(Chunks(), [(torch.randn(2, 4, 9, 11),), (torch.randn(2, 4, 12, 8),)], tmp_path, varying_shapes=True)
    try:
        onnx_runtime.apply(context, onnx_runtime.Options())
    except NotApplied as refusal:
        assert "the ONNX exporter: " in str(refusal)
    else:
        torch.testing.assert_close(context.call(*context.inputs[0]), context.model(*context.inputs[0]))


@pytest.mark.parametrize("model", [LogCumSumExp, LogCumSumExpInABranch])
def test_sums_of_logarithms_in_a_row_are_refused(model, tmp_path):
    """There is none that is right for all numbers without a loop."""
    context = context_of(model(), [(torch.randn(4, 8),)], tmp_path)
    with pytest.raises(NotApplied, match="logcumsumexp.default as the logarithm of sums that become 0 or infinite"):
        onnx_runtime.apply(context, onnx_runtime.Options())


def test_the_program_answers_like_the_module(words):
    context, said = words
    for args in (context.inputs[0], context.inputs[1], (torch.randint(50, (3, 4)), torch.rand(3, 4), torch.rand(3, 3))):
        expected, found = context.model(*args), context.call(*args)
        assert structure.flatten(torch, expected)[0] == structure.flatten(torch, found)[0]
        torch.testing.assert_close(tensors_of(found), tensors_of(expected))
        assert type(found["answer"]) is Answer and type(found["answer"].hidden[0]) is Pair
    assert "free size" in said and onnx_runtime.active(context, onnx_runtime.Options()).active


def test_a_keyword_finds_its_place_and_a_wrong_structure_is_named(words):
    context, _ = words
    a, b, c = context.inputs[0]
    torch.testing.assert_close(tensors_of(context.call(a, unused=c, mask=b)), tensors_of(context.model(a, b, c)))
    with pytest.raises(TypeError, match="cannot take nothing_like_it"):
        context.call(a, b, c, nothing_like_it=1)
    with pytest.raises(TypeError, match="arranged as"):
        context.call(a, b)
    with pytest.raises(TypeError, match="int32"):
        context.call(a.int(), b, c)


def test_one_image_leaves_the_batch_free(tmp_path):
    model = Net().eval()
    context = context_of(model, images(2), tmp_path)
    onnx_runtime.apply(context, onnx_runtime.Options(spin=False))
    for batch in (1, 2, 5):
        x = torch.randn(batch, 3, 16, 16)
        torch.testing.assert_close(context.call(x), model(x), rtol=1e-4, atol=1e-5)


def test_what_is_stored_serves_in_another_process(words, tmp_path):
    context, _ = words
    folder = tmp_path / "artifact"
    folder.mkdir()
    entry = context.save(folder)
    settings = json.loads(json.dumps(dataclasses.asdict(entry)))
    assert sorted(path.name for path in folder.iterdir()) == sorted(entry.files)
    torch.save({"inputs": context.inputs[0], "outputs": tensors_of(context.call(*context.inputs[0]))}, tmp_path / "seen.pt")
    (tmp_path / "entry.json").write_text(json.dumps(settings))
    code = f"""
import json, torch
from pathlib import Path
from saturate.inference import structure
from saturate.inference.formats import onnx
from saturate.inference.techniques._api import Entry
here = Path({str(tmp_path)!r})
run = onnx.load(torch, here / "artifact", Entry(**json.loads((here / "entry.json").read_text())))
seen = torch.load(here / "seen.pt")
found = run(*seen["inputs"])
torch.testing.assert_close(structure.flatten(torch, found)[1], seen["outputs"], rtol=0, atol=0)
assert torch.equal(found["answer"].hidden[0].second, seen["inputs"][1])      # of classes that this process does not know
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr


def test_control_flow_that_depends_on_data_is_refused_by_name(tmp_path):
    class Branch(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x - 1

    with pytest.raises(NotApplied, match="(?i)data-dependent"):
        onnx_runtime.apply(context_of(Branch(), [(torch.ones(2, 2),)], tmp_path), onnx_runtime.Options())


def test_an_operator_without_a_translation_is_refused_by_name(tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return torch.linalg.eigvals(x).real

    with pytest.raises(NotApplied, match="eig"):
        onnx_runtime.apply(context_of(Odd(), [(torch.rand(3, 3),)], tmp_path, batch_size=None), onnx_runtime.Options())


def test_numbers_that_its_kernels_do_not_compute_are_refused(tmp_path):
    with pytest.raises(NotApplied, match="bfloat16"):
        onnx_runtime.apply(context_of(nn.Linear(2, 2).bfloat16(), [(torch.rand(1, 2).bfloat16(),)], tmp_path), onnx_runtime.Options())


def test_complex_inputs_are_refused_by_name(tmp_path):
    class Magnitude(nn.Module):
        def forward(self, x):
            return x.abs()

    with pytest.raises(NotApplied, match="takes complex64"):
        onnx_runtime.apply(context_of(Magnitude(), [(torch.ones(2, 3, dtype=torch.cfloat),)], tmp_path), onnx_runtime.Options())


# -- int8 ------------------------------------------------------------------------------------------------------------------


def test_static_int8_of_a_convolutional_net(tmp_path):
    model = Net().eval()
    context = context_of(model, images(2), tmp_path, calibration=images(6))
    said = onnx_int8_static.apply(context, onnx_int8_static.Options(reduce_range=NARROW))
    proof = onnx_int8_static.active(context, onnx_int8_static.Options())
    assert proof.active and "2 QLinearConv" in proof.evidence and "6 calibration batches" in said
    (x,) = images(1, batch=3)[0]
    assert 20 < agreement_db(model(x), context.call(x)) < 80, "int8, and not something else"


def test_what_must_stay_in_float32_does(tmp_path):
    model = Net().eval()
    keep = context_of(model, images(2), tmp_path, calibration=images(6), keep={"stem"})
    onnx_int8_static.apply(keep, onnx_int8_static.Options())
    nodes = _onnx.census(keep, "onnx-int8-static")
    assert nodes["QLinearConv"] == 1 and nodes.get("Conv", 0) + nodes.get("FusedConv", 0) == 1
    with pytest.raises(NotApplied, match=r"belongs to nowhere"):
        onnx_int8_static.apply(dataclasses.replace(keep, keep=frozenset({"nowhere"})), onnx_int8_static.Options())


class Outlier(nn.Module):
    """One channel between two layers is a thousand times larger than the others, and counts as little as they do."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(a, 8, 3, padding=1) for a in (3, 8, 8))
        with torch.no_grad():
            self.first.weight[2] *= 5000
            self.second.weight[:, 2] /= 5000

    def forward(self, x):
        return self.third(F.relu(self.second(F.max_pool2d(F.relu(self.first(x)), 2))))


def test_a_layer_that_is_kept_reads_what_was_not_rounded(tmp_path):
    """What breaks it is the one range of its input: without the layer's own 8 bits, that rounding would still be there."""
    torch.manual_seed(0)
    model, images = Outlier(), [(torch.randn(4, 3, 16, 16),) for _ in range(3)]
    expected, agreed = model.eval()(*images[0]), {}
    for keep in ((), ("second",)):
        context = context_of(model, images[:1], tmp_path / f"keep{len(keep)}", calibration=images, keep=keep)
        onnx_int8_static.apply(context, onnx_int8_static.Options(reduce_range=NARROW))
        agreed[keep] = agreement_db(expected, context.call(*images[0]))
        assert _onnx.integer_proof(context, "onnx-int8-static").active
    assert agreed[()] < 12 and agreed["second",] > 30, agreed


def test_a_kept_linear_layer_stays_out_of_dynamic_int8(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(collections.OrderedDict(first=nn.Linear(16, 32), act=nn.GELU(), inner=nn.Sequential(nn.Linear(32, 16))))
    x = torch.randn(4, 16)
    everything, kept = (context_of(model, [(x,)], tmp_path / name, keep=keep) for name, keep in (("a", ()), ("b", {"inner"})))
    for context in (everything, kept):
        onnx_int8_dynamic.apply(context, onnx_int8_dynamic.Options(reduce_range=NARROW))
    count = [sum(_onnx.census(context, "onnx-int8-dynamic").get(name, 0) for name in _onnx.INTEGER) for context in (everything, kept)]
    assert count == [2, 1]
    assert agreement_db(model(x), kept.call(x)) > agreement_db(model(x), everything.call(x)) > 25


def test_a_weight_that_several_products_share_is_quantized_for_each(tmp_path, monkeypatch):
    """The quantizer transposes a Gemm's matrix in place: used twice, it is transposed back."""
    model = Tied().eval()
    (x,) = ids(1)[0]
    context = context_of(model, ids(2), tmp_path / "good")
    onnx_int8_dynamic.apply(context, onnx_int8_dynamic.Options(reduce_range=NARROW))
    assert agreement_db(model(x), context.call(x)) > 25
    monkeypatch.setattr(_onnx_int8, "separate_weights", lambda graph: 0)
    context = context_of(model, ids(2), tmp_path / "bad")
    onnx_int8_dynamic.apply(context, onnx_int8_dynamic.Options(reduce_range=NARROW))
    assert agreement_db(model(x), context.call(x)) < 25, "the trap is gone: separate_weights may go too"


@pytest.mark.slow
@pytest.mark.parametrize("options", [onnx_int8_static.Options("percentile", True, NARROW), onnx_int8_static.Options("entropy", False, NARROW)])
def test_static_int8_of_a_model_with_shared_weights(tmp_path, options):
    model = Tied().eval()
    context = context_of(model, ids(2), tmp_path, calibration=ids(6))
    onnx_int8_static.apply(context, options)
    (x,) = ids(1)[0]
    assert agreement_db(model(x), context.call(x)) > 15 and onnx_int8_static.active(context, options).active


def test_without_calibration_or_products_nothing_is_claimed(tmp_path):
    with pytest.raises(NotApplied, match="no calibration"):
        onnx_int8_static.apply(context_of(Net(), images(2), tmp_path), onnx_int8_static.Options())
    with pytest.raises(NotApplied, match="no matrix product"):
        onnx_int8_dynamic.apply(context_of(nn.ReLU(), [(torch.rand(2, 2),)], tmp_path), onnx_int8_dynamic.Options())
    idle = context_of(nn.ReLU(), [(torch.rand(2, 2),)], tmp_path)
    assert not onnx_int8_dynamic.active(idle, onnx_int8_dynamic.Options()).active
    assert not onnx_runtime.active(idle, onnx_runtime.Options()).active
    idle.notes["onnx-int8-static"] = json.dumps({"Conv": 3, "QuantizeLinear": 6})       # quantized, but nothing computes so
    assert not onnx_int8_static.active(idle, onnx_int8_static.Options()).active


# -- who may ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("facts, technique, reason", [
    ({"installed": {"onnx": "1"}}, onnx_runtime, "onnxruntime, onnxscript not installed: pip install 'saturate.inference.'"),
    ({"exportable": False, "export_problem": "a branch on data"}, onnx_runtime, "a branch on data"),
    ({"torch": "2.4.1"}, onnx_runtime, "needs torch 2.6"),
    ({"random": True}, onnx_int8_dynamic, "random"),
    ({"generates": True}, onnx_runtime, "cache"),
    ({"dtypes": ("bfloat16", "float32")}, onnx_runtime, "bfloat16"),
    ({"device": "cuda"}, onnx_int8_static, "on the CPU"),
    ({"device": "cuda"}, onnx_runtime, "onnxruntime-gpu"),
    ({"linears": 0, "attentions": 0}, onnx_int8_dynamic, "no Linear layer"),
    ({"calibration_samples": 0}, onnx_int8_static, "calibration"),
    ({}, tensorrt, "NVIDIA GPU"),
    ({}, torch_tensorrt, "NVIDIA GPU"),
    ({"device": "cuda"}, tensorrt, "tensorrt is not installed"),
    ({"device": "cuda"}, torch_tensorrt, "torch-tensorrt is not installed"),
])
def test_who_is_refused_and_why(facts, technique, reason):
    answer = technique.eligible(dataclasses.replace(FACTS, **facts))
    assert not answer and re.search(reason, answer.reason), answer.reason


def test_without_vnni_weights_get_seven_bits(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    old = dataclasses.replace(FACTS, cpu_flags=frozenset({"avx2"}))
    for technique in (onnx_int8_static, onnx_int8_dynamic):
        assert "saturate" in technique.eligible(old).reason and "saturate" not in technique.eligible(FACTS).reason
        assert all(options.reduce_range for options in technique.variants(old))
        assert not any(options.reduce_range for options in technique.variants(FACTS))
        assert technique.bound(old) < technique.bound(FACTS)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not any(options.reduce_range for options in onnx_int8_static.variants(old))


def test_half_a_model_between_whole_borders():
    """What TensorRT gets: no GPU is needed to see that the copy casts, and the original stays as it is."""
    model = Net().eval()
    half = _onnx.in_half(torch, model)
    x = torch.randn(2, 3, 16, 16)
    found = half(x)
    assert found.dtype is torch.float32 and 30 < agreement_db(model(x), found) < 80
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert list(inspect.signature(half.forward).parameters) == ["x"]


# -- files ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    """An artifact whose weights lie in a file of their own: (folder, entry, model)."""
    folder = tmp_path_factory.mktemp("artifact")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    context = context_of(model, [(torch.randn(2, 64),)], tmp_path_factory.mktemp("scratch"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "LARGE_BYTES", -1)
        onnx_runtime.apply(context, onnx_runtime.Options())
    entry = context.save(folder)
    shutil.rmtree(context.folder)
    return folder, entry, model


@pytest.fixture
def stored(made_once, tmp_path):
    """A copy that a test may damage."""
    folder, entry, model = made_once
    return shutil.copytree(folder, tmp_path / "artifact"), entry, model


def test_weights_may_lie_in_a_file_of_their_own(stored, tmp_path):
    folder, entry, model = stored
    assert entry.files == ["model.onnx", "model.onnx.data"] and (folder / "model.onnx.data").stat().st_size > 64 * 64 * 4
    x = torch.randn(3, 64)
    torch.testing.assert_close(files.load(torch, folder.rename(tmp_path / "moved"), entry)(x), model(x))


@pytest.mark.slow
def test_quantizing_keeps_large_weights_outside(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGE_BYTES", -1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    x = torch.randn(2, 64)
    for technique in (onnx_int8_dynamic, onnx_int8_static):
        context = context_of(model, [(x,)], tmp_path / technique.TECHNIQUE.id, calibration=[(x,)])
        technique.apply(context, technique.Options())
        assert agreement_db(model(x), context.call(x)) > 25
        folder = tmp_path / f"artifact {technique.TECHNIQUE.id}"
        folder.mkdir()
        entry = context.save(folder)
        assert len(entry.files) == 2
        torch.testing.assert_close(files.load(torch, folder, entry)(x), context.call(x), rtol=0, atol=0)


@pytest.mark.parametrize("location", ["../stolen", "/etc/passwd", "link", "elsewhere/../../stolen", "unlisted"])
def test_weights_come_from_files_of_the_artifact_only(stored, location):
    import onnx

    folder, entry, _ = stored
    shutil.copy(folder / "model.onnx.data", folder.parent / "stolen")
    shutil.copy(folder / "model.onnx.data", folder / "unlisted")
    (folder / "link").symlink_to(folder.parent / "stolen")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for item in tensor.external_data:
            if item.key == "location":
                item.value = location
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(ArtifactDamaged, match="not a file of the artifact"):
        files.load(torch, folder, dataclasses.replace(entry, files=[*entry.files, *([] if location == "unlisted" else [location])]))


def test_weights_hidden_in_attributes_are_seen():
    """A location anywhere in the model counts: in a constant, in a branch, in a function."""
    import onnx

    def outside(name):
        tensor = onnx.TensorProto(name=name, data_location=onnx.TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value=name)
        return tensor

    constant = onnx.helper.make_node("Constant", [], ["c"], value=outside("constant"))
    branch = onnx.helper.make_graph([onnx.helper.make_node("Constant", [], ["d"], value=outside("branch"))], "then", [], [])
    condition = onnx.helper.make_node("If", ["x"], [], then_branch=branch)
    model = onnx.helper.make_model(onnx.helper.make_graph([constant, condition], "g", [], [], [outside("weight")]))
    model.functions.add().node.add().CopyFrom(onnx.helper.make_node("Constant", [], ["e"], value=outside("function")))
    sparse = model.graph.sparse_initializer.add()
    sparse.values.CopyFrom(outside("sparse"))
    assert files.locations(model) == {"constant", "branch", "weight", "function", "sparse"}


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "gone", "pickle", "weights cut", "weights gone"])
def test_a_damaged_file_is_named(stored, damage):
    folder, entry, _ = stored
    path = folder / ("model.onnx.data" if "weights" in damage else "model.onnx")
    data = path.read_bytes()
    if "gone" in damage:
        path.unlink()
    else:
        path.write_bytes({"cut": data[: len(data) // 2], "noise": b"\xff" * 500, "empty": b"", "weights cut": data[:100],
                          "pickle": pickle.dumps(print)}[damage])
    with pytest.raises(ArtifactDamaged) as raised:
        files.load(torch, folder, entry)
    assert "model.onnx" in raised.value.card() and raised.value.remedy


@pytest.mark.parametrize("settings", [{}, {"threads": None}, {"threads": 0}, {"inputs": 3}, {"tensors": [1]}, {"outputs": {"no": 1}}])
def test_settings_that_are_none_are_named(stored, settings):
    folder, entry, _ = stored
    damaged = dataclasses.replace(entry, settings={**entry.settings, **settings} if settings else {})
    with pytest.raises((ArtifactDamaged, TypeError, ValueError)):
        files.load(torch, folder, damaged)(torch.randn(2, 64))


def test_a_full_disk_is_said(words, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space"):
        words[0].save(tmp_path)
