"""Batches in chunks: the same training as without, whatever fails on the way; and what cannot be cut is not."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import pickle
import random
import re
import types
import weakref

import pytest

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from chunk_models import Language, Net, Quota  # noqa: E402 - after the import that decides whether to run at all
from torch.nn import functional  # noqa: E402

from saturate.agent.context import Context  # noqa: E402
from saturate.records.facts import Evidence, Facts, ModuleFacts, OptimizerFacts  # noqa: E402
from saturate.techniques import (  # noqa: E402
    _chunk_census,
    _chunk_modes,
    _chunk_plan,
    _chunks,
    _out_of_memory,
    _trees,
    dynamic_batch,
    micro_batch,
)
from saturate.techniques._api import NotApplied  # noqa: E402

CONTEXTS = []


def context_of(*modules):
    context = Context(torch)
    context.modules, context.device = modules, "cpu"
    CONTEXTS.append(context)
    return context


@pytest.fixture(autouse=True)
def undone():
    """What a test leaves around torch's functions is not in the way of the next."""
    yield
    while CONTEXTS:
        CONTEXTS.pop().undo()


def regression(model, updates=20, technique=None, options=None, samples=8, loss=None, dtype=torch.float64, sizes=None,
               accumulate=1, clear_to_none=True):
    """Train on random data that depends on nothing else; the losses, and the context."""
    model = model.to(dtype).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    context = context_of(model)
    if technique is not None:
        technique.apply(context, options or technique.Options())
    generator = torch.Generator().manual_seed(1)
    losses = []
    for update in range(updates):
        optimizer.zero_grad(set_to_none=clear_to_none)
        for _ in range(accumulate):
            count = samples if sizes is None else sizes[update % len(sizes)]
            x = torch.randn(count, 6, generator=generator, dtype=dtype)
            y = torch.randn(count, 3, generator=generator, dtype=dtype)
            value = (loss or functional.mse_loss)(model(x), y) / accumulate
            value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, context


def twins(make=Net, seed=0, **kwargs):
    torch.manual_seed(seed)
    plain = make(**kwargs)
    return plain, copy.deepcopy(plain)


def largest_difference(left, right):
    return max(float((a - b).abs().max()) for a, b in zip(left.state_dict().values(), right.state_dict().values()))


def assert_same_gradients(left, right, rtol=1e-5, atol=1e-6):
    """None where the other is None too: a gradient that was lost is a difference."""
    assert len(left) == len(right) and any(gradient is not None for gradient in left)
    for a, b in zip(left, right):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=rtol, atol=atol)


# -- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [2, 3, 5, 8, 64])
@pytest.mark.parametrize("dtype, allowed", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_micro_batches_train_like_the_whole_batch(chunks, dtype, allowed):
    plain, tuned = twins()
    expected, _ = regression(plain, dtype=dtype)
    losses, context = regression(tuned, technique=micro_batch, options=micro_batch.Options(chunks), dtype=dtype)
    assert context.notes["micro-batch"] == f"backward by {min(chunks, 8)} chunks"
    assert largest_difference(plain, tuned) < allowed
    assert losses == pytest.approx(expected, rel=allowed * 10)
    assert tuned.unused.weight.grad is None and tuned.layers[1].bias.grad is None


def contrastive(output, target):
    """A loss with negatives among the batch: chunks of it would be another loss."""
    return functional.cross_entropy(output @ output.T + (output * target).sum(), torch.arange(len(output)))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clear_to_none", [True, False])
def test_the_user_s_loss_sees_the_whole_batch(accumulate, clear_to_none):
    plain, tuned = twins()
    settings = {"loss": contrastive, "accumulate": accumulate, "clear_to_none": clear_to_none}
    expected, _ = regression(plain, **settings)
    losses, context = regression(tuned, technique=micro_batch, options=micro_batch.Options(3), **settings)
    assert "micro-batch" in context.notes
    assert losses == pytest.approx(expected, rel=1e-10)
    assert largest_difference(plain, tuned) < 1e-11


def test_every_chunk_runs_twice_and_never_more_samples_than_asked():
    quota = Quota()
    _, context = regression(Net(quota=quota), updates=3, technique=micro_batch, options=micro_batch.Options(4))
    after_the_proof = quota.visits[-48:]             # the last update: 4 chunks at 4 places, forward, again, backward
    assert {samples for _, _, samples in after_the_proof} == {2}
    forwards = sum(phase == "forward" for phase, _, _ in after_the_proof)
    backwards = sum(phase == "backward" for phase, _, _ in after_the_proof)
    assert forwards == 2 * backwards


@pytest.mark.parametrize("make", [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"),
    lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    MemoryError,
])
def test_running_out_of_memory_is_a_class_of_errors(make):
    assert _out_of_memory.out_of_memory(make(), torch)
    plain, tuned = twins()
    expected, _ = regression(plain)
    tuned.quota[0] = Quota(limit=4, error=make)
    losses, _ = regression(tuned, technique=dynamic_batch)
    assert tuned.quota[0].failures and losses == pytest.approx(expected, rel=1e-12)


def test_other_errors_are_the_user_s_own():
    assert not _out_of_memory.out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), torch)
    assert not _out_of_memory.out_of_memory(ValueError("out of memory"), torch)
    model = Net(quota=Quota(limit=4, error=lambda: ValueError("mine")))
    with pytest.raises(ValueError, match="mine"):
        regression(model, technique=dynamic_batch)


@pytest.mark.parametrize("phases", [("forward",), ("backward",), ("forward", "backward")])
@pytest.mark.parametrize("seed", range(3))
def test_the_training_survives_memory_that_runs_out_anywhere(phases, seed, capfd):
    """At random places, in later chunks too, and at random moments."""
    plain, tuned = twins(seed=seed)
    expected, _ = regression(plain, samples=13)
    quota = tuned.quota[0] = Quota(limit=1 + 2 * seed, phases=phases, seed=seed, transient=0.02)
    quota.armed = False                     # the first batches fit: it is looked at before memory is short
    armed = lambda update: setattr(quota, "armed", update >= 1)     # noqa: E731
    losses, context = train_with(tuned, armed, samples=13)
    assert quota.failures
    assert losses == pytest.approx(expected, rel=1e-12)
    assert largest_difference(plain, tuned) < 1e-12
    said = capfd.readouterr().err
    assert "saturate: dynamic-batch: Net ran out of memory" in said
    assert said.count("\n") <= len(quota.failures) + 2


def train_with(model, before, samples=13, updates=20, options=None):
    """`regression` with the technique, and a callback before each update."""
    calls = iter(range(10**6))
    hook = model.register_forward_pre_hook(lambda *_: before(next(calls)))
    try:
        return regression(model, updates, dynamic_batch, options, samples)
    finally:
        hook.remove()


class Pair(Net):
    """Two outputs, of which one is computed from the other."""

    def forward(self, x):
        y = super().forward(x)
        return {"wide": y.tanh() * 2, "y": y}


def of_both(output, target):
    return functional.mse_loss(output["wide"] + output["y"], target) + output["y"].square().mean()


@pytest.mark.parametrize("make, loss", [(Net, None), (Pair, of_both)])
@pytest.mark.parametrize("accumulate, clear_to_none", [(1, True), (1, False), (3, False)])
@pytest.mark.parametrize("place", range(4))
def test_a_backward_of_a_trusted_size_runs_out(make, loss, accumulate, clear_to_none, place, capfd):
    """In each place: later layers have their gradients by then, on top of what was there before, and earlier ones do not."""
    plain, tuned = twins(make)
    settings = {"loss": loss, "accumulate": accumulate, "clear_to_none": clear_to_none, "updates": 12}
    expected, _ = regression(plain, **settings)
    quota = tuned.quota[0] = FailsOnce(place, at=8 * accumulate)
    seen = []
    tuned.layers[0].weight.register_hook(lambda gradient: seen.append("first"))
    tuned.head.weight.register_hook(lambda gradient: seen.append("last"))
    losses, context = regression(tuned, technique=dynamic_batch, **settings)
    try:
        assert quota.failures == [("backward", place, 8)] and capfd.readouterr().err.count("ran out of memory") == 1
        assert losses == pytest.approx(expected, rel=1e-12) and largest_difference(plain, tuned) < 1e-12
        assert seen.count("first") == seen.count("last") == 12 * accumulate, "a hook saw a gradient more or less than once"
    finally:
        context.undo()


def test_a_hook_on_the_output_of_a_batch_that_runs_again_has_its_say():
    """What it makes of the gradient goes on."""
    (plain, tuned), found = twins(), []
    dynamic_batch.apply(context_of(tuned), dynamic_batch.Options())
    for model in (plain, tuned):
        for step in range(4):
            model.train().zero_grad()
            quota = model.quota[0] = FailsOnce(1, at=1) if model is tuned and step == 3 else Quota()
            output = model(torch.randn(8, 6, generator=torch.Generator().manual_seed(step)))
            output.register_hook(lambda gradient: gradient * 2)
            output.square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert quota.failures
    assert_same_gradients(*found, atol=1e-5)       # entries of up to ten are added up in another order


class FailsOnce(Quota):
    """In one place, in the backward number `at` of a whole batch that the script's own graph is walked in."""

    __slots__ = ("place", "left")

    def __init__(self, place, at):
        super().__init__()
        self.place, self.left = place, at

    def visit(self, phase, place, samples):
        if phase == "backward" and place == self.place and samples == 8 and self.left > 0:
            self.left -= 1
            if self.left == 0:
                self.failures.append((phase, place, samples))
                raise self.error()


@pytest.mark.parametrize("loss, reason", [
    (lambda model, x: (model(x) + model(x * 2)).sum(), "several forwards|another way"),
    (lambda model, x: model(x.requires_grad_()).sum(), "input is differentiated"),
    (lambda model, x: model(x).sum() + model.layers[0].weight.square().sum(), "another way than through this output"),
])
def test_a_backward_that_cannot_be_made_up_for_says_why(loss, reason, capfd):
    model = Net().train()
    context = context_of(model)
    dynamic_batch.apply(context, dynamic_batch.Options())
    try:
        for _ in range(3):
            loss(model, torch.randn(8, 6)).backward()
        model.quota[0] = FailsOnce(1, at=1)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            loss(model, torch.randn(8, 6)).backward()
        assert any(re.search(reason, note) for note in caught.value.__notes__), caught.value.__notes__
        assert re.search(reason, capfd.readouterr().err)
    finally:
        context.undo()


@pytest.mark.parametrize("given, survives", [
    (lambda loss: (one for one in (loss,)), True), (lambda loss: (torch.autograd.graph.get_gradient_edge(loss),), False),
], ids=["a generator", "an edge"])
def test_a_backward_of_whatever_torch_differentiates_runs_out(given, survives):
    model = Net().train()
    context = context_of(model)
    dynamic_batch.apply(context, dynamic_batch.Options())
    try:
        for _ in range(3):
            torch.autograd.backward(given(model(torch.randn(8, 6)).sum()), [torch.ones(())])
        model.quota[0] = FailsOnce(1, at=1)
        loss = model(torch.randn(8, 6)).sum()
        with contextlib.nullcontext() if survives else pytest.raises(torch.OutOfMemoryError) as caught:
            torch.autograd.backward(given(loss), [torch.ones(())])
        assert model.quota[0].failures
        assert survives or any("begins at an edge of the graph" in note for note in caught.value.__notes__)
    finally:
        context.undo()


def test_the_failed_graph_is_released_though_the_script_holds_its_output():
    """Else there would be no more room for the chunks than for the whole."""
    from saturate.techniques._chunk_rescue import release_graph

    saved = torch.randn(8, 6)
    output = (torch.randn(8, 6, requires_grad=True) * saved).tanh()
    held = weakref.ref(saved)
    del saved
    assert held() is not None
    release_graph([output.grad_fn])
    assert held() is None and output.grad_fn is not None


def test_a_shape_is_trusted_by_each_of_its_dimensions():
    """Eight sequences of four tokens say nothing about four of eight: attention grows with the square of the length."""
    policy = dynamic_batch.Insurance(context_of(), dynamic_batch.Options(), print)
    shapes = [(torch.Size(size),) for size in ((8, 4), (4, 8), (8, 3), (2, 4), (8, 5), (8,))]
    assert not policy.runs_whole(shapes[0])
    policy.began(32, 1, shapes[0])()
    assert [policy.runs_whole(shape) for shape in shapes] == [True, False, True, True, False, False]
    policy.smaller(32, 2, "")
    assert not policy.runs_whole(shapes[0])


def test_float32_deviates_by_association_only():
    plain, tuned = twins()
    expected, _ = regression(plain, dtype=torch.float32)
    tuned.quota[0] = Quota(limit=3)
    losses, _ = regression(tuned, technique=dynamic_batch, dtype=torch.float32)
    assert tuned.quota[0].failures
    assert losses == pytest.approx(expected, rel=1e-5)
    assert largest_difference(plain, tuned) < 1e-5


def test_varying_sizes_are_cut_as_far_as_each_needs():
    plain, tuned = twins()
    sizes = [3, 8, 5, 16, 2, 11, 1, 16]
    expected, _ = regression(plain, updates=24, sizes=sizes)
    quota = tuned.quota[0] = Quota(limit=5)
    losses, _ = regression(tuned, updates=24, sizes=sizes, technique=dynamic_batch)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert len(quota.failures) < 12, "what did not fit once is tried again and again"


def test_nothing_smaller_than_a_sample():
    """A sample that does not fit ends the run with the user's own error, and no gradient is left behind."""
    model = Net()
    model.quota[0] = quota = Quota(limit=0, phases=("backward",))
    quota.random.random = lambda: 0.5
    quota.armed = False
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train_with(model, lambda update: setattr(quota, "armed", update >= 1), samples=4)
    assert any("nothing smaller" in note for note in caught.value.__notes__)
    assert all(p.grad is None for p in model.parameters()), "a gradient of a part was added"


def test_gradients_of_inputs_keep_their_order_when_a_backward_is_cut():
    """An encoder in front of the model learns from them."""
    plain, tuned = twins()
    plain.double(), tuned.double()
    quota = tuned.quota[0] = Quota(limit=2, phases=("backward",))
    quota.armed = False
    dynamic_batch.apply(context_of(tuned), dynamic_batch.Options())
    found = []
    for model in (plain, tuned):
        x = torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
        model.train()(x)
        quota.armed = True
        model(x).square().sum().backward()
        found.append(x.grad)
    assert len(quota.failures) > 1
    assert torch.allclose(*found, rtol=1e-12, atol=1e-14)


def test_what_fits_runs_as_the_script_wrote_it():
    """After its size has been guarded twice, a batch meets no autograd node of ours."""
    model = Net().train()
    context = context_of(model)
    dynamic_batch.apply(context, dynamic_batch.Options())
    x = torch.randn(8, 6)
    names = []
    for _ in range(4):
        output = model(x)
        names.append(output.grad_fn.name())
        output.sum().backward()
    assert names == ["ChunkedForwardBackward", "ChunkedForwardBackward", "AddmmBackward0", "AddmmBackward0"]
    assert model(torch.randn(9, 6)).grad_fn.name() == "ChunkedForwardBackward", "larger than all before it"


def test_tight_memory_stays_guarded(monkeypatch):
    from saturate.techniques._memory_forecast import Memory

    monkeypatch.setattr(dynamic_batch, "memory", lambda *_: Memory(80, 90, 100))
    model = Net().train()
    dynamic_batch.apply(context_of(model), dynamic_batch.Options())
    for _ in range(4):
        output = model(torch.randn(8, 6))
        output.sum().backward()
    assert output.grad_fn.name() == "ChunkedForwardBackward"


# -- randomness ------------------------------------------------------------------------------------------------------


def test_dropout_draws_the_same_numbers_again():
    """The gradients must be those of the very function whose outputs the loss saw: checked against its own differences."""
    model = Net(dropout=0.4).double().train()
    micro_batch.apply(context_of(model), micro_batch.Options(chunks=3))
    x = torch.randn(7, 6, dtype=torch.float64)
    model(x)
    weight = model.layers[0].weight

    def value():
        torch.manual_seed(5)
        return model(x).square().sum()

    value().backward()
    for index in ((0, 0), (3, 2), (5, 5)):
        with torch.no_grad():
            weight[index] += 1e-6
            above = value_of(model, value)
            weight[index] -= 2e-6
            below = value_of(model, value)
            weight[index] += 1e-6
        assert (above - below) / 2e-6 == pytest.approx(float(weight.grad[index]), rel=1e-4)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.7])
def test_no_dropout_has_an_effect_on_the_proof(share):
    """torch leaves out an argument that has its default, as the probability of one half has."""
    x = torch.randn(7, 6, requires_grad=True)
    with _chunk_modes.steady(torch):
        assert torch.equal(functional.dropout(x, share), x)
        assert torch.equal(torch.full((7,), 9.0).bernoulli_(), torch.full((7,), 0.5))


def value_of(model, value):
    with torch.enable_grad():
        return float(value().detach())


def test_a_backward_leaves_the_generators_where_they_were():
    model = Net(dropout=0.4).train()
    micro_batch.apply(context_of(model), micro_batch.Options(chunks=3))
    model(torch.randn(7, 6))
    output = model(torch.randn(7, 6))
    state = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(state, torch.get_rng_state())


def test_a_backward_with_dropout_cannot_be_cut_further_on_a_cpu():
    model = Net(dropout=0.3)
    quota = model.quota[0] = Quota(limit=3, phases=("backward",))
    quota.armed = False
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train_with(model, lambda update: setattr(quota, "armed", update >= 1), samples=8)
    assert any("drew random numbers" in note for note in caught.value.__notes__)
    assert all(p.grad is None for p in model.parameters())


def test_dropout_that_runs_out_in_the_forward_goes_on():
    model = Net(dropout=0.3)
    quota = model.quota[0] = Quota(limit=3, phases=("forward",))
    losses, _ = regression(model, technique=dynamic_batch)
    assert quota.failures and losses[-1] < losses[0]


class Tempered(torch.nn.Module):
    """Reads its mode, and a temperature that lies in several places."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(6, 6), torch.nn.Dropout(0.4)
        self.value, self.listed, self.config = 1.0, [1.0], types.SimpleNamespace(value=1.0)
        self.register_buffer("replaced", torch.tensor(1.0))
        self.register_buffer("written", torch.tensor(1.0))

    def forward(self, x):
        y = self.dropout(self.linear(x).exp()) / (self.value * self.listed[0] * self.config.value * self.replaced * TEMPERATURE[()])
        return y / self.written.clone()


TEMPERATURE = {(): 1.0}

BETWEEN = {
    "mode": lambda model: model.eval(),
    "attribute": lambda model: setattr(model, "value", 2.0),
    "list": lambda model: model.listed.__setitem__(0, 2.0),
    "object": lambda model: setattr(model.config, "value", 2.0),
    "new buffer": lambda model: setattr(model, "replaced", torch.tensor(2.0)),
    "written buffer": lambda model: model.written.mul_(2.0),
    "part": lambda model: setattr(model, "dropout", torch.nn.Identity()),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_what_a_script_changes_before_the_backward_is_not_seen_by_it(what):
    """The gradients are those of the function whose outputs the loss saw; afterwards the model is what the script made of it."""
    tuned = Tempered().train()
    micro_batch.apply(context_of(tuned), micro_batch.Options())
    x = torch.randn(8, 6)
    tuned(x)
    output = tuned(x)
    assert "ChunkedForward" in output.grad_fn.name()
    BETWEEN[what](tuned)
    state, values = tuned.state_dict(), (tuned.training, tuned.value, tuned.listed[0], tuned.config.value, tuned.dropout)
    output.sum().backward()
    assert torch.allclose(tuned.linear.bias.grad, output.detach().sum(0), rtol=1e-5)      # exp is its own derivative
    assert (tuned.training, tuned.value, tuned.listed[0], tuned.config.value, tuned.dropout) == values
    assert list(state) == list(tuned.state_dict()) and all(value is not None for value in state.values())
    assert all(torch.equal(value, tuned.state_dict()[name]) for name, value in state.items())


def test_what_is_changed_out_of_reach_before_the_backward_ends_the_run(monkeypatch):
    model = Tempered().train()
    micro_batch.apply(context_of(model), micro_batch.Options())
    x = torch.randn(8, 6)
    model(x)
    output = model(x)
    monkeypatch.setattr(__name__ + ".TEMPERATURE", {(): 1.01})
    with pytest.raises(_chunk_plan.NotSplittable, match="was changed in between"):
        output.sum().backward()
    assert model.linear.weight.grad is None


def test_a_backward_is_not_made_up_for_by_another_function(capfd):
    model = Net().train()
    context = context_of(model)
    dynamic_batch.apply(context, dynamic_batch.Options())
    try:
        for _ in range(3):
            model(torch.randn(8, 6)).sum().backward()
        model.quota[0] = FailsOnce(1, at=1)
        output = model(torch.randn(8, 6))
        model.norm = torch.nn.Identity()
        with pytest.raises(torch.OutOfMemoryError):
            output.sum().backward()
        assert "something else now than in its forward" in capfd.readouterr().err
    finally:
        context.undo()


class Out:
    """Of sight: a look at the model does not go into slots."""

    __slots__ = ("generator",)

    def __init__(self, generator):
        self.generator = generator


class OwnGenerator(Net):
    def __init__(self, holder=lambda generator: types.SimpleNamespace(generator=generator)):
        super().__init__()
        self.holder = holder(torch.Generator().manual_seed(0))

    def forward(self, x):
        return super().forward(x) * torch.rand((), generator=self.holder.generator)


class WithNumpy(Net):
    """`share` is how often the numbers matter. What matters in each forward is seen by the proof, and refused."""

    share = 1.0

    def forward(self, x):
        python, of_numpy = random.random(), numpy.random.rand()
        return super().forward(x) * (1 + python if python < self.share else 1.0) * (1 + of_numpy if of_numpy < self.share else 1.0)


def test_python_s_and_numpy_s_numbers_are_drawn_again():
    model = WithNumpy().double().train()
    assert "depend on each other" in refused(copy.deepcopy(model), torch.randn(8, 6, dtype=torch.float64))
    context = context_of(model)
    micro_batch.apply(context, micro_batch.Options())
    x = torch.randn(8, 6, dtype=torch.float64)
    model.share = 0.0
    for _ in range(6):      # chunks are compared with the whole again after 1, 2, 4, 8 batches: not in the next one
        model(x)
    model.share = 1.0
    output = model(x)
    assert "ChunkedForward" in output.grad_fn.name()
    # The product rule of a constant factor: the gradient must be scaled like the output was, in both chunks.
    output.sum().backward()
    chunked = [parameter.grad for parameter in model.parameters()]
    scale = output.detach() / super(WithNumpy, model).forward(x).detach()
    model.zero_grad()
    (super(WithNumpy, model).forward(x) * scale).sum().backward()
    assert_same_gradients(chunked, [parameter.grad for parameter in model.parameters()], 1e-9, 1e-9)


# -- what is refused, and how ----------------------------------------------------------------------------------------


def refused(model, *batch, technique=micro_batch):
    """What is said of a model whose batch is left as it is."""
    said = []
    context = context_of(model.train())
    original = technique._chunk_guard.speaker
    technique._chunk_guard.speaker = lambda *_: said.append
    try:
        technique.apply(context, technique.Options())
        for _ in range(2):
            output = model(*batch)
        first = output[0] if isinstance(output, tuple) else output
        assert "ChunkedForward" not in first.grad_fn.name()
    except NotApplied as refusal:
        said.append(str(refusal))
    finally:
        technique._chunk_guard.speaker = original
    assert len(said) == 1, said
    assert not technique.active(Evidence(notes=dict(context.notes)), technique.Options()).active
    return said[0]


def body(forward, **modules):
    """A module with the given forward."""

    class Custom(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(6, 6)
            for name, module in modules.items():
                setattr(self, name, module)
            self.calls = 0
            self.kept = None
            self.register_buffer("mean", torch.zeros(6))

    Custom.forward = forward
    return Custom()


def spoken_in(self, x):
    torch.distributed.all_reduce(x.detach() * 1)
    return self.linear(x)


def test_a_distribution_is_not_cut():
    """As the policies of agents return, with a value. The script got an error where it used it: that of a chunk is not the batch's."""
    def forward(self, x):
        hidden = self.linear(x)
        return hidden.mean(1), torch.distributions.Independent(torch.distributions.Normal(hidden, torch.ones(6)), 1)

    assert "its output holds a distribution (Independent)" in refused(body(forward), torch.randn(8, 6))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_where_ranks_speak_to_each_other_nothing_is_cut(monkeypatch):
    """Memory runs out on one rank, which would wait for the others in each of its chunks."""
    spoken, speak = [], torch.distributed.all_reduce
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: (speak(tensor), spoken.append(len(tensor))))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        said = refused(body(spoken_in), torch.randn(8, 6))
    finally:
        torch.distributed.destroy_process_group()
    assert said == "left as it is: ranks speak to each other in it"
    assert spoken == [8, 8], "not once more to find out"


def with_room_for_a_share(self, x):
    """A mixture of experts drops what is more than an expert's share of the batch, but takes four of each batch at least."""
    room = max(4, len(x) // 4)
    to_first = self.linear(x)[:, 0] > 0
    kept = ~to_first | (to_first.cumsum(0) <= room)
    return x + self.linear(x) * kept[:, None]


def beyond_eight(self, x):
    y = self.linear(x)
    return y - y.mean(0) if len(x) > 8 else y


@pytest.mark.parametrize("forward", [with_room_for_a_share, beyond_eight])
def test_what_couples_samples_beyond_a_size_only(forward):
    torch.manual_seed(0)
    said = refused(body(forward), torch.randn(64, 6))
    assert "with 64 samples in 2 chunks" in said and "depend on each other" in said


@pytest.mark.parametrize("ran, refused", [(8, False), (20, True)])
def test_a_batch_that_never_ran_whole_is_compared_as_far_as_others_have(ran, refused, capfd):
    """Eight show nothing of it, and nobody can know; twenty do."""
    torch.manual_seed(0)
    quota = Quota(limit=20, phases=("forward",))
    quota.random.random = lambda: 0.5
    model = body(beyond_eight_within(quota)).train()
    dynamic_batch.apply(context_of(model), dynamic_batch.Options())
    for _ in range(3):
        model(torch.randn(ran, 6)).sum().backward()
    if refused:
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.randn(24, 6))
        assert "with 20 samples in 2 chunks" in capfd.readouterr().err
    else:
        assert "ChunkedForward" in model(torch.randn(24, 6)).grad_fn.name()


def beyond_eight_within(quota):
    def forward(self, x):
        quota.visit("forward", 0, len(x))
        return beyond_eight(self, x)

    return forward


def test_what_a_module_builds_in_its_first_call_is_no_reason_when_it_is_watched_from_there_on():
    def lazily(self, x):
        self.kept = self.kept if self.kept is not None else len(x)
        return self.linear(x)

    model = body(lazily).train()
    context = context_of(model)
    context.early = True
    micro_batch.apply(context, micro_batch.Options())
    names = ["ChunkedForward" in model(torch.randn(8, 6)).grad_fn.name() for _ in range(3)]
    assert names == [False, False, True]


def test_a_coupling_that_shows_later_ends_it(capfd):
    """One batch may agree by chance; 1, 2, 4, 8... batches later it is looked at again."""
    model = body(lambda self, x: self.linear(x) - (self.linear(x).mean(0) if self.coupled[0] else 0))
    model.coupled = [False]
    micro_batch.apply(context_of(model.train()), micro_batch.Options())
    names = []
    for batch in range(12):
        model.coupled[0] = batch > 5
        output = model(torch.randn(16, 6))
        output.square().sum().backward()
        names.append("ChunkedForward" in output.grad_fn.name())
    assert names[1:8] == [True] * 7 and not any(names[9:])
    assert "8 batch(es) ran in chunks before that showed" in capfd.readouterr().err


def test_batch_norm_is_refused_unless_it_is_frozen():
    model = body(lambda self, x: self.norm(self.linear(x)), norm=torch.nn.BatchNorm1d(6))
    assert "normalizes over the batch" in refused(model, torch.randn(8, 6))
    model.norm.eval()
    model.train = lambda mode=True: model
    model.training = True
    context = context_of(model)
    micro_batch.apply(context, micro_batch.Options())
    model(torch.randn(8, 6))
    model(torch.randn(8, 6)).sum().backward()
    assert "micro-batch" in context.notes


def test_gradients_that_are_divided_by_frequency_are_refused():
    """Of a few samples without an index that occurs twice, they are the same in chunks."""
    def embeds(self, x):
        return self.linear(self.table(x))

    model = body(embeds, table=torch.nn.Embedding(1000, 6, scale_grad_by_freq=True))
    assert "how often an index occurs" in refused_at_once(model)
    bags = body(embeds, table=torch.nn.EmbeddingBag(1000, 6, scale_grad_by_freq=True))
    assert "how often an index occurs" in refused_at_once(bags)
    model.table.weight.requires_grad_(False)        # nothing is divided
    assert not _chunk_census.census(model, torch)


def mixes(self, x):
    return self.linear(x) - self.linear(x).mean(0)


def negatives(self, x):
    return self.linear(x) @ self.linear(x).T


def sorts(self, x):
    y = self.linear(x)
    return y[y.sum(1).argsort()]


def mixed_up(self, x):
    y = self.linear(x)
    return y + 0.3 * y[torch.randperm(len(y))]


def gradient_only(self, x):
    y = self.linear(x)
    return y + (y - y.detach()).mean(0)         # the same values, other gradients


def counts(self, x):
    self.calls += 1
    return self.linear(x) * (1 + self.calls * 1e-3)


def buffers(self, x):
    self.mean.mul_(0.9).add_(x.detach().mean(0))
    return self.linear(x)


def keeps(self, x):
    self.kept = self.linear(x)
    return self.kept


def in_place(self, x):
    x.mul_(0.5)
    return self.linear(x)


def own_loss(self, x):
    return self.linear(x).square().mean()


def python_value(self, x):
    return self.linear(x), float(x.sum())


LEFT_ALONE = {
    mixes: "depend on each other", negatives: "no part of it belongs to each sample", sorts: "depend on each other",
    mixed_up: "depend on each other", gradient_only: "gradients of chunks", counts: "changes calls", buffers: "changes mean", keeps: "keeps a tensor",
    in_place: "input in place", own_loss: "weights of the samples", python_value: "values that depend on the batch",
}


@pytest.mark.parametrize("forward", LEFT_ALONE, ids=lambda forward: forward.__name__)
def test_models_that_cannot_be_cut_are_left_alone(forward):
    torch.manual_seed(0)
    assert LEFT_ALONE[forward] in refused(body(forward), torch.randn(8, 6))


class Losses:
    def __init__(self):
        self.found = []


FILLED = {
    "list": ([], list.append), "dict": ({}, lambda into, value: into.update(aux=value)), "set": (set(), set.add),
    "nested": (([],), lambda into, value: into[0].append(value)), "object": (Losses(), lambda into, value: into.found.append(value)),
    "attribute": (Losses(), lambda into, value: setattr(into, "found", value)),
}


@pytest.mark.parametrize("what", FILLED)
def test_a_forward_that_fills_its_argument_is_left_alone(what, capfd):
    """Each chunk would fill one of its own."""
    empty, fill = FILLED[what]

    def auxiliary(self, x, into):
        y = self.linear(x)
        fill(into, y.square().mean())
        return y

    model = body(auxiliary).train()
    micro_batch.apply(context_of(model), micro_batch.Options())
    for _ in range(3):
        argument = copy.deepcopy(empty)
        assert "ChunkedForward" not in model(torch.randn(8, 6), argument).grad_fn.name()
    assert capfd.readouterr().err.count("container among its arguments") == 1


@pytest.mark.parametrize("given", [list, tuple, numpy.array, lambda lengths: {"lengths": lengths}], ids=["list", "tuple", "array", "dictionary"])
def test_a_number_for_each_sample_in_a_list_is_not_taken_for_the_same_in_every_chunk(given, capfd):
    """All samples are alike until they are not, in a batch that is not compared."""
    def cut_off(self, x, found):
        lengths = found["lengths"] if isinstance(found, dict) else found
        return torch.stack([self.linear(x)[row, :int(lengths[row])].sum() for row in range(len(x))])

    model, lengths = body(cut_off).train(), [3] * 8
    micro_batch.apply(context_of(model), micro_batch.Options())
    for step in range(4):
        assert ("ChunkedForward" in model(torch.randn(8, 6), given(lengths)).grad_fn.name()) == (step > 0)
    x = torch.randn(8, 6)
    lengths = [3] * 7 + [1]
    assert torch.equal(model(x, given(lengths)), cut_off(model, x, given(lengths)))
    assert "ChunkedForward" not in model(x, given(lengths)).grad_fn.name()
    assert "left as it is" in capfd.readouterr().err


def test_an_argument_that_is_filled_later_is_filled_by_the_script_s_own_forward(capfd):
    def later(self, x, into):
        y = self.linear(x)
        into.extend([y] * len(self.on))
        return y

    model = body(later).train()
    model.on = []
    micro_batch.apply(context_of(model), micro_batch.Options())
    for step in range(5):
        model.on = [1] * (step == 4)        # not compared: 3 batches have run in chunks
        output = model(torch.randn(8, 6), found := [])
    assert found == [output] and "container among its arguments" in capfd.readouterr().err


def test_more_models_that_are_left_alone():
    outside = torch.nn.Parameter(torch.ones(6))
    assert "not among its parameters" in refused(body(lambda self, x: self.linear(x) * outside), torch.randn(8, 6))
    assert "generator of its own" in refused_at_once(OwnGenerator())
    assert "run again" in refused(OwnGenerator(Out), torch.randn(8, 6))
    assert "two samples" in refused(body(lambda self, x: self.linear(x)), torch.randn(1, 6))
    graph = body(lambda self, x, edges: self.linear(x)[edges[0]])
    assert "integers" in refused(graph, torch.randn(8, 6), torch.randint(8, (2, 5)))
    hooked = body(lambda self, x: self.linear(x))
    hooked.linear.register_forward_hook(lambda *_: None)
    assert "hook of the script" in refused(hooked, torch.randn(8, 6))
    assert "compiles" in refused_at_once(compiled())


def test_a_tensor_that_the_forward_makes_and_differentiates_is_no_trained_one():
    """PEFT has a frozen embedding's output ask for gradients, so that what is checkpointed behind it has any."""
    def asking(self, x):
        return self.linear(self.frozen(x).requires_grad_())

    model = body(asking, frozen=torch.nn.Linear(6, 6).requires_grad_(False)).train()
    x = torch.randn(8, 6)
    model(x).square().sum().backward()
    expected = [parameter.grad for parameter in model.linear.parameters()]
    micro_batch.apply(context_of(model), micro_batch.Options())
    for _ in range(3):
        model.zero_grad()
        output = model(x)
        output.square().sum().backward()
    assert "ChunkedForward" in output.grad_fn.name()
    torch.testing.assert_close([parameter.grad for parameter in model.linear.parameters()], expected)


def compiled():
    model = body(lambda self, x: self.linear(x))
    model.compile()
    return model


def refused_at_once(model):
    with pytest.raises(NotApplied) as refusal:
        dynamic_batch.apply(context_of(model), dynamic_batch.Options())
    return str(refusal.value)


def test_the_proof_leaves_no_trace():
    """Neither in the generators, nor in the gradients, nor in the module."""
    model = Net(dropout=0.2).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = copy.deepcopy(model)
    micro_batch.apply(context_of(model), micro_batch.Options())
    x = torch.randn(8, 6)
    torch.manual_seed(0)
    expected, state = plain(x), torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(model(x), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# -- structures ------------------------------------------------------------------------------------------------------


class Nested(torch.nn.Module):
    """Takes and gives nested containers; a mask and a scale are shared by all samples, None and text pass through."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, batch, *, extra=None, mask=None, mode="train", tail=()):
        y = self.linear(batch["x"] + batch["more"][0])
        y = y if extra is None else y + extra
        y = y * mask if mask is not None else y
        return {"y": y, "pair": (y.sum(1), [y.argmax(1)]), "scale": self.scale.exp(), "mode": mode, "none": None}


@pytest.mark.parametrize("chunks", [2, 5])
def test_nested_arguments_and_outputs(chunks):
    plain, tuned = twins(Nested)
    micro_batch.apply(context_of(tuned), micro_batch.Options(chunks))
    x = torch.randn(9, 6)
    more, extra = torch.randn(9, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    grads = []
    for model in (plain, tuned):
        for _ in range(2):
            model.zero_grad()
            more.grad = extra.grad = None
            out = model.train()({"x": x, "more": [more]}, extra=extra, mask=torch.tensor([1.0, 0, 1, 1, 0, 1]))
            ((out["y"].square().mean() + out["pair"][0].sum()) * out["scale"]).backward()
        assert out["mode"] == "train" and out["none"] is None and not out["pair"][1][0].requires_grad
        grads.append([more.grad, extra.grad, *(p.grad for p in model.parameters())])
        names = out["y"].grad_fn.name()
    assert "ChunkedForward" in names
    for expected, found in zip(*grads):
        assert torch.allclose(expected, found, rtol=1e-5, atol=1e-6)


class SequenceFirst(torch.nn.Module):
    """(time, batch) in, (time * batch, classes) out, the hidden state beside it: as in word_language_model."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.rnn = torch.nn.LSTM(8, 8, 2, dropout=0.2)
        self.head = torch.nn.Linear(8, 11)

    def forward(self, tokens, hidden):
        y, hidden = self.rnn(self.embed(tokens), hidden)
        return functional.log_softmax(self.head(y).view(-1, 11), dim=1), hidden


def test_the_batch_may_be_the_second_dimension():
    torch.manual_seed(0)
    plain = SequenceFirst().double()
    plain.rnn.dropout = 0.0
    tuned = copy.deepcopy(plain)
    context = context_of(tuned)
    micro_batch.apply(context, micro_batch.Options(3))
    tokens = torch.randint(11, (5, 7))
    state = (torch.randn(2, 7, 8, dtype=torch.float64), torch.randn(2, 7, 8, dtype=torch.float64))
    for length in (5, 5, 4):
        results = []
        for model in (plain, tuned):
            model.zero_grad()
            output, hidden = model.train()(tokens[:length], state)
            functional.nll_loss(output, tokens[:length].reshape(-1)).backward()
            results.append([output, *hidden, *(p.grad for p in model.parameters())])
        for expected, found in zip(*results):
            assert torch.allclose(expected, found, rtol=1e-9, atol=1e-12)
    assert context.notes["micro-batch"] == "backward by 3 chunks"


@pytest.mark.parametrize("padded", [0, 3, 7])
def test_a_loss_inside_the_model_is_weighted_by_what_it_is_the_mean_of(padded):
    """Padding is spread unevenly over the chunks; a chunk may hold nothing else."""
    plain, tuned = twins(Language)
    plain.double(), tuned.double()
    context = context_of(tuned)
    micro_batch.apply(context, micro_batch.Options(4))
    tokens, targets = torch.randint(11, (8, 5)), torch.randint(11, (8, 5))
    plain.train()(tokens, targets), tuned.train()(tokens, targets)      # it is looked at without any padding
    targets[:padded] = -1
    targets[padded, 2:] = -1
    for model in (plain, tuned):
        model.zero_grad()
        model(tokens, targets)[1].backward()
    assert plain(tokens, targets)[1].item() == pytest.approx(tuned(tokens, targets)[1].item(), rel=1e-12)
    assert all(torch.allclose(a.grad, b.grad, atol=1e-14) for a, b in zip(plain.parameters(), tuned.parameters()))
    assert "micro-batch" in context.notes


@pytest.mark.parametrize("loss", ["mse_loss", "l1_loss", "huber_loss"])
def test_a_weighted_loss_inside_the_model_is_weighted_by_what_torch_divides_by(loss):
    """Some divide by the sum of the weights. They are all alike when it is looked at."""
    plain, tuned = twins(lambda: Weighted(loss))
    context = context_of(tuned)
    micro_batch.apply(context, micro_batch.Options(3))
    x, y, weight = torch.randn(8, 6), torch.randn(8, 6), torch.ones(8, 6)
    plain.train(), tuned.train()(x, y, weight)
    weight[:3] *= 10
    for model in (plain, tuned):
        value = model(x, y, weight)
        value.backward()
    assert "micro-batch" in context.notes
    assert value.item() == pytest.approx(plain(x, y, weight).item(), rel=1e-6)
    assert torch.allclose(plain.linear.weight.grad, tuned.linear.weight.grad, rtol=1e-5)


class Weighted(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.linear, self.loss = torch.nn.Linear(6, 6), loss

    def forward(self, x, y, weight):
        return getattr(functional, self.loss)(self.linear(x), y, weight=weight)


def test_an_argument_of_a_loss_that_is_not_known_makes_its_weight_unknown():
    def mse_loss(input, target, reduction="mean", margin=None):     # as a later torch may have it
        return (input - target).square().mean()

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    counted = [_chunk_modes._reduction("mse_loss", mse_loss, (x, y), given, None, torch).weight for given in ({}, {"margin": 0.1})]
    assert counted == [6, None]


def half_and_half(logits, targets):
    """Two means with padding in only one: no single weight is right."""
    return (functional.cross_entropy(logits.view(-1, 11), targets.view(-1), ignore_index=-1)
            + functional.mse_loss(logits, torch.zeros_like(logits)))


def masked_by_hand(logits, targets):
    mask = targets >= 0
    return (logits.logsumexp(-1) * mask).sum() / mask.sum()


@pytest.mark.parametrize("reduce", [half_and_half, masked_by_hand])
def test_losses_of_unknown_weights_are_left_alone(reduce):
    """Even where they agree by chance, because nothing is padded yet."""
    tokens = torch.randint(11, (8, 5))
    assert "weights of the samples" in refused(Language(reduce), tokens, tokens)


def test_a_loss_divided_by_what_the_caller_counted():
    class Counted(Language):
        def forward(self, tokens, targets, num_items_in_batch=None):
            logits, _ = super().forward(tokens)
            total = functional.cross_entropy(logits.view(-1, 11), targets.view(-1), ignore_index=-100, reduction="sum")
            return {"loss": total / num_items_in_batch, "logits": logits}

    plain, tuned = twins(Counted)
    context = context_of(tuned)
    micro_batch.apply(context, micro_batch.Options(3))
    tokens, targets = torch.randint(11, (8, 5)), torch.randint(11, (8, 5))
    plain.train(), tuned.train()(tokens, targets, num_items_in_batch=torch.tensor(40))
    targets[:4, 1:] = -100
    for model in (plain, tuned):
        model(tokens, targets, num_items_in_batch=torch.tensor(24))["loss"].backward()
    assert all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in zip(plain.parameters(), tuned.parameters()))
    assert "micro-batch" in context.notes


class Cache:
    def __init__(self, keys):
        self.keys = keys


class Caching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        return y, Cache(y.detach())


def test_an_object_that_cannot_be_joined_says_so_when_it_is_used():
    model = Caching().train()
    micro_batch.apply(context_of(model), micro_batch.Options())
    assert model(torch.randn(8, 6))[1].keys.shape == (8, 6)
    output, cache = model(torch.randn(8, 6))
    output.sum().backward()
    assert not hasattr(cache, "to"), "frameworks ask what they can move"
    with pytest.raises(_chunk_plan.NotSplittable, match="Cache"):
        cache.keys  # noqa: B018


def test_trees_come_together_as_they_were_taken_apart():
    one, two = torch.ones(2), torch.zeros(3)
    best = torch.ones(2, 2).max(0)
    tree = {"a": (one, [two, None]), "max": best, "size": one.shape, "text": "x"}
    skeleton, tensors = _trees.taken_apart(tree, torch)
    assert len(tensors) == 4
    again = _trees.put_together(skeleton, tensors)
    assert again["a"][0] is one and again["a"][1][0] is two and again["max"].values is best.values
    assert type(again["max"]) is type(best) and again["size"] == one.shape


# -- what scripts do with a model ------------------------------------------------------------------------------------


def test_copies_and_pickles_are_the_user_s_own():
    plain, tuned = twins()
    context = context_of(tuned)
    micro_batch.apply(context, micro_batch.Options())
    for dump, load in ((pickle.dumps, pickle.loads), (saved, loaded)):
        again = load(dump(tuned))
        assert again.forward.__func__ is Net.forward
    twin = copy.deepcopy(tuned).train()
    x = torch.randn(8, 6)
    for model in (tuned.train(), twin):
        model(x)
        model(x).sum().backward()
    assert_same_gradients([p.grad for p in tuned.parameters()], [p.grad for p in twin.parameters()], 0, 0)
    context.undo()
    assert "forward" not in vars(tuned)


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return buffer.getvalue()


def loaded(text):
    return torch.load(io.BytesIO(text), weights_only=False)


def test_hooks_on_parameters_see_the_whole_gradient_once():
    plain, tuned = twins()
    micro_batch.apply(context_of(tuned), micro_batch.Options(4))
    x = torch.randn(8, 6)
    seen = {}
    for model in (plain, tuned):
        seen[model] = []
        model.train()(x)
        model.layers[0].weight.register_hook(lambda g, model=model: seen[model].append(g) or g / 4)
        model.layers[0].bias.register_post_accumulate_grad_hook(lambda p, model=model: seen[model].append(p.grad))
        model(x).square().sum().backward()
    assert len(seen[plain]) == len(seen[tuned]) == 2
    assert torch.allclose(plain.layers[0].weight.grad, tuned.layers[0].weight.grad, atol=1e-6)


def test_a_hook_that_is_set_later_sees_whole_batches(capfd):
    plain, tuned = twins()
    micro_batch.apply(context_of(tuned), micro_batch.Options(4))
    seen = {plain: [], tuned: []}
    for model in (plain, tuned):
        for step in range(6):
            if step == 3:
                model.layers[1].register_forward_hook(lambda *given, model=model: seen[model].append(len(given[-1])))
            model.train()(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
    assert seen[tuned] == seen[plain] == [8, 8, 8]
    assert "has a hook of the script" in capfd.readouterr().err


@pytest.mark.parametrize("technique", [micro_batch, dynamic_batch])
def test_hooks_on_parameters_that_are_not_used(technique):
    """Nothing calls them, as in a graph of the script's own: most could do nothing with None."""
    plain, tuned = twins()
    hooks = {}
    for model in (plain, tuned):
        for parameter in model.parameters():
            if parameter.requires_grad:
                hooks[parameter] = clip = functools.partial(torch.clamp, max=0.01)
                parameter.register_hook(clip)
    expected, _ = regression(plain)
    losses, context = regression(tuned, technique=technique)
    assert technique.TECHNIQUE.id in context.notes
    assert losses == pytest.approx(expected, rel=1e-11) and tuned.unused.weight.grad is None
    assert all(hook is hooks[p] for p in tuned.parameters() if p.requires_grad for hook in p._backward_hooks.values())


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("technique", [micro_batch, dynamic_batch])
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_parameters_without_a_gradient_under_ddp(options, technique, capfd):
    """All parameters are inputs of our node, so all are heard of: with a static graph that would end the training."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        plain, tuned = twins()
        for model in (plain, tuned):
            wrapped = torch.nn.parallel.DistributedDataParallel(model.train(), **options)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
            if model is tuned:
                technique.apply(context_of(model), technique.Options())
            for step in range(4):
                optimizer.zero_grad()
                wrapped(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                optimizer.step()
    finally:
        torch.distributed.destroy_process_group()
    assert tuned.unused.weight.grad is None and torch.equal(tuned.unused.weight, plain.unused.weight)
    assert largest_difference(plain, tuned) < 1e-5
    assert ("some of its parameters have no gradient" in capfd.readouterr().err) is ("static_graph" in options)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_models(reentrant):
    from torch.utils.checkpoint import checkpoint

    class Recomputes(Net):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)) + x, x, use_reentrant=reentrant)
            return self.head(x)

    torch.manual_seed(0)
    model = Recomputes()
    x = torch.randn(8, 6, requires_grad=True)
    if reentrant:
        assert "use_reentrant=True" in refused(model, x)
        return
    plain = copy.deepcopy(model)
    context = context_of(model)
    micro_batch.apply(context, micro_batch.Options(3))
    for net in (plain, model):
        net.train()(x)
        net.zero_grad()
        net(x).square().sum().backward()
    assert "micro-batch" in context.notes
    assert_same_gradients([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_inside_and_outside(inside):
    class Casting(Net):
        def forward(self, x):
            if not inside:
                return super().forward(x)
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    plain, tuned = twins(Casting)
    context = context_of(tuned)
    micro_batch.apply(context, micro_batch.Options(2))
    x = torch.randn(8, 6)
    for model in (plain, tuned):
        for _ in range(2):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
                loss = model.train()(x).float().square().mean()
            loss.backward()         # outside of autocast, as it should be
    assert "micro-batch" in context.notes
    for a, b in zip(plain.parameters(), tuned.parameters()):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=0.05, atol=2e-3)


def test_autocast_of_the_forward_does_not_reach_into_the_backward():
    seen = []

    class Sees(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(("forward", torch.is_autocast_enabled("cpu")))
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(("backward", torch.is_autocast_enabled("cpu")))
            return gradient

    model = body(lambda self, x: Sees.apply(self.linear(x))).train()
    micro_batch.apply(context_of(model), micro_batch.Options())
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8, 6)).float().sum()
        loss.backward()
    assert seen[-6:] == [("forward", True), ("forward", True)] + 2 * [("forward", True), ("backward", False)]


def test_gradients_of_gradients_are_right_and_end_the_guard(capfd):
    """A gradient penalty, which needs the graph of the backward."""
    plain, tuned = twins()
    plain.double(), tuned.double()
    dynamic_batch.apply(context_of(tuned), dynamic_batch.Options())
    x = torch.randn(8, 6, dtype=torch.float64)
    for model in (plain, tuned):
        model.train()(x)                # looked at; the next one would be guarded
        for _ in range(2):
            point = x.clone().requires_grad_()
            model.zero_grad()
            grad, = torch.autograd.grad(model(point).sum(), point, create_graph=True)
            (grad.norm(dim=1) - 1).square().mean().backward()
    assert "create_graph=True" in capfd.readouterr().err
    for a, b in zip(plain.parameters(), tuned.parameters()):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-9)


def test_gradients_of_gradients_of_chunks_draw_the_same_numbers_again():
    """A critic with dropout: its first gradient penalty ended the training."""
    model = body(lambda self, x: self.linear(self.drop(x)).tanh(), drop=torch.nn.Dropout(0.5)).double().train()
    plain = copy.deepcopy(model)
    micro_batch.apply(context_of(model), micro_batch.Options())
    x = torch.randn(8, 6, dtype=torch.float64)
    model(x.clone().requires_grad_())       # looked at

    def penalty(run):
        point = x.clone().requires_grad_()
        torch.manual_seed(0)
        output = run(point)
        grad, = torch.autograd.grad(output.square().sum(), point, create_graph=True)
        grad.square().sum().backward()
        return output, grad

    cut, wanted = penalty(model), penalty(lambda point: torch.cat([plain(part) for part in point.chunk(2)]))
    assert "ChunkedForward" in cut[0].grad_fn.name()
    torch.testing.assert_close(cut, wanted)
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("inside", [False, True])
def test_weights_that_are_computed_once_for_several_forwards(inside, capfd):
    """By a chunk, without a graph: its backward, inside of the same context, would find no gradient of them."""
    model = body(lambda self, x: self.linear(x)).train()
    torch.nn.utils.parametrizations.weight_norm(model.linear)
    plain, x = copy.deepcopy(model), torch.randn(8, 6)
    context = context_of(model)
    micro_batch.apply(context, micro_batch.Options())
    for _ in range(3):
        for one in (plain, model):
            one.zero_grad()
            with torch.nn.utils.parametrize.cached() if inside else contextlib.nullcontext():
                one(x).square().sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert ("parametrize.cached" in capfd.readouterr().err) == inside
    assert bool(context.notes) != inside


def test_a_graph_that_is_kept_can_be_used_twice():
    plain, tuned = twins()
    context = context_of(tuned)
    dynamic_batch.apply(context, dynamic_batch.Options())
    x = torch.randn(8, 6)
    for model in (plain, tuned):
        model.train()(x)
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert "dynamic-batch" in context.notes
    for a, b in zip(plain.parameters(), tuned.parameters()):
        assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-5)


def test_gradients_for_some_parameters_only():
    """`torch.autograd.grad`, and two backward passes through one call."""
    plain, tuned = twins()
    micro_batch.apply(context_of(tuned), micro_batch.Options())
    x = torch.randn(8, 6)
    found = []
    for model in (plain, tuned):
        model.train()(x)
        found.append(torch.autograd.grad(model(x).square().sum(), [model.head.weight, model.layers[0].weight]))
        assert all(p.grad is None for p in model.parameters())
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found))


def test_parameters_that_were_swapped_are_not_mistaken():
    model = Net().train()
    micro_batch.apply(context_of(model), micro_batch.Options())
    model(torch.randn(8, 6))
    output = model(torch.randn(8, 6))
    model.head.weight = torch.nn.Parameter(torch.randn(3, 6))
    with pytest.raises(_chunk_plan.NotSplittable, match="not those of the forward"):
        output.sum().backward()


@pytest.mark.parametrize("technique", [micro_batch, dynamic_batch])
def test_a_forward_with_lent_parameters_runs_as_it_was_written(technique, capfd):
    """The inner step of MAML, whose gradients are differentiated again."""
    plain, tuned = twins()
    technique.apply(context_of(tuned), technique.Options())
    x, found = torch.randn(8, 6), []
    for model in (plain, tuned):
        for _ in range(3):
            model.train().zero_grad()
            own = {name: p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("unused")}
            loss = torch.func.functional_call(model, {name: p * 1.0 for name, p in own.items()}, (x,)).square().mean()
            inner = torch.autograd.grad(loss, list(own.values()), create_graph=True)
            lent = {name: p - 0.1 * gradient for (name, p), gradient in zip(own.items(), inner)}
            torch.func.functional_call(model, lent, (x,)).square().mean().backward()
        found.append([p.grad for p in own.values()])
    assert all(torch.equal(a, b) for a, b in zip(*found))
    assert capfd.readouterr().err.count("other parameters than its own") == 1
    tuned(x)
    assert "ChunkedForward" in tuned(x).grad_fn.name()


@pytest.mark.parametrize("technique", [micro_batch, dynamic_batch])
@pytest.mark.parametrize("warm", [0, 3])
def test_a_forward_that_the_script_captures_runs_as_it_was_written(technique, warm, monkeypatch, capfd):
    """In a CUDA graph: torch does not tell the state of a generator there, and raises."""
    (plain, tuned), now, state = twins(), [False], torch.get_rng_state
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0])
    monkeypatch.setattr(torch, "get_rng_state", lambda: pytest.fail("asked in a capture") if now[0] else state())
    technique.apply(context_of(tuned), technique.Options())
    x, found = torch.randn(8, 6), []
    for model in (plain, tuned):
        model.train()
        for step in range(warm + 2):
            now[0] = step >= warm
            model.zero_grad()
            output = model(x)
            output.square().mean().backward()
        assert "ChunkedForward" not in output.grad_fn.name()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
        now[0] = False
    assert all(torch.equal(a, b) for a, b in zip(*found))
    assert capfd.readouterr().err.count("while the script captures a CUDA graph") == 1
    tuned(x)
    assert "ChunkedForward" in tuned(x).grad_fn.name() or technique is dynamic_batch and warm


def test_parameters_changed_in_between_raise_as_they_do_without():
    model = Net().train()
    micro_batch.apply(context_of(model), micro_batch.Options())
    model(torch.randn(8, 6))
    output = model(torch.randn(8, 6))
    with torch.no_grad():
        model.head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_evaluation_is_not_touched():
    model = Net()
    context = context_of(model)
    micro_batch.apply(context, micro_batch.Options())
    x = torch.randn(8, 6)
    model.train()(x)
    with torch.no_grad():
        assert model(x).grad_fn is None
    assert "ChunkedForward" not in model.eval()(x).grad_fn.name()


def test_a_compiled_function_around_the_model_steps_through():
    model = Net().train()
    micro_batch.apply(context_of(model), micro_batch.Options())
    run = torch.compile(lambda x: model.head(model(x) @ torch.ones(3, 6)), backend="eager")
    assert "ChunkedForward" not in run(torch.randn(8, 6)).grad_fn.name()


def test_a_reason_is_said_once_for_all_structures(capfd):
    """Batches that hold a list of text, of another length in each."""
    model = body(lambda self, x, text: self.linear(x).mean())
    micro_batch.apply(context_of(model.train()), micro_batch.Options())
    for length in range(1, 6):
        model(torch.randn(8, 6), ["word"] * length).backward()
    assert capfd.readouterr().err.count("left as it is") == 1


@pytest.mark.parametrize("technique", [micro_batch, dynamic_batch])
@pytest.mark.parametrize("where", [(_chunks.Call, "run"), (_chunk_census.Watch, "problem"), (_trees, "taken_apart")], ids=str)
def test_our_own_failure_costs_nothing_but_the_technique(technique, where, monkeypatch, capfd):
    """A bug of ours in the forward: the script's own forward runs instead."""
    plain, tuned = twins()

    def broken(*args):
        raise KeyError("ours")

    monkeypatch.setattr(*where, broken)
    expected, _ = regression(plain, updates=5)
    losses, _ = regression(tuned, updates=5, technique=technique)
    assert losses == expected
    assert capfd.readouterr().err.count("left as it is from here on") == 1


def test_parts_that_are_frozen_or_normalize_later_are_looked_at_again(capfd):
    """The proof was for another training."""
    model = body(lambda self, x: self.norm(self.linear(x)), norm=torch.nn.BatchNorm1d(6)).train()
    model.norm.eval()
    context = context_of(model)
    micro_batch.apply(context, micro_batch.Options())
    names = []
    for _ in range(2):
        for _ in range(2):
            names.append(model(torch.randn(8, 6)).grad_fn.name())
        model.train()
    assert ["Chunked" in name for name in names] == [False, True, False, False]
    assert "normalizes over the batch" in capfd.readouterr().err


def test_a_compiled_forward_inside_is_cut_from_outside():
    """As with the technique `compile`, whose wrapper is closer to the model."""
    plain, tuned = twins(lambda: body(lambda self, x: torch.tanh(self.linear(x))))
    context = context_of(tuned)
    context.wrap_forward(tuned, 90, lambda inner: torch.compile(lambda self, x: inner(self, x), backend="aot_eager"))
    micro_batch.apply(context, micro_batch.Options(2))
    x = torch.randn(8, 6)
    for model in (plain, tuned):
        for _ in range(3):
            model.zero_grad()
            model.train()(x).square().sum().backward()
    assert "micro-batch" in context.notes
    assert torch.allclose(plain.linear.weight.grad, tuned.linear.weight.grad, atol=1e-5)


def test_memory_is_given_back_after_the_backward():
    """Neither the graph of a guarded step nor its inputs outlive it."""
    model = Net().train()
    dynamic_batch.apply(context_of(model), dynamic_batch.Options())
    model(torch.randn(8, 6))
    gc.collect()
    output = model(torch.randn(8, 6))
    call = output.grad_fn.call
    output.sum().backward()
    assert call.graph is None
    with pytest.raises(RuntimeError, match="second time"):
        output.sum().backward()


# -- decisions -------------------------------------------------------------------------------------------------------


def test_eligibility():
    module = ModuleFacts(kind="Net", parameters=10)
    tight = Facts(device="cuda", device_memory_bytes=100, device_reserved_bytes=95, modules=(module,))
    assert micro_batch.eligible(tight)
    assert not micro_batch.eligible(Facts(device="cuda", device_memory_bytes=100, device_reserved_bytes=50, modules=(module,)))
    assert not micro_batch.eligible(Facts(modules=(module,)))
    accumulating = Facts(modules=(module,), micro_steps=4, optimizers=(OptimizerFacts(kind="AdamW"),))
    assert "the script's 4 per update" in micro_batch.eligible(accumulating).reason
    limited = Facts(modules=(module,), memory_limit_bytes=1 << 30)
    assert micro_batch.eligible(limited) and dynamic_batch.eligible(limited)
    assert dynamic_batch.variants(limited) == [dynamic_batch.Options(1 << 30)]
    assert not dynamic_batch.eligible(tight)
    normalized = Facts(modules=(ModuleFacts(batch_norms=2),), memory_limit_bytes=1 << 30)
    assert not micro_batch.eligible(normalized) and not dynamic_batch.eligible(normalized)
    with pytest.raises(ValueError):
        micro_batch.Options(1)
    with pytest.raises(ValueError):
        dynamic_batch.Options(-1)


def test_bounds_cover_every_sample_once():
    for samples in range(1, 20):
        for chunks in range(1, 25):
            found = _chunk_plan.bounds(samples, chunks)
            assert [i for start, stop in found for i in range(start, stop)] == list(range(samples))
            sizes = [stop - start for start, stop in found]
            assert max(sizes) - min(sizes) <= 1 and len(found) == min(samples, chunks)
