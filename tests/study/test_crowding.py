"""What runs out of memory beside another process is run again, alone: a peer's memory does not count against it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from test_racing import ONE_PAIR, Bench, Process, in_whole_blocks

from saturate.records.facts import Facts, MachineFacts
from saturate.study import baseline, crowding, tune
from saturate.study.live import on_side
from saturate.study.racing import ONCE_MORE, Racer
from saturate.study.search import Search
from saturate.trial.outcome import Outcome
from saturate.trial.process import TrialEnded

CANDIDATE = (SimpleNamespace(id="fast", merges=1, label=lambda: "fast", options_dict=dict),)
FULL = Outcome("out_of_memory_device", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")


class Device(Bench):
    """Of 10 GB. The baseline needs `a` of them, and `later` more from its third block on; the candidate needs `b`."""

    def __init__(self, a: float, b: float, later: float = 0.0, full: Outcome = FULL):
        super().__init__(scatter=0.001, process=Process)
        self.a, self.b, self.later, self.full = a, b, later, full
        self.held: dict[int, float] = {}
        self.together = 0                   # processes at most at the same time
        self.said: list[str] = []
        self.say = self.said.append

    def live(self, purpose: str, techniques: Any) -> Any:
        live = super().live(purpose, techniques)
        self._take(live, self.b if techniques else self.a)
        run_block, trial = live.trial.run_block, live.trial

        def growing(skip: int, steps: int, cpus: Any = ()) -> Any:
            trial.blocks = getattr(trial, "blocks", 0) + 1
            if not techniques and trial.blocks == 3:
                self._take(live, self.a + self.later)
            return run_block(skip, steps, cpus)

        trial.run_block = growing
        return live

    def _take(self, live: Any, gb: float) -> None:
        self.held[id(live)] = gb
        self.together = max(self.together, len(self.held))
        if sum(self.held.values()) > 10:
            del self.held[id(live)]
            live.trial.ended = self.full
            raise TrialEnded(self.full)

    def live_pair(self, purpose_a: str, a: Any, purpose_b: str, b: Any) -> Any:
        first = on_side("a", lambda: self.live(purpose_a, a))
        try:
            return first, on_side("b", lambda: self.live(purpose_b, b))
        except TrialEnded:
            self.finish_live(first)
            raise

    def finish_live(self, live: Any) -> None:
        self.held.pop(id(live), None)


def racer_on(device: Device, asked: str = "auto") -> tuple[Racer, list[str]]:
    racer, why = in_whole_blocks(device), []

    def crowded(reason: str) -> None:
        why.append(reason)
        racer.alternate()

    racer.on_crowded = crowded if asked == "auto" else None
    return racer, why


def race(racer: Racer, share: bool = False) -> Any:
    return racer.run("q", (), CANDIDATE, ONE_PAIR, time.monotonic() + 60, share_base=share)     # type: ignore[arg-type]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("needs", [
    {"a": 6, "b": 6}, {"a": 6, "b": 3, "later": 2}, {"a": 6, "b": 6, "full": Outcome("out_of_memory_host", "killed with SIGKILL")},
    {"a": 6, "b": 6, "full": Outcome("failed_to_apply", "fast: OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.")},
], ids=["candidate", "baseline, later", "host", "in apply"])
def test_who_fits_alone_is_raced_alone_and_all_after_it(needs: dict[str, Any], share: bool) -> None:
    device = Device(**needs)
    racer, why = racer_on(device)
    result = race(racer, share)
    assert result.record.pairs == 1 and result.record.rounds == 10 and len(device.store.kept) == 10, "rounds beside the other do not count"
    assert racer.mode == "alternate" and not device.held and not racer.has_base
    assert device.said == [ONCE_MORE] and len(why) == 1 and device.full.reason in why[0]


@pytest.mark.parametrize("share", [True, False])
def test_who_does_not_fit_alone_either_failed_by_itself(share: bool) -> None:
    """And others go on beside each other. Of the two it is run first: nobody waits for rounds that come to nothing."""
    device = Device(4, 11)
    racer, why = racer_on(device)
    with pytest.raises(TrialEnded) as ended:
        race(racer, share)
    assert (ended.value.side, ended.value.outcome) == ("b", FULL)
    assert racer.mode == "concurrent" and why == [] and not device.held and "race A alone" not in device.started
    device.b = 5
    assert race(racer, share).record.pairs == 1 and device.together == 2 and racer.mode == "concurrent"
    assert len(device.held) == share, "but for the one that is shared, both have ended"


@pytest.mark.parametrize(("asked", "full"), [("concurrent", FULL), ("auto", Outcome("crashed", "ValueError: heads"))])
def test_what_the_user_asked_for_and_other_failures_stay_as_they_are(asked: str, full: Outcome) -> None:
    racer, why = racer_on(Device(6, 6, full=full), asked)
    with pytest.raises(TrialEnded) as ended:
        race(racer)
    assert ended.value.outcome == full and racer.mode == "concurrent" and why == []


class Recorded:
    """As a verifier: its runs need `needs` GB of 10, those of the frozen baseline and of one beside it included."""

    def __init__(self, racer: Racer, needs: float, at_once: int):
        self.racer, self.needs, self.at_once, self.runs = racer, needs, at_once, 0

    def verify(self, techniques: Any) -> str:
        self.runs += 1
        if 4 * self.racer.has_base + self.needs * self.at_once > 10:
            raise TrialEnded(FULL)
        return "verified"


@pytest.mark.parametrize(("needs", "base", "at_once", "runs", "verified"), [
    (5, False, 1, 1, True),
    (5, True, 1, 1, True),
    (7, True, 1, 2, True),              # the frozen baseline was in its way
    (7, False, 2, 2, True),             # the run beside it was
    (3, False, 4, 2, True),             # or those beside it
    (11, True, 2, 2, False),            # it needs too much by itself
    (11, False, 1, 1, False),           # and nothing else ran
])
def test_a_verification_run_is_repeated_alone(needs: float, base: bool, at_once: int, runs: int, verified: bool) -> None:
    device = Device(4, 4)
    racer, why = racer_on(device)
    if base:
        race(racer, share=True)
        assert racer.has_base
    verifier = Recorded(racer, needs, at_once)
    if verified:
        assert crowding.verify(verifier, racer, CANDIDATE) == "verified"                        # type: ignore[arg-type]
    else:
        with pytest.raises(TrialEnded):
            crowding.verify(verifier, racer, CANDIDATE)                                         # type: ignore[arg-type]
        assert verifier.at_once == at_once, "another set may need less"
    alternates = verified and runs == 2
    assert verifier.runs == runs and len(why) == alternates and (racer.mode == "alternate") is alternates


def test_the_search_asks_in_this_way() -> None:
    racer, why = racer_on(Device(4, 4))
    verifier: Any = Recorded(racer, 7, 2)
    search = Search({}, Facts(), racer, verifier, time.monotonic() + 60, print)
    assert search.verify(CANDIDATE, None) == "verified" and why                                 # type: ignore[arg-type]


def test_who_resumes_the_study_alternates_as_well() -> None:
    answers: dict[str, str] = {}
    study: Any = SimpleNamespace(store=SimpleNamespace(set_answer=answers.__setitem__), notes=[], say=lambda line: None)
    racer, verifier = in_whole_blocks(Device(4, 4)), SimpleNamespace(at_once=4)
    tune._one_at_a_time(study, racer, verifier, "it is full")       # type: ignore[arg-type]
    assert (racer.mode, verifier.at_once) == ("alternate", 1)
    assert answers == {baseline.ALTERNATES: "it is full"} and study.notes == ["fresh runs alternate: it is full"]


GIB = 1 << 30


@pytest.mark.parametrize(("processes", "reserved_gb", "room_gb", "holds"), [
    (2, 30, 78, True), (2, 36, 78, False), (2, 30, 60, False),      # another program has 18 GB
    (2, 1, 2.7, False), (2, 1, 2.9, True),                          # where two contexts are a good part of it
    (4, 17, 78, True), (4, 18, 78, False), (2, 100, None, True),
])
def test_two_fit_where_what_is_free_holds_their_contexts_as_well(processes: int, reserved_gb: float, room_gb: float | None, holds: bool) -> None:
    facts = Facts(device_memory_bytes=80 * GIB, device_reserved_bytes=reserved_gb * GIB,
                  device_room_bytes=None if room_gb is None else int(room_gb * GIB))
    assert (baseline._too_small({"memory_bytes": 1}, facts, processes) is None) is holds


@pytest.mark.parametrize(("processes", "each_gb", "holds"), [(2, 25, True), (2, 26, False), (4, 14, True), (4, 15, False)])
def test_two_fit_where_the_machine_holds_them_and_half_of_another(processes: int, each_gb: float, holds: bool) -> None:
    facts = Facts(machine=MachineFacts(memory_bytes=64 * GIB))
    assert baseline._too_small({"memory_bytes": each_gb * GIB}, facts, processes) == (None if holds else "memory")
