"""The optimizer in the backward pass: the same training and the same checkpoint, and an error instead of a wrong number."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the import that decides whether to run at all
from wrapped_optimizer import Wrapped  # noqa: E402

from saturate.agent.context import Context  # noqa: E402
from saturate.records.facts import Evidence, Facts, OptimizerFacts  # noqa: E402
from saturate.techniques import _registry, _updatable, fused_optimizer  # noqa: E402
from saturate.techniques import optimizer_in_backward as technique  # noqa: E402
from saturate.techniques._api import NotApplied  # noqa: E402

OPTIONS = technique.Options()


class Model(nn.Module):
    """A tied weight, dropout, and a part that only some steps use."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.rare = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, rare=False):
        x = nn.functional.dropout(torch.tanh(self.hidden(self.embedding(tokens))), 0.1, self.training)
        return self.head(self.rare(x) if rare else x)


class Training:
    def __init__(self, kind="AdamW", on=True, **arguments):
        torch.manual_seed(0)
        self.model = Model().train()
        parameters = list(self.model.parameters())
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}]
        self.optimizer = getattr(torch.optim, kind)(groups, lr=0.01, **arguments)
        self.context = Context(torch)
        self.context.modules, self.context.optimizers, self.context.device = (self.model,), (self.optimizer,), "cpu"
        self.losses = []
        if on:
            technique.apply(self.context, OPTIONS)

    def loss(self, rare=False):
        tokens = torch.randint(11, (4, 6))
        found = nn.functional.cross_entropy(self.model(tokens, rare).flatten(0, 1), tokens.flatten())
        self.losses.append(found.item())
        return found

    def steps(self, count, to_none=True, rare=lambda number: False):
        for number in range(count):
            loss = self.loss(rare(number))
            self.optimizer.zero_grad(set_to_none=to_none)
            loss.backward()
            self.optimizer.step()
        return self

    def proof(self):
        return technique.active(Evidence(notes=dict(self.context.notes)), OPTIONS)


@pytest.fixture(autouse=True)
def undone(monkeypatch):
    """The guard sits on the Parameter class: whatever a test leaves is taken back."""
    applied = []
    apply = technique.apply

    def noted(context, options):
        applied.append(context)
        return apply(context, options)

    monkeypatch.setattr(technique, "apply", noted)
    yield
    for context in reversed(applied):
        context.undo()
    assert "grad" not in vars(nn.Parameter)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b


def alike(ours, plain):
    return (ours.losses == plain.losses and same(ours.model.state_dict(), plain.model.state_dict())
            and same(ours.optimizer.state_dict(), plain.optimizer.state_dict()))


KINDS = [*((kind, {}) for kind in _updatable.KINDS if hasattr(torch.optim, kind)), ("SGD", {"momentum": 0.9, "nesterov": True}),
         ("AdamW", {"fused": True}), ("AdamW", {"foreach": True}), ("Adam", {"amsgrad": True, "weight_decay": 0.1})]


@pytest.mark.parametrize("kind, arguments", KINDS, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_the_same_training_and_the_same_checkpoint(kind, arguments):
    plain, ours = Training(kind, False, **arguments).steps(6), Training(kind, **arguments).steps(6)
    assert alike(ours, plain)
    assert ours.proof().active and "parameters updated in backward" in ours.proof().evidence


@pytest.mark.parametrize("to_none", [True, False])
def test_parameters_without_a_gradient(to_none):
    """With gradients that are zeroed, the momentum of an unused parameter goes on; with dropped ones it rests."""
    def rare(number):
        return number in (1, 2, 5)

    for kind in ("AdamW", "SGD"):
        more = {"momentum": 0.9} if kind == "SGD" else {}
        plain = Training(kind, False, **more).steps(8, to_none, rare)
        ours = Training(kind, **more).steps(8, to_none, rare)
        assert alike(ours, plain) and ours.proof().active


def test_gradients_are_gone_before_the_backward_ends():
    ours = Training().steps(3)
    living = []
    handle = ours.model.embedding.weight.register_post_accumulate_grad_hook(
        lambda p: living.append([q._grad is not None for q in ours.model.parameters()]))
    ours.steps(1)
    handle.remove()
    assert living and not any(living[0][1:])


def test_schedulers_hooks_checkpoints_and_new_groups():
    def run(on):
        training = Training(on=on)
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 2, 0.5)
        called = []
        training.optimizer.register_step_post_hook(lambda *_: called.append(1))
        for _ in range(4):
            training.steps(1)
            scheduler.step()
        training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
        training.steps(2)
        extra = nn.Parameter(torch.ones(()))
        training.optimizer.add_param_group({"params": [extra], "lr": 0.5})
        for _ in range(2):
            training.optimizer.zero_grad()
            (training.loss() * extra).backward()
            training.optimizer.step()
        return training, called, extra

    (ours, called, extra), (plain, others, theirs) = run(True), run(False)
    assert alike(ours, plain) and ours.proof().active
    assert len(called) == len(others) == 8 and extra.item() == theirs.item() != 1.0


def test_parameters_that_are_frozen_and_unfrozen():
    """One is frozen when it begins, another later; both are trained again, the first with gradients that the script reads."""
    def run(on):
        training = Training(on=False)
        model = training.model
        model.hidden.requires_grad_(False)
        if on:
            technique.apply(training.context, OPTIONS)
        training.steps(4)
        model.embedding.requires_grad_(False)
        model.hidden.requires_grad_(True)
        training.steps(2)
        training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
        model.embedding.requires_grad_(True)
        for _ in range(3):
            training.optimizer.zero_grad()
            training.loss().backward()
            nn.utils.clip_grad_norm_(model.hidden.parameters(), 0.1)
            training.optimizer.step()
        return training

    ours = run(True)
    assert alike(ours, run(False)) and ours.proof().active


def test_a_group_that_leaves_the_optimizer():
    """What is left keeps the settings of its own group; what has gone rests, and its gradient is the script's."""
    def run(on):
        training = Training("SGD", on)
        training.optimizer.param_groups[0]["lr"] = 0.5
        training.steps(4)
        del training.optimizer.param_groups[0]
        for _ in range(3):
            training.model.zero_grad()
            training.loss().backward()
            training.optimizer.step()
        return training

    ours, plain = run(True), run(False)
    assert alike(ours, plain) and ours.proof().active
    assert torch.equal(ours.model.hidden.weight.grad, plain.model.hidden.weight.grad)


def test_step_with_a_closure():
    def run(on):
        training = Training(on=on)

        def closure():
            training.optimizer.zero_grad()
            loss = training.loss()
            loss.backward()
            return loss

        for _ in range(5):
            training.optimizer.step(closure)
        return training

    ours, plain = run(True), run(False)
    assert alike(ours, plain) and ours.proof().active


def test_an_optimizer_built_with_the_same_parameters_is_refused():
    training = Training(on=False)
    others = [torch.optim.LBFGS(training.model.parameters()), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)]
    training.context.built_optimizers = lambda: [training.optimizer, *others]
    with pytest.raises(NotApplied, match="LBFGS, another optimizer of the script, holds the same parameters"):
        technique.apply(training.context, OPTIONS)
    training.context.built_optimizers = lambda: [training.optimizer, others[1]]
    technique.apply(training.context, OPTIONS)


def closure_of(training, optimizer, zeroes, rare=False):
    def closure():
        zeroes(optimizer)
        loss = training.loss(rare)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("zeroes", [
    lambda optimizer: optimizer.zero_grad(), lambda optimizer: optimizer.zero_grad(set_to_none=False),
], ids=["dropped", "zeroed"])
@pytest.mark.parametrize("before", [2, 4])
@pytest.mark.parametrize("kind", ["LBFGS", "SGD"])
def test_another_optimizer_goes_on_with_a_closure(kind, before, zeroes):
    """As where Adam is followed by LBFGS, and comes back later."""
    def run(on):
        training = Training(on=on).steps(before, to_none=before == 2, rare=lambda number: number % 2)
        more = {"max_iter": 3, "line_search_fn": "strong_wolfe"} if kind == "LBFGS" else {"lr": 0.1, "momentum": 0.9}
        other = getattr(torch.optim, kind)(training.model.parameters(), **more)
        for number in range(3):
            other.step(closure_of(training, other, zeroes, number == 1))
        training.steps(2)
        return training

    assert alike(run(True), run(False))


@pytest.mark.parametrize("to_none", [True, False])
def test_another_optimizer_goes_on_without_a_closure(to_none):
    def run(on):
        training = Training(on=on).steps(4)
        assert not on or training.proof().active
        first, training.optimizer = training.optimizer, torch.optim.SGD(training.model.parameters(), lr=0.1, momentum=0.9)
        training.steps(4, to_none, lambda number: number == 1)
        training.optimizer = first
        return training.steps(2)

    assert alike(run(True), run(False))


@pytest.mark.parametrize("zeroes_only", [True, False])
def test_what_another_optimizer_has_taken_over_is_no_proof(zeroes_only):
    """The note of what was saved is from before."""
    training = Training().steps(4)
    assert training.proof().active
    other = torch.optim.SGD(training.model.parameters(), lr=0.1)
    if zeroes_only:
        other.zero_grad()
    else:
        other.step(closure_of(training, other, lambda optimizer: optimizer.zero_grad()))
    training.steps(2)
    assert not training.proof().active
    assert training.proof().evidence == "left to step() again: SGD, another optimizer of the script, holds the same parameters"


@pytest.mark.parametrize("to_none", [True, False])
def test_what_wraps_the_optimizer_for_the_script_is_no_other_one(to_none):
    def run(on):
        training = Training(on=on)
        training.optimizer, own = Wrapped(training.optimizer), training.optimizer
        training.steps(6, to_none)
        training.optimizer = own
        return training

    ours, plain = run(True), run(False)
    assert alike(ours, plain) and ours.proof().active
    assert plain.model.hidden.weight._grad is not None and ours.model.hidden.weight._grad is None, "used and freed to the end"


def test_gradients_that_another_optimizer_misses_are_an_error():
    """It steps after the first one, or in its place, with gradients that are gone."""
    training = Training().steps(4)
    other = torch.optim.SGD(training.model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="SGD is to use gradients that AdamW has used already"):
        other.step()
    training = Training().steps(4)
    other = torch.optim.SGD(training.model.parameters(), lr=0.1)
    training.model.zero_grad()
    training.loss().backward()
    for arguments in ((), (lambda: None,)):
        with pytest.raises(RuntimeError, match="SGD is to use gradients that AdamW has used already"):
            other.step(*arguments)


def test_a_gradient_that_another_optimizer_s_closure_adds_to_one_that_is_gone_is_an_error():
    training = Training().steps(4)
    other = torch.optim.LBFGS(training.model.parameters())
    with pytest.raises(RuntimeError, match="would be added to the one of the last step"):
        other.step(closure_of(training, other, lambda _: None))


def test_another_optimizer_in_the_steps_that_are_watched():
    def run(on):
        training = Training(on=on).steps(1)
        other = torch.optim.SGD(training.model.parameters(), lr=0.1)
        other.step()
        return training.steps(4)

    ours = run(True)
    assert alike(ours, run(False)) and "SGD, another optimizer of the script" in ours.proof().evidence


def test_two_optimizers_with_losses_of_their_own():
    def run(on):
        torch.manual_seed(0)
        parts = [nn.Linear(3, 3), nn.Linear(3, 3)]
        optimizers = tuple(torch.optim.Adam(part.parameters()) for part in parts)
        context = Context(torch)
        context.optimizers = optimizers
        if on:
            technique.apply(context, OPTIONS)
        for _ in range(5):
            for part, optimizer in zip(parts, optimizers):
                optimizer.zero_grad()
                part(torch.randn(2, 3)).square().sum().backward()
                optimizer.step()
        return [part.state_dict() for part in parts], context

    ours, context = run(True)
    assert same(ours, run(False)[0])
    assert technique.TECHNIQUE.id in context.notes


def test_an_optimizer_that_never_steps_is_left_out():
    unused = nn.Linear(2, 2)
    ours, resting = Training(on=False), torch.optim.SGD(unused.parameters(), lr=1.0)
    ours.context.optimizers = ours.optimizer, resting
    technique.apply(ours.context, OPTIONS)
    ours.steps(10)
    assert alike(ours, Training(on=False).steps(10)) and ours.proof().active
    before = unused.weight.detach().clone()
    unused(torch.ones(1, 2)).sum().backward()
    assert torch.equal(unused.weight, before) and unused.weight.grad is not None


def test_copies_and_pickles():
    ours = Training().steps(4)
    twin = copy.deepcopy(ours.model)
    loaded = pickle.loads(pickle.dumps(ours.model))
    for model in (twin, loaded):
        before = model.hidden.weight.detach().clone()
        model(torch.randint(11, (2, 3))).sum().backward()
        assert model.hidden.weight.grad is not None and torch.equal(model.hidden.weight, before)
    ours.context.undo()
    ours.optimizer.zero_grad()
    ours.loss().backward()
    assert ours.model.hidden.weight.grad is not None


def frozen(x, weight):
    weight.requires_grad_(False)
    found = nn.functional.linear(x, weight)
    weight.requires_grad_(True)
    return found


BESIDE = {"data": lambda x, weight: nn.functional.linear(x, weight.data), "frozen": frozen,
          "detach": lambda x, weight: nn.functional.linear(x, weight.detach()),
          "view": lambda x, weight: nn.functional.linear(x, weight.detach().view(-1)[:16].view(2, 8))}


@pytest.mark.parametrize("begins", [0, 4], ids=["always", "later"])
@pytest.mark.parametrize("beside", BESIDE)
def test_a_weight_that_the_rest_of_backward_reads_is_left_to_the_step(beside, begins):
    def run(on):
        training = Training(on=on)
        for number in range(7):
            x = training.model.embedding(torch.randint(11, (4, 6)))
            # The earlier use has its turn later in the backward pass.
            near = BESIDE[beside](x, training.model.hidden.weight).square().mean() if number >= begins else 0.0
            loss = near + training.model.hidden(x).tanh().sum()
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()
            training.losses.append(loss.item())
        return training

    ours = run(True)
    assert alike(ours, run(False)) and ours.proof().active
    assert ("1 left to step()" in ours.proof().evidence) is (begins == 0)


def test_weights_that_somebody_keeps_are_left_to_the_step():
    ours = Training()
    kept = ours.model.state_dict()
    ours.steps(5)
    assert alike(ours, Training(on=False).steps(5)) and same(kept, ours.model.state_dict())
    assert not ours.proof().active and "share the memory" in ours.proof().evidence


# -- with fused kernels ------------------------------------------------------------------------------------------------


class Beside:
    """Convolutions of which one is frozen at first, with and without `optimizer-in-backward`; `fused-optimizer` comes some steps later."""

    def __init__(self, kind, on, **arguments):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
        self.model[1].requires_grad_(False)
        self.optimizer = getattr(torch.optim, kind)(self.model.parameters(), lr=0.01, **arguments)
        self.context, self.losses = Context(torch), []
        self.context.modules, self.context.optimizers, self.context.device = (self.model,), (self.optimizer,), "cpu"
        if on:
            technique.apply(self.context, OPTIONS)
        self.steps(3)
        if on:
            fused_optimizer.apply(self.context, fused_optimizer.Options())

    def steps(self, count):
        for _ in range(count):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(4, 3, 9, 9)).square().sum(1).mean()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())


def test_what_fused_kernels_read_is_laid_out_before_they_run():
    """They look at no strides, and a state that was saved in the usual format was taken for one in that of the weights."""
    found = []
    for on in (False, True):
        training = Beside("AdamW", on)
        saved = copy.deepcopy(training.optimizer.state_dict())
        for state in saved["state"].values():
            state.update({name: value.contiguous() for name, value in state.items()})
        training.optimizer.load_state_dict(saved)
        training.steps(4)
        found.append(training.losses)
    assert "updated in backward" in training.context.notes[technique.TECHNIQUE.id] and training.optimizer.param_groups[0]["fused"]
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_which_kernels_update_is_no_setting_that_changes():
    """A step of SGD in which a layer has no momentum yet beside others that have it is not fused, and that shows as late as in it."""
    found = []
    for on in (False, True):
        training = Beside("SGD", on, momentum=0.9)
        kept = training.model[0].state_dict()       # shares memory: the script's own step updates it
        training.model[1].requires_grad_(True)
        training.steps(4)
        found.append(training.losses)
    assert kept and "updated in backward" in training.context.notes[technique.TECHNIQUE.id]
    assert found[1] == pytest.approx(found[0], rel=1e-6)


# -- what it must not serve --------------------------------------------------------------------------------------------


def clipping(training):
    training.optimizer.zero_grad()
    training.loss().backward()
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
    training.optimizer.step()


def accumulating(training):
    training.optimizer.zero_grad()
    training.loss().backward()
    training.loss().backward()
    training.optimizer.step()


def never_zeroed(training):
    training.loss().backward()
    training.optimizer.step()


def late_rate(training):
    training.optimizer.zero_grad()
    training.loss().backward()
    training.optimizer.param_groups[1]["lr"] *= 0.5
    training.optimizer.step()


def logging_after_the_step(training):
    training.optimizer.zero_grad()
    training.loss().backward()
    training.optimizer.step()
    sum(p.grad.norm() for p in training.model.parameters() if p.grad is not None)


def noisy(training):
    training.optimizer.zero_grad()
    training.loss().backward()
    for p in training.model.parameters():
        p.grad = torch.full_like(p, 0.01)
    training.optimizer.step()


def adversarial(training):
    """The second backward pass of each step also reaches what the first updated."""
    training.optimizer.zero_grad()
    training.loss().backward()
    training.optimizer.step()
    training.loss().backward()


def peeking(training):
    training.optimizer.zero_grad()
    training.loss().backward()
    training.loss()
    training.optimizer.step()


def evaluating_first(training):
    training.optimizer.zero_grad()
    training.loss().backward()
    training.model.eval()
    with torch.no_grad():
        training.loss()
    training.model.train()
    training.optimizer.step()


def one_part_first(training):
    training.optimizer.zero_grad()
    training.loss().backward()
    training.model.hidden(torch.ones(8))
    training.optimizer.step()


def saving_first(training):
    training.optimizer.zero_grad()
    training.loss().backward()
    training.optimizer.state_dict()
    training.optimizer.step()


def decaying(training):
    """Weight decay by hand, as fast.ai did it."""
    training.optimizer.zero_grad()
    training.loss().backward()
    for group in training.optimizer.param_groups:
        for p in group["params"]:
            p.data.mul_(1 - 0.5 * group["lr"])
    training.optimizer.step()


def real_weights(training):
    """Binary weights in the forward, real ones in the step."""
    weight = training.model.hidden.weight
    real = weight.data
    training.optimizer.zero_grad()
    weight.data = real.sign()
    training.loss().backward()
    weight.data = real
    training.optimizer.step()


LOOPS = {decaying: "parameters are written", real_weights: "parameters are written",
         peeking: "used in a forward between", evaluating_first: "used in a forward between", one_part_first: "used in a forward between",
         saving_first: "saved between", clipping: "reads gradients", accumulating: "added up",
         never_zeroed: "added to those of earlier", late_rate: "setting",
         logging_after_the_step: "reads gradients", noisy: "sets gradients|are changed", adversarial: "added up|earlier"}


def by_itself(loop, training):
    loop(training)


def in_a_closure(loop, training):
    """What comes before the loop's step() is done by the closure of a step."""
    def closure():
        training.optimizer.step = lambda: None
        loop(training)
        del training.optimizer.step

    training.optimizer.step(closure)


@pytest.mark.parametrize("way", [by_itself, in_a_closure], ids=lambda way: way.__name__)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops_that_need_their_gradients_are_left_alone(loop, way):
    import re

    if way is in_a_closure and loop in (adversarial, logging_after_the_step):
        pytest.skip("what it does after step() cannot come before the closure returns")
    plain = Training(on=False)
    for _ in range(5):
        way(loop, plain)
    ours = Training()
    for _ in range(5):
        way(loop, ours)
    assert alike(ours, plain)
    assert not ours.proof().active and re.search(LOOPS[loop], ours.proof().evidence), ours.proof()


@pytest.mark.parametrize("loop", [decaying, real_weights, clipping, accumulating, never_zeroed, late_rate, logging_after_the_step,
                                  noisy], ids=lambda loop: loop.__name__)
def test_a_loop_that_changes_its_mind_gets_an_error(loop):
    ours = Training().steps(4)
    with pytest.raises(RuntimeError, match="optimizer-in-backward"):
        for _ in range(len(list(ours.model.parameters())) if loop is decaying else 1):      # one weight is looked at in each step
            loop(ours)


def restoring(training):
    """As binary networks do it: the real weights are put back from a copy before the step. What the forward has left as it was gets the bits
    that it has, which tells nothing; and that undoes what was updated in the backward pass."""
    weight = training.model.embedding.weight
    training.optimizer.zero_grad()
    loss, real = training.loss(), weight.data.clone()
    loss.backward()
    weight.data.copy_(real)
    training.optimizer.step()


def test_weights_that_are_restored_before_the_step_are_found_at_the_first_update():
    """Not some steps later, when it is that weight's turn: until then it did not train."""
    plain = Training(on=False)
    for _ in range(2):
        restoring(plain)
    ours = Training()
    for _ in range(2):
        restoring(ours)
    assert alike(ours, plain)
    with pytest.raises(RuntimeError, match="parameters are written between backward and step"):
        restoring(ours)


def test_of_each_optimizer_at_its_own_first_update():
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    context = Context(torch)
    context.modules, context.device = tuple(layers), "cpu"
    optimizers = context.optimizers = tuple(torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers)
    technique.apply(context, OPTIONS)

    def steps():
        for layer, optimizer in zip(layers, optimizers):
            optimizer.zero_grad()
            real = layer.bias.data.clone()
            layer(torch.ones(1, 2)).sum().backward()
            if layer is layers[1]:
                layer.bias.data.copy_(real)
            optimizer.step()

    steps()
    steps()
    with pytest.raises(RuntimeError, match="parameters are written between backward and step"):
        steps()


USES = {"saved": lambda training: training.model.state_dict(), "saved ": lambda training: training.optimizer.state_dict(),
        "used in a forward": lambda training: training.loss(),
        "used in a forward ": lambda training: training.model.eval()(torch.zeros(1, 1, dtype=torch.long)),
        "left at the end": lambda training: training.context.undo()}


@pytest.mark.parametrize("how", USES)
def test_an_update_without_a_step_is_said(how, capsys):
    ours = Training().steps(4)
    other = nn.Linear(2, 2)
    ours.optimizer.register_step_post_hook(lambda *_: ours.model.state_dict())
    ours.optimizer.zero_grad()
    ours.loss().backward()
    ours.optimizer.step()
    for orderly in ("saved", "saved ", "used in a forward"):
        USES[orderly](ours)
    assert "optimizer-in-backward" not in capsys.readouterr().err
    ours.optimizer.zero_grad()
    ours.loss().backward()
    other.state_dict()
    assert not capsys.readouterr().err
    USES[how](ours)
    said = capsys.readouterr().err
    assert f"parameters are {how.strip()} after a backward pass without optimizer.step(), behind step 5" in said
    USES[how](ours)
    assert not capsys.readouterr().err
    if how != "left at the end":
        with pytest.raises(RuntimeError, match="before .*step.* was called, behind step 5"):
            ours.steps(1)


def test_reading_zeros_after_zero_grad():
    """What a script finds between `zero_grad(set_to_none=False)` and the backward pass is what it always found."""
    ours = Training().steps(4, to_none=False)
    ours.optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in (ours.model.embedding.weight, ours.model.hidden.weight))
    ours.optimizer.zero_grad()
    assert ours.model.hidden.weight.grad is None


@pytest.mark.parametrize("clear", [lambda p: delattr(p, "grad"), lambda p: setattr(p, "grad", None)], ids=["deleted", "set to None"])
def test_a_script_may_drop_gradients_itself(clear):
    def run(on):
        training = Training(on=on)
        for _ in range(5):
            for p in training.model.parameters():
                clear(p)
            training.loss().backward()
            training.optimizer.step()
        return training

    ours = run(True)
    assert alike(ours, run(False)) and ours.proof().active


def test_hooks_after_a_step_that_come_behind_ours_are_called_when_it_gives_up():
    """Torch goes over an optimizer's hooks while it calls them."""
    training, called = Training(), []
    training.optimizer.register_step_post_hook(lambda *_: called.append(1))
    for _ in range(4):
        clipping(training)
    assert len(called) >= 4 and not training.proof().active
    training.context.undo()
    assert len(training.optimizer._optimizer_step_post_hooks) == 1


def test_optimizers_that_are_refused():
    weight = nn.Parameter(torch.ones(2))
    hooked = nn.Parameter(torch.ones(2))
    hooked.register_post_accumulate_grad_hook(lambda p: None)

    class Mine(torch.optim.SGD):
        pass

    for optimizer, reason in (
        (torch.optim.LBFGS([weight]), "LBFGS"), (Mine([weight]), "Mine"), (torch.optim.SGD([hooked]), "hooks of its own"),
        (torch.optim.SGD([torch.ones(1, requires_grad=True)]), "no Parameters"),
        (torch.optim.SGD([nn.Parameter(torch.ones(1), requires_grad=False)]), "frozen"),
    ):
        context = Context(torch)
        context.optimizers = (optimizer,)
        with pytest.raises(NotApplied, match=reason):
            technique.apply(context, OPTIONS)
    with pytest.raises(NotApplied):
        technique.apply(Context(torch), OPTIONS)


def test_norms_for_verification_are_those_of_the_baseline():
    def norms(on):
        training = Training(on=on).steps(4)
        training.context.gradient_norms = {}
        training.steps(1)
        names = {id(p): name for name, p in training.model.named_parameters()}
        if on:
            return {names[key]: norm.item() for key, norm in training.context.gradient_norms.items()}
        return {name: torch.linalg.vector_norm(p.grad).item() for name, p in training.model.named_parameters() if p.grad is not None}

    assert norms(True) == norms(False)


# -- deciding ----------------------------------------------------------------------------------------------------------


def test_only_where_memory_is_short_and_gradients_are_nobody_elses():
    adam = OptimizerFacts(kind="AdamW", module="torch.optim.adamw")
    limited = Facts(optimizers=(adam,), memory_limit_bytes=1 << 30)
    assert technique.eligible(limited)
    assert not technique.eligible(dataclasses.replace(limited, memory_limit_bytes=None))
    full = dataclasses.replace(limited, memory_limit_bytes=None, device_memory_bytes=100, device_reserved_bytes=95)
    assert technique.eligible(full)
    for changes in ({"gradients_read": True}, {"micro_steps": 2}, {"world_size": 2}, {"grad_scaler": True}, {"optimizers": ()},
                    {"optimizers": (adam, OptimizerFacts(kind="LBFGS", module="torch.optim.lbfgs"))},
                    {"optimizers": (dataclasses.replace(adam, sparse=True),)},
                    {"optimizers": (dataclasses.replace(adam, module="apex.optimizers"),)}):
        assert not technique.eligible(dataclasses.replace(limited, **changes))


def test_nobody_else_may_touch_the_backward_pass():
    registry = _registry.load()
    for other in ("fp16-autocast", "zero-grad-none"):
        assert _registry.conflicts([registry[other], technique]), other
    for other in ("fused-optimizer", "bf16-autocast", "activation-checkpointing"):
        assert not _registry.conflicts([registry[other], technique]), other
