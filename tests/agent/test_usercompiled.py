"""Whether the script compiles a module, told without a hook on it."""

from __future__ import annotations

import pytest

from saturate.agent import usercompiled
from saturate.records.facts import Facts, MachineFacts, ModuleFacts
from saturate.techniques import activation_checkpointing, compile, dynamic_batch, micro_batch

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()
    dynamo.utils.counters.clear()


def test_what_is_compiled_is_told_by_the_graph_of_its_backward_pass():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    x = torch.ones(3, 4)

    def loss_of(predicted):
        return (predicted ** 2).mean()

    def whole(inputs):
        return loss_of(net(inputs))

    def compiles(loss):
        loss.backward()
        graph = usercompiled.Graph()
        graph.saw(loss)
        return graph.compiles(net)

    assert not usercompiled.anything([net])
    assert compiles(torch.compile(loss_of, backend="aot_eager")(net(x))) is False and usercompiled.anything([net])
    assert compiles(torch.compile(whole, backend="aot_eager")(x)) is True
    assert compiles(torch.compile(net, backend="aot_eager")(x).mean()) is True
    assert compiles(torch.compile(whole, backend="eager")(x)) is None, "its nodes look like those of operators"
    assert usercompiled.Graph().compiles(net) is None
    graph = usercompiled.Graph()
    graph.saw((loss_of(net(x)), torch.ones(1)))
    assert graph.eager == {id(p) for p in net.parameters()} and not graph.compiled


def test_a_forward_that_is_compiled_shows_it():
    class Decorated(torch.nn.Module):
        @torch.compile
        def forward(self, x):
            return x

    assert usercompiled.by_itself(Decorated()) and usercompiled.by_itself(torch.compile(torch.nn.Identity()))
    in_place, replaced = torch.nn.Identity(), torch.nn.Identity()
    in_place.compile()
    replaced.forward = torch.compile(replaced.forward)
    assert usercompiled.by_itself(in_place) and usercompiled.by_itself(replaced) and not usercompiled.by_itself(torch.nn.Identity())
    assert usercompiled.Graph().compiles(torch.nn.Sequential(torch.nn.Linear(1, 1), in_place)) is True


def test_only_what_is_known_to_run_eagerly_is_compiled_or_cut():
    def facts(*compiled):
        return Facts(modules=tuple(ModuleFacts(compiled=one) for one in compiled), memory_limit_bytes=1 << 30, machine=MachineFacts(compiler="g++"))

    for technique in (compile, activation_checkpointing, micro_batch, dynamic_batch):
        assert technique.eligible(facts(True)).reason.startswith("the script already compiles its model")
        assert technique.eligible(facts(None)).reason.startswith("the script compiles something itself")
    assert compile.eligible(facts(False)) and compile.eligible(facts(True, False))
    assert not micro_batch.eligible(facts(True, False)) and not micro_batch.eligible(facts(None, False)) and micro_batch.eligible(facts(False))


SCRIPT = """
import torch
@torch.compile(backend="aot_eager")
def loss_fn(output):
    return (output ** 2).mean()
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
whole = torch.compile(lambda x: (net(x) ** 2).mean(), backend="aot_eager")
for _ in range(2000):
    opt.zero_grad(); WHAT.backward(); opt.step()
"""


@pytest.mark.parametrize(("what", "compiled"), [
    ("loss_fn(net(torch.ones(2, 4)))", False),
    ("whole(torch.ones(2, 4))", True),
])
def test_a_script_that_compiles_its_loss_only_has_a_model_that_runs_eagerly(start, script, what, compiled):
    trial = start(str(script(SCRIPT.replace("WHAT", what))))
    trial.wait_ready()
    facts = trial.ask("facts")
    assert facts["compiles"] is True and [one["compiled"] for one in facts["modules"]] == [compiled]
