"""One trial from outside: what comes to the gate, how it ends, and what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path

import pytest
from waiting import is_waited_for, until

from saturate.agent import application, turn
from saturate.trial import endings, launch, meter, process
from saturate.trial.launch import Chosen
from saturate.trial.outcome import LastWords
from saturate.trial.process import TrialEnded
from saturate.verify import series

TRAIN = """
import torch, torch.nn as nn
torch.manual_seed(0)
model = nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
x, y = torch.randn(16, 4), torch.randn(16, 1)
while True:
    for _ in range(2): (nn.functional.mse_loss(model(x), y) / 2).backward()
    optimizer.step(); optimizer.zero_grad()
"""
STEP = {"token": "S0", "count": 1, "tokens": ["B", "B", "S0"]}
#: In front of a training: two processes of it, as ranks without a process group.
BOTH = """
import os, subprocess, sys
if 'RANK' not in os.environ:
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, 'RANK': str(rank), 'WORLD_SIZE': '2'}) for rank in range(2)]
    sys.exit(max(rank.wait() for rank in ranks))
"""


def test_a_gate_reports_events_losses_and_parameters(script, start) -> None:
    trial = start(str(script(TRAIN)), step=STEP)
    trial.wait_ready()
    first = trial.run_block(1, 9)
    assert first.steps == 10 and first.events == {"B": 20, "S0": 10}
    assert first.moved and len(first.sample) == 5       # four weights and a bias
    assert all(len(update) == 2 for update in trial.losses)
    seen = len(trial.losses)
    assert 10 <= seen <= 14 and trial.losses[0][0] > trial.losses[-1][0] > 0
    trial.run_block(0, 60)
    assert len(trial.losses) == 52                      # those of later updates are not kept
    second = trial.run_block(0, 5)
    assert len(trial.losses) == 52 and second.moved


BY_HAND = TRAIN.replace("optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)", "").replace(
    "optimizer.step(); optimizer.zero_grad()", """with torch.no_grad():
        for value in model.parameters(): value -= 1e-2 * value.grad; value.grad = None""")


@pytest.mark.parametrize(("source", "step", "before"), [
    (TRAIN, STEP, "    for _ in range(2)"), (BY_HAND, {"token": "B", "count": 2, "tokens": ["B", "B"]}, "    with torch.no_grad"),
])
def test_one_that_is_held_trains_only_when_it_is_waited_for(source: str, step: dict[str, object], before: str, script, start) -> None:
    source = source.replace("model =", "print('starts', flush=True)\nmodel =").replace(before, "    print('trains', flush=True)\n" + before)
    trial = start(str(script(source)), step=step, held=True)
    until(lambda: is_waited_for(trial.spec.folder / "turn"))
    time.sleep(0.3)
    assert "starts" in trial.output() and "trains" not in trial.output()
    hello = trial.wait_ready()
    assert "trains" in trial.output() and hello["held_ns"] > 0.3e9
    assert 0 < trial.first_gate_s <= time.monotonic() - trial.started - hello["held_ns"] / 1e9


def test_one_that_is_held_can_be_ended_and_outlives_no_controller(script, start, tmp_path: Path) -> None:
    trial = start(str(script(TRAIN)), step=STEP, held=True)
    until(lambda: is_waited_for(trial.spec.folder / "turn"))
    assert trial.stop().kind == "ok"
    path = tmp_path / "turn"
    code = f"import sys, time; from pathlib import Path; from saturate.trial.turn import Turn; turn = Turn(Path({str(path)!r})); print(1, flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert holder.stdout.read(1) == b"1"
    waiter = threading.Thread(target=turn.wait, args=(str(path),), daemon=True)
    waiter.start()
    until(lambda: is_waited_for(path))
    assert waiter.is_alive()
    holder.kill()
    holder.wait()
    waiter.join(60.0)
    assert not waiter.is_alive()


def test_waiting_for_a_core_is_not_blamed_on_the_workloads_clock(script, start, monkeypatch) -> None:
    """Seen on a machine with a dozen busy processes per core: every study ended with "clock disagrees"."""
    trial = start(str(script(TRAIN)), step=STEP)
    trial.wait_ready()
    waits = iter([0, 0, 0, 10**12])
    monkeypatch.setattr(meter, "queued_ns", lambda: next(waits))
    trial.run_block(1, 20)
    trial.run_block(1, 20)
    (wall, inside), (without, inside_again) = trial._lags
    assert wall > inside > 0 and without < 0 < inside_again


@pytest.mark.parametrize("variables", [{"RANK": "16"}, {"RANK": "high"}, {"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2"}])
def test_variables_of_launchers_that_mean_something_else(variables, script, start, clean_environment) -> None:
    """A rank of LoRA; a script that is not distributed, in a pod of a job that is."""
    clean_environment.update(variables)
    trial = start(str(script(TRAIN)), step=STEP)
    hello = trial.wait_ready()
    assert (hello["rank"], hello["world_size"]) == (0, 1) and trial.run_block(1, 5).moved


def test_ranks_that_a_launcher_starts_need_no_process_group(script, start) -> None:
    """They may speak through another library than torch.distributed."""
    trial = start(str(script(BOTH + TRAIN)), step=STEP)
    assert trial.wait_ready()["world_size"] == 2 and len(trial.gates) == 2


def test_an_evaluation_of_any_rank_is_left_out(script, start, monkeypatch) -> None:
    """Ranks that reduce together take as long; by which of them was slower, an evaluation of rank 0 alone was timed in every other block."""
    trial = start(str(script(TRAIN)), step=STEP)
    trial.wait_ready()
    wait = trial._wait_gate

    def of_two_ranks(*arguments, **named):
        (gate,) = wait(*arguments, **named)
        *stamps, last = gate["stamps"]
        return [{**gate, "evaluations": [3]}, {**gate, "stamps": [*stamps, last + 1], "evaluations": []}]

    monkeypatch.setattr(trial, "_wait_gate", of_two_ranks)
    block = trial.run_block(1, 9)
    assert block.evaluated == {2} and block.step_ns == [*block.timed_ns[:2], *block.timed_ns[3:]]


def test_what_each_rank_said_at_its_end_is_known(script, start) -> None:
    """The one that left first was heard, whichever that was."""
    later = BOTH + TRAIN.replace("while True", "for _ in range(60)") + "\nif os.environ['RANK'] == '1':\n    import time\n    time.sleep(5)\n"
    trial = start(str(script(later)), step=STEP)
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
        trial.run_block(0, 100)
    assert [notice["steps"] for notice in trial.server.notices] == [60, 60]
    assert (ended.value.outcome.kind, ended.value.outcome.reason) == ("too_short", "the script ended after 60 training steps")


def test_what_kept_another_rank_from_a_look_is_told(script, start, tmp_path: Path) -> None:
    """Rank 0 alone was asked, and a missing trace had no reason."""
    own = TRAIN.replace("while True:", "profiler = torch.profiler.profile()\nif os.environ['RANK'] == '1': profiler.start()\nwhile True:")
    trial = start(str(script(BOTH + own)), step=STEP)
    trial.wait_ready()
    seen = trial.look("record", 1, 2, folder=str(tmp_path), step_ms=1.0)
    assert "problem" not in seen and list(seen["others"]) == [1] and "torch.profiler" in seen["others"][1]
    assert [path.name for path in tmp_path.glob("trace-rank*")] == ["trace-rank0.json.gz"]


def test_parameters_that_stand_still_are_seen(script, start) -> None:
    trial = start(str(script(TRAIN.replace("lr=1e-2", "lr=0.0"))), step=STEP)
    trial.wait_ready()
    assert not trial.run_block(1, 5).moved


def test_an_agent_that_fails_is_reported_at_once(script, start, tmp_path: Path) -> None:
    """Not after the longest silence: nothing would ever come to the gate."""
    technique = tmp_path / "spoils.py"
    source = Path(__file__).resolve().parents[2] / "src" / "saturate" / "techniques" / "gc_freeze.py"
    text = source.read_text(encoding="utf-8").replace('id="gc-freeze"', 'id="spoils"')
    body = """
        from saturate.agent import application

        def broken(session):
            raise RuntimeError("agent broken on purpose")

        application.standing = broken
        return "applied"
    """
    head, _, tail = text.partition("def apply(context: Any, options: Options) -> str:\n")
    technique.write_text(head + "def apply(context: Any, options: Options) -> str:\n" + textwrap.indent(textwrap.dedent(body), "    ")
                         + "\n\ndef active" + tail.partition("\n\ndef active")[2], encoding="utf-8")
    trial = start(str(script(TRAIN)), techniques=[Chosen("spoils", "spoils", str(technique))], timeout_s=300.0)
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert ended.value.outcome.kind == "agent_failed" and "broken on purpose" in ended.value.outcome.reason


@pytest.mark.parametrize("batch, ends", [
    ("class Batch(dict):\n    def values(self): raise RuntimeError('broken on purpose')", True),
    ("class Batch:\n    def __init__(self, x): self.values = x", False),       # as a column of pandas has it
])
def test_a_batch_that_the_agent_cannot_read(batch: str, ends: bool, script, start) -> None:
    """Before the first gate: neuralforecast's batches hold a column of pandas, the agent failed, and tune waited for its whole
    budget."""
    source = f"""
import torch
from torch.utils.data import DataLoader
{batch}
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(torch.randn(64, 4).unbind(), batch_size=8, collate_fn=lambda rows: Batch({{"x": torch.stack(rows)}}))
while True:
    for batch in loader:
        x = dict.__getitem__(batch, "x") if isinstance(batch, dict) else batch.values["x"]
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
"""
    trial = start(str(script(source)), timeout_s=300.0)
    if not ends:
        assert trial.wait_ready()
        return
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert ended.value.outcome.kind == "agent_failed" and "broken on purpose" in ended.value.outcome.reason


@pytest.mark.parametrize("source, kind, words", [
    ("raise SystemExit(0)", "never_trained", ""),
    ("raise SystemExit(3)", "exited", "exit code 3"),
    ("raise ValueError('no such file of mine')", "crashed", "no such file of mine"),
    ("raise ValueError('401 for ghp_' + 'abcdefgh12345678')", "crashed", "401 for [hidden]"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed_by_signal", "SIGSEGV"),
    (TRAIN.replace("while True", "for _ in range(7)"), "too_short", "after 7 training steps"),
    (TRAIN.replace("while True", "for _ in range(2)"), "too_short", "after 2 training steps"),
    ("import torch\nw = torch.ones(3, requires_grad=True)\nfor _ in range(30): (w * w).sum().backward()", "no_step", "B B B"),
])
def test_how_it_ended(source: str, kind: str, words: str, script, start) -> None:
    trial = start(str(script(source)))
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
        trial.run_block(0, 50)
    assert ended.value.outcome.kind == kind and words in ended.value.outcome.reason


def test_every_trial_reads_a_file_that_we_were_given(script, start, tmp_path: Path) -> None:
    """From where it stands, without moving it: `while read line; do saturate tune ...; done < file`."""
    (tmp_path / "lines").write_text("first\nsecond\n", encoding="utf-8")
    ours = os.dup(0)
    with open(tmp_path / "lines", encoding="utf-8") as lines:
        os.lseek(lines.fileno(), len("first\n"), os.SEEK_SET)
        os.dup2(lines.fileno(), 0)
        try:
            for _ in range(2):
                with pytest.raises(TrialEnded) as ended:
                    start(str(script("import sys; sys.exit(sys.stdin.read())"))).wait_ready()
                assert ended.value.outcome.reason == "exit code 1: second"
        finally:
            os.dup2(ours, 0)
            os.close(ours)


def test_who_asks_for_input_that_is_no_file_is_told_where_it_comes_from(script, start) -> None:
    with pytest.raises(TrialEnded) as ended:
        start(str(script("input('continue? ')"))).wait_ready()
    assert ended.value.outcome.kind == "crashed" and "< FILE" in ended.value.outcome.remedy


def test_signals_are_those_of_a_shell(start) -> None:
    """Python ignores SIGPIPE, and its children would inherit that: `yes | head` would never end."""
    trial = start("bash", "-c", "yes | head -n 1 > /dev/null; grep SigIgn /proc/self/status; exit 4")
    with pytest.raises(TrialEnded):
        trial.wait_ready()
    ignored = int(trial.output().split()[-1], 16)
    assert not ignored & (1 << signal.SIGPIPE - 1) and not ignored & (1 << signal.SIGXFSZ - 1)


def test_nothing_survives_a_controller_that_is_killed(script, tmp_path: Path, clean_environment) -> None:
    """kill -9 of saturate itself, with the trial frozen and a daemon in a session of its own."""
    train = script("import os, subprocess, sys\n"
                   "d = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
                   "open('daemon', 'w').write(str(d.pid))\n" + TRAIN)
    controller = script(f"""
        import os, sys
        from pathlib import Path
        from saturate.trial.process import Trial, TrialSpec, Workload
        here = Path({str(tmp_path)!r})
        trial = Trial(Workload([sys.executable, {str(train)!r}], here, dict(os.environ), 60.0),
                      TrialSpec(id="t", purpose="test", folder=here / "t"))
        hello = trial.wait_ready()
        trial.freeze()
        print(hello["pid"], trial.supervisor.pid, flush=True)
        import time; time.sleep(600)
    """, "controller.py")
    process = subprocess.Popen([sys.executable, str(controller)], env=clean_environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()] + [int((tmp_path / "daemon").read_text())]
    assert len(pids) == 3 and all(os.path.exists(f"/proc/{pid}") for pid in pids)
    process.kill()
    process.wait()
    process.stdout.close()
    until(lambda: not any(map(_lives, pids)))


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_who_follows_it_by_other_means_learns_how_it_ended(start) -> None:
    trial = start("-c", "import time; time.sleep(0.5); raise SystemExit(3)")
    assert trial.finished() is None
    ended = until(trial.finished)
    assert (ended.kind, ended.reason) == ("exited", "exit code 3 without a word")


def test_processes_that_train_independently_are_named(script, start) -> None:
    """Workers that update one shared model, or two trainings at once: no step is both's, and the late one hits a gate at which
    the first already runs its blocks."""
    trial = start(str(script("import os, time\nchild = os.fork()\nif child: time.sleep(2)\n" + TRAIN)), step=STEP)
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:          # until the late one has begun, however long that takes beside other load
            trial.run_block(0, 20)
    assert ended.value.outcome.kind == "several_trainings"
    assert "train as rank 0" in ended.value.outcome.reason


SHORT = TRAIN.replace("while True", "for _ in range(60)")
IN_A_CHILD = """
import subprocess, sys, time
if len(sys.argv) == 1:
    subprocess.run([sys.executable, *sys.argv, "child"]); time.sleep(100)
"""
THEN_EXEC = """
import os, sys; os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(100)"])
"""


@pytest.mark.parametrize("source", [IN_A_CHILD + SHORT, SHORT + THEN_EXEC], ids=["child", "exec"])
def test_a_command_that_goes_on_after_its_training_was_too_short(source, script, start, monkeypatch) -> None:
    """Seen: `train.sh` with an evaluation after the training, and folds in a process each, were out of memory."""
    monkeypatch.setattr(process, "GRACE_S", 2.0)
    trial = start(str(script(source)), step=STEP)
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
        trial.run_block(0, 100)
    assert ended.value.outcome.kind == "too_short" and "while the command goes on" in ended.value.outcome.reason


def test_an_exception_is_the_reason_though_the_launcher_goes_on(script, start, monkeypatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 2.0)
    trial = start(str(script(IN_A_CHILD + SHORT + "\nraise ValueError('heads')")), step=STEP)
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
        trial.run_block(0, 100)
    assert (ended.value.outcome.kind, ended.value.outcome.reason) == ("crashed", "ValueError: heads")


@pytest.mark.parametrize("launcher", [["setsid"], ["sh", "-c", '"$@" & sleep 0.3', "sh"]], ids=["setsid", "background"])
def test_a_training_in_the_background_is_asked_into_the_foreground(launcher, script, start) -> None:
    """Seen: it was told that it does not train with PyTorch. A session's leader, as a job of a shell, has `setsid` fork."""
    trial = start(*launcher, sys.executable, str(script("import time; time.sleep(1)\n" + TRAIN)), step=STEP)
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    found = ended.value.outcome
    assert found.kind == "never_trained" and "left a process running" in found.reason and "foreground" in found.remedy


def test_what_python_starts_beside_multiprocessing_is_no_process_that_was_left(script, start) -> None:
    """Seen: a script that spawns its workers, and does not train as far as can be seen, was asked into the foreground."""
    source = ("import os, signal, torch; from multiprocessing import resource_tracker as tracker; tracker.ensure_running(); "
              "os.kill(tracker._resource_tracker._pid, signal.SIGSTOP)")       # as slow to end as on a busy machine
    trial = start(sys.executable, str(script(source)))
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert ended.value.outcome.kind == "never_trained" and "left" not in ended.value.outcome.reason


def test_what_a_fork_server_has_forked_is_a_process_that_was_left(script, start) -> None:
    """It has the command line of the server, which ends by itself."""
    source = """
import multiprocessing, os, time
if __name__ == "__main__":
    import torch
    process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(1000,))
    process.start()
    os._exit(0)
"""
    trial = start(sys.executable, str(script(source)))
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
    assert ended.value.outcome.kind == "never_trained" and "left a process running" in ended.value.outcome.reason


@pytest.mark.parametrize("piped", [True, False])
def test_a_command_that_misses_its_piped_input_is_told_so(piped, script, start) -> None:
    """Seen: `echo lr=0.1 | saturate tune -- ...` was told to make the command work first."""
    source = "import sys; line = sys.stdin.readline(); assert line == 'lr=0.1\\n', line"
    reader, writer = os.pipe()
    before = os.dup(0)
    try:
        if piped:
            os.write(writer, b"lr=0.1\n")
        os.dup2(reader, 0)
        trial = start(str(script(source)))
        with pytest.raises(TrialEnded) as ended:
            trial.wait_ready()
    finally:
        os.dup2(before, 0)
        for descriptor in (before, reader, writer):
            os.close(descriptor)
    assert ended.value.outcome.kind == "crashed" and ("COMMAND < FILE" in ended.value.outcome.remedy) == piped


OF_A_SET = """
import torch, torch.nn as nn
words = {f"word{i}" for i in range(64)}
place = torch.tensor([float(word[4:]) for word in words])
model = nn.Linear(64, 1); optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
while True:
    model(place).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""


def test_recorded_runs_have_the_same_order_of_a_set_of_strings(script, start, tmp_path, clean_environment) -> None:
    """A vocabulary made of a set gave each process other data, and a script with a fixed seed did not "repeat itself"."""
    clean_environment.pop("PYTHONHASHSEED", None)
    command = ["env", "-i", f"HOME={tmp_path}", sys.executable, str(script(OF_A_SET))]

    def losses(number: int, offset: int) -> list[list[float]]:
        folder = tmp_path / f"recorded{number}"
        folder.mkdir()
        capture = {"folder": str(folder), "updates": 5, "seed": 20, "seed_offset": offset, "aligned": False, "perturb": None}
        start(*command, capture=capture, step={"token": "S0", "count": 1, "tokens": ["B", "S0"]}).wait_ready()
        return series.read(folder).losses

    assert losses(0, 0) == losses(1, 0) != losses(2, 1)


@pytest.mark.parametrize(("given", "expected"), [({}, "27"), ({"PYTHONHASHSEED": "random"}, "27"), ({"PYTHONHASHSEED": "0"}, "0")])
def test_the_hash_seed_of_the_user_stays(given, expected) -> None:
    assert launch.hashing(given, {"seed": 20, "seed_offset": 7}) == {"PYTHONHASHSEED": expected}
    assert launch.hashing(given, None) == {}, "timed trials and runs are left as they are"


def test_last_words_that_were_not_written_whole_are_passed_over(tmp_path: Path) -> None:
    """By a process that was killed, or whose disk was full: they ended the study as an error of saturate's own."""
    for number, text in enumerate(["", '{"steps": 3', "[]", '{"steps": 3, "recognised": true, "events": "B S0"}']):
        (tmp_path / f"ended-{number}.json").write_text(text)
    assert endings.last(tmp_path) == LastWords(3, True, "B S0")


def test_last_words_that_cannot_be_written_end_nothing(tmp_path: Path) -> None:
    session = types.SimpleNamespace(asleep=False, gate=None, counts={"S0": 3}, tokens=["S0"], step=None, awaited=False,
                                    plan={"ended": str(tmp_path / "gone" / "ended")})
    application._leave_word(session)


def test_what_it_prints_of_tokens_is_not_kept(script, start, clean_environment) -> None:
    clean_environment["OWN_API_KEY"] = "kept-by-nobody-123"
    trial = start(str(script("import os, sys\nprint('key', os.environ['OWN_API_KEY'], 'hf_abcdefghijkl', flush=True)\nsys.stdout.buffer.write(b'\\xff and the rest\\n'); sys.stdout.flush()\n" + TRAIN)))
    trial.wait_ready()
    trial.run_block(1, 2)
    trial.stop()
    assert trial.log.read_bytes() == b"key [hidden] [hidden]\n\xff and the rest\n"
