"""Fused kernels look at no strides: what lies otherwise in memory is laid out before a step, or the script's kernels go on."""

from __future__ import annotations

import copy
import pickle
import types

import pytest

torch = pytest.importorskip("torch")

from saturate.agent.context import Context  # noqa: E402
from saturate.records.facts import Evidence  # noqa: E402
from saturate.techniques import channels_last, fused_optimizer  # noqa: E402
from saturate.techniques._api import NotApplied  # noqa: E402

KINDS = {"Adam": {}, "AdamW": {"amsgrad": True}, "SGD": {"momentum": 0.9}, "Adagrad": {}}


def _turned(tensor):
    """The same values in another order of memory."""
    return tensor.t().contiguous().t()


def _optimizer(kind, parameter):
    return getattr(torch.optim, kind)([parameter], lr=0.1, **KINDS[kind])


def _fused(optimizer, monkeypatch=None):
    context = Context(torch)
    context.optimizers = [optimizer]
    fused_optimizer.apply(context, fused_optimizer.Options())
    return context


def _backward_then_step(optimizer, backward):
    backward()
    optimizer.step()


def _step_by_position(optimizer, backward):
    optimizer.zero_grad()
    optimizer.step(backward)


def _step_by_keyword(optimizer, backward):
    optimizer.zero_grad()
    optimizer.step(closure=backward)


STEPS = (_backward_then_step, _step_by_position, _step_by_keyword)


def _trained(parameter, optimizer, change=lambda parameter, optimizer, step: None, turn=lambda gradient: gradient, steps=4,
             by=_backward_then_step):
    torch.manual_seed(1)

    def backward():
        parameter.grad = turn(torch.randn(6, 4))

    for step in range(steps):
        change(parameter, optimizer, step)
        by(optimizer, backward)
    return parameter.detach().clone()


def _other_order(parameter, optimizer, step):
    if step == 2:
        parameter.data = _turned(parameter.data)


def _loaded(parameter, optimizer, step):
    if step == 2:
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            state.update({name: _turned(value) for name, value in state.items() if value.dim() == 2})
        optimizer.load_state_dict(saved)


CASES = {
    "gradients": {"turn": _turned},
    "a parameter that gets another order": {"change": _other_order},
    "a state that was saved in another order": {"change": _loaded},
}


@pytest.mark.parametrize("by", STEPS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_otherwise_is_updated_as_it_was(kind, case, by):
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    plain, fused = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    wanted = _trained(plain, _optimizer(kind, plain), **CASES[case])
    optimizer = _optimizer(kind, fused)
    context = _fused(optimizer)
    torch.testing.assert_close(_trained(fused, optimizer, by=by, **CASES[case]), wanted)
    assert optimizer.param_groups[0]["fused"]
    context.undo()
    assert not optimizer.param_groups[0].get("fused") and not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("case", CASES)
def test_without_looking_it_would_go_wrong(case, monkeypatch):
    monkeypatch.setattr(fused_optimizer._Switch, "before_step", lambda *_: None)
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    plain, fused = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    wanted = _trained(plain, _optimizer("Adam", plain), **CASES[case])
    optimizer = _optimizer("Adam", fused)
    _fused(optimizer)
    wrong = not torch.allclose(_trained(fused, optimizer, **CASES[case]), wanted, atol=1e-3)
    if not wrong and torch.__version__ >= "2.14":
        pytest.skip("this torch's fused kernels look at strides")
    assert wrong


def test_a_parameter_with_gaps_is_left_alone():
    parameter = torch.nn.Parameter(torch.randn(6, 8)[:, :4])
    with pytest.raises(fused_optimizer.NotApplied):
        _fused(_optimizer("Adam", parameter))


@pytest.mark.parametrize("by", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_from_the_first_gap_on_the_script_s_kernels_go_on(kind, by):
    wide = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))

    def gaps(parameter, optimizer, step):
        if step == 2:
            room = torch.zeros(6, 8)
            room[:, :4] = parameter.data
            parameter.data = room[:, :4]
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())       # after which the flags would be set again

    plain, fused = (torch.nn.Parameter(wide[:, :4].clone(memory_format=torch.contiguous_format)) for _ in range(2))
    wanted = _trained(plain, _optimizer(kind, plain), gaps)
    optimizer = _optimizer(kind, fused)
    context = _fused(optimizer)
    torch.testing.assert_close(_trained(fused, optimizer, gaps, by=by), wanted)
    assert not optimizer.param_groups[0].get("fused") and not optimizer.defaults.get("fused")
    proof = fused_optimizer.active(Evidence(notes=context.notes), fused_optimizer.Options())
    assert not proof.active and "do not fill" in proof.evidence


@pytest.mark.parametrize("gap", [False, True])
@pytest.mark.parametrize("overflow", [False, True])
def test_a_scaler_divides_gradients_as_it_did(overflow, gap):
    """What says that an optimizer divides them itself is not set: frameworks then refuse to clip gradients."""
    def trained(parameter, optimizer):
        torch.manual_seed(1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            if step == 2 and gap:
                room = torch.zeros(6, 8)
                room[:, :4] = parameter.data
                parameter.data = room[:, :4]
            optimizer.zero_grad()
            loss = (parameter * torch.randn(6, 4)).sum() * (float("inf") if overflow and step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return parameter.detach().clone()

    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    plain, fused = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    wanted = trained(plain, _optimizer("Adam", plain))
    optimizer = _optimizer("Adam", fused)
    _fused(optimizer)
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)
    torch.testing.assert_close(trained(fused, optimizer), wanted)
    assert bool(optimizer.param_groups[0].get("fused")) == (not gap)


def test_a_closure_keeps_what_it_is_called_with_and_returns():
    parameter = torch.nn.Parameter(torch.ones(6, 4))
    optimizer = _optimizer("Adam", parameter)
    context = _fused(optimizer)

    def closure():
        parameter.grad = _turned(torch.ones(6, 4))
        return torch.tensor(7.0)

    assert float(optimizer.step(closure)) == 7.0 and float(optimizer.step(closure=closure)) == 7.0
    assert optimizer.step(closure=None) is None and optimizer.step(None) is None
    context.undo()


def test_one_element_long_dimensions_say_nothing():
    """A 1x1 convolution in channels-last: its strides differ from its gradient's, its memory does not."""
    parameter = torch.nn.Parameter(torch.randn(8, 4, 1, 1).to(memory_format=torch.channels_last))
    optimizer = _optimizer("Adam", parameter)
    context = _fused(optimizer)
    gradient = torch.randn(8, 4, 1, 1)
    for _ in range(2):
        parameter.grad = gradient
        optimizer.step()
        assert parameter.grad is gradient
    assert "switched" in context.notes["fused-optimizer"]


@pytest.mark.parametrize("by", STEPS)
@pytest.mark.parametrize("after", ["a load", "an average is swapped in"])
def test_channels_last_keeps_the_script_s_fused_kernels_right(after, by):
    """A state or parameters that come contiguous from elsewhere, under kernels that the script itself had chosen."""

    def trained(convert):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 8, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
        context = Context(torch)
        for step in range(4):
            if step == 1 and convert:
                context.modules, context.optimizers = [model], [optimizer]
                channels_last.apply(context, channels_last.Options())
                assert model.weight.is_contiguous(memory_format=torch.channels_last)
            if step == 2 and after == "a load":
                saved = copy.deepcopy(optimizer.state_dict())
                for state in saved["state"].values():
                    state.update({name: value.contiguous() for name, value in state.items()})
                optimizer.load_state_dict(saved)
            elif step == 2:
                model.weight.data = model.weight.data.clone(memory_format=torch.contiguous_format)
            optimizer.zero_grad()
            batch = torch.randn(2, 3, 8, 8)
            by(optimizer, lambda batch=batch: model(batch).square().mean().backward())
        context.undo()
        assert not optimizer._optimizer_step_pre_hooks
        return model.weight.detach().clone()

    torch.testing.assert_close(trained(True), trained(False))


@pytest.mark.parametrize("by", STEPS)
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_parameter_that_comes_late_has_its_first_momentum_from_the_script_s_own_kernels(dampening, by):
    def trained(fuse):
        first, late = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = torch.optim.SGD([first, late], lr=0.1, momentum=0.9, dampening=dampening, weight_decay=0.1)
        context = _fused(optimizer) if fuse else None
        for step in range(5):
            def backward(step=step):
                first.grad = torch.full((3,), 1.0 + step)
                late.grad = torch.full((3,), 2.0 + step) if step >= 2 else None

            by(optimizer, backward)
            assert optimizer.state_dict()["param_groups"][0]["fused"] is None
            if fuse:
                assert optimizer.param_groups[0]["fused"] is (True if step != 2 else None)
        if context is not None:
            assert "switched" in context.notes[fused_optimizer.TECHNIQUE.id]
            context.undo()
            assert optimizer.param_groups[0]["fused"] is None
        return [first, late, *(optimizer.state[p]["momentum_buffer"] for p in (first, late))]

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make, reason", [
    (lambda p: torch.optim.AdamW([p], fused=True), "AdamW is fused already"),
    (lambda p: torch.optim.RMSprop([p]), "RMSprop has no fused kernel"),
    (lambda p: type("AdamW", (torch.optim.AdamW,), {"__module__": "neuralop.training"})([p]), "AdamW of neuralop.training has no fused kernel"),
    (lambda p: torch.optim.Adam([p], differentiable=True), "Adam has sparse gradients or is differentiable"),
    (lambda p: torch.optim.SGD([torch.zeros(2, dtype=torch.int64)]), "SGD updates parameters that are not floating point"),
    (lambda p: torch.optim.Adam([torch.zeros(2, device="meta")]), "Adam updates parameters on meta"),
    (lambda p: torch.optim.Adam([p.detach()[:, :2].requires_grad_()]), "Adam updates a parameter that does not fill its memory"),
])
def test_it_is_said_why_an_optimizer_is_left_alone(make, reason):
    with pytest.raises(NotApplied, match=reason):
        _fused(make(torch.nn.Parameter(torch.randn(6, 4))))


def test_one_optimizer_that_cannot_be_fused_does_not_spoil_the_others():
    context, parameter = Context(torch), torch.nn.Parameter(torch.randn(6, 4))
    other, plain = torch.optim.RMSprop([parameter]), torch.optim.Adam([parameter])
    context.optimizers = [other, plain]
    fused_optimizer.apply(context, fused_optimizer.Options())
    assert plain.param_groups[0]["fused"]
    already = torch.optim.AdamW([parameter], fused=True)
    context.optimizers = [other, already]
    with pytest.raises(NotApplied, match="RMSprop has no fused kernel; AdamW is fused already"):
        fused_optimizer.apply(context, fused_optimizer.Options())


def test_from_a_parameter_on_that_is_not_floating_point_the_script_s_own_kernels_go_on():
    parameter, turned = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    context = _fused(optimizer)
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": [turned]})
        for one in (parameter, *([turned] if step else [])):
            one.grad = torch.ones_like(one)
        optimizer.step()
    assert optimizer.param_groups[0]["fused"] is None and not torch.equal(turned, torch.ones_like(turned))
    assert "not floating point" in context.notes[fused_optimizer.TECHNIQUE.id]
    context.undo()


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_or_copied_optimizer_is_the_script_s_own(kind):
    def twins(fuse):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = _optimizer(kind, parameter)
        context = _fused(optimizer) if fuse else None
        parameter.grad = torch.ones(3)
        optimizer.step()
        found = [pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)]
        if context is not None:
            assert optimizer.param_groups[0]["fused"] is True, "what was pickled is not changed"
            context.undo()
            assert "__getstate__" not in vars(optimizer)
        return found

    for own, plain in zip(twins(True), twins(False)):
        assert own.defaults == plain.defaults and type(own.state) is type(plain.state)
        assert _without_parameters(own) == _without_parameters(plain)
        for twin in (own, plain):
            (parameter,) = twin.param_groups[0]["params"]
            parameter.grad = torch.ones(3)
            twin.step()
        torch.testing.assert_close(own.state_dict()["state"], plain.state_dict()["state"])


def _without_parameters(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


class Around(torch.optim.Optimizer):
    """As SAM: an optimizer around another one, whose groups are its own."""

    def __init__(self, parameters, base):
        super().__init__(parameters, {})
        self.base = base
        self.param_groups = base.param_groups


def test_a_checkpoint_of_an_optimizer_around_it_carries_the_script_s_own_flags():
    def saved(fuse):
        parameter = torch.nn.Parameter(torch.ones(3))
        base = torch.optim.Adam([parameter], lr=0.1)
        around, foreign = Around([parameter], base), torch.optim.SGD([parameter], lr=0.1)
        context = Context(torch)
        context.optimizers, context.built_optimizers = [base], lambda: [base, around, foreign]
        if fuse:
            fused_optimizer.apply(context, fused_optimizer.Options())
            assert base.param_groups[0]["fused"] is True and not foreign._optimizer_state_dict_post_hooks
        parameter.grad = torch.ones(3)
        base.step()
        found = around.state_dict()
        context.undo()
        assert not around._optimizer_state_dict_post_hooks
        return found

    assert saved(True) == saved(False)


@pytest.mark.parametrize("kind, where, kernel, problem", [
    ("Adagrad", "cuda", False, "no fused kernel of Adagrad for CUDA"), ("Adagrad", "cuda", True, ""), ("Adagrad", "cpu", False, ""),
    ("Adam", "cuda", False, "")])
def test_adagrad_on_cuda_is_fused_where_torch_has_the_kernel(monkeypatch, kind, where, kernel, problem):
    """Older ones raise in the step, which is the script's."""
    parameter = types.SimpleNamespace(grad=None, is_floating_point=lambda: True, device=torch.device(where))
    optimizer = object.__new__(getattr(torch.optim, kind))
    optimizer.param_groups = [{"params": [parameter]}]
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda operator, key: kernel)
    monkeypatch.setattr(fused_optimizer, "dense", lambda parameter: True)
    found = fused_optimizer._problem(optimizer, torch)
    assert problem in found and bool(found) is bool(problem)


def test_kernels_are_known_by_their_operators():
    assert fused_optimizer.has_kernel(torch, "aten::_fused_adagrad_", "CPU")
    assert not fused_optimizer.has_kernel(torch, "aten::_no_such_operator_", "CPU")
