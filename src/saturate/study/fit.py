"""`saturate fit`, from the command to the record: the largest batch that trains within a limit of memory.

Nothing is changed: the answer is advice, and `study.fit_search` says how it is found and proved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from saturate.checkpoints import durable
from saturate.machine import gpus
from saturate.machine.commands import script_of
from saturate.measure import memory_model
from saturate.measure.memory_growth import Growth
from saturate.records import sizes
from saturate.records.command_line import joined
from saturate.records.encoding import encoded
from saturate.records.fit import Fit, LoaderBatch
from saturate.study import baseline, once
from saturate.study.fit_knob import KnobSearch, knob_value, likely_knob, with_knob
from saturate.study.fit_process import Asking, MeteredBench
from saturate.study.fit_search import MOST_TRIALS, RESERVE, Search
from saturate.study.fit_state import Refused, in_proportion, without_limit
from saturate.study.resume_option import source_of
from saturate.study.state import Request, Study
from saturate.trial.process import TrialEnded, Workload

COUNTED = {
    "cpu": "the resident memory of all processes of the command: private memory, memory they share once, mapped files once",
    "plain": "the resident memory of all processes of the command; this kernel does not tell what they share, so that counts in each",
    "cuda": "what torch's allocator reserved on the device of the neediest rank",
}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. Everything that ran was stopped; `found` holds the best so far."""

    def __init__(self, found: Fit):
        super().__init__("interrupted")
        self.found = found


@dataclass(frozen=True)
class Asked:
    """What the user asked for. `most`: no larger batch is tried."""

    request: Request
    memory_bytes: int | None = None
    target: str = "memory"
    knob: str | None = None
    most: int | None = None

    def options(self) -> list[str]:
        """What makes `fit` ask the same question again, as words of a command line; how long it may take is left out."""
        given = {
            "--memory": sizes.exact(self.memory_bytes) if self.memory_bytes is not None else None,     # a rounded one may be more
            "--target": self.target if self.target != Asked.target else None,
            "--max": str(self.most) if self.most is not None else None,
        }
        words = [word for name, value in given.items() if value is not None for word in (name, value)]
        return [*words, *([f"--knob={self.knob}"] if self.knob is not None else []), *self.request.options()]

    def command(self, *more: str) -> str:
        """The same question again, with `more` options."""
        return joined(["saturate", "fit", *self.options(), *more, "--", *self.request.argv])


def fit(asked: Asked, say: Callable[[str], None]) -> Fit:
    """Search, and write record and report into a run folder.

    Raises SaturateError; Interrupted when the user ends it (nothing is left running then).
    """
    request = asked.request
    if asked.knob is not None:
        knob_value(request.argv, asked.knob, request.cwd)        # a command that cannot be searched is refused before anything runs
    if asked.memory_bytes is None and not gpus.possible():
        raise without_limit()
    with (once.run_folder(request.directory, "fit", request.argv, str(request.cwd), asked.memory_bytes, asked.knob) as folder,
          once.study_file(folder) as store):
        return _search(asked, Study(request, folder, store, {}, say))


def _search(asked: Asked, study: Study) -> Fit:
    request = asked.request
    workload = Workload(request.argv, request.cwd, request.environment, request.timeout_s)
    bench = MeteredBench(workload, study.folder, request.directory, study.store, request.budget_s, study.say)
    bench.asking = Asking()
    bench.step = baseline.step_override(request.step)
    search = _searcher(asked, study, bench, workload)
    refusal, too_short, interrupted = "", "", False
    try:
        try:
            search.run()
        finally:
            bench.close()
            bench.close_meter()
    except Refused as refused:
        refusal = str(refused)
    except TrialEnded as ended:
        baseline.failed(study, ended.outcome)       # raises, unless it merely is too short
        too_short = study.refusal or ended.outcome.reason
    except KeyboardInterrupt:
        interrupted = True
    found = _write(study, _record(asked, study, search, refusal, too_short, interrupted))
    if interrupted:
        raise Interrupted(found)
    return found


def _searcher(asked: Asked, study: Study, bench: MeteredBench, workload: Workload) -> Search:
    request = asked.request
    common: dict[str, Any] = {
        "bench": bench, "memory_bytes": asked.memory_bytes, "target": asked.target, "asked_most": asked.most,
        "accelerated": gpus.possible(), "budget_s": request.budget_s,
        "deadline": study.started + request.budget_s, "say": study.say,
    }
    if asked.knob is None:
        return Search(**common)
    return KnobSearch(**common, knob=asked.knob, workload=workload)


# -- the record --------------------------------------------------------------------------------------------------------


def _record(asked: Asked, study: Study, search: Search, refusal: str, too_short: str, interrupted: bool) -> Fit:
    answer = None if refusal else _answer(asked, search)
    proof = search.proofs[answer] if answer is not None else None
    measured = search.likely if answer is None and not refusal else None
    growth = search.growth_of(answer or measured)
    verdict, reason = _verdict(search, answer, refusal, too_short, interrupted)
    line = _line(search)
    busy, of = search.utilisation()
    loaders = _loaders(asked, search, answer)
    tried = [one.micro_batch for one in search.tried if one.micro_batch is not None]
    found = Fit(
        command=asked.request.argv, verdict=verdict, reason=reason, target=asked.target, knob=asked.knob,      # type: ignore[arg-type]
        micro_batch=answer, measured_batch=measured, measured_steps=search.measured[measured].steps if measured else 0,
        growth_bytes_per_step=growth.step_bytes if growth else None, lasts_steps=_lasts(search, growth),
        script_batch=search.own, loaders=loaders, world_size=search.world_size,
        largest_tried=max(tried, default=None), largest_fitting=search.best if not refusal else None,
        proved_steps=proof.steps if proof else 0, proved_with=proof.seen if proof else [], not_seen=proof.not_seen if proof else [],
        peak_bytes=proof.peak_bytes if proof else None, limit_bytes=search.limit_bytes,
        margin_bytes=search.margin_bytes if search.limit_bytes else None,
        predicted_peak_bytes=proof.predicted_bytes if proof else None, counted=_counted(search), kinds=search.kinds,
        sample_bytes=line[1], fixed_bytes=line[0], trials=search.tried, trial_count=search.trials,
        throughput=search.throughput.curve(), throughput_note=search.throughput.note, knee=search.throughput.knee,
        utilisation=busy, utilisation_of=of,
        advice=[*_advice_on_growth(search, growth), *_advice_on_knee(asked, search, answer), *_advice_on_loaders(loaders), *_advice_on_dataset(search, answer),
                *_advice(search, answer)],
        notes=[note for note in (_note_on_loaders(loaders), *search.notes, search.bench.isolation) if note],
        seconds=round(time.monotonic() - study.started, 1),
        report=str(study.report_path),
    )
    late = bool(study.needs_budget) or not (too_short or interrupted or refusal) and _for_want_of_time(search)
    longer = ["--budget", f"{math.ceil(LONGER * asked.request.budget_s / 60)}m"] if late else []
    return msgspec.structs.replace(found, next_command=_next(asked, found, longer if late or interrupted else None))


def _answer(asked: Asked, search: Search) -> int | None:
    """The largest proved size; for throughput the knee, once it is proved."""
    knee = search.throughput.knee
    if asked.target == "throughput" and knee in search.proofs:
        return knee
    return search.best


def _verdict(search: Search, answer: int | None, refusal: str, too_short: str, interrupted: bool) -> tuple[str, str]:
    if refusal:
        return "refused", refusal
    if answer is not None:
        return "fits", "interrupted: the best so far" if interrupted else ""
    if search.likely is not None:
        return "inconclusive", _why_not_proved(search, too_short or ("interrupted" if interrupted else ""))
    if too_short or interrupted:
        return "inconclusive", too_short or "interrupted before a size was measured"
    sizes_failed = [one.micro_batch for one in search.tried if one.outcome in ("out_of_memory", "too_close", "allocator_retries")]
    limit = sizes.show(search.limit_bytes or search.bench.asking.limit_bytes)
    if 1 in sizes_failed:
        return "nothing_fits", f"a batch of 1 does not fit {limit}: parameters, their gradients and the optimizer's state, or the " \
                               "data that is held, need more"
    if sizes_failed and search.left_s() > 0:
        return "nothing_fits", f"no size that was tried fits {limit}"
    reasons = [one.reason for one in search.tried if one.reason]
    if not search.facts and search.tried and search.tried[-1].outcome == "out_of_time":
        return "inconclusive", "the budget ended before the first training steps, by which it is told what one is"
    return "inconclusive", reasons[-1] if reasons else "the budget ended before a size was proved"


def _why_not_proved(search: Search, ended: str) -> str:
    """What spoke against the sizes that were to be proved."""
    assert search.likely is not None
    ran = f"a batch of {search.likely} was only measured, for {search.measured[search.likely].steps} steps"
    proving = [one for one in search.tried if one.purpose == "prove"]
    passed = [str(one.micro_batch) for one in proving if one.outcome in ("out_of_memory", "too_close", "allocator_retries")]
    if ended:
        return f"{ended} before a size was proved; {ran}"
    if proving and proving[-1].outcome == "failed":
        return f"no size was proved: {proving[-1].reason}; {ran}"
    if passed and search.trials >= MOST_TRIALS:
        return f"no size was proved: {', '.join(passed)} did not stay below the limit for a proof; {ran}"
    return f"the budget ended before a size was proved; {ran}: a longer --budget may prove it"


def _lasts(search: Search, growth: Growth | None) -> int | None:
    return growth.lasts_steps(search.limit_bytes) if growth is not None and search.limit_bytes is not None else None


def _line(search: Search) -> tuple[float | None, float | None]:
    if not search.points or search.growth:      # a size that ran for longer took more: that is not what its samples take
        return None, None
    line = memory_model.line(search.points, search.idle_bytes)
    return line.fixed_bytes, line.sample_bytes


def _counted(search: Search) -> str:
    if search.facts.get("device") == "cuda":
        return COUNTED["cuda"]
    return COUNTED["cpu" if search.exact else "plain"] if search.facts else ""


def _loaders(asked: Asked, search: Search, answer: int | None) -> list[LoaderBatch]:
    """Each of the loaders that a step reads, where there are several. An argument of the script is its own business."""
    if len(search.feeding) < 2 or asked.knob is not None:
        return []
    first = search.feeding[0]["batch_size"]
    return [LoaderBatch(dataset=one["dataset"], length=one["length"], script_batch=one["batch_size"],
                        micro_batch=None if answer is None else in_proportion(answer, one["batch_size"] / first)) for one in search.feeding]


def _named(one: LoaderBatch) -> str:
    return f"the loader of {one.dataset}" + (f" ({one.length:,} samples)" if one.length is not None else "")


def _note_on_loaders(loaders: list[LoaderBatch]) -> str:
    if not loaders:
        return ""
    others = ", ".join(f"{_named(one)} {one.script_batch:,}" for one in loaders[1:])
    return f"a step reads {len(loaders)} loaders, which keep their proportion: sizes are those of {_named(loaders[0])}, whose batch in the script " \
           f"is {loaders[0].script_batch:,}; beside it {others}"


def _advice_on_loaders(loaders: list[LoaderBatch]) -> list[str]:
    """The answer is of one loader; the others were resized with it, and must be by hand, too."""
    if not loaders or loaders[0].micro_batch in (None, loaders[0].script_batch):
        return []
    return ["set all its loaders: " + ", ".join(f"{_named(one)} {one.micro_batch:,} instead of {one.script_batch:,}" for one in loaders)]


def _advice_on_dataset(search: Search, answer: int | None) -> list[str]:
    """No batch holds more samples than a pass over the loader: what ended the search was not memory."""
    length = search.loader.get("length")
    if answer is None or answer != (search.most if search.loader.get("iterable") else length):
        if search.reads > 1 and length and answer == length // search.reads:
            return [f"an update reads {search.reads} batches, and its loader gives {length:,} samples in a pass, so no larger batch was tried: a loop that "
                    "counts its batches anew in each pass might never come to an update"]
        return []
    if length is None:
        return [f"a pass over its loader, or the part of it that a worker makes, gave no batch of more than {answer:,} samples: more of them may fit"]
    return [f"its loader gives {length:,} samples in a pass, so no larger batch was tried: more of them may fit"]


def _advice(search: Search, answer: int | None) -> list[str]:
    if answer is None:
        return []
    return [*_advice_on_failures(search, answer), *_advice_on_time(search, answer), *_advice_on_training(search, answer), *_advice_on_heaps(search, answer)]


def _advice_on_growth(search: Search, growth: Growth | None) -> list[str]:
    if growth is None:
        return []
    return [f"memory grows by {sizes.show(round(growth.step_bytes))} with every step of a batch of {growth.micro_batch}: {sizes.show(search.limit_bytes or 0)} "
            f"last about {_lasts(search, growth):,} steps, and no batch fits for ever; look for what is kept from step to step (losses or outputs in a "
            "list, which keep their graphs unless they are detached; caches)"]


def _advice_on_knee(asked: Asked, search: Search, answer: int | None) -> list[str]:
    """The answer is another size than the one that was asked for, which was not proved."""
    knee = search.throughput.knee
    if asked.target != "throughput" or answer is None or knee in (None, answer):
        return []
    why = ": a longer --budget may prove it" if search.left_s() < RESERVE * search.budget_s else ""
    return [f"a batch of {knee} is as fast, but it was not proved{why}; {answer} was"]


def _advice_on_failures(search: Search, answer: int) -> list[str]:
    """A larger size than the answer that ended for something else than memory: the search stopped there."""
    failed = [one for one in search.tried if one.outcome == "failed" and (one.micro_batch or 0) > answer]
    return [f"a batch of {one.micro_batch} was not refused for its memory: {one.reason or 'the script ended by itself'}; a size that the "
            "script takes may be larger than the answer" for one in failed[-1:]]


def _advice_on_time(search: Search, answer: int) -> list[str]:
    """A larger size than the answer that nothing speaks against but the time."""
    late = [one.micro_batch for one in search.tried if one.outcome == "out_of_time" and (one.micro_batch or 0) > answer]
    return [f"a longer --budget may prove a batch of {late[-1]}: its proof had no time"] if late else []


def _advice_on_heaps(search: Search, answer: int) -> list[str]:
    """A wide margin is kept for heaps whose peaks differ from run to run; blocks mapped by themselves have exact peaks. It is
    worth a word where the margin is what ended the search."""
    assert search.limit_bytes is not None
    kept, least = search.margin_bytes, memory_model.margin_bytes(search.limit_bytes)
    tight = answer in search.proofs and answer < search.most and kept - least >= memory_model.WORTHWHILE * search.limit_bytes
    if not tight or "MALLOC_MMAP_THRESHOLD_" in search.bench.workload.environment:
        return []
    return [f"{sizes.show(kept)} are kept free, because the C library serves the batch from heaps whose peaks differ from run to run; "
            "with MALLOC_MMAP_THRESHOLD_=131072 in the environment a larger batch may fit, at the price of more page faults: fit it again to know"]


def _advice_on_training(search: Search, answer: int) -> list[str]:
    """What another batch does to the training. The rule is stated, never applied."""
    own = search.own
    if own is None or answer == own:
        return []
    times = answer / own
    found = [f"a batch of {answer} instead of {own} is another training (class convergence): to keep it, keep the global batch, by "
             + ("accumulating fewer micro-steps where the script accumulates" if answer > own else "accumulating more micro-steps")]
    if answer > own:
        found.append(f"if the global batch does grow {times:.3g} times, the usual rule multiplies the learning rate by {times:.3g} for SGD "
                     f"(with a warm-up; Goyal et al. 2017) and by {times ** 0.5:.3g} for Adam (Malladi et al. 2022)")
    if any(module["batch_norms"] for module in search.facts.get("modules", ())):
        found.append("its BatchNorm layers then see other batch statistics, accumulated or not")
    return found


#: What may prove a size where the budget did not, as a multiple of it.
LONGER = 3


def _for_want_of_time(search: Search) -> bool:
    """Whether more time may prove a size where none was proved: one ran for a few steps, or the time had ended, or nothing went wrong."""
    if search.trials >= MOST_TRIALS:
        return False
    return search.likely is not None or search.left_s() <= 0 or not any(one.reason for one in search.tried)


def _next(asked: Asked, found: Fit, again: list[str] | None) -> str:
    """What to type next. `again`: options with which the same question may be answered, where it was not."""
    argv = asked.request.argv
    if found.verdict == "refused" and asked.knob is None:
        source = source_of(script_of(argv, asked.request.cwd))
        return asked.command(f"--knob={likely_knob(argv, asked.request.cwd, source)}")
    if found.verdict == "inconclusive" and again is not None:
        return asked.command(*again)
    if found.micro_batch is not None and asked.knob is not None:
        argv = with_knob(argv, asked.knob, found.micro_batch, asked.request.cwd)
    return joined(["saturate", "tune", *asked.request.options(), "--", *argv])


def _write(study: Study, found: Fit) -> Fit:
    """Write record and report; what was found, without the path of a report where none could be written."""
    from saturate.report import fit_html, trim

    try:
        durable.replace_text(study.folder / "fit.json", encoded(trim.without_values(found)))
        durable.replace_text(study.report_path, fit_html.render(found))
    except OSError as error:
        study.say(f"the report could not be written: {error}")
        return msgspec.structs.replace(found, report="")
    return found


def nothing(asked: Asked, reason: str) -> Fit:
    """The object where nothing could even begin."""
    return Fit(command=asked.request.argv, verdict="inconclusive", reason=reason, next_command=asked.command())
