"""What the user gives, on its way to other processes: taken, split, hashed, written, opened, sent."""

from __future__ import annotations

import collections
import enum
import functools
import gc
import importlib
import itertools
import os
import re
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")
pytest.importorskip("cloudpickle", reason="the extra inference")

from process_kit import Branches, Encoder, Noisy, Pair, Structured  # noqa: E402 - after the check for torch

from saturate.errors import EnvironmentProblem, UsageError, WorkloadFailed  # noqa: E402
from saturate.inference import batches, called, identity, pickles, samples, variations  # noqa: E402
from saturate.inference.called import signature_of  # noqa: E402
from saturate.inference.candidates import Candidate  # noqa: E402
from saturate.inference.failures import WorkerFailed  # noqa: E402
from saturate.inference.process import Worker  # noqa: E402
from saturate.inference.source import Source  # noqa: E402
from saturate.inference.techniques._api import Train  # noqa: E402


def squared_error(output: Any, target: Any) -> Any:
    return ((output[0] - target) ** 2).mean()


def images(count: int, size: int = 4) -> list[tuple[Any, ...]]:
    return [(torch.full((size, 6), float(index)) + torch.arange(size)[:, None] / 10,) for index in range(count)]


# -- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("forward", "batch", "remedy"), [
    (lambda x: x, 2, "leave the targets out: inputs=(batch[:-1] for batch in loader)"),
    (lambda x, mask: x, 1, "a tuple of all 2 inputs: x, mask"),
    (lambda *, x: x, 1, "wrap the model"),
    (lambda x, mask=None: x, 5, "what the forward takes: x, mask")])
def test_a_batch_that_does_not_fit_the_forward_comes_with_what_would(forward: Any, batch: int, remedy: str) -> None:
    with pytest.raises(UsageError, match="positional inputs") as caught:
        batches.check_call(forward, (torch.zeros(1),) * batch)
    assert remedy in str(caught.value.remedy)


@pytest.mark.parametrize(("forward", "inputs", "named", "places"), [
    (lambda x, mask=None, scale=1: x, (1,), {}, (1,)),
    (lambda x, mask=None, scale=1: x, (), {"x": 1}, (1,)),
    (lambda x, mask=None, scale=1: x, (1,), {"scale": 3}, (1, None, 3)),
    (lambda x, mask=None, **rest: x, (1,), {"mask": 2}, (1, 2)),
    (lambda x, mask=None, *, scale=1: x, (), {"x": 1, "mask": 2}, (1, 2)),
    (lambda *inputs, scale=1: inputs, (1, 2, 3), {}, (1, 2, 3))])
def test_keywords_of_a_call_go_to_their_places(forward: Any, inputs: Any, named: Any, places: Any) -> None:
    assert batches.by_place(batches.signature_of(forward), inputs, named) == places


@pytest.mark.parametrize(("forward", "named", "words"), [
    (lambda x: x, {"y": 1}, "missing a required argument|unexpected keyword"), (lambda x, *, y: x, {"x": 1, "y": 2}, "by keyword only"),
    (lambda x, **rest: x, {"x": 1, "y": 2}, "by keyword only"), (None, {"x": 1}, "not known")])
def test_keywords_without_a_place_are_refused(forward: Any, named: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        batches.by_place(None if forward is None else batches.signature_of(forward), (), named)


def test_sparse_inputs_are_neither_cut_nor_moved() -> None:
    """torch cannot index a sparse matrix, as graph networks take one: such a batch stays whole."""
    batch = torch.rand(4, 3), torch.eye(4).to_sparse()
    measured, calibrate, notes = batches.split(torch, [batch])
    assert measured == calibrate == [batch] and "cannot be divided" in notes[0]
    assert variations.other_batches([batch]) == []
    moved = variations.perturbed(torch, [batch])
    assert moved is not None and not torch.equal(moved[0][0], batch[0]) and moved[0][1] is batch[1]
    assert variations.perturbed(torch, [batch[1:]]) is None


def exported() -> Any:
    return torch.export.export(torch.nn.Linear(6, 3), (torch.zeros(1, 6),), strict=False)


@pytest.mark.parametrize(("make", "says", "remedy"), [
    (lambda: torch.nn.Sequential(torch.nn.ReLU(), torch.jit.script(torch.nn.Linear(6, 3))), "the part '1' of the model is a TorchScript", "made from"),
    (lambda: torch.nn.Sequential(torch.nn.LazyLinear(3)), "no weights yet", "call the model once"),
    (exported, "program of torch.export", "exported from"), (lambda: exported().module(), "program of torch.export", "exported from")])
def test_what_has_no_layers_to_exchange_is_named(make: Any, says: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        Source.write(tmp_path / "source", make(), images(2))
    assert remedy in str(caught.value.remedy)


def test_a_model_whose_weights_are_computed_travels_as_it_is(tmp_path: Path) -> None:
    """weight_norm and its like: torch does not pickle them."""
    norms = torch.nn.utils.parametrizations
    model = torch.nn.Sequential(norms.weight_norm(torch.nn.Linear(6, 4)), norms.spectral_norm(torch.nn.Conv1d(1, 2, 3))).eval()
    x = torch.randn(1, 1, 6)
    source = Source.write(tmp_path / "source", model, [(x,)] * 4)
    code = ("import sys, torch; from pathlib import Path; from saturate.inference.source import Source; from torch.nn.utils import parametrize;"
            "source = Source.open(Path(sys.argv[1])); model = source.model(torch); assert parametrize.is_parametrized(model[0], 'weight');"
            "parametrize.remove_parametrizations(model[1], 'weight'); print(model(source.inputs(torch)[0][0]).flatten().tolist())")
    done = subprocess.run([sys.executable, "-c", code, str(source.folder)], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert torch.allclose(torch.tensor(eval(done.stdout)), model(x).flatten(), atol=1e-6)
    assert torch.nn.utils.parametrize.is_parametrized(model[0], "weight")


def test_torchs_quantized_layers_travel(tmp_path: Path) -> None:
    """Pickled as they are they arrive without what a module is made of, and "the model does not run on its inputs" was what users were told."""
    from torch.ao.nn.intrinsic.quantized import ConvReLU2d
    from torch.ao.nn.quantized import Conv2d, DeQuantize, Quantize

    torch.manual_seed(0)
    model = torch.nn.Sequential(Quantize(0.1, 0, torch.quint8), Conv2d(3, 4, 3), ConvReLU2d(4, 2, 3), DeQuantize(), torch.nn.Flatten()).eval()
    inputs = [(torch.randn(1, 3, 8, 8),) for _ in range(4)]
    source = Source.write(tmp_path / "source", model, inputs)
    code = ("import sys, torch; from pathlib import Path; from saturate.inference.source import Source; source = Source.open(Path(sys.argv[1]));"
            "print(source.model(torch)(source.inputs(torch)[0][0]).flatten().tolist())")
    done = subprocess.run([sys.executable, "-c", code, str(source.folder)], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert torch.equal(torch.tensor(eval(done.stdout)), model(inputs[0][0]).flatten())


def test_an_endless_loader_is_not_exhausted() -> None:
    asked = []

    def endless() -> Any:
        for index in itertools.count():
            asked.append(index)
            yield torch.zeros(2, 3)

    assert [len(batch) for batch in batches.take(torch, endless())] == [1] * batches.MOST
    assert len(asked) == batches.MOST


def test_bytes_are_limited_after_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_BYTES", 100)
    assert len(batches.take(torch, iter([torch.zeros(64), torch.zeros(64)]))) == 1
    assert len(batches.take(torch, [[torch.zeros(5), torch.zeros(5)]] * 9)) == 2


def test_a_batch_is_a_copy_and_not_a_view_of_the_data_set() -> None:
    data = torch.zeros(1000, 3)
    (batch,), = batches.take(torch, [data[:2]])
    data[:] = 1
    assert batch.untyped_storage().nbytes() == 2 * 3 * 4 and batch.sum() == 0


def test_one_tensor_is_one_batch() -> None:
    assert [tensor.shape for (tensor,) in batches.take(torch, torch.zeros(5, 3))] == [(5, 3)]


@pytest.mark.parametrize(("given", "words"), [
    ([], "holds no batch"), (7, "cannot be iterated over"), (None, "is a NoneType"), ({"x": torch.zeros(1)}, "is a dict"), ([{"x": torch.zeros(1)}], "yields dict"),
    (["text"], "yields str"), ([(torch.zeros(2, 6), 1), (torch.zeros(0, 6), 1)], "a batch without samples"),
    ([(torch.nested.nested_tensor([torch.zeros(2, 6), torch.zeros(3, 6)]),)], "a nested tensor"), ([torch.zeros(2, 3).numpy()], "torch.from_numpy"), (torch.utils.data.TensorDataset(torch.zeros(5, 3)), "DataLoader(dataset"),
])
def test_inputs_that_cannot_be_used_are_named(given: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        batches.take(torch, given)
    assert words in caught.value.card() and caught.value.remedy


def broken_loader(end: BaseException) -> Any:
    yield torch.zeros(2, 3)
    raise end


@pytest.mark.parametrize(("end", "words"), [
    (ValueError("data gone"), "ValueError: data gone"), (SystemExit(0), "exit code 0"), (GeneratorExit(), "GeneratorExit")])
def test_a_loader_that_breaks_is_the_user_s_own_failure(end: BaseException, words: str) -> None:
    with pytest.raises(WorkloadFailed, match="reading `inputs` failed") as caught:
        batches.take(torch, broken_loader(end))
    assert words in caught.value.cause and "raise end" in caught.value.evidence and "saturate/inference" not in caught.value.evidence


def test_a_process_that_a_loader_forks_does_not_go_on_as_saturate() -> None:
    """Neither one that goes on nor one that leaves."""
    def forks() -> Any:
        started.append(os.fork())
        if not started[0]:
            os.close(1), os.close(2)
            started.append(0)
        if len(started) > 1 and code:
            sys.exit(code)
        yield torch.zeros(2, 3)

    for code in (0, 3):
        started: list[int] = []
        taken = batches.take(torch, forks())
        assert started[0] and len(taken) == 1
        assert os.waitstatus_to_exitcode(os.waitpid(started[0], 0)[1]) == code


def test_targets_among_the_inputs_are_named() -> None:
    with pytest.raises(UsageError, match="2 positional inputs") as caught:
        batches.check_call(Pair().forward, (torch.zeros(1, 6), torch.zeros(1)))
    assert "targets" in caught.value.remedy
    batches.check_call(print, (1, 2))


def test_targets_in_any_batch_are_named(tmp_path: Path) -> None:
    given = images(4)
    with_targets = [(*batch, torch.zeros(1)) for batch in given]
    with pytest.raises(UsageError, match="`calibration`") as caught:
        Source.write(tmp_path, Pair(), given, with_targets)
    assert "calibration=(batch[:-1]" in caught.value.remedy
    with pytest.raises(UsageError, match="`inputs`"):
        Source.write(tmp_path, Pair(), [*given, *with_targets])


def test_a_model_without_numbers_is_where_its_inputs_are() -> None:
    assert called.device_of(torch.nn.ReLU(), {"cuda:0"}) == "cuda:0" and called.device_of(torch.nn.ReLU(), set()) == "cpu"
    assert called.device_of(torch.nn.Linear(1, 1), {"cuda:0"}) == "cpu"
    devices: set[str] = set()
    batches.take(torch, [(torch.zeros(2), {"x": torch.zeros(2)})], devices=devices)
    assert devices == {"cpu"}


def test_batches_alternate_and_the_smaller_rest_is_not_measured() -> None:
    given = [*images(4), (torch.zeros(1, 6),)]
    measured, calibration, notes = batches.split(torch, given)
    assert [float(x[0, 0]) for x, in measured] == [0.0, 2.0]
    assert [len(x) for x, in calibration] == [4, 4, 1] and not notes


class CalledOtherwise(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * mask

    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x, (x > 0).float())


class HandedOn(Pair):
    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return super().__call__(*inputs, **named)


def test_a_call_with_parameters_of_its_own_says_what_a_batch_is(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    source = Source.write(tmp_path / "source", CalledOtherwise(), [(x,), (x,)])
    assert torch.equal(source.model(torch)(x), x.relu()) and list(signature_of(CalledOtherwise()).parameters) == ["x"]
    with pytest.raises(UsageError, match="2 positional inputs"):
        Source.write(tmp_path / "other", CalledOtherwise(), [(x, x)])
    assert signature_of(HandedOn()) == signature_of(Pair()) is not None


def shapes_of(given: list[tuple[Any, ...]]) -> list[int]:
    return [one[0].shape[1] for one in given]


@pytest.mark.parametrize("sizes, measured, calibration", [
    ([32, 48, 32, 48], [32, 48], [32, 48]), ([32, 32, 48, 48, 48], [32, 48, 48], [32, 48]), ([1, 2, 3, 4], [1, 3], [2, 4]),
    ([5, 7, 5, 9, 5], [5, 9, 5], [7, 5])])
def test_both_halves_hold_every_shape_that_occurs_twice(sizes: list[int], measured: list[int], calibration: list[int]) -> None:
    """Where sizes alternate, every other batch would be of one size."""
    found = batches.split(torch, [(torch.zeros(4, size),) for size in sizes])
    assert (shapes_of(found[0]), shapes_of(found[1])) == (measured, calibration)


def test_batches_that_are_not_measured_say_which_sizes_vary(tmp_path: Path) -> None:
    sizes = [16, 20, 18, 17, 12, 24]
    source = Source.write(tmp_path / "source", torch.nn.ReLU(), [(torch.zeros(4, size),) for size in sizes] + [(torch.zeros(1, 16),)])
    assert shapes_of(source.inputs(torch)) == [16, 18, 12] and shapes_of(source.others(torch)) == [20, 24]
    alike = Source.write(tmp_path / "alike", torch.nn.ReLU(), [(torch.zeros(4, 16),)] * 3, [(torch.zeros(1, 20),)])
    assert alike.others(torch) == []        # calibration that is given apart says nothing of the inputs


def test_a_single_batch_is_divided_and_keeps_its_size() -> None:
    (measured,), (calibration,), notes = batches.split(torch, [(torch.arange(5.0)[:, None], None, 3)])
    assert measured[0].flatten().tolist() == [0, 1, 2, 0, 1] and measured[1:] == (None, 3)
    assert calibration[0].flatten().tolist() == [3, 4]
    assert "2 of its 5 samples" in notes[0]


@pytest.mark.parametrize("batch", [
    (torch.zeros(1, 3),), (torch.zeros(4, 3), torch.zeros(5, 3)), (torch.zeros(2, 3), ["one", "two"]), (torch.tensor(1.0),),
    ([torch.zeros(3, 8, 8), torch.zeros(3, 6, 9)],)], ids=["one", "other lengths", "texts", "a number", "images"])
def test_a_single_batch_that_cannot_be_divided_says_so(batch: tuple[Any, ...]) -> None:
    measured, calibration, notes = batches.split(torch, [batch])
    assert measured == calibration == [batch] and "cannot be divided" in notes[0]


def test_the_channels_of_a_list_of_images_are_no_samples() -> None:
    first, second, third = (torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    assert batches.samples(torch, ([first, second],)) is None and variations.other_batches([([first, second],)]) == []
    seen = samples.Seen()
    for given in ([first], [second, third]):
        seen.add((given,))
    assert len(seen) == 3 and samples.overlap([([first, second],)], seen).refused       # whichever others they are given with


# -- identity ------------------------------------------------------------------------------------------------------


def test_a_model_is_known_by_weights_attributes_and_code() -> None:
    first, second = Pair(), Pair()
    known = identity.of_model(torch, first)
    assert identity.of_model(torch, second) == known
    first.register_forward_hook(squared_error)
    second.register_forward_hook(squared_error)         # under another number than the first one's
    assert identity.of_model(torch, first) == identity.of_model(torch, second) != known
    first, second = Pair(), Pair()
    assert identity.of_model(torch, Pair(), "encode") != known
    with torch.no_grad():
        second.layer.weight[0, 0] += 1e-6
    assert identity.of_model(torch, second) != known
    first.layer.scale = 2.0
    assert identity.of_model(torch, first) != known
    assert identity.of_model(torch, Branches()) != identity.of_model(torch, Noisy())


class Mode(enum.Enum):
    A = 1
    B = 2


class Settings:
    __slots__ = ("parent", "values")

    def __init__(self, *values: Any) -> None:
        self.parent, self.values = self, set(values)        # a cycle, and no order


def added(amount: Any) -> Any:
    return lambda x: x + amount


def changed(size: int, at: int) -> Any:
    found = torch.zeros(size)
    found[at] = 1
    return found


HELD = [
    lambda one: numpy.full(3, one), lambda one: numpy.array([one, "text", None], dtype=object), lambda one: numpy.float32(one),
    lambda one: SimpleNamespace(deep=[{"k": one}]), lambda one: Mode(one), lambda one: (None, torch.float32, torch.float16)[one],
    lambda one: range(one), lambda one: (None, torch.relu, torch.sigmoid)[one],
    lambda one: (None, torch.nn.functional.silu, torch.nn.functional.mish)[one], lambda one: functools.partial(torch.add, changed(2000, 500 + one)),
    lambda one: Settings("a", "b", "c", one), lambda one: added(one), lambda one: collections.deque([one]), lambda one: re.compile("a" * one),
    lambda one: torch.eye(3).mul(one).to_sparse(), lambda one: torch.nn.Sequential(Pair(), torch.nn.Dropout(0.1 * one)).forward,
    lambda one: {one: 0}, lambda one: [[]] * one, lambda one: Path("a" * one), lambda one: torch.Generator().manual_seed(one)]


def holding(thing: Any) -> Any:
    model = Pair()
    model.thing = thing
    return model


@pytest.mark.parametrize("made", HELD)
def test_a_model_is_known_by_what_its_attributes_hold(made: Any) -> None:
    known = identity.of_model(torch, holding(made(1)))
    assert identity.of_model(torch, holding(made(1))) == known != identity.of_model(torch, holding(made(2)))
    given = identity.of_model(torch, Pair(), ("forward", (made(1),), []))
    assert identity.of_model(torch, Pair(), ("forward", (made(1),), [])) == given != identity.of_model(torch, Pair(), ("forward", (made(2),), []))


def test_memory_that_is_looked_at_is_not_freed_meanwhile() -> None:
    """Mostly it is a copy, of a tensor on a GPU or of one that is not contiguous, which nobody else holds."""
    copy = torch.arange(6.0).reshape(2, 3).t().contiguous()
    held, expected = weakref.ref(copy), copy.numpy().tobytes()
    seen = pickles.memory_of(copy)
    del copy
    gc.collect()
    assert held() is not None and bytes(seen) == expected
    part = seen[4:8]
    del seen
    assert held() is not None and bytes(part) == expected[4:8]
    del part
    assert held() is None and not pickles.memory_of(torch.empty(0))


def test_a_tensor_is_known_by_its_values_however_it_lies_in_memory() -> None:
    rows = torch.randn(64, 65, dtype=torch.complex64)

    def known(values: Any) -> str:
        return identity.of_batches(torch, [(values,)])

    for one, same in ((rows.t(), rows.t().contiguous()), (rows.conj(), rows.conj().resolve_conj()), (rows[::2, 1:], rows[::2, 1:].clone())):
        assert known(one) == known(same) != known(rows)


def test_arguments_that_a_model_is_given_are_known_by_their_values(tmp_path: Path) -> None:
    model = torch.nn.Bilinear(2000, 6, 1)
    hashes = [Source.write(tmp_path, functools.partial(model, changed(2000, at)), images(2)).model_hash for at in (500, 500, 501)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_what_cannot_travel_makes_a_model_another_one_each_time() -> None:
    model = holding(SimpleNamespace(lock=threading.Lock()))
    assert identity.of_model(torch, model) != identity.of_model(torch, model)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert identity.of_model(torch, holding(deep)) != identity.of_model(torch, Pair())


def test_code_includes_the_functions_that_a_forward_calls() -> None:
    def made(body: str) -> str:
        space: dict[str, Any] = {}
        exec(f"def helper(x):\n    return {body}\ndef forward(x):\n    return helper(x)\n", space)
        return identity.code_of(space["forward"])

    assert made("x + 1") == made("x + 1") != made("x + 2")


@pytest.mark.slow
def test_a_digest_is_the_same_in_another_process() -> None:
    code = ("import torch; from process_kit import Structured; from saturate.inference import identity; import test_inference_source as here;"
            "model = Structured(); model.names = {'a', 'b', 'c', 'd'}; model.held = [made(1) for made in here.HELD];"
            "print(identity.of_model(torch, model))")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    said = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}, capture_output=True,
                          text=True, check=True).stdout
    model = Structured()
    model.names, model.held = {"d", "c", "b", "a"}, [made(1) for made in HELD]
    assert identity.of_model(torch, model) == said.strip()


def test_inputs_are_known_by_their_values() -> None:
    assert identity.of_batches(torch, images(2)) == identity.of_batches(torch, images(2))
    assert identity.of_batches(torch, images(2)) != identity.of_batches(torch, images(2), [])
    assert identity.of_batches(torch, [({"a": torch.zeros(1)}, 3)]) != identity.of_batches(torch, [({"a": torch.zeros(1)}, 4)])


# -- the folder ----------------------------------------------------------------------------------------------------


def test_what_is_written_is_what_is_opened(tmp_path: Path) -> None:
    model = Structured().train()
    given = [(torch.randint(0, 11, (2, 5)), torch.rand(2, 5, 1)) for _ in range(4)]
    loader = [(torch.zeros(1, 6), torch.zeros(1, 3))]
    written = Source.write(tmp_path / "source", model, iter(given), train=Train(loader, squared_error, epochs=2))
    source = Source.open(tmp_path / "source")
    assert source == written and (source.kind, source.device, source.batches, source.calibration_samples) == ("Structured", "cpu", 2, 4)
    assert source.training and source.trainable and not source.student
    assert (tmp_path / "source").stat().st_mode & 0o777 == 0o700
    copy = source.model(torch)
    assert copy.training and copy.head.weight is copy.embedding.weight
    assert torch.equal(copy.norm.weight, model.norm.weight)
    assert torch.equal(source.inputs(torch)[1][0], given[2][0]) and torch.equal(source.calibration(torch)[0][1], given[1][1])
    assert source.train(torch).epochs == 2 and source.train(torch).loss is squared_error
    assert source.facts(torch) is None


class Tabled(torch.nn.Module):
    """A table that is a plain attribute, which no `to` moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = torch.nn.Linear(6, 3), torch.arange(3.0)

    def forward(self, scale: Any, x: Any) -> Any:
        return self.layer(x) * scale + self.table


@pytest.fixture
def elsewhere() -> Iterator[tuple[list[int], list[str]]]:
    """A stand-in for a device, in files: addresses of what lies there, and where something was put when it was read."""
    there: list[int] = []
    put: list[str] = []

    def tag(storage: Any) -> str | None:
        return "elsewhere" if storage.data_ptr() in there else None

    def restore(storage: Any, location: str) -> Any:
        if location == "elsewhere":
            put.append(location)
            return storage
        return None

    torch.serialization.register_package(-1, tag, restore)
    yield there, put
    torch.serialization._package_registry.remove((-1, tag, restore))


def test_what_a_model_holds_beside_its_weights_is_where_it_was(elsewhere: Any, tmp_path: Path) -> None:
    model, scale = Tabled(), torch.full((3,), 2.0)
    there, put = elsewhere
    there += [model.table.data_ptr(), scale.data_ptr()]
    source = Source.write(tmp_path / "source", functools.partial(model, scale), images(2), device="cpu")
    x, = images(1)[0]
    assert torch.equal(source.model(torch)(x), model(scale, x)) and put == []
    assert torch.equal(source.model(torch, in_place=True)(x), model(scale, x)) and len(put) == 2
    other = source.serving(tmp_path / "other", (x,), model=True)
    put.clear()
    opened = Source.open(other.folder, other.identity)
    assert torch.equal(opened.model(torch, in_place=True)(x), model(scale, x)) and len(put) == 2
    assert (opened.kind, opened.model_hash, opened.training, opened.batches) == (source.kind, source.model_hash, source.training, 1)
    assert torch.equal(opened.inputs(torch)[0][0], x) and not (source.serving(tmp_path / "third", (x,), model=False).folder / "model.pt").exists()
    other.serving(other.folder, (x,), model=False)      # in the place of one that was there


def test_what_a_loss_holds_is_where_it_was_and_training_data_is_not(elsewhere: Any, tmp_path: Path) -> None:
    """A GPU would hold the data once for each process, though most candidates do not train."""
    there, put = elsewhere
    weight, data = torch.tensor([1.0, 2.0]), [(torch.ones(2, 6), torch.zeros(2, dtype=torch.long))]
    there += [weight.data_ptr(), data[0][0].data_ptr()]
    train = Train(data, functools.partial(torch.nn.functional.cross_entropy, weight=weight))
    for device, count in (("cuda:0", 1), ("cpu", 0)):
        source = Source.write(tmp_path / device, torch.nn.Linear(6, 2), images(2), train=train, device=device, switches={})
        put.clear()
        found = source.train(torch)
        assert found is not None and torch.equal(found.loss.keywords["weight"], weight) and torch.equal(found.loader[0][0], data[0][0])
        assert len(put) == count


def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    model = Pair().train()
    model.layer.bias.requires_grad_(False)
    model.register_forward_hook(lambda *_: None)
    before = {key: value for key, value in vars(model).items()}, {key: value.data_ptr() for key, value in model.state_dict().items()}
    Source.write(tmp_path, model, images(2))
    assert (vars(model), {key: value.data_ptr() for key, value in model.state_dict().items()}) == before
    assert model.training and model.layer.weight.requires_grad and not model.layer.bias.requires_grad and model.layer.weight.grad is None


def test_processes_share_the_weights(tmp_path: Path) -> None:
    source = Source.write(tmp_path, torch.nn.Linear(256, 256), [torch.zeros(1, 256)])
    first, second = source.model(torch), source.model(torch)
    if pickles._huge_pages():
        pytest.skip("weights are copied where memory comes in huge pages")
    assert str(tmp_path / "model.pt") in Path("/proc/self/maps").read_text(encoding="utf-8")
    with torch.no_grad():
        first.weight.zero_()
    assert second.weight.abs().sum() > 0 and source.model(torch).weight.abs().sum() > 0


@pytest.mark.parametrize("spoil", [
    lambda folder: folder.chmod(0o750), lambda folder: (folder / "source.json").write_text("{}"), lambda folder: (folder / "source.json").unlink(),
    lambda folder: (folder.rename(folder.with_name("elsewhere")), folder.symlink_to(folder.with_name("elsewhere")))])
def test_a_folder_that_others_could_have_changed_is_not_opened(spoil: Any, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    Source.write(folder, Pair(), images(2))
    spoil(folder)
    with pytest.raises(EnvironmentProblem):
        Source.open(folder)


def test_rights_are_looked_at_again_before_anything_is_unpickled(tmp_path: Path) -> None:
    source = Source.write(tmp_path / "source", Pair(), images(2))
    source.folder.chmod(0o777)
    for read in (source.model, source.inputs, source.calibration, source.train, source.facts):
        with pytest.raises(EnvironmentProblem, match="private"):
            read(torch)


def test_a_new_model_forgets_the_facts_of_the_old_one(tmp_path: Path) -> None:
    from saturate.records.inference import ModelFacts

    source = Source.write(tmp_path, Pair(), images(2))
    source.keep_facts(torch, ModelFacts(kind="Pair"))
    assert source.facts(torch).kind == "Pair"
    assert Source.write(tmp_path, Pair(), images(2)).facts(torch) is None


def test_a_full_disk_is_named_and_leaves_no_rest(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(EnvironmentProblem, match="the model cannot be written"):
            Source.write(tmp_path / "source", torch.nn.Linear(300, 300), [torch.zeros(1, 300)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path / "source") == []


# -- which models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "words"), [
    (lambda x: x, "no torch.nn.Module: .*<lambda>"), (Pair, "a class: Pair"), (3, "no torch.nn.Module: int"),
    (torch.nn.Linear(2, 2, device="meta"), "no weights yet"), (functools.partial(len), "no torch.nn.Module: len")])
def test_what_holds_no_module_is_refused_by_name(model: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        Source.write(tmp_path / "source", model, [torch.zeros(1, 2)])
    assert caught.value.remedy and not (tmp_path / "source").exists()


def test_a_method_of_a_module_is_a_module_there(tmp_path: Path) -> None:
    encoder = Encoder()
    x = torch.rand(2, 3, 4)
    source = Source.write(tmp_path, functools.partial(encoder.encode, shift=2.0), [x, x])
    served = source.model(torch)
    assert torch.equal(served(x), encoder.encode(x, 2.0)) and isinstance(served, torch.nn.Module)
    assert source.model_hash != Source.write(tmp_path, encoder, [x, x]).model_hash
    assert torch.equal(Source.write(tmp_path, encoder.__call__, [x, x]).model(torch)(x), x)
    assert not Source.write(tmp_path, encoder.encode, [x, x]).generates


class Writes(torch.nn.Module):
    def generate(self, ids: Any, count: int = 2) -> Any:
        return torch.cat([ids, ids[:, :count]], 1)


def test_a_method_that_generates_is_known_by_its_name(tmp_path: Path) -> None:
    ids = torch.ones(2, 3, dtype=torch.long)
    for given in (Writes().generate, functools.partial(Writes().generate, count=1)):
        source = Source.write(tmp_path, given, [ids, ids])
        assert source.generates and Source.open(tmp_path).generates


def test_wrappers_are_taken_off_and_that_is_said(tmp_path: Path) -> None:
    source = Source.write(tmp_path, torch.compile(torch.nn.DataParallel(Pair())), images(2))
    assert source.kind == "Pair" and len(source.notes) == 2 and "torch.compile" in source.notes[0]


def test_another_model_or_other_inputs_in_its_place_are_noticed(tmp_path: Path) -> None:
    """A process of a search that is still at work must not run what another one has written there."""
    made = Source.write(tmp_path / "source", Pair(), images(4))
    assert Source.open(made.folder, made.identity) == made == Source.open(made.folder)
    other = Pair()
    other.layer.weight.data[0, 0] += 1
    for model, inputs in ((other, images(4)), (Pair(), images(6))):
        Source.write(made.folder, model, inputs)
        with pytest.raises(EnvironmentProblem, match="holds another model, or other inputs") as caught:
            Source.open(made.folder, made.identity)
        assert "--workdir" in caught.value.remedy
        with pytest.raises(WorkerFailed, match="holds another model"):
            Worker(made, Candidate(), folder=tmp_path, threads=1, prepare_s=120.0)


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    model = Pair()
    model.lock = threading.Lock()
    with pytest.raises(UsageError, match="the model cannot be sent") as caught:
        Source.write(tmp_path, model, images(2))
    assert "lock" in caught.value.cause


def test_training_data_that_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only once"):
        Source.write(tmp_path, Pair(), images(2), train=Train(iter([]), squared_error))


def script_module(tmp_path: Path) -> Any:
    """A module that is loaded from a path under a name that no other process can import."""
    import importlib.util

    path = tmp_path / "loaded_by_path.py"
    path.write_text("import torch\nclass Local(torch.nn.Module):\n    def forward(self, x):\n        return helper(x)\n"
                    "def helper(x):\n    return x + 41\n", encoding="utf-8")
    specification = importlib.util.spec_from_file_location("loaded_by_path", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules["loaded_by_path"] = module
    specification.loader.exec_module(module)
    return module


def test_classes_that_no_other_process_finds_travel_by_value(tmp_path: Path) -> None:
    import cloudpickle

    module = script_module(tmp_path)
    source = Source.write(tmp_path / "source", module.Local(), [torch.zeros(2, 1)])
    del sys.modules["loaded_by_path"]
    assert float(source.model(torch)(torch.ones(1))) == 42
    assert not cloudpickle.list_registry_pickle_by_value()


def test_without_cloudpickle_such_a_class_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "pickler", lambda: pickles._ByName)
    module = script_module(tmp_path)
    try:
        with pytest.raises(UsageError, match="cannot be sent") as caught:
            Source.write(tmp_path / "source", module.Local(), [torch.zeros(2, 1)])
    finally:
        del sys.modules["loaded_by_path"]
    assert "saturate[inference]" in caught.value.remedy and "Local" in caught.value.cause
    assert Source.write(tmp_path / "source", Pair(), images(2)).model(torch) is not None


SCRIPT = '''
import sys
from pathlib import Path
import torch, torch.nn as nn, torch.nn.functional as F
from saturate.inference.source import Source

SCALE = 3.0

def helper(x):
    return F.relu(x) * SCALE

class Block(nn.Module):
    def forward(self, x):
        return helper(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
    def forward(self, x):
        return torch.tanh(self.block(x)) + F.silu(x)

if __name__ == "__main__":
    Source.write(Path(sys.argv[1]), Net().eval(), [(torch.ones(2, 3),)] * 4)
'''

READER = '''
import sys
from pathlib import Path
import torch
from saturate.inference.source import Source

SCALE = -1.0                # the reader's own

def around(model):
    return lambda *inputs: model(*inputs)

source = Source.open(Path(sys.argv[1]))
model, x = source.model(torch), source.inputs(torch)[0][0]
with torch.no_grad():
    answer = torch.compile(around(model), backend="eager", fullgraph=True)(x)
assert torch.equal(answer, torch.tanh(x * 3) + torch.nn.functional.silu(x)), answer
'''


def test_a_model_of_a_script_can_be_compiled_in_another_process(tmp_path: Path) -> None:
    """Its functions came by value, and dynamo looks their globals up in the module that these name."""
    for name, text in (("script.py", SCRIPT), ("reader.py", READER)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        done = subprocess.run([sys.executable, tmp_path / name, tmp_path / "source"], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        assert done.returncode == 0, done.stderr


def test_a_method_as_a_module_has_the_parameters_of_the_method() -> None:
    class Two(torch.nn.Module):
        def score(self, first: Any, scale: Any, second: Any) -> Any:
            return scale * first - second

    from saturate.inference.formats import _program

    model = Two()
    way, _ = called.find(torch, functools.partial(model.score, torch.ones(1)))
    assert _program._parameters(way.as_module(torch)) == ["scale", "second"]
    way, _ = called.find(torch, model.score)
    module = way.as_module(torch)
    assert _program._parameters(module) == ["first", "scale", "second"] and module(1, 2, 3) == -1


OPERATORS = '''
import sys
from pathlib import Path
import torch
from saturate.inference.source import Source
from operators_of_a_module import twice

aten, relu, exactly = torch.ops.aten, torch.ops.aten.relu, torch.ops.aten.add.Tensor

class Net(torch.nn.Module):
    def forward(self, x):
        return exactly(torch.ops.aten.relu(x) + relu(x), aten.neg(twice(x)))

if __name__ == "__main__":
    Source.write(Path(sys.argv[1]), Net(), [(torch.ones(2, 3),)] * 4)
'''

REGISTERS = '''
import torch

@torch.library.custom_op("saturate_test::{name}", mutates_args=())
def {name}(x: torch.Tensor) -> torch.Tensor:
    return 2 * x
'''


def test_a_model_of_a_script_can_call_operators_of_torch_and_of_modules(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OPERATORS, encoding="utf-8")
    (tmp_path / "operators_of_a_module.py").write_text(REGISTERS.format(name="twice"), encoding="utf-8")
    reader = ("import sys, torch; from pathlib import Path; from saturate.inference.source import Source;"
              "print(Source.open(Path(sys.argv[1])).model(torch)(torch.ones(2)).tolist())")
    for call in (["script.py"], ["-c", reader]):
        done = subprocess.run([sys.executable, *call, tmp_path / "source"], capture_output=True, text=True, cwd=tmp_path,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])})
        assert done.returncode == 0, done.stderr
    assert done.stdout == "[0.0, 0.0]\n"


@pytest.mark.parametrize("call", ["torch.ops.saturate_test.{name}(x)", "{name}(x)"])
def test_an_operator_that_no_other_process_would_know_is_named(call: str, tmp_path: Path) -> None:
    name = "of_ops" if "ops" in call else "of_script"
    path = tmp_path / f"registers_{name}.py"
    path.write_text(REGISTERS.format(name=name) + "class Net(torch.nn.Module):\n    def forward(self, x):\n"
                    f"        return {call.format(name=name)}\n", encoding="utf-8")
    import importlib.util

    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    with pytest.raises(UsageError, match="cannot be sent") as caught:
        Source.write(tmp_path / "source", module.Net(), [torch.zeros(2, 1)])
    assert f"the operator saturate_test::{name}" in caught.value.cause and "a module of their own" in caught.value.remedy
    del sys.modules[path.stem]


def told_elsewhere(source: Source, code: str) -> list[Any]:
    """What another process prints of the model there, as a list."""
    code = ("import sys, torch; from pathlib import Path; from saturate.inference.source import Source;"
            f"source = Source.open(Path(sys.argv[1])); model = source.model(torch); x = source.inputs(torch)[0][0]; print({code})")
    done = subprocess.run([sys.executable, "-c", code, str(source.folder)], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    return list(eval(done.stdout))


@pytest.mark.parametrize("called", [False, True], ids=["new", "called before"])
def test_outputs_that_transformers_collects_are_collected_in_another_process(called: bool, tmp_path: Path) -> None:
    """It knows of which classes only where one was constructed, and hooks its modules at the first call."""
    transformers = pytest.importorskip("transformers", reason="the model under test is its")
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=16, use_cache=False, bos_token_id=0, eos_token_id=1,
                                     output_hidden_states=True)
    model, x = transformers.GPT2LMHeadModel(config).eval(), torch.randint(0, 20, (2, 5))
    if called:
        model(x)
    source = Source.write(tmp_path / "source", model, [(x,)] * 4)
    there = told_elsewhere(source, "[state.flatten().tolist() for state in model(x).hidden_states]")
    assert torch.allclose(torch.tensor(there), torch.stack([state.flatten() for state in model(x).hidden_states]), atol=1e-6)


def test_a_hook_that_a_library_made_sees_the_globals_of_that_library(tmp_path: Path) -> None:
    """A function in a function goes by value; what it writes to must be what the library reads."""
    (tmp_path / "counting.py").write_text("import contextvars\ncalls = contextvars.ContextVar('calls', default=0)\n"
                                          "def watch(module):\n"
                                          "    def count(*_):\n        calls.set(calls.get() + 1)\n"
                                          "    module.register_forward_hook(count)\n", encoding="utf-8")
    sys.path.insert(0, str(tmp_path))
    try:
        counting = importlib.import_module("counting")
        model = torch.nn.Linear(3, 2)
        counting.watch(model)
        source = Source.write(tmp_path / "source", model, [(torch.zeros(2, 3),)] * 4)
        assert told_elsewhere(source, "[model(x) is None, __import__('counting').calls.get()]") == [False, 1]
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("counting", None)
