"""What a training that was killed and started again did, told from its updates alone."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from saturate.verify.resume import OTHER_DATA, OUTCOMES, Killed, compare, deviation, identity
from saturate.verify.resume_log import Log, Save, Step, Update, merged, saves, step_of, updates

EPOCH = 8       # updates in an epoch of 32 samples, 4 in each


def training(length: int = 40, seed: int = 0, size: int = 4, order: int | None = None) -> list[Update]:
    """Epochs in an order of their own (or all in that of number `order`), a loss that falls, parameters that move."""
    found = []
    for k in range(length):
        shuffled = random.Random(1000 * seed + (k // EPOCH if order is None else order)).sample(range(EPOCH * size), EPOCH * size)
        first = k % EPOCH * size
        indices = tuple(shuffled[first: first + size])
        found.append(Update(
            losses=(5.0 / (1 + k) + 0.01 * indices[0],), indices=indices, rows=tuple(100 + index for index in indices),
            given=(f"g{indices}",), begins=k % EPOCH == 0, before=f"w{k}", after=f"w{k + 1}", rates=(0.1 * 0.9**k,), counter=k + 1))
    return found


def killed(at: int, *saved: int, of: list[Update] | None = None) -> Killed:
    run = of or training()
    weights = {one.before: (k,) for k, one in enumerate(run[: at + 1])}
    return Killed(at, weights, tuple(saved))   # type: ignore[arg-type]


def resumed(at: int, data_at: int | None = None, length: int = 16, **changes: object) -> list[Update]:
    """A process with the parameters of position `at` and the data from `data_at` on."""
    run, data = training(60), training(60)
    data_at = at if data_at is None else data_at
    found = []
    for k in range(length):
        here, there = run[at + k], data[data_at + k]
        same = at == data_at
        found.append(replace(here, indices=there.indices, rows=there.rows, given=there.given, begins=there.begins or k == 0,
                             before=f"w{at}" if k == 0 else here.before if same else f"v{at + k}",
                             losses=here.losses if same else (here.losses[0] * 1.1 + 0.01 * there.indices[0],), **changes))
    return found


def outcome(found: list[Update], left: Killed, read: bool = True, reference: list[Update] | None = None, noise: float = 0.0) -> tuple[str, str]:
    result = compare(reference or training(), found, left, read, noise)
    assert result.outcome in OUTCOMES and result.reason
    return result.outcome, result.reason


def test_an_exact_resume() -> None:
    result = compare(training(), resumed(12), killed(17, 6, 12), True)
    assert (result.outcome, result.resumed_at, result.compared) == ("resumes_exactly", 12, 16) and "later checkpoint" not in result.reason
    assert compare(training(), resumed(0), killed(5, 0), True).outcome == "resumes_exactly", "from a checkpoint of the very beginning"
    assert compare(training(), resumed(30), killed(33, 30), True).compared == 10, "to the end of the uninterrupted run"


def test_losses_may_deviate_by_rounding_or_by_what_two_runs_deviate() -> None:
    near = [replace(one, losses=(one.losses[0] * (1 + 2e-7),)) for one in resumed(12)]
    assert outcome(near, killed(17, 12))[0] == "resumes_exactly"
    far = [replace(one, losses=(one.losses[0] * (1 + 2e-3),)) for one in resumed(12)]
    assert outcome(far, killed(17, 12))[0] == "state_not_restored"
    assert outcome(far, killed(17, 12), noise=1e-3)[0] == "resumes_exactly"


def test_one_other_loss_is_enough() -> None:
    assert outcome([replace(one, losses=()) for one in resumed(12)], killed(17, 12))[0] == "state_not_restored", "nor does it have none"
    found = resumed(12)
    found[9] = replace(found[9], losses=(math.nan,))
    kind, reason = outcome(found, killed(17, 12))
    assert kind == "state_not_restored" and "update 22 has loss nan" in reason and "optimizer" in reason
    found = [replace(one, losses=(one.losses[0] + 1.0,)) for one in resumed(12)]
    assert "dropout" in outcome(found, killed(17, 12))[1]


def test_what_the_optimizer_shows_is_said() -> None:
    found = [replace(one, losses=(one.losses[0] + 0.1 * k,), counter=k + 1) for k, one in enumerate(resumed(12))]
    kind, reason = outcome(found, killed(17, 12))
    assert kind == "state_not_restored" and "counts 1 steps instead of 13" in reason and "learning rate" not in reason
    found = [replace(one, losses=(one.losses[0] + 0.1 * k,), rates=(0.1,)) for k, one in enumerate(resumed(12))]
    assert "learning rate is 0.1 instead of 0.028243" in outcome(found, killed(17, 12))[1]


def test_a_loader_that_began_anew() -> None:
    """In the order of its epoch, in that of the first one, and in one that was never seen."""
    kind, reason = outcome(resumed(12, 8), killed(17, 12))
    assert kind == "repeats_data" and "16 of the 16" in reason and "from those of update 9 on: the loader began anew" in reason
    assert outcome(resumed(12, 0), killed(17, 12))[0] == "repeats_data"
    new = [replace(one, indices=other.indices, rows=other.rows, given=other.given, begins=k % 8 == 0)
           for k, (one, other) in enumerate(zip(resumed(12), training(seed=5)))]
    kind, reason = outcome(new, killed(17, 12))
    assert kind == "repeats_data" and "from those" not in reason
    assert outcome(resumed(12, 11), killed(17, 12))[0] == "repeats_data", "one batch only"


@pytest.mark.parametrize("at", [12, 14])
def test_without_shuffling_a_restart_is_not_taken_for_the_next_epoch(at: int) -> None:
    """All epochs have the same order, so the data of the restarted one are those of the next one too, which may be nearer."""
    same = training(order=0)
    restarted = [replace(one, indices=there.indices, rows=there.rows, given=there.given, begins=k % 8 == 0, losses=(9.0 - k,))
                 for k, (one, there) in enumerate(zip(resumed(at), same))]
    assert outcome(restarted, killed(17, at), reference=same)[0] == "repeats_data"


def test_data_that_are_left_out() -> None:
    kind, reason = outcome(resumed(12, 13), killed(17, 12))
    assert kind == "skips_data" and "data of 1 updates are left out" in reason
    assert outcome(resumed(12, 17), killed(17, 12))[0] == "skips_data", "from where it was killed"
    assert outcome(resumed(12, 16), killed(17, 12))[0] == "skips_data", "from the next epoch"
    assert outcome(resumed(8, 16), killed(17, 8))[0] == "skips_data", "a whole epoch"


def rest(at: int, updates: int) -> list[Update]:
    """Of the epoch of position `at`, what had not been used, in another order: so many updates."""
    unused = sorted({index for one in training()[at: at // EPOCH * EPOCH + EPOCH] for index in one.indices})
    of_each = [tuple(unused[k::4]) for k in range(updates)]
    return [replace(one, indices=indices, rows=tuple(100 + index for index in indices), given=(f"n{k}",), begins=k == 0, before=f"w{at}" if k == 0 else f"v{k}")
            for k, (one, indices) in enumerate(zip(resumed(at), of_each))]


@pytest.mark.parametrize(("length", "at"), [(40, 12), (EPOCH, 4)], ids=["several epochs", "one"])
@pytest.mark.parametrize(("updates", "kind"), [(1, "skips_data"), (2, "resumes_reordered")])
def test_the_rest_of_an_epoch_that_never_comes(updates: int, kind: str, length: int, at: int) -> None:
    """Two batches may be what a loader drops at its end."""
    following = [replace(one, begins=k == 0) for k, one in enumerate(training(seed=9)[:8])]
    found, reason = outcome([*rest(at, updates), *following], killed(at + 3, at), reference=training(length))
    assert found == kind and reason.startswith("12 of the 32 samples of the epoch never came") is (kind == "skips_data")


def test_an_epoch_that_is_complete_but_shuffled_anew() -> None:
    anew = [replace(one, indices=other.indices, rows=other.rows, given=other.given)
            for one, other in zip(resumed(8), training(seed=5))]
    kind, reason = outcome(anew, killed(13, 8))
    assert kind == "resumes_reordered" and "(a new one)" in reason
    assert "seeds itself anew" in outcome(resumed(16, 0), killed(21, 16))[1]
    lost = [replace(one, counter=k + 1) for k, one in enumerate(anew)]
    kind, reason = outcome(lost, killed(13, 8))
    assert kind == "state_not_restored" and "counts 1 steps" in reason


def test_an_epoch_whose_end_nobody_saw_may_have_begun_anew() -> None:
    """Of 3,668 samples, 272 were seen: that none of 48 came again by then says nothing."""
    def long(seed: int) -> list[Update]:
        order = random.Random(seed).sample(range(4000), 4000)
        return [replace(one, indices=tuple(order[4 * k: 4 * k + 4]), rows=tuple(order[4 * k: 4 * k + 4]), begins=k == 0, losses=(5.0 - 0.01 * k,))
                for k, one in enumerate(training())]

    run, used = long(0), {index for one in long(0)[:12] for index in one.indices}
    fresh = [one for one in long(1) if not used & set(one.indices)]
    other = [replace(one, indices=there.indices, rows=there.rows, given=there.given, begins=k == 0, before="w12" if k == 0 else f"v{k}")
             for k, (one, there) in enumerate(zip(run[12:28], fresh))]
    kind, reason = outcome(other, killed(17, 12, of=run), reference=run)
    assert kind == "inconclusive" and "too few updates" in reason
    assert outcome(rest(12, 4), killed(17, 12))[0] == "resumes_reordered", "its end was seen, and the rest came"
    assert outcome(rest(12, 1), killed(17, 12))[0] == "inconclusive", "of four samples, an epoch that began anew repeats two on average, and often none"


def test_samples_drawn_with_replacement_have_no_epochs() -> None:
    """Some came again, as they do without a kill: "repeats_data"."""
    def drawn(run: list[Update], seed: int, **changes: object) -> list[Update]:
        draw = random.Random(seed)
        samples = [tuple(draw.choices(range(EPOCH * 4), k=4)) for _ in run]
        return [replace(one, indices=these, rows=tuple(100 + index for index in these), given=(f"g{these}",), **changes)
                for one, these in zip(run, samples)]

    assert outcome(drawn(resumed(12), 1), killed(17, 12), reference=drawn(training(), 0)) == ("inconclusive", OTHER_DATA)
    kind, reason = outcome(drawn(resumed(12), 1, counter=1), killed(17, 12), reference=drawn(training(), 0))
    assert kind == "state_not_restored" and "counts 1 steps instead of 13" in reason, "that is certain all the same"


def test_the_order_of_the_next_epoch() -> None:
    """The epoch is finished as it should; what shuffles the next one was not restored."""
    other = training(seed=5)
    found = [one if k < 4 else replace(one, indices=other[k].indices, rows=other[k].rows, given=other[k].given, losses=(3.0 - k / 10,))
             for k, one in enumerate(resumed(12))]
    kind, reason = outcome(found, killed(17, 12))
    assert kind == "resumes_reordered" and "for 4 updates" in reason
    kind, reason = outcome([replace(one, losses=(one.losses[0] + 1.0,)) for one in found], killed(17, 12))
    assert kind == "state_not_restored" and "losses" not in reason, "they were others from the first update on"


def test_other_data_in_the_middle_of_an_epoch() -> None:
    other = training(seed=5)
    found = [one if k < 3 else replace(one, indices=other[k].indices, rows=other[k].rows, given=other[k].given)
             for k, one in enumerate(resumed(8))]
    kind, reason = outcome(found, killed(17, 8))
    assert kind == "state_not_restored" and "for 3 updates, then others" in reason


def test_starting_over() -> None:
    fresh = training(16)
    assert outcome(fresh, killed(17, 12), read=False) == (
        "starts_over", "its parameters are those of the very beginning, and it opened no file that the killed run had written")
    assert outcome(fresh, killed(17, 12), read=True)[0] == "starts_over"
    warm_up = killed(17, 12)
    still = replace(warm_up, weights=dict(warm_up.weights) | {"w0": (0, 1)})        # the learning rate of the first update is zero
    assert outcome(fresh, still)[0] == "starts_over", "after the first update, nothing had been saved"
    every = replace(still, saved=tuple(range(1, 18)))
    assert outcome(fresh, every, read=False)[0] == "starts_over", "nor does it load what was saved there"
    assert outcome(resumed(1), replace(every, weights=dict(still.weights) | {"w1": (0, 1)}))[0] == "resumes_exactly"
    other = [replace(one, before=f"x{k}") for k, one in enumerate(training(16, seed=7))]
    assert outcome(other, killed(17, 12), read=False)[0] == "starts_over", "with other initial parameters"
    kind, reason = outcome(other, killed(17, 12), read=True)
    assert kind == "state_not_restored" and "never had" in reason


def test_an_older_checkpoint_is_told_of() -> None:
    result = compare(training(), resumed(6), killed(17, 6, 12), True)
    assert result.outcome == "resumes_exactly" and result.resumed_at == 6 and "did not use the later checkpoint of update 12" in result.reason


def test_samples_of_random_content_are_told_apart_by_index() -> None:
    noisy = [replace(one, rows=tuple(row + 1000 * (k + 1) for row in one.rows), given=(f"n{k}",)) for k, one in enumerate(resumed(12))]
    kind, reason = outcome(noisy, killed(17, 12))
    assert kind == "state_not_restored" and "another content" in reason
    restarted = [replace(one, rows=tuple(row + 1000 * (k + 1) for row in one.rows), given=(f"n{k}",)) for k, one in enumerate(resumed(12, 8))]
    assert outcome(restarted, killed(17, 12))[0] == "repeats_data"


def test_a_dataset_cut_for_the_resume_is_told_by_its_content() -> None:
    """`dataset.select(range(n, ...))`: index 0 is another sample then."""
    cut = [replace(one, indices=tuple(range(4 * k, 4 * k + 4))) for k, one in enumerate(resumed(12))]
    assert outcome(cut, killed(17, 12))[0] == "resumes_exactly"


def test_streams_and_models_alone() -> None:
    def without(run: list[Update], **gone: object) -> list[Update]:
        return [replace(one, **gone) for one in run]

    stream, alone = {"indices": ()}, {"indices": (), "rows": (), "begins": False}
    for gone in (stream, alone):
        reference = without(training(), **gone)
        assert outcome(without(resumed(12), **gone), killed(17, 12), reference=reference)[0] == "resumes_exactly"
        assert outcome(without(resumed(12, 0), **gone), killed(17, 12), reference=reference)[0] == "repeats_data"
    nothing = {**alone, "given": ()}
    reference = without(training(), **nothing)
    assert outcome(without(resumed(12), **nothing), killed(17, 12), reference=reference)[0] == "resumes_exactly"
    kind, reason = outcome(without(resumed(12, 8), **nothing), killed(17, 12), reference=reference)
    assert kind == "inconclusive" and "could not be seen" in reason


def test_parameters_that_cannot_be_seen() -> None:
    blind = [replace(one, before=None, after=None) for one in training()]
    found = [replace(one, before=None, after=None) for one in resumed(12)]
    result = compare(blind, found, killed(17, 12), True)
    assert (result.outcome, result.resumed_at) == ("resumes_exactly", 12)
    assert compare(blind, blind[:10], killed(17, 12), True).outcome == "starts_over"
    assert compare(blind, [replace(one, losses=(9.0,)) for one in found], killed(17, 12), True).outcome == "state_not_restored"
    flat = [replace(one, before=None, after=None, losses=(1.0,)) for one in training(order=0)]
    result = compare(flat, flat[12:28], killed(17, 6, 12), True)
    assert (result.outcome, result.resumed_at) == ("resumes_exactly", 12), "of places that look alike, one that was saved"


def test_parameters_alone() -> None:
    """Neither losses (of gradients that a script makes by itself) nor data: nothing that is compared could differ."""
    nothing = {"losses": (), "indices": (), "rows": (), "given": (), "begins": False}
    reference, found = ([replace(one, **nothing) for one in run] for run in (training(), resumed(12)))
    kind, reason = outcome(found, killed(17, 12), reference=reference)
    assert kind == "resumes_exactly" and "same parameters" in reason
    found[5] = replace(found[5], after="another")
    kind, reason = outcome(found, killed(17, 12), reference=reference)
    assert kind == "inconclusive" and "neither its losses nor its data" in reason
    blind = [replace(one, after=None) for one in found]
    assert outcome(blind, killed(17, 12), reference=reference)[0] == "inconclusive"


def test_a_loss_that_says_nothing_is_admitted() -> None:
    flat = [replace(one, losses=(0.0,)) for one in training()]
    kind, reason = outcome([replace(one, losses=(0.0,)) for one in resumed(12)], killed(17, 12), reference=flat)
    assert kind == "resumes_exactly" and "says nothing" in reason


def test_parameters_that_do_not_move_are_looked_for_at_the_checkpoint() -> None:
    still = [replace(one, before="w", after="w") for one in training()]
    found = [replace(one, before="w", after="w") for one in resumed(12)]
    left = Killed(17, {"w": tuple(range(18))}, (6, 12))
    assert compare(still, found, left, True).resumed_at == 12


def test_behind_the_end_of_the_uninterrupted_run() -> None:
    assert outcome(resumed(12), killed(14, 12), reference=training(12))[0] == "inconclusive"
    kind, reason = outcome(resumed(12), killed(14, 12), reference=training(14))
    assert kind == "inconclusive" and "for 2 updates" in reason, "too few to believe"
    assert outcome(resumed(12), killed(14, 12), reference=training(15))[0] == "resumes_exactly"


def test_deviation() -> None:
    assert deviation(training(), training(20)) == 0.0
    off = [replace(one, losses=(one.losses[0] * 1.001,)) for one in training(20)]
    assert deviation(training(), off) == pytest.approx(1e-3, rel=0.01)
    assert deviation(training(), training(20, seed=3)) is None
    for other in ({"rows": (1,)}, {"given": ("x",)}, {"losses": (1.0, 1.0)}):
        assert deviation(training(), [replace(one, **other) for one in training(20)]) is None, "their data differ"


# -- reading what a process wrote down ---------------------------------------------------------------------------------


def event(at: str, **more: object) -> dict:
    return {"at": at, "t_ns": 0, "losses": [], "inputs": [], "batches": [], "weights": "", **more}


def batch(*tensors: str, loader: int = 0, first: bool = False, indices: tuple[int, ...] = ()) -> dict:
    return {"loader": loader, "first": first, "tensors": list(tensors), "indices": list(indices), "rows": []}


def test_accumulation_and_closures() -> None:
    events = [event("B", losses=[1.0], weights="a"), event("B", losses=[2.0], weights="a"), event("S0", weights="b", rates=[0.1], counters=1)] * 2
    first, second = updates(events, Step("S0"))
    assert first.losses == (1.0, 2.0) and (first.before, first.after) == ("a", "b") and first.rates == (0.1,)
    closures = [{"at": "began", "weights": "0"}, event("S0", losses=[3.0, 2.5], weights="1"), event("S0", losses=[2.0, 1.5], weights="2")]
    assert [(one.before, one.after, one.losses) for one in updates(closures, Step("S0"))] == [("0", "1", (3.0, 2.5)), ("1", "2", (2.0, 1.5))]
    by_hand = [event("B", losses=[1.0], weights=str(k)) for k in range(4)]
    assert [one.before for one in updates(by_hand, Step("B"))] == ["0", "1", "2", "3"]
    assert len(updates(by_hand, Step("B", 2))) == 2 and updates(by_hand[:1], Step("B", 2)) == [], "what was cut short is no update"


def test_the_batch_that_was_used_is_found_among_those_that_were_fetched() -> None:
    """A library is one batch ahead, an evaluation reads another loader, a resumed loop discards what it skips."""
    ahead = [event("S0", inputs=[["x0"]], batches=[batch("x0", "y0", first=True, indices=(0,)), batch("x1", "y1", indices=(1,))]),
             event("S0", inputs=[["x1"]], batches=[batch("e0", loader=1, first=True, indices=(7,))]),
             event("S0", inputs=[["x9"]], batches=[batch(f"x{k}", first=k == 2, indices=(k,)) for k in range(2, 10)])]
    found = updates(ahead, Step("S0"))
    assert [one.indices for one in found] == [(0,), (1,), (9,)]
    assert [one.begins for one in found] == [True, False, True]
    again = [event("S0", inputs=[["x"]], batches=[batch("x", loader=1, indices=(0,)), batch("x", indices=(5,))])]
    assert updates(again, Step("S0"))[0].indices == (5,), "the newest of the same content"
    changed = [event("S0", inputs=[["z"]], batches=[batch("x0", indices=(0,)), ])]
    assert updates(changed, Step("S0"))[0].indices == (0,), "changed on its way to the model: what was fetched for it"


def test_a_loader_that_is_built_anew_for_every_epoch_feeds_the_model_too() -> None:
    """Over a `Subset` of what is left of the epoch, say; and the script changes batches on their way to the model."""
    epochs = [event("S0", inputs=[["z"]], batches=[batch("x", loader=k // 2, first=k % 2 == 0, indices=(k,))]) for k in range(4)]
    found = updates(epochs, Step("S0"))
    assert [(one.indices, one.begins) for one in found] == [((0,), True), ((1,), False), ((2,), True), ((3,), False)]


def test_a_growing_file_and_its_saves() -> None:
    lines = [{"at": "start", "rank": 1, "world_size": 2}, event("S0"), {"at": "step", "token": "S0", "count": 1}, event("S0"),
             {"at": "save", "path": "/a"}, {"at": "save", "path": "/b"}, event("S0"), {"at": "save", "path": "/a"}, {"at": "held"}]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines) + b'{"at": "S0", "lo'
    log = Log()
    for k in range(0, len(data), 7):
        log.feed(data[k: k + 7])
    assert (log.rank, log.held, log.step, log.saves, log.updates(log.step)) == (1, True, Step("S0"), [2, 3], 3)
    assert len(log.events) == len(lines)
    assert saves(log.events, Step("S0")) == [Save(2, ("/a", "/b")), Save(3, ("/a",))]
    pairs = Step("S0", 2)
    assert log.updates(pairs) == 1 and saves(log.events, pairs) == [Save(1, ("/a", "/b", "/a"))]
    assert step_of(log.events) == Step("S0") and step_of([event("B"), event("B"), event("S1"), event("S0"), event("S1")]) == Step("S1")
    assert step_of([event("B")]) == Step("B") and step_of([]) is None


def test_ranks_become_one() -> None:
    one, two = training(5), [replace(update, t_ns=7) for update in training(4, seed=1)]
    both = merged([one, two])
    assert {update.t_ns for update in both} == {7}, "an update ends with the last of its ranks"
    assert len(both) == 4 and both[0].indices == (*one[0].indices, *two[0].indices) and both[0].losses == (*one[0].losses, *two[0].losses)


def test_identity_is_by_index_unless_that_is_known_to_mislead() -> None:
    reference = training(8)
    assert identity(reference, reference)(reference[0]) == reference[0].indices
    assert identity(reference, [replace(reference[3], indices=(0, 1, 2, 3))])(reference[0]) == reference[0].rows
