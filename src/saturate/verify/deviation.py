"""How far one training is from another, update by update, in numbers that a tolerance can be set on.

Each number is linear in a small perturbation, so that a tolerance is a multiple of what a known perturbation does:

    loss        |mean loss - baseline's|, in the loss's unit
    gradient    |ln(gradient norm / baseline's)|, where that is not below a tenth of its median
    turn        sqrt(2 - 2 cos) between the updates of a tensor: their angle in radians, while it is small
    stretch     |ln(length of the update / baseline's)|
    drift       |growth of a tensor's length since the techniques act, beyond the baseline's|: what a lost weight
                decay does, too small to see in any one update but always of the same sign
    statistics  of the buffer that strays most, |way that it goes in a few updates - baseline's| / |baseline's|: the running
                statistics of a normalisation have no part in the training loss, only in what the model says when it is evaluated

Turn and stretch are medians over tensors, and over those of two dimensions or more: in a transformer most tensors are biases and
scales, and what is done to its matrices alone would not move the median of all. Some tensors have no true gradient (a bias in front of a normalisation, the
key bias of attention): an Adam-like rule divides their rounding noise by its own size and moves them a full step in a
random direction, without any effect on the model. Measured: with them, bf16 autocast turns a small transformer's
whole update by 0.17 rad, its median tensor by less than 0.02.

Of tensors that are held in 16 bits most entries stand still in most updates, and the others move by whole units: an update has a
direction where enough entries move. In updates in which no tensor has one, how many entries move tells how long they are: it is compared
over the whole run. Their drift is left out. A weight decay is less than half a unit there, and whether it acts at
all depends on where an optimizer rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul, sub
from statistics import median

from saturate.verify.series import Series

#: Techniques act from this update on; updates 0 and 1 find the step and are the baseline's own.
FIRST_ACTING = 2

#: An update shorter than this many roundings of the parameters (of float32: 2^-20 of their length) is mostly rounding, no direction.
QUANTUM = 16

#: Of a tensor in a format of 16 bits, so many sampled entries must move: whether one that is to move by half a unit does is chance.
LEAST_MOVED = 8

#: And in all updates so many times as often.
MOVES = 4

#: A buffer's way counts from this share of its length on. What rounds to 16 bits strays by a few of their units (an estimated
#: eigenvector that has converged moves by nothing else), and that must be little of the way.
LEAST_WAY = 2.0**-4

#: Updates after which the ways of buffers are counted anew: what goes wrong late shows as what goes wrong at once.
WINDOW = 8

METRICS = ("loss", "gradient norm", "update cosine", "update norm", "parameter drift", "running statistics")


@dataclass(frozen=True)
class OfMetrics:
    """A series for each of `METRICS`, in their order, one entry per update."""

    loss: list[float]
    gradient: list[float]
    turn: list[float]
    stretch: list[float]
    drift: list[float]
    statistics: list[float]

    def series(self) -> tuple[list[float], ...]:
        return self.loss, self.gradient, self.turn, self.stretch, self.drift, self.statistics


@dataclass(frozen=True)
class Deviation(OfMetrics):
    """The six series of the common updates; nan where the baseline itself gives no number to compare with,
    inf where the candidate has none. `slowest` is ln(path of a tensor in the baseline / in the other), the
    largest. `moves` is ln(sampled entries in 16 bits that move / baseline's) in the updates in which none of the baseline's tensors has
    a direction; nan where too few do."""

    slowest: float
    moves: float = math.nan


def norm(vector: Sequence[float]) -> float:
    return math.sqrt(math.fsum(map(mul, vector, vector)))


def update_of(series: Series, k: int) -> list[float]:
    """The sampled change of the parameters in update k >= 1."""
    return list(map(sub, series.samples[k], series.samples[k - 1]))


def moved(change: Sequence[float]) -> int:
    """How many entries moved."""
    return sum(value != 0 for value in change)


def tells(series: Series, part: int, change: Sequence[float], held: Sequence[float], times: float = 1.0) -> bool:
    """Whether the change of a tensor's entries is more than `times` what rounding makes of those that it holds."""
    if series.coarse(part):
        return moved(change) >= times * LEAST_MOVED
    return norm(change) > times * QUANTUM * series.rounding * norm(held)


def tells_of_all(series: Series, change: Sequence[float], held: Sequence[float]) -> bool:
    """The same of the sampled entries of all tensors."""
    if any(map(series.coarse, range(len(series.formats)))):
        return moved(change) >= LEAST_MOVED
    return norm(change) > QUANTUM * series.rounding * norm(held)


def least_gradient(base: Series) -> float:
    """Shorter gradients of this training are compared as if they were as long: one that is nearly nothing (a hinge loss whose last
    samples are learnt) is noise by its own measure, as a loss is that is nearly zero."""
    known = [value for value in base.grad_norms if math.isfinite(value) and value > 0]
    return 0.1 * median(known) if known else 0.0


def _ratio(other: float, base: float, least: float) -> float:
    """|ln(other / base)|, neither below `least` where the baseline is; nan when that is not a positive number, inf when only the other is not."""
    if not (math.isfinite(base) and base > 0):
        return math.nan
    if base < least and math.isfinite(other):
        base, other = least, max(least, other)
    return abs(math.log(other / base)) if math.isfinite(other) and other > 0 else math.inf


def _direction(base: Series, other: Series, k: int) -> tuple[float, float]:
    """(turn, stretch) of update k: medians over the tensors that move in the baseline, and over the matrices among them; the larger."""
    ours, theirs = update_of(base, k), update_of(other, k)
    turns, stretches, matrices = [], [], []     # the last: at which places of the others
    for part, (begin, end) in enumerate(base.parts()):
        a, b = ours[begin:end], theirs[begin:end]
        if not tells(base, part, a, base.samples[k][begin:end]):
            continue
        length_a, length_b = norm(a), norm(b)
        if base.matrix(part):
            matrices.append(len(turns))
        if math.isfinite(length_b) and length_b > 0:
            cosine = math.fsum(map(mul, a, b)) / (length_a * length_b)
            turns.append(math.sqrt(min(4.0, max(0.0, 2 - 2 * cosine))))
            stretches.append(math.log(length_b / length_a))
        else:
            turns.append(math.inf)
            stretches.append(math.inf)
    if not turns:
        return math.nan, math.nan
    angle, length = median(turns), abs(median(stretches))
    if matrices:
        angle = max(angle, median(turns[at] for at in matrices))
        length = max(length, abs(median(stretches[at] for at in matrices)))
    return angle, length


def _growth(series: Series, begin: int, end: int, since: int, k: int) -> float:
    before, now = norm(series.samples[since][begin:end]), norm(series.samples[k][begin:end])
    return math.log(now / before) if before > 0 and now > 0 and math.isfinite(now) else math.inf


def _drift(base: Series, other: Series, since: int, k: int) -> float:
    """The growth that three quarters of the tensors show in one direction, 0 where they do not agree on one: what a lost
    weight decay does, it does to all. Their median is none of this: of a convolutional net's tensors half hardly drift (a
    normalisation's), the others by a thousand times as much in either direction, and the median jumps between the two.

    Tensors that start near zero (biases) grow by whole factors and say nothing; they are left out, as are those in 16 bits."""
    excess = []
    for part, (begin, end) in enumerate(base.parts()):
        if base.coarse(part):
            continue
        expected = _growth(base, begin, end, since, k)
        if abs(expected) < 0.5:
            excess.append(_growth(other, begin, end, since, k) - expected)
    if not excess:
        return math.nan
    excess.sort()
    return max(_quantile(excess, 0.25), -_quantile(excess, 0.75), 0.0)


def _strays(base: Series, other: Series, since: int, count: int) -> list[float]:
    """Per update, how far the way of a buffer since the last update before its window is from the baseline's, as a share of that: of each
    buffer the least in the window so far, and of these the largest. nan as long as none went far enough, and where the other run recorded
    other buffers. The first window begins behind update `since`.

    The least, because a buffer that stands still strays from its first move on. Where rounding is amplified, as in a training with too
    large a learning rate, one strays in the end that went along at first.
    """
    found = [math.nan] * count
    least: dict[int, float] = {}
    for k in range(since + 1, count) if base.statistics_segments == other.statistics_segments else ():
        if (k - since) % WINDOW == 1:
            start, least = k - 1, {}
        for part, (begin, end) in enumerate(base.statistics_parts()):
            held = base.statistics[k]
            places = [at for at in range(begin, end) if math.isfinite(held[at])]        # see `repeated`; of masks, what is not infinite
            ours, theirs = ([s.statistics[k][at] - s.statistics[start][at] for at in places] for s in (base, other))
            length = norm(ours)
            # The mean of inputs that were centred is nothing but rounding.
            enough = max(LEAST_WAY * norm([held[at] for at in places]), QUANTUM * base.rounding * math.sqrt(len(places)))
            if math.isfinite(length) and length > enough:
                away = norm(list(map(sub, theirs, ours))) / length
                least[part] = min(least.get(part, math.inf), away if math.isfinite(away) else math.inf)
        found[k] = max(least.values(), default=math.nan)
    return found


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest values, in proportion; an infinite one counts as soon as it is near."""
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low if low == high else low + (place % 1) * (high - low)


def paths(series: Series, first: int, count: int) -> list[float]:
    """How far each tensor's sample travelled in the updates `first` to `count` - 1."""
    total = [0.0] * len(series.parts())
    for k in range(max(1, first), count):
        change = update_of(series, k)
        for p, (begin, end) in enumerate(series.parts()):
            total[p] += norm(change[begin:end])
    return total


def _slowest(base: Series, other: Series, first: int, count: int) -> float:
    """Largest |ln| by which a tensor lags behind; tensors that hardly move in the baseline (a bias in front of a
    normalisation has no true gradient) are left out."""
    travelled = list(zip(paths(base, first, count), paths(other, first, count)))
    usual = math.fsum(a for a, _ in travelled) / max(1, len(travelled))
    seldom = _seldom_moving(base, first, count)
    lags = [math.log(a / b) if 0 < b < math.inf else math.inf for part, (a, b) in enumerate(travelled) if a > 1e-3 * usual and part not in seldom]
    return max([0.0, *lags])


def _seldom_moving(series: Series, first: int, count: int) -> set[int]:
    """The tensors in 16 bits that move in so few entries and updates that another rounding may keep them where they are."""
    return {part for part, times in _times_moved(series, range(max(1, first), count)).items() if times < MOVES * LEAST_MOVED}


def _times_moved(series: Series, updates: Sequence[int]) -> dict[int, int]:
    """How many sampled entries of each tensor in 16 bits move in these updates, all of them together."""
    times = {part: 0 for part in range(len(series.parts())) if series.coarse(part)}
    for k in updates if times else ():
        change = update_of(series, k)
        for part, (begin, end) in enumerate(series.parts()):
            if part in times:
                times[part] += moved(change[begin:end])
    return times


def moves_without_direction(series: Series) -> int:
    """How many sampled entries move in the updates in which no tensor has a direction, all of them together."""
    return sum(_times_moved(series, _without_direction(series, FIRST_ACTING, len(series))).values())


def _without_direction(series: Series, first: int, count: int) -> list[int]:
    """The updates from `first` to `count` - 1 in which no tensor moves enough to have a direction."""
    if not any(map(series.coarse, range(len(series.parts())))):
        return []
    found = []
    for k in range(max(1, first), count):
        change, held = update_of(series, k), series.samples[k]
        if not any(tells(series, part, change[begin:end], held[begin:end]) for part, (begin, end) in enumerate(series.parts())):
            found.append(k)
    return found


def _more_moves(base: Series, other: Series, first: int, count: int) -> float:
    """What a learning rate shows where it moves a few entries of each tensor in an update: these have no direction, and a twin that was
    perturbed by a unit moves other ones, but as many."""
    updates = _without_direction(base, first, count)
    expected, found = (sum(_times_moved(series, updates).values()) for series in (base, other))
    if expected < MOVES * LEAST_MOVED:
        return math.nan
    return math.log(found / expected) if found else -math.inf


def deviation(base: Series, other: Series, acting: int = FIRST_ACTING) -> Deviation:
    """Compare two trainings of the same parameters; what accumulates is counted from update `acting` on.

    Raises ValueError when their samples differ in size: those are not the same parameters.
    """
    n = min(len(base), len(other))
    if any(len(base.samples[k]) != len(other.samples[k]) for k in range(n)):
        raise ValueError("the samples are of different parameters")
    loss, gradient, turn, stretch, drift = [], [], [math.nan] * min(n, 1), [math.nan] * min(n, 1), []
    least = least_gradient(base)
    for k in range(n):
        expected, found = base.loss(k), other.loss(k)
        loss.append(math.nan if math.isnan(expected) else abs(found - expected) if math.isfinite(found) else math.inf)
        gradient.append(_ratio(other.grad_norms[k], base.grad_norms[k], least))
        drift.append(math.nan if k < acting else _drift(base, other, acting - 1, k))
        if k:
            angle, length = _direction(base, other, k)
            turn.append(angle)
            stretch.append(length)
    statistics = _strays(base, other, acting - 1, n)
    return Deviation(loss, gradient, turn, stretch, drift, statistics, _slowest(base, other, acting, n), _more_moves(base, other, acting, n))
