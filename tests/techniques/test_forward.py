"""Techniques that wrap the forward: what the user gets back, and proofs that can fail."""

from __future__ import annotations

import collections
import collections.abc
import copy
import dataclasses
import inspect
import io
import pickle
import shutil
import subprocess
import sys
import threading
import time
import types

import pytest

torch = pytest.importorskip("torch")

from saturate.agent import seams  # noqa: E402 - after the import that decides whether to run at all
from saturate.agent.context import Context  # noqa: E402
from saturate.agent.facts import _module_facts  # noqa: E402
from saturate.agent.forwards import forward_overridden, is_ours  # noqa: E402
from saturate.records.facts import Evidence, Facts, MachineFacts, ModuleFacts  # noqa: E402
from saturate.techniques import (  # noqa: E402
    _autocast,
    _common,
    allocator,
    bf16_autocast,
    channels_last,
    compile,
    cudnn_benchmark,
    fp16_autocast,
    sdpa_backend,
    tf32,
)
from saturate.techniques._api import NotApplied  # noqa: E402
from saturate.testing import toy  # noqa: E402


def context_of(*modules, optimizers=()):
    context = Context(torch)
    context.modules, context.optimizers, context.device = modules, optimizers, "cpu"
    context.held_by_the_script = modules, optimizers        # a context itself keeps none
    return context


def evidence_of(context, **fields):
    return Evidence(notes=dict(context.notes), **fields)


# -- trees of tensors ------------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: object
    text: str = "kept"


class Output(collections.OrderedDict):
    """Stands for a ModelOutput: a mapping that cannot be built from its items."""

    def __init__(self, first):
        super().__init__()
        self["first"] = first


def test_map_tensors_keeps_every_container():
    one = torch.ones(2)
    tree = {
        "tuple": (one, 1), "list": [one, None], "pair": Pair(one, "x"), "frozen": Frozen(one), "output": Output(one),
        "size": one.shape, "text": "abc", "maximum": torch.max(one.expand(2, 2), 1), "time": time.localtime(),
    }
    mapped = _common.map_tensors(tree, lambda tensor: tensor + 1, torch)
    assert [type(value) for value in mapped.values()] == [type(value) for value in tree.values()]
    assert len(_common.tensors(mapped, torch)) == 7
    assert all(tensor.eq(2).all() for tensor in _common.tensors({**mapped, "maximum": mapped["maximum"].values}, torch))
    assert mapped["maximum"].indices.tolist() == [1, 1] and mapped["time"] is tree["time"]
    assert mapped["frozen"].text == "kept" and mapped["size"] == one.shape and mapped["pair"].right == "x"


class Rows(collections.abc.MutableMapping):
    """Stands for a TensorDict: a mapping that iterates over its rows, and may be locked."""

    def __init__(self, locked, **tensors):
        self.tensors, self.locked = tensors, locked

    def __iter__(self):
        return iter(range(len(next(iter(self.tensors.values())))))

    def keys(self):
        return self.tensors.keys()

    def __len__(self):
        return len(self.tensors)

    def __getitem__(self, key):
        return self.tensors[key]

    def __setitem__(self, key, value):
        if self.locked:
            raise RuntimeError("Cannot modify locked TensorDict")
        self.tensors[key] = value

    __delitem__ = None


def test_a_mapping_is_changed_by_its_keys_and_only_where_something_changes():
    given = Rows(True, whole=torch.ones(2), half=torch.ones(2))
    assert _common.map_tensors(given, lambda tensor: tensor, torch) is given and len(_common.tensors(given, torch)) == 2
    given = Rows(False, whole=torch.ones(2), half=torch.ones(2, dtype=torch.bfloat16))
    _common.map_tensors(given, torch.Tensor.float, torch)
    assert given["half"].dtype == given["whole"].dtype == torch.float32


# -- autocast --------------------------------------------------------------------------------------------------------


class Nested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.seen = None

    def forward(self, x):
        hidden = self.layer(x)
        self.seen = hidden.dtype
        return {"hidden": hidden, "more": (hidden, [Frozen(hidden)]), "integers": torch.ones(1, dtype=torch.int64)}


@pytest.mark.parametrize("technique,dtype", [(bf16_autocast, torch.bfloat16), (fp16_autocast, torch.float16)])
def test_autocast_computes_low_and_returns_float32(technique, dtype):
    model = Nested().train()
    context = context_of(model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),))
    technique.apply(context, technique.Options())
    assert not technique.active(evidence_of(context), technique.Options()).active       # not called yet
    output = model(torch.rand(2, 8))
    assert model.seen == dtype
    assert [tensor.dtype for tensor in _common.tensors(output, torch)] == [torch.float32] * 3 + [torch.int64]
    proof = technique.active(evidence_of(context), technique.Options())
    assert proof.active and "Addmm" in proof.evidence
    model.eval()(torch.rand(2, 8))
    assert model.seen == torch.float32
    context.undo()


class Policy(torch.nn.Module):
    """Its forward returns a distribution, as those of agents and of variational autoencoders do."""

    def __init__(self, make):
        super().__init__()
        self.layer, self.make = torch.nn.Linear(8, 8), make

    def forward(self, x):
        return self.make(self.layer(x))


DISTRIBUTIONS = {
    "normal": lambda h: torch.distributions.Independent(torch.distributions.Normal(h, h.exp()), 1),
    "categorical": lambda h: torch.distributions.Categorical(logits=h),
    "squashed": lambda h: torch.distributions.TransformedDistribution(
        torch.distributions.Normal(h, torch.ones(8)), [torch.distributions.transforms.SigmoidTransform()]),
    "mixture": lambda h: torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=h), torch.distributions.Normal(h, h.exp())),
}


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("technique", [bf16_autocast, fp16_autocast])
def test_a_distribution_comes_back_in_float32(technique, kind):
    """Seen in a PPO: its actions were bfloat16, which numpy does not know, and their probabilities would have been computed so."""
    model = Policy(DISTRIBUTIONS[kind]).train()
    context = context_of(model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),))
    technique.apply(context, technique.Options())
    output = model(torch.rand(2, 8))
    action = output.sample()
    assert type(output) is type(model.make(torch.rand(2, 8)))
    assert output.log_prob(action).dtype == torch.float32 and action.dtype in (torch.float32, torch.int64)
    assert technique.active(evidence_of(context), technique.Options()).active
    output.log_prob(action).sum().backward()
    assert model.layer.weight.grad.dtype == torch.float32
    context.undo()


def test_a_distribution_that_a_module_keeps_stays_as_it_is():
    """A learned prior held copies of its weights from then on, and each of its tensors twice."""
    weights = torch.nn.Parameter(torch.zeros(3))
    prior = torch.distributions.Independent(torch.distributions.Categorical(logits=weights[None]), 1)
    before = dict(vars(prior.base_dist))
    other = _common.map_tensors(prior, torch.clone, torch)
    assert all(vars(prior.base_dist)[name] is value for name, value in before.items())
    assert other is not prior and other.base_dist.logits is other.base_dist._param is not prior.base_dist._param
    assert torch.equal(other.log_prob(torch.zeros(1)), prior.log_prob(torch.zeros(1)))


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_comes_first(without):
    """As a script asks for an action, or for a target, before it trains. Seen: "nothing in the autograd graph was computed in bfloat16"."""
    model = Nested().train()
    context = context_of(model)
    bf16_autocast.apply(context, bf16_autocast.Options())
    with without():
        model(torch.rand(2, 8))
    assert not bf16_autocast.active(evidence_of(context), bf16_autocast.Options()).active
    model(torch.rand(2, 8))
    assert bf16_autocast.active(evidence_of(context), bf16_autocast.Options()).active
    context.undo()


class Scatters(torch.nn.Module):
    """Mixes what it computed with a float32 tensor of its own in an operator that takes one type only, as MTGNN does."""

    def __init__(self):
        super().__init__()
        self.layer, self.conv = torch.nn.Linear(8, 8), torch.nn.Conv1d(1, 2, 3)

    def forward(self, x):
        hidden = self.layer(x)
        kept = torch.zeros(len(x), 8).scatter(1, torch.arange(8).repeat(len(x), 1), hidden)
        return self.conv(kept[:, None])


def test_layers_alone_compute_in_bfloat16_where_the_forward_does_not_run_under_autocast():
    model, x = Scatters().train(), torch.rand(4, 8)
    expected, context = model(x), context_of(model)
    bf16_autocast.apply(context, bf16_autocast.Options())
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)
    context.undo()
    context = context_of(model)
    said = bf16_autocast.apply(context, bf16_autocast.Options(scope="layers"))
    assert said == "forward of 2 linear and convolution layer(s) under bfloat16 autocast, outputs in float32"
    output = model(x)
    assert output.dtype == torch.float32 and not torch.equal(output, expected) and torch.allclose(output, expected, atol=0.05)
    assert bf16_autocast.active(evidence_of(context), bf16_autocast.Options()).active
    output.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in model.parameters())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), output)
    assert torch.equal(model.eval()(x), expected)
    context.undo()
    assert torch.equal(model.train()(x), expected)


def test_layers_alone_are_refused_where_there_is_none():
    with pytest.raises(NotApplied, match="no layer that could compute in bfloat16"):
        bf16_autocast.apply(context_of(torch.nn.LSTM(4, 4).train()), bf16_autocast.Options(scope="layers"))


class Reads(torch.nn.Module):
    """An LSTM between layers that is given states and a packed sequence, as a script may have computed them."""

    def __init__(self):
        super().__init__()
        self.layer, self.lstm, self.head = torch.nn.Linear(4, 8), torch.nn.LSTM(8, 8), torch.nn.Linear(8, 2)
        self.formats = []

    def forward(self, x):
        hidden = self.layer(x)
        found, state = self.lstm(hidden, (hidden[:1], hidden[1:2]))
        found, _ = self.lstm(torch.nn.utils.rnn.pack_padded_sequence(found, [3, 2]), state)
        self.formats.append((hidden.dtype, found.data.dtype))
        return self.head(found.data)


@pytest.mark.parametrize("runs", [None, False])
@pytest.mark.parametrize("technique,narrow", [(bf16_autocast, torch.bfloat16), (fp16_autocast, torch.float16)])
def test_an_lstm_stays_in_float32_where_torch_has_none_in_the_format(technique, narrow, runs, monkeypatch):
    """On CPUs without AVX-512 torch asks for a kernel that there is not, and the script would end."""
    model, x = Reads().train(), torch.rand(3, 2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected, context = model(x), context_of(model, optimizers=(optimizer,))
    if runs is False:
        monkeypatch.setattr(_autocast, "runs_lstm", lambda context, dtype: False)
    runs = _autocast.runs_lstm(context, narrow)
    drawn = torch.get_rng_state()
    technique.apply(context, technique.Options())
    assert torch.equal(drawn, torch.get_rng_state())
    output = model(x)
    assert output.dtype == torch.float32 and torch.allclose(output, expected, atol=0.05)
    assert model.formats[-1] == (narrow, narrow if runs else torch.float32)
    output.sum().backward()
    assert model.layer.weight.grad.any() and model.lstm.weight_hh_l0.grad.any()
    assert technique.active(evidence_of(context), technique.Options()).active
    model.lstm.eval()       # frozen, as a part that is not trained
    assert torch.allclose(model(x), expected, atol=0.05)
    assert torch.equal(model.eval()(x), expected)
    context.undo()
    assert torch.equal(model.train()(x), expected) and not any(map(is_ours, model.modules()))


class Spectral(torch.nn.Module):
    """Written by hand, as many scripts have it: its vectors are parameters that each forward sets."""

    def __init__(self, outputs=8, inputs=8):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(outputs, inputs))
        self.u = torch.nn.Parameter(torch.rand(outputs), requires_grad=False)
        self.register_buffer("v", torch.rand(inputs))

    def forward(self, x):
        self.v.data = torch.nn.functional.normalize(torch.matmul(self.weight.data.t(), self.u.data), dim=0)
        self.u.data = torch.nn.functional.normalize(torch.matmul(self.weight.data, self.v.data), dim=0)
        sigma = self.u.dot(torch.matmul(self.weight, self.v))
        return torch.nn.functional.linear(x, self.weight / sigma)


def test_what_a_forward_sets_on_its_parameters_and_buffers_stays_float32():
    model, x = torch.nn.Sequential(Spectral(), torch.nn.ReLU(), Spectral()).train(), torch.rand(4, 8)
    plain = copy.deepcopy(model)
    context = context_of(model)
    bf16_autocast.apply(context, bf16_autocast.Options())
    for _ in range(2):
        (model(x) - model(-x)).square().sum().backward()        # two forwards before their backward
        (plain(x) - plain(-x)).square().sum().backward()
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    assert all(torch.allclose(ours, theirs, atol=0.02) for ours, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    assert torch.allclose(model[0].weight.grad, plain[0].weight.grad, atol=0.05 * float(plain[0].weight.grad.abs().max()))
    assert torch.allclose(model.eval()(x), plain.eval()(x), atol=0.02)
    twin = copy.deepcopy(model).train()
    twin(x)
    assert twin[0].u.dtype == torch.float32
    context.undo()
    assert not is_ours(model)


def test_autocast_without_low_precision_work_is_not_active():
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (self.weight * x).to(torch.bfloat16)     # a cast alone proves nothing

    model = Scale().train()
    context = context_of(model)
    bf16_autocast.apply(context, bf16_autocast.Options())
    assert model(torch.rand(4)).dtype == torch.float32
    assert not bf16_autocast.active(evidence_of(context), bf16_autocast.Options()).active


@pytest.mark.parametrize("technique", [bf16_autocast, fp16_autocast])
def test_autocast_is_not_put_around_a_script_that_autocasts_itself(technique):
    """Its own nodes of the autograd graph would be taken for what the technique did."""
    model = Nested().train()
    context = context_of(model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),))
    context.autocast = "bfloat16"
    with pytest.raises(NotApplied, match="the script already runs under bfloat16 autocast"):
        technique.apply(context, technique.Options())
    assert not context.changes


@pytest.mark.parametrize("technique", [bf16_autocast, fp16_autocast])
def test_autocast_is_not_put_around_a_forward_that_trains(technique):
    """The backward pass would run under autocast as well, and the optimizer's step."""
    model = Nested().train()
    context = context_of(model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),))
    context.steps_in_forward = True
    with pytest.raises(NotApplied, match="the model's forward trains it"):
        technique.apply(context, technique.Options())
    assert not context.changes


class OnSeveralDevices(torch.nn.DataParallel):
    """As where there are GPUs."""

    def __init__(self, module, count):
        super().__init__(module)
        self.device_ids = list(range(count))


@pytest.mark.parametrize(("technique", "count", "inside", "refused"), [
    (bf16_autocast, 2, False, True), (bf16_autocast, 2, True, True), (bf16_autocast, 1, False, False), (fp16_autocast, 2, False, False),
])
def test_threads_of_data_parallel_would_autocast_to_float16(technique, count, inside, refused):
    """They enter autocast with the dtype that each thread begins with."""
    model = OnSeveralDevices(Nested(), count).train()
    model = torch.nn.Sequential(model) if inside else model
    context = context_of(model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),))
    if refused:
        with pytest.raises(NotApplied, match="DataParallel autocast to float16"):
            technique.apply(context, technique.Options())
        assert not context.changes
    else:
        technique.apply(context, technique.Options())
    context.undo()


class OnItself(torch.nn.Module):
    """As a diffusion model that is conditioned on what it has made before, without a gradient."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.cached = []

    def forward(self, x):
        self.cached.append(torch.is_autocast_cache_enabled())
        with torch.no_grad():
            x = x + self.layer(x)
        return self.layer(x)


@pytest.mark.parametrize("loses", [None, True])
def test_weights_that_are_used_without_a_gradient_first_get_one(loses, monkeypatch):
    """Some versions of torch keep such a weight as it was cast, without a gradient; those are told to keep none."""
    model = OnItself().train()
    context = context_of(model)
    if loses:
        monkeypatch.setattr(_autocast, "cache_loses_gradients", lambda context, dtype: True)
    expected = not _autocast.cache_loses_gradients(context, torch.bfloat16)
    bf16_autocast.apply(context, bf16_autocast.Options())
    model(torch.rand(2, 8)).sum().backward()
    assert model.layer.weight.grad is not None and model.cached == [expected]
    context.undo()


def test_a_replaced_forward_is_refused_but_does_not_spoil_the_others():
    """By techniques that change what a forward gets."""
    ours, theirs = torch.nn.Conv2d(2, 2, 3), torch.nn.Conv2d(2, 2, 3)
    theirs.forward = lambda x: x
    with pytest.raises(NotApplied):
        channels_last.apply(context_of(theirs), channels_last.Options())
    channels_last.apply(context_of(theirs, ours), channels_last.Options())
    assert is_ours(ours) and not is_ours(theirs)


def shifted(module):
    """A forward of the instance's own, as TRL puts one on the models that it trains."""
    plain = type(module).forward
    module.forward = types.MethodType(lambda self, x, scale=2.0: plain(self, x) * scale, module)
    return module


def test_a_replaced_forward_is_wrapped_from_outside():
    model, x = shifted(torch.nn.Linear(8, 8)).train(), torch.rand(2, 8)
    expected, own = model(x), vars(model)["forward"]
    context = context_of(model)
    bf16_autocast.apply(context, bf16_autocast.Options())
    output = model(x)
    assert output.dtype == torch.float32 and not torch.equal(output, expected) and torch.allclose(output, expected, atol=0.1)
    assert bf16_autocast.active(evidence_of(context), bf16_autocast.Options()).active
    assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
    assert torch.equal(model.eval()(x), expected)
    shallow = copy.copy(model)
    assert torch.equal(shallow(x), expected), "its own forward is not lost"
    twin = copy.deepcopy(model.train())
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.fill_(1.0)
    assert torch.equal(twin(x), torch.full((2, 8), 2.0)) and torch.equal(model(x), output)
    context.undo()
    assert vars(model)["forward"] is own and torch.equal(model(x), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused_by_name():
    traced, scripted = torch.jit.trace(torch.nn.Linear(2, 2), torch.rand(1, 2)), torch.jit.script(torch.nn.Linear(2, 2))
    assert not forward_overridden(traced) and forward_overridden(scripted), "facts are asked of both"
    with pytest.raises(NotApplied, match="TorchScript"):
        bf16_autocast.apply(context_of(traced), bf16_autocast.Options())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_the_script_scripted_is_wrapped_from_outside():
    model, x = torch.jit.script(torch.nn.Linear(8, 8)).train(), torch.rand(2, 8)
    expected = model(x)
    context = context_of(model)
    bf16_autocast.apply(context, bf16_autocast.Options())
    output = model(x)
    assert not torch.equal(output, expected) and torch.allclose(output, expected, atol=0.05) and output.requires_grad
    assert torch.equal(copy.deepcopy(model)(x), expected), "a copy runs as it always did"
    context.undo()
    assert torch.equal(model(x), expected)


def test_what_a_library_replaces_can_be_compiled(fresh_dynamo):
    model, x = shifted(torch.nn.Linear(8, 8)).train(), torch.rand(2, 8)
    expected = model(x)
    context = context_of(model)
    compile.apply(context, compile.Options())
    assert torch.allclose(model(x), expected)
    assert compile.active(evidence_of(context, dynamo_frames=frames(fresh_dynamo)), compile.Options()).active


def usual(**changes):
    module = ModuleFacts(kind="Net", dtypes=("float32",), linears=2, convolutions=1, attentions=1)
    return dataclasses.replace(Facts(modules=(module,), machine=MachineFacts(cpu_bf16_native=True, compiler="g++")), **changes)


@pytest.mark.parametrize(
    "changes,allowed",
    [
        ({}, True),
        ({"machine": MachineFacts()}, False),
        ({"device": "cuda"}, False),
        ({"device": "cuda", "cuda_bf16_native": True}, True),
        ({"device": "mps"}, False),
        ({"autocast": "bfloat16"}, False),
        ({"grad_scaler": True}, False),
        ({"modules": (ModuleFacts(dtypes=("bfloat16",), linears=2),)}, False),
        ({"modules": (ModuleFacts(dtypes=("float32",)),)}, False),
        ({"modules": (ModuleFacts(dtypes=("float32",)),), "flops_per_step": 0}, False),
        ({"modules": (ModuleFacts(dtypes=("float32",)),), "flops_per_step": 1}, True),
        ({"modules": (ModuleFacts(dtypes=("float32",), other_convolutions=1),)}, True),
        ({"modules": (ModuleFacts(dtypes=("float32",), linears=2, forward_overridden=True),)}, True),
    ],
)
def test_bf16_is_offered_where_it_is_native(changes, allowed):
    assert bool(bf16_autocast.eligible(usual(**changes))) is allowed


@pytest.mark.parametrize("layers, flops, products, convolutions", [
    ({}, None, False, False), ({}, 5, True, False), ({"linears": 1}, None, True, False), ({"convolutions": 1}, 5, False, True),
    ({"other_convolutions": 1}, 5, False, True), ({"other_convolutions": 1, "attentions": 1}, 5, True, True),
])
def test_products_and_convolutions_decide_on_settings_for_them(layers, flops, products, convolutions):
    facts = usual(device="cuda", capability=(8, 0), flops_per_step=flops, modules=(ModuleFacts(dtypes=("float32",), **layers),))
    assert bool(tf32.eligible(facts)) is products and bool(cudnn_benchmark.eligible(facts)) is convolutions
    assert not tf32.eligible(dataclasses.replace(facts, rocm=True)), "AMD's numbers are higher than 8.0"


def test_convolutions_are_counted_by_their_dimensions():
    conv = torch.nn.Conv1d(1, 2, 1), torch.nn.Conv2d(2, 2, 1, groups=2), torch.nn.ConvTranspose2d(1, 1, 1), torch.nn.ConvTranspose3d(1, 1, 1)
    found = _module_facts(torch, torch.nn.Sequential(*conv, torch.nn.ReLU()), types.SimpleNamespace(compiles=lambda module: False, distributed=False))
    assert (found.convolutions, found.grouped_convolutions, found.other_convolutions) == (2, 1, 2)


# -- float16 loss scaling --------------------------------------------------------------------------------------------


def scaled(parameters, **options):
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9)
    model = torch.nn.Linear(1, 1)
    context = context_of(model, optimizers=(optimizer,))
    fp16_autocast.apply(context, fp16_autocast.Options(**options))
    return context, optimizer


def test_a_default_number_format_of_the_script_is_not_that_of_the_scale():
    weight = torch.nn.Parameter(torch.ones(2))
    context, _ = scaled([weight], initial_scale=1024.0)
    torch.set_default_dtype(torch.float64)
    try:
        (weight * 3).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
        context.undo()
    assert weight.grad.tolist() == [3.0, 3.0]


def seen(tensor, inside):
    """The tensor. Its gradient goes into `inside`, unseen by the technique."""

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx, grad):
            inside.append(grad.clone())
            return grad

    return Seen.apply(tensor)


def test_gradients_are_true_after_backward_also_when_accumulated():
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    inside = []
    context, _ = scaled([weight], initial_scale=1024.0)
    for repeat in (1, 2, 3):
        seen(weight * weight, inside).sum().backward()
        assert torch.equal(weight.grad, repeat * 2 * weight.detach())
    assert torch.equal(inside[0], torch.full((3,), 1024.0))         # it really was scaled on the way
    torch.autograd.backward([weight * 2], [torch.ones(3)])
    assert torch.equal(weight.grad, 6 * weight.detach() + 2)
    context.undo()
    seen(weight, inside).sum().backward()
    assert torch.equal(inside[-1], torch.ones(3))


def test_an_overflow_skips_exactly_one_step_and_halves_the_scale():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    inside = []
    context, optimizer = scaled([weight], initial_scale=64.0, growth_steps=2)
    (weight * float("inf")).sum().backward()
    optimizer.step()
    assert weight.item() == 1.0 and not optimizer.state.get(weight)
    optimizer.zero_grad()
    for _ in range(3):
        seen(weight, inside).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert weight.item() < 1.0
    assert inside == [32.0, 32.0, 64.0]       # halved, then doubled after two good steps
    context.undo()


class Counting(torch.optim.Optimizer):
    """One that does not look whether there is a gradient, and counts its steps."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad


def test_an_overflow_skips_the_step_of_an_optimizer_that_does_not_look_for_gradients():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer, stepped = Counting([weight]), []
    context = context_of(torch.nn.Linear(1, 1), optimizers=(optimizer,))
    fp16_autocast.apply(context, fp16_autocast.Options())
    optimizer.register_step_post_hook(lambda one, args, kwargs: stepped.append(one))
    for factor, expected, count in ((float("inf"), 1.0, 0), (0.25, 0.75, 1), (float("inf"), 0.75, 1), (0.25, 0.5, 2)):
        (weight * factor).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (weight.item(), optimizer.count, optimizer.param_groups[0].get("step", 0)) == (expected, count, count)
    assert stepped == [optimizer] * 4, "it is a step all the same"
    context.undo()


def test_an_overflow_in_a_closure_skips_that_very_step():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    context, optimizer = scaled([weight], initial_scale=64.0)
    inside, factors = [], iter([float("inf"), 1.0, float("inf"), 1.0])

    def closure():
        optimizer.zero_grad()
        loss = (seen(weight, inside) * next(factors)).sum()
        loss.backward()
        return loss

    values = []
    for step in range(4):
        optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
        values.append(weight.item())
    assert values[0] == 1.0 and values[1] < 1.0 and values[2] == values[1] and values[3] < values[2]
    assert inside[1] == 32.0 and inside[3] == 16.0
    context.undo()


def test_nested_backward_is_scaled_once():
    from torch.utils.checkpoint import checkpoint

    layer = torch.nn.Linear(2, 2)
    inputs = torch.rand(1, 2, requires_grad=True)
    layer(inputs).sum().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    inside = []
    context, _ = scaled(layer.parameters(), initial_scale=1024.0)
    checkpoint(lambda x: seen(layer(x), inside), inputs, use_reentrant=True).sum().backward()
    assert torch.equal(layer.weight.grad, expected)
    assert torch.equal(inside[0], torch.full((1, 2), 1024.0))
    context.undo()


@pytest.mark.parametrize("nested", [False, True])
def test_gradients_of_what_no_optimizer_holds_are_true_as_well(nested):
    """Adversarial inputs, a layer that is trained by hand; also where only a nested pass reaches them."""
    from torch.utils.checkpoint import checkpoint

    held, by_hand = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    inputs = torch.rand(1, 2, requires_grad=True)
    leaves = (inputs, by_hand.weight, held.weight)

    def trained():
        for leaf in leaves:
            leaf.grad = None
        for _ in range(2):
            hidden = checkpoint(by_hand, inputs, use_reentrant=True) if nested else by_hand(inputs)
            held(hidden).sum().backward()
        hidden = by_hand(inputs)
        held(hidden).sum().backward(inputs=[hidden, held.weight])
        return [tensor.grad.clone() for tensor in (*leaves, hidden)]

    expected = trained()
    context, optimizer = scaled(held.parameters(), initial_scale=1024.0)
    assert all(map(torch.equal, trained(), expected))
    by_hand.weight.grad.fill_(float("inf"))
    before = held.weight.detach().clone()
    held(by_hand(inputs)).sum().backward()
    optimizer.step()
    assert not torch.equal(held.weight, before), "what no optimizer holds stops no step"
    context.undo()


def _on_a_parameter(model, hidden, hook):
    model[0].weight.register_hook(lambda grad: hook(grad))


def _when_a_gradient_is_complete(model, hidden, hook):
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: hook(parameter.grad))


def _on_a_module(model, hidden, hook):
    model[1].register_full_backward_hook(lambda module, given, got: hook(got[0]))


def _before_a_module(model, hidden, hook):
    model[1].register_full_backward_pre_hook(lambda module, got: hook(got[0]))


def _on_an_intermediate_tensor(model, hidden, hook):
    hidden.register_hook(lambda grad: hook(grad))


def _retained(model, hidden, hook):
    hidden.retain_grad()
    model.after = lambda: hook(hidden.grad)


@pytest.mark.parametrize("look", [
    _on_a_parameter, _when_a_gradient_is_complete, _on_a_module, _before_a_module, _on_an_intermediate_tensor, _retained])
def test_what_looks_at_gradients_inside_of_backward_ends_the_scaling(look, capsys):
    def trained(technique):
        torch.manual_seed(0)
        model, got = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).train(), []
        model.after = lambda: None
        context = context_of(model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),))
        if technique:
            fp16_autocast.apply(context, fp16_autocast.Options())
        for step in range(3):
            hidden = model[0](torch.ones(1, 2))
            if step == 1:
                look(model, hidden, lambda grad: got.append(grad.clone()))
            model[1](hidden).sum().backward()
            model.after()
        if technique:
            model(torch.ones(1, 2))
            proof = fp16_autocast.active(evidence_of(context), fp16_autocast.Options())
            assert not proof.active and "given up: the script" in proof.evidence
        context.undo()
        return [*got, *(parameter.grad for parameter in model.parameters())]

    expected = trained(False)
    assert len(expected) > 4 and all(map(torch.equal, trained(True), expected))
    assert capsys.readouterr().err.count("saturate: fp16-autocast: the script ") == 1


def test_a_backward_from_an_edge_of_the_graph_ends_the_scaling(capsys):
    model = torch.nn.Sequential(torch.nn.Linear(2, 1)).train()
    context = context_of(model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),))
    fp16_autocast.apply(context, fp16_autocast.Options())
    torch.autograd.backward(torch.autograd.graph.get_gradient_edge(model(torch.ones(1, 2)).sum()), torch.ones(()))
    context.undo()
    assert torch.equal(model[0].bias.grad, torch.ones(1)) and "edge of the graph" in capsys.readouterr().err


def test_float16_is_given_up_with_the_scaling(capsys):
    model = Nested().train()
    context = context_of(model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),))
    fp16_autocast.apply(context, fp16_autocast.Options())
    model(torch.rand(2, 8))["hidden"].sum().backward()
    assert model.seen == torch.float16
    model.layer.weight.register_hook(lambda grad: grad)
    model(torch.rand(2, 8))["hidden"].sum().backward()
    model(torch.rand(2, 8))
    assert model.seen == torch.float32 and "gradient of layer.weight" in capsys.readouterr().err
    context.undo()
    with pytest.raises(NotApplied, match=r"gradient of layer\.weight"):
        fp16_autocast.apply(context, fp16_autocast.Options())
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    other[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(NotApplied, match="backward of Linear"):
        fp16_autocast.apply(context_of(other, optimizers=(torch.optim.SGD(other.parameters()),)), fp16_autocast.Options())


def test_two_threads_train_models_of_their_own():
    """One steps, and accumulates a second gradient, while the other is in the middle of its backward."""
    reached, go_on = threading.Event(), threading.Event()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx, grad):
            reached.set()
            assert go_on.wait(60)
            return grad

    slow, quick = (torch.nn.Parameter(torch.tensor([3.0])) for _ in range(2))
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in (slow, quick)]
    context = context_of(torch.nn.Linear(1, 1), optimizers=tuple(optimizers))
    fp16_autocast.apply(context, fp16_autocast.Options(initial_scale=1024.0, growth_steps=1))
    slow.sum().backward()
    quick.sum().backward()
    thread = threading.Thread(target=lambda: Waits.apply(slow).sum().backward())
    thread.start()
    try:
        assert reached.wait(60)
        assert quick.grad.item() == 1.0, "no gradient of this thread is scaled"
        quick.sum().backward()
        assert quick.grad.item() == 2.0
        optimizers[1].step()
    finally:
        go_on.set()
        thread.join()
    context.undo()
    assert (quick.item(), slow.grad.item()) == (1.0, 2.0)


def test_fp16_is_offered_only_without_bf16():
    from saturate.records.facts import OptimizerFacts

    volta = usual(device="cuda", capability=(7, 0), optimizers=(OptimizerFacts(kind="SGD"),))
    assert fp16_autocast.eligible(volta)
    for changes in ({"cuda_bf16_native": True}, {"device": "cpu"}, {"capability": (6, 1)}, {"optimizers": ()},
                    {"grad_scaler": True}, {"optimizers": (OptimizerFacts(kind="LBFGS"),)}):
        assert not fp16_autocast.eligible(dataclasses.replace(volta, **changes))


# -- channels-last ---------------------------------------------------------------------------------------------------


def test_channels_last_converts_weights_state_and_inputs_and_hands_back_the_usual_format():
    seen = []

    class Net(torch.nn.Sequential):
        def forward(self, x):
            seen.append(x.is_contiguous(memory_format=torch.channels_last))
            return super().forward(x)

    model = Net(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3)).train()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    context = context_of(model, optimizers=(optimizer,))
    channels_last.apply(context, channels_last.Options())
    output = model(torch.rand(2, 3, 8, 8))
    assert seen == [False, True] and output.is_contiguous()
    state = optimizer.state[model[0].weight]
    assert state["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert channels_last.active(evidence_of(context, channels_last=2), channels_last.Options()).active
    with pytest.raises(NotApplied, match="would change"):
        channels_last.apply(context_of(model), channels_last.Options())
    context.undo()
    assert model[0].weight.is_contiguous() and state["exp_avg"].is_contiguous()


def state_dict_kept(model, optimizer):
    return model.state_dict()


def in_shared_memory(model, optimizer):
    model.share_memory()


def gradients_in_one_tensor(model, optimizer):
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    parts = flat.split([p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts):
        parameter.grad = part.view_as(parameter)
    return flat


def state_kept(model, optimizer):
    return optimizer.state_dict()["state"][0]["exp_avg"].view(-1)


@pytest.mark.parametrize("hold", [state_dict_kept, in_shared_memory, gradients_in_one_tensor, state_kept])
def test_channels_last_cuts_nothing_off_from_what_shares_its_memory(hold):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)).train()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    context = context_of(model, optimizers=(optimizer,))
    held = hold(model, optimizer)
    with pytest.raises(NotApplied, match=r"0\.weight.* shares memory"):
        channels_last.apply(context, channels_last.Options())
    assert not context.changes and model[0].weight.is_contiguous()
    if hold in (state_dict_kept, state_kept):
        del held
        channels_last.apply(context, channels_last.Options())
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_what_was_kept_of_channels_last_weights_stays_theirs_after_the_undo():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3)).train()
    context = context_of(model)
    channels_last.apply(context, channels_last.Options())
    kept = model[0].state_dict()
    context.undo()
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    assert kept["weight"].eq(7.0).all() and model[1].weight.is_contiguous()


def test_channels_last_converts_modules_whose_parameters_have_the_same_names():
    models = [torch.nn.Conv2d(3, 4, 3).train() for _ in range(2)]
    context = context_of(*models)
    channels_last.apply(context, channels_last.Options())
    assert all(model.weight.is_contiguous(memory_format=torch.channels_last) for model in models)


def test_channels_last_leaves_lbfgs_its_gradients():
    """It views them as one vector."""
    from saturate.records.facts import OptimizerFacts

    model = torch.nn.Conv2d(3, 4, 3).train()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(NotApplied, match="LBFGS"):
        channels_last.apply(context_of(model, optimizers=(optimizer,)), channels_last.Options())
    assert channels_last.eligible(usual(optimizers=(OptimizerFacts(kind="SGD"),)))
    assert not channels_last.eligible(usual(optimizers=(OptimizerFacts(kind="SGD"), OptimizerFacts(kind="LBFGS"))))


def test_only_one_by_one_kernels_leave_nothing_to_do():
    with pytest.raises(NotApplied):
        channels_last.apply(context_of(torch.nn.Conv2d(3, 4, 1)), channels_last.Options())


DISTRIBUTED = """
import os, sys
import torch, torch.distributed as dist
from saturate.agent.context import Context
from saturate.techniques import channels_last
from saturate.techniques._api import NotApplied

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)

def train(prepared, applied, views=False, held=False):
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3), torch.nn.Flatten(),
                                torch.nn.Linear(64, 1))
    kept = inner.state_dict() if held and rank == 1 else None
    context = Context(torch)
    if prepared:
        channels_last.prepare(context.of("before"), channels_last.Options())
    model = torch.nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    torch.manual_seed(1 + rank)
    x = torch.randn(4, 3, 8, 8)
    said = ""
    for step in range(8):
        if applied and step == 3:
            context.modules, context.optimizers, context.device = (inner,), (optimizer,), "cpu"
            try:
                said = channels_last.apply(context.of("then"), channels_last.Options())
            except NotApplied as refusal:
                said = str(refusal)
        if applied and step == 6:
            context.undo({"then"})
        optimizer.zero_grad()
        loss = (model(x) - 20 * x.mean((1, 2, 3)).unsqueeze(1)).square().mean()
        loss.backward()
        optimizer.step()
    context.undo()
    return loss.item(), said, inner[0].weight.is_contiguous(memory_format=torch.channels_last)

plain = train(False, False)[0]
late = train(False, True)
others = [train(True, True), train(True, True, views=True), train(True, False)]
held = train(True, True, held=True)
original = torch.nn.parallel.DistributedDataParallel.__init__
dist.destroy_process_group()
assert original.__module__ == "torch.nn.parallel.distributed" and not hasattr(original, "__wrapped__"), original
for found in (late, held, *others):
    assert abs(found[0] - plain) < 1e-9 * plain, (plain, found)
assert "buckets" in late[1] and not late[2], late
assert "buckets" in held[1] and not held[2], held
assert [found[1][:12] for found in others] == ["2 parameters", "2 parameters", ""], others
assert all(found[2] for found in others), others
os._exit(0)         # threads of gloo may outlive the group, and end the interpreter's exit with an abort
"""


def test_channels_last_in_distributed_trainings(tmp_path):
    """Converted before the buckets of gradients are laid out, or not at all: else elements of a gradient change places, in silence.
    Where one rank cannot, none does."""
    command = [sys.executable, "-c", DISTRIBUTED]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    wrapped = (dataclasses.replace(usual().modules[0], distributed=True),)
    assert channels_last.eligible(usual(world_size=2, modules=wrapped))
    assert not channels_last.eligible(usual(world_size=2)), "nobody knows how their gradients are averaged"


# -- attention -------------------------------------------------------------------------------------------------------


def test_the_attention_kernel_is_proved_by_the_graph(monkeypatch):
    images = torch.rand(2, 3, 8, 8)
    for backend in ("flash", "math"):
        context = context_of(toy.Model().train())
        options = sdpa_backend.Options(backend)
        sdpa_backend.apply(context, options)
        context.modules[0](images)
        assert sdpa_backend.active(evidence_of(context), options).active, backend
    context = context_of(toy.Model().train())
    options = sdpa_backend.Options("efficient")         # has no CPU kernel: the plain one ran instead
    sdpa_backend.apply(context, options)
    context.modules[0](images)
    assert not sdpa_backend.active(evidence_of(context), options).active
    monkeypatch.setitem(sdpa_backend.BACKENDS, "cudnn", ("FLASH_ATTENTION", "ScaledDotProductCudnnAttention"))
    context = context_of(toy.Model().train())
    sdpa_backend.apply(context, sdpa_backend.Options("cudnn"))
    context.modules[0](images)          # a fused kernel ran, but another one
    assert not sdpa_backend.active(evidence_of(context), sdpa_backend.Options("cudnn")).active


class Preferring(torch.nn.Linear):
    """Notes in which order torch looks for an attention kernel while it runs."""

    def forward(self, x):
        self.order = torch._C._get_sdp_priority_order()
        self.allowed = torch.nn.attention._cur_sdpa_kernel_backends()
        return super().forward(x)


@pytest.mark.parametrize("backend", list(sdpa_backend.BACKENDS))
def test_the_chosen_attention_kernel_comes_first(backend):
    """By torch's own order the plain one, which is the fallback, comes before cudnn's."""
    before, flash = torch._C._get_sdp_priority_order(), torch.backends.cuda.flash_sdp_enabled()
    context = context_of(Preferring(2, 2).train())
    sdpa_backend.apply(context, sdpa_backend.Options(backend))
    torch.backends.cuda.enable_flash_sdp(False)         # the script's: what is forbidden keeps its place in the order as well
    try:
        context.modules[0](torch.ones(1, 2))
        assert torch._C._get_sdp_priority_order() == before and not torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(flash)
    chosen = getattr(torch.nn.attention.SDPBackend, sdpa_backend.BACKENDS[backend][0])
    assert context.modules[0].order[0] == int(chosen)
    assert {*context.modules[0].allowed} == {chosen, torch.nn.attention.SDPBackend.MATH}


def test_an_order_that_torch_sets_with_its_first_attention_stays(monkeypatch):
    """As torch does on newer GPUs, once in a process: cuDNN's comes first."""
    usual = torch._C._get_sdp_priority_order()
    chosen = sorted(usual, key=lambda one: one != 3)
    chosen_once = []

    def first_attention(*tensors):
        if not chosen_once:
            chosen_once.append(tensors)
            torch._C._set_sdp_priority_order(chosen)

    class Attending(Preferring):
        def forward(self, x):
            first_attention(x)
            return super().forward(x)

    monkeypatch.setattr(torch, "_fused_sdp_choice", first_attention)
    monkeypatch.setattr(_common, "device_of", lambda context: torch.device("cpu"))
    context = context_of(Attending(2, 2).train())
    context.device = "cuda"
    try:
        sdpa_backend.apply(context, sdpa_backend.Options("flash"))
        context.modules[0](torch.ones(1, 2))
        assert torch._C._get_sdp_priority_order() == chosen and context.modules[0].order[0] == 1
    finally:
        torch._C._set_sdp_priority_order(usual)


def test_what_was_not_watched_is_not_taken_for_absent():
    """No hook may be set where the script compiles something, so attention is not counted there, and no shape is noted."""
    compiles = usual(device="cuda", capability=(8, 0), compiles=True)
    for technique in (sdpa_backend, allocator):
        assert "were not watched" in technique.eligible(compiles).reason
        assert "were not watched" not in technique.eligible(dataclasses.replace(compiles, compiles=False)).reason
    assert cudnn_benchmark.eligible(compiles) and "were not watched" in cudnn_benchmark.eligible(compiles).reason


def test_attention_of_cudnn_is_offered_where_cudnn_is():
    hopper = usual(device="cuda", capability=(9, 0))
    assert [one.backend for one in sdpa_backend.variants(hopper)] == ["cudnn", "flash", "efficient"]
    assert [one.backend for one in sdpa_backend.variants(dataclasses.replace(hopper, rocm=True))] == ["flash", "efficient"]


def test_a_torch_that_takes_no_order_runs_cudnn_attention_not_at_all(monkeypatch):
    kernel = torch.nn.attention.sdpa_kernel
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda backends: kernel(backends))
    context = context_of(toy.Model().train())
    with pytest.raises(NotApplied, match="prefers every other"):
        sdpa_backend.apply(context, sdpa_backend.Options("cudnn"))
    sdpa_backend.apply(context, sdpa_backend.Options("math"))
    context.modules[0](torch.rand(2, 3, 8, 8))
    assert sdpa_backend.active(evidence_of(context), sdpa_backend.Options("math")).active


@pytest.mark.parametrize("who", ["the script", "the script, the old way", "saturate"])
def test_blocks_that_are_recomputed_keep_their_attention_kernel(who):
    """The backward pass runs them outside of the model's forward."""
    from checkpoint_models import Block, Stack, engine_of
    from torch.utils.checkpoint import checkpoint

    from saturate.techniques import activation_checkpointing

    def gradients(recomputing):
        torch.manual_seed(0)
        model = Stack(lambda: Block(0.0)).train()
        context = context_of(model)
        sdpa_backend.apply(context, sdpa_backend.Options("math"))
        if recomputing and who == "saturate":
            engine_of(context, model, activation_checkpointing.Options(mode="blocks"))
        elif recomputing:
            model.call = lambda block, x: checkpoint(block, x, use_reentrant="old" in who)
        found = []
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(3, 7, 4)).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found

    assert all(map(torch.equal, gradients(True), gradients(False)))


# -- what users do with a wrapped model ------------------------------------------------------------------------------


def test_a_pickled_model_loads_where_saturate_is_absent(tmp_path):
    (tmp_path / "user_model.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.conv = torch.nn.Conv2d(3, 4, 3)\n"
        "    def forward(self, x):\n        return self.conv(x)\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        from user_model import Net
    finally:
        sys.path.remove(str(tmp_path))
    paths = []
    for technique in (bf16_autocast, channels_last, compile, sdpa_backend):
        model = Net().train()
        technique.apply(context_of(model), technique.Options())
        paths.append(tmp_path / f"{technique.TECHNIQUE.id}.pt")
        torch.save(model, paths[-1])
    everything = Net().train()
    context = context_of(everything)
    for technique in (channels_last, bf16_autocast, sdpa_backend):
        technique.apply(context, technique.Options())
    paths.append(tmp_path / "all.pickle")
    paths[-1].write_bytes(pickle.dumps(everything))
    probe = f"""
import sys, pickle
class Wall:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] == "saturate":
            raise ImportError("saturate is not installed here")
sys.meta_path.insert(0, Wall())
sys.path.insert(0, {str(tmp_path)!r})
import torch
for path in {[str(path) for path in paths]!r}:
    model = pickle.load(open(path, "rb")) if path.endswith("pickle") else torch.load(path, weights_only=False)
    assert model(torch.rand(1, 3, 8, 8)).dtype == torch.float32, path
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- compile ---------------------------------------------------------------------------------------------------------


def test_the_repeated_block_is_the_outer_one_with_most_parameters():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
    encoder = torch.nn.TransformerEncoder(layer, 4)
    assert {type(block) for block in compile.repeated_blocks(encoder)} == {torch.nn.TransformerEncoderLayer}
    assert compile.repeated_blocks(torch.nn.TransformerEncoder(layer, 3)) == []
    assert len(compile.repeated_blocks(toy.Model())) == 4
    with pytest.raises(NotApplied, match="repeats at least"):
        compile.apply(context_of(torch.nn.Linear(1, 1)), compile.Options(scope="blocks"))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_a_mode_that_records_cuda_graphs_is_proved_by_one(mode):
    """Inductor skips them without an error; kernels without a graph are another technique's gain."""
    options = compile.Options(mode=mode)
    usual = Evidence(dynamo_frames=2, notes={"compile": "2 graph(s) captured"})
    assert compile.active(usual, options).active        # on a CPU, and where torch does not tell
    assert compile.active(dataclasses.replace(usual, cuda_graphs=True, cuda_graph_skips=1), options).active
    for skips in (0, 3):
        proof = compile.active(dataclasses.replace(usual, cuda_graphs=False, cuda_graph_skips=skips), options)
        assert proof.active is (mode not in compile.RECORDING)
        assert proof.active or "no CUDA graph was recorded" in proof.evidence


def test_compile_variants_follow_the_facts():
    block = ModuleFacts(dtypes=("float32",), repeats=6)
    machine = MachineFacts(compiler="g++")
    cpu = Facts(modules=(block,), machine=machine)
    assert compile.variants(cpu) == [compile.Options(), compile.Options(scope="blocks")]
    assert {one.dynamic for one in compile.variants(dataclasses.replace(cpu, shapes=5))} == {"yes"}
    cuda = dataclasses.replace(cpu, device="cuda", zero_grad_set_to_none=True)
    assert [one.mode for one in compile.variants(cuda)] == ["default", "default", "reduce-overhead", "max-autotune"]
    for changes in ({"micro_steps": 4}, {"zero_grad_set_to_none": False}, {"zero_grad_set_to_none": None}):
        modes = [one.mode for one in compile.variants(dataclasses.replace(cuda, **changes))]
        assert modes == ["default", "default", "max-autotune-no-cudagraphs"], "gradients are added to others that were kept"
    assert len(compile.variants(dataclasses.replace(cuda, compiles=True))) == 2, "nobody knows whether shapes change"
    assert not compile.eligible(dataclasses.replace(cpu, machine=MachineFacts()))
    assert "create_graph" in compile.eligible(dataclasses.replace(cpu, differentiates_gradients=True)).reason
    assert not compile.eligible(dataclasses.replace(cpu, modules=(dataclasses.replace(block, compiled=True),)))
    already = dataclasses.replace(cpu, modules=(dataclasses.replace(block, compiled=True, convolutions=1),))
    assert bf16_autocast.eligible(usual(modules=already.modules))


@pytest.mark.parametrize(("layers", "offered"), [
    ({"recurrent_nets": 1, "linears": 1}, False), ({"recurrent_nets": 3}, False),
    ({"recurrent_nets": 2, "other_convolutions": 7, "linears": 1}, True), ({"recurrents": 2, "linears": 1}, True), ({"linears": 1}, True),
])
def test_a_network_of_lstms_is_not_compiled(layers, offered):
    """A short budget was spent on it: dynamo captures neither them nor what follows in the forward that calls them."""
    facts = Facts(device="cpu", modules=(ModuleFacts(kind="Net", parameters=1, **layers),), machine=MachineFacts(compiler="g++"))
    assert bool(compile.eligible(facts)) is offered


@pytest.fixture
def fresh_dynamo(monkeypatch):
    """Counts start at zero, and kernels come from the eager backend: these tests are about capture, not about C++."""
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode, dynamic: real(function, backend="eager", dynamic=dynamic))
    yield dynamo
    dynamo.reset()
    dynamo.utils.counters.clear()


def frames(dynamo):
    return dynamo.utils.counters["frames"]["ok"]


ROOTS = {
    "Sequential": lambda: (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), (torch.rand(2, 4),)),
    "TransformerEncoder": lambda: (
        torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), 2), (torch.rand(3, 2, 4),)
    ),
    "LSTMCell": lambda: (torch.nn.LSTMCell(4, 4), (torch.rand(2, 4),)),
}


@pytest.mark.parametrize("name", ROOTS)
def test_compile_captures_roots_that_are_torch_classes(name, fresh_dynamo):
    model, inputs = ROOTS[name]()
    model.train()
    expected = _common.tensors(model(*inputs), torch)
    context = context_of(model)
    compile.apply(context, compile.Options())
    got = _common.tensors(model(*inputs), torch)
    assert all(torch.allclose(a, b) for a, b in zip(expected, got, strict=True))
    assert frames(fresh_dynamo) >= 1
    assert compile.active(evidence_of(context, dynamo_frames=frames(fresh_dynamo)), compile.Options()).active


def test_repeated_blocks_share_one_compilation(fresh_dynamo):
    model = toy.Model().train()
    context = context_of(model)
    compile.apply(context, compile.Options(scope="blocks"))
    model(torch.rand(2, 3, 8, 8))
    assert frames(fresh_dynamo) == 1
    assert context.notes["compile"].startswith("1 graph")


def test_what_a_recorded_graph_returns_outlives_the_next_step(monkeypatch):
    """A stand-in for CUDA: what was returned before is overwritten by the next call, as a replayed graph does."""
    returned = []

    def recording(function, **settings):
        def replayed(*args, **kwargs):
            for old in returned:
                old.data.fill_(float("nan"))
            returned[:] = [function(*args, **kwargs)]
            return {"loss": returned[0], "name": "x"}

        return replayed

    monkeypatch.setattr(torch, "compile", recording)
    kept = {}
    for mode in ("reduce-overhead", "default"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 1)).train()
        context = context_of(model)
        context.device = "cuda"
        compile.apply(context, compile.Options(mode=mode))
        outputs = [model(torch.ones(1, 3)) for _ in range(2)]
        assert outputs[0]["name"] == "x"
        kept[mode] = bool(torch.isfinite(outputs[0]["loss"]).all())
        outputs[1]["loss"].sum().backward()
        assert torch.equal(model[0].weight.grad, torch.ones(1, 3))
        context.undo()
    assert kept == {"reduce-overhead": True, "default": False}


def test_hooks_that_come_after_the_compilation_are_called(fresh_dynamo):
    config = fresh_dynamo.config
    before = config.skip_nnmodule_hook_guards
    model, called = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).train(), []
    context = context_of(model)
    compile.apply(context, compile.Options())
    model(torch.rand(2, 4))
    hook = model[0].register_forward_hook(lambda *_: called.append(1))
    model(torch.rand(2, 4))
    hook.remove()
    model(torch.rand(2, 4))
    assert called == [1]
    assert compile.active(evidence_of(context, dynamo_frames=frames(fresh_dynamo)), compile.Options()).active
    context.undo()
    assert config.skip_nnmodule_hook_guards == before


def test_a_graph_may_be_kept_now_and_then(fresh_dynamo, monkeypatch):
    """A second backward pass reads what the first one did; torch ends the training where its memory was given away."""
    from torch._functorch import config

    monkeypatch.setattr(torch, "compile", lambda function, mode, dynamic: fresh_dynamo.optimize("aot_eager", dynamic=dynamic)(function))
    config.donated_buffer = config._config["donated_buffer"].default = True     # as torch has it; monkeypatch would take it away in the end
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).train()
    x = torch.randn(16, 4)

    def gradients(passes):
        model.zero_grad()
        loss = model(x).square().mean()
        for number in range(passes):
            loss.backward(retain_graph=number + 1 < passes)
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients(2)
    context = context_of(model)
    compile.apply(context, compile.Options())
    for _ in range(10):
        gradients(1)
    torch.testing.assert_close(gradients(2), plain)
    assert compile.active(evidence_of(context, dynamo_frames=frames(fresh_dynamo)), compile.Options()).active
    found = []
    thread = threading.Thread(target=lambda: found.append(config.donated_buffer))      # as CUDA's backward passes run
    thread.start()
    thread.join()
    assert found == [False]
    context.undo()
    assert config.donated_buffer and config._config["donated_buffer"].default


KEPT = """
import sys, torch
from saturate.agent.context import Context
from saturate.techniques import compile
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(8, 8)
    def forward(self, x): return torch.sin(self.layer(x)).cos()
model, x = Net().train(), torch.randn(16, 8)
def gradients(model, passes):
    model.zero_grad()
    loss = model(x).mean()
    for number in range(passes): loss.backward(retain_graph=number + 1 < passes)
    return [parameter.grad.clone() for parameter in model.parameters()]
plain = gradients(model, 2)
if sys.argv[1] == "plain":
    gradients(torch.compile(model), 1)
else:
    context = Context(torch)
    context.modules, context.device = (model,), "cpu"
    compile.apply(context, compile.Options())
    for found, wanted in zip(gradients(model, 2), plain): torch.testing.assert_close(found, wanted)
print(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler")
def test_code_that_writes_to_what_was_saved_is_not_taken_from_the_cache(script, tmp_path, clean_environment):
    """Of an earlier run: its gradients were wrong by half from the second backward pass on."""
    def run(how):
        done = subprocess.run([sys.executable, str(script(KEPT)), how], env={**clean_environment, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert run("plain") == 0
    assert run("ours") == 0, "made anew"
    assert run("ours") > 0


def test_many_roots_do_not_use_up_each_others_recompilations(fresh_dynamo):
    models = [torch.nn.Sequential(torch.nn.Linear(size, 2)).train() for size in range(1, 13)]
    compile.apply(context_of(*models), compile.Options())
    for model in models:
        model(torch.rand(2, model[0].in_features))
    assert frames(fresh_dynamo) == len(models)


def test_forwards_with_tangents_are_not_compiled(fresh_dynamo):
    from torch.autograd import forward_ad

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).train()
    x = torch.randn(2, 4)

    def slopes():
        model.zero_grad()
        with forward_ad.dual_level():
            value, slope = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        (value.sum() + slope.square().sum()).backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = slopes()
    context = context_of(model)
    compile.apply(context, compile.Options())
    assert all(map(torch.equal, plain, slopes())) and not context.notes
    model(x).sum().backward()
    assert context.notes["compile"] == "1 graph(s) captured"
    assert all(map(torch.equal, plain, slopes()))
    context.undo()


def test_a_script_that_differentiates_gradients_is_not_compiled():
    context = context_of(torch.nn.Linear(2, 2).train())
    context.differentiates_gradients = True
    with pytest.raises(NotApplied, match="create_graph"):
        compile.apply(context, compile.Options())
    assert not context.changes


def test_nothing_captured_is_not_active(fresh_dynamo):
    class Eager(torch.nn.Linear):
        @torch.compiler.disable
        def forward(self, x):
            return super().forward(x)

    model = Eager(2, 2).train()
    context = context_of(model)
    compile.apply(context, compile.Options())
    model(torch.rand(1, 2))
    assert not compile.active(evidence_of(context, dynamo_frames=7), compile.Options()).active


@pytest.mark.parametrize("scope", ["module", "blocks"])
def test_wrappers_inside_a_compiled_forward_are_still_proved(fresh_dynamo, scope):
    model = toy.Model().train()
    context = context_of(model)
    bf16_autocast.apply(context, bf16_autocast.Options())
    sdpa_backend.apply(context, sdpa_backend.Options("flash"))
    channels_last.apply(context, channels_last.Options())
    compile.apply(context, compile.Options(scope=scope))
    output = model(torch.rand(2, 3, 8, 8))
    assert output["logits"].dtype == torch.float32
    evidence = evidence_of(context, dynamo_frames=frames(fresh_dynamo), channels_last=1)
    for technique in (bf16_autocast, sdpa_backend, channels_last, compile):
        assert technique.active(evidence, technique.Options()).active, technique.TECHNIQUE.id
    assert fresh_dynamo.utils.counters["graph_break"] == {}
    twin = copy.deepcopy(model)
    assert torch.equal(twin(torch.ones(2, 3, 8, 8))["logits"], model(torch.ones(2, 3, 8, 8))["logits"])


def test_a_step_that_the_user_compiles_around_the_model_still_runs(fresh_dynamo):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4)).train()
    context = context_of(model)
    compile.apply(context, compile.Options())
    bf16_autocast.apply(context, bf16_autocast.Options())

    def step(x):
        return model(x).sum()

    torch.compile(step, None, None)(torch.rand(2, 4)).backward()
    assert model[0].weight.grad is not None


@pytest.fixture
def compiling():
    import torch._dynamo as dynamo

    dynamo.reset()
    yield lambda model, backend: torch.compile(model, backend=backend)
    dynamo.reset()
    dynamo.utils.counters.clear()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_the_script_compiled_is_wrapped_from_outside(compiling, backend):
    """Seen on nanochat: no module could be wrapped, so bfloat16 was not even tried on scripts that compile their model."""
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).train()
    model = compiling(plain, backend)
    x = torch.rand(2, 4)
    expected, own = model(x), vars(model)["forward"]
    context = context_of(model)
    bf16_autocast.apply(context, bf16_autocast.Options())
    output = model(x)
    assert output.dtype == torch.float32 and not torch.equal(output, expected)
    assert bf16_autocast.active(evidence_of(context), bf16_autocast.Options()).active
    assert "forward" not in vars(plain) and "__deepcopy__" not in vars(plain), "what is compiled is as it was"
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    model.train()
    assert list(model.state_dict()) == list(compiling(plain, backend).state_dict())
    context.undo()
    assert vars(model)["forward"] is own and not {"__getstate__", "__reduce_ex__", "__deepcopy__"} & set(vars(model))
    assert torch.equal(model(x), expected)


def test_a_copy_of_what_the_script_compiled_has_its_own_weights(compiling):
    model = compiling(torch.nn.Sequential(torch.nn.Linear(4, 4)).train(), "eager")
    context = context_of(model)
    bf16_autocast.apply(context, bf16_autocast.Options())
    twin, x = copy.deepcopy(model), torch.rand(2, 4)
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(x).any() and model(x).any()
    context.undo()
    assert model(x).any() and not twin(x).any()


def test_a_whole_model_that_was_saved_loads_with_weights_only():
    """Public scripts do that: their list of safe classes holds the model's, and no `getattr`."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4)).train()
    context = context_of(model)
    bf16_autocast.apply(context, bf16_autocast.Options())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([torch.nn.Sequential, torch.nn.Linear, set]):
        loaded = torch.load(file, weights_only=True)
    assert "forward" not in vars(loaded) and torch.equal(loaded[0].weight, model[0].weight)
    assert "forward" in vars(copy.deepcopy(model)), "a copy that trains keeps the technique"
    context.undo()
    assert not {"forward", "__getstate__", "__reduce_ex__", "__deepcopy__"} & set(vars(model))


class Reduced(torch.nn.Linear):
    """Says itself how it is pickled, as older code and torch.fx do: from all that the instance holds."""

    live = False

    def __reduce__(self):
        return reduced_again, (vars(self) if self.live else dict(vars(self)),)


def reduced_again(attributes):
    made = Reduced(4, 4)
    vars(made).update(attributes)
    return made


@pytest.mark.parametrize("kind", ["a copy of __dict__", "__dict__ itself", "graph"])
def test_a_model_that_reduces_itself_to_all_it_holds_is_copied_and_saved(kind, monkeypatch):
    """Seen: endless recursion within torch.save, after the last checkpoint had been truncated."""
    monkeypatch.setattr(Reduced, "live", "itself" in kind)
    model = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4))) if kind == "graph" else Reduced(4, 4)
    context = context_of(model.train())
    bf16_autocast.apply(context, bf16_autocast.Options())
    x = torch.rand(2, 4)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model)), pickle.loads(pickle._dumps(model))):
        assert "forward" not in vars(loaded) and all(map(torch.equal, loaded.parameters(), model.parameters()))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert torch.equal(model(x), expected) and not torch.equal(twin(x), expected)
    context.undo()
    assert not {"forward", "__getstate__", "__reduce_ex__", "__deepcopy__"} & set(vars(model))


def by_copy(attributes, made):
    made.__dict__ = attributes.copy()


def by_update(attributes, made):
    vars(made).update(attributes)


def by_dict(attributes, made):
    made.__dict__ = dict(attributes)


def by_unpacking(attributes, made):
    made.__dict__ = {**attributes}


def by_items(attributes, made):
    """As `higher` makes a functional module, and some averages of weights take what else a model holds."""
    for name, value in attributes.items():
        vars(made)[name] = value


@pytest.mark.parametrize("copied", [by_copy, by_update, by_dict, by_unpacking, by_items])
def test_what_is_made_from_a_module_s_attributes_runs_its_own_weights(copied):
    """As learn2learn clones a module. Seen: the clone ran, copied and saved the weights that it was made from."""
    model, x = torch.nn.Linear(4, 4).train(), torch.ones(2, 4)
    context = context_of(model)
    bf16_autocast.apply(context, bf16_autocast.Options())
    clone = model.__new__(type(model))
    copied(model.__dict__, clone)
    clone._parameters = {name: torch.zeros_like(parameter) for name, parameter in model._parameters.items()}
    assert model(x).any() and bf16_autocast.active(evidence_of(context), bf16_autocast.Options()).active
    file = io.BytesIO()
    torch.save(clone, file)
    file.seek(0)
    for made in (clone, copy.deepcopy(clone), pickle.loads(pickle.dumps(clone)), torch.load(file, weights_only=False)):
        assert not made(x).any() and not {"forward", "__getstate__", "__reduce_ex__", "__deepcopy__"} & set(vars(made))
    context.undo()
    assert type(vars(model)) is dict and model(x).any()


def test_replicas_of_data_parallel_run_their_own_weights():
    model, x = torch.nn.Linear(4, 4).train(), torch.ones(2, 4)
    bf16_autocast.apply(context_of(model), bf16_autocast.Options())
    replica = model._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(4, 4), torch.zeros(4)
    assert not replica(x).any() and model(x).any()


def test_what_is_made_from_attributes_keeps_the_forward_that_the_script_gave():
    model, x = shifted(torch.nn.Linear(8, 8)).train(), torch.rand(2, 8)
    expected, own = model(x), vars(model)["forward"]
    context = context_of(model)
    bf16_autocast.apply(context, bf16_autocast.Options())
    clone = model.__new__(type(model))
    clone.__dict__ = model.__dict__.copy()
    assert vars(clone)["forward"] is own and torch.equal(clone(x), expected)


def test_attributes_within_a_state_are_pickled_as_a_dict():
    """So a class that says what is pickled of it, of all that it holds, loads where saturate is absent."""
    model = torch.nn.Linear(4, 4).train()
    bf16_autocast.apply(context_of(model), bf16_autocast.Options())
    text = pickle.dumps({"attributes": vars(model)})
    assert b"saturate" not in text and type(pickle.loads(text)["attributes"]) is dict


class Exported(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))

    def forward(self, x):
        return torch.relu(self.body(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("training", [False, True])
def test_what_a_script_exports_is_what_it_wrote(training):
    """As many do when the training is over. Seen: "undefined value torch", with a line of saturate's."""
    session = types.SimpleNamespace(undo=[])
    seams._exports(session, torch)
    try:
        model, x = Exported().train(), torch.rand(2, 3, 8, 8)
        expected = model(x)
        context = context_of(model, model.body)
        for technique in (channels_last, bf16_autocast):
            technique.apply(context, technique.Options())
        model.train(training)
        bound = vars(model)["forward"], vars(model.body)["forward"]
        graph = torch.export.export(args=(x,), mod=model).graph
        assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == ["aten.conv2d.default", "aten.relu.default"]
        for scripted in (torch.jit.script(model), torch.jit.script(copy.deepcopy(model))):
            assert torch.allclose(scripted(x), expected, atol=1e-5)
        assert (vars(model)["forward"], vars(model.body)["forward"]) == bound
        context.undo()
        assert torch.allclose(model(x), expected, atol=1e-5) and "forward" not in vars(model)
    finally:
        for undo in session.undo:
            undo()
