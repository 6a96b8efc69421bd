"""Activation checkpointing: the same training, bit by bit; less memory; and whatever cannot run twice is left alone."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import importlib
import inspect
import pickle
import types
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from checkpoint_models import (  # noqa: E402 - after the import that decides whether to run at all
    AddingStack,
    Cached,
    CacheStack,
    Clamped,
    Counter,
    FillStack,
    GrowingStack,
    Hooked,
    Inner,
    InPlaceArgument,
    InPlaceProduct,
    KeywordStack,
    Logger,
    MaskStack,
    Normed,
    OwnGenerator,
    PowerIteration,
    PythonRandom,
    Recomputing,
    RichStack,
    Run,
    Seldom,
    Stack,
    Wild,
    engine_of,
)

from saturate.agent.context import Context  # noqa: E402
from saturate.records.facts import Evidence, Facts, ModuleFacts  # noqa: E402
from saturate.techniques import _activations, _checkpointing, _inputs, _registry, _replay, bf16_autocast  # noqa: E402
from saturate.techniques import activation_checkpointing as technique  # noqa: E402
from saturate.techniques._api import NotApplied  # noqa: E402

Options = technique.Options
ALL = [Options(mode="blocks"), Options(mode="blocks", every=2), Options(mode="operators"), Options(share=0.5)]


@pytest.fixture
def alive(monkeypatch):
    """The count of living activations that the benchmark uses; it knows nothing of the technique."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench"))
    return importlib.import_module("_alive").Alive


def proof(run, options):
    return technique.active(Evidence(notes=dict(run.context.notes)), options)


# -- the same training -------------------------------------------------------------------------------------------------

MODELS = {
    "dropout": Stack, "running statistics": lambda: Stack(Normed), "a buffer that is read": lambda: Stack(PowerIteration),
    "running statistics now and then": lambda: Stack(Seldom),
    "random numbers of Python": lambda: Stack(PythonRandom), "rich arguments": RichStack, "keywords only": KeywordStack,
    "a list that grows": GrowingStack,
    "in place on a product": lambda: Stack(InPlaceProduct), "in place on a returned product": AddingStack,
}


@pytest.mark.parametrize("options", ALL, ids=lambda options: f"{options.mode}-{options.every}")
@pytest.mark.parametrize("name", MODELS)
def test_the_same_training_bit_by_bit(name, options):
    plain, ours = Run(MODELS[name]), Run(MODELS[name], options)
    assert not ours.differs_from(plain)
    if name.startswith("in place") and options.mode == "operators":
        assert not proof(ours, options).active and "in place" in proof(ours, options).evidence
    else:
        assert proof(ours, options).active, proof(ours, options).evidence
        assert ours.engine.recomputed > 6       # not only in the step that measures
    assert not any(block.refusal for block in ours.engine.blocks)


@pytest.mark.parametrize("backward", [
    lambda loss: torch.autograd.backward(one for one in (loss,)),
    lambda loss: torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss), torch.ones(())),
], ids=["a generator", "an edge"])
def test_whatever_torch_differentiates(backward):
    plain, ours = Run(Stack), Run(Stack, ALL[0], backward=backward)
    assert not ours.differs_from(plain)
    assert proof(ours, ALL[0]).active


REFUSED = {
    "in place on an argument": (lambda: Stack(InPlaceArgument), "modifies an argument in place"),
    "a counter": (lambda: Stack(Counter), "changes Counter.calls"),
    "a parameter": (lambda: Stack(Clamped), "changes a parameter"), "a list": (lambda: Stack(Logger), "changes Logger.seen"),
    "hooks": (lambda: Stack(Hooked), "forward hooks"),
    "a generator": (lambda: Stack(OwnGenerator), "random generator of its own"),
    "a cache": (CacheStack, "a object is passed to it"),
    "a list that it is given": (FillStack, "changes a list or dict that it is given"),
    "a dict that it is given": (lambda: FillStack(dict), "changes a list or dict that it is given"),
    "in place on an argument, later": (MaskStack, "modified in place after its forward"),
    "recomputed already": (lambda: Stack(Recomputing), "recomputes inside of it already"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_twice_is_left_alone(name):
    make, reason = REFUSED[name]
    plain, ours = Run(make), Run(make, Options(mode="blocks"))
    assert not ours.differs_from(plain)
    found = proof(ours, Options(mode="blocks"))
    assert not found.active
    assert reason in found.evidence or name == "recomputed already" and "itself" in found.evidence, found.evidence
    assert reason in ours.engine.blocks[0].refusal


class Speaking(Inner):
    """Ranks compare something in it."""

    spoken = 0

    def forward(self, x):
        torch.distributed.all_reduce(x.detach() * 1)
        Speaking.spoken += 1
        return super().forward(x)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_blocks_in_which_ranks_speak_to_each_other_are_left_alone():
    """Each rank chooses what it recomputes by its own measurements: one alone would wait for the others in the backward, for ever."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        plain = Run(lambda: Stack(Speaking))
        spoken, Speaking.spoken = Speaking.spoken, 0
        ours = Run(lambda: Stack(Speaking), Options(mode="blocks"))
    finally:
        torch.distributed.destroy_process_group()
    assert not ours.differs_from(plain)
    assert Speaking.spoken == spoken, "not even once more to find out"
    found = proof(ours, Options(mode="blocks"))
    assert not found.active and "ranks speak to each other in it" in found.evidence


def test_a_forward_that_differs_from_run_to_run_is_left_alone():
    ours = Run(lambda: Stack(Wild), Options(mode="blocks"))
    assert "gives other values" in proof(ours, Options(mode="blocks")).evidence


class Configured(Inner):
    """Reads the settings that the whole model shares."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        return super().forward(x) * self.config.scale


class ConfiguredStack(Stack):
    """`settle` sets the settings behind the blocks, of the first step or of each."""

    def __init__(self, settle):
        config = types.SimpleNamespace(scale=0.5, kind=None, step=0)
        super().__init__(lambda: Configured(config))
        self.config, self.settle = config, settle

    def forward(self, x):
        y = super().forward(x)
        self.settle(self.config)
        return y


def test_settings_that_the_first_step_completes():
    """As `problem_type` in the configuration of Hugging Face's classification models."""
    def settle(config):
        config.kind = config.kind or "single label"

    plain, ours = Run(lambda: ConfiguredStack(settle)), Run(lambda: ConfiguredStack(settle), ALL[0], steps=6)
    assert not ours.engine.blocks[0].refusal
    assert proof(ours, ALL[0]).active, proof(ours, ALL[0]).evidence
    assert not Run(lambda: ConfiguredStack(settle), ALL[0]).differs_from(plain)


def test_settings_that_every_step_changes():
    def settle(config):
        config.step = config.step + 1
        config.scale = 0.9 * config.scale

    plain, ours = Run(lambda: ConfiguredStack(settle)), Run(lambda: ConfiguredStack(settle), ALL[0])
    assert not ours.differs_from(plain)
    assert not proof(ours, ALL[0]).active and "is changed after its forward" in proof(ours, ALL[0]).evidence


def test_one_bad_block_does_not_spoil_the_others():
    def make():
        model = Stack()
        model.blocks[2], model.blocks[3] = Counter(), Counter()
        return model

    plain, ours = Run(make), Run(make, Options(mode="blocks"))
    assert not ours.differs_from(plain)
    assert proof(ours, Options(mode="blocks")).active
    assert list(ours.engine.modes) == ["whole", "whole", "keep", "keep", "whole", "whole"]


def test_several_backward_passes_through_one_graph():
    def gradients(options):
        torch.manual_seed(0)
        model = Stack(PowerIteration).train()
        engine = engine_of(Context(torch), model, options) if options else None
        found = []
        for _ in range(3):
            model.zero_grad()
            loss = model(torch.randn(3, 7, 4)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found, engine

    plain, _ = gradients(None)
    ours, engine = gradients(Options(mode="blocks"))
    assert all(map(torch.equal, plain, ours)) and engine.phase == "following"
    ours, engine = gradients(Options(mode="operators"))     # products are kept for one backward only
    assert all(map(torch.equal, plain, ours)) and engine.phase == "off"


@pytest.mark.parametrize("again", ["penalty", "retained"])
@pytest.mark.parametrize("options", [Options(mode="operators"), Options(mode="blocks")], ids=lambda options: options.mode)
def test_a_second_pass_through_a_graph_that_comes_later(options, again):
    """Lazy regularization: nothing of it is seen in the measured step."""
    def gradients(on):
        torch.manual_seed(0)
        model = Stack(Inner).train()
        engine = engine_of(Context(torch), model, options) if on else None
        found = []
        for step in range(4):
            x = torch.randn(3, 7, 4, requires_grad=True)
            y = model(x)
            loss = y.square().mean()
            if step > 1 and again == "penalty":
                loss = loss + torch.autograd.grad(y.sum(), x, create_graph=True)[0].square().mean()
            elif step > 1:
                loss.backward(retain_graph=True)
            model.zero_grad()
            loss.backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found, engine

    ours, engine = gradients(True)
    assert all(map(torch.equal, ours, gradients(False)[0])) and engine.phase == "following"


def test_parameters_and_buffers_that_stand_in_for_one_call():
    """`functional_call` with adapted weights, as meta-learning does: they are gone when the backward runs the forward again."""
    def gradients(options):
        torch.manual_seed(0)
        model = Stack(PowerIteration).train()
        engine = engine_of(Context(torch), model, options) if options else None
        found = []
        for _ in range(3):
            x, fast = torch.randn(3, 7, 4), dict(model.named_parameters())
            state = {name: value * 0.5 for name, value in model.named_buffers()}
            for _ in range(2):
                loss = torch.func.functional_call(model, {**fast, **state}, x).square().mean()
                slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {name: value - 1e-4 * slope for (name, value), slope in zip(fast.items(), slopes)}
            model.zero_grad()
            torch.func.functional_call(model, {**fast, **state}, x).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found, engine

    plain, _ = gradients(None)
    ours, engine = gradients(Options(mode="blocks"))
    assert all(map(torch.equal, plain, ours)) and engine.phase == "following" and engine.recomputed > 6


class Shares(Stack):
    """Its weights are computed once in each forward."""

    def __init__(self):
        super().__init__(Inner)
        for block in self.blocks:
            torch.nn.utils.parametrizations.weight_norm(block.up)

    def forward(self, x):
        with torch.nn.utils.parametrize.cached():
            return super().forward(x)


def test_weights_that_are_computed_once_for_several_forwards():
    """Of two runs of a block, one would find them and the other compute them: torch ended the backward."""
    plain, ours = Run(Shares), Run(Shares, Options(mode="blocks"))
    assert not ours.differs_from(plain)
    assert "parametrize.cached" in proof(ours, Options(mode="blocks")).evidence


@pytest.mark.parametrize("options", ALL, ids=lambda options: f"{options.mode}-{options.every}")
def test_running_statistics_that_rest_while_it_is_measured(options):
    """Normalizations in evaluation mode at first, as of a frozen backbone: later each forward counts once, too."""
    def trained(given):
        torch.manual_seed(0)
        model = Stack(Normed).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
        engine = engine_of(Context(torch), model, given, optimizer) if given else None
        for step in range(7):
            for part in model.modules():
                if isinstance(part, torch.nn.BatchNorm1d):
                    part.train(step > 3)
            optimizer.zero_grad()
            model(torch.randn(3, 7, 4)).square().mean().backward()
            optimizer.step()
        return model.state_dict(), engine

    (plain, _), (ours, engine) = trained(None), trained(options)
    assert engine.phase == "following" and engine.recomputed > 6
    assert [name for name in plain if not torch.equal(plain[name], ours[name])] == []


def test_a_hook_that_is_set_later_is_called_once():
    model = Stack().train()
    engine = engine_of(Context(torch), model, Options(mode="blocks"))
    seen = []
    for step in range(5):
        if step == 3:
            model.blocks[2].norm.register_forward_hook(lambda *given: seen.append(len(given[-1])))
        model(torch.randn(3, 7, 4)).square().mean().backward()
    assert engine.phase == "following" and seen == [3, 3]


def test_forwards_that_torch_func_differentiates_run_plainly():
    def gradients(options):
        torch.manual_seed(0)
        model = Stack(Inner).train()
        engine = engine_of(Context(torch), model, options) if options else None
        found = []
        for _ in range(3):
            x, y = torch.randn(3, 7, 4), torch.randn(7, 4)
            model.zero_grad()
            loss = model(x).square().mean()
            slopes = torch.func.vmap(torch.func.grad(lambda one: model(one[None]).sum()))(x)
            bends = torch.func.hessian(lambda one: model(one[None]).mean())(y)
            with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                loss = loss + model(x).mean()
            (loss + slopes.square().mean() + bends.square().mean()).backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found, engine

    plain, _ = gradients(None)
    ours, engine = gradients(Options(mode="blocks"))
    assert all(map(torch.equal, plain, ours)) and engine.phase == "following" and engine.recomputed > 6


def test_forwards_with_tangents_run_plainly():
    """Computed again in the backward pass, when the level is closed, tensors would have no tangents any more."""
    from torch.autograd import forward_ad

    def gradients(options):
        torch.manual_seed(0)
        model = Stack(Inner).train()
        engine = engine_of(Context(torch), model, options) if options else None
        found = []
        for step in range(4):
            x = torch.randn(3, 7, 4)
            model.zero_grad()
            with forward_ad.dual_level():
                value, slope = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
            loss = value.square().mean() + slope.square().mean()
            (loss + model(x).mean() if step else loss).backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found, engine

    plain, _ = gradients(None)
    ours, engine = gradients(Options(mode="blocks"))
    assert all(map(torch.equal, plain, ours)) and engine.phase == "following" and engine.recomputed > 6


@pytest.mark.parametrize("warm", [0, 3])
def test_forwards_that_the_script_captures_in_a_graph_run_plainly(warm, monkeypatch):
    """Before the measurement as after it, and whether the backward pass is captured too or not."""
    model, now = Stack(Inner).train(), [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0])
    engine = engine_of(Context(torch), model, Options(mode="blocks"))

    def step():
        model(torch.randn(3, 7, 4)).square().mean().backward()

    for _ in range(warm):
        step()
    before, now[0] = (engine.phase, engine.recomputed, engine._forwards), True
    for _ in range(3):
        step()
    assert (engine.phase, engine.recomputed, engine._forwards) == before
    now[0] = False
    for _ in range(3):
        step()
    assert engine.phase == "following" and engine.recomputed > before[1]


def test_evaluation_before_the_backward_pass():
    """A script may switch the model's mode while a graph is waiting."""
    def gradients(options):
        torch.manual_seed(0)
        model = Stack().train()
        engine = engine_of(Context(torch), model, options) if options else None
        found = []
        for _ in range(3):
            model.zero_grad()
            loss = model.train()(torch.randn(3, 7, 4)).square().mean()
            model.eval()
            loss.backward()
            assert not any(part.training for part in model.modules())
            found += [p.grad.clone() for p in model.parameters()]
        return found, engine

    ours, engine = gradients(Options(mode="blocks"))
    assert all(map(torch.equal, ours, gradients(None)[0])) and engine.phase == "following"


def test_a_call_with_an_object_runs_plainly():
    ours = Run(CacheStack, Options(mode="blocks"))
    model = Stack(Cached)
    model.call = lambda block, x: block(x, None)
    engine = engine_of(Context(torch), model.train(), Options(mode="blocks"))
    for _ in range(2):
        model(torch.randn(3, 7, 4)).square().mean().backward()
    recomputed = engine.recomputed
    assert engine.phase == "following" and ours.engine.phase == "off"
    model.call = lambda block, x: block(x, object())
    model(torch.randn(3, 7, 4)).square().mean().backward()
    assert engine.recomputed == recomputed


def test_loops_of_every_kind():
    """No optimizer, accumulation, two optimizers over two models, LBFGS; each exactly as without."""
    def manual(model, options, context):
        engine = engine_of(context, model, options) if options else None
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(3, 7, 4)).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        return engine

    def accumulating(model, options, context):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = engine_of(context, model, options, optimizer) if options else None
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.randn(3, 7, 4)).square().mean().backward()
            optimizer.step()
        return engine

    def lbfgs(model, options, context):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        engine = engine_of(context, model, options, optimizer) if options else None

        def closure():
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            inputs = torch.randn(3, 7, 4)
            optimizer.step(closure)
        return engine

    def two(model, options, context):
        optimizers = (torch.optim.SGD(model.blocks.parameters(), lr=0.1), torch.optim.Adam(model.head.parameters()))
        engine = engine_of(context, model, options, *optimizers) if options else None
        for _ in range(4):
            for optimizer in optimizers:
                loss = model(torch.randn(3, 7, 4)).square().mean() + model(torch.randn(2, 7, 4)).square().mean()
                model.zero_grad()
                loss.backward()
                optimizer.step()
        return engine

    for loop in (manual, accumulating, lbfgs, two):
        states = []
        for options in (None, Options(share=0.5)):
            torch.manual_seed(0)
            model, context = Stack().train(), Context(torch)
            engine = loop(model, options, context)
            states.append(model.state_dict())
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0]), loop.__name__
        assert engine.phase == "following" and technique.TECHNIQUE.id in context.notes, loop.__name__


@pytest.mark.parametrize("cast_first", [True, False])
def test_under_autocast(cast_first):
    """The order of the two is that of their places in the forward, not that of their application."""
    def losses(checkpointed):
        torch.manual_seed(0)
        model, context = Stack().train(), Context(torch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        context.modules, context.optimizers, context.device = (model,), (optimizer,), "cpu"
        apply = [lambda: bf16_autocast.apply(context, bf16_autocast.Options())]
        if checkpointed:
            apply.append(lambda: technique.apply(context, Options(share=0.5)))
        for one in apply if cast_first else reversed(apply):
            one()
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 7, 4)).square().mean()
            loss.backward()
            found += [loss.item(), *(p.grad.sum().item() for p in model.parameters())]
            optimizer.step()
        evidence = Evidence(notes=dict(context.notes))
        assert bf16_autocast.active(evidence, bf16_autocast.Options()).active
        assert technique.active(evidence, Options()).active is checkpointed
        return found

    assert losses(False) == losses(True)


@pytest.mark.parametrize("name, args, kwargs, expected", [
    ("mm", (1, 2), {}, True), ("convolution", (), {}, True), ("add.Tensor", (1, 2), {}, False), ("native_dropout", (1, 0.1, True), {}, False),
    ("_scaled_dot_product_flash_attention", (1, 2, 3), {}, True),
    ("_scaled_dot_product_flash_attention", (1, 2, 3, 0.1), {}, False),
    ("_scaled_dot_product_flash_attention", (1, 2, 3), {"dropout_p": 0.1}, False),
    ("_scaled_dot_product_efficient_attention", (1, 2, 3, None, True, 0.0), {}, True),
    ("_scaled_dot_product_efficient_attention", (1, 2, 3, None, True, 0.1), {}, False),
    ("_scaled_dot_product_flash_attention_for_cpu", (1, 2, 3, 0.1), {}, False),
])
def test_what_draws_random_numbers_is_not_kept(name, args, kwargs, expected):
    """It would not be drawn again, and what is drawn after it would get its numbers. Kernels of a device the machine lacks."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    assert _activations.is_product(operator, args, kwargs) is expected


# -- memory ------------------------------------------------------------------------------------------------------------


def peak(run, alive, rows=3, width=7):
    """Bytes alive in one more step."""
    inputs = torch.randn(rows, width, 4)
    with alive(run.model) as count:
        loss = run.model(inputs).square().mean()
        run.optimizer.zero_grad()
        loss.backward()
    return count.peak


@pytest.mark.parametrize("make", [Stack, lambda: Stack(Normed), RichStack], ids=["dropout", "running statistics", "rich"])
@pytest.mark.parametrize("share", [0.85, 0.7, 0.55])
def test_never_above_the_budget_and_within_one_block_of_it(make, share, alive):
    plain = peak(Run(make), alive)
    profile = Run(make, Options(mode="blocks")).engine.profile
    largest = max(visit.inner_bytes + sum(profile.sizes[key] for key in visit.read | visit.results)
                  for visit in profile.passes[0] if visit.block is not None)
    budget = int(share * plain)
    ours = Run(make, Options(budget_bytes=budget))
    assert ours.engine.phase == "following"
    assert budget - largest <= peak(ours, alive) <= budget


def test_the_step_that_measures_stays_small_itself(alive):
    torch.manual_seed(0)
    everything = peak(Run(Stack), alive)
    torch.manual_seed(0)
    model = Stack().train()
    engine_of(Context(torch), model, Options(share=0.9))
    with alive(model) as count:
        model(torch.randn(3, 7, 4)).square().mean().backward()
    assert count.peak < 0.6 * everything


@pytest.mark.parametrize("rows, width", [(6, 7), (3, 14), (2, 7)])
def test_larger_inputs_recompute_more(rows, width, alive):
    budget = int(0.9 * peak(Run(Stack), alive))
    ours = Run(Stack, Options(budget_bytes=budget))
    few = list(ours.engine.modes).count("keep")
    needed = peak(ours, alive, rows, width)
    least = peak(Run(Stack, Options(mode="blocks")), alive, rows, width)
    assert needed <= max(budget, least)
    assert (list(ours.engine.modes).count("keep") < few) is (rows * width > 21)


def test_layers_that_are_trained_later_stay_within_the_budget(alive):
    """Frozen while it is measured, they save nothing."""
    torch.manual_seed(0)
    model = Stack().train()
    first = [model.stem, *model.blocks[:4]]
    for part in first:
        part.requires_grad_(False)
    run = types.SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.003))
    budget = int(0.8 * peak(run, alive))
    engine = engine_of(Context(torch), model, Options(budget_bytes=budget), run.optimizer)
    for _ in range(3):
        peak(run, alive)
        run.optimizer.step()
    assert engine.phase == "following" and peak(run, alive) <= budget
    for part in first:
        part.requires_grad_(True)
    assert peak(run, alive) <= max(budget, peak(Run(Stack, Options(mode="blocks")), alive))


def test_a_budget_that_cannot_be_met_or_needs_nothing_is_said():
    for options, words in ((Options(budget_bytes=1000), "remain"), (Options(budget_bytes=1 << 40), "nothing has to")):
        ours = Run(Stack, options)
        assert not ours.differs_from(Run(Stack))
        assert words in proof(ours, options).evidence and not proof(ours, options).active
        assert ours.engine.phase == "off"


# -- the user's objects ------------------------------------------------------------------------------------------------


def test_copies_pickles_and_evaluation():
    ours = Run(Stack, Options(mode="blocks"))
    twin = copy.deepcopy(ours.model)
    with torch.no_grad():
        for p in ours.model.parameters():
            p.add_(1.0)
    recomputed = ours.engine.recomputed
    x = torch.randn(3, 7, 4)
    twin.train()
    torch.manual_seed(1)
    loss = twin(x).square().mean()
    loss.backward()
    assert ours.engine.recomputed == recomputed + 6
    loaded = pickle.loads(pickle.dumps(twin))
    loaded.zero_grad()
    torch.manual_seed(1)
    again = loaded(x).square().mean()
    again.backward()
    assert again.item() == loss.item() and all(
        torch.equal(a.grad, b.grad) for a, b in zip(twin.parameters(), loaded.parameters()))
    assert ours.engine.recomputed == recomputed + 6     # what was loaded is a plain model
    ours.model.eval()(x).sum().backward()
    with torch.no_grad():
        ours.model.train()(x)
    assert ours.engine.recomputed == recomputed + 6
    ours.context.undo()
    assert not any("forward" in vars(module) for module in ours.model.modules())


def test_a_nested_argument_that_is_changed_afterwards_is_an_error():
    ours = Run(RichStack, Options(mode="blocks"))
    block = ours.model.blocks[0]
    x = torch.randn(3, 7, 16, requires_grad=True)
    pair = (x.cos(), {"more": x.sin()})
    y = block(x, scale=x.sigmoid(), pair=pair)[0]
    pair[1]["more"].add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        y.sum().backward()


def test_a_script_that_recomputes_around_the_blocks_is_left_alone():
    from torch.utils.checkpoint import checkpoint

    class Theirs(Stack):
        def call(self, block, x):
            return checkpoint(block, x, use_reentrant=False)

    for reentrant in (False, True):
        plain, ours = Run(Theirs), Run(Theirs, Options(mode="blocks"))
        assert not ours.differs_from(plain), reentrant
        assert "itself" in proof(ours, Options(mode="blocks")).evidence


def test_a_flag_of_hugging_face_is_seen_at_once():
    model = Stack()
    model.gradient_checkpointing = True
    with pytest.raises(NotApplied, match="itself"):
        engine_of(Context(torch), model, Options())


def test_sharded_parameters_are_refused():
    model = Stack()
    model.blocks[1] = type("FSDPBlock", (type(model.blocks[1]),), {})()
    with pytest.raises(NotApplied, match="sharded"):
        engine_of(Context(torch), model, Options())


def test_a_failure_of_ours_is_not_the_scripts(monkeypatch):
    def broken(*_):
        raise KeyError("planted")

    for owner, name in ((_activations, "saved_after"), (_checkpointing, "_cost")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, broken)
            ours = Run(Stack, Options())
        assert not ours.differs_from(Run(Stack))
        assert "could not be measured: KeyError" in proof(ours, Options()).evidence


def test_no_cache_of_keys_and_values_in_training():
    class Model(Stack):
        config = type("Config", (), {"use_cache": True})()

        def forward(self, x, mask=None, use_cache=None):
            use_cache = self.config.use_cache if use_cache is None else use_cache
            self.asked = use_cache
            return super().forward(x)

    ours = Run(Model, Options(mode="blocks"))
    assert ours.model.asked is False and proof(ours, Options(mode="blocks")).active
    ours.model(torch.randn(3, 7, 4), use_cache=True)
    assert ours.model.asked is True
    ours.model.eval()(torch.randn(3, 7, 4))
    assert ours.model.asked is True


def test_the_class_allows_what_a_missing_cache_changes():
    """Keys and values lie in memory in another way than a cache hands them out; attention with dropout on a CPU rounds otherwise then."""
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)).train()

    def gradients(seed, use_cache):
        torch.manual_seed(seed)
        tokens = torch.randint(31, (4, 5 + seed % 11))
        model.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=use_cache).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    pairs = [(gradients(seed, True), gradients(seed, False)) for seed in range(40)]
    torch.testing.assert_close([pair[0] for pair in pairs], [pair[1] for pair in pairs], rtol=1e-4, atol=1e-6)
    assert technique.TECHNIQUE.numerics == "reordering"


def test_a_cache_of_keys_and_values_that_the_script_uses():
    class Output(dict):
        past_key_values = None

    class Model(Stack):
        config = type("Config", (), {"use_cache": True, "return_dict": True})()

        def forward(self, x, past_key_values=None, use_cache=None, return_dict=None):
            output = Output(y=super().forward(x))
            if self.config.use_cache if use_cache is None else use_cache:
                output.past_key_values = [x, past_key_values]
            return output

    model, x = Model().train(), torch.randn(3, 7, 4)
    engine_of(Context(torch), model, Options(mode="blocks"))
    for keywords in ({"past_key_values": None}, {"use_cache": True}, {"return_dict": False}):
        assert model(x, **keywords).past_key_values == [x, None]
    assert model(x, None).past_key_values == [x, None]
    for keywords in ({}, {"use_cache": None}):
        past = model(x, **keywords).past_key_values
        assert past is not None and not hasattr(past, "get_seq_length")
        for use in (lambda past: past.get_seq_length(), lambda past: past[0], len, list):
            with pytest.raises(AttributeError, match="use_cache=True"):
                use(past)
    assert model(x, use_cache=False).past_key_values is None


class Base(Stack):
    """Like a model of Hugging Face's: it passes a cache of keys and values to its blocks unless told not to."""

    config = type("Config", (), {"use_cache": True})()

    def forward(self, x, use_cache=None):
        self.asked = self.config.use_cache if use_cache is None else use_cache
        return super().forward(x)


class Adapter(torch.nn.Module):
    """Like PEFT's around it: what its forward does not name it passes on."""

    config = Base.config
    learns_prompts = False

    def __init__(self):
        super().__init__()
        self.base = Base()

    def get_base_model(self):
        return self.base

    @property
    def active_peft_config(self):
        return types.SimpleNamespace(is_prompt_learning=self.learns_prompts)

    def forward(self, x, **kwargs):
        return self.base(x, **kwargs)


@pytest.mark.parametrize("changes, cached", [
    ({}, False), ({"learns_prompts": True}, True), ({"forward": lambda self, x, task=None: self.base(x)}, True),
    ({"get_base_model": lambda self: self.base.head}, True)])
def test_a_cache_is_not_built_behind_an_adapter_either(changes, cached):
    """The model inside takes `use_cache`, and the adapter passes it on."""
    model = type("Changed", (Adapter,), changes)().train()
    engine_of(Context(torch), model, Options(mode="blocks"))
    model(torch.randn(3, 7, 4))
    assert model.base.asked is cached


def test_whether_a_forward_takes_a_cache_is_read_once(monkeypatch):
    """Reading a signature in every step costs more than all else; another forward of the same model is another question, and a function
    that was read is not kept."""
    read = []
    monkeypatch.setattr(_inputs.inspect, "signature", lambda function, signature=inspect.signature: read.append(1) or signature(function))
    model = type("Fresh", (Adapter,), {"forward": lambda self, x, **kwargs: self.base(x, **kwargs)})()

    def asked():
        return "use_cache" in _inputs.without_cache(model, (1,), {})

    assert asked() and read and not read.clear() and asked() and not read
    model.forward = lambda x, task=None: model.base(x)
    assert not asked() and len(read) == 1 and not asked() and len(read) == 1
    model.forward = functools.partial(Base.forward, model.base)
    gone = weakref.ref(model)
    assert asked()
    model = None
    gc.collect()
    assert gone() is None


def test_the_remedy_for_a_cache_is_named():
    cache = type("DynamicCache", (), {})()
    assert "use_cache=False" in _replay.why_not_arguments([cache], torch)
    assert "use_cache" not in _replay.why_not_arguments([object()], torch)


def cast_on_the_instance(model):
    """As Accelerate and the Trainer prepare one for bfloat16."""
    plain = model.forward

    @functools.wraps(plain)
    def forward(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            output = plain(*args, **kwargs)
        return output.float()

    model.forward = forward
    return model


def test_a_library_s_own_forward_of_the_root_is_no_hindrance():
    make, options = (lambda: cast_on_the_instance(Base())), Options(mode="blocks")
    ours = Run(make, options)
    assert not ours.differs_from(Run(make))
    assert proof(ours, options).active and ours.model.asked is False


def test_a_compiled_root_is_refused():
    compiled = Stack()
    compiled.compile()
    for model in (torch.compile(Stack()), compiled):
        with pytest.raises(NotApplied, match="the script compiles its model"):
            engine_of(Context(torch), model, Options())


def test_without_a_backward_it_gives_up():
    model, context = Stack().train(), Context(torch)
    engine = engine_of(context, model, Options())
    for _ in range(70):
        model(torch.randn(1, 2, 4))
    assert engine.phase == "off" and "no backward pass" in technique.active(Evidence(notes=dict(context.notes)), Options()).evidence


def test_an_optimizer_that_never_steps_does_not_hold_it_up():
    torch.manual_seed(0)
    model, context = Stack().train(), Context(torch)
    optimizers = torch.optim.SGD(model.parameters(), lr=0.01), torch.optim.SGD(model.head.parameters(), lr=0.01)
    engine = engine_of(context, model, Options(mode="blocks"), *optimizers)
    for _ in range(66):
        optimizers[0].zero_grad()
        model(torch.randn(1, 2, 4)).square().mean().backward()
        optimizers[0].step()
    assert engine.phase == "following" and technique.TECHNIQUE.id in context.notes


@pytest.mark.parametrize("then, now, factor", [
    (((2, 8),), ((2, 8),), 1.0), (((2, 8),), ((2, 16),), 4.0), (((2, 8),), ((1, 16),), 2.0), (((2, 8),), ((1, 4),), 1.0),
    (((2, 8), (2, 8)), ((2, 16), (2, 16)), 4.0), (None, ((2, 8),), 1.0), (((2, 8),), ((32,),), 4.0), (((0,),), ((4,),), 16.0),
])
def test_how_much_larger_inputs_are(then, now, factor):
    assert _inputs.growth(then, now) == factor


def test_models_without_blocks_are_refused():
    with pytest.raises(NotApplied, match="no blocks"):
        engine_of(Context(torch), torch.nn.Linear(2, 2), Options())
    with pytest.raises(NotApplied, match="no trained module"):
        technique.apply(Context(torch), Options())


# -- deciding ----------------------------------------------------------------------------------------------------------


def test_only_where_memory_is_short():
    usual = Facts(modules=(ModuleFacts(kind="Net"),), device="cuda", device_memory_bytes=100, device_reserved_bytes=50)
    assert not technique.eligible(usual)
    assert technique.eligible(dataclasses.replace(usual, memory_limit_bytes=1 << 30))
    assert technique.eligible(dataclasses.replace(usual, device_reserved_bytes=95))
    limited = dataclasses.replace(usual, memory_limit_bytes=1 << 30)
    assert technique.eligible(dataclasses.replace(limited, modules=(ModuleFacts(forward_overridden=True),)))
    for changes in ({"checkpointed": True}, {"modules": (ModuleFacts(compiled=True),)}, {"modules": ()}):
        assert not technique.eligible(dataclasses.replace(limited, **changes))


def test_a_compiler_decides_for_itself():
    registry = _registry.load()
    assert _registry.conflicts([registry["compile"], technique])
    assert not _registry.conflicts([registry["bf16-autocast"], technique])


@pytest.mark.parametrize("bad", [{"mode": "some"}, {"every": 0}, {"budget_bytes": -1}, {"share": 0.0}, {"share": 1.5}])
def test_options_are_checked(bad):
    with pytest.raises(ValueError):
        Options(**bad)
