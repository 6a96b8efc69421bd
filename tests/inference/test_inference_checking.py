"""The user's check, whatever it does; and whether a check can tell good from bad."""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import math
import os
import random
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from saturate.errors import CheckUnusable
from saturate.inference import samples
from saturate.inference.accuracy import Budget
from saturate.inference.checking import of_candidate, scored
from saturate.inference.controls import controls
from saturate.inference.failures import CheckFailed, WorkerFailed
from saturate.inference.jury import Jury
from saturate.inference.scores import read

torch = pytest.importorskip("torch", reason="models need torch")

LABELS = torch.arange(60) % 4
INPUTS = torch.nn.functional.one_hot(LABELS, 4).float() + torch.linspace(0, 0.3, 60).unsqueeze(1) * torch.tensor([1.0, -1, 1, -1])
BATCHES = list(zip(INPUTS.split(16), LABELS.split(16)))


def run(x):
    """A good model."""
    return 5 * x


def right(run) -> list[bool]:
    return [bool(hit) for x, y in BATCHES for hit in run(x).argmax(-1) == y]


def loss(run) -> list[float]:
    return torch.cat([torch.nn.functional.cross_entropy(run(x), y, reduction="none") for x, y in BATCHES]).tolist()


# -- one run of the check ------------------------------------------------------------------------------------------


def test_scores_samples_and_answers_are_known_afterwards():
    found = scored(right, run)
    assert found.problem is None and found.scores is not None and found.scores.mean == 1.0
    assert found.calls == 4 and len(found.samples) == 60 and found.seconds >= 0
    assert scored(right, run).answers == found.answers
    assert scored(right, lambda x: 5 * x * (1 + 2**-22)).answers != found.answers
    assert scored(right, run).asked == found.asked != scored(lambda run: run(INPUTS[:2]).sum(), run).asked
    assert found.required() is found.scores


def raises(run):
    run(INPUTS)
    return {}["accuracy"]


def closes(run):
    run(INPUTS)
    raise GeneratorExit


@pytest.mark.parametrize("check, kind, says", [
    (closes, "raised", "GeneratorExit"),
    (raises, "raised", r"KeyError: 'accuracy' \(.*test_inference_checking.py:\d+\)"),
    (lambda run: run(INPUTS) and None, "raised", "RuntimeError"),
    (lambda run: run.eval(), "raised", r"a function and no module: it has no 'eval'.*\(.*test_inference_checking.py:\d+\)"),
    (lambda run: [run(INPUTS), sys.exit(3)], "exited", "exit code 3"),
    (lambda run: None if run(INPUTS) is not None else 0, "unusable", "None"),
    (lambda run: float(run(INPUTS).sum()) * float("nan"), "unusable", "nan"),
    (lambda run: run(INPUTS), "unusable", "2 dimensions"),
    (lambda run: 0.93, "silent", "never called"),
    (lambda run: run(INPUTS, INPUTS), "run", "TypeError"),
])
def test_whatever_a_check_does_has_a_name(check, kind, says):
    found = scored(check, run)
    assert found.scores is None and found.problem is not None
    assert found.problem.kind == kind
    assert __import__("re").search(says, found.problem.what), found.problem.what
    with pytest.raises((CheckFailed, TypeError)):
        found.required()


def test_a_model_that_fails_is_not_blamed_on_the_check_even_where_it_is_caught():
    def broken(x):
        raise OSError("the process is gone")

    def careful(run):
        try:
            return float(run(INPUTS).sum())
        except OSError:
            return 0.0

    for check in (careful, right):
        found = scored(check, broken)
        assert found.problem is not None and found.problem.kind == "run" and found.scores is None
        with pytest.raises(OSError, match="gone"):
            found.required()


def breaks_at(*calls):
    """`right`, but for some of its calls."""
    count = itertools.count(1)

    def check(run):
        scores = right(run)
        if next(count) in calls:
            raise FileNotFoundError("the labels are gone")
        return scores

    return check


def test_a_check_that_breaks_by_itself_is_not_held_against_a_candidate():
    asked = []

    @contextlib.contextmanager
    def model():
        asked.append("model")
        yield run

    assert of_candidate(right, run, model).scores is not None and not asked, "the model is only asked where something is wrong"
    assert of_candidate(breaks_at(1), run, model).scores is not None and asked == ["model"]
    with pytest.raises(CheckUnusable, match="works no more: the check raised FileNotFoundError: the labels are gone") as caught:
        of_candidate(breaks_at(1, 2), run, model)
    assert "the model itself" in caught.value.cause and "FileNotFoundError" in caught.value.evidence
    found = of_candidate(breaks_at(1, 3), run, model)
    assert found.problem is not None and found.problem.kind == "raised", "the model has a score, and this one has none, twice"


def test_a_model_that_fails_is_asked_for_no_more_than_once():
    def broken(x):
        raise OSError("the process is gone")

    found = of_candidate(right, broken, lambda: pytest.fail("nobody has to look at the model again"))
    assert found.problem is not None and found.problem.kind == "run"


def test_a_process_that_a_check_forks_ends_there():
    def forks(run):
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return right(run)

    assert scored(forks, run).problem is None


def test_ctrl_c_is_no_problem_of_the_check():
    def interrupted(run):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored(interrupted, run)


def test_ctrl_c_in_the_model_ends_the_check_also_where_the_check_swallows_it():
    def interrupted(x):
        raise KeyboardInterrupt

    def bare(run):
        with contextlib.suppress(BaseException):
            run(torch.zeros(1, 3))
        return [1.0, 0.0]

    with pytest.raises(KeyboardInterrupt):
        scored(bare, interrupted)


def test_what_a_check_prints_is_kept_and_shown_but_not_on_stdout(capsys):
    shown = io.StringIO()

    def chatty(run):
        print("fold 1")
        print(0.5, file=sys.stdout, flush=True)
        return right(run)

    found = scored(chatty, run, echo=shown)
    assert found.output == shown.getvalue() == "fold 1\n0.5\n"
    scored(chatty, run)
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == "fold 1\n0.5\n"
    said = scored(raises, run).output
    assert 'KeyError' in said and 'return {}["accuracy"]' in said and "checking.py\", line" in said and "saturate/inference" not in said
    assert len(scored(lambda run: [print("x" * 10**6), *right(run)][1:], run, echo=shown).output) <= 65536


def test_named_inputs_and_structured_answers_go_through():
    @dataclass
    class Output:
        logits: object
        loss: object = None

    def model(x, scale=1.0):
        return Output(5 * scale * x)

    found = scored(lambda run: float(run(INPUTS, scale=2.0).logits.sum()), model)
    assert found.problem is None and found.scores is not None and len(found.samples) == 60


# -- controls of the check -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("runs", "late"), [(1, True), (2, True), (3, False)])
def test_no_run_of_the_check_begins_when_no_candidate_can_any_more(runs, late):
    """Seen: the check on the model took five of six minutes, where one was given, and then the time had ended before anything was tried."""
    now, asked = [0.0], []

    def check(given):
        asked.append(1)
        now[0] += 10.0
        return right(given)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("checking", "controls"):
            patch.setattr(f"saturate.inference.{module}.time", SimpleNamespace(monotonic=lambda: now[0]))
        found = controls(check, run, Budget(0.02), 10.0 * runs - 5.0)
    assert len(asked) == runs and found.late is late and found.problem is None and found.baseline.scores is not None


def test_a_sound_check_passes_its_controls():
    found = controls(right, run, Budget(0.02))
    assert found.problem is None and found.notes == () and found.spread == 0
    assert found.noise is not None and found.noise < 0.6
    assert found.baseline.scores is not None
    timed = controls(lambda run: {"right": right(run), "seconds": random.random()}, run, Budget(0.02, metric="right"))
    assert timed.problem is None and timed.notes == (), "its other entries may be anything"
    lower = controls(loss, run, Budget(0.02, higher_is_better=False))
    assert lower.problem is None and lower.noise is not None and lower.noise > 1


@pytest.mark.parametrize("check, budget, kind, says", [
    (loss, Budget(0.02), "direction", "higher_is_better=False"),
    (lambda run: sum(loss(run)) / 60, Budget(0.02), "direction", "higher_is_better=False"),
    (right, Budget(0.02, higher_is_better=False), "direction", "higher_is_better=True"),
    (lambda run: [float(run(x) is not None) for x, _ in BATCHES], Budget(0.02), "blind", "run"),
    (lambda run: len(run(INPUTS)) / 60, Budget(0.02), "blind", "run"),
    (lambda run: [v + random.random() for v in right(run)][0], Budget(1e-9), "unstable", "seed"),
    (lambda run: right(run)[:random.randint(1, 50)], Budget(0.02), "unstable", "same samples"),
    (right, Budget(1), "budget", "unit"),
    (raises, Budget(0.02), "raised", "by itself"),
    (lambda run: run(INPUTS, INPUTS), Budget(0.02), "run", "by itself"),
])
def test_a_check_that_cannot_judge_is_refused_with_a_remedy(check, budget, kind, says):
    random.seed(1)
    found = controls(check, run, budget)
    assert found.problem is not None and found.problem.kind == kind, found.problem
    assert says in found.problem.remedy


def test_a_random_model_or_check_is_known_by_its_spread():
    def dropout(x):
        return torch.nn.functional.dropout(5 * x, 0.3)

    torch.manual_seed(0)
    found = controls(loss, dropout, Budget(3.0, higher_is_better=False))
    assert found.problem is None and found.spread is not None and found.spread > 0
    assert any("the model gives other answers each time" in note for note in found.notes)
    hidden = controls(lambda run: [float(len(run(x)) == 16 and x.sum() < 99) for x, _ in BATCHES], dropout, Budget(0.5))
    assert any("the scores are the same" in note for note in hidden.notes)

    def subset(run):
        chosen = random.sample(range(60), 30)
        return [float(hit) for hit in run(INPUTS[chosen]).argmax(-1) == LABELS[chosen]]

    def jittered(run):
        return [value + random.gauss(0, 1e-3) for value in right(run)]

    random.seed(2)
    weak = lambda x: 5 * x + 2 * torch.sin(40 * x.sum(-1, keepdim=True) + torch.arange(4))      # noqa: E731
    assert any("other samples each time" in note for note in controls(subset, weak, Budget(0.4)).notes)
    assert any("scores the same answers differently" in note for note in controls(jittered, run, Budget(0.1)).notes)


def test_what_a_candidate_raises_is_told_in_its_own_words():
    """A check runs in the user's process, the model in another: the class that brings its error here is nobody's business."""
    def refuses(x):
        raise WorkerFailed("failed", "RuntimeError: sizes do not fit", alive=True)

    problem = controls(right, refuses, Budget(0.02)).problem
    assert problem is not None and problem.what == "the model failed on what the check gave it: RuntimeError: sizes do not fit"


def test_a_check_of_texts_or_counts_beside_the_tensors_is_not_called_blind():
    """Noise takes the place of tensors' values: labels that a model gives as text, and how many boxes it finds, stay as they are."""
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    pieces = list(zip(INPUTS[order].split(16), LABELS[order].split(16)))

    def labelled(x):
        return {"scores": run(x), "labels": [str(int(row.argmax())) for row in run(x)]}

    def boxes(x):
        return run(x)[: 3 + int(100 * x[:, 0].sum()) % 5]

    def of_text(call):
        return [float(label == str(int(target))) for x, y in pieces for label, target in zip(call(x)["labels"], y)]

    def of_counts(call):
        return [float(len(call(x))) for x, _ in pieces]

    for check, model in ((of_text, labelled), (of_counts, boxes)):
        found = controls(check, model, Budget(0.02, higher_is_better=True))
        assert found.problem is None and any("is not known" in note for note in found.notes), found
    constant = controls(lambda call: [float(call(x)["kind"] == "a") for x, _ in BATCHES], lambda x: {"y": run(x), "kind": "a"}, Budget(0.02))
    assert constant.problem is not None and constant.problem.kind == "blind"


def test_a_check_that_shuffles_is_told_what_that_costs():
    def shuffled(run):
        order = random.sample(range(60), 60)
        return torch.nn.functional.cross_entropy(run(INPUTS[order]), LABELS[order], reduction="none").tolist()

    found = controls(shuffled, run, Budget(0.1, higher_is_better=False))
    assert found.problem is None and any("in another order each time" in note for note in found.notes)
    assert found.shuffled and not controls(right, run, Budget(0.1)).shuffled


def test_a_check_that_shuffles_is_seen_where_the_model_scores_all_alike():
    """As where the score is agreement with the model itself: then its samples cannot be told by their scores."""
    own = {tuple(x.tolist()): run(x[None]).argmax(1) for x in INPUTS}

    def agreement(run, order):
        return [bool(run(INPUTS[index:index + 1]).argmax(1) == own[tuple(INPUTS[index].tolist())]) for index in order]

    found = controls(lambda run: agreement(run, random.sample(range(60), 60)), run, Budget(0.1))
    assert found.problem is None and found.baseline.scores.mean == 1 and found.shuffled and any("another order" in note for note in found.notes)
    assert not controls(lambda run: agreement(run, range(60)), run, Budget(0.1)).shuffled


def test_a_check_that_draws_its_samples_anew_certifies_nothing():
    """It was split by place: samples that had chosen confirmed as well."""
    draw = random.Random(0)

    def subset(run):
        chosen = draw.sample(range(60), 40)
        return [float(hit) for hit in run(INPUTS[chosen]).argmax(-1) == LABELS[chosen]]

    weak = lambda x: 5 * x + 2 * torch.sin(40 * x.sum(-1, keepdim=True) + torch.arange(4))      # noqa: E731
    for model, alike in ((weak, False), (run, True)):
        found = controls(subset, model, Budget(0.4))
        assert found.problem is None and (len(set(found.baseline.scores.values)) == 1) == alike
        jury, notes = Jury.of(found, Budget(0.4))
        assert jury.halves is None and any("fix the seed" in note for note in notes)
        for turn in (None, 0):
            judged = jury.judge(found.baseline.scores, turn)
            assert judged.verdict == "undecided" and "other inputs each time" in judged.reason


def test_inputs_that_differ_in_their_last_bits_are_no_other_samples():
    tries = itertools.count()

    def computed(run):
        return (-torch.nn.functional.cross_entropy(run(INPUTS * (1 + 2e-7 * next(tries))), LABELS, reduction="none")).tolist()

    found = controls(computed, run, Budget(0.4))
    assert found.problem is None and not found.redrawn and Jury.of(found, Budget(0.4))[0].halves is not None


@pytest.mark.parametrize("confidence", [0.95, None])
@pytest.mark.parametrize("count", [60, 40])
def test_answers_that_changed_are_not_counted_between_samples_of_different_places(count, confidence):
    """A model that was not changed failed: "20.0% of the answers changed between right and wrong"."""
    draw, budget = random.Random(0), Budget(0.4, max_flips=0.01, confidence=confidence)
    weak = lambda x: 5 * x + 2 * torch.sin(40 * x.sum(-1, keepdim=True) + torch.arange(4))      # noqa: E731

    def check(run):
        chosen = draw.sample(range(60), count)
        return [float(hit) for hit in run(INPUTS[chosen]).argmax(-1) == LABELS[chosen]]

    found = controls(check, weak, budget)
    assert found.problem is None and (found.shuffled, found.redrawn) == (count == 60, count < 60)
    jury, _ = Jury.of(found, budget)
    for turn in (None, 0):
        judged = jury.judge(scored(check, weak).scores, turn)
        assert (judged.verdict, judged.flip_rate) == ("undecided", None) and "sample by sample" in judged.reason
    worse = jury.judge(read([0.0] * count))
    assert (worse.verdict, worse.flip_rate) == ("fail", None) and "changed" not in worse.reason


def test_a_check_at_chance_is_said_to_see_little():
    generator = torch.Generator().manual_seed(0)

    def untrained(x):
        return torch.randn(x.shape, generator=generator.manual_seed(int(x.sum() * 100)))

    found = controls(right, untrained, Budget(0.02))
    assert found.problem is None
    assert any("hardly" in note for note in found.notes)


def test_what_refuses_noise_does_look_at_the_answers():
    def strict(run):
        answer = run(INPUTS)
        assert torch.allclose(answer, 5 * INPUTS), "not the answer"
        return answer.argmax(-1) == LABELS

    found = controls(strict, run, Budget(0.02))
    assert found.problem is None and any("does look at the answers" in note for note in found.notes)


def test_of_answers_that_are_no_tensors_no_noise_is_made():
    """Of generated tokens, say: "one number only" was said of them."""
    found = controls(lambda run: [float(row[0] > 0) for row in run([[0], [1]] * 20)], lambda prompts: prompts, Budget(0.02))
    assert found.problem is None and len(found.notes) == 1 and "no noise can be made" in found.notes[0]


@pytest.mark.parametrize(("inputs", "count"), [(([[1, 2], [3]],), 2), (([1, 2],), 1), (([[1, 2], [3]], 4), 1), (([[1, 2], "ab"],), 1), (([],), 1), (([[]],), 1)])
def test_each_prompt_is_a_sample(inputs, count):
    assert len(samples.names(inputs)) == count
    if count == 2:
        assert {*samples.names(inputs)} == {*samples.names(([[3], [1, 2]],))} and samples.names(inputs)[0] == samples.names(([1, 2],))[0]


def test_constant_answers_say_nothing_about_the_check():
    found = controls(right, lambda x: torch.zeros(len(x), 4), Budget(0.02))
    assert found.problem is None and any("one number only" in note for note in found.notes)


def test_noise_leaves_the_models_answers_and_the_users_random_numbers_alone():
    kept = {}

    def model(x):
        answer = 5 * x
        kept[len(kept)] = (answer, answer.clone())
        return {"logits": answer, "ids": answer.argmax(-1)}

    torch.manual_seed(7)
    before = torch.get_rng_state()
    found = controls(lambda run: [float(h) for x, y in BATCHES for h in run(x)["ids"] == y], model, Budget(0.02))
    assert found.problem is None and found.noise is not None and found.noise < 0.6
    assert all(torch.equal(answer, copy) for answer, copy in kept.values())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("room_bytes", "times"), [(2**28, 2), (0, 3)])
def test_what_noise_is_put_into_the_model_need_not_answer_again(monkeypatch, room_bytes, times):
    """The check took 254 s of the six minutes of a BERT-base, a third of it to compute what noise was written over."""
    monkeypatch.setattr("saturate.inference.controls._KEPT_BYTES", room_bytes)
    answered = []

    def check(run):
        scores = []
        for x, y in BATCHES:
            answer = run(x)
            scores += [float(hit) for hit in answer.argmax(-1) == y]
            answer.zero_()          # its own, and no longer what the model said
        return scores

    found = controls(check, lambda x: answered.append(1) or run(x), Budget(0.02))
    assert found.problem is None and found.notes == () and found.noise is not None and found.noise < 0.6
    assert len(answered) == times * len(BATCHES)


def test_one_sample_per_call_and_scalar_answers_have_noise_too():
    def each(run):
        return [-abs(float(run(x[None])) - float(x @ weights)) for x in INPUTS]

    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = controls(each, lambda x: (x @ weights).sum(), Budget(0.05))
    assert found.problem is None and found.noise is not None and found.noise < -0.05


# -- samples -------------------------------------------------------------------------------------------------------


def test_calibration_that_is_scored_is_found_in_any_batch_and_order():
    used = scored(right, run).samples
    assert samples.overlap([(INPUTS[5:8],), (INPUTS[torch.tensor([59, 0])],)], used) == samples.Overlap(5, 5, 5, 60)
    fresh = [(INPUTS + 9,)]
    assert samples.overlap(fresh, used) == samples.Overlap(0, 60, 0, 60) and not samples.overlap(fresh, used).refused
    some = samples.overlap([(INPUTS[:3],), (INPUTS + 9,)], used)
    assert some.refused and "3 of 63" in some.words()
    assert not samples.Overlap(1, 500).refused         # what a data set repeats by itself
    assert not samples.Overlap(0, 0).refused


def seen(*calls):
    found = samples.Seen()
    for inputs in calls:
        found.add(inputs)
    return found


def test_a_check_that_is_all_among_many_is_found_too():
    """A training set is large: one percent of it may be all that the check scores."""
    many = torch.randn(8000, 16)
    found = samples.overlap([(batch,) for batch in many.split(64)], seen((many[4000:4040],)))
    assert (found.shared, found.found, found.check) == (40, 40, 40) and found.refused
    assert "40 of 40 samples that the check scores are among the training samples" in found.words("training")
    assert not samples.overlap([(batch,) for batch in many.split(64)], seen((torch.randn(400, 16),), (many[:4],))).refused


def padded(seed):
    """(time, sample, feature), zero at the end of time."""
    x = torch.randn(20, 8, 16, generator=torch.Generator().manual_seed(seed))
    x[15:] = 0
    return (x,)


def drawn(seed, *shape):
    return torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(seed))


IDS = torch.randint(5, 900, (16, 24), generator=torch.Generator().manual_seed(1))
MASK, TYPES, POSITIONS = torch.ones_like(IDS), torch.zeros_like(IDS), torch.arange(24).repeat(16, 1)
TABLE = torch.randn(500, 8, generator=torch.Generator().manual_seed(2))
IMAGES, NOISE = torch.randn(2, 16, 3, 8, 8, generator=torch.Generator().manual_seed(1))
SEQUENCES = torch.randn(20, 16, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("calibration, check", [
    ([padded(1), padded(2)], [padded(3), padded(4)]),
    ([tuple(x + 1 for x in padded(1))], [tuple(x + 1 for x in padded(2))]),             # padded with another number
    ([tuple(x[:, :1] for x in padded(1))], [tuple(x[:, :1] for x in padded(2))]),       # one sample
    ([(drawn(1, 64, 1),)], [(drawn(2, 64, 1),)]),                                       # categories repeat by nature
    ([(drawn(1, 64, 3),)], [(drawn(2, 64, 3),)]),
    ([(drawn(seed, 16, 4),) for seed in range(9)], [(drawn(seed, 16, 4),) for seed in range(10, 19)]),
    ([(IMAGES, torch.ones(16, 32))], [(NOISE, torch.ones(16, 32))]),                    # a mask is no sample
    ([(IDS, POSITIONS)], [(IDS + 1, POSITIONS)]),                                       # nor are the places of a text
    ([(IMAGES[:4], TABLE), (IMAGES[4:8], TABLE)], [(NOISE[:4], TABLE), (NOISE[4:8], TABLE)]),    # nor what goes into every call
], ids=lambda calls: f"{len(calls)} calls")
def test_values_that_repeat_by_nature_are_no_overlap(calibration, check):
    assert not samples.overlap(calibration, seen(*check)).refused


@pytest.mark.parametrize("calibration, check", [
    ([(SEQUENCES,)], [(SEQUENCES[:, torch.randperm(16)],)]),                            # sequences first, in another order
    ([(IMAGES,)], [(image,) for image in IMAGES]),                                      # asked for without a batch
    ([(image,) for image in IMAGES], [(IMAGES,)]),
    ([(IMAGES, NOISE)], [(IMAGES, NOISE + 1)]),                                         # beside noise that is drawn anew
    ([(IMAGES,)] * 8, [(IMAGES[:7],), (IMAGES[7:],)]),                                  # the same batch again is no repetition
    ([(drawn(1, 64, 12),)], [(drawn(1, 64, 12),)]),
    ([(IDS, TYPES, MASK)], [(IDS, MASK, TYPES)]),                                       # given by keyword, in another order
    ([(IDS, MASK)], [(IDS,)]),                                                          # a mask left out
    ([(POSITIONS, IDS)], [(IDS,)]),
], ids=lambda calls: f"{len(calls)} calls")
def test_the_same_samples_are_found_however_they_are_asked_for(calibration, check):
    assert samples.overlap(calibration, seen(*check)).refused


def passes(data, count, seed, batch=10):
    """The batches of several epochs, each in an order of its own; the last one may end early."""
    rng = random.Random(seed)
    order = [index for _ in range(math.ceil(count)) for index in rng.sample(range(len(data)), len(data))][:int(count * len(data))]
    return [(data[order[start:start + batch]],) for start in range(0, len(order), batch)]


@pytest.mark.parametrize("times", [1, 1.5, 2, 2.5, 3, 5])
@pytest.mark.parametrize("check_times", [1, 1.5, 2, 3])
def test_data_that_is_gone_through_several_times_is_found_too(times, check_times):
    """What repeats was taken for values that repeat by nature, so that the very data of the check was let through."""
    data = torch.randn(200, 8, generator=torch.Generator().manual_seed(3))
    assert samples.overlap(passes(data, times, 1), seen(*passes(data, check_times, 2))).refused
    assert samples.overlap(passes(torch.cat([data[:20], data[:180] + 9]), times, 1), seen(*passes(data, check_times, 2))).refused
    assert not samples.overlap(passes(data + 9, times, 1), seen(*passes(data, check_times, 2))).refused


@pytest.mark.parametrize("kinds", [1, 3, 4])
@pytest.mark.parametrize("times", [1, 2])
def test_values_that_repeat_by_nature_are_no_overlap_however_often_they_are_gone_through(kinds, times):
    for seed in range(20):
        mine, theirs = drawn(2 * seed, 200, kinds).float(), drawn(2 * seed + 1, 200, kinds).float()
        assert not samples.overlap(passes(mine, times, seed), seen(*passes(theirs, times, seed + 1))).refused


def test_padding_does_not_hide_a_sample():
    ids = torch.tensor([[5, 6, 7, 0, 0, 0], [5, 6, 8, 9, 0, 0]])
    mask = (ids > 0).long()
    alone = samples.names((ids[:1, :3], mask[:1, :3]))[0]
    padded, other = samples.names((ids, mask))
    assert set(alone) & set(padded) and not set(alone) & set(other)
    left = samples.names((ids.flip(1), mask.flip(1)))[0]
    assert set(left) & set(samples.names((ids[:1, :3].flip(1), mask[:1, :3].flip(1)))[0])
    same = samples.names((torch.zeros(2, 4, dtype=torch.long),))
    assert same[0] == same[1] and len(same[0]) == 1


@pytest.mark.parametrize("inputs, count", [
    ((torch.zeros(3, 2), torch.zeros(3)), 3),                       # the label-like one belongs to its row
    ((torch.zeros(5, 2), torch.zeros(2, 9, dtype=torch.long)), 2),  # the largest says what a row is
    ((torch.arange(7),), 1),                                        # no batch: its numbers are no samples
    ((torch.arange(7), torch.arange(7)), 7),
    ((torch.tensor(1.0),), 1),
    ((["a text", "another"],), 2),
    (({"ids": torch.zeros(4, 2), "names": ["x"]},), 4),
    ((torch.zeros(0, 2),), 0),
    ((torch.zeros(2, 3, dtype=torch.bfloat16),), 2),
    ((torch.eye(3).to_sparse(),), 3),
    ((torch.zeros(2, 3, dtype=torch.complex64).conj(),), 2),
    ((3, None), 1),
])
def test_samples_of_any_inputs(inputs, count):
    assert len(samples.names(inputs)) == count


def test_arrays_and_named_tuples_are_samples_too():
    numpy = pytest.importorskip("numpy", reason="arrays need numpy")
    Pair = collections.namedtuple("Pair", "ids other")
    array = numpy.arange(6).reshape(3, 2)
    assert samples.names((array,)) == samples.names((torch.from_numpy(array),))
    assert len(samples.names((Pair(array, None),))) == 3
    assert samples.names((torch.zeros(1, 2),)) != samples.names((torch.ones(1, 2),))
    one, other = samples.names((torch.zeros(2, 4), torch.tensor([1.0, 2.0])))       # a sample is all of its inputs
    assert one != other


def test_a_check_whose_data_can_be_read_once_is_told_so():
    calls = iter([right])
    found = controls(lambda given: [one for ask in calls for one in ask(given)], run, Budget(0.02))
    assert "called a second time" in found.problem.what and "iterator" in found.problem.remedy
