"""Candidates that are forked: as those that start afresh, or started afresh. What they answer, and how they end: test_inference_process."""

from __future__ import annotations

import importlib
import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cloudpickle", reason="the extra inference")

from process_kit import Pair  # noqa: E402 - after the check for torch
from waiting import until  # noqa: E402

from saturate.inference import api, forkserver, launching  # noqa: E402
from saturate.inference.candidates import Candidate  # noqa: E402
from saturate.inference.forkserver import ForkServer  # noqa: E402
from saturate.inference.process import Worker  # noqa: E402
from saturate.inference.source import Source  # noqa: E402
from saturate.records.inference import ModelFacts  # noqa: E402
from saturate.trial import tree  # noqa: E402

if not forkserver.possible():
    pytest.skip("candidates start afresh on this system", allow_module_level=True)

BATCHES = [(torch.rand(2, 6, generator=torch.Generator().manual_seed(seed)),) for seed in range(4)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source.write(tmp_path_factory.mktemp("study") / "source", Pair(), BATCHES)


@pytest.fixture
def forks(source: Source, tmp_path: Path) -> Iterator[ForkServer]:
    with forkserver.running(source, tmp_path, 1) as server:
        assert server is not None
        yield server


def worker(source: Source, folder: Path, forks: ForkServer | None, threads: int = 1) -> Worker:
    return Worker(source, Candidate(), folder=folder, threads=threads, prepare_s=120.0, facts=ModelFacts(), forks=forks)


def is_forked(one: Worker) -> bool:
    return isinstance(one._supervisor, forkserver.Supervisor)


def log(forks: ForkServer) -> str:
    return (forks.folder / "output.log").read_text(encoding="utf-8")


def test_a_fork_begins_as_a_fresh_process_does(source: Source, forks: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_AFTER_THE_IMPORT", "1")
    monkeypatch.chdir(tmp_path)
    found = []
    for one in (worker(source, tmp_path, None), worker(source, tmp_path, forks), worker(source, tmp_path, forks)):
        with one:
            seen: dict[str, Any] = one.ask("process_kit:surroundings")
            assert seen.pop("mark") == [f"{launching.MARK}={one._token}"] == [f"{launching.MARK}={seen['environment'].pop(launching.MARK)}"]
            assert Path(seen.pop("temporary")) == launching.layers.scratch_folder(one.folder) == Path(seen["environment"].pop("TMPDIR"))
            assert Path(seen["environment"].pop(launching.SCRATCH)) == one.folder / "scratch"
            found.append((is_forked(one), seen))
    assert [forked for forked, _ in found] == [False, True, True]
    assert found[1][1] == found[2][1] == found[0][1] and found[0][1]["environment"]["SET_AFTER_THE_IMPORT"] == "1"


def test_a_fork_s_memory_and_random_numbers_are_its_own(source: Source, forks: ForkServer, tmp_path: Path) -> None:
    """Pages that it shares are copied while calls are timed, and count as a part of what it has."""
    with worker(source, tmp_path, None) as fresh, worker(source, tmp_path, forks) as one, worker(source, tmp_path, forks) as other:
        assert not is_forked(fresh) and is_forked(one) and is_forked(other)
        assert max(one.ask("process_kit:shared_bytes"), other.ask("process_kit:shared_bytes")) < 4 * 2**20
        assert all(a != b for a, b in zip(one.ask("process_kit:chance"), other.ask("process_kit:chance"), strict=True))
        assert one.file_bytes() > 0.9 * fresh.file_bytes(), "its libraries are mapped as far as they are used"
        assert fresh.memory_bytes() < one.memory_bytes() < fresh.memory_bytes() + 200 * 2**20


@pytest.mark.parametrize(("starts", "what"), [("threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()", "threads"),
                                             ("subprocess.Popen(['sleep', '600'])", "a process")])
def test_what_has_started_threads_or_a_process_is_not_forked(starts: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks would be held for ever, and many would talk to one."""
    name = f"starts_{what.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(f"""
        import os, subprocess, threading, time
        import torch

        if os.getpid() != {os.getpid()}:
            {starts}

        class Model(torch.nn.Linear):
            pass
    """), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    source = Source.write(tmp_path / "source", module.Model(6, 3), BATCHES)
    with forkserver.running(source, tmp_path / "processes", 1) as forks:
        assert forks is not None
        with worker(source, tmp_path / "processes", forks) as one:
            assert not is_forked(one) and one.run(*BATCHES[0]).shape == (2, 3)
        assert forks.closed and what in log(forks)


def test_threads_that_may_be_forked_beside_keep_nobody_from_it(source: Source, tmp_path: Path) -> None:
    """numpy's OpenBLAS has started some when it has been imported, unless it may have one only."""
    with forkserver.running(source, tmp_path, 2) as forks:
        assert forks is not None
        with worker(source, tmp_path, forks, threads=2) as one:
            assert is_forked(one), log(forks)
            assert one.ask("process_kit:surroundings")["threads"] == 2 and one.ask("process_kit:product") == 64.0


def test_a_model_that_cannot_be_loaded_is_left_to_a_fresh_process(source: Source, tmp_path: Path) -> None:
    broken = Source.write(tmp_path / "source", Pair(), BATCHES)
    (broken.folder / "model.pt").write_bytes(b"no model")
    with forkserver.running(broken, tmp_path / "processes", 1) as forks:
        assert forks is not None
        forks.wait()
        assert forks.closed and "Traceback" in log(forks)
        with worker(source, tmp_path / "processes", forks) as one:
            assert not is_forked(one)


def test_candidates_outlive_the_one_that_forked_them(source: Source, forks: ForkServer, tmp_path: Path) -> None:
    with worker(source, tmp_path, forks) as one:
        os.kill(forks._process.pid, signal.SIGKILL)
        assert is_forked(one) and one.run(*BATCHES[0])[0].shape == (2, 3)
        with worker(source, tmp_path, forks) as other:
            assert not is_forked(other) and forks.closed
        pid, supervisor = one.ask("misbehaves:misbehave", ""), one._supervisor.pid
    until(lambda: not any(tree.state(process) not in ("", "Z", "X") for process in (pid, supervisor)))


def test_one_that_stands_still_is_not_waited_for(source: Source, forks: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forks.wait()
    monkeypatch.setattr(forkserver, "_FORK_S", 0.5)
    os.kill(forks._process.pid, signal.SIGSTOP)
    with worker(source, tmp_path, forks) as one:
        assert not is_forked(one) and forks.closed
        assert {*os.listdir(one.folder)} - {"tmp"} == {"output.log", "scratch"}, "the environment is not left in a file"


def test_an_interruption_leaves_no_environment_in_a_file(forks: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    forks.wait()
    monkeypatch.setattr(forkserver.socket, "send_fds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        forks.start(tmp_path, {"environment": {"SECRET": "1"}}, 0)
    assert forks.closed and not list(tmp_path.glob("*.json"))


def test_import_that_takes_too_long_is_not_waited_for(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_IMPORT_S", 0.01)
    with forkserver.running(source, tmp_path, 1) as forks:
        assert forks is not None
        forks.wait()
        assert forks.closed


def test_nothing_is_left_of_it(source: Source, tmp_path: Path) -> None:
    with forkserver.running(source, tmp_path, 1) as forks:
        assert forks is not None
        one = worker(source, tmp_path, forks)
        assert is_forked(one)
        pids = [forks._process.pid, one._supervisor.pid, one.ask("misbehaves:misbehave", ""), one.ask("misbehaves:misbehave", "child")]
        one.close()
        assert one._supervisor.returncode == 0 and tree.state(one._supervisor.pid) in ("", "Z"), "it collects what it has forked"
        until(lambda: tree.state(one._supervisor.pid) == "")
    assert not any(map(tree.state, pids))
    assert [path.name for path in forks.folder.iterdir() if path.name != "tmp"] == ["output.log"] and not log(forks)


def test_a_fork_of_the_user_s_process_ends_nothing(source: Source, forks: ForkServer, tmp_path: Path) -> None:
    forks.wait()
    child = os.fork()
    if child == 0:
        forks.close()
        os._exit(17 if forks.start(tmp_path, {}, 0) is None else 18)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    with worker(source, tmp_path, forks) as one:
        assert is_forked(one)


def test_a_gpu_s_candidates_start_afresh(source: Source, tmp_path: Path) -> None:
    """CUDA does not survive a fork."""
    from dataclasses import replace

    with forkserver.running(replace(source, device="cuda"), tmp_path, 1) as forks:
        assert forks is None and not list(tmp_path.iterdir())


def test_a_system_that_cannot_do_it_is_no_failure(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", unknown)
    assert not forkserver.possible()
    with forkserver.running(source, tmp_path, 1) as forks:
        assert forks is None


@pytest.mark.parametrize(("objective", "asked"), [("latency", True), ("memory", False)])
def test_what_is_chosen_by_its_memory_is_not_forked(objective: str, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has imported more than it needs."""
    class Reached(Exception):
        pass

    def running(*given: Any) -> Any:
        raise Reached("the fork server")

    def baseline(lab: Any) -> Any:
        raise Reached("the baseline")

    monkeypatch.setattr(api, "running", running)
    monkeypatch.setattr(api.Lab, "baseline", baseline)
    with pytest.raises(Reached, match="the fork server" if asked else "the baseline"):
        api.optimize(Pair(), BATCHES, objective=objective, time=60, workdir=tmp_path / "work")
