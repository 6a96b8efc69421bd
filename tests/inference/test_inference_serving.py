"""Climbing to the setting with the most samples per second."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import optimizations
import pytest
from test_inference_search import OTHER, RUN, World, technique, walk

from saturate.errors import EnvironmentProblem
from saturate.inference import confirm, racing, result
from saturate.inference.ending import Ending
from saturate.inference.failures import WorkerFailed
from saturate.inference.phases import Phases
from saturate.inference.serving import Climbs, Fleet, Served, Serving, Setting, climb, most, with_throughput
from saturate.records.inference import ThroughputRow
from saturate.techniques._api import Touch

WON = SimpleNamespace(found=SimpleNamespace(candidate=SimpleNamespace(label=lambda: optimizations.WINNER.id)))


def rates(curve: dict[Setting, float | None], cores: int = 4) -> dict[Setting, float]:
    return dict(climb(curve.get, 8, cores, lambda: True))


def test_the_batch_grows_while_it_pays_then_processes_do() -> None:
    found = rates({Setting(8): 100, Setting(16): 150, Setting(32): 151, Setting(64): 900, Setting(16, 2): 290, Setting(16, 4): 250})
    assert list(found) == [Setting(8), Setting(16), Setting(32), Setting(16, 2), Setting(16, 4)]
    assert max(found, key=found.__getitem__) == Setting(16, 2)


def test_what_does_not_run_ends_the_climb() -> None:
    assert rates({}) == {}
    assert list(rates({Setting(8): 100.0, Setting(8, 2): 90.0})) == [Setting(8), Setting(8, 2)]


def test_time_ends_the_climb() -> None:
    assert list(climb(lambda setting: 1.0 * setting.batch, 8, 4, lambda: False)) == [(Setting(8), 8.0)]


@pytest.mark.parametrize("cores", [1, 2])
def test_no_more_processes_than_cores(cores: int) -> None:
    found = dict(climb(lambda setting: 10.0 * setting.processes, 8, cores, lambda: True))
    assert max(setting.processes for setting in found) == cores


def serving(monkeypatch: pytest.MonkeyPatch, *ends: str) -> tuple[Any, list[str]]:
    """A search for batch sizes in whose races a process ends, once for each reason."""
    told = list(ends)

    def race(*starts: Any, **more: Any) -> racing.Race:
        if told:
            raise WorkerFailed("failed", told.pop(0), outside=True)
        return racing.Race("faster", None, None, None, "")

    monkeypatch.setattr(racing, "race", race)
    found = object.__new__(Serving)
    found.batch, found.cores = 8, 1
    found.rate = lambda what, setting, until_s: (100.0, None)    # type: ignore[method-assign]
    return found, told


@pytest.mark.parametrize(("ends", "verdict"), [(("signal 9",), "faster"), (("signal 9", "signal 9"), "inconclusive")])
def test_a_process_that_ends_in_the_race_of_the_best_costs_no_result(monkeypatch: pytest.MonkeyPatch, ends: Any, verdict: str) -> None:
    race = serving(monkeypatch, *ends)[0].race(Setting(8), Path("artifact"), Setting(16), 0.0)
    assert race.verdict == verdict
    assert ("signal 9" in race.reason) is (verdict == "inconclusive")


def test_a_setting_beyond_a_limit_is_shown_and_is_nobodys_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of twice the batch take twice as long: whoever may wait for 20 ms is not served by the largest batch."""
    found = serving(monkeypatch)[0]
    found.rate = lambda what, setting, until_s: (100.0 * setting.batch, f"p99_ms is {setting.batch}" if setting.batch > 20 or what is None else None)
    climbs = found.search({"baseline": None, "int8": Path("artifact")}, lambda text: None, time.monotonic() + 60.0)
    # What the model came with stays, although it passes the limit itself: there must be something to compare with.
    assert [(row.of, row.id, row.batch, row.over_limit is None) for row in climbs.rows] == [
        ("baseline", "", 8, True), ("baseline", "", 16, False), ("rival", "int8", 8, True), ("rival", "int8", 16, True), ("rival", "int8", 32, False)]
    assert climbs.best == {"baseline": (Setting(8), 800.0), "int8": (Setting(16), 1600.0)}


def test_the_limits_are_those_of_one_call_and_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimpleNamespace(block=lambda count: [4_000_000] * count, memory_bytes=lambda: 10**9, file_bytes=lambda: 0, close=lambda: None,
                             ready=SimpleNamespace(whole_device=False))
    for limits, said in (({"p99_ms": 5.0, "peak_memory_gb": 2.0}, None), ({"p99_ms": 3.0}, "p99_ms is 4"), ({"peak_memory_gb": 1.5}, "peak_memory_gb is 2")):
        found = serving(monkeypatch)[0]
        found.limits = limits
        del found.rate
        monkeypatch.setattr(found, "fleet", lambda what, setting: Fleet([worker, worker], 8, SimpleNamespace(folder=Path("none"))))   # type: ignore[list-item, arg-type]
        measured = found.rate(None, Setting(8, 2))
        assert measured is not None and (measured[1] or "").startswith(said or "") and (measured[1] is None) is (said is None)


def test_what_does_not_run_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    found = serving(monkeypatch)[0]

    def fleet(what: Any, setting: Setting) -> Any:
        raise WorkerFailed(*(("timeout", "preparation took longer than 180 s") if what else ("out_of_memory", "a buffer of 8 GiB")))

    monkeypatch.setattr(found, "fleet", fleet)
    del found.rate
    climbs = found.search({"baseline": None, "int8": Path("artifact")}, told.append, time.monotonic() + 60.0)
    assert not climbs.rows and not climbs.best and climbs.failed == told == [
        "baseline, batch 8, 1 process(es) does not run: out of memory: a buffer of 8 GiB",
        "int8, batch 8, 1 process(es) does not run: timeout: preparation took longer than 180 s"]


def test_who_comes_behind_the_winner_has_no_turn_where_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found = serving(monkeypatch)[0]
    climbs = found.search({"baseline": None, "first": Path("a"), "second": Path("b")}, lambda text: None, 0.0)
    assert set(climbs.best) == {"baseline", "first"} and climbs.cut_short and climbs.failed[-1] == "second: the time ended before its best batch size was looked for"


def test_nobody_is_tried_where_the_model_had_no_time_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow model was stopped at a small batch, and the winner raced it at a large one: "each at its best"."""
    clock = [0.0]
    monkeypatch.setattr("saturate.inference.serving.time", SimpleNamespace(monotonic=lambda: clock[0]))
    found = serving(monkeypatch)[0]

    def rate(what: Any, setting: Setting, until_s: float) -> tuple[float, None]:
        clock[0] += 0.01 if what else 1.0
        return 100.0 * setting.batch, None

    found.rate = rate
    for deadline_s, own, other in ((5.0, 16, 16), (60.0, 4096, 4096)):
        clock[0] = 0.0
        climbs = found.search({"baseline": None, "int8": Path("artifact")}, lambda text: None, deadline_s)
        assert {who: setting.batch for who, (setting, _) in climbs.best.items()} == {"baseline": own, "int8": other}
        assert bool(climbs.failed) is (own == 16) and all(said.startswith("baseline: the time ended before its best") for said in climbs.failed)




class Batches(World):
    """A machine on which int4 loses at the batch size of the model, and serves most at larger ones. `curves`: samples per second by batch."""

    def __init__(self, curves: dict[str, dict[int, float]], *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        self.curves, self.deadline_s, self.threads = curves, time.monotonic() + 600.0, 1
        self.facts = SimpleNamespace(batch_size=8)
        self.source = SimpleNamespace(inputs=lambda torch: [None])

    def rate(self, what: Any, setting: Setting, until_s: float) -> tuple[float, None]:
        """As `Serving.rate`."""
        curve = self.curves["baseline" if what is None else what.label()]
        if setting.batch not in curve:
            raise WorkerFailed("out_of_memory", "too large")
        return curve[setting.batch], None


MORE = technique("more", "runtime", "convergence", (Touch("runtime"), Touch("number-format")))
CURVES = {"baseline": {8: 100.0, 16: 110.0}, "run": {8: 200.0, 16: 260.0}, "more": {8: 150.0, 16: 300.0, 32: 600.0}, "other": {8: 190.0, 16: 270.0}}


def served(monkeypatch: pytest.MonkeyPatch, world: Batches, *modules: Any, verdict: str = "faster") -> tuple[Any, Any, list[Setting]]:
    pytest.importorskip("torch")
    monkeypatch.setattr(racing, "BLOCK_S", 0.001)
    search, raced = walk(world, *modules, objective="throughput"), []
    search.deadline_s, search.end_s = world.deadline_s, math.inf
    monkeypatch.setattr(Serving, "rate", lambda self, what, setting, until_s: world.rate(what, setting, until_s))
    monkeypatch.setattr(Serving, "race", lambda self, own, what, best, until_s: (raced.extend([own, best]), racing.Race(verdict, None, None, None, ""))[-1])
    won, final = confirm.champion(search, world, world.deadline_s)
    return most(search, world, won, final), search, raced       # type: ignore[arg-type]


def rows(search: Any) -> dict[str, Any]:
    return {candidate.label(): found for candidate, found in search.tried.items()}


def test_who_loses_at_the_given_batch_size_may_serve_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the winner by latency looked for its best batch size: weights in fewer bits lose to another runtime at 8 samples, and not at 32."""
    before: dict[str, str] = {}
    monkeypatch.setattr(confirm, "survive", lambda one, lab, say, own=confirm.survive: (before.setdefault(one.candidate.label(), one.reason), own(one, lab, say))[1])
    found, search, raced = served(monkeypatch, Batches(CURVES, {"run": 0.5, "more": 0.65}), RUN, MORE)
    assert found.won is not None and found.won.found.candidate.label() == "more" and raced == [Setting(16), Setting(32)]
    assert [(row.of, row.id) for row in found.climbs.rows if row.batch == 8] == [("baseline", ""), ("rival", "run"), ("rival", "more")]
    assert "not scored" in before["more"], "it was slower than one that computes the same"
    assert rows(search)["more"].fate == "kept" and "1.54x" in rows(search)["more"].reason and "at most 600 samples/s, at batch 32" in rows(search)["more"].reason
    assert rows(search)["run"].fate == "dominated" and rows(search)["run"].reason.endswith("at most 260 samples/s, at batch 16")
    assert result.verdict_of(found.won, found.final, search, True) == "faster"


@pytest.mark.parametrize(("factors", "modules", "climbed"), [
    ({"run": 0.5, "more": 0.8}, (RUN, MORE), ["run"]),                                  # 1.6 times behind
    ({"run": 0.5, "other": 0.52}, (RUN, OTHER), ["run"]),                               # serves 4 % more, which is not worth another artifact
    ({"run": 1.2, "more": 1.4}, (RUN, MORE), ["run", "more"]),                          # nobody is faster at 8 samples
])
def test_who_looks_for_its_best_batch_size(monkeypatch: pytest.MonkeyPatch, factors: Any, modules: Any, climbed: list[str]) -> None:
    found, search, raced = served(monkeypatch, Batches(CURVES, factors), *modules)
    assert found.won is not None and found.won.found.candidate.label() == climbed[-1] and raced
    assert found.looked and sum(row.fate == "kept" for row in rows(search).values()) == 1


def test_who_had_no_time_to_be_stored_says_so_and_keeps_the_answer_open(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Batches(CURVES, {"run": 1.2, "more": 1.4})
    search = walk(world, RUN, MORE, objective="throughput")
    for one in search.tried.values():
        one.seconds = 1e6
    found = most(search, world, None, None)         # type: ignore[arg-type]
    assert found.won is None and not found.looked and all("the time ended" in row.reason for row in rows(search).values())
    nothing = msgspec.structs.replace(optimizations.nothing(), verdict="nothing_helps")
    assert with_throughput(nothing, found).verdict == "inconclusive"


@pytest.mark.parametrize(("takes", "files", "whole_device", "together"), [
    ((900, 800), (300, 280), False, 1420),          # libraries count once
    ((900, 800), (0, 0), False, 1700),              # on a GPU whose driver knows processes
    ((1700, 800), (0, 0), True, 1700),              # in the growth of the device since the first began is the second
    ((900, None), (0, 0), True, None)])
def test_memory_of_several_processes_is_counted_once(takes: Any, files: Any, whole_device: bool, together: Any) -> None:
    workers = [SimpleNamespace(memory_bytes=lambda one=one: one, file_bytes=lambda file=file: file, ready=SimpleNamespace(whole_device=whole_device))
               for one, file in zip(takes, files)]
    assert Fleet(workers, 8, SimpleNamespace(folder=Path("none"))).memory_bytes() == together      # type: ignore[arg-type]


@pytest.mark.parametrize(("slow", "seconds", "of", "over"), [
    ({20}, 60.0, None, False), ({20}, 60.0, "best", False), ({20, 60}, 60.0, None, True), (set(range(0, 999, 9)), 60.0, "best", True),
    ({20}, -1.0, None, False), ({20}, -1.0, "best", True)])
def test_one_slow_call_of_forty_refuses_no_setting(monkeypatch: pytest.MonkeyPatch, slow: set[int], seconds: float, of: Any, over: bool) -> None:
    """While there is time, more calls tell; behind its end the model itself has the benefit, and the winner has not."""
    made: list[int] = []

    def block(count: int) -> list[int]:
        first = len(made)
        made.extend(int(100e6 if call in slow else 30e6) for call in range(first, first + count))
        return made[first:]

    clock = SimpleNamespace(perf_counter_ns=lambda: 30_000_000 * len(made), monotonic=time.monotonic)
    monkeypatch.setattr("saturate.inference.serving.time", clock)
    found = serving(monkeypatch)[0]
    found.limits = {"p99_ms": 50.0}
    del found.rate
    worker = SimpleNamespace(block=block, memory_bytes=lambda: 10**9, close=lambda: None)
    monkeypatch.setattr(found, "fleet", lambda what, setting: Fleet([worker], 8, SimpleNamespace(folder=Path("none"))))   # type: ignore[list-item, arg-type]
    measured = found.rate(of and Path(of), Setting(8), time.monotonic() + seconds)
    assert measured is not None and (measured[1] is not None) is over
    assert len(made) == 3 + (40 if seconds < 0 or len(slow) > 2 else 104)


def test_blocks_of_a_race_last_as_long_for_many_samples_as_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet tells times per sample: taken for those of calls, a block of 4096 samples a call would last over a minute."""
    now_ns = 0
    monkeypatch.setattr("saturate.inference.serving.time", SimpleNamespace(perf_counter_ns=lambda: now_ns))

    class Process(SimpleNamespace):
        def block(self, count: int) -> list[int]:
            nonlocal now_ns
            now_ns += count * self.call_ns * self.first             # they answer at the same time
            lasted.append(count * self.call_ns / 1e9)
            return [self.call_ns] * count

    def fleet(batch: int, processes: int, sample_ns: int) -> Fleet:
        workers = [Process(call_ns=batch * sample_ns, first=not index, freeze=list, thaw=list, close=list) for index in range(processes)]
        return Fleet(workers, batch, SimpleNamespace(folder=Path("none")))     # type: ignore[arg-type]

    for batch, processes in ((1, 1), (4096, 1), (64, 4)):
        lasted: list[float] = []
        found = racing.race(lambda: fleet(8, 1, 20_000), lambda: fleet(batch, processes, 10_000))       # noqa: B023
        assert found.verdict == "faster" and found.speedup == pytest.approx(2.0 * processes, rel=0.01)
        assert max(lasted) < 1.5 * racing.BLOCK_S and sorted(lasted)[len(lasted) // 2] > 0.15 * racing.BLOCK_S


def test_a_batch_size_leaves_no_copy_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "baseline-8").mkdir()
    (tmp_path / "baseline-8" / "model.pt").write_bytes(b"weights")
    closed: list[int] = []
    Fleet([SimpleNamespace(close=lambda: closed.append(1))], 8, SimpleNamespace(folder=tmp_path / "baseline-8")).close()   # type: ignore[list-item, arg-type]
    assert closed and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("error", "said"), [(EnvironmentProblem("inputs cannot be written", cause="No space left on device"), "No space left on device"),
                                             (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "can't allocate memory")])
def test_a_batch_that_finds_no_room_ends_a_climb_and_not_the_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, said: str) -> None:
    torch = pytest.importorskip("torch")
    found = serving(monkeypatch)[0]

    def written(folder: Path, inputs: Any, *, model: bool) -> Any:
        folder.mkdir(parents=True)
        (folder / "inputs.pt").write_bytes(b"half")
        if len(inputs[0]) > room:
            raise error
        return SimpleNamespace(folder=folder)

    monkeypatch.setattr("saturate.inference.serving.PAYS", 0.0)
    del found.rate
    found.torch, found.stored, found.limits = torch, (torch.zeros(8, 2),), {}
    found.lab = SimpleNamespace(folder=tmp_path, threads=1, source=SimpleNamespace(serving=written), serve=lambda *given: SimpleNamespace(
        block=lambda count: [4_000_000] * count, close=lambda: None))
    room = 16
    climbs = found.search({"baseline": None}, lambda text: None, time.monotonic() + 60.0)
    assert [row.batch for row in climbs.rows] == [8, 16] and climbs.failed and said in climbs.failed[0] and not any((tmp_path / "sources").iterdir())
    room = 4
    if isinstance(error, EnvironmentProblem):
        with pytest.raises(EnvironmentProblem, match="cannot be written"):
            found.search({"baseline": None}, lambda text: None, time.monotonic() + 60.0)


def test_the_end_of_a_process_takes_nothing_with_it_that_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = SimpleNamespace(folder=Path("workdir"))
    ending = Ending(SimpleNamespace(baseline=None), lab, [], 0.0, Phases(0.0))      # type: ignore[arg-type]
    attached: list[Any] = []
    monkeypatch.setattr(ending, "_attach", lambda error, note: attached.append((error, note)))
    with pytest.raises(EnvironmentProblem, match="has ended") as caught, ending.told():
        raise WorkerFailed("failed", "signal 9", outside=True)
    assert attached == [(caught.value, f"{caught.value.message}: signal 9")]
    assert "workdir='workdir' it goes on from here" in caught.value.remedy


@pytest.mark.parametrize(("verdict", "ratio", "said"), [("faster", 2.0, "faster"), ("inconclusive", 0.96, "inconclusive"),
                                                       ("slower", 0.5, "nothing_helps")])
def test_who_serves_no_more_samples_has_not_won(verdict: Any, ratio: float, said: str) -> None:
    race = SimpleNamespace(verdict=verdict, speedup=ratio, speedup_ci=(0.9 * ratio, 1.1 * ratio))
    rows = [ThroughputRow(of="rival", id=id, batch=8, processes=1, samples_per_s=1.0) for id in (optimizations.WINNER.id, "another")]
    record = with_throughput(optimizations.win(), Served(Climbs(rows), won=WON, race=race))     # type: ignore[arg-type]
    assert [row.of for row in record.throughput] == ["best", "rival"]
    won = verdict == "faster"
    assert record.verdict == said and (record.best is not None) is won and (record.artifact is not None) is won
    assert any(one.fate == "kept" for one in record.candidates) is won


def test_without_a_race_nobody_serves_more() -> None:
    record = with_throughput(optimizations.win(), Served(Climbs(failed=["best, batch 8 does not run: a timeout"]), won=WON))    # type: ignore[arg-type]
    assert record.verdict == "inconclusive" and record.best is None and record.artifact is None
    assert any(one.reason.endswith("no batch size was served by both, the model and the winner; best, batch 8 does not run: a timeout")
               for one in record.candidates) and record.notes[-1] == "best, batch 8 does not run: a timeout"
