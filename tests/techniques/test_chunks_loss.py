"""A loss outside of the model that runs out of memory: the same training as with more of it."""

from __future__ import annotations

import copy
import pickle
import re
import weakref

import pytest

torch = pytest.importorskip("torch")

from chunk_models import out_of_memory  # noqa: E402 - after the import that decides whether to run at all
from torch.nn import functional  # noqa: E402

from saturate.agent.context import Context  # noqa: E402
from saturate.techniques import dynamic_batch  # noqa: E402


class Room:
    """Memory for a loss beside the activations of at most `limit` samples. `place`: where in the loss it runs out else. In slots: a look
    at a model does not find it."""

    __slots__ = ("limit", "place", "kept", "failures")

    def __init__(self, place="forward"):
        self.limit, self.place = None, place
        self.kept = []
        self.failures = []

    def mark(self, x):
        """Ones that a product with `x` saves for its backward."""
        ones = torch.ones_like(x)
        self.kept.append((weakref.ref(ones), len(x)))
        return ones

    def held(self):
        self.kept = [(reference, samples) for reference, samples in self.kept if reference() is not None]
        return sum(samples for _, samples in self.kept)

    def visit(self, place):
        if place == self.place and self.limit is not None and self.held() > self.limit:
            self.failures.append(place)
            raise out_of_memory()


class Visits(torch.autograd.Function):
    """The identity, whose backward is seen by a room."""

    @staticmethod
    def forward(ctx, x, room, place):
        ctx.room, ctx.place = room, place
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.room.visit(ctx.place)
        return gradient, None, None


class Net(torch.nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
        self.head = torch.nn.Linear(6, 3)
        self.dropout = dropout
        self.room = [Room()]

    def forward(self, x):
        for layer in self.layers:
            x = functional.dropout(torch.tanh(layer(x)) + x, self.dropout, self.training)
            x = x * self.room[0].mark(x)
        return self.head(x)


PLACES = ("forward", "first of the backward", "last of the backward")


@pytest.fixture
def limited(monkeypatch):
    """`limited(room)`: the mean squared error needs memory, in three places."""
    original = torch._C._nn.mse_loss

    def limit(room):
        def mse_loss(value, *others):
            room.visit(PLACES[0])
            return Visits.apply(original(Visits.apply(value, room, PLACES[2]), *others), room, PLACES[1])

        monkeypatch.setattr(torch._C._nn, "mse_loss", mse_loss)

    return limit


@pytest.fixture
def applied():
    """The technique on a model, until the end of the test."""
    contexts = []

    def apply(model):
        context = Context(torch)
        context.modules, context.device = (model.train(),), "cpu"
        contexts.append(context)
        dynamic_batch.apply(context, dynamic_batch.Options())
        return context

    yield apply
    for context in reversed(contexts):
        context.undo()


def twins(**kwargs):
    torch.manual_seed(0)
    plain = Net(**kwargs).double().train()
    tuned = copy.deepcopy(plain)
    tuned.room = [Room()]
    return plain, tuned


def batch(step, samples=8):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(samples, size, generator=generator, dtype=torch.float64) for size in (6, 3))


def doubled(seen):
    """A loss whose gradient a hook of the script doubles, once."""

    def loss(output, y):
        output.register_hook(lambda gradient: seen.append(1) or gradient * 2)
        return functional.mse_loss(output.view(-1), y.view(-1))

    return loss


def train(model, loss, before=lambda index: None, updates=12, accumulate=1):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(updates):
        for part in range(accumulate):
            before(step * accumulate + part)
            x, y = batch(step * accumulate + part)
            value = loss(model(x), y)
            value.backward()
            losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("at, place", [
    *((0, place) for place in PLACES), *((1, place) for place in PLACES), (5, PLACES[0]),
], ids=lambda value: value if isinstance(value, str) else {0: "the first batch", 1: "a guarded one", 5: "one as it was written"}[value])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loss_runs_out(at, place, accumulate, limited, applied, capfd):
    """What the model keeps makes room for it; the batches after it keep nothing."""
    plain, tuned = twins()
    once, again, heard = [], [], []
    expected = train(plain, doubled(once), accumulate=accumulate)
    room = tuned.room[0]
    room.place = place
    limited(room)
    applied(tuned)
    tuned.head.weight.register_hook(lambda gradient: heard.append(1))
    losses = train(tuned, doubled(again), lambda index: setattr(room, "limit", 4 if index >= at else None), accumulate=accumulate)
    assert room.failures == [place] and room.held() == 0
    assert losses == pytest.approx(expected, rel=1e-12)
    for a, b in zip(plain.parameters(), tuned.parameters()):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    assert len(once) == len(again) == len(heard) == 12 * accumulate, "a hook saw a gradient more or less than once"
    assert capfd.readouterr().err.count("ran out of memory; batches of this size run in 2 chunks") == 1


def test_two_models_of_one_loss_run_out(limited, applied):
    """Both are let go of."""
    (plain, tuned), found = twins(), []
    room = tuned.room[0]
    limited(room)
    applied(tuned)
    for model in (plain, tuned):
        for step in range(2):
            room.limit = 4
            (one, _), (two, _) = batch(step), batch(step + 9)
            model.zero_grad()
            functional.mse_loss(model(one), model(two)).backward()
        found.append([p.grad for p in model.parameters()])
    assert room.failures
    assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(*found))


@pytest.mark.parametrize("steps", [1, 3], ids=["a guarded one", "as it was written"])
@pytest.mark.parametrize("of, reason", [
    (lambda model, x, y: (model(x), y), "draws random numbers"),
    (lambda model, x, y: (model(x), model(x).detach() * 0 + y), "draws random numbers"),
], ids=["alone", "beside another"])
def test_what_cannot_run_again_is_not_let_go_of(steps, of, reason, limited, applied, capfd):
    """The script has its own error, with the reason, and what it does about that works."""
    plain, tuned = twins(dropout=0.3)
    room = tuned.room[0]
    limited(room)
    applied(tuned)
    found = []
    for model in (plain, tuned):
        for step in range(steps + 1):
            room.limit = 4 if model is tuned and step == steps else None
            x, y = batch(step)
            model.zero_grad()
            torch.manual_seed(step)
            output, target = of(model, x, y)
            try:
                functional.mse_loss(output, target).backward()
            except torch.OutOfMemoryError as error:
                assert any(reason in note for note in error.__notes__)
                output.square().mean().backward()
            else:
                if model is plain and step == steps:
                    model.zero_grad()
                    torch.manual_seed(step)
                    of(model, x, y)[0].square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert room.failures == ["forward"]
    assert re.search(f"saturate: dynamic-batch: Net the loss ran out of memory.*{reason}", capfd.readouterr().err)
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("loss, reason", [
    (lambda model, x, y: functional.mse_loss(model(x), model(x * 2)), "several forwards"),
    (lambda model, x, y: functional.mse_loss(model(x.requires_grad_()), y), "input is differentiated"),
    (lambda model, x, y: functional.mse_loss(model(x) * model.head.bias, y), "another way than through the model's output"),
])
def test_a_loss_that_cannot_be_made_up_for_says_why(loss, reason, limited, applied, capfd):
    """Of batches that ran as the script wrote them."""
    model = Net().double()
    limited(model.room[0])
    applied(model)
    for step in range(3):
        loss(model, *batch(step)).backward()
    model.room[0].limit = 4
    with pytest.raises(torch.OutOfMemoryError) as caught:
        loss(model, *batch(3))
    assert any(reason in note for note in caught.value.__notes__), caught.value.__notes__
    assert reason in capfd.readouterr().err


def test_the_backward_of_a_loss_as_it_was_written_is_not_made_up_for(limited, applied, capfd):
    model = Net().double()
    model.room[0].place = PLACES[1]
    limited(model.room[0])
    applied(model)
    for step in range(3):
        functional.mse_loss(model(batch(step)[0]), batch(step)[1]).backward()
    loss = functional.mse_loss(model(batch(3)[0]), batch(3)[1])
    assert "Guarded" not in loss.grad_fn.name()
    model.room[0].limit = 4
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    assert "memory ran out in the loss, outside of the model" in capfd.readouterr().err


@pytest.mark.parametrize("steps", [1, 3], ids=["a guarded one", "as it was written"])
def test_a_loss_that_does_not_fit_by_itself(steps, limited, applied):
    """Nor is anything said of a failure where the model keeps nothing that could be let go of."""
    model = Net().double()
    room = model.room[0]
    limited(room)
    applied(model)
    for step in range(steps + 1):
        room.limit = -1 if step == steps else None
        output = model(batch(step)[0])
        if step < steps:
            functional.mse_loss(output, batch(step)[1]).backward()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        functional.mse_loss(output, batch(step)[1])
    assert room.failures == ["forward", "forward"] and room.held() == 0
    assert any("did not fit without" in note for note in caught.value.__notes__)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        functional.mse_loss(torch.zeros(3, requires_grad=True), torch.zeros(3))
    assert not hasattr(caught.value, "__notes__")


def test_a_script_with_another_way_out_loses_nothing(limited, applied):
    """It splits its loss where that does not fit, and the batch runs again in chunks all the same."""
    plain, tuned = twins()
    room = tuned.room[0]
    limited(room)
    applied(tuned)
    found = []
    for model in (plain, tuned):
        for step in range(5):
            room.limit = -1 if model is tuned and step == 4 else None
            x, y = batch(step)
            model.zero_grad()
            output = model(x)
            try:
                functional.mse_loss(output, y).backward()
            except torch.OutOfMemoryError:
                room.limit = None
                (functional.mse_loss(output[:4], y[:4]) / 2 + functional.mse_loss(output[4:], y[4:]) / 2).backward()
        found.append([p.grad for p in model.parameters()])
    assert room.failures
    assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(*found))


def entropy(output):
    return functional.cross_entropy(output, torch.arange(len(output)) % 3)


LOSSES = {
    "cross_entropy": entropy,
    "CrossEntropyLoss": lambda output: torch.nn.CrossEntropyLoss(label_smoothing=0.1)(output, torch.arange(len(output)) % 3),
    "nll_loss": lambda output: functional.nll_loss(output.log_softmax(-1), torch.arange(len(output)) % 3),
    "kl_div": lambda output: functional.kl_div(output.log_softmax(-1), torch.full_like(output, 1 / 3), reduction="batchmean"),
    "binary_cross_entropy": lambda output: functional.binary_cross_entropy(output.sigmoid(), torch.full_like(output, 0.3)),
    "BCEWithLogitsLoss": lambda output: torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0))(output, torch.full_like(output, 0.3)),
    "l1_loss": lambda output: functional.l1_loss(output, torch.zeros_like(output)),
    "smooth_l1_loss": lambda output: functional.smooth_l1_loss(output, torch.zeros_like(output)),
    "HuberLoss": lambda output: torch.nn.HuberLoss(reduction="none")(output, torch.zeros_like(output)).sum(),
    "TripletMarginLoss": lambda output: torch.nn.TripletMarginLoss()(output, output.roll(1, 0), output.detach().roll(2, 0)),
    "ctc_loss": lambda output: functional.ctc_loss(output.view(8, 1, 3).log_softmax(-1), torch.tensor([[1, 2]]), [8], [2]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_torch_are_covered(name, monkeypatch, applied):
    plain, tuned = twins()
    failing, failed = [False], []

    def once(original):
        def loss(*args, **kwargs):
            if failing[0] and tuned.room[0].held():
                failed.append(name)
                raise out_of_memory()
            return original(*args, **kwargs)

        return loss

    for home in (torch, torch._C._nn):
        for function in dir(home):
            if function.endswith(("_loss", "_loss_nd", "kl_div", "binary_cross_entropy", "with_logits")) and function[0] != "_":
                monkeypatch.setattr(home, function, once(getattr(home, function)))
    applied(tuned)
    found = []
    for model in (plain, tuned):
        for step in range(2):
            failing[0] = step == 1 and model is tuned
            model.zero_grad()
            loss = LOSSES[name](model(batch(step)[0]))
            loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    assert failed == [name]
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-14) for a, b in zip(*found))


class Crowded(Net):
    """There is room for three layers of nine samples, one more than a batch has."""

    def forward(self, x):
        if self.room[0].limit is not None and self.room[0].held() + 3 * len(x) > 27:
            self.room[0].failures.append("model")
            raise out_of_memory()
        return super().forward(x)


def test_a_first_batch_that_leaves_no_room_for_its_proof(limited, applied):
    torch.manual_seed(0)
    plain = Crowded().double().train()
    tuned = copy.deepcopy(plain)
    room = tuned.room[0]
    limited(room)
    applied(tuned)
    room.limit = 4
    expected, losses = train(plain, functional.mse_loss), train(tuned, functional.mse_loss)
    assert "model" in room.failures and "forward" in room.failures
    assert losses == pytest.approx(expected, rel=1e-12)


# -- while memory does not run out -----------------------------------------------------------------------------------


def test_a_guarded_loss_is_the_script_s_own(applied):
    """Its value, its gradients, those of those; what it keeps, how long, and how often it can be differentiated."""
    plain, tuned = twins()
    applied(tuned)
    found, kept = [], []
    for model in (plain, tuned):
        values = []
        for options in ({}, {"retain_graph": True}, {"create_graph": True}):
            model(batch(0)[0])
            logits = model(batch(1, samples=9 + len(values))[0]) + 0
            gone = weakref.ref(logits)
            loss = entropy(logits)
            del logits
            kept.append(gone() is None)
            gradients = torch.autograd.grad(loss, list(model.parameters()), **options)
            values += [loss, *gradients]
            if options.get("retain_graph"):
                values += torch.autograd.grad(loss, list(model.parameters()))
            if options.get("create_graph"):
                values += torch.autograd.grad(sum(one.square().sum() for one in gradients), list(model.parameters()))
            else:
                with pytest.raises(RuntimeError, match="second time"):
                    loss.backward()
            assert ("GuardedLoss" in loss.grad_fn.name()) == (model is tuned)
        found.append(values)
    assert all(kept), "what the script has dropped was still held"
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-15) for a, b in zip(*found))


def test_what_is_changed_in_place_after_the_loss(applied):
    """The output, which the loss does not need any more, and the loss itself."""
    _, tuned = twins()
    applied(tuned)
    for step in range(2):
        logits = tuned(batch(step)[0]) + 0
        loss = entropy(logits)
        with torch.no_grad():
            logits.masked_fill_(logits < 0, 0)
        loss /= 2
        loss.backward()
    assert tuned.head.weight.grad.abs().sum() > 0 and "GuardedLoss" in loss.grad_fn.next_functions[0][0].name()


def test_a_script_that_keeps_what_it_saves_elsewhere(applied):
    plain, tuned = twins()
    applied(tuned)
    found = []
    for model in (plain, tuned):
        for step in range(2):
            model.zero_grad()
            with torch.autograd.graph.save_on_cpu():
                loss = entropy(model(batch(step)[0]))
            loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert "GuardedLoss" in loss.grad_fn.name()
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("steps", [1, 4], ids=["a guarded one", "as it was written"])
def test_nothing_outlives_the_backward(steps, applied):
    _, tuned = twins()
    applied(tuned)
    for step in range(steps + 1):
        loss = entropy(tuned(batch(step)[0]))
        loss.backward()
    assert tuned.room[0].held() == 0 and loss.grad_fn is not None


def test_an_error_in_a_loss_is_the_script_s_own(applied):
    _, tuned = twins()
    applied(tuned)
    for step in range(4):
        with pytest.raises(ValueError, match="batch_size"):
            functional.cross_entropy(tuned(batch(step)[0]), torch.arange(5) % 3)


def scripted_loss(output, target):
    return torch.nn.functional.cross_entropy(output, target) + torch.nn.functional.kl_div(output, output.exp(), reduction="sum")


def test_losses_are_what_compilers_and_pickles_know(applied):
    _, tuned = twins()
    originals = torch._C._nn.cross_entropy_loss, torch.kl_div
    context = applied(tuned)
    assert torch._C._nn.cross_entropy_loss is not originals[0]
    output, target = torch.randn(8, 3), torch.arange(8) % 3
    expected = scripted_loss(output, target)
    assert torch.equal(torch.jit.script(scripted_loss)(output, target), expected)
    compiled = torch.compile(scripted_loss, backend="eager", fullgraph=True)
    tuned(batch(0)[0])
    assert torch.equal(compiled(output.requires_grad_(), target), expected)
    assert pickle.loads(pickle.dumps(functional.cross_entropy)) is functional.cross_entropy
    slope = torch.func.grad(lambda one: functional.cross_entropy(one, target))(output.detach())
    assert torch.allclose(slope.sum(), torch.zeros(()), atol=1e-6)
    context.undo()
    assert (torch._C._nn.cross_entropy_loss, torch.kl_div) == originals
    assert "kl_div" in str(torch.jit.script(of_torch).graph)


def of_torch(output):
    return torch.kl_div(output, output.exp())
