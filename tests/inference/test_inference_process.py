"""A candidate's process: what it answers, how it fails, and that it never stays behind."""

from __future__ import annotations

import gc
import os
import platform
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import misbehaves
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cloudpickle", reason="the extra inference")

from process_kit import Answer, Doubles, Force, OnlyIn, Pair, Structured  # noqa: E402 - after the check for torch
from waiting import until  # noqa: E402

from saturate.errors import EnvironmentProblem  # noqa: E402
from saturate.inference import compiling, forkserver, launching, process, search  # noqa: E402
from saturate.inference.candidates import Candidate, Part  # noqa: E402
from saturate.inference.failures import WorkerFailed  # noqa: E402
from saturate.inference.forkserver import ForkServer  # noqa: E402
from saturate.inference.process import Worker  # noqa: E402
from saturate.inference.source import Source  # noqa: E402
from saturate.inference.tried import Tried  # noqa: E402
from saturate.inference.worker import Order, Server  # noqa: E402
from saturate.records.inference import ModelFacts  # noqa: E402
from saturate.trial import tree  # noqa: E402

BATCHES = [(torch.rand(2, 6, generator=torch.Generator().manual_seed(seed)),) for seed in range(4)]


def doing(how: str) -> Candidate:
    return Candidate.of([Part(misbehaves, misbehaves.Options(how))])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source.write(tmp_path_factory.mktemp("study") / "source", Pair(), BATCHES)


@pytest.fixture(scope="module", params=["fresh", "forked"])
def forks(request: pytest.FixtureRequest, source: Source, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer | None]:
    """All holds for both."""
    if request.param == "fresh":
        yield None
        return
    if not forkserver.possible():
        pytest.skip("candidates start afresh on this system")
    with forkserver.running(source, tmp_path_factory.mktemp("forks"), 1) as server:
        assert server is not None
        yield server
        assert not server.closed, (server.folder / "output.log").read_text()


@pytest.fixture
def start(source: Source, tmp_path: Path, forks: ForkServer | None) -> Iterator[Callable[..., Worker]]:
    """Starts a process that knows the facts already; closed after the test."""
    started: list[Worker] = []

    def begin(how: str | None = None, **options: Any) -> Worker:
        options = {"folder": tmp_path, "threads": 1, "prepare_s": 120.0, "facts": ModelFacts(), "forks": forks, **options}
        started.append(Worker(source, Candidate() if how is None else doing(how), **options))
        return started[-1]

    yield begin
    for worker in started:
        worker.close()


def alive(pid: int) -> bool:
    return tree.state(pid) not in ("", "Z", "X")


def gone(*pids: int, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.fixture(scope="module")
def shared(source: Source, tmp_path_factory: pytest.TempPathFactory, forks: ForkServer | None) -> Iterator[Worker]:
    """One that doubles the output. Tests leave it as it is. It ends with everything that it started."""
    folder = tmp_path_factory.mktemp("shared")
    with Worker(source, doing("double"), folder=folder, threads=1, prepare_s=120.0, facts=ModelFacts(random=True), forks=forks) as worker:
        yield worker
        pid, child = worker.ask("misbehaves:misbehave", ""), worker.ask("misbehaves:misbehave", "child")
        worker.freeze()
        assert tree.state(pid) == tree.state(child) == "T"
    assert gone(pid, child, worker._supervisor.pid)
    worker.close()
    with pytest.raises(WorkerFailed, match="closed"):
        worker.run(BATCHES[0][0])


# -- answers -------------------------------------------------------------------------------------------------------


def test_a_candidate_answers_with_its_techniques_applied(shared: Worker) -> None:
    model = Pair().eval()
    (x,) = BATCHES[0]
    got = shared.run(x)
    assert isinstance(got, tuple) and torch.allclose(got[0], 2 * model(x)[0])
    assert shared.ready.done == ["did double"] and [proof.evidence for proof in shared.ready.proofs] == ["it did double"]
    assert shared.ready.compile_s is None
    assert shared.ready.prepare_s > 0.05 and 0 < shared.ready.first_call_s < shared.ready.prepare_s
    # The files of the library alone are more; less would not be resident memory of that process.
    assert shared.ready.peak_memory_bytes > 50 * 2**20 and shared.memory_bytes() > 50 * 2**20


def test_all_outputs_come_as_flat_lists(shared: Worker) -> None:
    model = Pair().eval()
    got = shared.outputs()
    assert len(got) == 2 and all(torch.allclose(a, 2 * b) for batch, (x,) in zip(got, BATCHES[0::2]) for a, b in zip(batch, model(x)))


def test_a_block_times_every_call(shared: Worker) -> None:
    times = shared.block(7)
    assert len(times) == 7 and all(isinstance(one, int) and one > 100 for one in times)
    assert shared.block(0) == [] and len(shared.block(1, start=5)) == 1 and len(shared.block(5, 3, among=2)) == 5
    assert shared.in_turn == 2


def test_calls_run_in_inference_mode_and_blocks_without_collection(shared: Worker) -> None:
    shared.run(*BATCHES[0])
    assert shared.ask("misbehaves:note", "state") == "inference True, collects True, threads 1"
    shared.block(1)
    assert shared.ask("misbehaves:note", "state") == "inference True, collects False, threads 1"


def test_a_random_model_draws_the_same_numbers_in_each_call(shared: Worker) -> None:
    drawn = []
    for call in (lambda: shared.run(*BATCHES[0]), shared.outputs, lambda: shared.block(2)):
        call()
        drawn += [shared.ask("misbehaves:drawn"), shared.ask("misbehaves:drawn")]
    assert drawn[0] == drawn[2] == drawn[4] != drawn[1]


def test_inputs_that_the_model_refuses_leave_it_alive(shared: Worker) -> None:
    with pytest.raises(WorkerFailed, match="shapes cannot be multiplied") as caught:
        shared.run(torch.zeros(1, 5))
    assert caught.value.kind == "failed" and caught.value.alive and "Traceback" in caught.value.log
    assert shared.run(torch.zeros(5, 6))[0].shape == (5, 3)


def test_messages_that_cannot_be_sent_leave_it_alive(shared: Worker) -> None:
    with pytest.raises(WorkerFailed, match="inputs cannot be sent"):
        shared.run(torch.zeros(1, 6), (x for x in "ab"))
    with pytest.raises(WorkerFailed, match="output cannot be sent"):
        shared.ask("misbehaves:misbehave", "unsendable")
    with pytest.raises(WorkerFailed, match="inputs cannot be used in another process: RuntimeError: only here"):
        shared.run(torch.zeros(1, 6), OnlyIn(os.getpid()))
    with pytest.raises(WorkerFailed, match="output cannot be read: RuntimeError: only here"):
        shared.ask("process_kit:only_in_this")
    assert shared.run(torch.zeros(5, 6))[0].shape == (5, 3)


def test_memory_errors_of_an_allocator_are_of_that_kind(shared: Worker) -> None:
    with pytest.raises(WorkerFailed) as caught:
        shared.ask("misbehaves:misbehave", "memory error")
    assert caught.value.kind == "out_of_memory" and caught.value.alive


@pytest.mark.parametrize(("how", "outside"), [("disk full", True), ("file too large", True), ("memory error", False), ("raise", False)])
def test_a_full_disk_is_no_fault_of_a_candidate(how: str, outside: bool, shared: Worker) -> None:
    with pytest.raises(WorkerFailed) as caught:
        shared.ask("misbehaves:misbehave", how)
    assert caught.value.outside is outside


def test_memory_that_is_given_back_at_once_is_seen(shared: Worker) -> None:
    before = shared.memory_bytes()
    shared.ask("misbehaves:misbehave", "allocate")
    assert 190 * 2**20 < shared.memory_bytes() - before < 220 * 2**20
    assert 10 * 2**20 < shared.file_bytes() < before and not shared.ready.whole_device, "torch's libraries"


def test_what_the_model_prints_goes_to_the_log(shared: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    shared.ask("misbehaves:misbehave", "print")
    until(lambda: "words of its library" in shared.output())        # the supervisor passes it on
    assert "words of the model" in shared.output()
    assert "words" not in "".join(capfd.readouterr())


def test_several_threads_may_call(shared: Worker) -> None:
    got: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda n=n: got.update({n: shared.run(torch.full((1, 6), float(n)))[0]})) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model = Pair().eval()
    assert all(torch.allclose(got[n], 2 * model(torch.full((1, 6), float(n)))[0]) for n in range(8))


def test_a_fork_of_the_user_does_not_disturb_it(shared: Worker) -> None:
    """A DataLoader's worker inherits the object."""
    child = os.fork()
    if child == 0:
        try:
            shared.run(BATCHES[0][0])
        except WorkerFailed as failure:
            shared.close()
            os._exit(17 if "fork" in failure.reason else 18)
        os._exit(19)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert shared.run(torch.zeros(5, 6))[0].shape == (5, 3)


def test_a_frozen_process_does_not_run_and_a_request_wakes_it(shared: Worker) -> None:
    pid = shared.ask("misbehaves:misbehave", "")
    shared.freeze()
    assert tree.state(pid) == "T" and shared.memory_bytes() > 0
    assert len(shared.block(2)) == 2
    assert tree.state(pid) == "T"
    shared.thaw()
    assert tree.state(pid) != "T"


def test_the_environment_of_the_user_is_not_left_in_a_file(shared: Worker) -> None:
    assert {*os.listdir(shared.folder)} - {"tmp"} == {"output.log", "scratch"}
    assert shared.folder.stat().st_mode & 0o777 == 0o700


# -- the other end, in this process ----------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Server]:
    """What it sets for its whole process is taken back."""
    threads = torch.get_num_threads()
    yield Server()
    gc.unfreeze()
    torch.set_num_threads(threads)


def order(source: Source, folder: Path, how: str = "double", **options: Any) -> Order:
    techniques = [("misbehaves", misbehaves.__file__, {"how": how})]
    return Order(**{"source": str(source.folder), "artifact": None, "techniques": techniques, "keep": frozenset(), "folder": str(folder),
                    "threads": 1, "limit_s": 100.0, "memory_bytes": None, "facts": ModelFacts(), **options})


def test_every_shape_is_met_before_the_first_block(tmp_path: Path, server: Server) -> None:
    source = Source.write(tmp_path / "source", Pair(), [torch.zeros(size, 6) for size in (3, 5, 2, 4, 3, 3)], [torch.zeros(1, 6)])
    assert source.batches == 6
    server.do_prepare(order(source, tmp_path))
    assert server.context and server.context.notes["calls"] == "3 5 2 4 "
    server.do_block(4, None)
    server.do_block(3, None)
    server.do_block(1, 2)
    server.do_block(5, 7, among=2)
    server.do_block(1, None)
    assert server.context.notes["calls"] == "3 5 2 4 " + "3 5 2 4 3 3 3 " + "2 " + "5 2 5 2 5 " + "3 "


def test_what_compilers_took_is_said(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_others_s", 3.0)
    source = Source.write(tmp_path / "source", Pair(), BATCHES)
    assert server.do_prepare(order(source, tmp_path))["compile_s"] == compiling.seconds() >= 3.0


def test_every_call_gets_the_inputs_that_the_user_gave(tmp_path: Path, server: Server) -> None:
    source = Source.write(tmp_path / "source", Doubles(), [torch.ones(2, 3), torch.ones(4, 3)], [torch.ones(1, 3)])
    server.do_prepare(order(source, tmp_path, facts=ModelFacts(writes_inputs=True)))
    server.do_block(5, None)
    assert server.context and all(batch[0].eq(1).all() for batch in (*server.inputs, *server.context.inputs))


@pytest.mark.parametrize(("alone", "mode"), [(True, "no_grad"), (False, "enable_grad")])
def test_a_model_that_differentiates_runs(alone: bool, mode: str, tmp_path: Path, server: Server) -> None:
    source = Source.write(tmp_path / "source", Force(alone), [torch.ones(2, 3)] * 2)
    server.do_prepare(order(source, tmp_path, facts=None, techniques=[]))
    assert server.facts.mode == mode and server.do_outputs()[0][0].eq(-2).all() and len(server.do_block(2, None)) == 2


def test_techniques_get_what_the_contract_says(source: Source, tmp_path: Path, server: Server) -> None:
    server.do_prepare(order(source, tmp_path, keep=frozenset({"layer"})))
    context = server.context
    assert context and context.keep == {"layer"} and context.folder == tmp_path and context.threads == 1 and context.train is None
    assert len(context.inputs) == len(context.calibration) == 2 and not context.model.training
    assert 0 < context.deadline_s - time.monotonic() < 60


def test_the_model_itself_holds_no_data_that_only_techniques_look_at(source: Source, tmp_path: Path, server: Server) -> None:
    """An artifact's process has none either: by memory each candidate would beat a model that holds it."""
    server.do_prepare(order(source, tmp_path, techniques=[]))
    assert server.context and not server.context.calibration and not server.context.others and server.context.train is None
    assert [name for name, _ in server.do_sensitivity(60.0)], "layers are ranked with the same data as ever"


@pytest.mark.parametrize("whole", [True, False])
def test_a_whole_in_training_mode_is_switched_and_a_part_is_not(whole: bool, tmp_path: Path, server: Server) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Dropout()).train(whole)
    model[1].train()
    source = Source.write(tmp_path / "source", model, BATCHES)
    server.do_prepare(order(source, tmp_path))
    assert source.training is whole and server.context and server.context.model[1].training is not whole
    assert not server.context.model[0].training


def test_reasons_are_one_line_and_name_the_technique(server: Server) -> None:
    assert server.reason(RuntimeError("\n  first\nsecond")) == "RuntimeError: first"
    assert server.reason(RuntimeError("backend='inductor' raised:\n\nCompileError: no compiler\nmore")) == (
        "RuntimeError: backend='inductor' raised: CompileError: no compiler")
    assert server.reason(ValueError("what follows:")) == "ValueError: what follows:"
    assert server.reason(ValueError()) == "ValueError: no message"
    assert server.reason(EnvironmentProblem("it is damaged", cause="a digest")) == "it is damaged: a digest"
    server._doing = "technique"
    assert server.reason(misbehaves.NotApplied("why")) == "technique: why"


# -- failures ------------------------------------------------------------------------------------------------------


def test_the_baseline_is_observed_once_and_its_structure_comes_back(tmp_path: Path) -> None:
    batch = torch.randint(0, 11, (2, 5)), torch.rand(2, 5, 1)
    source = Source.write(tmp_path / "source", Structured().train(), [batch, batch])
    with Worker(source, Candidate(), folder=tmp_path, threads=1, prepare_s=120.0) as worker:
        facts = worker.ready.facts
        assert (facts.kind, facts.exportable, facts.training_mode, facts.reused_modules) == ("Structured", True, True, ("act",))
        assert source.facts(torch) == facts
        got = worker.run(*batch)
        assert type(got) is Answer and got.extra["again"] is got.extra["hidden"] and got.name == "answer"
        assert torch.equal(got.logits, Structured().eval()(*batch).logits)


@pytest.mark.parametrize(("how", "kind", "reason"), [
    ("refuse", "not_applied", "misbehaves: it does not want to"),
    pytest.param("raise", "failed", "misbehaves: RuntimeError: no such luck", marks=pytest.mark.slow)])
def test_a_technique_that_fails_says_so(how: str, kind: str, reason: str, start: Callable[..., Worker], tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed) as caught:
        start(how)
    assert (caught.value.kind, caught.value.reason, caught.value.alive) == (kind, reason, False) and "Traceback" in caught.value.log
    assert not any((folder / "scratch").exists() for folder in tmp_path.iterdir())


def test_a_hang_is_ended_with_everything_that_it_started(start: Callable[..., Worker]) -> None:
    worker = start()
    pid, child = worker.ask("misbehaves:misbehave", ""), worker.ask("misbehaves:misbehave", "child")
    with pytest.raises(WorkerFailed, match="misbehave took longer than") as caught:
        worker.ask("misbehaves:misbehave", "hang", limit_s=0.3)
    assert caught.value.kind == "timeout" and not caught.value.alive and gone(pid, child)


def test_a_signal_from_elsewhere_is_no_fault_of_a_candidate(start: Callable[..., Worker]) -> None:
    worker = start()
    os.kill(worker.ask("misbehaves:misbehave", ""), signal.SIGTERM)
    with pytest.raises(WorkerFailed, match="ended by SIGTERM") as caught:
        worker.run(BATCHES[0][0])
    assert caught.value.kind == "failed" and caught.value.outside


def test_a_hang_is_given_what_is_left_of_the_search_and_not_ten_minutes(start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start(deadline_s=time.monotonic() - 100)
    assert len(worker.outputs()) == len(worker.block(2)) == 2, "honest calls have the time that they need, also when it is over"
    monkeypatch.setattr(process, "GRACE_S", 1.0)
    limits = [worker._limit_s(rounds) for rounds in (1, 100)]
    assert 1.0 <= limits[0] < limits[1] < 60
    worker.freeze()         # nothing answers
    monkeypatch.setattr(worker, "thaw", lambda: None)
    for ask in (lambda: worker.run(*BATCHES[0]), worker.outputs):
        with pytest.raises(WorkerFailed) as caught:
            ask()
        assert (caught.value.kind, caught.value.alive) == ("timeout", False) and "took longer" in caught.value.reason
    worker.frozen = False
    with pytest.raises(WorkerFailed, match="took longer") as caught:
        worker.freeze()     # as a lane does in the end, whatever its block ended of: "it closed the connection" was the reason then
    assert caught.value.kind == "timeout"


def test_a_check_may_ask_for_more_than_the_inputs_hold(start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    worker, asked = start(), []
    monkeypatch.setattr(worker, "_ask", lambda *given, limit_s, **more: asked.append(limit_s))
    monkeypatch.setattr(worker, "_round_s", 0.1)
    worker.run(*BATCHES[0])
    worker.run(torch.zeros(20, 6))
    worker.run(torch.zeros(2 * 10**6, 6))
    worker.probe(*BATCHES[0])
    assert asked == pytest.approx([62.0, 60 + 20 * 0.1 * 100, process.REQUEST_S, 12.0])


def test_a_library_that_does_not_name_the_full_disk(tmp_path: Path) -> None:
    """On a small file system of its own, where the system lets one be made."""
    code = textwrap.dedent(f"""
        import subprocess, sys
        from pathlib import Path
        from types import SimpleNamespace
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", {str(tmp_path)!r}], check=True)
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import misbehaves
        from saturate.inference import worker
        server = worker.Server()
        server.folder, server.context = Path({str(tmp_path)!r}), SimpleNamespace(folder={str(tmp_path)!r})
        server.do_try = lambda: misbehaves.misbehave(server.context, "fill the disk")
        print(worker._answer(server, "try", ())[1:3])
        Path({str(tmp_path)!r}, "large").unlink()
        server.do_try = lambda: misbehaves.misbehave(server.context, "refuse")
        print(worker._answer(server, "try", ())[1:3])
    """)
    ran = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", code], capture_output=True,
                         text=True, timeout=120, check=False)
    if ran.returncode and ("unshare:" in ran.stderr or "mount" in ran.stderr):
        pytest.skip("no file system can be mounted here")
    assert "'disk_full', 'no space is left in " in ran.stdout and "('not_applied', 'it does not want to')" in ran.stdout, ran.stderr


def test_a_full_disk_is_told_from_a_candidate_that_fails(start: Callable[..., Worker]) -> None:
    with pytest.raises(WorkerFailed) as caught:
        start().ask("misbehaves:misbehave", "disk full")
    assert caught.value.kind == "disk_full" and "No space left" in caught.value.reason


@pytest.mark.slow
@pytest.mark.parametrize(("how", "kind", "reason"), [
    ("die", "failed", "ended by SIGSEGV, in misbehave (misbehaves.py, line 109)"), ("exit", "failed", "its process ended itself in the middle of a request")])
def test_an_end_in_the_middle_of_a_request_is_named(how: str, kind: str, reason: str, start: Callable[..., Worker]) -> None:
    with pytest.raises(WorkerFailed) as caught:
        start(how)
    assert (caught.value.kind, caught.value.reason, caught.value.alive, caught.value.outside) == (kind, reason, False, False)
    if how == "die":
        assert "Segmentation fault" in caught.value.log and "misbehave" in caught.value.log
        row = Tried(doing(how), "dominated", "")
        search._fail(row, caught.value)
        assert (row.fate, row.reason, row.outside) == ("failed", f"failed: {reason}", False)


@pytest.mark.slow
def test_a_limit_of_memory_ends_it(start: Callable[..., Worker]) -> None:
    with pytest.raises(WorkerFailed, match="above the limit of 512 MiB") as caught:
        start("hog", memory_bytes=512 * 2**20)
    assert caught.value.kind == "out_of_memory"


@pytest.mark.slow
def test_preparation_has_a_time_limit(start: Callable[..., Worker]) -> None:
    with pytest.raises(WorkerFailed, match="preparation took longer than 8 s") as caught:
        start("hang", prepare_s=8.0)
    assert caught.value.kind == "timeout"


@pytest.mark.slow
def test_a_killed_supervisor_takes_all_with_it(start: Callable[..., Worker]) -> None:
    worker = start()
    pid, child = worker.ask("misbehaves:misbehave", ""), worker.ask("misbehaves:misbehave", "child")
    worker._supervisor.kill()
    worker._supervisor.wait()
    with pytest.raises(WorkerFailed, match="watches it was killed"):
        worker.run(BATCHES[0][0])
    assert gone(pid, child)


@pytest.mark.slow
def test_a_fork_that_lives_on_does_not_delay_the_end(start: Callable[..., Worker]) -> None:
    """Nor does the worker of a DataLoader that is kept: it holds the pipes of its parent open."""
    worker = start()
    pid = worker.ask("misbehaves:misbehave", "")
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        began = time.monotonic()
        worker.close()
        assert time.monotonic() - began < 10 and gone(pid)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.slow
def test_a_technique_without_effect_is_not_active(start: Callable[..., Worker]) -> None:
    assert [proof.active for proof in start("idle").ready.proofs] == [False]


SCRIPT = """
    import os, signal, sys, threading, time
    import torch
    from dataclasses import dataclass
    from pathlib import Path
    from saturate.inference.candidates import Candidate
    from saturate.inference.forkserver import ForkServer
    from saturate.inference.process import Worker
    from saturate.inference.source import Source
    from saturate.records.inference import ModelFacts

    print("the script runs", flush=True)

    @dataclass
    class Output:
        y: torch.Tensor

    class Local(torch.nn.Module):
        def forward(self, x):
            print("a call")
            return Output(x + 1)

    folder = Path(sys.argv[1])
    source = Source.write(folder / "source", Local(), [torch.zeros(2, 1)])
    forks = ForkServer(source, folder=folder, threads=1) if sys.argv[3] == "forked" else None
    worker = Worker(source, Candidate(), folder=folder, threads=1, prepare_s=120, facts=ModelFacts(), forks=forks)
    got = worker.run(torch.ones(1))
    assert type(got) is Output and float(got.y) == 2
    pids = [worker.ask("misbehaves:misbehave", ""), worker.ask("misbehaves:misbehave", "child"), worker._supervisor.pid]
    pids += [forks._process.pid] if forks else []
    assert not forks or not forks.closed
    print(*pids, flush=True)
    if sys.argv[2] == "frozen":
        worker.freeze()
    if sys.argv[2] == "interrupted":
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        worker.ask("misbehaves:misbehave", "hang")
    time.sleep(60)
"""


@pytest.mark.parametrize(("how", "started"), [
    *(pytest.param(how, "fresh", marks=pytest.mark.slow) for how in ("killed", "frozen", "interrupted")), ("killed", "forked"),
    *(pytest.param(how, "forked", marks=pytest.mark.slow) for how in ("frozen", "interrupted"))])
def test_nothing_outlives_the_user_s_process(how: str, started: str, tmp_path: Path) -> None:
    """... whose script is not run a second time, and whose classes and their answers are its own."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with subprocess.Popen([sys.executable, str(script), str(tmp_path / "work"), how, started], env={**os.environ, "PYTHONPATH": path},
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "the script runs\n"
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        pids = [int(word) for word in line.split()]
        assert all(map(alive, pids))
        if how != "interrupted":
            process.send_signal(signal.SIGKILL)
        assert gone(*pids)
        process.kill()
        assert process.stdout.read() == ""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator keeps what it keeps")
def test_the_speed_of_a_process_does_not_hang_on_what_it_did_before(tmp_path: Path) -> None:
    """The first one observes and exports the model; later ones once had hundreds of page faults in each call."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3), torch.nn.ReLU())
    source = Source.write(tmp_path / "source", model.eval(), [(torch.rand(32, 3, 18, 18),)] * 2)
    for _ in range(2):
        with Worker(source, Candidate(), folder=tmp_path, threads=1, prepare_s=120.0) as worker:
            worker.block(10)
            before = worker.ask("process_kit:page_faults")
            worker.block(50)
            assert worker.ask("process_kit:page_faults") - before < 50 * 50


@pytest.mark.parametrize("name", ["short", 80 * "long"])
def test_temporary_files_of_a_candidate_go_with_it(source: Source, name: str) -> None:
    """A search that ended a candidate in the middle of its compilation left gcc's files in /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as there:
        folder = Path(there, name[:200])
        folder.mkdir()
        with Worker(source, Candidate(), folder=folder, threads=1, prepare_s=120.0, facts=ModelFacts()) as worker:
            path = Path(worker.ask("process_kit:temporary_file"))
            assert path.exists() and path.parent == launching.layers.scratch_folder(worker.folder), path
            assert path.is_relative_to(folder) is (name == "short") and len(str(path.parent)) <= 71, "sockets have room there"
        assert not path.parent.exists() and worker.log.exists()


def test_what_a_killed_search_has_left_is_removed(tmp_path: Path) -> None:
    """Each kill left gigabytes of compiled programs and weights in the working folder, and none was ever removed."""
    for name in ("process-0123abcd", "process-of-mine"):
        (tmp_path / name / "scratch" / "program").mkdir(parents=True)
        (tmp_path / name / "supervise.json").write_text("{}")
        (tmp_path / name / "output.log").touch()
    (tmp_path / "process-76543210").symlink_to(tmp_path / "process-of-mine")
    elsewhere = launching.layers.make_scratch(tmp_path / "process-0123abcd")
    process.clear_away(tmp_path)
    assert not elsewhere.exists()
    assert [path.name for path in (tmp_path / "process-0123abcd").iterdir()] == ["output.log"]
    assert len(list((tmp_path / "process-of-mine").iterdir())) == 3
