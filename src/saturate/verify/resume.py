"""Does a training that was killed and started again go on where its checkpoint was? Pure functions over updates.

Three positions are looked for in the uninterrupted run, each by its own evidence, and compared: where the parameters are
from (what stands for them, against those that the killed run had), where the data go on (samples by index or content,
else what the model was given), and whether losses are the same from there on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from saturate.verify.resume_log import Update

#: From best to worst. A drill's verdict is its worst outcome.
OUTCOMES = (
    "resumes_exactly", "resumes_reordered", "inconclusive", "no_checkpoint", "ends_early", "state_not_restored",
    "skips_data", "repeats_data", "starts_over", "cannot_load",
)

#: Why nothing can be said of a process whose data are drawn anew.
OTHER_DATA = "the uninterrupted run does not have its data, and they have no epochs to compare"

#: Losses that deviate less are the same to within rounding, relative; or by this many times what two runs deviate.
ROUNDING = 1e-6
NOISE = 4.0

#: As many updates in a row must be the same before that is believed: one may be by chance, and a lost optimizer state shows
#: in the second one only.
ENOUGH = 3

#: A loader that began anew would have repeated at least this many samples on average: seeing none of them excludes it.
EXPECTED_AGAIN = 4.0


@dataclass(frozen=True)
class Killed:
    """What the killed process left. `at`: updates it had made. `weights`: after how many updates what stands for the
    parameters was that. `saved`: numbers of updates after which it, or one before it, wrote a checkpoint to the end."""

    at: int
    weights: Mapping[str, tuple[int, ...]]
    saved: tuple[int, ...]


@dataclass(frozen=True)
class Continuation:
    """How a process went on. `resumed_at`: the number of updates that its parameters came with; None: unknown."""

    outcome: str
    reason: str
    resumed_at: int | None = None
    compared: int = 0


def deviation(expected: Sequence[Update], found: Sequence[Update]) -> float | None:
    """The largest relative deviation of a loss between two runs of the same program; None: their data differ already."""
    most = 0.0
    for a, b in zip(expected, found):
        if (a.indices, a.rows, a.given) != (b.indices, b.rows, b.given) or len(a.losses) != len(b.losses):
            return None
        most = max([most, *map(_relative, a.losses, b.losses)])
    return most


def compare(reference: Sequence[Update], resumed: Sequence[Update], killed: Killed, read: bool, noise: float = 0.0) -> Continuation:
    """How the process that made the updates `resumed` (at least one) went on after `killed`.

    `read`: whether it opened a file that was written before the kill. `noise`: `deviation` of two uninterrupted runs.
    """
    given = _Given(reference, resumed, killed, max(ROUNDING, NOISE * noise))
    at = placed(resumed, killed, read)
    if at == 0 and 0 not in killed.saved:
        return Continuation("starts_over", f"its parameters are those of the very beginning{_unread(read)}", 0, len(resumed))
    if at is None and resumed[0].before is not None:
        if not read:
            return Continuation("starts_over", f"its parameters are none that the killed run ever had{_unread(read)}", 0, len(resumed))
        return Continuation(
            "state_not_restored", "it loads a file, and starts from parameters that the killed run never had", None, len(resumed))
    if at is None:
        return _without_weights(given, read)
    return given.judged(at)


def placed(resumed: Sequence[Update], killed: Killed, read: bool) -> int | None:
    """The number of updates that the parameters come from which a process started with; None: unknown. `read`: see `compare`.

    Those that do not move are the same at several places, the beginning among them where the learning rate starts at zero: what
    loads nothing, or had nothing to load there, is at the beginning.
    """
    places = killed.weights.get(resumed[0].before or "", ())
    saved = [at for at in places if at in killed.saved]
    if 0 in places and not (saved and read):
        return 0
    return max(saved or places, default=None)


def _unread(read: bool) -> str:
    return "" if read else ", and it opened no file that the killed run had written"


def _without_weights(given: _Given, read: bool) -> Continuation:
    """The parameters could not be seen (a compiled model): data and losses alone must tell."""
    exact = [c for c in range(len(given.reference)) if given.overlap(c) >= ENOUGH and given.exact(c)]
    if 0 in exact and 0 not in given.killed.saved:
        return Continuation("starts_over", f"it repeats the run from its beginning{_unread(read)}", 0, given.overlap(0))
    if exact:       # of epochs that are all alike, one after which there was a checkpoint
        return given.judged(max([c for c in exact if c in given.killed.saved] or exact))
    if not read:
        return Continuation("starts_over", "it opened no file that the killed run had written", 0, len(given.resumed))
    return given.judged(given.killed.saved[-1]) if given.killed.saved else Continuation(
        "inconclusive", "neither its parameters nor a checkpoint could be seen", None, len(given.resumed))


def by_index(update: Update) -> tuple:
    return update.indices


def by_content(update: Update) -> tuple:
    return update.rows


def by_input(update: Update) -> tuple:
    return update.given


def identity(reference: Sequence[Update], resumed: Sequence[Update]) -> Callable[[Update], tuple]:
    """What samples are told apart by. An index names a sample, unless the dataset was cut for the resume (the same index is
    another sample then, whose content is known from elsewhere); a content does, unless it is drawn anew each time.
    """
    contents = {index: row for one in reference for index, row in zip(one.indices, one.rows)}
    known = {row for one in reference for row in one.rows}
    again = [(index, row) for one in resumed for index, row in zip(one.indices, one.rows)]
    indexed = any(one.indices for one in reference) and any(one.indices for one in resumed)
    shared = [contents[index] == row for index, row in again if index in contents]
    moved = sum(row in known for _, row in again)
    if indexed and (2 * sum(shared) >= len(shared) or 2 * moved < len(shared)):
        return by_index
    return by_content if known and any(one.rows for one in resumed) else by_input


class _Given:
    """One comparison. Positions are numbers of updates: position c is before `reference[c]`."""

    def __init__(self, reference: Sequence[Update], resumed: Sequence[Update], killed: Killed, tolerance: float):
        self.reference, self.resumed, self.killed, self.tolerance = reference, resumed, killed, tolerance
        data = identity(reference, resumed)
        self.theirs, self.ours = [data(one) for one in reference], [data(one) for one in resumed]
        self.visible = any(self.theirs) and any(self.ours)
        self.by_sample = data is not by_input

    def overlap(self, at: int) -> int:
        return min(len(self.resumed), len(self.reference) - at)

    def same_order(self, at: int) -> int:
        """How many updates from `at` on are made from the same data."""
        return _leading(self.theirs[at:], self.ours, lambda a, b: a == b)

    def same_losses(self, at: int) -> int:
        return _leading(self.reference[at:], self.resumed, lambda a, b: self._alike(a.losses, b.losses))

    def same_content(self, at: int) -> int:
        return _leading(self.reference[at:], self.resumed, lambda a, b: not (a.given and b.given) or a.given == b.given)

    def exact(self, at: int) -> bool:
        return min(self.same_order(at), self.same_losses(at), self.same_content(at)) == self.overlap(at)

    def _alike(self, a: Sequence[float], b: Sequence[float]) -> bool:
        """Nothing contradicts a loss that is not known."""
        return not a or (len(a) == len(b) and all(_relative(x, y) <= self.tolerance for x, y in zip(a, b)))

    # -- the verdict where the parameters' place is known --------------------------------------------------------------

    def judged(self, at: int) -> Continuation:
        compared = self.overlap(at)
        if compared < 1:
            return Continuation("inconclusive", "it goes on behind the end of the uninterrupted run", at)
        outcome, reason = self._outcome(at, compared)
        later = [saved for saved in self.killed.saved if saved > at]
        if later:
            reason += f"; it did not use the later checkpoint of update {later[-1]}"
        return Continuation(outcome, reason, at, compared)

    def _outcome(self, at: int, compared: int) -> tuple[str, str]:
        state = self._state(at)
        order, losses = self.same_order(at), self.same_losses(at)
        if order < compared and self.visible:
            if 0 < order <= losses and self.reference[at + order].begins and self.resumed[order].begins:
                outcome, reason = "resumes_reordered", (f"the same batches and losses for {order} updates, then an epoch in "
                                                        "another order: the random state that shuffles was not restored")
            elif order >= ENOUGH:
                outcome, reason = "state_not_restored", (
                    f"the same batches for {order} updates, then others: a random state was not restored")
            else:
                outcome, reason = self._structure(at)
            if state and outcome in ("resumes_reordered", "inconclusive"):
                return "state_not_restored", f"{state}; {reason}"
            return outcome, f"{reason}; {state}" if state else reason
        content = self.same_content(at)
        if losses == compared and content == compared:
            if not self.visible and not self._informative():
                return self._by_parameters(at, compared)
            return ("resumes_exactly" if compared >= ENOUGH else "inconclusive"), self._exactly(compared)
        if content < min(compared, losses + 1):
            return "state_not_restored", (f"from update {at + content + 1} on it has the same samples with another content: "
                                          "the random state behind augmentation or noise was not restored")
        if not self.visible and not state:
            return "inconclusive", f"losses differ from update {at + losses + 1} on, and the data could not be seen"
        return "state_not_restored", self._diverged(at, losses, state)

    def _exactly(self, compared: int) -> str:
        if not self._informative():
            return f"the same batches for {compared} updates; the loss is the same in all and says nothing"
        what = "batches and losses" if self.visible else "losses"
        return f"the same {what} as without the kill for {compared} updates"

    def _by_parameters(self, at: int, compared: int) -> tuple[str, str]:
        """Where neither losses nor data can be seen to differ: what the updates made of the parameters."""
        same = _leading(self.reference[at:], self.resumed, lambda a, b: a.after is not None and a.after == b.after)
        if same == compared:
            return ("resumes_exactly" if compared >= ENOUGH else "inconclusive"), f"the same parameters as without the kill for {compared} updates"
        return "inconclusive", "neither its losses nor its data could be seen, and it has other parameters than without the kill"

    def _informative(self) -> bool:
        return len({one.losses for one in self.reference}) > 1

    def _diverged(self, at: int, losses: int, state: str) -> str:
        expected, found = self.reference[at + losses].losses, self.resumed[losses].losses
        seen = f"the same batches, but update {at + losses + 1} has loss {_shown(found)} instead of {_shown(expected)}"
        if state:
            return f"{state}; {seen}"
        if losses == 0:
            return f"{seen}: buffers (of a normalisation) or the random state (of dropout) were not restored"
        return f"{seen}: the state of the optimizer or of the learning-rate scheduler was not restored"

    def _state(self, at: int) -> str:
        """What the optimizer itself shows of a state that was lost; empty where it shows nothing."""
        expected, found = self.reference[at], self.resumed[0]
        problems = []
        if expected.counter is not None and found.counter is not None and expected.counter != found.counter:
            problems.append(f"the optimizer counts {found.counter} steps instead of {expected.counter}: its state was not restored")
        if len(expected.rates) == len(found.rates) and any(_relative(a, b) > ROUNDING for a, b in zip(expected.rates, found.rates)):
            problems.append(f"the learning rate is {_shown(found.rates)} instead of {_shown(expected.rates)}: "
                            "that of the scheduler was not restored")
        return "; ".join(problems)

    # -- other data: which? ---------------------------------------------------------------------------------------------

    def _elsewhere(self, at: int) -> int | None:
        """Where in the uninterrupted run the data of the resumed one are. Of several places the nearest, rather before."""
        found = {c: self.same_order(c) for c in range(len(self.reference))}
        enough = [c for c, count in found.items() if count >= min(ENOUGH, len(self.resumed))]
        return min(enough, key=lambda c: (c > at, abs(c - at))) if enough else None

    def _structure(self, at: int) -> tuple[str, str]:
        elsewhere = self._elsewhere(at)
        epoch = self._epoch(at) if self.by_sample else None
        if elsewhere is not None and elsewhere > at:
            return self._moved(at, elsewhere)
        if epoch is None:
            if elsewhere is None:
                return "inconclusive", OTHER_DATA
            return self._moved(at, elsewhere)
        used = {sample for one in self.theirs[epoch:at] for sample in one}
        now, whole = self._first_epoch(), self._whole()
        again = used & now
        if again:
            where = f", from those of update {elsewhere + 1} on" if elsewhere is not None and elsewhere < at else ""
            anew = ": the loader began anew" if elsewhere is None or self.reference[elsewhere].begins else ""
            return "repeats_data", (f"{len(again)} of the {len(used)} samples that this epoch had already used before the "
                                    f"checkpoint came again{where}{anew}")
        missing = whole - len(used) - len(now)
        if any(one.begins for one in self.resumed[1:]) and missing > 2 * max(map(len, self.ours)):
            return "skips_data", f"{missing} of the {whole} samples of the epoch never came"
        if not used:
            how = "the same as that of an earlier epoch: the script seeds itself anew" if elsewhere is not None else "a new one"
            return "resumes_reordered", f"the epoch is complete, but its order is not that of the uninterrupted run ({how})"
        ended = self._ended(len(used) + len(now))
        if ended and len(used) * len(now) / ended >= EXPECTED_AGAIN:
            return "resumes_reordered", "no sample of the epoch came again, but the rest of it has another order"
        return "inconclusive", "too few updates were seen to tell whether the epoch went on or began anew"

    def _moved(self, at: int, elsewhere: int) -> tuple[str, str]:
        if elsewhere > at:
            return "skips_data", (f"it goes on with the data of update {elsewhere + 1} where that of update {at + 1} is due: "
                                  f"the data of {elsewhere - at} updates are left out")
        return "repeats_data", (f"it goes on with the data of update {elsewhere + 1} where that of update {at + 1} is due: "
                                "data that were used before the checkpoint come again")

    def _epoch(self, at: int) -> int | None:
        """Where the epoch of position `at` began; None: there are no epochs, or samples are drawn with replacement."""
        begins = [c for c in range(min(at, len(self.reference) - 1) + 1) if self.reference[c].begins]
        if not begins:
            return None
        drawn = [sample for one in self.theirs[begins[-1]: self._end(begins[-1])] for sample in one]
        return begins[-1] if len(set(drawn)) == len(drawn) else None

    def _end(self, epoch: int) -> int:
        return next((c for c in range(epoch + 1, len(self.reference)) if self.reference[c].begins), len(self.reference))

    def _whole(self) -> int:
        """How many samples an epoch has: at least as many as the longest one that was seen."""
        begins = [c for c, one in enumerate(self.reference) if one.begins]
        return max((sum(map(len, self.theirs[c: self._end(c)])) for c in begins), default=0)

    def _ended(self, with_rest: int) -> int:
        """How many samples an epoch has at most, by those that were seen to their end; 0: none was, so one may have any number.
        `with_rest`: those of the resumed one, and what was used of it before."""
        begins = [c for c, one in enumerate(self.reference) if one.begins]
        seen = [sum(map(len, self.theirs[a:b])) for a, b in zip(begins, begins[1:])]
        return max([*seen, *([with_rest] if any(one.begins for one in self.resumed[1:]) else [])], default=0)

    def _first_epoch(self) -> set[int]:
        end = next((c for c in range(1, len(self.resumed)) if self.resumed[c].begins), len(self.resumed))
        return {sample for one in self.ours[:end] for sample in one}


def _leading(a: Sequence, b: Sequence, same) -> int:
    """How many of the first elements are the same."""
    count = 0
    for x, y in zip(a, b):
        if not same(x, y):
            break
        count += 1
    return count


def _relative(a: float, b: float) -> float:
    """|a - b| over the larger of the two; 0 where both are the same, or no number; infinite where one of them is none."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a) and math.isfinite(b) else math.inf


def _shown(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values[:4])
