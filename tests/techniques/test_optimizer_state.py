"""Optimizer state that rests in another form: 8-bit averages, host memory. What a user's script may do with it."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from typing import Any

import pytest

from saturate.agent import kinds
from saturate.agent.context import Context
from saturate.records.facts import Evidence, Facts, MachineFacts, ModuleFacts, OptimizerFacts
from saturate.techniques import _at_rest, cpu_offload, fp8_linear, optimizer_8bit
from saturate.techniques._adam_codes import EightBits
from saturate.techniques._api import NotApplied
from saturate.testing import conformance

torch = pytest.importorskip("torch")


def model(dtype: Any = None, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    return made.to(dtype) if dtype else made


def train(net: Any, optimizer: Any, steps: int, seed: int = 1, closure: bool = False) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    answer = torch.randn(16, 4, generator=torch.Generator().manual_seed(9))
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 16, generator=generator)
        y = (x @ answer).argmax(1)

        def compute(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x.to(next(net.parameters()).dtype)).float(), y)
            loss.backward()
            return loss

        losses.append((optimizer.step(compute) if closure else _step(compute, optimizer)).item())
    return losses


def _step(compute: Any, optimizer: Any) -> Any:
    loss = compute()
    optimizer.step()
    return loss


def context_of(net: Any, optimizer: Any, early: bool = False) -> Context:
    context = Context(torch)
    context.modules, context.optimizers, context.device, context.early = (net,), (optimizer,), "cpu", early
    return context


def eight(net: Any, optimizer: Any, early: bool = False, smallest: int = 64) -> Context:
    context = context_of(net, optimizer, early)
    optimizer_8bit.apply(context, optimizer_8bit.Options(smallest=smallest))
    return context


def in_host_memory(net: Any, optimizer: Any) -> Context:
    context = context_of(net, optimizer)
    cpu_offload.offload_state(context, pinned=False)
    return context


def at_rest(optimizer: Any) -> int:
    kind = _at_rest.resting_type(torch)
    return sum(isinstance(value, kind) for state in optimizer.state.values() for value in state.values())


# -- the codes -------------------------------------------------------------------------------------------------------


def code(m: Any, v: Any, turn: int = 1) -> dict[str, Any]:
    form = EightBits(torch)
    return form.wake(form.rest({"exp_avg": m, "exp_avg_sq": v}, None, turn))


def test_values_are_kept_within_their_scales() -> None:
    torch.manual_seed(0)
    v = torch.randn(1024).exp() ** 4            # eight decades
    m = torch.randn(1024) * v.sqrt()
    for turn in range(1, 20):
        found = code(m, v, turn)
        spans = (v.view(-1, 256).amax(1) / v.view(-1, 256).amin(1)).log2()
        assert ((found["exp_avg_sq"] / v).log2().abs().view(-1, 256).amax(1) <= spans / 254 * 1.01).all()
        share, error = ((a / found["exp_avg_sq"].sqrt()).abs().view(-1, 256) for a in (m, m - found["exp_avg"]))
        assert (error / share.amax(1, keepdim=True)).max() < 2 / 127


def test_no_average_of_squares_but_zero_becomes_zero() -> None:
    v = torch.cat([torch.full((255,), 1.0), torch.tensor([1e-30]), torch.zeros(256)])
    found = code(torch.zeros(512), v)["exp_avg_sq"]
    assert found[255] > 0 and not found[256:].any()
    assert torch.allclose(found[:255], v[:255], rtol=1e-5)


def test_rounding_is_fair_over_turns() -> None:
    """The nearest code would give the same value in every turn; on average it must be the value itself."""
    torch.manual_seed(0)
    v = torch.rand(256) * 10 + 0.1
    m = torch.randn(256) * v.sqrt()
    found = [code(m, v, turn) for turn in range(200)]
    v_mean = torch.stack([f["exp_avg_sq"] for f in found]).log2().mean(0)
    assert (v_mean - v.log2()).abs().max() < 0.002      # a step is 0.026
    m_mean = torch.stack([f["exp_avg"] / f["exp_avg_sq"].sqrt() for f in found]).mean(0)
    assert (m_mean - (m / v.sqrt())).abs().max() < 0.01 * (m / v.sqrt()).abs().max()


def test_averages_follow_a_gradient_that_fades() -> None:
    """v moves by a thousandth a step, far less than a code: with rounding to the nearest it would stand still."""
    form = EightBits(torch)
    torch.manual_seed(0)
    gradient = torch.randn(256).abs() + 0.5
    m = v = None
    kept = None
    exact_m, exact_v = torch.zeros(256), torch.zeros(256)
    for turn in range(1, 1500):
        g = gradient.clone()
        if turn > 300:
            g[:128] = 0.0        # the others in the block go on: its scales stay
        awake = form.wake(kept) if kept is not None else {"exp_avg": torch.zeros(256), "exp_avg_sq": torch.zeros(256)}
        m, v = awake["exp_avg"].lerp(g, 0.1), awake["exp_avg_sq"].lerp(g * g, 0.001)
        kept = form.rest({"exp_avg": m, "exp_avg_sq": v}, kept, turn)
        exact_m, exact_v = exact_m.lerp(g, 0.1), exact_v.lerp(g * g, 0.001)
    assert m is not None and v is not None
    assert ((v / exact_v).log2().abs() < 0.1).all()
    assert (m[:128].abs() < 1e-3).all() and torch.allclose(m[128:], exact_m[128:], rtol=0.1)


def test_what_is_not_finite_stays_so() -> None:
    m, v = torch.zeros(4, 256), torch.ones(4, 256)
    v[0, 3], v[1, 3], m[2, 3] = float("inf"), float("nan"), float("nan")
    found = {name: value.view(4, 256) for name, value in code(m.view(-1), v.view(-1)).items()}
    assert [bool(row.isfinite().any()) for row in found["exp_avg_sq"]] == [False, False, True, True]
    assert [bool(row.isfinite().any()) for row in found["exp_avg"]] == [False, False, False, True]
    assert found["exp_avg_sq"][2:].isfinite().all() and found["exp_avg"][3].isfinite().all()


# -- the optimizer stays the user's ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"maximize": False, "weight_decay": 0.1}])
@pytest.mark.parametrize("cls", ["Adam", "AdamW"])
def test_it_trains_like_the_plain_optimizer(cls: str, options: dict[str, Any]) -> None:
    plain, tuned = model(), model()
    reference = getattr(torch.optim, cls)(plain.parameters(), lr=3e-3, **options)
    optimizer = getattr(torch.optim, cls)(tuned.parameters(), lr=3e-3, **options)
    context = eight(tuned, optimizer, early=True)
    expected, losses = train(plain, reference, 200), train(tuned, optimizer, 200)
    assert max(abs(a - b) for a, b in zip(expected, losses)) < 0.05
    start = torch.cat([p.flatten() for p in model().parameters()])
    moved = [torch.cat([p.detach().flatten() for p in net.parameters()]) - start for net in (plain, tuned)]
    assert torch.cosine_similarity(*moved, dim=0) > 0.99
    assert at_rest(optimizer) == 2 * sum(p.numel() >= 64 for p in tuned.parameters())
    assert optimizer_8bit.active(Evidence(notes=dict(context.notes)), optimizer_8bit.Options()).active


def test_bytes_before_and_after_are_told() -> None:
    net = torch.nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.AdamW(net.parameters())
    context = eight(net, optimizer)
    net(torch.randn(2, 512)).sum().backward()
    optimizer.step()
    assert context.notes["optimizer-8bit"] == "2 averages rest in 0.5 MiB instead of 2.0 MiB"
    piece = next(iter(optimizer.state.values()))["exp_avg"].piece
    assert piece.form.size_bytes(piece.kept) == 512 * 512 * 2 + 512 * 512 // 256 * 12


def test_never_all_state_is_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_at_rest, "LEAST", 64 * 64)
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(6)))
    optimizer = torch.optim.AdamW(net.parameters())
    eight(net, optimizer, early=True)
    seen = []
    modules = [sys.modules[f"torch.optim.{name}"] for name in ("adam", "adamw")]
    kernel = modules[0].adam

    def adam(params: Any, *args: Any, **kwargs: Any) -> Any:
        kind = _at_rest.resting_type(torch)
        seen.append(sum(not isinstance(s["exp_avg"], kind) for s in optimizer.state.values()))
        return kernel(params, *args, **kwargs)

    monkeypatch.setattr(modules[0], "adam", adam)       # AdamW is an Adam; older versions have a function of its own
    monkeypatch.setattr(modules[1], "adamw", adam, raising=False)
    for _ in range(2):
        net(torch.randn(4, 64)).sum().backward()
        optimizer.step()
    assert len(seen) == 14 and max(seen) == 1       # the rest of the group, and six pieces, twice


@pytest.mark.parametrize("apply", [eight, in_host_memory])
def test_checkpoints_go_both_ways(apply: Any) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    apply(net, optimizer)
    train(net, optimizer, 20)
    saved = optimizer.state_dict()
    assert all(type(value) is torch.Tensor for state in saved["state"].values() for value in state.values())
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    plain = copy.deepcopy(net)
    fresh = torch.optim.AdamW(plain.parameters(), lr=1.0)
    fresh.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert fresh.param_groups[0]["lr"] == 3e-3
    ahead = train(plain, fresh, 5, seed=2)
    assert ahead == pytest.approx(train(net, optimizer, 5, seed=2), rel=1e-3)
    optimizer.load_state_dict(fresh.state_dict())
    assert at_rest(optimizer), "what is loaded is put to rest at once, not at the next step"
    net.load_state_dict(plain.state_dict())
    assert train(net, optimizer, 5, seed=3) == pytest.approx(train(plain, fresh, 5, seed=3), rel=2e-2)


def test_loaded_state_is_put_to_rest_before_training() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 3)
    eight(net, optimizer, early=False)
    assert at_rest(optimizer) == 0, "undoing at once must change no bit"
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 3)
    eight(net, optimizer, early=True)
    assert at_rest(optimizer)


@pytest.mark.parametrize("apply", [eight, in_host_memory])
def test_copies_and_pickles_are_plain(apply: Any) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    apply(net, optimizer)
    train(net, optimizer, 3)
    twin, stored = copy.deepcopy(optimizer), pickle.dumps(optimizer)
    assert at_rest(optimizer) and not at_rest(twin) and b"saturate" not in stored
    for other in (twin, pickle.loads(stored)):
        parameter = other.param_groups[0]["params"][0]
        expected = optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg_sq"]
        assert torch.equal(other.state[parameter]["exp_avg_sq"], expected.clone())
        parameter.grad = torch.ones_like(parameter)
        other.step()


@pytest.mark.parametrize("apply", [eight, in_host_memory])
def test_a_script_may_read_and_change_the_state(apply: Any) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    apply(net, optimizer)
    train(net, optimizer, 3)
    parameter = net[2].weight
    average = optimizer.state[parameter]["exp_avg"]
    before = average.clone()
    assert average.shape == parameter.shape and average.dtype == parameter.dtype and "tensor" in repr(average)
    average.mul_(0.5)
    assert torch.allclose(optimizer.state[parameter]["exp_avg"].clone(), before / 2, atol=1e-2 * float(before.abs().max()))
    kept = average.clone()
    average.data = average.data.to("cpu")
    assert torch.equal(optimizer.state[parameter]["exp_avg"].clone(), kept), "the same values on the same device stay as they rest"
    average.data = average.data.double() * 4      # of another type, as of another device, it is taken to where it rests
    assert torch.allclose(optimizer.state[parameter]["exp_avg"].clone(), kept * 4, atol=1e-2 * float(kept.abs().max()) * 4)
    with pytest.raises(RuntimeError, match="clone"):
        average.data = torch.zeros(3)
    other = net[0].weight
    kept = optimizer.state[other]["exp_avg"].clone()
    optimizer.state[parameter] = {}
    net(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    assert float(optimizer.state[parameter]["step"]) == 1.0, "state that the script removed begins anew"
    assert float(optimizer.state[other]["step"]) == 4.0 and not torch.equal(optimizer.state[other]["exp_avg"].clone(), kept)
    optimizer.state.clear()
    train(net, optimizer, 2)
    assert at_rest(optimizer)


@pytest.mark.parametrize("apply", [eight, in_host_memory])
def test_values_go_to_other_libraries_and_memory_to_none(apply: Any) -> None:
    import numpy

    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    apply(net, optimizer)
    train(net, optimizer, 3)
    average = optimizer.state[net[2].weight]["exp_avg"]
    plain = average.clone()
    for one, other in ((average, plain), (average[3], plain[3]), (average.t().cpu(), plain.t())):
        assert isinstance(one, _at_rest.resting_type(torch)) and type(other) is torch.Tensor
        assert (one.numpy() == other.numpy()).all() and (numpy.asarray(one) == other.numpy()).all()
        assert (numpy.array(one, dtype="float64") == other.numpy()).all()
        assert not one.numpy().flags.writeable and numpy.array(one).flags.writeable
        assert one.tolist() == other.tolist() and torch.from_dlpack(one).equal(other)
    for ask in (lambda: average.share_memory_(), lambda: average.data_ptr(), lambda: average[2:4].storage()):
        with pytest.raises(RuntimeError, match="clone"):
            ask()


@pytest.mark.parametrize("apply", [eight, in_host_memory])
def test_reading_changes_nothing(apply: Any) -> None:
    """Values that are coded once more come out as others."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    apply(net, optimizer)
    train(net, optimizer, 3)
    average, other = (optimizer.state[net[number].weight]["exp_avg"] for number in (2, 0))
    piece = average.piece
    turn, before = piece.turn, average.clone()
    place, out = torch.zeros_like(before), torch.empty_like(before)
    place.copy_(average)
    place[3].add_(average[3])
    torch.add(average, average, out=out)
    torch._foreach_add_([place], [average])
    assert piece.turn == turn and average.equal(before) and out.equal(before + before)
    average[3].copy_(other.view(-1)[:64])
    torch.mul(average, 2, out=average)
    assert piece.turn > turn and not average.equal(before)


def write_through_views(average: Any, rows: Any) -> None:
    average[3] = 0
    average[10:20].zero_()
    average.view(-1)[-64:].fill_(0)
    average.t()[5].mul_(0)
    average.data[6].mul_(0)
    average.detach().reshape(-1)[64 * 7:64 * 8] = 0
    for row in average.split(8)[3].unbind()[2:4]:
        row.zero_()
    torch._foreach_mul_([average[40], average[41]], 0.0)
    average[42].copy_(average[3])
    rows[1].zero_()
    assert float(average[50].abs().max()) > 0 and not average.detach()[3].any() and average[4:6].shape == (2, 64)
    with torch.inference_mode():
        assert not average[3].any()


@pytest.mark.parametrize("apply", [eight, in_host_memory])
def test_what_is_written_through_a_view_is_kept(apply: Any) -> None:
    net, twin = model(), model()
    optimizer, reference = (torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (net, twin))
    apply(net, optimizer)
    views = []
    for one, o in ((net, optimizer), (twin, reference)):
        train(one, o, 2)
        average = o.state[one[2].weight]["exp_avg"]
        views.append(average[45:48])
        train(one, o, 1)
        write_through_views(average, views[-1])     # a view that has seen a step
        assert all(type(row) is torch.Tensor for row in copy.deepcopy(list(views[-1].unbind())))
    ours, plain = (o.state[one[2].weight]["exp_avg"].clone() for one, o in ((net, optimizer), (twin, reference)))
    assert torch.equal(ours == 0, plain == 0) and (plain == 0).sum() > 16 * 64 and at_rest(optimizer)
    assert torch.allclose(ours, plain, atol=0.0 if apply is in_host_memory else 0.1 * float(plain.abs().max()), rtol=0.0)
    optimizer.state[net[2].weight]["exp_avg"] = optimizer.state[net[2].weight]["exp_avg"].detach()
    kept = at_rest(optimizer)
    train(net, optimizer, 1)
    train(twin, reference, 1)
    assert at_rest(optimizer) == kept and not views[0][1].equal(torch.zeros(64))
    assert torch.allclose(net[2].weight, twin[2].weight, atol=0.0 if apply is in_host_memory else 1e-3, rtol=0.0)


@pytest.mark.parametrize("apply", [eight, in_host_memory])
def test_what_was_read_at_rest_is_the_state_when_it_is_awake(apply: Any) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    context = apply(net, optimizer)
    train(net, optimizer, 2)
    average = optimizer.state[net[2].weight]["exp_avg"]
    context.undo()
    average[3] = 7.0
    assert (optimizer.state[net[2].weight]["exp_avg"][3] == 7.0).all() and (average[3] == 7.0).all()


def test_schedulers_closures_and_new_groups() -> None:
    net, extra = model(), torch.nn.Linear(16, 64)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    eight(net, optimizer)
    before = [p.detach().clone() for p in net.parameters()]
    train(net, optimizer, 2, closure=True)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters())), "learning rate 0"
    scheduler.base_lrs = [0.01]
    scheduler.step()
    losses = train(net, optimizer, 40, closure=True)
    assert losses[-1] < losses[0]
    optimizer.add_param_group({"params": extra.parameters(), "lr": 0.5})
    weight = extra.weight.detach().clone()
    extra(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    assert float((extra.weight.detach() - weight).abs().max()) == pytest.approx(0.5, rel=0.02) and extra.weight in optimizer.state
    assert len(optimizer.param_groups) == 2 and optimizer.param_groups[0]["params"][0] is net[0].weight


def test_hooks_of_the_script_see_their_own_optimizer() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    eight(net, optimizer)
    seen: list[Any] = []
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(o))
    train(net, optimizer, 1)
    assert seen == [optimizer] and isinstance(optimizer, torch.optim.AdamW)


def test_parameters_without_a_gradient_wait() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    eight(net, optimizer, early=True)
    net[0].requires_grad_(False)
    train(net, optimizer, 3)
    assert net[0].weight not in optimizer.state
    net[0].requires_grad_(True)
    train(net, optimizer, 3)
    assert float(optimizer.state[net[0].weight]["step"]) == 3.0 and float(optimizer.state[net[2].weight]["step"]) == 6.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_state_of_half_precision_parameters(dtype: str) -> None:
    net = model(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, eps=1e-4)
    eight(net, optimizer)
    losses = train(net, optimizer, 60)
    assert losses[-1] < losses[0] and optimizer.state[net[2].weight]["exp_avg"].dtype == getattr(torch, dtype)


def test_strides_of_the_parameter_are_kept() -> None:
    net = torch.nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters())
    in_host_memory(net, optimizer)
    twin = torch.nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    twin.load_state_dict(net.state_dict())
    reference = torch.optim.AdamW(twin.parameters())
    for step in range(3):
        x = torch.randn(2, 8, 5, 5, generator=torch.Generator().manual_seed(step))
        for layer, o in ((net, optimizer), (twin, reference)):
            layer.zero_grad()
            layer(x).square().sum().backward()
            o.step()
        if step == 1:       # another layout from now on: values must not be permuted
            net.weight.data = net.weight.data.contiguous()
    assert torch.allclose(net.weight, twin.weight, atol=1e-6)
    assert optimizer.state[net.weight]["exp_avg"].stride() == net.weight.stride()


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"capturable": True}])
def test_what_it_cannot_do_it_refuses(options: dict[str, Any]) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.param_groups[0].update(options)
    with pytest.raises(NotApplied, match="without amsgrad"):
        eight(net, optimizer)
    small = torch.optim.Adam(net[0].parameters())
    with pytest.raises(NotApplied, match="no tensor of 4096"):
        optimizer_8bit.apply(context_of(net, small), optimizer_8bit.Options())
    with pytest.raises(NotApplied):
        eight(net, torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("steps", [0, 2])
def test_what_interrupts_a_step_as_state_goes_to_rest_loses_nothing(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step the checkpoint of the script's handler failed; in a later one the average of the step before stood for this one's."""
    nets = [model(), model()]
    plain, ours = (torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets)
    eight(nets[1], ours)
    train(nets[0], plain, steps), train(nets[1], ours, steps)
    monkeypatch.setattr(EightBits, "rest", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        train(nets[1], ours, 1, seed=2)
    saved = ours.state_dict()["state"]
    first = saved[0]
    monkeypatch.undo()
    train(nets[0], plain, 1, seed=2)
    expected = plain.state_dict()["state"][0]
    assert float(first["step"]) == steps + 1
    torch.testing.assert_close(first["exp_avg"], expected["exp_avg"], rtol=0.05, atol=2e-3)
    train(nets[1], ours, 2, seed=3)
    assert all(float(state["step"]) >= steps + 2 for state in ours.state_dict()["state"].values() if "step" in state)


def test_undo_gives_the_state_back() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    context = eight(net, optimizer)
    train(net, optimizer, 5)
    values = optimizer.state[net[2].weight]["exp_avg"].clone()
    context.undo()
    assert at_rest(optimizer) == 0 and not optimizer._optimizer_step_pre_hooks
    assert torch.equal(optimizer.state[net[2].weight]["exp_avg"], values)
    train(net, optimizer, 5)
    assert at_rest(optimizer) == 0


def test_the_kit_with_small_tensors() -> None:
    conformance.require(optimizer_8bit, optimizer_8bit.Options(smallest=16))


def test_when_it_is_worth_a_trial() -> None:
    adam = OptimizerFacts(kind="AdamW", module="torch.optim.adamw", dtypes=("float32",))
    assert not optimizer_8bit.eligible(Facts(optimizers=(adam,))), "it only saves memory"
    assert optimizer_8bit.eligible(Facts(optimizers=(adam,), memory_limit_bytes=1))
    sgd = OptimizerFacts(kind="SGD", module="torch.optim.sgd")
    assert "not torch's Adam" in optimizer_8bit.eligible(Facts(optimizers=(sgd,), memory_limit_bytes=1)).reason


# -- host memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), [
    ("Adam", {"amsgrad": True}), ("AdamW", {"foreach": False}), ("AdamW", {"fused": True}), ("NAdam", {}), ("RAdam", {}), ("Adamax", {}),
    ("SGD", {"momentum": 0.9}), ("SGD", {}), ("RMSprop", {"momentum": 0.5, "centered": True}), ("Adagrad", {}), ("Adadelta", {}),
])
def test_offloading_changes_no_bit(kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_at_rest, "LEAST", 100)
    results = []
    for apply in (None, in_host_memory):
        net = model()
        optimizer = getattr(torch.optim, kind)(net.parameters(), lr=1e-2, **options)
        train(net, optimizer, 2)
        context = apply(net, optimizer) if apply else None
        results.append((train(net, optimizer, 5), [p.detach().clone() for p in net.parameters()]))
        if context is not None and options != {} and kind != "SGD":
            assert at_rest(optimizer) and "rest in host memory" in context.notes["cpu-offload"]
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1]))


def test_host_buffers_are_used_again() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    in_host_memory(net, optimizer)
    train(net, optimizer, 1)
    piece = optimizer.state[net[2].weight]["exp_avg"].piece
    first = {name: buffer.data_ptr() for name, buffer in piece.kept[0].items()}
    train(net, optimizer, 2)
    assert {name: buffer.data_ptr() for name, buffer in piece.kept[0].items()} == first


def test_activations_in_host_memory_change_no_bit() -> None:
    results = []
    for offload in (False, True):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        context = context_of(net, optimizer)
        if offload:
            assert "1 module(s)" in cpu_offload.offload_activations(context, pinned=False)
        results.append(train(net, optimizer, 5))
        assert ("cpu-offload" in context.notes) is offload
        context.undo()
        assert "forward" not in vars(net)
    assert results[0] == results[1]


def test_offloading_needs_a_device() -> None:
    net = model()
    with pytest.raises(NotApplied, match="not on a CUDA device"):
        cpu_offload.apply(context_of(net, torch.optim.AdamW(net.parameters())), cpu_offload.Options())
    adam = OptimizerFacts(kind="AdamW", module="torch.optim.adamw")
    facts = Facts(optimizers=(adam,), memory_limit_bytes=1, modules=(ModuleFacts(parameter_bytes=8),))
    assert "on cpu" in cpu_offload.eligible(facts).reason
    cuda = Facts(device="cuda", optimizers=(adam,), memory_limit_bytes=1, modules=(ModuleFacts(parameter_bytes=8),))
    assert cpu_offload.eligible(cuda) and [o.what for o in cpu_offload.variants(cuda)] == ["optimizer", "activations"]


@pytest.mark.parametrize("reserved, parameters, ranks, offered", [
    (10, 10, 1, ["optimizer", "activations"]), (26, 10, 1, ["optimizer"]), (10, 13, 1, ["activations"]), (13, 7, 2, []),
    (25, 12, 1, ["optimizer", "activations"])])
def test_offloading_asks_for_half_of_the_host_s_memory_at_most(reserved, parameters, ranks, offered) -> None:
    """Page-locked memory comes in powers of two: a tensor may take nearly twice its size."""
    facts = Facts(device="cuda", optimizers=(OptimizerFacts(kind="AdamW", module="torch.optim.adamw"),), memory_limit_bytes=1,
                  modules=(ModuleFacts(parameter_bytes=parameters),), device_reserved_bytes=reserved, world_size=ranks,
                  machine=MachineFacts(memory_bytes=100))
    assert [one.what for one in cpu_offload.variants(facts)] == offered
    assert bool(cpu_offload.eligible(facts)) is bool(offered)


def test_who_counts_memory_counts_what_holds_the_state() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    plain = kinds.bytes_of(_averages(optimizer))
    context = eight(net, optimizer, smallest=1)
    train(net, optimizer, 2)
    resting = kinds.bytes_of(_averages(optimizer))
    assert plain == 2 * sum(p.numel() * p.element_size() for p in net.parameters())
    told = next(value for value in context.notes.values())
    assert f"rest in {resting / 2**20:.1f} MiB" in told and resting < 0.6 * plain, (resting, plain, told)
    assert kinds.bytes_of(_averages(optimizer), "cuda") == 0
    host = cpu_offload.HostMemory(torch, pinned=False)
    flat = {"exp_avg": torch.zeros(512), "exp_avg_sq": torch.zeros(512)}
    assert kinds.bytes_of(host.tensors(host.rest(flat, None, 0))) == 2 * 512 * 4
    context.undo()
    assert kinds.bytes_of(_averages(optimizer)) >= plain


def _averages(optimizer: Any) -> list[Any]:
    return [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]


# -- float8 ----------------------------------------------------------------------------------------------------------


def test_float8_says_what_is_missing() -> None:
    linear = (ModuleFacts(linears=4),)
    assert "needs a CUDA device" in fp8_linear.eligible(Facts(modules=linear)).reason
    ampere = Facts(device="cuda", capability=(8, 0), modules=linear, packages=("torchao",))
    assert "no float8 tensor cores" in fp8_linear.eligible(ampere).reason
    hopper = {"device": "cuda", "capability": (9, 0), "modules": linear}
    assert "pip install 'saturate[torchao]'" in fp8_linear.eligible(Facts(**hopper)).reason
    assert fp8_linear.eligible(Facts(**hopper, packages=("torchao",)))
    assert "float16" in fp8_linear.eligible(Facts(**hopper, packages=("torchao",), grad_scaler=True)).reason
    assert "AMD" in fp8_linear.eligible(Facts(**hopper, packages=("torchao",), rocm=True)).reason


@pytest.mark.filterwarnings("ignore")
def test_float8_layers_share_parameters_and_store_plainly() -> None:
    pytest.importorskip("torchao")
    import dataclasses

    from torchao.float8 import Float8LinearConfig

    emulated = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 30))
    keys, weight = list(net.state_dict()), net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    context = context_of(net, optimizer)
    assert fp8_linear.convert(context, emulated, least=32).startswith("1 linear layers")     # 30 does not divide by 16
    exact = torch.nn.functional.linear(torch.ones(16, 32), weight, net[0].bias)
    assert (net[0](torch.ones(16, 32)) - exact).norm() < 0.2 * exact.norm()
    net(torch.ones(16, 32)).sum().backward()
    optimizer.step()
    assert context.notes["fp8-linear"] == "1 layers ran in float8"
    assert type(net[0]) is not torch.nn.Linear and isinstance(net[0], torch.nn.Linear)
    assert net[0].weight is weight and weight.grad is not None and list(net.state_dict()) == keys
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(other[0]) is torch.nn.Linear and torch.equal(other[0].weight, weight) and other[0].weight is not weight
    context.undo()
    assert type(net[0]) is torch.nn.Linear and net[0].weight is weight
    with pytest.raises(NotApplied, match="no linear layer"):
        fp8_linear.convert(context, emulated, least=512)
