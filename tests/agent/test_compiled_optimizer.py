"""A script that compiles its optimizer's step is followed, and dynamo does not see by what."""

from __future__ import annotations

import types

import pytest

from saturate.agent import seams

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    import torch._dynamo as dynamo

    dynamo.reset()
    yield
    dynamo.reset()


def test_hooks_on_a_compiled_step_are_not_traced():
    told: list[tuple[str, bool]] = []
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    session = types.SimpleNamespace(undo=[], step_begins=lambda optimizer: told.append(("begins", torch.compiler.is_compiling())),
                                    step_ends=lambda optimizer: told.append(("ends", torch.compiler.is_compiling())))
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(net.parameters())
    seams._optimizers(session, torch)
    try:
        step = torch.compile(optimizer.step, backend=backend)
        for _ in range(3):
            net(torch.ones(2, 3)).sum().backward()
            step()
    finally:
        for undo in session.undo:
            undo()
    assert told == [("begins", False), ("ends", False)] * 3
    assert len(graphs) == 1, "the step itself is compiled as without them"
