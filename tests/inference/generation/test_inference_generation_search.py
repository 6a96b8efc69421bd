"""Which way is the fastest: every way has a fate and a reason, and the winner holds on prompts that did not choose
it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import time
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="generation needs torch")

import generation_models as toys  # noqa: E402

from saturate.errors import CheckUnusable, EnvironmentProblem, UsageError  # noqa: E402
from saturate.inference.accuracy import Judgement  # noqa: E402
from saturate.inference.failures import WorkerFailed  # noqa: E402
from saturate.inference.generation import (  # noqa: E402
    Budget,
    Sampling,
    conclusion,
    decode,
    generate,
    host,
    judging,
    remembered,
)
from saturate.inference.generation import optimize as optimize_in_processes  # noqa: E402
from saturate.inference.generation import search as module  # noqa: E402
from saturate.inference.generation.build import Way, build  # noqa: E402
from saturate.inference.journal import Journal, rests  # noqa: E402
from saturate.inference.jury import Jury  # noqa: E402
from saturate.inference.scores import read  # noqa: E402
from saturate.records.generation import GenerationCandidate  # noqa: E402
from saturate.records.result import Phase  # noqa: E402

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 1, 2, 3], [9, 8, 9, 8], [5, 5, 1]]
NEW = 12


#: The search itself, without its processes: see test_inference_generation_isolation.py for those.
optimize = partial(optimize_in_processes, isolate=False)


class Slow(toys.Cached):
    """Takes as long for several tokens as for one, like a large model that waits for its weights: time of a clock
    that nothing else moves, see `clock`."""

    def __init__(self, seed: int = 0, step_ns: int = 1_000_000):
        super().__init__(seed)
        self.step_ns = step_ns

    def forward(self, ids, cache=None):
        CLOCK[0] += self.step_ns
        return super().forward(ids, cache)


CLOCK = [0]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """What loops read instead of the machine's time."""
    monkeypatch.setattr(decode.Loop, "_now", lambda self: CLOCK[0])


class Failing(toys.Cached):
    def __init__(self, words: str):
        super().__init__()
        self.words = words

    def forward(self, ids, cache=None):
        if cache is not None:
            raise OSError(self.words)       # nothing that says how it is to be called
        return super().forward(ids, cache)


#: Compiling takes half a minute.
UNCOMPILED = ("draft", "lookup", "weights")


def fates(result):
    return {row.id: row.fate for row in result.record.candidates}


def test_a_draft_that_pays_wins():
    result = optimize(Slow(), PROMPTS, max_new_tokens=NEW, draft=Slow(step_ns=50_000), time="30s", ways=("draft",))
    record = result.record
    assert result.best == "speculative, draft model" and record.verdict == "faster"
    assert fates(result)["speculative, draft model"] == "kept"
    best = record.best
    assert 2 < best.speedup < 8 and best.identical == 1 and best.speculation.acceptance_rate == 1
    assert (
        best.speculation.cost_ratio == pytest.approx(0.05)
        and best.timing.decode_tokens_per_s > record.baseline.timing.decode_tokens_per_s
    )
    assert result.generate([4, 4, 4]).tokens == generate(Slow(), [4, 4, 4], max_new_tokens=NEW).tokens
    assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record
    assert "speculative, draft model" in result.table() and "acceptance 1.00 at cost ratio" in result.table()
    assert repr(result) == result.table()       # and not the models in it


def test_a_draft_that_does_not_pay_is_refused_by_a_measurement():
    """A draft as slow as its target, that is mostly wrong."""
    draft = Slow(9)
    result = optimize(Slow(), PROMPTS, max_new_tokens=NEW, draft=draft, time="30s", ways=("draft",))
    row = next(row for row in result.record.candidates if row.id == "speculative, draft model")
    assert row.fate == "slower" and row.speedup_ci[1] < 1 and row.reason.startswith("acceptance 0.")
    assert result.best != "speculative, draft model"


@pytest.mark.parametrize("noise, seconds, rounds, said, shown", [
    (1.0, 0.0, 3, "the time ended first: give it more", False), (0.4, 600.0, 8, "a quieter machine", True)])
def test_a_race_that_does_not_decide_says_why(monkeypatch, noise, seconds, rounds, said, shown):
    real = module.measure.rounds

    def scattered(a, b, batches, _, most=module.measure.MOST_ROUNDS):
        ratios, before, after = real(a, b, batches, seconds, most)
        return [noise * (index - (len(ratios) - 1) / 2) for index in range(len(ratios))], before, after

    monkeypatch.setattr(module.measure, "rounds", scattered)
    result = optimize(Slow(), PROMPTS, max_new_tokens=NEW, draft=Slow(9), time="30s", ways=("draft",))
    row = next(row for row in result.record.candidates if row.id == "speculative, draft model")
    assert row.fate == "inconclusive" and f"{rounds} rounds do not tell whether it is faster; {said}" in row.reason
    assert (row.speedup_ci is not None) is shown, "an interval of few rounds says nothing"
    assert all(row.reason for row in result.record.candidates)


@pytest.mark.parametrize("words", ["planted", "backend='inductor' raised:\nTypeError: planted\n\nSet TORCHDYNAMO_VERBOSE=1"])
def test_a_way_that_fails_costs_a_row(words):
    """What a compiler raised was cut off behind the line that announces it."""
    result = optimize(Slow(), PROMPTS, max_new_tokens=8, draft=Failing(words), time="30s", ways=("draft",))
    row = next(row for row in result.record.candidates if row.id == "speculative, draft model")
    assert row.fate == "failed" and row.reason == "OSError: " + " ".join(words.partition("\n\n")[0].split("\n"))


@pytest.mark.parametrize("times", [1, 2])
def test_the_plain_loop_that_ends_beside_a_way_is_started_again_and_the_way_not_blamed(monkeypatch, times):
    """All later ways were said to fail, and that was remembered."""
    left, real = [times], module.Search._plain

    def ends(self, batch, request):
        if left[0] > 0:
            left[0] -= 1
            try:
                raise WorkerFailed("failed", "ended by signal 11")
            except WorkerFailed as error:
                raise module._PlainEnded(error.reason) from error
        return real(self, batch, request)

    monkeypatch.setattr(module.Search, "_plain", ends)
    result = optimize(Slow(), PROMPTS, max_new_tokens=NEW, draft=Slow(step_ns=50_000), time="30s", ways=("draft", "lookup"))
    row = next(row for row in result.record.candidates if row.id == "speculative, draft model")
    if times == 1:
        assert row.fate == "kept"
    else:
        assert row.fate == "failed" and row.reason.startswith("twice the plain loop's own process ended beside it")
    assert fates(result)["speculative, prompt lookup"] != "failed"


def test_a_plain_loop_that_ends_is_told_from_the_way_beside_it():
    def ends(batch, request):
        raise WorkerFailed("failed", "ended by signal 11")

    search = module.Search.__new__(module.Search)
    search._base = SimpleNamespace(generate=ends)
    with pytest.raises(module._PlainEnded, match="signal 11"):
        search._plain([[1]], None)


def test_a_process_that_ends_in_the_check_is_no_wrong_answer(monkeypatch):
    """A way that the kernel ended there was rejected for what it does, for good."""
    judge = judging.Judge.__new__(judging.Judge)
    judge.check, judge.budget, judge.jury = (lambda run: [1.0]), Budget(max_drop=0.1), Jury(read(1.0), Budget(max_drop=0.1))
    killed = WorkerFailed("failed", "ended by signal 9", outside=True)
    monkeypatch.setattr(judging, "of_candidate", lambda *rest: SimpleNamespace(scores=None, problem=SimpleNamespace(what="run"), failure=killed))
    row = GenerationCandidate(id="int8", numerics="precision", fate="not_tried", reason="", speedup=1.5)
    with pytest.raises(WorkerFailed, match="signal 9"):
        judge._scored(row, None, "dominated", "", False)


def test_a_check_that_breaks_is_asked_for_the_plain_loop_again():
    """A way was rejected, for good, because the file of the references was gone."""
    started = []

    @contextlib.contextmanager
    def running(recipe, batch, request):
        started.append(recipe)
        yield SimpleNamespace(prepare=lambda rows, request: SimpleNamespace(tokens=rows))

    def check(run):
        run([[1]] * 40)
        raise FileNotFoundError("references.txt")

    judge = judging.Judge(SimpleNamespace(model=None), SimpleNamespace(running=running), [[[1]] * 100], [], decode.Request(1), None, check,
                          Budget(max_drop=0.1), remembered.Memory().turn, Jury(read([1.0] * 40), Budget(max_drop=0.1)))
    row = GenerationCandidate(id="int8", numerics="precision", fate="not_tried", reason="", speedup=1.5)
    host = SimpleNamespace(prepare=lambda rows, request: SimpleNamespace(tokens=rows))
    with pytest.raises(CheckUnusable, match="works no more.*references.txt"):
        judge._scored(row, host, "dominated", "", False)
    assert started == [module.PLAIN]


def test_a_search_on_another_device_begins_anew():
    def key(name, device):
        model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=device)]))
        fake = SimpleNamespace(__version__="2.13", get_num_threads=lambda: 1,
                               cuda=SimpleNamespace(is_available=lambda: True, get_device_name=lambda index: name))
        return remembered.key_of(fake, SimpleNamespace(model=model), SimpleNamespace(source=SimpleNamespace(model_hash="m"), isolated=True), ())

    assert len({key("", "cpu"), key("NVIDIA H100", "cuda:0"), key("NVIDIA H200", "cuda:0")}) == 3


def test_another_version_of_a_library_is_tried_anew(monkeypatch):
    """What torchao had failed at, or lost, was held against a newer one."""
    def key(version):
        monkeypatch.setattr(remembered, "installed", lambda: {"torchao": version}, raising=False)
        given = SimpleNamespace(model=toys.Cached())
        return remembered.key_of(torch, given, SimpleNamespace(source=SimpleNamespace(model_hash="m"), isolated=True), ())

    assert key("0.17.0") == key("0.17.0") != key("0.18.0")


def test_other_text_is_rejected(monkeypatch):
    """Drafts that are taken unseen are the fastest, and wrong."""
    from saturate.inference.generation import sampling

    def unseen(torch, logits, drafted, counts, tolerance):
        return (
            counts.clone(),
            logits.argmax(-1).gather(1, counts.unsqueeze(1)).squeeze(1),
            torch.zeros_like(counts, dtype=torch.bool),
        )

    monkeypatch.setattr(sampling, "accept_greedy", unseen)
    result = optimize(Slow(), PROMPTS, max_new_tokens=NEW, draft=Slow(9, 50_000), time="30s", ways=("draft",))
    row = next(row for row in result.record.candidates if row.id == "speculative, draft model")
    assert row.fate == "rejected_behaviour" and "differs from the plain loop at token" in row.reason
    assert result.best == "plain"


def test_without_time_nothing_is_tried():
    result = optimize(Slow(), PROMPTS, max_new_tokens=4, time=0.000001, ways=UNCOMPILED)
    assert result.best == "plain" and result.record.verdict == "inconclusive"
    assert set(fates(result).values()) <= {"not_tried", "not_applicable"}
    assert result.generate(PROMPTS[0]).tokens[0] == toys.greedy(toys.Cached(), PROMPTS[0], 4)


def test_no_way_begins_when_the_rest_is_needed_to_confirm_the_best():
    """One that was begun with a second left ended half a minute behind the end, and the best was confirmed after that: a search of ten
    seconds took 26. To confirm takes a plain loop, too, which starts anew; so does one that would be the first that is faster."""
    search, plain = ways(3.0)
    search.memory, search.yard, began = remembered.Memory(), None, []
    search._tried = lambda label, numerics, recipe, like: (began.append(label), (module._with(plain.record, id=label, fate="slower"), False))[1]
    search.deadline, numerics = time.monotonic() + 30.0, "reordering"
    for seconds, start_s, check_s, numerics, tried in (
            (40.0, 0.0, 0.0, "reordering", []), (0.0, 11.0, 0.0, "reordering", []), (15.0, 10.0, 0.0, "reordering", []),
            (0.0, 1.0, 15.0, "precision", []), (0.0, 1.0, 15.0, "reordering", ["other"]), (15.0, 5.0, 0.0, "reordering", ["other", "other"])):
        search._best = module.Ready("way 0", module.PLAIN, search.found[0], seconds=seconds)
        search._start_s, search.judge = start_s, SimpleNamespace(check_s=check_s)
        search._try("other", numerics, module.PLAIN, module.PLAIN)
        assert began == tried
    assert search.found[1].fate == "not_tried" and search.found[1].reason == f"{conclusion.TIME_OVER}: to try it and to confirm the best takes about 40 s here"
    assert search.cut_short == {"other"}, "while that is not empty, nobody says that nothing helps"


def test_no_further_pair_confirms_the_best_when_the_time_is_over(monkeypatch):
    """Three of them, each as long as it takes to start two processes, came behind the end."""
    search, plain = ways(3.0, deadline=time.monotonic() - 1.0)
    search.confirmation, search.request, started = [PROMPTS], None, []
    search.yard = SimpleNamespace(isolated=True, start=lambda *what: (started.append("plain"), SimpleNamespace(close=lambda: None))[1],
                                        running=lambda *what: (started.append("way"), contextlib.nullcontext())[1])
    search.judge = SimpleNamespace(texts={}, warmed=lambda host, batches: [], judged=lambda record, *rest, confirming: record)
    monkeypatch.setattr(module.measure, "rounds", lambda *arguments: ([0.0, 0.1, -0.1], [], []))
    search._again(search._ready[0])
    assert started == ["plain", "way"]


def test_a_check_that_takes_all_the_time_is_not_asked_again(monkeypatch):
    """Without a time of its own it was asked three times, and twice more for each way."""
    asked, real = [], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 1000.0 * len(asked))

    def check(run):
        asked.append(1)
        return [float(tokens[0] > 0) for tokens in run(PROMPTS)]

    result = optimize(Slow(), PROMPTS, max_new_tokens=4, time=600.0, check=check, budget=Budget(0.5), ways=("weights",), isolate=False)
    assert len(asked) == 1 and result.record.verdict == "inconclusive"
    assert {row.reason for row in result.record.candidates if row.fate == "not_tried"} <= {f"{conclusion.TIME_OVER} before the check was known to judge"}


def test_what_a_search_took_is_said_beside_what_was_given():
    result = optimize(Slow(), PROMPTS, max_new_tokens=4, time="30s", ways=("lookup",))
    assert result.record.given_s == 30.0 and [phase.name for phase in result.record.phases] == ["start", "ways", "winner"]
    assert result.table().splitlines()[-1] == f"took {result.record.seconds:.1f} s of the 30 s given"
    late = msgspec.structs.replace(result.record, seconds=50.0, phases=[Phase(name="winner", seconds=45.0)])
    assert dataclasses.replace(result, record=late).table().splitlines()[-1] == "took 50 s, more than the 30 s given: winner 45 s"


def test_a_winner_that_does_not_hold_on_other_prompts_is_not_kept(monkeypatch):
    real = judging.Judge.judged

    def only_here(self, *arguments, confirming):
        record = real(self, *arguments, confirming=confirming)
        return module._with(record, fate="slower") if confirming else record

    monkeypatch.setattr(judging.Judge, "judged", only_here)
    result = optimize(Slow(), PROMPTS, max_new_tokens=NEW, draft=Slow(step_ns=50_000), time="30s", ways=("draft",))
    assert result.best == "plain" and any("not on others" in note for note in result.record.notes)
    assert fates(result)["speculative, draft model"] == "slower"


def test_a_winner_of_which_other_prompts_do_not_tell_is_not_said_to_be_slower_there(monkeypatch):
    real = judging.Judge.judged

    def unclear(self, *arguments, confirming):
        record = real(self, *arguments, confirming=confirming)
        return module._with(record, fate="inconclusive", speedup=1.25, speedup_ci=(0.5, 3.0)) if confirming else record

    monkeypatch.setattr(judging.Judge, "judged", unclear)
    result = optimize(Slow(), PROMPTS, max_new_tokens=NEW, draft=Slow(step_ns=50_000), time="30s", ways=("draft",))
    assert result.record.notes == ["speculative, draft model was faster on the prompts that chose it, and of others it is not known"]
    row = next(row for row in result.record.candidates if row.id == "speculative, draft model")
    assert (row.fate, row.speedup, row.speedup_ci) == ("inconclusive", 1.25, (0.5, 3.0)), "what the reason speaks of"


def test_one_kind_of_ways_may_be_given_by_its_name():
    result = optimize(Slow(), PROMPTS, max_new_tokens=4, time="30s", ways="lookup")
    assert [row.id for row in result.record.candidates] == ["speculative, prompt lookup"]


def test_the_same_call_samples_the_same_unless_it_has_another_seed():
    result = optimize(Slow(), PROMPTS, max_new_tokens=12, time="30s", ways="lookup", sampling=Sampling(seed=3), isolate=False)
    one, two, three = (result.generate(PROMPTS, **more).tokens for more in ({}, {}, {"seed": 4}))
    assert one == two != three and three == result.generate(PROMPTS, seed=4).tokens


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, 0.7])
def test_what_is_no_sampling_is_refused_before_anything_runs(sampling):
    with pytest.raises(UsageError, match=f"sampling is {type(sampling).__name__}") as refused:
        optimize(Slow(), PROMPTS, max_new_tokens=4, sampling=sampling)
    assert "Sampling(temperature=" in refused.value.remedy


def ways(*speedups, deadline=float("inf")):
    """A search whose ways were all faster on the prompts that choose."""
    search = module.Search.__new__(module.Search)
    rows = [GenerationCandidate(id=f"way {number}", numerics="reordering", fate="dominated", reason="", speedup=speedup)
            for number, speedup in enumerate(speedups)]
    search.found, search.notes, search.cut_short, search.deadline, search.say = list(rows), [], set(), deadline, lambda line: None
    search.memory = remembered.Memory()
    search._ready = [module.Ready(row.id, module.Recipe(compile_mode=row.id), row) for row in rows]
    plain = GenerationCandidate(id="plain", numerics="exact", fate="dominated", reason="", speedup=1.0)
    return search, module.Ready("plain", module.PLAIN, plain)


def test_who_does_not_hold_gives_way_to_the_next():
    """The fastest way was wrong on other prompts, and "nothing helps" was said of a search that had found a second one."""
    search, plain = ways(1.5, 3.0, 2.0)
    fates_there = {"way 1": "rejected_accuracy", "way 2": "dominated"}
    search._again = lambda best: module._with(best.record, fate=fates_there[best.label])
    assert search._conclude(plain).label == "way 2"
    assert [row.fate for row in search.found] == ["dominated", "rejected_accuracy", "kept"]


@pytest.mark.parametrize(("fate", "speedups", "deadline", "asked", "open_rows"), [
    ("slower", (3.0, 2.0), float("inf"), 2, []), ("slower", (3.0, 2.0), 0.0, 1, ["way 1"]),
    ("slower", (5.0, 4.0, 3.0, 2.0), float("inf"), 3, ["way 3"]), ("inconclusive", (3.0,), float("inf"), 1, ["way 0"])])
def test_nothing_helps_where_all_had_their_turn(fate, speedups, deadline, asked, open_rows):
    search, plain = ways(*speedups, deadline=deadline)
    turns = []
    search._again = lambda best: (turns.append(best.label), module._with(best.record, fate=fate))[1]
    assert search._conclude(plain) is plain and len(turns) == asked
    assert [row.id for row in search.found if conclusion.is_open(row)] == open_rows


def test_who_had_no_turn_to_be_confirmed_says_why():
    for speedups, deadline, why in (((5.0, 4.0, 3.0, 2.0), float("inf"), "not confirmed: 3 others were"), ((3.0, 2.0), 0.0, "not confirmed: too little time was left")):
        search, plain = ways(*speedups, deadline=deadline)
        search._again = lambda best: module._with(best.record, fate="slower")
        assert search._conclude(plain) is plain and search.found[-1].reason == why
    search, plain = ways(3.0, 2.0)
    search._again = lambda best: best.record
    assert search._conclude(plain).label == "way 0" and search.found[-1].reason == "", "another one was kept"


@pytest.mark.parametrize(("fate", "asked"), [("slower", ["way 3"]), ("inconclusive", ["way 0", "way 1", "way 2"])])
def test_who_did_not_hold_is_remembered_so_that_others_have_a_turn(tmp_path, fate, asked):
    """The same call in the same folder confirmed the same three again, and never a fourth."""
    for turn in range(2):
        search, plain = ways(5.0, 4.0, 3.0, 2.0)
        search.memory, turns = remembered.Memory(Journal(tmp_path, "k")), []
        search._again = lambda best, turns=turns: (turns.append(best.label), module._with(best.record, fate=fate, reason="planted"))[1]
        assert search._conclude(plain) is plain and turns == (asked if turn else ["way 0", "way 1", "way 2"])
        assert search.found[0].fate == fate and search.found[0].reason == "on other prompts: planted" and len(search.notes) == (4 if fate == "slower" and turn else 3)


def test_a_place_among_those_that_are_confirmed_is_kept_in_the_folder(tmp_path):
    """Each search began to count anew, so repeated ones spent more than the promised chance of error."""
    rows = [GenerationCandidate(id=name, numerics="precision", fate="dominated", reason="") for name in ("int8", "int4", "fp8")]
    for check, places in (("a", [0, 1, 0, 1]), ("a", [0, 1, 0, 1]), ("b", [0, 1, 0, 1])):
        memory = remembered.Memory(Journal(tmp_path, "k", more={"check": check}))
        assert [memory.turn(row) for row in (*rows[:2], *rows[:2])] == places
    assert remembered.Memory(Journal(tmp_path, "k", more={"check": "b"})).turn(rows[2]) == 2
    assert remembered.Memory().turn(rows[1]) == 0


@pytest.mark.parametrize(("outside", "label"), [(True, "way 0"), (False, "way 1")])
def test_a_confirmation_that_was_ended_from_outside_is_made_once_more(outside, label):
    search, plain = ways(3.0, 2.0)
    ends = [WorkerFailed("failed", "signal 9", outside=outside)]

    def again(best):
        if ends:
            raise ends.pop()
        return best.record

    search._again = again
    assert search._conclude(plain).label == label and bool(search.cut_short) is False


@pytest.mark.parametrize("times", [1, 2])
def test_the_plain_loop_that_ends_in_a_confirmation_is_started_again_and_the_way_not_blamed(monkeypatch, tmp_path, times):
    """The way had failed, for a reason of the plain loop's, and that was remembered for good."""
    ends = [WorkerFailed("failed", "ended by signal 11")] * times
    real, confirming = host.Yard.start, []

    def start(self, what, batch, request):
        if confirming and what == module.PLAIN and ends:
            raise ends.pop()
        return real(self, what, batch, request)

    monkeypatch.setattr(host.Yard, "start", start)
    arguments = {"max_new_tokens": NEW, "draft": Slow(step_ns=50_000), "time": "30s", "ways": ("draft",), "workdir": tmp_path}
    result = optimize(Slow(), PROMPTS, say=lambda line: confirming.append(line) if line.startswith("confirm") else None, **arguments)
    row = next(row for row in result.record.candidates if row.id == "speculative, draft model")
    if times == 1:
        assert row.fate == "kept"
        return
    assert row.fate == "failed" and "twice the plain loop's own process ended beside it: ended by signal 11" in row.reason
    assert result.record.verdict == "inconclusive"
    assert optimize(Slow(), PROMPTS, **arguments).best == "speculative, draft model", "it has another turn"


@pytest.mark.parametrize(("changes", "is_open"), [
    ({"fate": "undecided", "speedup": 1.8}, True), ({"fate": "undecided", "speedup": 0.9}, False), ({"fate": "inconclusive"}, True),
    ({"fate": "dominated"}, True), ({"fate": "not_tried", "reason": "pass check="}, False),
    ({"fate": "rejected_accuracy", "speedup": 3.0}, False), ({"fate": "not_applicable"}, False)])
def test_what_nobody_decided_is_open_also_where_it_changes_numbers(changes, is_open):
    row = GenerationCandidate(id="int8", numerics="precision", fate="failed", reason="")
    assert conclusion.is_open(module._with(row, **changes)) is is_open


@pytest.mark.parametrize(("raced", "verdict", "fate"), [
    ("dominated", "pass", "dominated"), ("dominated", "undecided", "undecided"), ("inconclusive", "undecided", "inconclusive"),
    ("slower", "undecided", "slower"), ("slower", "fail", "rejected_accuracy")])
def test_an_undecided_check_does_not_hide_an_undecided_race(monkeypatch, raced, verdict, fate):
    """A way that nobody knows to be faster was closed by it, remembered as such, and "nothing helps" was said."""
    judge = judging.Judge.__new__(judging.Judge)
    judge.check, judge.budget = (lambda run: [1.0]), Budget(max_drop=0.1)
    judge.jury = SimpleNamespace(judge=lambda scores, turn: Judgement(verdict, 0.0, None, None, None, "a drop of 0.00"))
    monkeypatch.setattr(judging, "of_candidate", lambda *rest: SimpleNamespace(scores=read(1.0), problem=None, failure=None))
    row = GenerationCandidate(id="int8", numerics="precision", fate="not_tried", reason="", speedup=1.01)
    found = judge._scored(row, None, raced, "8 rounds do not tell", False)
    assert found.fate == fate and found.reason.endswith("8 rounds do not tell")
    assert conclusion.is_open(found) is (fate in ("dominated", "inconclusive")), "an undecided check of one that is hardly faster is not open"


def judged(check, budget, run, *, confirming=False):
    """What is said of a way that changes numbers and is raced to be faster, and of the check. Both loops answer with `run(prompts)`."""
    judge = judging.Judge(SimpleNamespace(model=None), None, [[[1]] * 100], [], decode.Request(1), None, check, budget, remembered.Memory().turn)
    host = SimpleNamespace(prepare=lambda rows, request: SimpleNamespace(tokens=run(rows)))
    notes = judge.control(host, float("inf"))
    row = GenerationCandidate(id="int8", numerics="precision", fate="not_tried", reason="", speedup=1.5)
    return judge._scored(row, host, "dominated", "", confirming), notes


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_check_that_shuffles_certifies_nothing(one_by_one):
    """It was split by place: samples that had chosen confirmed as well."""
    order = random.Random(0)
    prompts = [[number, 1, number % 3] for number in range(60)]

    def check(run):
        shuffled = order.sample(prompts, len(prompts))
        answers = [answer for prompt in shuffled for answer in run([prompt])] if one_by_one else run(shuffled)
        return [float(answer[-1] > 0) for answer in answers]

    for confirming in (False, True):
        row, notes = judged(check, Budget(max_drop=0.5), lambda rows: rows, confirming=confirming)
        assert (row.fate, row.verdict) == ("undecided", "undecided") and "in another order each time" in row.reason
        assert any("in another order each time" in note for note in notes)


def test_a_check_that_does_not_shuffle_is_told_what_is_not_known_of_it():
    row, notes = judged(lambda run: [float(answer[0] > 0) for answer in run([[number % 2] for number in range(60)])], Budget(max_drop=0.5),
                        lambda rows: rows)
    assert (row.fate, row.verdict) == ("dominated", "pass") and ["no noise can be made" in note for note in notes] == [True]


@pytest.mark.parametrize("confirming", [False, True])
def test_another_number_of_scores_is_no_open_question(confirming):
    """It was undecided here, and a failure of candidates that are no language models."""
    calls = []

    def check(run):
        calls.append(len(run([[1, 2]])))
        return [float(number % 2) for number in range(59 if len(calls) > 2 else 60)]

    row, _ = judged(check, Budget(max_drop=0.5), lambda rows: rows, confirming=confirming)
    assert (row.fate, row.verdict, row.accuracy_drop) == ("rejected_accuracy", "fail", None) and not conclusion.is_open(row)
    assert row.reason == "the check returned 60 scores for the baseline, 59 for the candidate"


def test_a_record_holds_no_infinite_drop():
    """A relative drop of scores whose mean may be zero has no bound."""
    row, _ = judged(lambda run: [(-1.0) ** number * (number + len(run([[1, 2]]))) for number in range(60)],
                    Budget(max_drop=0.5, relative=True), lambda rows: rows)
    assert row.verdict == "undecided" and row.accuracy_drop is not None and row.accuracy_drop_ci is None
    assert msgspec.json.decode(msgspec.json.encode(row), type=GenerationCandidate) == row


def test_a_check_that_asks_one_prompt_several_times_gets_several_texts():
    """Each of its batches began from the same seed: eight samples of one answer were one, counted eight times."""
    request = decode.Request(6, Sampling(seed=3))
    judge = judging.Judge(SimpleNamespace(model=None), None, [[[1]] * 2], [], request, None, None, None, len)
    loop = build(torch, toys.Cached(), Way(), [[1, 2, 3]] * 2, request)
    host = SimpleNamespace(prepare=lambda rows, request: loop.generate(rows, request))
    texts = judge._run(host, [[1, 2, 3]] * 8)
    assert len(set(map(tuple, texts))) > 2, "those of one batch differ anyway"
    assert texts == generate(toys.Cached(), [[1, 2, 3]] * 8, max_new_tokens=6, sampling=Sampling(seed=3), batch_size=2).tokens


def test_scores_are_known_as_long_as_the_check_says_the_same_of_the_model(tmp_path, monkeypatch):
    """The code of a check is the same where a file that it reads is not: what an earlier file had said of a way was told again."""
    data, asked = tmp_path / "answers.txt", []
    record = GenerationCandidate(id="int8", numerics="precision", fate="rejected_accuracy", reason="")

    def check(run):
        return [float(token in data.read_text().split()) for token in map(str, run([[1, 2, 3]])[0])]

    def tried(self, plain):
        known = self.memory.tried("int8")
        asked.append(known is None)
        self.memory.keep_tried(record)

    monkeypatch.setattr(module.Search, "_walk", tried)
    for text in ("0 1 2 3 4 5 6", "0 1 2 3 4 5 6", "7 8 9 10 11 12", "7 8 9 10 11 12"):
        data.write_text(text)
        optimize(Slow(), PROMPTS, max_new_tokens=NEW, check=check, budget=Budget(max_drop=0.9), workdir=tmp_path / "w")
    assert asked == [True, False, True, False]


def test_ctrl_c_returns_the_best_so_far(monkeypatch):
    """Pressed while the last way is tried."""
    real = module.Search._tried

    def pressed(self, label, *arguments):
        if label == "speculative, prompt lookup":
            raise KeyboardInterrupt
        return real(self, label, *arguments)

    monkeypatch.setattr(module.Search, "_tried", pressed)
    result = optimize(Slow(), PROMPTS, max_new_tokens=NEW, draft=Slow(step_ns=50_000), time="1m",
                      ways=("draft", "lookup"))
    assert result.best == "speculative, draft model" and result.record.verdict == "inconclusive"
    assert any(note.startswith("interrupted") and "not confirmed" in note for note in result.record.notes)
    assert result.generate(PROMPTS[0]).tokens[0] == toys.greedy(toys.Cached(), PROMPTS[0], NEW)


def test_ways_that_change_numbers_need_a_check():
    result = optimize(Slow(), PROMPTS, max_new_tokens=4, time="10s", ways=UNCOMPILED)
    rows = [row for row in result.record.candidates if row.numerics == "precision"]
    assert rows and all(row.fate in ("not_tried", "not_applicable") for row in rows)
    with pytest.raises(UsageError, match="a check needs a budget"):
        optimize(Slow(), PROMPTS, max_new_tokens=4, budget=Budget(max_drop=0.1))


def test_weights_in_8_bits_are_judged_by_the_check():
    pytest.importorskip("torchao", reason="saturate[inference] brings it")
    import torch._inductor.config as settings

    model = Slow()
    prompts = [[token, 1, 2] for token in range(13)]
    wanted = generate(model, prompts, max_new_tokens=4).tokens

    def check(run):
        return [float(a == b) for ours, theirs in zip(wanted, run(prompts)) for a, b in zip(ours, theirs)]

    # Whatever another test of this process has left. By the module's own means: what monkeypatch takes back is deleted, and hidden then.
    with settings.patch(coordinate_descent_tuning=False):
        result = optimize(
            model,
            prompts,
            max_new_tokens=4,
            time="30s",
            batch_size=4,
            check=check,
            budget=Budget(max_drop=0.9),
            ways=UNCOMPILED,
        )
        assert not settings.coordinate_descent_tuning
    row = next(row for row in result.record.candidates if row.id == "torchao-weight-only")
    assert row.accuracy is not None and row.verdict is not None, row
    assert isinstance(model.head.weight, torch.nn.Parameter) and type(model.head.weight) is torch.nn.Parameter, (
        "the user's is as it was"
    )


@pytest.mark.slow
def test_compiled_steps_give_the_same_text(monkeypatch):
    monkeypatch.setattr(decode.Loop, "_now", lambda self: time.perf_counter_ns())
    result = optimize(toys.Cached(), PROMPTS, max_new_tokens=16, time="10m")
    row = next(row for row in result.record.candidates if row.id == "compile")
    assert row.identical == 1 and row.speedup is not None, row
    assert 0 < row.compile_s < row.prepare_s + row.first_call_s, row
    assert result.record.baseline.compile_s is None and result.record.baseline.first_call_s > 0, result.record.baseline


@pytest.mark.parametrize("wrong", ["soon", "0", "-5s", ""])
def test_what_is_no_time_is_refused(wrong):
    with pytest.raises(UsageError, match="time is "):
        optimize(Slow(), PROMPTS, max_new_tokens=4, time=wrong)


def journalled(folder):
    """What another search in this folder would know, by way."""
    return [json.loads(line)["name"] for line in (folder / "candidates.jsonl").read_text().splitlines()]


def test_what_was_not_its_own_fault_is_tried_again(tmp_path, monkeypatch):
    """A process that was killed from elsewhere, and a full disk, were held against a way for good."""
    found, how = [], []

    def ends(self, recipe, *arguments):
        if recipe != module.PLAIN:
            found.append(recipe)
            raise WorkerFailed(*how[0], **how[1])
        return running(self, recipe, *arguments)

    running = host.Yard.running
    monkeypatch.setattr(host.Yard, "running", ends)
    for number, given in enumerate(((("failed", "killed"), {"outside": True}), (("timeout", "took longer"), {}), (("failed", "its own fault"), {}))):
        how[:] = given
        optimize(Slow(), PROMPTS, max_new_tokens=NEW, ways=("lookup",), workdir=tmp_path)
        assert len(found) == number + 1, "it had its turn again"
    assert journalled(tmp_path) == ["speculative, prompt lookup"]
    optimize(Slow(), PROMPTS, max_new_tokens=NEW, ways=("lookup",), workdir=tmp_path)
    assert len(found) == 3, "what it did itself it would do again"


def test_a_full_disk_ends_no_search_and_another_check_is_asked_anew(tmp_path, monkeypatch):
    def full(self, *arguments, **named):
        raise EnvironmentProblem("what was found cannot be kept", cause="No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", full)
        found = optimize(Slow(), PROMPTS, max_new_tokens=NEW, draft=Slow(0, 10_000), ways=("draft",), workdir=tmp_path)
    assert found.best == "speculative, draft model" and any("No space left" in note for note in found.record.notes)
    one, other = rests(torch, lambda generate, prompts: [1.0]), rests(torch, lambda generate, prompts: [0.5])
    assert one != other
    Journal(tmp_path, "k", more=one).add("int8", {"record": {}}, rests=("check",))
    assert "int8" in Journal(tmp_path, "k", more=one).known and "int8" not in Journal(tmp_path, "k", more=other).known
