"""What the agent sets for a while goes, and what stood there before stays."""

from __future__ import annotations

import types

import pytest

torch = pytest.importorskip("torch")

from saturate.agent.attributes import replace  # noqa: E402 - after the check for torch
from saturate.agent.context import Context  # noqa: E402
from saturate.agent.guest import Guest  # noqa: E402
from saturate.agent.inspection import Inspection  # noqa: E402
from saturate.data import device_copies  # noqa: E402
from saturate.records.facts import Evidence, LoaderFacts  # noqa: E402
from saturate.techniques import _tensor_moves, device_prefetch, pin_memory  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Where anything was compiled, in another test of this process too, no hook may be set."""
    import torch._dynamo as dynamo

    dynamo.utils.counters.clear()


class Base:
    def name(self):
        return "base"


class Derived(Base):
    pass


def test_an_inherited_attribute_is_inherited_again():
    undo = replace(Derived, "name", lambda self: "ours")
    assert Derived().name() == "ours"
    undo()
    assert "name" not in vars(Derived) and Derived().name() == "base"


def test_an_own_attribute_comes_back_and_a_later_one_stays():
    class Own(Base):
        def name(self):
            return "own"

    undo = replace(Own, "name", lambda self: "ours")
    undo()
    assert Own().name() == "own"
    undo = replace(Own, "name", lambda self: "ours")
    Own.name = lambda self: "later"
    undo()
    assert Own().name() == "later"


def inspection(model=None, guard=lambda function, *args: function(*args)):
    """Of one step, as on a device: copies are watched as well."""
    model = model or torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    session = types.SimpleNamespace(torch=torch, plan={"mode": "run", "techniques": []}, leaves=[], guard=guard,
                                    optimizers=types.SimpleNamespace(living=lambda: [optimizer]))
    found = Inspection(session)
    found._watch_copies(torch)
    return found


def methods():
    return {name: vars(torch.Tensor).get(name) for name in ("to", "cuda")} | {"grad": vars(torch.nn.Parameter).get("grad")}


def test_the_watched_step_leaves_the_copies_of_techniques_in_place(monkeypatch):
    """They are on since torch was imported, and copies are watched on a device only."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self.clone())
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    before = methods()
    context = Context(torch)
    pin_memory.apply(context.of("pin-memory"), pin_memory.Options())
    copies = device_copies.Copies(torch, types.SimpleNamespace(busy=lambda: False))
    device_prefetch.install(context.of("device-prefetch"), copies, kind="cpu")
    wrapped = methods()
    watched = inspection()
    assert methods()["to"] is not wrapped["to"] and methods()["grad"] is not None
    watched.finish()
    assert methods() == wrapped != before
    batch = torch.utils.data._utils.pin_memory.pin_memory(torch.ones(3))
    copies.next_batch(batch, None)
    batch.to("cpu")
    assert copies.moved == 1
    context.undo()
    assert methods() == before == {"to": None, "cuda": None, "grad": None}


def test_a_technique_whose_wrapper_is_gone_is_not_active(monkeypatch):
    context = Context(torch)
    copies = device_copies.Copies(torch, types.SimpleNamespace(busy=lambda: False))
    device_prefetch.install(context.of("device-prefetch"), copies, kind="cpu")
    tensor = torch.ones(3)
    copies.next_batch(tensor, None)
    tensor.to("cpu")
    copies.ahead = 1
    loaders = (LoaderFacts(pin_memory=True, num_workers=1),)

    def active(technique):
        notes = {key: str(value) for key, value in context.notes.items()}
        return technique.active(Evidence(loaders=loaders, notes=notes), technique.Options())

    context.note("pin-memory", _tensor_moves.StandingNote(torch, "to", vars(torch.Tensor)["to"], "a pinned tensor was copied"))
    assert active(device_prefetch).active and active(pin_memory).active
    inner = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda *args, **kwargs: inner(*args, **kwargs))     # a script's own, around ours
    assert active(device_prefetch).active and active(pin_memory).active
    del torch.Tensor.to
    assert not active(device_prefetch).active and not active(pin_memory).active
    assert active(pin_memory).evidence == _tensor_moves.LOST
    monkeypatch.undo()
    context.undo()


def test_what_fails_while_a_forward_is_watched_does_not_end_it(monkeypatch):
    def weight(module, torch):
        raise TypeError("of ours")

    told = []
    guest = Guest(lambda: None)
    guest.tell_failure = lambda text, how: told.append(text)
    monkeypatch.setattr("saturate.agent.inspection.weight", weight)
    model = torch.nn.Linear(2, 2)
    watched = inspection(model, guest.guard)
    try:
        assert model(torch.ones(1, 2)).shape == (1, 2)
        assert guest.dead and "of ours" in told[0]
    finally:
        watched.finish()
