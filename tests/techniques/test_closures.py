"""What stands in for a closure is the closure, but for a call."""

from __future__ import annotations

import functools
import inspect

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the import that decides whether to run at all

from saturate.agent.context import Context  # noqa: E402
from saturate.techniques import _closures, fused_optimizer, optimizer_in_backward, zero_grad_none  # noqa: E402


class Counting:
    """A closure as some libraries have it: an object whose attributes the optimizer reads and sets."""

    def __init__(self, closure):
        self.closure, self.calls = closure, 0

    def __call__(self, *args):
        self.calls += 1
        return self.closure(*args)


def watched(closure, events, by_name=False):
    args, kwargs = (("optimizer",), {"closure": closure}) if by_name else (("optimizer", closure, 3), {"more": 4})
    args, kwargs = _closures.around(args, kwargs, after=lambda: events.append("after"), before=lambda: events.append("before"))
    assert (args, list(kwargs)) == (("optimizer",), ["closure"]) if by_name else (args[0], args[2:], kwargs) == ("optimizer", (3,), {"more": 4})
    return kwargs["closure"] if by_name else args[1]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_call_is_watched_and_attributes_are_the_closure_s_own(by_name):
    events = []
    closure = Counting(lambda *args: events.append("closure") or sum(args))
    found = watched(closure, events, by_name)
    assert found(1, 2) == 3 and found.__call__(4) == 4
    assert events == ["before", "closure", "after"] * 2
    found.last = 5
    assert (found.calls, closure.last) == (2, 5)
    assert isinstance(found, Counting) and found.__class__ is Counting and found.__doc__ == Counting.__doc__
    assert found == closure and hash(found) == hash(closure) and found
    del found.last
    assert not hasattr(closure, "last")


def test_a_function_a_method_and_a_partial_function_are_still_taken_for_such():
    def closure(a=1):
        """Its own words."""
        return a

    for given in (closure, Counting(closure).__call__, functools.partial(closure, 1)):
        events = []
        found = watched(given, events)
        assert (inspect.isfunction(found), inspect.ismethod(found)) == (inspect.isfunction(given), inspect.ismethod(given))
        assert inspect.signature(found) == inspect.signature(given) and found.__doc__ == given.__doc__
        assert torch.enable_grad()(found)() == 1        # as torch's optimizers call it
        assert events == ["before", "after"]


def test_after_a_closure_that_raises_nothing_is_run():
    events = []
    found = watched(lambda: 1 / 0, events)
    with pytest.raises(ZeroDivisionError):
        found()
    assert events == ["before"]


@pytest.mark.parametrize("more", [nn.Linear(1, 1), nn.ModuleList(), Counting, type("Listed", (Counting,), {"__len__": lambda self: 1})(int)])
def test_what_is_more_than_a_closure_is_left_as_it_is(more):
    surprising = callable(more)
    assert _closures.around(("optimizer", more), {}, after=lambda: None) is None
    assert _closures.surprising(("optimizer", more), {}) == _closures.surprising(("optimizer",), {"closure": more}) == surprising


def test_no_closure():
    for given in (((1,), {}), ((1, None), {}), ((1,), {"closure": None}), ((1, 0.5), {"closure": 2})):
        assert _closures.around(*given, after=lambda: None) is None
        assert not _closures.surprising(*given)


class Natural(torch.optim.Optimizer):
    """It is given the model, as natural gradients are, or a closure that counts."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, given):
        if isinstance(given, nn.Module):
            for _, parameter in given.named_parameters():
                parameter.sub_(0.01 * parameter.grad)
            return
        with torch.enable_grad():
            given()
        assert given.calls == 1
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.01 * parameter.grad)


@pytest.mark.parametrize("with_model", [True, False])
def test_optimizers_get_the_model_or_the_closure_that_the_script_gives_them(with_model):
    def trained(on):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = Natural(model.parameters())
        context = Context(torch)
        context.modules, context.optimizers, context.device = (model,), (optimizer,), "cpu"
        if on:
            zero_grad_none.apply(context, zero_grad_none.Options())

        def closure():
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(3, 4)).square().sum().backward()

        for _ in range(4):
            if with_model:
                closure()
            optimizer.step(model if with_model else Counting(closure))
        context.undo()
        return list(model.parameters())

    assert all(map(torch.equal, trained(True), trained(False)))


class Evaluated(nn.Module):
    """A model that makes its own gradients when it is called, given in place of a closure."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self):
        self.weight.grad = None
        loss = self.weight.square().sum()
        loss.backward()
        return loss


@pytest.mark.parametrize("technique, word", [(fused_optimizer, "not fused any more"), (optimizer_in_backward, "something to call")])
def test_techniques_that_must_know_when_gradients_are_complete_let_go(technique, word):
    def trained(on):
        model = Evaluated()
        optimizer = torch.optim.AdamW(model.parameters())
        context = Context(torch)
        context.modules, context.optimizers, context.device = (model,), (optimizer,), "cpu"
        if on:
            technique.apply(context, technique.Options())
        for _ in range(5):
            optimizer.step(model)
        notes = str(context.notes)
        context.undo()
        return model.weight, notes

    (ours, notes), (plain, _) = trained(True), trained(False)
    assert torch.equal(ours, plain) and word in notes
