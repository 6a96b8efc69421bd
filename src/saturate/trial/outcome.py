"""How a trial ended, in one word and one sentence. Never decided by looking for the word "error" in a log."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace

from saturate.trial.log_text import (
    TRACEBACK,
    decisive,
    exception_line,
    last_exception,
    last_line,
    line_of,
    logged_exception,
)


@dataclass(frozen=True)
class Outcome:
    """`kind` is one of KINDS; `remedy` may be empty."""

    kind: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class LastWords:
    """What the agent had seen of a process that trained and ended before its first gate. `steps`: of the optimizer that stepped
    most, without one backward passes; `events`: the latest."""

    steps: int
    recognised: bool
    events: str
    wrong_step: str = ""        # why the step that the user named is none


#: With fewer steps than this it is no wonder that none was recognised.
A_FEW_STEPS = 24
#: As many would do, were they not so short.
MANY_STEPS = 72
#: ... and some have to be made before any is.
SHOWN_BY = "three of them show what a step is"
NO_STEP_REMEDY = "say what ends a step with --step backward:N"

#: `saturate explain KIND` says what each means, and what to do.
KINDS = (
    "ok", "too_short", "never_trained", "no_step", "not_in_time", "several_trainings", "ranks_apart", "no_agent",
    "crashed", "command_not_found", "out_of_memory_device", "out_of_memory_host", "shared_memory_full", "disk_full",
    "hung", "killed_by_signal", "supervisor_died", "exited", "cage_refused", "not_started", "refused_by_isolation",
    "agent_failed", "clock_disagrees", "not_applied", "failed_to_apply", "not_active", "motif_differs",
    "trains_otherwise", "diverged", "over_limit",
)

OUT_OF_MEMORY = ("out_of_memory_device", "out_of_memory_host")
NO_ROOM = ("disk_full", "shared_memory_full")

#: The end of a script that goes on in replays.
REPLAYED = Outcome("no_step", "the script captures whole steps in a CUDA graph, whose replays call neither backward nor an optimizer: nothing of them "
                   "can be seen or changed", "switch its own CUDA graphs off for saturate; `compile` with mode reduce-overhead is one of what it tries, "
                   "and replays graphs as well")

#: Signals that a program brings upon itself; any other one was sent from outside.
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS)

#: A shell adds 128 to the number of one; what else is above that is a code of the program's own, as of `sys.exit(-1)`.
_SIGNALS = range(1, signal.NSIG)

# Messages of the libraries themselves, most specific first. OOM is a class of failures, not one string.
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("shared_memory_full", r"killed by signal: Bus error"
                           r"|unable to (?:mmap|write to file|resize file|(?:open|allocate) shared memory)[^\n]*(?:/dev/shm|torch_)"
                           r"|No space left on device[^\n]*/dev/shm|insufficient shared memory"),
    # Not triton's OutOfResources: that is a kernel that needs more shared memory than a multiprocessor has, whatever the batch.
    ("out_of_memory_device", r"torch\.OutOfMemoryError|(?:CUDA|HIP|XPU) out of memory|(?:CUDA|HIP)(?: driver)? error: out of memory"
                             r"|Triton Error \[\w+\]: out of memory|NCCL[^\n]*out of memory"
                             r"|CU(?:BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED"),
    ("out_of_memory_host", r"DefaultCPUAllocator: (?:can't|not enough)|^MemoryError|Cannot allocate memory|std::bad_alloc"),
    # torch's writer of archives keeps to itself what the system said.
    ("disk_full", r"No space left on device|Disk quota exceeded|File too large|PytorchStreamWriter failed|unexpected pos \d+ vs \d+"),
)

#: What libraries say that could not set themselves up, mostly because the device is full. It has other causes, too.
_NO_ROOM_TO_WORK = re.compile(r"CUBLAS_STATUS_NOT_INITIALIZED|unable to find an engine to execute", re.IGNORECASE)
_DOUBT = "mostly this means a full device; a library of another version, or an operation that it does not support, shows so as well"
#: What a kernel leaves that failed before: then no library works on that device any more, and it is not for want of memory.
_KERNEL_FAILED = re.compile(r"device-side assert|Assertion `[^\n]*` failed|illegal memory access|misaligned address")

#: What torch says of a loader's worker that SIGKILL has ended.
_KILLED_WORKER = re.compile(r"DataLoader worker \(pid[^\n]*?\) is killed by signal: Killed")

#: What else may help a command that asks and gets no answer.
_NO_INPUT = "if it reads its standard input: trials get that from a file only, as in `saturate tune -- COMMAND < FILE`"

PIPED_INPUT = ("what waits on standard input is a pipe's, which can be read only once, so trials get none of it: give it as a file, as "
               "in `saturate tune -- COMMAND < FILE`")

#: What a command that asks its terminal for something is told: trials have none.
_ASKED_TERMINAL = re.compile(r"Inappropriate ioctl for device|^_curses\.error", re.MULTILINE)
_NO_TERMINAL = ("trials write to a file and have no terminal: let the command do without one (shutil.get_terminal_size() in place of "
                "os.get_terminal_size(), say)")

#: Of a command that logs the exception which ended it, and gives an exit code as if nothing had happened.
_PRINTED = "and the last that it printed is an exception: {}"
_CAUGHT_REMEDY = "see what raised it: the command catches it and ends with exit code 0, as if all were well"

#: What a command that puts its training into the background is told.
_IN_THE_FOREGROUND = "run the training in the foreground, such that the command lasts as long as it (`setsid` forks: `setsid --wait`)"

#: What coreutils' `timeout` ends with when it has ended its command.
_TIMEOUT_CODE = 124
_TIMEOUT_REMEDY = "take `timeout` out of the command, or give it longer than --budget: saturate ends the command itself"

#: ... and what a program's own alarm ends it with.
_ALARM_REMEDY = "a time limit that the command sets itself (signal.alarm) goes on while its trial stands still: take it out, or give it longer than --budget"

_SIGKILL_REMEDY = ("find out what sent it: `timeout -s KILL`, a limit of the job, a service that ends programs before memory runs out "
                   "(systemd-oomd, earlyoom), or the command itself")

_REMEDIES = {
    "out_of_memory_device": "lower the batch size or close other programs on this device",
    "out_of_memory_host": "lower the batch size or the number of loader workers, or free memory",
    "shared_memory_full": "enlarge /dev/shm (docker run --shm-size=8g) or use fewer loader workers",
    "disk_full": "free space where the script writes, or point --dir at another disk",
}


def classify(report: dict[str, object] | None, log: str, steps: int, greeted: bool, injectable: str | None,
             last: LastWords | None = None, raised: bool = False) -> Outcome:
    """Name the end of a process that ended by itself, or of a command that went on without the process that trained.

    `report` is the supervisor's last line (None: it died), `log` the end of the output, `steps` how many training steps
    were seen, `greeted` whether the agent ever connected, `injectable` an interpreter option that defeats injection,
    `last` what the agent left where it never connected, `raised` whether an exception ended the process that trained.
    """
    if report is None:
        return Outcome("supervisor_died", "the process that watches the command was killed",
                       "a command must not kill its parent process; if it does not, memory may have run out")
    code = _exit_code(report)
    if code == 97 and "CageRefused" in log:
        return Outcome("cage_refused", last_line(log))
    if code == 0:
        return _ended_well(steps, greeted, injectable, last, int(str(report.get("left", 0))), logged_exception(log))
    if code is None and not raised:
        return _went_on(steps) if greeted else Outcome("hung", "it stopped training without ending", "see what it does after its last step")
    told = decisive(log)
    for kind, pattern in _PATTERNS:
        match = re.search(pattern, told, re.MULTILINE)
        if match:
            return Outcome(kind, line_of(told, match.start()), _REMEDIES.get(kind, ""))
    match = _NO_ROOM_TO_WORK.search(told)
    if match and not _KERNEL_FAILED.search(log):
        return Outcome("out_of_memory_device", f"{line_of(told, match.start())} ({_DOUBT})", _REMEDIES["out_of_memory_device"])
    match = _KILLED_WORKER.search(told)
    if match:
        return _by_sigkill(report, line_of(told, match.start()).rstrip("."))
    if report.get("log_problem"):
        return Outcome("disk_full", f"its output could not be written: {report['log_problem']}", _REMEDIES["disk_full"])
    if code is None:
        return Outcome("crashed", last_exception(log) or "an exception ended the process that trained, while the command goes on")
    number = -code if code < 0 else code - 128
    if number in _SIGNALS:
        if number == signal.SIGKILL:
            return _by_sigkill(report, "ended by SIGKILL")
        return Outcome("killed_by_signal", f"ended by {_signal_name(number)}", _ALARM_REMEDY if number == signal.SIGALRM else "")
    if code == _TIMEOUT_CODE:
        return Outcome("exited", f"exit code {code}, as of `timeout` when its time is over", _TIMEOUT_REMEDY)
    if TRACEBACK in log:
        said = exception_line(log)
        return Outcome("crashed", said, _NO_INPUT if said.startswith("EOFError") else _for_terminal(log))
    said = last_line(log)
    return Outcome("exited", f"exit code {code}" + (f": {said}" if said else " without a word"), _for_terminal(log))


def _by_sigkill(report: dict[str, object], what: str) -> Outcome:
    if report.get("out_of_memory") == 0:
        return Outcome("killed_by_signal", f"{what}, and not by the kernel for want of memory (its count of those did not grow)", _SIGKILL_REMEDY)
    return Outcome("out_of_memory_host", f"{what}, as the kernel does when memory runs out", _REMEDIES["out_of_memory_host"])


def ran_out_of_memory(outcome: Outcome) -> bool:
    """Whether memory did not suffice, be it for what we do in the process: to apply a technique, to look at the gate."""
    return outcome.kind in OUT_OF_MEMORY or any(
        kind in OUT_OF_MEMORY and re.search(pattern, outcome.reason, re.MULTILINE) for kind, pattern in _PATTERNS)


def stalled(timeout_s: float, greeted: bool, printed: bool, injectable: str | None) -> Outcome:
    """Name a workload that had to be ended because it did not come to the gate. It has been silent for `timeout_s`, or has
    printed without training for a multiple of it."""
    if greeted:
        return Outcome("hung", f"no sign of progress for {timeout_s:.0f} s",
                       "see what it waits for; if it only needs long, give it more time with --timeout")
    if injectable:
        return _ignores_us(injectable)
    seen = "it printed, but" if printed else "nothing was printed, and"
    return Outcome("hung", f"{seen} no training step was seen for {timeout_s:.0f} s or more",
                   "see what it waits for, and check that it trains with PyTorch and that Python is started with PYTHONPATH "
                   "kept; if it only needs long before its first step, give it more time with --timeout")


def late(patience_s: float, in_study: bool) -> Outcome:
    """Name a workload that had to be ended because the budget was over before it came to the gate. `in_study`: it is known that it
    trains, and what it does is compared."""
    if in_study:
        return Outcome("not_in_time", f"after {patience_s:.0f} s it had not come to where it is measured, and the budget has no more time for it",
                       "give it a longer --budget")
    return Outcome("not_in_time", f"no training step was seen to repeat in the {patience_s:.0f} s that the budget gives its start",
                   f"give it a longer --budget, or a configuration that starts sooner or has shorter steps ({SHOWN_BY}); a loop that uses "
                   "torch.func, torch.autograd.grad or torch.distributed.autograd alone, without loss.backward(), is not followed")


def with_exception(outcome: Outcome, log: str) -> Outcome:
    """Of a workload that was waited for in vain and had not trained: one of its processes may have ended, while another waits for it."""
    raised = last_exception(log)
    if raised is None:
        return outcome
    return replace(outcome, reason=f"{outcome.reason}; the last exception in its output: {raised}",
                   remedy=f"see whether it waits for a process that failed so; otherwise {outcome.remedy}")


def with_defeat(outcome: Outcome, what: str) -> Outcome:
    """Of a workload in which no training was seen: `what` may be why, as far as a script tells."""
    if outcome.kind not in ("never_trained", "hung", "not_in_time"):
        return outcome
    return replace(outcome, reason=f"{outcome.reason}; the agent may have been kept out: {what}",
                   remedy=f"if the training is what starts there, let it keep PYTHONPATH and SATURATE_PLAN as they are; otherwise {outcome.remedy}")


def apart(timeout_s: float, standing: list[int], missing: list[int]) -> Outcome:
    """Name a workload that had to be ended because only some of its ranks came to the gate, where those wait for the others."""
    waits = "stands" if len(standing) == 1 else "stand"
    return Outcome(
        "ranks_apart", f"{_ranks(standing)} {waits} at the end of a step, and {_ranks(missing)} did not come to it within {timeout_s:.0f} s",
        f"see what {_ranks(missing)} waited for: every rank has to run on this machine and to make the same steps of its optimizers. Several "
        "nodes (--nnodes 2), ranks that do not train, and torch's Join where they get unequal numbers of batches are not supported; where the "
        "steps of several optimizers follow no order, --step optimizer:0 says what ends a step; if it only needs long, give it more time with --timeout")


def _ranks(numbers: list[int]) -> str:
    """
    >>> _ranks([1]), _ranks([0, 2, 3])
    ('rank 1', 'ranks 0, 2 and 3')
    """
    *first, last = map(str, numbers)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _ignores_us(injectable: str) -> Outcome:
    return Outcome("no_agent", f"`python {injectable}` ignores PYTHONPATH, so the agent could not start",
                   f"run the command without {injectable}")


#: Of a process that a daemon has started for the command: Slurm's, a container engine's, Ray's.
ELSEWHERE = Outcome("no_agent", "the process that trains is none of the command's: another program on this machine started it for the command (Slurm, a "
                    "container engine, Ray), outside of what isolates and ends trials",
                    "put what starts it in front of saturate (srun saturate tune -- python train.py), or let the command start the training itself")


#: Of a process that goes on without its connection.
CUT = Outcome("no_agent", "the script closes descriptors that it has not opened (os.closerange), and the agent's connection was among them",
              "let it close those that it has opened itself, or all of them before it begins to train")


def stayed_out(why: str = "", failed: str = "", elsewhere: bool = False) -> Outcome:
    """Of a process that imported torch, and that the agent cannot live in. `why`: what it said; `failed`: the traceback of an agent
    that tried; `elsewhere`: it did not reach its controller."""
    if elsewhere:
        return ELSEWHERE
    if failed:
        return Outcome("agent_failed", exception_line(failed))
    return Outcome("no_agent", f"the agent cannot live in the process that imports torch: {why}",
                   "give the command an environment that saturate works in: Python 3.11 or newer, a current PyTorch, and no module of its own called saturate")


def no_step(reason: str, wrong_step: str) -> Outcome:
    """`wrong_step`: why the one that the user named is none, where that is the reason."""
    if wrong_step:
        return Outcome("no_step", wrong_step, "leave --step away to have the step found, or name another one")
    return Outcome("no_step", reason, NO_STEP_REMEDY)


def unseen(events: str, wrong_step: str, replayed: bool) -> Outcome:
    """Of a script in which the agent gave up; see `trial.gate.NoStep`."""
    return REPLAYED if replayed else no_step(f"backward passes run, but no step repeats (the latest events: {events})", wrong_step)


def _ended_well(steps: int, greeted: bool, injectable: str | None, last: LastWords | None, left: int, caught: str) -> Outcome:
    if last is not None and not last.recognised and last.steps >= A_FEW_STEPS:
        return no_step(f"the script trained to its end, but no step was recognised (the latest events: {last.events})", last.wrong_step)
    steps = max(steps, last.steps if last is not None else 0)
    if greeted or steps:
        if caught:
            return Outcome("too_short", f"the script ended after {steps} training steps, {_PRINTED.format(caught)}", _CAUGHT_REMEDY)
        return Outcome("too_short", f"the script ended after {steps} training steps", f"give it more steps or epochs: {_why_more(steps)}")
    if injectable:
        return _ignores_us(injectable)
    if caught:
        return Outcome("never_trained", f"it ended without a backward pass or an optimizer's step, {_PRINTED.format(caught)}", _CAUGHT_REMEDY)
    if left:
        processes = "a process" if left == 1 else f"{left} processes"
        return Outcome("never_trained", f"it does not train, as far as can be seen: it ended and left {processes} running, with no backward pass "
                       "or optimizer's step until then; a trial is over when its command is", _IN_THE_FOREGROUND)
    return Outcome("never_trained", "it does not train, as far as can be seen: it ended without a backward pass or an optimizer's step",
                   "check that it trains with PyTorch (loss.backward(), not torch.func, torch.autograd.grad or torch.distributed.autograd alone), and that "
                   "Python is started with PYTHONPATH kept (a script that sets it: PYTHONPATH=.:$PYTHONPATH)")


def _went_on(steps: int) -> Outcome:
    """The process that trained is gone, and what started it (a shell script, a loop over folds) still ran when we had waited."""
    return Outcome("too_short", f"the process that trained ended, or became another program, after {steps} training steps, while the command goes on",
                   f"give that process more steps or epochs: {_why_more(steps)}, all of them in one process")


def _why_more(steps: int) -> str:
    return f"a measurement takes {MANY_STEPS} or more" if steps < MANY_STEPS else "these were over before enough of them were measured"


def _exit_code(report: dict[str, object]) -> int | None:
    """The exit code; negative: a signal; None: we killed it."""
    if report.get("ended") == "exit":
        return int(str(report["code"]))
    if report.get("ended") == "signal":
        return -int(str(report["signal"]))
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _for_terminal(log: str) -> str:
    """The remedy where the command failed for want of a terminal; "" where it did not. `stty` says so, and the exception that follows
    is of what the script made of its silence."""
    return _NO_TERMINAL if _ASKED_TERMINAL.search(log) else ""
