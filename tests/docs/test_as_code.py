"""The lines of `saturate recipe show --as-code`, run in a usual script, do what their technique does."""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import math
import os
import shlex
import subprocess
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from saturate.cli import recipe
from saturate.records.recipe import Entry, Recipe
from saturate.techniques import _activations, _registry

MODULES = _registry.load()

# --- a usual script ---------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(4))
        self.head = torch.nn.Linear(8, 2)
        self.shift = torch.nn.Parameter(torch.zeros(8))
        self.shifts = True

    def forward(self, images):
        found = self.stem(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            found = block(found)
        found = found.mean(1)
        return self.head(found + self.shift if self.shifts else found)

torch.manual_seed(0)
device = torch.device("cpu")
model = Net()
model.stem.requires_grad_(False)
loss_fn = torch.nn.functional.mse_loss
batch_size = 8
dataset = TensorDataset(torch.randn(16, 3, 8, 8), torch.randn(16, 2))
loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
inputs, targets = dataset[:8]
optimizer = torch.optim.KIND([
    {"params": model.blocks.parameters(), "weight_decay": 0.1},
    {"params": [*model.stem.parameters(), *model.head.parameters(), model.shift]}], lr=0.01)
loss_fn(model(inputs), targets).backward()
optimizer.step()
loss = loss_fn(model(inputs), targets)
state, path = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt"
"""

#: How it goes on behind the lines of a technique.
TRAINING = """
torch.manual_seed(1)
optimizer.step()
for _ in range(2):
    optimizer.zero_grad()
    loss_fn(model(inputs), targets).backward()
    optimizer.step()
"""

STEP = "loss_fn(model(inputs), targets).backward()\noptimizer.step()"
ANEW = "optimizer = type(optimizer)([{**group} for group in optimizer.param_groups])"

#: What the lines of a technique, or of it with these options, stand for, where that is anything.
INSTEAD_OF: dict[typing.Any, str] = {
    "micro-batch": STEP, "dynamic-batch": STEP, "fp16-autocast": STEP, "fused-optimizer": ANEW, "optimizer-8bit": ANEW,
    "zero-grad-none": "optimizer.zero_grad(set_to_none=False)\nloss.backward()", ("cpu-offload", "optimizer"): "optimizer.step()",
}

#: What a script has that is not in the usual one.
BEFORE = {
    "zero-grad-none": "model.shifts = False\nloss = loss_fn(model(inputs), targets)",
    "activation-checkpointing": "for part in model.modules():\n    if isinstance(part, torch.nn.Dropout):\n        part.p = 0.2",
    "fp8-linear": "model.wide = torch.nn.ModuleList(torch.nn.Linear(*sides) for sides in ((256, 512), (256, 250), (128, 256)))",
}

#: How far weights may be from those without the lines, by numerics class: relative and absolute. Only "convergence" trains otherwise.
TOLERANCES = {"exact": (1e-6, 1e-6), "reordering": (1e-4, 1e-5), "stream": (1e-4, 1e-5), "precision": (0.02, 2e-3)}

#: Optimizers that the lines are run with. Momentum shows what becomes of parameters without a gradient.
KINDS = {"optimizer-8bit": ("Adam", "AdamW"), "fused-optimizer": ("SGD", "Adam", "AdamW", "Adagrad"), "compile": ("AdamW",)}
#: Adam divides the gradient of the keys' bias, which is zero but for rounding, by itself: not with this eps.
ARGUMENTS = {"SGD": ", momentum=0.9", "Adam": ", eps=1e-3", "AdamW": ", eps=1e-3"}

#: What text may say beside the Literals and bools of Options, and numbers that matter. Not of the allocator, which has none.
CHOICES = {
    "activation-checkpointing": {"mode": ("blocks", "operators", "budget"), "every": (1, 2), "budget_bytes": (0, 1 << 20)},
    "compile": {"dynamic": ("auto", "yes", "no"), "scope": ("module", "blocks")},
    "dataset-cache": {"max_gb": (0.0, 1.5)},
    "ddp-options": {"bucket_mib": (0, 5)},
    "dynamic-batch": {"limit_bytes": (0, 1 << 30)},
    "global-batch": {"rule": ("auto", "linear", "sqrt", "none")},
    "sdpa-backend": {"backend": ("flash", "cudnn", "efficient", "math")},
}

NEEDS_CUDA = {"device-prefetch"}
SHELL, SCRIPTS = "# in the shell", "# in the script"


def every_choice(identity: str) -> list[dict[str, object]]:
    """The defaults, and every combination of what is to be chosen from a list or switched."""
    module = MODULES[identity]
    hints = typing.get_type_hints(module.Options)
    axes = dict(CHOICES.get(identity, {}))
    for field in dataclasses.fields(module.Options):
        if hints[field.name] is bool:
            axes[field.name] = (False, True)
        elif typing.get_origin(hints[field.name]) is typing.Literal:
            axes[field.name] = typing.get_args(hints[field.name])
    return [dict(zip(axes, chosen)) for chosen in itertools.product(*axes.values())]


def for_the_script(identity: str, given: str = "drop_last=False", **chosen: object) -> str:
    """The lines of a technique without those for the shell. `given` stands for the user's own arguments."""
    code = MODULES[identity].as_code(MODULES[identity].Options(**chosen)).replace("...", given)
    return "".join(code.partition(SCRIPTS)[1:]) if code.startswith(SHELL) else code


def run(*lines: str, kind: str = "AdamW", **given: object) -> types.SimpleNamespace:
    """The variables of a script with these lines in it."""
    script = SCRIPT.replace("KIND", kind).replace("lr=0.01", f"lr=0.01{ARGUMENTS.get(kind, '')}")
    found: dict[str, typing.Any] = {"__name__": "script", **given}
    exec("\n".join([script, *lines]), found)
    return types.SimpleNamespace(**found)


def weights(found: types.SimpleNamespace) -> list[typing.Any]:
    return [parameter.detach() for parameter in found.model.parameters()]


@functools.cache
def without(before: str, lines: str, kind: str) -> list[typing.Any]:
    """The weights that the script ends with by itself."""
    return weights(run(before, lines, TRAINING, kind=kind))


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own, one rank, a compiler that only captures, and settings that are as they were afterwards."""
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    threshold, precision = gc.get_threshold(), torch.get_float32_matmul_precision()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)
    torch.set_float32_matmul_precision(precision)
    torch.distributed.destroy_process_group()


# --- what the lines have done -----------------------------------------------------------------------------------------


def compiles(found, options):
    import torch

    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < graphs < len(found.model.blocks)
    assert not any("_orig_mod" in name for name in found.model.state_dict())


def caches(found, options):
    import torch

    made, expected = [found.dataset[index] for index in range(16)], found.loader.dataset
    made[0][0].zero_()
    found.dataset.dataset = None        # it is not asked again
    for index in range(16):
        torch.testing.assert_close(found.dataset[index], expected[index])
    if options.where == "file":         # nor in the next run
        torch.testing.assert_close(type(found.dataset)(None)[3], expected[3])


def in_bfloat16(found, options):
    import torch

    assert found.loss.dtype == torch.float32
    if hasattr(found, "output"):
        assert found.output.dtype == torch.bfloat16
    else:
        given, head = torch.randn(1, 8), found.model.head
        output = head(given)
        assert output.dtype == torch.float32 and not torch.equal(output, type(head).forward(head, given))


def scales(found, options):
    auto = 1.0 if type(found.optimizer).__name__ == "SGD" else 0.5
    exponent = {"auto": auto, "linear": 1.0, "sqrt": 0.5, "none": 0.0}[options.rule]
    assert found.loader.batch_size == 16
    assert [group["lr"] for group in found.optimizer.param_groups] == [pytest.approx(0.01 * math.pow(2, exponent))] * 2


def loads(found, options):
    import torch

    saved, expected = torch.load(found.path), run(kind=type(found.optimizer).__name__).model.state_dict()
    assert [*saved] == ["model", "optimizer"] and os.listdir() == [found.path]
    torch.testing.assert_close(dict(saved["model"]), dict(expected))


def assert_that(*conditions: Callable[[types.SimpleNamespace], bool]) -> Callable[..., None]:
    def check(found, options):
        for condition in conditions:
            assert condition(found)

    return check


def merges(found, options):
    arguments = found.merged(types.SimpleNamespace(per_device_train_batch_size=4, gradient_accumulation_steps=8))
    assert vars(arguments) == {"per_device_train_batch_size": 4 * options.factor, "gradient_accumulation_steps": 8 // options.factor}


EFFECTS: dict[str, Callable[..., None]] = {
    "async-checkpoint": loads,
    "batch-assembly": assert_that(lambda found: [len(images) for images, _ in found.loader] == [8, 8]),
    "bf16-autocast": in_bfloat16,
    "channels-last": assert_that(lambda found: found.model.stem.weight.stride(1) == 1 and found.inputs.stride(1) == 1),
    "compile": compiles,
    "cudnn-benchmark": assert_that(lambda found: found.torch.backends.cudnn.benchmark),
    "dataset-cache": caches,
    "fp8-linear": assert_that(lambda found: [type(one).__name__ for one in found.model.wide] == ["Float8Linear", "Linear", "Linear"]),
    "fused-optimizer": assert_that(lambda found: all(group["fused"] for group in found.optimizer.param_groups)),
    "gc-freeze": assert_that(lambda found: gc.get_freeze_count() > 0 and gc.get_threshold()[0] == 50_000),
    "global-batch": scales,
    "loader-workers": assert_that(lambda found: (found.loader.num_workers, found.loader.prefetch_factor) == (1, 2)),
    "merged-micro-batches": merges,
    "optimizer-8bit": assert_that(lambda found: type(found.optimizer).__name__.removesuffix("8bit") in ("Adam", "AdamW")),
    "optimizer-in-backward": assert_that(lambda found: all(p.grad is None for p in found.model.parameters())),
    "pin-memory": assert_that(lambda found: found.loader.pin_memory),
    "tf32": assert_that(lambda found: found.torch.get_float32_matmul_precision() == "high"),
}

CASES = [
    pytest.param(identity, chosen, kind, id="-".join([identity, kind, *(str(value) for value in chosen.values())]))
    for identity in MODULES if identity not in NEEDS_CUDA
    for chosen in every_choice(identity) for kind in KINDS.get(identity, ("SGD", "AdamW"))
    if chosen.get("mode", "default") == "default" or chosen.get("dynamic", "auto") == "auto"]       # compile: one or the other


@pytest.mark.filterwarnings("ignore")       # that there is no CUDA, and that the eager backend has no modes
@pytest.mark.parametrize(("identity", "chosen", "kind"), CASES)
def test_the_lines_do_what_they_say(process, identity, chosen, kind):
    import torch

    lines = for_the_script(identity, **chosen)
    if identity == "cpu-offload":
        lines = lines.replace("pin_memory=True", "pin_memory=False")
    before, own = BEFORE.get(identity, ""), INSTEAD_OF.get((identity, *chosen.values()), INSTEAD_OF.get(identity, ""))
    found = run(before, lines, TRAINING, kind=kind)
    if (numerics := MODULES[identity].TECHNIQUE.numerics) in TOLERANCES:
        relative, absolute = TOLERANCES[numerics]
        torch.testing.assert_close(weights(found), without(before, own, kind), rtol=relative, atol=absolute)
    EFFECTS.get(identity, assert_that())(found, MODULES[identity].Options(**chosen))


def undefined(code: str) -> set[str]:
    """Names that lines use and nothing in them defines."""
    nodes = [*ast.walk(ast.parse(code))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {name.id for name in names if isinstance(name.ctx, ast.Store)} | {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    return {name.id for name in names} - bound - set(dir(builtins))


@pytest.mark.parametrize("identity", MODULES)
def test_the_lines_name_nothing_that_a_script_does_not_have(identity):
    usual = {*undefined(SCRIPT), *vars(run())}
    for chosen in every_choice(identity):
        assert undefined(for_the_script(identity, **chosen)) <= usual


def test_a_name_that_is_not_there_is_noticed():
    assert undefined("import a.b\nfor c in range(d):\n    def e(f): return [g for g in (c, f)]\n") == {"d"}


# --- what more there is to see ----------------------------------------------------------------------------------------

SHELL_LINES = [("cpu-threads", chosen) for chosen in every_choice("cpu-threads")] + [
    ("allocator", {"kind": "expandable_segments"}), ("allocator", {"kind": "glibc"}),
    ("allocator", {"kind": "jemalloc", "library": "/usr/lib/libjemalloc.so.2"}),
    ("allocator", {"kind": "tcmalloc", "library": "/usr/lib/$(false)/libtcmalloc.so"})]


@pytest.mark.parametrize("own", [
    {}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:2"},
    {"LD_PRELOAD": "/no/such/library.so", "MALLOC_CONF": "narenas:1", "MALLOC_MMAP_MAX_": "7", "MALLOC_TOP_PAD_": ""}], ids=" ".join)
@pytest.mark.parametrize(("identity", "chosen"), SHELL_LINES)
def test_the_shell_sets_what_the_technique_sets(identity, chosen, own):
    module = MODULES[identity]
    options = module.Options(**chosen)
    with mock.patch.dict(os.environ, own, clear=True):
        expected = module.environment(options)
    shell = module.as_code(options).partition(SCRIPTS)[0]
    assert shell.startswith(SHELL)
    shown = subprocess.run(["bash", "-euc", f"{shell}\nenv -0"], env={"PATH": os.environ["PATH"], **own}, capture_output=True, text=True, check=True)
    seen = dict(line.split("=", 1) for line in shown.stdout.split("\0") if line)
    assert {name: seen.get(name) for name in expected} == expected


def test_threads_are_those_that_were_asked_for():
    code = MODULES["cpu-threads"].as_code(MODULES["cpu-threads"].Options(threads=1))
    code += f"\n{shlex.quote(sys.executable)} -c 'import torch; print(torch.get_num_threads())'"
    assert subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_workers_of_a_bound_process_have_all_cores():
    mine = os.sched_getaffinity(0)
    lines = for_the_script("cpu-threads", given="num_workers=1, batch_size=None", bind=True)
    cores = "class Cores(torch.utils.data.Dataset):\n    def __len__(self):\n        return 1\n" \
            "    def __getitem__(self, index):\n        return sorted(os.sched_getaffinity(0))\ndataset = Cores()\n"
    os.sched_setaffinity(0, {min(mine)})
    try:
        seen = run(cores, lines, "seen = next(iter(loader))").seen
    finally:
        os.sched_setaffinity(0, mine)
    assert set(seen) == os.sched_getaffinity(os.getppid()) | {min(mine)}


def test_a_checkpoint_on_its_way_holds_what_was_saved(process):
    """Of what the training has changed by the time that it is written, nothing."""
    lines = for_the_script("async-checkpoint")
    busy = lines.replace("max_workers=1)\n", "max_workers=1)\nwriter.submit(written.wait)\n")
    before, mark, wait = busy.partition("# Before the next save")
    found = run(before, TRAINING, "written.set()", mark + wait, written=threading.Event())
    assert busy != lines and wait
    loads(found, None)


def test_what_was_written_in_vain_is_said(process):
    with pytest.raises(FileNotFoundError):
        run("path = 'no/such/folder/model.pt'", for_the_script("async-checkpoint"))


def test_a_batch_is_copied_before_the_one_at_hand_is_handed_out(monkeypatch):
    import torch

    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(wait_stream=lambda _: events.append("wait")))
    move = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: events.append("copy") or move(self, *args))
    lines = for_the_script("device-prefetch", given="batch_size=8").replace("pin_memory=True", "pin_memory=False")
    found = run(lines + "\n    events.append('step')", "pairs = [pair for pair in zip(loader, copied_ahead(loader))]", events=events)
    torch.testing.assert_close([batch for batch, _ in found.pairs], [batch for _, batch in found.pairs])
    assert events[:11] == ["wait", "copy", "copy", "wait", "copy", "copy", "step", "wait", "step", "wait", "copy"]


def test_the_products_that_are_kept_are_those_of_the_technique():
    import torch

    policy = run(for_the_script("activation-checkpointing", mode="operators")).policy
    aten, q = torch.ops.aten, torch.zeros(1)
    calls = [(aten.mm.default, (q, q), {}), (aten.add.Tensor, (q, q), {})]
    for attention, place in ((aten._scaled_dot_product_flash_attention.default, 3), (aten._scaled_dot_product_efficient_attention.default, 5)):
        calls += [(attention, (q,) * place + (0.1,), {}), (attention, (q,) * place + (0.0,), {}), (attention, (q,) * place, {"dropout_p": 0.1})]
    for operator, args, kwargs in calls:
        assert (policy(None, operator, *args, **kwargs).name == "MUST_SAVE") == _activations.is_product(operator, args, kwargs), operator
    assert {_activations.is_product(*call) for call in calls} == {False, True}


def test_a_copy_of_a_model_has_blocks_of_its_own(process):
    """An average of weights is a copy of the model: its blocks must not run those of the original."""
    for identity, chosen in (("compile", {"scope": "blocks"}), ("activation-checkpointing", {"mode": "blocks"})):
        found = run(for_the_script(identity, **chosen))
        other = copy.deepcopy(found.model)
        for parameter in other.blocks.parameters():
            parameter.data.zero_()
        assert not found.torch.equal(other(found.inputs), found.model(found.inputs))


def test_several_techniques_say_how_their_lines_go_together():
    def lines(*identities: str) -> str:
        return recipe.as_code(Recipe(techniques=[Entry(id=identity) for identity in identities]), "recipe.toml")

    assert lines("loader-workers", "pin-memory").startswith("# Together: ")
    assert lines("loader-workers").startswith("# loader-workers: ")
