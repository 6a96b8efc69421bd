"""Recovery after pruning, magnitude pruning and distillation, on scikit-learn's digits; and what may go wrong in a training."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="recovery trains torch modules")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from saturate.errors import WorkloadFailed  # noqa: E402
from saturate.inference import worker  # noqa: E402
from saturate.inference.candidates import Candidate, Part  # noqa: E402
from saturate.inference.techniques import (  # noqa: E402
    _training,
    distillation,
    magnitude_pruning,
    qat_dynamic_int8,
    structured_pruning,
)
from saturate.inference.techniques._api import Context, NotApplied, OutOfTime, Train  # noqa: E402
from saturate.records.inference import ModelFacts  # noqa: E402

FACTS = ModelFacts(kind="Digits", dtypes=("float32",), linears=2, convolutions=2, batch_norms=2, batch_size=64)


class Digits(nn.Module):
    """(n, 1, 8, 8) -> class scores (n, 10)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width)
        self.second, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.wide, self.out = nn.Linear(4 * width, 64), nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        x = functional.max_pool2d(functional.relu(self.norm1(self.first(x))), 2)
        x = functional.max_pool2d(functional.relu(self.norm2(self.second(x))), 2)
        return self.out(functional.relu(self.wide(x.flatten(1))))


@functools.cache
def data() -> dict[str, Any]:
    """Disjoint parts: to train on, to calibrate with, to test on."""
    datasets = pytest.importorskip("sklearn.datasets", reason="digits come with scikit-learn")
    found = datasets.load_digits()
    x = torch.tensor(found.images, dtype=torch.float32).div(16).sub(0.3).unsqueeze(1)
    y = torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    train = [(x[start:start + 50], y[start:start + 50]) for start in range(0, 1000, 50)]
    return {"train": train, "calibration": [(x[1000 + start:1050 + start],) for start in (0, 50, 100, 150)], "x": x[1200:], "y": y[1200:]}


@functools.cache
def trained() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Digits()
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for _ in range(6):
            for x, y in data()["train"]:
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    return model.eval().requires_grad_(False)


def accuracy(model: Any) -> float:
    with torch.no_grad():
        return float((model(data()["x"]).argmax(1) == data()["y"]).float().mean())


def context(tmp_path: Path, model: Any = None, **changes: Any) -> Context:
    train = Train(data()["train"], functional.cross_entropy, learning_rate=1e-3, epochs=3)
    return Context(**{"torch": torch, "model": copy.deepcopy(model or trained()), "device": "cpu", "inputs": [(data()["train"][0][0][:8],)],
                      "calibration": data()["calibration"], "facts": FACTS, "folder": tmp_path, "threads": 1, "train": train, **changes})


def flops(model: Any) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(data()["x"][:8])
    return counter.get_total_flops()


# -- pruning ----------------------------------------------------------------------------------------------------------------


def test_accuracy_comes_back_at_a_third_of_the_operations(tmp_path: Path) -> None:
    before = accuracy(trained())
    assert before > 0.94
    broken = context(tmp_path, train=None, calibration=[])
    structured_pruning.apply(broken, structured_pruning.Options(0.5, importance="magnitude"))
    here = context(tmp_path)
    said = structured_pruning.apply(here, structured_pruning.Options(0.5, importance="magnitude"))
    assert flops(here.model) < 0.34 * flops(trained())
    assert accuracy(here.model) >= before - 0.03 > accuracy(broken.model), "it takes the training to come back"
    assert "steps" in said and structured_pruning.active(here, structured_pruning.Options(0.5)).active
    assert type(here.model) is Digits and not here.model.training and not here.model.second.training
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in here.model.parameters())


def test_what_matters_little_goes_without_training(tmp_path: Path) -> None:
    here = context(tmp_path, train=None)
    said = structured_pruning.apply(here, structured_pruning.Options(0.25))
    assert flops(here.model) < 0.7 * flops(trained())
    assert accuracy(here.model) > 0.7 and "BatchNorm statistics anew" in said


def test_zeros_with_training_keep_the_accuracy_and_compress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[float] = []
    step = magnitude_pruning._Pruner.step
    monkeypatch.setattr(magnitude_pruning._Pruner, "step", lambda self, done: (progress.append(done), step(self, done))[1])
    here = context(tmp_path)
    options = magnitude_pruning.Options(0.5)
    said = magnitude_pruning.apply(here, options)
    for weight in (here.model.first.weight, here.model.second.weight, here.model.wide.weight, here.model.out.weight):
        assert float((weight == 0).float().mean()) >= 0.498
    assert not bool((here.model.wide.bias == 0).any())
    assert len(progress) == 61 and progress == sorted(progress) and 0.4 < progress[30] < 0.6, "not step by step"
    assert accuracy(here.model) >= accuracy(trained()) - 0.03
    assert "not faster" in said and magnitude_pruning.active(here, options).active
    small, large = (float(part.split(" MB")[0].split(" ")[-1]) for part in here.notes["magnitude-pruning"].split("compressed they take ")[1].split("instead of"))
    assert small < 0.7 * large and int(here.notes["compressed_bytes"]) == pytest.approx(1e6 * small, abs=5e3)
    at_once = context(tmp_path, train=None)
    magnitude_pruning.apply(at_once, options)
    assert accuracy(at_once.model) < accuracy(here.model)


class Own(nn.Module):
    """A product of its own, beside what scales, what is added, what is looked up, and what is normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.LayerNorm([8, 8, 8])
        self.scale, self.place = nn.Parameter(torch.rand(8, 1, 1) + 1), nn.Parameter(torch.randn(1, 8, 8, 8))
        self.matrix = nn.Parameter(torch.randn(512, 10))
        self.weighed, self.one = nn.utils.parametrizations.weight_norm(nn.Linear(10, 10)), nn.Linear(10, 1)
        self.attention = nn.MultiheadAttention(10, 2, add_bias_kv=True)

    def forward(self, x: Any) -> Any:
        x = self.weighed((self.norm(self.conv(x)) * self.scale + self.place).flatten(1) @ self.matrix)
        return self.one(self.attention(x, x, x)[0])


def test_only_what_is_multiplied_gets_zeros(tmp_path: Path) -> None:
    """Layer norms, scales and places of more than one dimension did, too, and the lengths of weights that are normalized."""
    torch.manual_seed(0)
    model = Own().eval()
    nn.init.ones_(model.norm.bias)
    here = context(tmp_path, model, train=None)
    magnitude_pruning.apply(here, magnitude_pruning.Options(0.5))
    zeros = {name for name, parameter in here.model.named_parameters() if bool((parameter == 0).float().mean() > 0.4)}
    assert zeros >= {"conv.weight", "matrix", "one.weight", "attention.in_proj_weight", "attention.out_proj.weight"}, zeros
    assert zeros <= {name for name, _ in here.model.named_parameters() if name.endswith(("weight", "matrix", "proj_bias", "proj.bias"))} - {"norm.weight"}, zeros
    assert magnitude_pruning.active(here, magnitude_pruning.Options(0.5)).active


def test_the_proof_of_zeros_can_say_no(tmp_path: Path) -> None:
    here = context(tmp_path, train=None)
    options = magnitude_pruning.Options(0.2)
    magnitude_pruning.apply(here, options)
    assert magnitude_pruning.active(here, options).active
    with torch.no_grad():
        here.model.second.weight.add_(1e-3)     # as a training without the mask would
    assert not magnitude_pruning.active(here, options).active


def test_the_share_of_zeros_follows_the_cubic_schedule() -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 1000).view(10, 100))
    pruner = magnitude_pruning._Pruner(torch, [weight], 0.9)
    shares = []
    for step in range(11):
        pruner.step(step / 10)
        shares.append(float((weight == 0).float().mean()))
    assert shares[0] == 0 and shares[1] == pytest.approx(0.9 * (1 - (6 / 7) ** 3), abs=2e-3)
    assert shares == sorted(shares) and not any(share < 0.899 for share in shares[7:]) and pruner.done()


def test_training_techniques_claim_what_they_change() -> None:
    """Zeros do not survive a later training; a narrower network does."""
    zeros, narrow, student, rounded = (Part(module, module.Options()) for module in (
        magnitude_pruning, structured_pruning, distillation, qat_dynamic_int8))
    assert Candidate.of([zeros, rounded]).conflict() == "weights-trained"
    assert Candidate.of([narrow, rounded]).conflict() is None
    assert [part.id for part in Candidate.of([rounded, narrow]).parts][0] == "structured-pruning"
    assert Candidate.of([narrow, student]).conflict() == "network"


# -- distillation -----------------------------------------------------------------------------------------------------------


def test_a_given_student_learns(tmp_path: Path) -> None:
    train = Train(data()["train"], functional.cross_entropy, learning_rate=6e-3, epochs=6, student=lambda: Digits(8))
    here = context(tmp_path, train=train)
    said = distillation.apply(here, distillation.Options(ratio=0.0))
    assert accuracy(here.model) > 0.9 and here.model.first.out_channels == 8
    assert "Digits with" in said and distillation.active(here, distillation.Options(0.0)).active


def test_a_narrow_copy_learns_from_the_outputs_alone(tmp_path: Path) -> None:
    """Without `train`: no targets, no loss."""
    calibration = [batch[:1] for batch in data()["train"][:10]]
    here = context(tmp_path, train=None, calibration=calibration)
    alone = context(tmp_path, train=None, calibration=[])
    structured_pruning.apply(alone, structured_pruning.Options(0.5))
    distillation.apply(here, distillation.Options(ratio=0.5))
    assert accuracy(here.model) > max(accuracy(alone.model), 0.8)


def test_a_student_with_another_answer_is_refused(tmp_path: Path) -> None:
    for student in (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 9)), lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10).double(),)):
        train = dataclasses.replace(context(tmp_path).train, student=student)
        with pytest.raises((NotApplied, RuntimeError), match="student's outputs|same dtype"):
            distillation.apply(context(tmp_path, train=train), distillation.Options(ratio=0.0))
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

        def forward(self, x: Any) -> Any:
            return {"logits": self.net(x)}

    for teacher, student, words in ((Named(), Named().net, "answers with a Sequential|answers with a Tensor, the model with a dict"),
                                    (None, Named(), "answers with a dict, the model with a Tensor")):
        train = dataclasses.replace(context(tmp_path).train, student=lambda student=student: student)
        with pytest.raises(NotApplied, match=words):        # its callers would not find what they look for
            distillation.apply(context(tmp_path, teacher, train=train), distillation.Options(ratio=0.0))
    with pytest.raises(NotApplied, match="no student"):
        distillation.apply(context(tmp_path), distillation.Options(ratio=0.0))


def test_variants_follow_what_is_known() -> None:
    training, alone = dataclasses.replace(FACTS, trainable=True), dataclasses.replace(FACTS, calibration_samples=0)
    assert max(options.ratio for options in structured_pruning.variants(alone)) < max(options.ratio for options in structured_pruning.variants(training))
    assert not distillation.eligible(alone) and distillation.eligible(training)
    assert distillation.variants(dataclasses.replace(training, student=True)) == [distillation.Options(ratio=0.0)]
    generating = dataclasses.replace(training, generates=True)
    assert not any(options.heads for options in (*structured_pruning.variants(generating), *distillation.variants(generating)))
    assert not structured_pruning.eligible(dataclasses.replace(FACTS, linears=1, convolutions=0))
    assert magnitude_pruning.bound(FACTS) == 1.0


# -- the training itself ----------------------------------------------------------------------------------------------------


def recover(here: Context, student: Any = None, **options: Any) -> _training.Recovery:
    return _training.recover(here, student or copy.deepcopy(here.model), here.model, **options)


def disturbed() -> Any:
    model = copy.deepcopy(trained())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


def test_a_disturbed_model_is_brought_back_and_nothing_else_changes(tmp_path: Path) -> None:
    here, student = context(tmp_path), disturbed()
    student.out.weight.requires_grad_(True)
    before, state, python = copy.deepcopy(here.model.state_dict()), torch.get_rng_state(), random.getstate()
    found = recover(here, student)
    assert found.after < 0.5 * found.before and found.steps == 60 and found.epochs == 3 and found.stopped == "3 epochs"
    assert all(torch.equal(before[name], value) for name, value in here.model.state_dict().items()), "the teacher has changed"
    assert torch.equal(state, torch.get_rng_state()) and python == random.getstate()
    assert [name for name, parameter in student.named_parameters() if parameter.requires_grad] == ["out.weight"]
    assert not student.training and torch.is_grad_enabled()
    twin = disturbed()
    recover(here, twin)
    assert all(torch.equal(one, other) for one, other in zip(student.state_dict().values(), twin.state_dict().values())), "not reproducible"


class Masked(nn.Module):
    """A model that rules classes out: minus infinity in its answers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("ruled_out", torch.arange(10) == 3)

    def forward(self, x: Any) -> Any:
        return self.model(x).masked_fill(self.ruled_out, -torch.inf)


@pytest.mark.parametrize("targets", [True, False])
def test_a_model_that_rules_classes_out_is_brought_back_too(tmp_path: Path, targets: bool) -> None:
    """Its answers had no distance to each other: it was refused as one whose outputs are not finite."""
    allowed = [(x[y != 3], y[y != 3]) for x, y in data()["train"]]
    train = Train(allowed, functional.cross_entropy, learning_rate=1e-3, epochs=3)
    here = context(tmp_path, Masked(trained()), train=train if targets else None)
    student = Masked(disturbed())
    found = recover(here, student)
    assert found.after < 0.7 * found.before < math.inf
    assert all(bool(parameter.isfinite().all()) for parameter in student.parameters())


class Constant(nn.Module):
    """A second answer that is always the same, and a third that is minus infinity everywhere."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        scores = self.model(x)
        return scores, scores * 0 + 3.0, torch.full_like(scores, -torch.inf)


def test_a_batch_with_one_answer_for_all_is_no_infinite_distance(tmp_path: Path) -> None:
    """Errors were shares of the batch's own variance, which is nothing in a last batch of one sample: training diverged, or went astray."""
    batches = [(x[:1].expand(4, -1, -1, -1), y[:1].float()) for x, y in data()["train"]]
    train = Train(batches, lambda output, target: 0.0 * output[0].sum(), optimizer=lambda chosen: torch.optim.SGD(chosen, lr=1e-3), epochs=2)
    student = Constant(disturbed())
    found = recover(context(tmp_path, Constant(trained()), train=train), student)
    assert found.after <= found.before < 10 and all(bool(parameter.isfinite().all()) for parameter in student.parameters())


class Deep(nn.Module):
    """Answers twice in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out, self.aside = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 10), nn.Linear(128, 10)

    def forward(self, x: Any) -> Any:
        x = functional.relu(self.first(x.flatten(1)))
        scores = self.out(functional.relu(self.second(x)))
        return (self.aside(x), scores) if self.training else scores


def test_parts_that_only_training_has_are_named(tmp_path: Path) -> None:
    train = Train(data()["train"], lambda output, target: functional.cross_entropy(output[1], target))
    with pytest.raises(NotApplied, match="does not run in training mode, which may have parts that evaluation leaves out: mat1 and mat2"):
        structured_pruning.apply(context(tmp_path, Deep().eval(), train=train), structured_pruning.Options(0.5))


def test_it_works_where_gradients_are_off(tmp_path: Path) -> None:
    here, student = context(tmp_path), disturbed()      # the model of these tests is trained once, by who asks first
    with torch.no_grad():
        assert recover(here, student).steps == 60


def test_the_best_epoch_counts(tmp_path: Path) -> None:
    """A learning rate that ruins everything: the weights from before stay, and it ends early."""
    train = Train(data()["train"][:4], functional.cross_entropy, optimizer=lambda chosen: torch.optim.SGD(chosen, lr=30.0), epochs=9)
    here = context(tmp_path, train=train)
    student = copy.deepcopy(here.model)
    try:
        found = recover(here, student)
    except NotApplied as reason:
        assert "diverged" in str(reason) or "not finite" in str(reason)
        return
    assert found.stopped == "no further progress" and found.after == found.before
    assert all(torch.equal(one, other) for one, other in zip(student.state_dict().values(), here.model.state_dict().values()))


def test_patience_has_an_end(tmp_path: Path) -> None:
    train = Train(data()["train"][:3], lambda output, target: -output.square().mean(), learning_rate=1e-2, epochs=50)
    found = recover(context(tmp_path, train=train))
    assert found.stopped == "no further progress" and found.epochs == _training.PATIENCE and found.after == found.before == 0.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What a training takes for the time, in seconds."""
    clock = [0.0]
    monkeypatch.setattr(_training, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_a_deadline_ends_it(tmp_path: Path, now: list[float]) -> None:
    def slow() -> Any:
        for batch in data()["train"]:
            now[0] += 0.02
            yield batch

    class Loader:
        def __iter__(self) -> Any:
            return slow()

    train = Train(Loader(), functional.cross_entropy, epochs=1000)
    found = recover(context(tmp_path, train=train, deadline_s=0.7), disturbed())
    assert found.stopped == "the time ended" and found.steps > 0 and now[0] < 0.75
    with pytest.raises(OutOfTime, match="before the first training step"):
        recover(context(tmp_path, deadline_s=now[0] - 1), disturbed())


def test_zeros_are_complete_even_when_the_time_ends(tmp_path: Path, now: list[float]) -> None:
    def ticking(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        now[0] += 0.02
        return functional.cross_entropy(output, target)

    train = dataclasses.replace(context(tmp_path).train, loss=ticking, epochs=10**6)
    here = context(tmp_path, train=train, deadline_s=1.0)
    magnitude_pruning.apply(here, magnitude_pruning.Options(0.5))
    assert float((here.model.wide.weight == 0).float().mean()) >= 0.499


@pytest.mark.parametrize("train, reason", [
    (lambda: Train(data()["train"], lambda output, target: output.sum() * float("nan")), "diverged: the loss is nan"),
    (lambda: Train(data()["train"], lambda output, target: output.sum(1)), "one number"),
    (lambda: Train(data()["train"], lambda output, target: 1.0), "one number"),
    (lambda: Train([data()["train"][0][0]], functional.cross_entropy), "a Tensor; tuples"),
    (lambda: Train([data()["train"][0][:1]], functional.cross_entropy), "a tuple; tuples"),
    (lambda: Train([], functional.cross_entropy), "no batch"),
    (lambda: Train(data()["train"], functional.cross_entropy, epochs=0), "allows no training"),
    (lambda: Train(iter(data()["train"]), functional.cross_entropy), "iterated only once"),
    (lambda: Train(data()["train"], functional.cross_entropy, optimizer=lambda parameters: 0.1), "train.optimizer gave a float"),
])
def test_a_training_that_cannot_work_is_refused_by_name(train: Any, reason: str, tmp_path: Path) -> None:
    here, student = context(tmp_path, train=train()), disturbed()
    with pytest.raises(NotApplied, match=reason):
        recover(here, student)
    assert not student.training and not any(parameter.requires_grad or parameter.grad is not None for parameter in student.parameters())


def broken_loader() -> Any:
    yield from data()["train"][:1]
    raise OSError("shard 2 is gone")


@pytest.mark.parametrize("train, message, cause", [
    (lambda: Train(data()["train"], lambda output: output.sum()), "train.loss failed", "TypeError: .* takes 1 positional argument but 2 were given"),
    (lambda: Train(broken_loader(), functional.cross_entropy), "reading train.loader failed", "OSError: shard 2 is gone"),
    (lambda: Train(data()["train"], functional.cross_entropy, optimizer=lambda: None), "train.optimizer failed", "TypeError"),
    (lambda: Train(data()["train"], functional.cross_entropy, optimizer=lambda parameters: torch.optim.LBFGS(parameters)),
     "a step of the optimizer failed", "TypeError: .*closure"),
])
def test_what_of_the_users_fails_is_said(train: Any, message: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadFailed, match=message) as caught:
        recover(context(tmp_path, train=train()), disturbed())
    assert re.search(cause, caught.value.cause)


@pytest.mark.parametrize("student, error, reason", [
    (lambda: 1 / 0, WorkloadFailed, "train.student failed"), (lambda: "resnet18", NotApplied, "train.student gave a str"),
])
def test_a_student_that_is_not_built_is_named(student: Any, error: type[Exception], reason: str, tmp_path: Path) -> None:
    train = dataclasses.replace(context(tmp_path).train, student=student)
    with pytest.raises(error, match=reason):
        distillation.apply(context(tmp_path, train=train), distillation.Options(ratio=0.0))


def too_large(*given: Any) -> Any:
    raise MemoryError


def too_large_a_loader() -> Any:
    yield from data()["train"][:1]
    raise MemoryError


@pytest.mark.parametrize("train, named", [
    (lambda: Train(data()["train"], too_large), "train.loss"), (lambda: Train(too_large_a_loader(), functional.cross_entropy), "train.loader"),
])
def test_memory_that_ends_in_what_is_the_users_stays_that(train: Any, named: str, tmp_path: Path) -> None:
    server = worker.Server()
    server.do_recover = lambda: recover(context(tmp_path, train=train()), disturbed())      # type: ignore[attr-defined]
    fate, kind, reason, _ = worker._answer(server, "recover", ())
    assert (fate, kind) == ("raised", "out_of_memory") and f"{named} failed: MemoryError" in reason


def test_nothing_to_train_on_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotApplied, match="nothing to train on"):
        recover(context(tmp_path, train=None, calibration=data()["calibration"][:1]))


def test_an_interrupt_is_not_swallowed(tmp_path: Path) -> None:
    def interrupt(output: Any, target: Any) -> Any:
        raise KeyboardInterrupt

    student = disturbed()
    with pytest.raises(KeyboardInterrupt):
        recover(context(tmp_path, train=Train(data()["train"], interrupt)), student)
    assert not student.training and not any(parameter.requires_grad for parameter in student.parameters())


def test_a_batch_of_one_sample_does_not_stop_batch_norm(tmp_path: Path) -> None:
    """One sample has no variance; with the collected statistics the step works, and they do not change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval().requires_grad_(False)
    batches = [(torch.randn(1, 4), torch.tensor([1])) for _ in range(4)]
    here = context(tmp_path, model, train=Train(batches, functional.cross_entropy, learning_rate=1e-2), inputs=[(torch.randn(5, 4),)],
                   calibration=[(torch.randn(5, 4),)])
    student = copy.deepcopy(here.model)
    with torch.no_grad():
        student[0].weight.mul_(1.5)
    assert recover(here, student).steps >= 8
    assert torch.equal(student[1].running_var, here.model[1].running_var)


def test_statistics_are_collected_anew(tmp_path: Path) -> None:
    model = disturbed()
    with torch.no_grad():
        model.norm1.running_mean.add_(2.0)
        model.norm2.running_var.mul_(9.0)
    here = context(tmp_path)
    momenta, worse = model.norm1.momentum, accuracy(model)
    assert _training.recalibrate(here, model) == 200
    assert model.norm1.momentum == momenta and not model.norm1.training and accuracy(model) > worse
    with torch.no_grad():
        batch = torch.cat([batch[0] for batch in data()["calibration"]])
        expected = model.first(batch).mean((0, 2, 3))
    torch.testing.assert_close(model.norm1.running_mean, expected, rtol=1e-3, atol=1e-3)
    assert _training.recalibrate(context(tmp_path, calibration=[(torch.randn(8, 1, 8, 8),)]), model) == 0


def test_the_distance_follows_the_target() -> None:
    torch.manual_seed(0)
    scores, taught, classes = torch.randn(6, 5), torch.randn(6, 5), torch.randint(5, (6,))
    expected = functional.kl_div(scores.log_softmax(1), taught.softmax(1), reduction="batchmean")
    torch.testing.assert_close(_training.distance(torch, scores, taught, classes), expected)
    torch.testing.assert_close(_training.distance(torch, scores.softmax(1), taught.softmax(1), classes), expected)
    torch.testing.assert_close(_training.distance(torch, scores, taught, torch.randn(6, 5)), (scores - taught).square().mean() / taught.var(correction=0))
    images = torch.randn(2, 5, 3, 3), torch.randn(2, 5, 3, 3), torch.randint(5, (2, 3, 3))
    words = torch.randn(2, 7, 5), torch.randn(2, 7, 5), torch.randint(5, (2, 7))
    assert _training._class_dimension(torch, images[0], images[2]) == 1
    assert _training._class_dimension(torch, words[0], words[2]) == _training._class_dimension(torch, words[0], words[2].flatten()) == 2
    assert _training._class_dimension(torch, scores, None) is None
    ruled_out = torch.arange(5) == 2
    masked = [tensor.masked_fill(ruled_out, -torch.inf) for tensor in (scores, taught)]
    left = [tensor[:, ~ruled_out] for tensor in (scores, taught)]
    for target in (classes, torch.randn(6, 5)):
        torch.testing.assert_close(_training.distance(torch, *masked, target), _training.distance(torch, *left, target))
    assert not _training.distance(torch, masked[0], taught, classes).isfinite(), "a student may not rule out what the teacher does not"
    answers = [{"logits": tensor, "hidden": torch.randn(6, 9)} for tensor in (scores, taught)]
    torch.testing.assert_close(_training.distance(torch, *answers, classes), expected)
    assert _training.distance(torch, scores, taught[:3], classes) is None


def test_boxes_beside_class_scores_are_no_class_scores() -> None:
    torch.manual_seed(0)
    (scores, boxes), (taught, there) = [(torch.randn(6, 5), torch.randn(6, 4)) for _ in range(2)]
    target = torch.tensor([0, 1, 2, 3, 3, 2])
    expected = _training.distance(torch, scores, taught, target) + _training._relative(boxes, there)
    torch.testing.assert_close(_training.distance(torch, (scores, boxes), (taught, there), target), expected)
    assert _training._class_dimension(torch, scores, torch.tensor([0, 1, 2, 3, 3, 5])) is None, "there are more classes than scores"
    assert _training._class_dimension(torch, scores, torch.tensor([0, 1, 2, 3, 3, 255])) == 1, "a place without a class"


@pytest.mark.parametrize("shape", [(6, 1), (2, 1, 3, 3)])
def test_one_score_of_two_classes_is_pulled_to_the_teachers(shape: tuple[int, ...]) -> None:
    """Targets of 0 and 1 name classes, and the softmax of one score is 1 whatever it is: the teacher said nothing."""
    torch.manual_seed(0)
    scores, taught = torch.randn(shape), torch.randn(shape)
    target = torch.randint(2, (shape[0], *shape[2:]))
    expected = (scores - taught).square().mean() / taught.var(correction=0)
    torch.testing.assert_close(_training.distance(torch, scores, taught, target), expected)
