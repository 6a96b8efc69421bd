"""The number formats that a training computes in, as a capture says them."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from saturate.agent import formats, observe, randomness, sample  # noqa: E402 - after the check for torch
from saturate.agent.capture import Capture  # noqa: E402
from saturate.agent.session import Session  # noqa: E402
from saturate.trial.launch import Chosen  # noqa: E402

LOOP = """
import contextlib, sys, torch, torch.nn as nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
around = contextlib.nullcontext()
if sys.argv[1] == "autocast": around = torch.autocast("cpu", torch.bfloat16)
if sys.argv[1] == "held": model.to(torch.bfloat16)
x = torch.randn(4, 8).to(model[0].weight.dtype)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    with around: loss = model(x).square().mean()
    if sys.argv[1] != "held": loss = loss.float()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(("how", "arithmetic", "held", "loss"), [
    ("plain", "", "float32", ""), ("autocast", "bfloat16", "float32", ""), ("held", "bfloat16", "bfloat16", "bfloat16")])
def test_a_capture_says_what_the_script_computes_in(how, arithmetic, held, loss, script, start, tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    folder.mkdir()
    capture = {"folder": str(folder), "updates": 4, "seed": 20, "aligned": False, "perturb": {"relative": 2.0**-24, "seed": 1}}
    start(str(script(LOOP)), how, capture=capture, step={"token": "S0", "count": 1, "tokens": ["B", "S0"]}).wait_ready()
    header = json.loads((folder / "capture.jsonl").read_text().splitlines()[0])
    assert (header["arithmetic"], header["formats"], header["loss_format"], header["device"]) == (arithmetic, [held] * 4, loss, "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("relative", [2.0**-9, 2.0**-12, 2.0**-24])
def test_what_is_held_in_16_bits_is_perturbed_by_what_it_can_tell(dtype, relative) -> None:
    """1 + relative is 1 in such a format: the perturbed run was the baseline itself."""
    plain = torch.tensor([1.0, -1.0, 0.3, -0.3, 0.0, 1024.0], dtype=dtype)
    for sign in (1, -1):
        found = plain.clone()
        sample.perturb(torch, found, relative, torch.full((6,), sign, dtype=torch.int8))
        changed = (found.double() / plain.double() - 1)[plain != 0] * sign
        eps = torch.finfo(dtype).eps
        assert ((changed > 0) & (changed <= max(relative, eps))).all() and found[4] == 0


def test_longer_formats_are_perturbed_as_they_are() -> None:
    for dtype in (torch.float32, torch.float64, torch.complex64):
        found = torch.ones(4, dtype=dtype)
        sample.perturb(torch, found, 2.0**-9, torch.tensor([1, -1, 1, -1], dtype=torch.int8))
        assert torch.equal(found, torch.tensor([1 + 2.0**-9, 1 - 2.0**-9] * 2, dtype=dtype))


def cuda(capability: tuple[int, int], matmul: Any, cudnn: Any, hip: str | None = None) -> Any:
    """torch with these settings, and a device of this capability."""
    return types.SimpleNamespace(nn=torch.nn, version=types.SimpleNamespace(hip=hip), cuda=types.SimpleNamespace(get_device_capability=lambda device: capability),
                                 backends=types.SimpleNamespace(cuda=types.SimpleNamespace(matmul=matmul), cudnn=cudnn))


def setting(value: str) -> Any:
    return types.SimpleNamespace(fp32_precision=value)


class Mixed:
    """As torch's own once a script has used the newer setting."""

    fp32_precision = "tf32"

    @property
    def allow_tf32(self) -> bool:
        raise RuntimeError("you have used a mix of the legacy and new APIs")


OFF = types.SimpleNamespace(allow_tf32=False)
NEWER = types.SimpleNamespace(conv=setting("tf32"), rnn=setting("ieee"))
OLDER = types.SimpleNamespace(allow_tf32=True)
CONVOLVES, RECURS, MULTIPLIES = [torch.nn.Conv2d(1, 1, 1)], [torch.nn.LSTM(1, 1)], [torch.nn.Linear(1, 1)]


@pytest.mark.parametrize(("capability", "matmul", "cudnn", "modules", "expected"), [
    ((9, 0), OFF, NEWER, CONVOLVES, True), ((9, 0), OFF, NEWER, RECURS, False), ((9, 0), OFF, NEWER, MULTIPLIES, False),
    ((8, 0), OFF, OLDER, CONVOLVES, True), ((8, 0), OFF, OLDER, RECURS, True), ((8, 0), OFF, OLDER, MULTIPLIES, False),
    ((7, 5), OFF, OLDER, CONVOLVES, False), ((7, 5), Mixed(), NEWER, CONVOLVES, False), ((8, 6), Mixed(), NEWER, MULTIPLIES, True),
    ((8, 0), OFF, types.SimpleNamespace(allow_tf32=False), CONVOLVES, False),
])
def test_whether_float32_may_be_multiplied_in_tensorfloat32(capability, matmul, cudnn, modules, expected) -> None:
    assert formats.may_use_tf32(cuda(capability, matmul, cudnn), "cuda:0", formats.kinds_in(torch, modules)) is expected
    assert not formats.may_use_tf32(cuda(capability, matmul, cudnn, hip="6.4"), "cuda:0", formats.kinds_in(torch, modules)), "AMD's numbers say nothing of it"


def test_the_installed_torch_tells_of_cudnn_under_either_way() -> None:
    before = torch.backends.cudnn.allow_tf32
    try:
        for value in (True, False):
            torch.backends.cudnn.allow_tf32 = value
            assert formats.cudnn_allows_tf32(torch, {"conv", "rnn"}) is value
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_the_coarsest_counts() -> None:
    assert formats.coarsest({"float32", "float16", "tfloat32", "bfloat16"}) == "bfloat16"
    assert formats.coarsest({"float32", "float16", "tfloat32"}) == "tfloat32"
    assert (formats.coarsest({"float16", "float32"}), formats.coarsest({"float32", "float64"})) == ("float16", "")
    assert formats.of_tensor(torch.zeros(1, dtype=torch.complex128)) == "float64"


def test_cudnn_operators_are_known_by_their_nodes_as_well() -> None:
    """A script may call the function with parameters of its own."""
    weight = torch.ones(1, 1, 1, 1, requires_grad=True)
    capture = Capture({"updates": 52})
    capture.sees_graph(torch, torch.nn.functional.conv2d(torch.ones(1, 1, 2, 2), weight).sum())
    assert capture._kinds == {"conv"} and formats.kinds_of(["CudnnRnnBackward0", "AddmmBackward0"]) == {"rnn"}


def test_parameters_in_the_host_s_memory_do_not_hide_the_device() -> None:
    """A large embedding may stay there."""
    embedding, weight = (types.SimpleNamespace(device=types.SimpleNamespace(type=kind), dtype=torch.float32) for kind in ("cpu", "cuda"))
    asked = []
    there = cuda((9, 0), OFF, NEWER)
    there.cuda.get_device_capability = lambda device: asked.append(device) or (9, 0)
    found = formats.of_training(there, [embedding, weight], observe.device_kind([embedding, weight]), [], set(), {"conv"})
    assert (found["device"], found["arithmetic"], asked) == ("cuda", "tfloat32", [weight.device])


def test_compiled_code_tells_its_format_before_the_backward_pass() -> None:
    """Its node gives float32; what it has saved is freed when it has run."""
    class CompiledFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.bfloat16())
            return x.square().sum()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2 * ctx.saved_tensors[0].float()

    capture = Capture({"updates": 52})
    session = Session(torch, {"mode": "verify", "techniques": []})
    session.phase, session.capture = "discover", capture
    loss = CompiledFunction.apply(torch.ones(3, requires_grad=True))
    session.backward_begins(loss)
    loss.backward()
    assert capture._arithmetic == {"bfloat16"} and not session.dead


def settled(built_for: str) -> Any:
    return types.SimpleNamespace(version=types.SimpleNamespace(cuda=built_for or None, hip=None), backends=types.SimpleNamespace(
        cudnn=types.SimpleNamespace(benchmark=True)))


def test_no_algorithm_is_chosen_by_time_unless_a_technique_does() -> None:
    """Each process would take the one that was fastest in it, and give other bits. A script may ask for it in every epoch."""
    plain, other = settled("13.0"), settled("")
    randomness.choose_no_algorithm_by_time(plain)
    randomness.choose_no_algorithm_by_time(other)
    assert (plain.backends.cudnn.benchmark, other.backends.cudnn.benchmark) == (False, True)
    for chosen in (False, True):
        capture, torch_ = Capture({"updates": 52}, times_algorithms=chosen), settled("13.0")
        for capture.updates in (0, 1, 2, 30):
            torch_.backends.cudnn.benchmark = True
            capture.hold_algorithms(torch_)
            assert torch_.backends.cudnn.benchmark is chosen


TELLS = LOOP.replace("while True:", """
first = []
while True:
    first.append(torch.backends.cudnn.benchmark)
    if len(first) == 3: open(sys.argv[2], "w").write(str(first))""").replace("import contextlib", "import torch; torch.version.cuda = '13.0'; import contextlib")


@pytest.mark.parametrize("mode", ["verify", "trial"])
def test_algorithms_are_timed_from_the_first_forward_on(mode, script, start, tmp_path: Path) -> None:
    """torch chooses an algorithm at the first convolution of a shape, and keeps it."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    capture = {"folder": str(folder), "updates": 4, "seed": 20, "aligned": False, "perturb": None} if mode == "verify" else None
    trial = start(str(script(TELLS)), "plain", str(tmp_path / "told"), capture=capture, step={"token": "S0", "count": 1, "tokens": ["B", "S0"]},
                  techniques=[Chosen(id="cudnn-benchmark", module="saturate.techniques.cudnn_benchmark", path=None, options={})])
    if capture:
        trial.wait_ready()
    else:
        trial.wait_ready()
        trial.run_block(1, 1)
    assert (tmp_path / "told").read_text() == "[True, True, True]"
