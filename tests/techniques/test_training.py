"""Techniques that act on the loader, the optimizer and the process."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import random
import socket
import subprocess
import sys
import types
import weakref

import pytest

torch = pytest.importorskip("torch")

from wrapped_optimizer import Wrapped  # noqa: E402 - after the import that decides whether to run at all

from saturate import notices  # noqa: E402
from saturate.agent.context import Context  # noqa: E402
from saturate.records.facts import (  # noqa: E402
    Evidence,
    Facts,
    LoaderFacts,
    MachineFacts,
    ModuleFacts,
    OptimizerFacts,
)
from saturate.techniques import (  # noqa: E402
    _common,
    _passes_with_workers,
    allocator,
    cpu_threads,
    ddp_options,
    fused_optimizer,
    gc_freeze,
    loader_workers,
    pin_memory,
    tf32,
    zero_grad_none,
)
from saturate.techniques._api import NotApplied  # noqa: E402
from saturate.testing import toy  # noqa: E402


def context_of(model, optimizer):
    context = Context(torch)
    context.modules, context.optimizers, context.device = (model,) if model is not None else (), (optimizer,), "cpu"
    context.held_by_the_script = model, optimizer       # a context itself keeps none
    return context


# -- fused-optimizer -------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def stepped(kind, fuse, steps=3):
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3)
    optimizer = OPTIMIZERS[kind](layer.parameters())
    context = context_of(layer, optimizer)
    for number in range(steps):
        if fuse and number == 1:
            fused_optimizer.apply(context, fused_optimizer.Options())
        layer(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer, optimizer, context


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fused_steps_like_the_user_s_own_and_saves_the_user_s_flags(kind, monkeypatch):
    called = []
    name = f"_fused_{kind.lower()}_"
    real = getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda *args, **kwargs: called.append(1) or real(*args, **kwargs))
    plain, plain_optimizer, _ = stepped(kind, fuse=False)
    fused, optimizer, context = stepped(kind, fuse=True)
    assert len(called) == 2
    assert torch.allclose(plain.weight, fused.weight)
    saved = optimizer.state_dict()
    assert saved["param_groups"] == plain_optimizer.state_dict()["param_groups"]
    assert optimizer.param_groups[0]["fused"] is True
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert optimizer.param_groups[0]["fused"] is True and optimizer.param_groups[0]["foreach"] is False
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert optimizer.param_groups[1]["fused"] is True
    assert optimizer.state_dict()["param_groups"][1].get("fused") is None
    context.undo()
    flags = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    assert flags == {key: value for key, value in plain_optimizer.param_groups[0].items() if key != "params"}


def test_an_optimizer_is_fused_as_a_whole_or_not_at_all():
    good = torch.nn.Parameter(torch.ones(2))
    complex_one = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([{"params": [good]}, {"params": [complex_one]}], lr=0.1)
    with pytest.raises(NotApplied):
        fused_optimizer.apply(context_of(None, optimizer), fused_optimizer.Options())

    class Mine(torch.optim.SGD):
        pass        # may override anything, so it is not known to behave like SGD

    with pytest.raises(NotApplied):
        fused_optimizer.apply(context_of(None, Mine([good], lr=0.1)), fused_optimizer.Options())


def test_fused_eligibility():
    adam = OptimizerFacts(kind="AdamW", module="torch.optim.adamw", dtypes=("float32",))
    assert fused_optimizer.eligible(Facts(optimizers=(adam,)))
    for bad in ({"kind": "Lion"}, {"module": "mine"}, {"fused": True}, {"sparse": True}, {"differentiable": True},
                {"dtypes": ("complex64",)}):
        assert not fused_optimizer.eligible(Facts(optimizers=(dataclasses.replace(adam, **bad),)))
    assert not fused_optimizer.eligible(Facts())
    assert fused_optimizer.bound(Facts(optimizer_ms=25.0, step_ms=100.0)) == 0.25


# -- zero-grad-none --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [False, True])
def test_momentum_still_acts_on_a_parameter_that_a_step_does_not_use(drop):
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    never = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([used, unused, never], lr=0.1, momentum=0.9, weight_decay=0.1)
    context = context_of(None, optimizer)
    if drop:
        zero_grad_none.apply(context, zero_grad_none.Options())
    (used.sum() + unused.sum()).backward()
    optimizer.step()
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        assert (used.grad is None) is drop
        used.sum().backward()
        optimizer.step()
    assert unused.tolist() == pytest.approx([0.677169, 0.677169], abs=1e-6)     # the value without saturate
    assert zero_grad_none.active(Evidence(notes=dict(context.notes)), zero_grad_none.Options()).active is drop
    assert never.grad is None and never.tolist() == [1.0, 1.0]
    context.undo()
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(used.grad, torch.zeros(2))


def _flat_buffer(parameters, keep):
    flat, at = torch.zeros(sum(p.numel() for p in parameters)), 0
    for parameter in parameters:
        parameter.grad = flat[at:at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    keep.append(flat)


def _in_a_list(parameters, keep):
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        keep.append(parameter.grad)


def _in_an_array(parameters, keep):
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        keep.append(torch.from_numpy(parameter.grad.numpy()))


@pytest.mark.parametrize("hold", [_flat_buffer, _in_a_list, _in_an_array])
def test_gradients_that_something_else_holds_are_zeroed_in_place(hold):
    def trained(technique):
        torch.manual_seed(0)
        model, keep = torch.nn.Linear(3, 2), []
        free = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([*model.parameters(), free], lr=0.1)
        context = context_of(model, optimizer)
        if technique:
            zero_grad_none.apply(context, zero_grad_none.Options())
        hold(list(model.parameters()), keep)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            (model(torch.ones(1, 3)) * free).square().sum().backward()
            for held in keep:
                held.mul_(0.5)          # as one would clip a flat buffer
            optimizer.step()
        assert context.notes.get("zero-grad-none", "").startswith("1 gradients dropped") is technique
        context.undo()
        return [*model.parameters(), free, *keep]

    assert all(map(torch.equal, trained(True), trained(False)))


def test_a_closure_without_a_backward_pass_leaves_zeros():
    """As where a framework's training step skips a batch: momentum goes on."""
    def trained(technique):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        context = context_of(model, optimizer)
        if technique:
            zero_grad_none.apply(context, zero_grad_none.Options())

        def closure(skipped):
            optimizer.zero_grad(set_to_none=False)
            if not skipped:
                model(torch.ones(1, 3)).square().sum().backward()

        for step in range(4):
            optimizer.step(functools.partial(closure, skipped=step == 2))
        assert ("zero-grad-none" in context.notes) is technique
        context.undo()
        return list(model.parameters())

    assert all(map(torch.equal, trained(True), trained(False)))


def test_sparse_gradients_are_left_alone():
    def trained(technique):
        torch.manual_seed(0)
        always, sometimes = (torch.nn.Embedding(20, 4, sparse=True) for _ in range(2))
        optimizer = torch.optim.SparseAdam([always.weight, sometimes.weight], lr=0.1)
        context = context_of(None, optimizer)
        if technique:
            zero_grad_none.apply(context, zero_grad_none.Options())
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            loss = always(torch.tensor([1, step])).square().sum()
            if step % 2 == 0:
                loss = loss + sometimes(torch.tensor([2])).square().sum()
            loss.backward()
            optimizer.step()
        context.undo()
        return always.weight, sometimes.weight

    assert all(map(torch.equal, trained(True), trained(False)))


def test_an_optimizer_with_a_zero_grad_of_its_own_is_left_alone():
    class Own(torch.optim.SGD):
        def zero_grad(self):
            super().zero_grad(set_to_none=False)

    own, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer, usual = Own([own], lr=0.1), torch.optim.SGD([other], lr=0.1)
    with pytest.raises(NotApplied, match="Own has a zero_grad of its own"):
        zero_grad_none.apply(context_of(None, optimizer), zero_grad_none.Options())
    context = context_of(None, optimizer)
    context.optimizers = (optimizer, usual)
    zero_grad_none.apply(context, zero_grad_none.Options())
    for _ in range(2):
        (own.sum() + other.sum()).backward()
        optimizer.zero_grad()
        usual.zero_grad(set_to_none=False)
        assert torch.equal(own.grad, torch.zeros(2)) and other.grad is None
    context.undo()


def test_what_wraps_an_optimizer_for_the_script_drops_gradients_too():
    parameter, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer, foreign = torch.optim.SGD([parameter], lr=0.1), torch.optim.SGD([other], lr=0.1)
    wrapped, context = Wrapped(optimizer), context_of(None, optimizer)
    own = torch.optim.Optimizer.zero_grad
    zero_grad_none.apply(context, zero_grad_none.Options())
    for _ in range(2):
        (parameter.sum() + other.sum()).backward()
        assert torch.equal(parameter.grad, torch.ones(2))
        wrapped.step()
        wrapped.zero_grad(set_to_none=False)
        foreign.zero_grad(set_to_none=False)
        assert parameter.grad is None and torch.equal(other.grad, torch.zeros(2))
    assert zero_grad_none.active(Evidence(notes=context.notes), zero_grad_none.Options()).active
    context.undo()
    assert torch.optim.Optimizer.zero_grad is own


def test_zero_grad_eligibility():
    some = (OptimizerFacts(),)
    assert zero_grad_none.eligible(Facts(zero_grad_set_to_none=False, optimizers=some))
    assert not zero_grad_none.eligible(Facts(zero_grad_set_to_none=True, optimizers=some))
    assert not zero_grad_none.eligible(Facts(zero_grad_set_to_none=None, optimizers=some))


# -- gc-freeze -------------------------------------------------------------------------------------------------------


def test_gc_freezes_after_some_steps_stays_on_and_is_undone():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    context = context_of(None, optimizer)
    options = gc_freeze.Options(after_steps=2)
    threshold = gc.get_threshold()
    gc_freeze.apply(context, options)
    try:
        for expected in (False, True, True):
            optimizer.step()
            evidence = Evidence(gc_frozen=gc.get_freeze_count(), notes=dict(context.notes))
            assert gc_freeze.active(evidence, options).active is expected
        assert gc.isenabled() and gc.get_threshold()[0] == options.threshold
    finally:
        context.undo()
    assert not optimizer._optimizer_step_post_hooks
    assert gc.get_freeze_count() == 0 and gc.get_threshold() == threshold


def test_what_was_frozen_in_a_cycle_is_freed_by_a_collection_of_the_script_s():
    class Part:
        pass

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    context, own = context_of(None, optimizer), gc.collect
    part = Part()
    part.own, gone = part, weakref.ref(part)
    gc_freeze.apply(context, gc_freeze.Options(after_steps=1))
    try:
        optimizer.step()
        del part
        gc.collect(0)
        assert gone() is not None and gc.get_freeze_count()
        gc.collect()
        assert gone() is None and gc.get_freeze_count(), "frozen anew"
    finally:
        context.undo()
    assert gc.collect is own and not gc.get_freeze_count()


def test_what_the_script_has_frozen_stays_frozen():
    context, own = context_of(None, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)), gc.collect
    gc.freeze()
    try:
        gc_freeze.apply(context, gc_freeze.Options())
        assert gc.collect is own
    finally:
        context.undo()
        gc.unfreeze()


def test_hooks_after_a_step_that_come_behind_that_of_gc_freeze_are_called():
    """Torch goes over an optimizer's hooks while it calls them: one that removed itself would end the step with an error."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    context, called = context_of(None, optimizer), []
    try:
        gc_freeze.apply(context, gc_freeze.Options(after_steps=2))
        optimizer.register_step_post_hook(lambda *_: called.append(1))
        for _ in range(4):
            optimizer.step()
        assert len(called) == 4 and context.notes[gc_freeze.TECHNIQUE.id]
    finally:
        context.undo()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_collector_that_the_script_switched_off_stays_off(when):
    context = context_of(None, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    threshold = gc.get_threshold()
    try:
        if when == "before":
            gc.set_threshold(0)
        gc_freeze.apply(context, gc_freeze.Options(after_steps=1))
        gc.set_threshold(0)
        context.optimizers[0].step()
        assert gc.get_freeze_count() and gc.get_threshold()[0] == 0
        context.undo()
        assert gc.get_threshold()[0] == 0 and not gc.get_freeze_count()
    finally:
        context.undo()
        gc.set_threshold(*threshold)


# -- loader-workers --------------------------------------------------------------------------------------------------


class Dataset(torch.utils.data.Dataset):
    def __init__(self, length=100):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(index)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(10))


def rewritten(dataset, options=None, **arguments):
    context = Context(torch)
    loader_workers.apply(context, options or loader_workers.Options(workers=2))
    try:
        defaults = {"batch_size": 10, "num_workers": 0, "persistent_workers": False, "prefetch_factor": None}
        return context.loader_rewrites[0](dataset, {**defaults, **arguments}, frozenset(arguments))
    finally:
        context.undo()


def test_what_is_rewritten():
    started = {"multiprocessing_context": multiprocessing.get_all_start_methods()[0]}
    assert rewritten(Dataset()) == {"num_workers": 2, "persistent_workers": True, **started}
    assert rewritten(Dataset(), num_workers=4) == {"persistent_workers": True}
    assert rewritten(Dataset(), num_workers=4, persistent_workers=True) == {}
    more = loader_workers.Options(workers=2, persistent=False, prefetch=4)
    assert rewritten(Dataset(), more) == {"num_workers": 2, "prefetch_factor": 4, **started}
    assert rewritten(Dataset(), more, num_workers=4, prefetch_factor=3) == {}
    other = loader_workers.Options(workers=2, override=True)
    assert rewritten(Dataset(), other, num_workers=4, persistent_workers=True) == {"num_workers": 2}
    assert rewritten(Dataset(), other, num_workers=2) == {"persistent_workers": True}
    assert rewritten(Dataset(), other) == rewritten(Dataset())
    assert rewritten([1] * 100) == {"num_workers": 2, **started}    # a list cannot be known again
    assert rewritten(Dataset(11), loader_workers.Options(workers=8))["num_workers"] == 2
    assert rewritten(Dataset(10)) == {}                     # one batch
    assert rewritten(Stream()) == {}


def test_what_cannot_cross_to_a_spawned_worker_is_left_alone():
    def local(batch):
        return batch

    assert rewritten(Dataset(), multiprocessing_context="fork", collate_fn=local)
    assert rewritten(Dataset(), multiprocessing_context="spawn")
    assert rewritten(Dataset(), multiprocessing_context="spawn", collate_fn=local) == {}


class _GoesOn(torch.utils.data.Sampler):
    """Where its last pass was left."""

    def __init__(self, length):
        self.length, self.at = length, 0

    def __iter__(self):
        while True:
            yield self.at % self.length
            self.at += 1

    def __len__(self):
        return self.length


class _Draws(torch.utils.data.Sampler):
    """From an iterator that lives on."""

    def __init__(self, length):
        self.length, self.endless = length, itertools.cycle(range(length))

    def __iter__(self):
        yield from itertools.islice(self.endless, self.length)

    def __len__(self):
        return self.length


class _BeginsAnew(torch.utils.data.Sampler):
    """As samplers do that group by length: each pass has an order of its own, made before its first index."""

    def __init__(self, length):
        self.length, self.passes = length, 0

    def __iter__(self):
        self.passes += 1
        for place in range(3):
            self.last = place
        order = [(self.passes + index) % self.length for index in range(self.length)]
        while order:
            yield order.pop()

    def __len__(self):
        return self.length


@pytest.mark.parametrize(("kind", "changed"), [(_GoesOn, False), (_Draws, False), (_BeginsAnew, True)])
def test_samplers_that_keep_their_place_are_left_alone(kind, changed):
    sampler = kind(100)
    assert bool(rewritten(Dataset(), sampler=sampler)) is changed
    batches = torch.utils.data.BatchSampler(sampler, 10, False)
    assert bool(rewritten(Dataset(), batch_sampler=batches)) is changed
    assert bool(rewritten(Dataset(), batch_sampler=batches, num_workers=2)) is changed


def test_usual_samplers_do_not_keep_their_place():
    for sampler in (range(100), torch.utils.data.RandomSampler(range(100), generator=torch.Generator()),
                    torch.utils.data.DistributedSampler(range(100), 1, 0)):
        assert rewritten(Dataset(), sampler=sampler)
    assert rewritten(Dataset(), sampler=iter(range(100))) == {}
    one, other = _BeginsAnew(100), _BeginsAnew(100)
    one.other, other.other = other, one
    assert rewritten(Dataset(), sampler=one)


class _ReadsALoader(Dataset):
    def __getitem__(self, index):
        return next(iter(self.other)).sum() + index


@pytest.mark.parametrize("inner", [Dataset(8), [0.0, 1.0] * 4])
def test_a_loader_that_a_dataset_reads_has_no_workers_inside_of_one(inner):
    context, data = Context(torch), _ReadsALoader(8)
    loader_workers.apply(context, loader_workers.Options(workers=2))
    arguments = {"batch_size": 2, "num_workers": 0, "persistent_workers": False, "prefetch_factor": None, "multiprocessing_context": "fork"}
    try:
        changes = context.loader_rewrites[0](inner, arguments, frozenset())
        data.other = torch.utils.data.DataLoader(inner, batch_size=2, **changes)
        loader = torch.utils.data.DataLoader(
            data, batch_size=2, multiprocessing_context="fork", **context.loader_rewrites[0](data, arguments, frozenset()))
        assert data.other.num_workers == loader.num_workers == 2
        assert torch.cat(list(loader)).tolist() == [1 + index for index in range(8)]
    finally:
        context.undo()


def test_datasets_with_device_tensors_are_left_alone():
    data = torch.utils.data.TensorDataset(torch.ones(100, device="meta"))
    assert rewritten(data) == {}
    assert rewritten(torch.utils.data.Subset(data, range(50))) == {}
    assert rewritten(torch.utils.data.TensorDataset(torch.ones(100)))


class _Noisy(Dataset):
    """With a generator that it was built with, or gets before the first pass."""

    def __init__(self, late=False):
        super().__init__(24)
        self.chance = None if late else random.Random(0)

    def __getitem__(self, index):
        return self.chance.random()


@pytest.mark.parametrize("late", [False, True])
def test_numbers_from_a_generator_of_its_own_are_drawn_once(late, capfd):
    notices.tell_once.cache_clear()
    context, dataset = Context(torch), _Noisy(late)
    loader_workers.apply(context, loader_workers.Options(workers=2))
    arguments = {"batch_size": 4, "num_workers": 0, "persistent_workers": False, "prefetch_factor": None, "multiprocessing_context": "fork"}
    try:
        changes = context.loader_rewrites[0](dataset, arguments, frozenset())
        assert bool(changes) is late
        loader = torch.utils.data.DataLoader(dataset, batch_size=4, **changes)
        dataset.chance = random.Random(0)
        drawn = [number for _ in range(2) for batch in loader for number in batch.tolist()]
    finally:
        context.undo()
    expected = random.Random(0)
    assert drawn == [expected.random() for _ in drawn]
    assert bool(rewritten(Dataset(), collate_fn=_Noisy(late).__getitem__)) is late
    assert capfd.readouterr().err.count("_Noisy or its collate_fn has a random generator of its own (Random)") == 1


def test_shuffled_order_is_the_same_in_every_epoch_with_persistent_workers():
    orders = []
    for workers in (0, 2):
        context = Context(torch)
        changes = {}
        dataset = Dataset(24)
        if workers:
            loader_workers.apply(context, loader_workers.Options(workers=workers))
            arguments = {"batch_size": 4, "num_workers": 0, "persistent_workers": False, "prefetch_factor": None}
            changes = context.loader_rewrites[0](dataset, arguments, frozenset())
            assert changes["persistent_workers"]
        torch.manual_seed(5)
        loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, **changes)
        orders.append([batch.tolist() for _ in range(3) for batch in loader] + [torch.rand(1).item()])
        context.undo()
    assert orders[0] == orders[1]


class Scaled(torch.utils.data.Dataset):
    """Of a size that a script may change as it goes, inside of an object of its own."""

    def __init__(self):
        self.settings = types.SimpleNamespace(scale=1, labels=[0] * 20_000)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index * self.settings.scale + self.settings.labels[777 * index]


def _passes(script, own=0, contexts=None):
    """What `script(loader, dataset)` collects without the technique and with it, and the random numbers that follow. own: workers
    of the script's. contexts: a list for what the technique was applied with."""
    found = []
    for technique in (False, True):
        context, changes, data = Context(torch), {"num_workers": own}, Scaled()
        if technique:
            loader_workers.apply(context, loader_workers.Options(workers=2))
            arguments = {"batch_size": 4, "num_workers": own, "persistent_workers": False, "prefetch_factor": None}
            changes |= context.loader_rewrites[0](data, arguments, frozenset())
            assert changes["persistent_workers"]
            if contexts is not None:
                contexts.append(context)
        torch.manual_seed(5)
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, **changes)
        try:
            found.append([*script(loader, data), torch.rand(1).item()])
        finally:
            context.undo()
    return found


def _zipped(loader, dataset):
    return [(a.tolist(), b.tolist()) for _ in range(2) for a, b in zip(loader, loader)]


def _beside_another(loader, dataset):
    other = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True, num_workers=loader.num_workers)
    return [(a.tolist(), b.tolist()) for _ in range(3) for a, b in zip(loader, other)]


def _begun_early(loader, dataset):
    found = []
    for _ in range(3):
        iterator, number = iter(loader), torch.rand(1).item()
        found.append([number, len(iterator), *(batch.tolist() for batch in iterator)])
    iter(loader)
    return found + [batch.tolist() for batch in loader]


def _nested(loader, dataset):
    return [(batch.tolist(), sum(other.sum().item() for other in loader)) for _ in range(2) for batch in loader]


def _nested_in_part(loader, dataset):
    """The outer pass has had its last batch, and not been told that it was, when an inner one is left early."""
    return [(batch.tolist(), next(iter(loader)).tolist()) for batch in itertools.islice(loader, 9)]


def _broken_off(loader, dataset):
    found = []
    for _ in range(3):
        for batch in loader:
            found.append(batch.tolist())
            break
    return found


def _endless(loader, dataset):
    iterator, found = iter(loader), []
    for _ in range(15):
        try:
            found.append(next(iterator).tolist())
        except StopIteration:
            iterator = iter(loader)
            found.append(next(iterator).tolist())
    return found


def _curriculum(loader, dataset):
    found = []
    for epoch in range(3):
        dataset.settings.scale = 1 + epoch // 2
        found += [batch.tolist() for batch in loader]
    return found


def _relabelled(loader, dataset):
    """Of many labels one is corrected, in the list that they are in."""
    found = []
    for epoch in range(3):
        dataset.settings.labels[777 * (5 + epoch)] = 100
        found += [batch.tolist() for batch in loader]
    return found


@pytest.mark.parametrize(("script", "own"), [
    (_relabelled, 0), (_relabelled, 2), (_zipped, 0), (_zipped, 2), (_beside_another, 0), (_begun_early, 0), (_begun_early, 2), (_nested, 0), (_nested, 2), (_nested_in_part, 0), (_nested_in_part, 2),
    (_broken_off, 0), (_endless, 0), (_endless, 2), (_curriculum, 0), (_curriculum, 2)])
def test_passes_and_changed_datasets_are_as_without_the_technique(script, own):
    plain, changed = _passes(script, own)
    assert changed == plain


def test_workers_live_on_behind_a_pass_that_was_broken_off():
    def script(loader, dataset):
        for _ in range(3):
            for batch in loader:
                yield batch.tolist()
                break
            if loader.num_workers:
                began.append([worker.pid for worker in loader._iterator._workers])
                alive.append({child.pid for child in multiprocessing.active_children()} - before)

    began, alive = [], []
    before = {child.pid for child in multiprocessing.active_children()}
    plain, changed = _passes(script)
    assert changed == plain
    assert began == [began[0]] * 3 and alive == [set(began[0])] * 3


class FromOneFile(torch.utils.data.Dataset):
    """Its file is opened when it is made, or when the first item is asked for."""

    def __init__(self, path, lazy):
        self.path, self.file = path, None if lazy else io.FileIO(path)

    def __len__(self):
        return 400

    def __getitem__(self, index):
        self.file = self.file or io.FileIO(self.path)
        self.file.seek(4 * index)
        return int.from_bytes(self.file.read(4), "little")


@pytest.mark.parametrize("opened", ["at once", "before the first pass", "between two passes", "by the workers"])
def test_forked_workers_do_not_share_a_file(opened, tmp_path):
    (tmp_path / "data").write_bytes(b"".join(number.to_bytes(4, "little") for number in range(400)))
    dataset, context = FromOneFile(tmp_path / "data", lazy=opened != "at once"), Context(torch)
    loader_workers.apply(context, loader_workers.Options(workers=2))
    arguments = {"batch_size": 4, "num_workers": 0, "persistent_workers": False, "prefetch_factor": None, "multiprocessing_context": "fork"}
    changes = context.loader_rewrites[0](dataset, arguments, frozenset())
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, **changes)
    if opened == "before the first pass":
        assert dataset[0] == 0
    try:
        for _ in range(2):
            assert torch.cat(list(loader)).tolist() == list(range(400))
            if opened == "between two passes":
                assert dataset[1] == 1
        assert loader.num_workers == (2 if opened == "by the workers" else 0)
    finally:
        context.undo()


def test_a_pass_that_began_before_the_technique_was_taken_back_goes_on():
    def script(loader, dataset):
        iterator = iter(loader)
        for context in contexts:
            context.undo()
        return [batch.tolist() for batch in iterator]

    contexts: list[Context] = []
    plain, changed = _passes(script, contexts=contexts)
    assert changed == plain and len(plain) == 7


def test_without_looking_passes_would_go_wrong(monkeypatch):
    monkeypatch.setattr(_passes_with_workers, "_keep_passes", lambda *_: None)
    for script in (_zipped, _nested, _curriculum):
        plain, changed = _passes(script, own=2)
        assert changed != plain


def test_workers_live_on_as_long_as_nothing_changes(monkeypatch):
    pids, looks, look = [], [], _passes_with_workers.Watch.at_pass
    monkeypatch.setattr(_passes_with_workers.Watch, "at_pass", lambda self, *things: looks.append(1) or look(self, *things))

    def script(loader, dataset):
        for epoch in range(4):
            dataset.settings.scale = 1 + epoch // 2
            list(loader)
            if loader.persistent_workers:
                pids.append(loader._iterator._workers[0].pid)
        return []

    _passes(script)
    assert pids[0] == pids[1] and pids[2] == pids[3] and pids[1] != pids[2]
    assert len(looks) == 4, "a second one for a pass has hardly any time, and one that tells nothing starts workers anew each time"


class Cropped(Dataset):
    """At random."""

    def __getitem__(self, index):
        return torch.rand(()), random.random()


@pytest.mark.parametrize("own", [0, 2])
def test_passes_that_a_script_seeds_draw_what_workers_draw_that_begin_with_them(own):
    """Evaluations are compared with each other, and an epoch of a training that is resumed with the one that was interrupted."""

    def script(loader):
        found = []
        for seed in (7, 7, 8, 7, 7, None, None):
            if seed is not None:
                torch.manual_seed(seed)
            found.append([batch[0].tolist() + batch[1].tolist() for batch in loader])
            pids.append([worker.pid for worker in loader._iterator._workers] if loader.persistent_workers else [])
        return found

    data, context, pids = Cropped(24), Context(torch), []
    plain = script(torch.utils.data.DataLoader(data, batch_size=4, num_workers=2))
    loader_workers.apply(context, loader_workers.Options(workers=2))
    arguments = {"batch_size": 4, "num_workers": own, "persistent_workers": False, "prefetch_factor": None}
    try:
        changed = script(torch.utils.data.DataLoader(data, **{**arguments, **context.loader_rewrites[0](data, arguments, frozenset())}))
    finally:
        context.undo()
    assert changed[:5] == plain[:5] and plain[0] == plain[1] == plain[4] != plain[2]
    assert len({str(epoch) for epoch in changed}) == 4
    assert pids[-1] == pids[-2] == pids[-3] != pids[-4], "workers live on where nobody seeds"


def _evaluating(loader, dataset):
    """As a framework does that keeps each loader it was ever given; the training goes on meanwhile, or is between two epochs."""
    kept, found = [], []

    def evaluate(data):
        changes = {"num_workers": loader.num_workers, "persistent_workers": loader.persistent_workers}
        kept.append(torch.utils.data.DataLoader(data, batch_size=8, **changes))
        found.extend(batch.tolist() for batch in kept[-1])

    for epoch in range(4):
        for number, batch in enumerate(loader):
            found.append(batch.tolist())
            if epoch < 2 and number in (1, 5):
                evaluate(dataset)
        evaluate(dataset)
        pids.append([[worker.pid for worker in one._iterator._workers] if one._iterator else [] for one in (loader, *kept)])
    return found


pids: list[list[list[int]]] = []        # after each epoch: of the workers of each loader


def test_a_loader_with_workers_that_live_on_can_be_copied_and_pickled():
    """As a framework does that keeps its arguments; the copy draws what one without this draws."""

    def script(loader, dataset):
        list(loader)
        found = []
        for twin in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
            found.append([batch.tolist() for _ in range(2) for batch in twin])
            assert twin._iterator is None
        assert loader._iterator is not None or not loader.persistent_workers
        return found

    plain, changed = _passes(script)
    assert changed == plain


def test_loaders_that_are_kept_for_nothing_do_not_keep_their_workers():
    pids.clear()
    plain, changed = _passes(_evaluating)
    assert changed == plain
    for numbers in pids[4:]:
        assert sum(map(len, numbers)) <= 4 and not any(numbers[1:-1])
    assert pids[5][0] == pids[6][0] == pids[7][0] and len(pids[7][0]) == 2      # those of the training live on


def test_a_gradient_that_the_script_drops_stays_dropped():
    """Between backward and step: a layer that is frozen in some steps. One that backward left out gets its zeros."""

    def trained(technique):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        unused = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([*model.parameters(), unused], 0.1, weight_decay=0.1)
        unused.grad = torch.ones(3)
        context = Context(torch)
        context.optimizers = [optimizer]
        if technique:
            zero_grad_none.apply(context, zero_grad_none.Options())
        for step in range(6):
            optimizer.zero_grad(set_to_none=False)
            if step != 4:           # a step without a backward: momentum acts
                model(torch.randn(5, 4)).square().mean().backward()
            if step % 2:
                for parameter in model[0].parameters():
                    parameter.grad = None
            optimizer.step()
        context.undo()
        return [parameter.detach().clone() for parameter in (*model.parameters(), unused)]

    assert all(map(torch.equal, trained(True), trained(False)))


def loading(**changes):
    loader = LoaderFacts(batch_size=8, dataset_length=1000, batch_bytes=1 << 20)
    machine = MachineFacts(cpu_count=8.0, memory_bytes=1 << 34, shm_bytes=1 << 30)
    facts = Facts(step_ms=100.0, input_wait_ms=60.0, loaders=(loader,), machine=machine)
    return dataclasses.replace(facts, **changes)


def test_worker_counts_follow_need_quota_memory_and_ranks():
    def counts(facts):
        return [options.workers for options in loader_workers.variants(facts)]

    assert counts(loading()) == [2, 8, 4, 2]        # 60 ms of loading beside 40 ms of computing, then all cores
    assert counts(loading(input_wait_ms=90.0))[0] == 8
    assert counts(loading(input_wait_ms=100.0, input_exposed_ms=25.0))[0] == 2, "100 ms of loading beside 75 ms of an accelerator's work"
    assert counts(loading(world_size=4)) == [2, 2], "two cores per rank: both are needed, and the second variant prefetches more"
    assert max(counts(loading(machine=MachineFacts(cpu_count=1.5)))) == 1
    small = MachineFacts(cpu_count=8.0, shm_bytes=14 << 20)
    assert max(counts(loading(machine=small))) == 2
    tiny = MachineFacts(cpu_count=8.0, shm_bytes=1 << 20)
    assert not loader_workers.eligible(loading(machine=tiny))
    full = MachineFacts(cpu_count=8.0, shm_bytes=0)
    assert not loader_workers.eligible(loading(machine=full)), "a full /dev/shm is none that is not known"
    little = MachineFacts(cpu_count=8.0, memory_bytes=96 << 20, shm_bytes=1 << 30)        # a tenth of it holds three workers
    assert max(counts(loading(machine=little))) == 3 and max(counts(loading(machine=little, world_size=3))) == 1
    for bad in ({"iterable": True}, {"holds_device_tensors": True}):
        assert not loader_workers.eligible(loading(loaders=(LoaderFacts(**bad),)))
    assert not loader_workers.eligible(loading(input_wait_ms=1.0))
    assert loader_workers.bound(loading()) == 0.6


def test_other_numbers_of_workers_than_the_scripts_are_tried():
    def tried(workers, **changes):
        facts = loading(loaders=(LoaderFacts(num_workers=workers, batch_bytes=1 << 20, **chosen),), **changes)
        return [(options.workers, options.override, options.prefetch) for options in loader_workers.variants(facts)]

    chosen = {}
    # One worker takes a step of 100 ms for a batch, and the rest of the step 40 ms: three keep up.
    assert tried(1) == [(3, True, 2), (8, True, 2), (1, False, 4), (1, False, 2)]
    assert tried(16) == [(16, False, 4), (16, False, 2), (8, True, 2)], "more than there are cores for"
    assert tried(8) == [(8, False, 4), (8, False, 2)]
    little = MachineFacts(cpu_count=8.0, memory_bytes=1 << 34, shm_bytes=14 << 20)       # half holds two workers that work twice ahead
    assert tried(2, machine=little) == [(2, False, 2)]
    chosen = {"persistent_workers": True, "prefetch_factor": 6}
    assert tried(1) == [(3, True, 2), (8, True, 2)]
    assert tried(1, machine=dataclasses.replace(little, shm_bytes=30 << 20)) == [(2, True, 2)], "each of them works six batches ahead"
    assert tried(8) == [] and not loader_workers.eligible(loading(loaders=(LoaderFacts(num_workers=8, **chosen),)))


def test_input_that_an_accelerator_hides_is_no_reason_against_others():
    hidden = loading(input_wait_ms=90.0, optimizer_ms=20.0, input_exposed_ms=0.0)
    assert _common.computing(hidden) == pytest.approx(0.8)
    assert loader_workers.bound(hidden) == 0.9, "once its work takes less, that shows"
    assert _common.computing(dataclasses.replace(hidden, input_exposed_ms=None)) == 0.0


def test_workers_are_proved_by_living_processes():
    options = loader_workers.Options(workers=1)
    workload = toy.start(loader_workers, options)
    workload.train(3)
    evidence = workload.evidence()
    workload.context.undo()
    assert loader_workers.active(evidence, options).active
    for lacking in ({"live_workers": 0}, {"notes": {}}, {"loaders": (LoaderFacts(),)}):
        assert not loader_workers.active(dataclasses.replace(evidence, **lacking), options).active


# -- pin-memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args,kwargs,expected",
    [
        (("cuda",), {}, True), (("cuda:1",), {}, True), ((0,), {}, True), ((torch.device("cuda"),), {}, True),
        ((), {"device": "cuda"}, True), (("cpu",), {}, False), ((torch.float16,), {}, False), ((), {}, False),
        ((torch.ones(1),), {}, False), ((), {"other": torch.ones(1)}, False), ((True,), {}, False),
    ],
)
def test_where_a_copy_goes(args, kwargs, expected):
    assert pin_memory.to_cuda(torch, args, kwargs) is expected


@pytest.fixture
def copying(monkeypatch):
    """pin-memory on, with pinned memory and copies to CUDA that are made up: what each copy was told, and how a loader makes a batch."""
    calls, places, plain = [], [], torch.zeros(1)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: (calls.append(kwargs), places.append(args)), raising=False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self.clone())
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self is not plain)
    context = Context(torch)
    pin_memory.apply(context, pin_memory.Options())

    def batch():
        next(iter(torch.utils.data.DataLoader(Dataset())))
        return torch.utils.data._utils.pin_memory.pin_memory({"images": [torch.ones(2)], "label": (torch.ones(2), "text")})

    yield types.SimpleNamespace(context=context, calls=calls, places=places, plain=plain, batch=batch)
    context.undo()
    assert not hasattr(torch.utils.data._utils.pin_memory.pin_memory, "__wrapped__")


def proof_of_pinning(context):
    evidence = Evidence(notes={key: str(value) for key, value in context.notes.items()}, loaders=(LoaderFacts(pin_memory=True),))
    return pin_memory.active(evidence, pin_memory.Options())


def test_only_batches_that_a_loader_pinned_are_copied_without_blocking(copying):
    """A pinned buffer of the script's own may be written to as soon as its copy has returned."""
    copying.batch()["images"][0].to("cuda")
    batch = copying.batch()
    pinned, other, own = batch["images"][0], batch["label"][0], torch.ones(1).pin_memory()
    for tensor, args, kwargs in (
        (pinned, ("cuda",), {}), (other, ("cuda",), {}), (own, ("cuda",), {}), (copying.plain, ("cuda",), {}), (pinned, ("cpu",), {}),
        (pinned, ("cuda",), {"non_blocking": False}), (pinned, ("cuda", torch.float32, False), {}),
    ):
        tensor.to(*args, **kwargs)
    assert copying.calls == [{}, {"non_blocking": True}, {"non_blocking": True}, {}, {}, {}, {"non_blocking": False}, {}]
    assert proof_of_pinning(copying.context).active
    rewrite = copying.context.loader_rewrites[0]
    assert rewrite(None, {"pin_memory": False}, frozenset()) == {"pin_memory": True}
    assert rewrite(None, {"pin_memory": True}, frozenset()) == {}


def test_what_the_script_copies_without_blocking_itself_is_watched_as_well(copying):
    """As long as its batches were not pinned, the device had them when the call returned: it may write to them."""
    for number in range(5):
        labels = copying.batch()["label"][0]
        labels.to("cuda", non_blocking=True)
        if number < 3:
            assert proof_of_pinning(copying.context).active is (number > 0)
        if number >= 2:
            labels[0] = -100
    assert copying.calls == [{"non_blocking": 0 < number <= 2} for number in range(5)]
    proof = proof_of_pinning(copying.context)
    assert not proof.active and "writes to a batch" in proof.evidence


def test_that_is_so_where_it_is_given_by_position(copying):
    for _ in range(2):
        copying.batch()["label"][0].to("cuda", torch.float32, True)
    assert copying.places == [("cuda", torch.float32, False), ("cuda", torch.float32, True)] and copying.calls == [{}, {}]


@pytest.mark.parametrize("first", [0, 2])
def test_copies_of_batches_that_the_script_writes_to_wait(first, copying, capsys):
    """`labels[~mask] = -100` behind `labels.cuda()` would go into a copy that is still under way."""
    for number in range(5):
        labels = copying.batch()["label"][0]
        labels.to("cuda")
        if number >= first:
            labels[0] = -100
    assert copying.calls == [{"non_blocking": True} if 0 < number <= first else {} for number in range(5)]
    assert capsys.readouterr().err.count("the script writes to a batch behind its copy to the device; copies wait as before") == 1
    proof = proof_of_pinning(copying.context)
    assert not proof.active and "writes to a batch" in proof.evidence


def test_what_is_watched_has_a_limit(copying, monkeypatch):
    """Iterators of a kind of their own do not say when the next batch is asked for."""
    monkeypatch.setattr(pin_memory, "MOST_WATCHED", 2)
    labels = copying.batch()["label"][0]
    for _ in range(5):
        labels.to("cuda")
    assert copying.calls == [{}, {}, *[{"non_blocking": True}] * 3]


def test_tensors_made_in_inference_mode_are_copied_as_before(copying):
    """They do not tell who writes to them."""
    copying.batch()["label"][0].to("cuda")
    with torch.inference_mode():
        copying.batch()["label"][0].to("cuda")
    assert copying.calls == [{}, {}]


# -- process-wide settings -------------------------------------------------------------------------------------------


def test_tf32_is_set_and_restored():
    context = Context(torch)
    before = torch.backends.cuda.matmul.allow_tf32
    tf32.apply(context, tf32.Options())
    assert torch.backends.cuda.matmul.allow_tf32 is True
    context.undo()
    assert torch.backends.cuda.matmul.allow_tf32 is before


def test_tf32_beside_a_script_that_uses_the_newer_setting():
    probe = """
import torch
from saturate.agent.context import Context
from saturate.techniques import tf32
torch.backends.cuda.matmul.fp32_precision = "ieee"
context = Context(torch)
tf32.apply(context, tf32.Options())
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
context.undo()
assert torch.backends.cuda.matmul.fp32_precision == "ieee"
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_allocator_joins_what_the_user_set(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    assert allocator.environment(allocator.Options()) == {
        name: "max_split_size_mb:128,expandable_segments:True" for name in allocator.CUDA_VARIABLES
    }, "whichever of the two a version of torch reads, the user's setting is in it"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    assert allocator.environment(allocator.Options())["PYTORCH_ALLOC_CONF"] == "backend:cudaMallocAsync,expandable_segments:True"
    jemalloc = allocator.Options("jemalloc", "/lib/libjemalloc.so.2")
    assert allocator.environment(jemalloc)["LD_PRELOAD"] == "/lib/libjemalloc.so.2:/lib/other.so"
    with pytest.raises(NotApplied, match="not loaded"):
        allocator.apply(Context(torch), jemalloc)
    for bad in (("jemalloc", ""), ("expandable_segments", "/x"), ("glibc", "/x"), ("musl", ""), ("jemalloc", "libjemalloc.so"),
                ("jemalloc", "/lib/libjemalloc.so.2:/x.so"), ("jemalloc", "/lib/libjemalloc.so.2 /x.so"), ("jemalloc", "/lib/libother.so")):
        with pytest.raises(ValueError):
            allocator.Options(*bad)


def test_a_preloaded_library_is_recognised(tmp_path):
    with open("/proc/self/maps", encoding="utf-8") as maps:
        library = next(line.split()[-1] for line in maps if "libc.so" in line or "libc-" in line)
    context = Context(torch)
    (tmp_path / "libtcmalloc.so").symlink_to(library)
    library = str(tmp_path / "libtcmalloc.so")
    options = allocator.Options("tcmalloc", library)
    allocator.apply(context, options)
    evidence = Evidence(notes=dict(context.notes), environment={"LD_PRELOAD": library})
    assert allocator.active(evidence, options).active
    assert not allocator.active(dataclasses.replace(evidence, notes={}), options).active


def test_thread_variants_and_proof():
    facts = Facts(threads=8, machine=MachineFacts(cpu_count=8.0, physical_cores=4))
    assert [options.threads for options in cpu_threads.variants(facts)] == [4, 1, 4, 4]
    assert [options.bind for options in cpu_threads.variants(facts)] == [False, False, True, False]
    beside_workers = dataclasses.replace(facts, loaders=(LoaderFacts(num_workers=2),))
    assert not any(options.bind for options in cpu_threads.variants(beside_workers))
    assert not cpu_threads.eligible(Facts(threads=1))
    assert cpu_threads.eligible(Facts(device="cuda", threads=64, machine=MachineFacts(cpu_count=4.0)))
    assert not cpu_threads.eligible(Facts(device="cuda", threads=4, machine=MachineFacts(cpu_count=4.0)))
    options = cpu_threads.Options(threads=2, passive=True)
    evidence = Evidence(threads=2, environment=cpu_threads.environment(options))
    assert cpu_threads.active(evidence, options).active
    assert not cpu_threads.active(dataclasses.replace(evidence, threads=8), options).active
    assert not cpu_threads.active(dataclasses.replace(evidence, environment={}), options).active


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no thread affinity")
def test_forked_children_of_a_bound_process_get_all_cores_back():
    probe = """
import os, sys
from saturate.techniques import cpu_threads
class Notes:
    def note(self, key, value): pass
everything = os.sched_getaffinity(0)
cpu_threads.apply(Notes(), cpu_threads.Options(threads=1, bind=True))
os.sched_setaffinity(0, {min(everything)})     # what OpenMP does to the main thread
child = os.fork()
if not child:
    os._exit(0 if os.sched_getaffinity(0) == everything else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


# -- ddp-options -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed training")
def test_ddp_is_constructed_with_the_options_that_the_user_left_alone():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        context = Context(torch)
        options = ddp_options.Options(static_graph=True, bucket_mib=7)
        ddp_options.apply(context, options)
        assert not ddp_options.active(Evidence(notes=dict(context.notes)), options).active
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        assert model.gradient_as_bucket_view and model.static_graph and model.bucket_bytes_cap == 7 << 20
        assert ddp_options.active(Evidence(notes=dict(context.notes)), options).active
        own = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), bucket_cap_mb=3)
        assert own.bucket_bytes_cap == 3 << 20
        context.undo()
        assert not torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)).gradient_as_bucket_view
    finally:
        torch.distributed.destroy_process_group()


def test_ddp_eligibility():
    facts = Facts(world_size=2, modules=(ModuleFacts(distributed=True),))
    assert ddp_options.eligible(facts)
    assert not ddp_options.eligible(dataclasses.replace(facts, world_size=1))
    assert not ddp_options.eligible(dataclasses.replace(facts, modules=(ModuleFacts(),)))
