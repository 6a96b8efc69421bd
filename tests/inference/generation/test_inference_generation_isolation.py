"""Ways to generate in processes of their own: what hangs, crashes or leaves something behind costs its row, an
interruption costs nothing that was found, and a search goes on where it was."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="generation needs torch")

import generation_models as toys  # noqa: E402

from saturate.errors import CheckUnusable, StudyLocked, UsageError, WorkloadFailed  # noqa: E402
from saturate.inference.generation import Budget, decode, host, optimize, prompts  # noqa: E402
from saturate.inference.generation.recipe import Recipe  # noqa: E402
from saturate.inference.jury import Jury  # noqa: E402
from saturate.inference.scores import Scores  # noqa: E402

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 1, 2, 3], [9, 8, 9, 8], [5, 5, 1]]


class Resting(toys.Cached):
    """Takes as long for several tokens as for one."""

    def __init__(self, seed: int = 0, rest_s: float = 0.02):
        super().__init__(seed)
        self.rest_s = rest_s

    def forward(self, ids, cache=None):
        time.sleep(self.rest_s)
        return super().forward(ids, cache)


class Ending(toys.Cached):
    """Ends the process that it runs in, where that is not the user's."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.home = how, os.getpid()

    def forward(self, ids, cache=None):
        if os.getpid() != self.home:
            if self.how == "hangs":
                time.sleep(3600)
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().forward(ids, cache)


def rows(result):
    return {row.id: row for row in result.record.candidates}


@pytest.mark.slow
def test_a_winner_is_found_and_confirmed_in_processes_of_its_own(tmp_path):
    said = []
    arguments = {"max_new_tokens": 12, "draft": Resting(rest_s=0.0005), "time": "2m", "ways": ("draft",), "workdir": tmp_path}
    result = optimize(Resting(), PROMPTS, say=said.append, **arguments)
    row = rows(result)["speculative, draft model"]
    assert result.best == "speculative, draft model" and row.fate == "kept" and row.identical == 1, row
    assert result.record.best.speedup > 1.02 and said == ["speculative, draft model", "confirm: speculative, draft model"]
    wanted = [toys.greedy(Resting(rest_s=0), prompt, 12) for prompt in PROMPTS]
    assert result.generate(PROMPTS).tokens == wanted
    assert (tmp_path / "candidates.jsonl").read_text().count("speculative, draft model") > 0
    assert not list((tmp_path / "processes").glob("*/scratch")), "nothing is left of the processes"
    again = optimize(Resting(), PROMPTS, say=said.append, **arguments)
    assert "speculative, draft model: known from the search before" in said and again.best == result.best


@pytest.mark.parametrize(("how", "words"), [("crashes", "SIGSEGV"), pytest.param("hangs", "took longer", marks=pytest.mark.slow)])
def test_a_draft_that_ends_its_process_costs_a_row(monkeypatch, how, words):
    if how == "hangs":
        monkeypatch.setattr(host, "_LEAST_PREPARE_S", 30.0)
        monkeypatch.setattr(host, "_PREPARE_SHARE", 0.0)
    result = optimize(toys.Cached(), PROMPTS, max_new_tokens=4, draft=Ending(how), time="2m", ways=("draft",))
    row = rows(result)["speculative, draft model"]
    assert row.fate == "failed" and words in row.reason, row
    assert result.best == "plain"


@pytest.mark.slow
def test_a_model_that_fails_in_another_process_is_the_users_to_know():
    with pytest.raises(WorkloadFailed):
        optimize(Ending("crashes"), PROMPTS, max_new_tokens=4, time="1m", ways=("lookup",))


def test_two_searches_do_not_share_a_folder(tmp_path):
    """The processes of one would load the other's model."""
    refused = []

    def meanwhile(line):
        with pytest.raises(StudyLocked) as caught:
            optimize(toys.Cached(1), PROMPTS, max_new_tokens=4, workdir=tmp_path, isolate=False, ways=("lookup",))
        refused.append(caught.value)

    optimize(toys.Cached(), PROMPTS, max_new_tokens=4, workdir=tmp_path, isolate=False, ways=("lookup",), say=meanwhile)
    assert refused and "workdir" in refused[0].remedy
    optimize(toys.Cached(1), PROMPTS, max_new_tokens=4, workdir=tmp_path, isolate=False, ways=("lookup",))


def test_a_way_that_hangs_has_what_is_left_and_a_slow_plain_loop_is_waited_for():
    yard = host.Yard(torch, None, None, time.monotonic() + 300)
    assert 290 < yard._batch_s() <= 300, "nothing is known yet"
    yard.slowest_s = 20.0
    assert 400 < yard._batch_s() <= 410, "what is left, and 30 s + 4 x 20 s"
    yard.deadline = time.monotonic() - 100
    assert yard._batch_s() == 110
    yard.slowest_s = 0.0
    assert yard._batch_s() == 60


def test_no_copy_of_the_model_stays_in_the_folder(tmp_path):
    """Nothing needs it any more, and it is as large as the model and its draft."""
    for number in range(2):
        optimize(toys.Cached(), PROMPTS, max_new_tokens=4, time="1s", ways=(), workdir=tmp_path)
        assert (tmp_path / "source").is_dir() and not list((tmp_path / "source").glob("model*")), number


def test_what_took_long_to_start_may_take_as_long_again_when_it_is_confirmed(monkeypatch):
    """It had a minute, or half of what was left: what had been compiled, or loaded, for two was ended, and the winner lost."""
    now, given_s = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yard = host.Yard(torch, None, None, 150.0)
    yard.source, yard._folder = SimpleNamespace(device="cpu"), Path()

    class Starting:
        def __init__(self, *source, prepare_s, **more):
            given_s.append(prepare_s)

        def ask(self, what, *given, limit_s):
            given_s.append(limit_s)
            now[0] += 70.0
            return SimpleNamespace(tokens=[])

        def freeze(self):
            pass

    monkeypatch.setattr(host, "Worker", Starting)
    tried = yard.start(Recipe("draft", may_stop=False), [[1]], decode.Request(4))
    assert given_s == [75.0, 75.0]
    now[0] = 160.0
    again = Recipe("draft", may_stop=True)       # as the winner runs
    yard.start(again, [[1]], decode.Request(4))
    assert given_s[2:] == [280.0, 280.0], "four times what it took"
    now[0] = 160.0
    yard.start(Recipe("lookup"), [[1]], decode.Request(4))
    assert given_s[4:] == [60.0, 60.0], "of this one nothing is known"
    tried._worker.ask = lambda *given, limit_s: now.__setitem__(0, now[0] + 100.0)
    tried.prepare([[1]], decode.Request(4))
    assert yard._prepare_s(Recipe("draft")) == 400.0, "what a first batch compiles is known as well"


def test_the_prompts_that_choose_do_not_confirm():
    chosen, confirmed = prompts.halves([[1], [2], [1], [3], [2], [4], [5]], 4)
    assert chosen == [[[1], [3], [5], [1]]] and confirmed == [[[2], [4], [2], [4]]]
    with pytest.raises(UsageError, match="one prompt alone"):
        optimize(toys.Cached(), [[1, 2], [1, 2]], max_new_tokens=4)


def test_a_check_that_does_not_ask_is_refused():
    with pytest.raises(CheckUnusable, match="never called"):
        optimize(toys.Cached(), PROMPTS, max_new_tokens=4, check=lambda run: [1.0] * 30, budget=Budget(max_drop=0.1),
                 isolate=False, ways=("weights",))


def test_the_winner_is_scored_on_samples_that_did_not_choose_it():
    jury = Jury(Scores(1.0, (1.0,) * 60), Budget(max_drop=0.5), (range(30), range(30, 60)))
    lucky = Scores(0.5, (1.0,) * 30 + (0.0,) * 30)
    assert jury.judge(lucky).drop == 0 and jury.judge(lucky, 0).drop == 1


def test_those_that_are_confirmed_share_the_confidence_and_few_samples_certify_nothing():
    """Each meets the same samples: with the whole confidence each time, one of several would pass too often."""
    same = Scores(1.0, (1.0,) * 60)
    jury = Jury(same, Budget(max_drop=0.2), (range(30), range(30, 60)))
    highs = [jury.judge(same, turn).drop_ci[1] for turn in range(3)]
    assert highs == sorted(highs) and highs[0] < highs[2] and jury.judge(same).drop_ci[1] < highs[0]
    few = Scores(1.0, (1.0,) * 19)
    judged = Jury(few, Budget(max_drop=0.4)).judge(few, 0)
    assert judged.verdict == "undecided" and "too few to split" in judged.reason


def test_it_is_imported_by_the_name_that_it_is_called_by():
    import saturate
    from saturate.generation import generate

    assert saturate.generation.generate is generate
