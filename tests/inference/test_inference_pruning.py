"""Cutting channels, heads and hidden units: what is found, what is left alone, and that nothing else changes."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pruning works on torch modules")

from prunable import CASES, Net, images  # noqa: E402 - after the check for torch
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from saturate.inference.batches import tensors  # noqa: E402
from saturate.inference.pruning import attention, channels, propagation, shrink, surgery  # noqa: E402
from saturate.inference.pruning.groups import Group, groups  # noqa: E402
from saturate.inference.pruning.labels import Atoms  # noqa: E402
from saturate.inference.pruning.propagation import Labels  # noqa: E402
from saturate.inference.pruning.tracing import plain_attention, record  # noqa: E402
from saturate.inference.techniques._api import NotApplied  # noqa: E402


def made(name: str) -> tuple[Any, tuple[Any, ...], dict[str, int]]:
    """Model in eval mode with statistics that are not the identity, a batch, expected widths."""
    torch.manual_seed(3)
    make, batch, widths = CASES[name]
    model = make().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.weight, 1, 0.3)
    return model, batch(), widths


def cut(model: Any, batch: tuple[Any, ...], **options: Any) -> tuple[Any, shrink.Shrunk]:
    return shrink.shrink(torch, model, [batch], [], **{"ratio": 0.5, "multiple": 8, **options})


def outputs(model: Any, batch: tuple[Any, ...]) -> list[Any]:
    with torch.no_grad():
        return tensors(torch, model(*batch))


@pytest.mark.parametrize("name", CASES)
def test_layers_become_narrower_and_the_model_stays_a_model(name: str) -> None:
    model, batch, widths = made(name)
    before = copy.deepcopy(model.state_dict())
    smaller, report = cut(model, batch)
    for path, width in widths.items():
        module, _, attribute = path.rpartition(".")
        assert getattr(smaller.get_submodule(module), attribute) == width, path
    assert report.parameters[1] == sum(parameter.numel() for parameter in smaller.parameters()) < report.parameters[0]
    assert report.flops[1] < 0.8 * report.flops[0]
    assert type(smaller) is type(model) and not smaller.training
    for few in (batch, tuple(tensor[:1] for tensor in batch), tuple(torch.cat([tensor, tensor[:3]]) for tensor in batch)):
        assert [tensor.shape for tensor in outputs(smaller, few)] == [tensor.shape for tensor in outputs(model, few)]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items()), "the original has changed"
    again = copy.deepcopy(smaller)
    again.load_state_dict(smaller.state_dict())
    assert torch.equal(outputs(again, batch)[0], outputs(smaller, batch)[0])


@pytest.mark.parametrize("name", CASES)
def test_cutting_channels_that_are_exactly_zero_changes_nothing(name: str) -> None:
    model, batch, _ = made(name)
    trace = record(torch, model, batch)
    labels = Labels(torch, trace)
    zeroed: set[int] = set()
    with torch.no_grad():
        for group in groups(trace, labels):
            if group.width(0.5, 8) == len(group.classes) or group.rivals & zeroed:
                continue
            zeroed.update(group.roots)
            for indices in group.classes[: len(group.classes) - group.width(0.5, 8)]:
                for (place, dim), which in indices.items():
                    trace.leaves[place].tensor.index_fill_(dim, torch.tensor(which), 0)
    assert zeroed
    smaller, report = cut(model, batch, by="magnitude")
    for few in (batch, tuple(tensor[:1] for tensor in batch)):
        for one, other in zip(outputs(model, few), outputs(smaller, few)):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert report.flops[1] < report.flops[0]


@pytest.mark.parametrize("name", ["convolutional", "encoder", "shared heads"])
def test_it_can_be_exported(name: str) -> None:
    model, batch, _ = made(name)
    smaller, _ = cut(model, batch)
    program = torch.export.export(smaller, batch).module()
    torch.testing.assert_close(outputs(program, batch)[0], outputs(smaller, batch)[0], rtol=1e-4, atol=1e-5)


def test_channels_that_are_added_go_together() -> None:
    torch.manual_seed(0)

    def run(net: Any, x: Any) -> Any:
        x = functional.relu(net.stem(x), inplace=True)
        y = net.norm2(net.second(functional.relu(net.norm1(net.first(x)), inplace=True)))
        y += x
        return net.out(functional.adaptive_avg_pool2d(y.relu_(), 1).flatten(1))

    model = Net(run, stem=nn.Conv2d(3, 16, 3, padding=1), first=nn.Conv2d(16, 24, 3, padding=1, bias=False), norm1=nn.BatchNorm2d(24),
                second=nn.Conv2d(24, 16, 3, padding=1), norm2=nn.BatchNorm2d(16), out=nn.Linear(16, 5)).eval()
    with torch.no_grad():
        model.second.weight[:8] = 0     # the second layer alone would keep the other half
        model.stem.weight[8:] *= 1e-3
        model.out.weight[:, 8:] *= 1e-3
        model.first.weight[:, 8:] *= 1e-3
    smaller, _ = cut(model, images())
    assert torch.equal(smaller.stem.weight, model.stem.weight[:8]) and torch.equal(smaller.norm2.weight, model.norm2.weight[:8])
    assert smaller.second.weight.shape == (8, 16, 3, 3) and smaller.first.weight.shape == (16, 8, 3, 3)


def test_groups_of_a_convolution_go_as_a_whole() -> None:
    torch.manual_seed(0)

    def run(net: Any, x: Any) -> Any:
        x = functional.relu(net.norm(net.group(functional.relu(net.before(x)))))
        return net.out(functional.silu(net.up(x)))

    model = Net(run, before=nn.Conv2d(3, 32, 1), group=nn.Conv2d(32, 64, 3, padding=1, groups=8), norm=nn.GroupNorm(8, 64),
                up=nn.ConvTranspose2d(64, 24, 2, 2), out=nn.Conv2d(24, 5, 1)).eval()
    smaller, _ = cut(model, images())
    assert (smaller.group.groups, smaller.group.in_channels, smaller.group.out_channels) == (4, 16, 32)
    assert (smaller.norm.num_groups, smaller.norm.num_channels) == (4, 32)
    assert (smaller.up.in_channels, smaller.up.out_channels, smaller.before.out_channels) == (32, 16, 16)


def test_the_least_important_channels_go() -> None:
    """By what they move in the outputs, not by their size: a large weight that nobody listens to is worth nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    with torch.no_grad():
        model[0].weight[::2] *= 100
        model[2].weight[:, ::2] *= 1e-6
    by_outputs, report = cut(model, (torch.randn(64, 6),))
    assert torch.equal(by_outputs[0].weight, model[0].weight[1::2]) and "move" in report.scored_by
    with torch.no_grad():
        model[2].weight[:, ::2] *= 1e6
    by_size, report = cut(model, (torch.randn(64, 6),), by="magnitude")
    assert torch.equal(by_size[0].weight, model[0].weight[::2]) and "magnitude" in report.scored_by


def test_outputs_without_a_gradient_are_said() -> None:
    model = Net(lambda net, x: net.out(functional.relu(net.into(x))).argmax(-1), into=nn.Linear(6, 16), out=nn.Linear(16, 3)).eval()
    with pytest.raises(NotApplied, match="argmax"):     # the scores that are compared have to stay, the width before does too
        cut(Net(lambda net, x: net.into(x).argmax(-1), into=nn.Linear(6, 16)).eval(), (torch.randn(8, 6),))
    _, report = cut(model, (torch.randn(8, 6),))
    assert "no gradient" in report.sentence()


def test_what_counts_on_its_width_is_left_alone_and_said() -> None:
    model, batch, _ = made("stubborn")
    _, report = cut(model, batch)
    assert report.left_alone["its code counts on the width"] > 0 and "its code counts on the width" in report.sentence()


@pytest.mark.parametrize("make, batch, reason", [
    (lambda: nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4)), lambda: (torch.randn(2, 8),), "native_layer_norm"),
    (lambda: nn.Sequential(nn.Linear(8, 32), nn.Softmax(-1), nn.Linear(32, 4)), lambda: (torch.randn(2, 8),), "softmax"),
    (lambda: nn.Linear(8, 32), lambda: (torch.randn(2, 8),), "the model's outputs"),
    (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), lambda: (torch.randn(2, 8),), "too narrow"),
    (lambda: Net(lambda net, x: net.out(net.into(x).cumsum(-1)), into=nn.Linear(8, 32), out=nn.Linear(32, 4)), lambda: (torch.randn(2, 8),), "cumsum"),
    (lambda: Net(lambda net, x: net.out(torch.fft.fft(net.into(x)).real), into=nn.Linear(8, 32), out=nn.Linear(32, 4)),
     lambda: (torch.randn(2, 8),), "_fft"),
])
def test_nothing_to_cut_is_refused_with_the_reason(make: Callable[[], Any], batch: Callable[[], Any], reason: str) -> None:
    with pytest.raises(NotApplied, match=reason):
        cut(make().eval(), batch())


def test_control_flow_that_depends_on_data_is_no_obstacle() -> None:
    def run(net: Any, x: Any) -> Any:
        y = functional.relu(net.first(x))
        if y.sum().item() > 0:      # the first width was read, so it stays
            y = functional.relu(net.second(y))
        return net.out(y)

    model = Net(run, first=nn.Linear(8, 32), second=nn.Linear(32, 32), out=nn.Linear(32, 3)).eval()
    smaller, _ = cut(model, (torch.randn(4, 8).abs(),))
    assert smaller.first.out_features == 32 and smaller.second.out_features == 16


def test_results_that_nobody_uses_do_not_hold_a_width() -> None:
    """nn.MultiheadAttention averages its weights over the heads even where they are thrown away."""
    torch.manual_seed(0)
    model = Net(lambda net, x: net.out(net.attention(x, x, x)[0]), attention=nn.MultiheadAttention(32, 4, batch_first=True), out=nn.Linear(32, 3)).eval()
    smaller, _ = cut(model, (torch.randn(2, 5, 32),))
    assert smaller.attention.num_heads == 2
    kept = Net(lambda net, x: net.attention(x, x, x), attention=nn.MultiheadAttention(32, 4, batch_first=True)).eval()
    with pytest.raises(NotApplied, match="mean"):
        cut(kept, (torch.randn(2, 5, 32),))


def test_a_mask_for_each_head_keeps_the_heads() -> None:
    model = Net(lambda net, x, mask: net.attention(x, x, x, attn_mask=mask, need_weights=False)[0],
                attention=nn.MultiheadAttention(32, 4, batch_first=True)).eval()
    with pytest.raises(NotApplied, match="baddbmm|attention"):
        cut(model, (torch.randn(2, 5, 32), torch.zeros(8, 5, 5)))


@pytest.mark.parametrize("name", ["native_layer_norm", "_scaled_dot_product_flash_attention_for_cpu"])
def test_a_rule_that_is_wrong_is_caught_by_the_proof(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The analysis is not trusted: with a rule that ties too little, every wrong cut is taken back."""
    model, batch, _ = made("fused")
    if name == "native_layer_norm":
        monkeypatch.setitem(propagation.RULES, name, channels.pointwise)
    else:
        monkeypatch.setitem(propagation.RULES, name, lambda labels, call: [labels.of(call.arguments["value"])])
    trace = record(torch, model, batch)
    wrong = [group for group in groups(trace, Labels(torch, trace)) if group.width(0.5, 8) < len(group.classes)]
    assert len(wrong) > 4 or name != "native_layer_norm", "the planted bug shows no new group"
    smaller, report = cut(model, batch)
    assert smaller.into.out_features == 32 and [layer.out_features for layer in smaller.up] == [64, 64]
    if name == "native_layer_norm":
        assert report.left_alone.total() >= 1


def test_a_wrong_cut_shows_even_where_the_outputs_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a scale of zero nothing reaches the outputs; the layers in between are compared too."""
    torch.manual_seed(0)
    model = Net(lambda net, x: x + 0.0 * net.out(torch.softmax(net.into(x), -1)), into=nn.Linear(8, 32), out=nn.Linear(32, 8)).eval()
    monkeypatch.setitem(propagation.RULES, "_softmax", channels.pointwise)
    with pytest.raises(NotApplied, match="computes something else"):
        cut(model, (torch.randn(4, 8),))


def test_a_failed_attempt_leaves_no_trace() -> None:
    """Attributes and parameters that were changed for a cut that did not work are put back."""
    model, batch, _ = made("stubborn")
    smaller, _ = cut(model, batch)
    for one, other in zip(model.attention, smaller.attention):
        assert {key: value for key, value in vars(one).items() if isinstance(value, int)} == {
            key: value for key, value in vars(other).items() if isinstance(value, int)}
        assert all(torch.equal(before, after) for before, after in zip(one.parameters(), other.parameters()))


def test_time_memory_and_odd_tensors_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, _ = made("convolutional")
    with pytest.raises(NotApplied, match="time ended"):
        cut(model, batch, deadline_s=time.monotonic() - 1)
    monkeypatch.setattr(propagation, "MAX_ATOMS", 100)
    with pytest.raises(NotApplied, match="too large"):
        cut(model, batch)

    class Odd(torch.Tensor):
        pass

    odd = torch.randn(10, 64).as_subclass(Odd)
    model.out._parameters["weight"] = nn.Parameter(odd)
    monkeypatch.setattr(Odd, "__deepcopy__", lambda self, memo: self, raising=False)
    with pytest.raises(NotApplied, match="out.weight is a Odd"):
        cut(model, batch)


def test_random_states_and_flags_stay() -> None:
    model, batch, _ = made("convolutional")
    model.requires_grad_(False)
    model.out.weight.requires_grad_(True)
    state = torch.get_rng_state()
    smaller, _ = cut(model, batch)
    assert torch.equal(state, torch.get_rng_state())
    assert [name for name, parameter in smaller.named_parameters() if parameter.requires_grad] == ["out.weight"]
    assert all(parameter.grad is None for parameter in smaller.parameters())
    again, _ = cut(model, batch)
    assert all(torch.equal(one, other) for one, other in zip(smaller.parameters(), again.parameters())), "not reproducible"


def test_a_width_that_another_batch_size_defeats_is_refused() -> None:
    """The code asks for the width only for small batches."""
    def run(net: Any, x: Any) -> Any:
        y = functional.relu(net.into(x))
        return net.out(y if len(x) > 1 else y.view(1, 32))

    model = Net(run, into=nn.Linear(8, 32), out=nn.Linear(32, 3)).eval()
    with pytest.raises(NotApplied, match="another batch size"):
        cut(model, (torch.randn(4, 8),))


# -- attention with fewer heads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("separate", [True, False])
def test_attention_without_two_heads_is_attention_with_zeros(batch_first: bool, separate: bool) -> None:
    torch.manual_seed(0)
    sizes = {"kdim": 24, "vdim": 20} if separate else {}
    full = nn.MultiheadAttention(32, 4, batch_first=batch_first, **sizes).eval()
    nn.init.normal_(full.in_proj_bias)
    rows = torch.arange(96).view(3, 4, 8)[:, 1:3].flatten()
    with torch.no_grad():
        for weight in [full.in_proj_weight] if not separate else []:
            weight[rows] = 0
        for weight in (full.q_proj_weight, full.k_proj_weight, full.v_proj_weight) if separate else ():
            weight[8:24] = 0
        full.in_proj_bias[rows] = 0
        full.out_proj.weight[:, 8:24] = 0
    small = copy.deepcopy(full)
    keep = torch.tensor([*range(8), *range(24, 32)])
    leaves = {name: parameter.detach() for name, parameter in small.named_parameters()}
    for name, weight in leaves.items():
        if name == "out_proj.weight":
            small.out_proj.weight = nn.Parameter(weight[:, keep])
        elif name == "in_proj_weight":
            small.in_proj_weight = nn.Parameter(weight[torch.cat([keep, keep + 32, keep + 64])])
        elif name == "in_proj_bias":
            small.in_proj_bias = nn.Parameter(weight[torch.cat([keep, keep + 32, keep + 64])])
        elif name.endswith("_proj_weight"):
            setattr(small, name, nn.Parameter(weight[keep]))
    small.num_heads = 2
    surgery._refit_attention(torch, small, surgery.Undo())
    assert type(small) is attention.PrunedMultiheadAttention and small.num_heads == 2 and isinstance(small, nn.MultiheadAttention)
    shape = (lambda length, width: (3, length, width)) if batch_first else (lambda length, width: (length, 3, width))
    key_width, value_width = (24, 20) if separate else (32, 32)
    query, key, value = torch.randn(shape(5, 32)), torch.randn(shape(7, key_width)), torch.randn(shape(7, value_width))
    padding = torch.arange(7)[None] >= torch.tensor([[7], [5], [2]])
    causal = torch.ones(5, 7, dtype=torch.bool).triu(3)
    for options in ({}, {"attn_mask": causal}, {"key_padding_mask": padding}, {"attn_mask": causal, "key_padding_mask": padding},
                    {"attn_mask": torch.randn(5, 7)}):
        for weights in (True, False):
            expected, found = (layer(query, key, value, need_weights=weights, **options) for layer in (full, small))
            torch.testing.assert_close(expected[0], found[0], rtol=1e-4, atol=1e-5)
            assert weights or found[1] is None
    expected, found = (layer(query[0], key[0], value[0], average_attn_weights=False) for layer in (full, small))
    torch.testing.assert_close(expected[0], found[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(expected[1][[0, 3]], found[1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="each head"):
        small(query, key, value, attn_mask=torch.zeros(12, 5, 7))
    twin = pickle.loads(pickle.dumps(small))        # of our own making
    torch.testing.assert_close(twin(query, key, value)[0], small(query, key, value)[0])
    assert all(torch.equal(one, other) for one, other in zip(copy.deepcopy(small).parameters(), small.parameters()))


def test_attention_that_loses_outputs_alone_runs_where_torch_fuses_it() -> None:
    """The fused forward is off during the proofs and on afterwards."""
    torch.manual_seed(0)
    model = Net(lambda net, x: net.out(functional.relu(net.attention(x, x, x, need_weights=False)[0])),
                attention=nn.MultiheadAttention(32, 2, batch_first=True), out=nn.Linear(32, 3)).eval().requires_grad_(False)
    smaller, _ = cut(model, (torch.randn(1, 5, 32),), heads=False)
    assert smaller.attention.num_heads == 2 and smaller.out.in_features == 16
    x = torch.randn(3, 5, 32)
    with plain_attention(torch):
        expected = smaller(x)
    torch.testing.assert_close(smaller(x), expected, rtol=1e-4, atol=1e-5)


def test_infinite_outputs_hide_nothing() -> None:
    one = torch.tensor([1.0, -torch.inf, 2.0])
    assert shrink._close(torch, one, one.clone()) and shrink._close(torch, one, one * (1 + 1e-6))
    assert not shrink._close(torch, one, torch.tensor([1.1, -torch.inf, 2.0]))
    assert not shrink._close(torch, one, torch.tensor([1.0, 3.0, 2.0]))
    assert not shrink._close(torch, torch.zeros(3), torch.tensor([0.0, 1e-6, 0.0]))


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_attention_that_cannot_lose_heads_is_left_alone(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model = Net(lambda net, x: net.out(functional.relu(net.up(net.attention(x, x, x, need_weights=False)[0]))),
                attention=nn.MultiheadAttention(32, 4, batch_first=True, **options), up=nn.Linear(32, 32), out=nn.Linear(32, 3)).eval()
    smaller, _ = cut(model, (torch.randn(2, 5, 32),))
    assert smaller.attention.num_heads == 4 and smaller.up.out_features == 16


# -- the parts --------------------------------------------------------------------------------------------------------------


def test_reshaping_splits_and_merges_what_goes_together() -> None:
    atoms = Atoms(1000)
    long = atoms.fresh(12)
    heads, inner = atoms.split(long, [3, 4])
    assert all(set(atoms.parts(long[4 * head + place])) == {atoms.root(heads[head]), atoms.root(inner[place])}
               for head in range(3) for place in range(4))
    again = atoms.merge([heads, inner], [3, 4])
    assert [atoms.parts(one) for one in again] == [atoms.parts(one) for one in long]
    atoms.fix_all(inner)
    assert [atoms.parts(one) for one in long] == [(atoms.root(heads[index // 4]),) for index in range(12)]
    flat = atoms.merge([None, heads, None], [2, 3, 2])
    assert flat == [heads[index // 2 % 3] for index in range(12)]
    assert atoms.split(flat, [2, 3, 2]) == [None, heads, None]


def test_an_axis_in_two_orders_is_still_itself() -> None:
    """The channel shuffle: 2 x 6 channels become 6 x 2."""
    atoms = Atoms(1000)
    first, second = atoms.fresh(12), atoms.fresh(12)
    rows, columns = atoms.split(first, [2, 6])
    atoms.match(atoms.merge([columns, rows], [6, 2]), second)
    assert set(atoms.parts(second[1])) == set(atoms.parts(first[6]))
    assert len({atoms.root(row) for row in rows}) == 2 and len({atoms.root(column) for column in columns}) == 6


def test_what_is_tied_to_a_fixed_index_stays() -> None:
    atoms = Atoms(1000)
    one, other = atoms.fresh(4), atoms.fresh(4)
    atoms.match(one, other)
    atoms.reason = "a test"
    atoms.fix(other[2])
    assert atoms.parts(one[2]) == () and atoms.parts(one[1]) == atoms.parts(other[1]) != ()
    atoms.match(one, None)
    assert not any(atoms.parts(atom) for atom in other) and atoms.fixed_by["a test"] == 4


@pytest.mark.parametrize("classes, unit, ratio, multiple, width", [
    (64, 1, 0.5, 8, 32), (64, 1, 0.25, 8, 48), (24, 1, 0.25, 8, 16), (20, 1, 0.5, 8, 8), (8, 1, 0.5, 8, 8), (12, 64, 0.25, 8, 9),
    (12, 64, 0.25, 16, 9), (6, 4, 0.5, 8, 4), (64, 1, 0.05, 8, 64), (4, 8, 0.9, 8, 1), (32, 1, 0.99, 16, 16),
])
def test_widths_stay_multiples(classes: int, unit: int, ratio: float, multiple: int, width: int) -> None:
    indices = tuple({(0, 0): list(range(unit))} for _ in range(classes))
    group = Group(tuple(range(classes)), indices, frozenset(), False)
    assert group.width(ratio, multiple) == width


def test_attributes_are_tried_from_few_to_many() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    tried = list(surgery.attempts([(one, "sure", 1)], [(one, "a", 2), (other, "a", 2), (one, "b", 3)]))
    assert [[change[1] for change in changes] for changes in tried] == [
        ["sure"], ["sure", "a", "a"], ["sure", "b"], ["sure", "a", "a", "b"], []]
    many = [(one, str(index), 1) for index in range(20)]
    assert len(list(surgery.attempts([], many))) == surgery.MAX_ATTEMPTS
