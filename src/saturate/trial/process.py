"""One trial: a fresh process group that runs the workload with a set of techniques, under our control."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saturate.machine import redaction
from saturate.records import sizes
from saturate.trial import (
    clocks,
    defeats,
    endings,
    launch,
    meter,
    ports,
    refusals,
    standard_input,
    starting,
    supervised,
    tree,
)
from saturate.trial.cage import CagePlan
from saturate.trial.gate import (
    AgentFailed,
    GateClosed,
    GateServer,
    GateTimeout,
    NoStep,
    RanksApart,
    SeveralTrainings,
    StartedElsewhere,
)
from saturate.trial.outcome import (
    CUT,
    ELSEWHERE,
    Outcome,
    apart,
    classify,
    late,
    stalled,
    unseen,
    with_defeat,
    with_exception,
)
from saturate.trial.turn import Turn

#: A workload that keeps printing (tokenising, downloading) is not hung, but it is not waited for longer than this many
#: times the silence that would be a hang.
PATIENCE = 4

#: A step under a profiler, or of a larger batch, may last this many times what the latest did.
SLOWER = 2

#: How long a command may take to end by itself once the process that trained is gone.
GRACE_S = 20.0


class TrialEnded(Exception):
    """The workload is over, or was ended; `outcome` says how. `side` is set by a race: "a" or "b". `log` is the file with what it
    printed; None where there was no process. `steps`: how many training steps it had come to where it ended by itself, as far as is known."""

    def __init__(self, outcome: Outcome, log: Path | None = None, steps: int = 0):
        super().__init__(f"{outcome.kind}: {outcome.reason}")
        self.outcome = outcome
        self.log = log
        self.steps = steps
        self.side = ""


@dataclass(frozen=True)
class Workload:
    """The user's command as it was given. `timeout_s` is the longest silence that is not a hang."""

    argv: list[str]
    cwd: Path
    environment: dict[str, str]
    timeout_s: float = 300.0


@dataclass(frozen=True)
class TrialSpec:
    """What to start. `capture` makes it a verification run (see `agent.capture`)."""

    id: str
    purpose: str
    folder: Path
    techniques: list[launch.Chosen] = field(default_factory=list)
    step: dict[str, Any] | None = None
    capture: dict[str, Any] | None = None
    cage: str | None = None                 # JSON of a trial.cage.CagePlan
    redirect: dict[str, Any] | None = None  # for the interception mode
    environment: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)      # more for the agent's plan: see `agent.bootstrap.start`
    limit_bytes: int | None = None           # a trial whose peak is above it is ended: "over_limit"
    until: float = math.inf                  # time.monotonic: by then it is at a gate again, or it is ended: "not_in_time"
    least_s: float = 0.0                     # but for so long it is waited for in any case
    held: bool = False                       # it starts, but trains only when it is waited for (see `agent.turn`)


@dataclass(frozen=True)
class Block:
    """The timed steps of one block, nanoseconds each; their time by part when split (see `agent.timeline` for whose time).
    `events`: how often each token of the motif occurred in all its `steps`, skipped ones included. `sample`: a few entries of a few
    parameters of rank 0 after the block; `moved`: whether they changed in it. `evaluated`: in which of the timed steps any rank
    evaluated."""

    timed_ns: list[int]
    parts: dict[str, int]
    events: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    sample: list[float] = field(default_factory=list)
    moved: bool = True
    evaluated: frozenset[int] = frozenset()

    @property
    def tells_evaluations(self) -> bool:
        """Whether most of the timed steps held none. A frozen teacher in eval mode makes every step look like one; then all of them count."""
        return 2 * len(self.evaluated) <= len(self.timed_ns)

    @property
    def step_ns(self) -> list[int]:
        """The timed steps without those that held an evaluation."""
        return [t for index, t in enumerate(self.timed_ns) if index not in self.evaluated] if self.tells_evaluations else self.timed_ns

    @property
    def mean_ns(self) -> float:
        return sum(self.step_ns) / len(self.step_ns)


def joined(blocks: list[Block]) -> Block:
    """Several blocks of one process as if they were one."""
    parts, events = ({name: sum(one.get(name, 0) for one in found) for name in {name for one in found for name in one}}
                     for found in ([b.parts for b in blocks], [b.events for b in blocks]))
    begin = [0, *itertools.accumulate(len(b.timed_ns) for b in blocks)]
    return Block(
        [t for b in blocks for t in b.timed_ns], parts, events, sum(b.steps for b in blocks), blocks[-1].sample,
        any(b.moved for b in blocks), frozenset(offset + index for offset, b in zip(begin, blocks) for index in b.evaluated),
    )


class Trial:
    """Starts at construction. Every method that waits raises TrialEnded when the workload is gone or hangs."""

    def __init__(self, workload: Workload, spec: TrialSpec):
        self.workload = workload
        self.spec = spec
        self.started = time.monotonic()
        self.steps = 0
        self.counts: dict[str, int] = {}        # events in the workload since its start, by token
        self.sample: list[float] = []           # a few entries of a few parameters, at the latest gate
        self.cpus: list[int | None] = []        # on which CPU each rank came to the latest gate; None: not told
        self.unmade_batches: int | None = None  # how far the loader of the slowest rank was behind at the latest gate; None: not known
        self.losses: list[list[float]] = []     # of the first updates of a timed trial, by update and micro-step
        self.peak_bytes: int | None = None      # see `_note_peak`
        self._looked_at = False
        self.gates: list[dict[str, Any]] = []   # the latest message of every rank, rank 0 first
        self._lags: list[tuple[int, int]] = []
        self._step_s = 0.0                      # of the latest block
        self.frozen = False
        self.ended: Outcome | None = None
        self.compile_s: float | None = None
        self.recompiles: int | None = None
        self.first_gate_s: float | None = None
        name = f"saturate-{secrets.token_hex(12)}"
        token = secrets.token_hex(16)
        spec.folder.mkdir(parents=True, exist_ok=True)
        self.log = spec.folder / "output.log"
        self.server = GateServer(name, token)
        self._turn: Turn | None = None
        try:
            self._turn = Turn(spec.folder / "turn") if spec.held else None
            turn = {"turn": str(self._turn.path)} if self._turn else {}
            plan = spec.folder / "plan.json"
            plan.write_text(launch.plan_text(
                "verify" if spec.capture else "trial", spec.techniques,
                socket=name, token=token, step=spec.step, capture=spec.capture, redirect=spec.redirect,
                ended=str(spec.folder / "ended"), inherited=launch.inherited(workload.environment), **turn, **spec.plan,
            ), encoding="utf-8")
            hashing = launch.hashing(workload.environment, spec.capture)
            environment = launch.injected({**workload.environment, **spec.environment}, str(plan), spec.techniques, hashing)
            stdin, offset = standard_input.source()
            self.supervisor = supervised.start(spec.folder, {
                "argv": launch.carried(workload.argv, environment, spec.techniques, {**hashing, **spec.environment}),
                "cwd": str(workload.cwd), "environment": environment, "log": str(self.log),
                "stdin": stdin, "stdin_offset": offset, "cage": spec.cage})
        except BaseException:
            self._give_turn()
            self.server.close()
            raise
        self.server.supervisor = self.supervisor.pid

    # -- waiting -------------------------------------------------------------------------------------------------

    def wait_ready(self, patience_s: float = math.inf) -> dict[str, Any]:
        """Wait for the first gate of all ranks, no longer than `patience_s` even if the workload prints; returns rank 0's greeting.
        One that is held has its turn now."""
        self._give_turn()
        gates = self._wait_gate(patience_s)
        hello = self.server.hello()
        assert hello is not None    # a gate comes after a greeting
        self.steps = hello["steps_so_far"]
        # Its own clock, for who was waited for later than it came; it may say what it likes, but not that it came afterwards.
        now = time.monotonic()
        came = min(now, max(self.started, hello["t_ns"] / 1e9))
        held_s = min(hello["held_ns"] / 1e9, self._turn.given_at - self.started) if self._turn and self._turn.given_at else 0.0
        self.first_gate_s = max(0.0, came - self.started - held_s)
        self._note_peak(gates)
        return hello

    def run_block(self, skip: int, steps: int, split: bool = False, watch: dict[str, Any] | None = None,
                  cpus: Sequence[int | None] = (), patience_s: float = math.inf, **orders: Any) -> Block:
        """Run `skip` steps, then `steps` timed ones, and come back to the gate, in no more than `patience_s`. `watch`: see
        `agent.profiling`; `cpus`: where each rank begins, if not where it is (see `measure.placement`); `orders`: what else every
        rank is to do on the way (`fit`: see `agent.batching`)."""
        assert not self.frozen
        queued, began = meter.queued_ns(), time.perf_counter_ns()
        placed = {"cpus": list(cpus)} if len(cpus) == len(self.gates) else {}
        self._guarded(lambda: self.server.go({"do": "go", "skip": skip, "steps": steps, "split": split, "watch": watch, **placed, **orders}))
        counts, sample = self.counts, self.sample
        gates = self._wait_gate(patience_s, (skip + steps) * self._step_s)
        ended = time.perf_counter_ns()
        self.steps += skip + steps
        self.server.notices.clear()
        slowest = max(gates, key=lambda gate: gate["stamps"][-1] - gate["stamps"][skip])
        stamps = slowest["stamps"]
        if not orders:          # what else is asked for takes its time at the gate
            self._lags.append((ended - began - (meter.queued_ns() - queued), stamps[-1] - stamps[0]))
        self._looked_at = self._looked_at or watch is not None
        self._note_peak(gates)
        late_ns = clocks.LATE_NS if (self.server.hello() or {}).get("device", "cpu") == "cpu" else clocks.LATE_ON_DEVICES_NS
        problem = next(filter(None, (clocks.problem(began, gate["stamps"], ended) for gate in gates)), clocks.drift(self._lags, late_ns))
        if problem is not None:
            raise self.end(Outcome("clock_disagrees", problem))
        durations = [later - earlier for earlier, later in zip(stamps, stamps[1:])][skip:]
        self._step_s = sum(durations) / len(durations) / 1e9
        # Of any rank: those that wait for it in a collective take as long, and which is the slowest then is chance.
        evaluated = frozenset(index - skip for gate in gates for index in gate["evaluations"] if index >= skip)
        return Block(
            durations, slowest["parts"], {token: count - counts.get(token, 0) for token, count in self.counts.items()}, skip + steps,
            self.sample, self.sample != sample, evaluated,
        )

    def greeting(self) -> dict[str, Any]:
        """Rank 0's latest: what it says of its techniques may have changed since `wait_ready`."""
        hello = self.server.hello()
        assert hello is not None    # it has come to the gate
        return hello

    def greetings(self) -> list[dict[str, Any]]:
        """The latest of every rank, rank 0 first."""
        return self.server.greetings()

    def ask(self, question: str) -> Any:
        """Facts or evidence, while at the gate."""
        self._looked_at = self._looked_at or question == "ceilings"
        return self._guarded(lambda: self.server.ask({"do": question}, self.workload.timeout_s, self._alive))

    def look(self, kind: str, skip: int, steps: int, patience_s: float = math.inf, **options: Any) -> dict[str, Any]:
        """Look closely at `steps` steps after `skip` (at least 1): what rank 0 saw. `kind` and `options`: `agent.profiling`. Of the
        other ranks only what kept them from it is returned, by rank, as "others"."""
        self.run_block(skip, steps + 1, watch={"kind": kind, "skip": skip, "steps": steps, **options}, patience_s=patience_s)
        first, *others = self._guarded(lambda: self.server.ask_all({"do": "seen"}, self.workload.timeout_s, self._alive))
        problems = {rank: seen["problem"] for rank, seen in enumerate(others, 1) if seen and "problem" in seen}
        return {**first, "others": problems} if problems else first

    def _wait_gate(self, patience_s: float = math.inf, expected_s: float = 0.0) -> list[dict[str, Any]]:
        """`expected_s`: what the steps until then take as far as is known; only what comes on top of it is a silence that tells."""
        began, steps_s = time.monotonic(), SLOWER * expected_s
        until = min(began + patience_s, max(self.spec.until, began + self.spec.least_s + steps_s))
        longest_silence, longest = steps_s + self.workload.timeout_s, steps_s + PATIENCE * self.workload.timeout_s

        def wait() -> list[dict[str, Any]]:
            try:
                return self.server.wait_gates(longest_silence, self._may_come, self._printed, longest, self._recorded, until)
            except GateTimeout as silence:
                in_study = self.spec.until < math.inf       # else it is the first of all, whose ranks stand apart for a reason of their own
                if time.monotonic() < until or (isinstance(silence, RanksApart) and not in_study):
                    raise
                raise self.end(self._untrained(late(until - began, in_study or self.server.hello() is not None))) from None

        gates = self._guarded(wait, min(longest_silence, until - began))
        self.gates = gates
        self.counts, self.sample = gates[0]["counts"], gates[0]["sample"]
        self.losses += gates[0]["losses"]
        self.cpus = [gate["cpu"] for gate in gates]
        unmade = [gate["unmade_batches"] for gate in gates]
        self.unmade_batches = None if None in unmade else max(unmade)
        return gates

    def _note_peak(self, gates: list[dict[str, Any]]) -> None:
        """`peak_bytes` is the most since the start: what torch's allocator reserved on the device of the neediest rank; on a
        CPU what the tree had resident. What a profiler or a measurement of ceilings takes is not the workload's."""
        if self._looked_at:
            return
        device = [gate["device_peak_bytes"] for gate in gates if gate.get("device_peak_bytes") is not None]
        found = max(device) if device else meter.high_water_bytes(self.supervisor.pid)
        self.peak_bytes = max(self.peak_bytes or 0, found) or None
        limit = self.spec.limit_bytes
        if limit is not None and found > limit:
            raise self.end(Outcome("over_limit", f"needs {sizes.show(found)}, the limit is {sizes.show(limit)}"))

    def _guarded(self, action: Callable[[], Any], silence_s: float | None = None) -> Any:
        try:
            return action()
        except RanksApart as ranks:
            raise self.end(apart(silence_s or self.workload.timeout_s, ranks.standing, ranks.missing)) from None
        except GateTimeout:
            trained = self.server.hello() is not None or self._recorded()[0] > 0
            raise self.end(self._untrained(stalled(silence_s or self.workload.timeout_s, trained, self._printed()[0] > 0,
                                                   launch.defeated_by(self.workload.argv)))) from None
        except AgentFailed as error:
            raise self.end(Outcome("agent_failed", str(error))) from None
        except NoStep as error:
            raise self.end(unseen(error.events, error.wrong_step, error.replayed)) from None
        except SeveralTrainings as error:
            raise self.end(Outcome("several_trainings", str(error), "give a command that starts one training")) from None
        except StartedElsewhere:
            raise self.end(ELSEWHERE) from None
        except GateClosed:
            raise self._collect() from None

    def _untrained(self, outcome: Outcome) -> Outcome:
        """With what its output tells, as long as no process of it has come to a gate."""
        if self.server.hello() is not None:
            return outcome
        return self._unreached(with_exception(outcome, redaction.without_secrets(self.output(), self.workload.environment)))

    def _unreached(self, outcome: Outcome) -> Outcome:
        """With what the command's script does that keeps the agent out, where no training was seen."""
        what = next(defeats.in_script(self.workload.argv, self.workload.cwd), None)
        return with_defeat(outcome, what) if what is not None else outcome

    def _printed(self) -> tuple[int, int]:
        return _grown(self.log)

    def _recorded(self) -> tuple[int, int]:
        """A verification run comes to the gate after its last update only, and need not print until then: each update that it
        has recorded shows that it goes on."""
        return _grown(Path(self.spec.capture["folder"]) / "capture.jsonl") if self.spec.capture else (0, 0)

    def _may_come(self) -> bool:
        """Whether a rank may come to the gate still."""
        if not self._alive():
            return False
        if not self.server.ranks and (absent := endings.absent(self.spec.folder)) is not None:
            raise self.end(absent)
        return True

    def _alive(self) -> bool:
        return self.supervisor.poll() is None

    def resident_bytes(self) -> int:
        """Resident memory of the whole tree."""
        return tree.resident_bytes(self.supervisor.pid)

    def ports(self) -> list[int]:
        """TCP ports that the workload asked for by number and listens on."""
        return ports.asked_for(self.supervisor.pid)

    def _give_turn(self) -> None:
        if self._turn is not None:
            self._turn.give()

    # -- freezing ------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Stop the whole tree. Only at a gate."""
        if not self._alive():
            raise self._collect()           # its supervisor is gone, and with it the list of what to freeze
        if not self.frozen and not tree.freeze(self.supervisor.pid):
            raise self.end(Outcome("hung", "a process of the workload could not be stopped"))
        self.frozen = True

    def thaw(self) -> None:
        if self.frozen:
            tree.thaw(self.supervisor.pid)
            self.frozen = False

    # -- the end -------------------------------------------------------------------------------------------------

    def stop(self) -> Outcome:
        """End it because we have seen enough."""
        return self.end(Outcome("ok", "stopped when enough was measured")).outcome

    def finished(self) -> Outcome | None:
        """How the workload ended by itself, or None while it runs: for who follows it by other means than the gate."""
        try:
            return None if self._may_come() else self._collect().outcome
        except TrialEnded as ended:
            return ended.outcome

    def end(self, outcome: Outcome) -> TrialEnded:
        """Kill the tree, record `outcome`, and return the exception to raise."""
        self.ended = self.ended or outcome
        self._shut()            # again after an interruption in the middle of it
        return TrialEnded(self.ended, self.log)

    def _collect(self) -> TrialEnded:
        """The gate closed by itself: find out how the workload ended."""
        if self.ended is not None:
            return TrialEnded(self.ended, self.log)
        began = time.monotonic()
        self.server.hear_out(GRACE_S, self._alive)
        report = self._shut(grace_s=max(0.0, GRACE_S - (time.monotonic() - began)))
        hello = self.server.hello()
        last = [notice for notice in self.server.notices if notice["at"] == "ended"]
        steps = max([self.steps, hello["steps_so_far"] if hello else 0, *(notice["steps"] for notice in last)])
        # What it said last is kept and shown; a token in it is not.
        said = redaction.without_secrets(self.output(), self.workload.environment)
        self.ended = starting.not_started(report, said) or classify(
            report, said, steps, hello is not None, launch.defeated_by(self.workload.argv),
            endings.last(self.spec.folder) if hello is None else None, raised=any(notice.get("raised") for notice in last))
        if self.ended.kind in ("never_trained", "hung"):
            self.ended = endings.absent(self.spec.folder) or (self.ended if hello else self._unreached(self.ended))
        if self.ended.kind in ("too_short", "hung") and endings.cut(self.spec.folder):
            self.ended = CUT
        if self.spec.cage:
            self.ended = refusals.by_isolation(self.ended, CagePlan.from_json(self.spec.cage), said) or self.ended
        if self.ended.kind in ("crashed", "exited") and (not self.ended.remedy or self.ended.reason.startswith("EOFError")):
            self.ended = dataclasses.replace(self.ended, remedy=standard_input.withheld() or self.ended.remedy)
        return TrialEnded(self.ended, self.log, steps)

    def _shut(self, grace_s: float = 0.0) -> dict[str, object] | None:
        """See `supervised.end`."""
        self.thaw()
        report = supervised.end(self.supervisor, self.spec.folder, f"SATURATE_PLAN={self.spec.folder / 'plan.json'}", grace_s)
        self._give_turn()
        self.server.close()
        redaction.hide_secrets_in(self.log, self.workload.environment)      # it stays in the study's folder
        return report

    def output(self, limit: int = 64 * 1024) -> str:
        """The end of what the workload printed."""
        return supervised.printed(self.log, limit)

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop()


def _grown(path: Path) -> tuple[int, int]:
    """The size of a file, and when something came: what exceeds a log shows in the time alone."""
    try:
        seen = os.stat(path)
    except FileNotFoundError:
        return 0, 0             # nothing was started yet
    return seen.st_size, seen.st_mtime_ns
