"""A candidate's process on a GPU. Written on a machine without one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import aoti_control
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cloudpickle", reason="the extra inference")

from saturate.inference import examples  # noqa: E402 - after the check for torch
from saturate.inference.candidates import Candidate, Part  # noqa: E402
from saturate.inference.failures import WorkerFailed  # noqa: E402
from saturate.inference.process import Worker  # noqa: E402
from saturate.inference.source import Source  # noqa: E402
from saturate.inference.techniques import aot_inductor  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDTH = 1024


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()).cuda()
    made = Source.write(tmp_path_factory.mktemp("study") / "source", model, [torch.rand(8, WIDTH, device="cuda") for _ in range(4)])
    assert next(model.parameters()).is_cuda and made.device == "cuda:0"
    return made


@pytest.fixture(scope="module")
def worker(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(source, Candidate(), folder=tmp_path_factory.mktemp("work"), threads=2, prepare_s=300.0) as made:
        yield made


def test_facts_are_those_of_the_device(worker: Worker) -> None:
    facts = worker.ready.facts
    assert (facts.device, facts.exportable, facts.export_problem) == ("cuda", True, "")
    assert facts.capability == torch.cuda.get_device_capability()


def test_answers_are_where_the_inputs_are(worker: Worker) -> None:
    x = torch.rand(3, WIDTH)
    assert not worker.run(x).is_cuda and worker.run(x.cuda()).device == x.cuda().device
    assert torch.equal(worker.run(x.cuda()).cpu(), worker.run(x))
    assert all(not tensor.is_cuda for batch in worker.outputs() for tensor in batch)


def test_a_call_is_timed_until_the_device_is_idle(worker: Worker) -> None:
    assert len(times := worker.block(20)) == 20 and min(times) > 5_000       # a launch alone takes some microseconds


def test_memory_is_that_of_the_weights_and_of_libraries(worker: Worker) -> None:
    weights = 4 * WIDTH * (WIDTH + 1)
    assert weights <= worker.memory_bytes() < 2**30     # the code of kernels counts as well
    assert worker.ready.peak_memory_bytes >= weights
    worker.freeze()
    assert worker.memory_bytes() >= weights and worker.frozen


def test_the_weights_of_a_compiled_library_count(tmp_path: Path) -> None:
    """Beside those of the model that it was made from."""
    width = 8192
    source = Source.write(tmp_path / "source", torch.nn.Linear(width, width).cuda(), [torch.rand(8, width, device="cuda")] * 2)
    candidate = Candidate.of([Part(aot_inductor, aot_inductor.Options(freezing=False))])
    try:
        worker = Worker(source, candidate, folder=tmp_path, threads=2, prepare_s=300.0)
    except WorkerFailed as error:
        if error.kind == "not_applied" or (reason := aoti_control.problem()):
            pytest.skip(error.reason if error.kind == "not_applied" else reason)
        raise
    with worker:
        worker.outputs()
        assert worker.memory_bytes() >= 2 * 4 * width * width


def test_a_limit_of_memory_is_the_allocator_s(source: Source, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed) as caught, Worker(
            source, Candidate(), folder=tmp_path, threads=2, prepare_s=300.0, memory_bytes=64 * 2**20) as worker:
        worker.run(torch.rand(2**15, WIDTH))
    assert caught.value.kind == "out_of_memory"


def products_of(context: object) -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark


def test_the_process_computes_as_the_users_does(source: Source, tmp_path: Path) -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    try:
        made = Source.write(tmp_path / "source", source.model(torch).cuda(), [torch.rand(8, WIDTH, device="cuda")] * 2)
        torch.set_float32_matmul_precision("highest")
        with Worker(made, Candidate(), folder=tmp_path, threads=2, prepare_s=300.0) as started:
            assert started.ask(f"{__name__}:products_of") == ("high", True)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = False


class Tabled(torch.nn.Module):
    """A table that is a plain attribute, which no `to` moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = torch.nn.Linear(WIDTH, WIDTH), torch.arange(float(WIDTH), device="cuda")

    def forward(self, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * scale + self.table


def test_what_a_model_holds_beside_its_weights_is_on_the_device(tmp_path: Path) -> None:
    model, scale = Tabled().cuda(), torch.full((WIDTH,), 2.0, device="cuda")
    inputs = [torch.rand(8, WIDTH, device="cuda") for _ in range(4)]
    made = Source.write(tmp_path / "source", functools.partial(model, scale), inputs)
    for source in (made, made.serving(tmp_path / "other", (inputs[0],), model=True)):
        with Worker(source, Candidate(), folder=tmp_path, threads=2, prepare_s=300.0) as started, torch.no_grad():
            torch.testing.assert_close(started.run(inputs[0]), model(scale, inputs[0]), rtol=1e-3, atol=1e-3)


class Looked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


def test_an_index_out_of_range_ends_the_process_with_its_reason(tmp_path: Path) -> None:
    made = Source.write(tmp_path / "source", Looked().cuda(), [torch.zeros(3, dtype=torch.long, device="cuda")] * 2)
    with Worker(made, Candidate(), folder=tmp_path, threads=2, prepare_s=300.0) as started:
        for ids in (torch.tensor([99]), torch.tensor([0])):
            with pytest.raises(WorkerFailed, match="CUDA") as caught:
                started.run(ids.cuda())
            assert not caught.value.alive


def test_other_batch_sizes_are_made_on_the_device() -> None:
    found = examples.of_size(torch, (torch.arange(6, device="cuda").reshape(3, 2),), 4)
    assert found is not None and found[0].is_cuda and found[0].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
