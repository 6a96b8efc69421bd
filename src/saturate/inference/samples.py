"""Which samples went through a model: names for them, to find the same sample again in other batches.

A sample's name is a hash of its values. Calibration and training data that the check scores as well is found this way,
however the calls are cut into samples: nobody says which dimension of an input is the batch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import log, prod
from typing import Any

#: Calibration samples that the check uses too are refused from more than this share on: some are what a data set
#: repeats by itself.
MOST_SHARED = 0.01

#: ... and from this share of the samples that the check scores. A drop is understated by no more than this share of it.
MOST_OF_CHECK = 0.05

#: Samples that were there before, within one of the two sets: n of them with values that coincide at random have about
#: twice as many in common with n others, and chance may double that.
_BY_NATURE = 4.0

#: Data that is gone through again in other batches repeats, but not by nature. So many times is looked for, and said with this chance
#: (the exponent of e) of being wrong.
_MOST_PASSES, _SURE = 16, 7.0

#: A call is cut along its first dimension; along its second one, where sequences come first (time, sample, feature); or
#: not at all, where it holds one sample without a batch.
CUTS = ("rows", "columns", "whole")

#: An input beside others names a sample by itself where it is as large as the largest, of fractions, and no mask: so
#: many numbers, and more than two different ones.
_FEWEST_ALONE = 16

#: Of an image in colours, which has no batch dimension in a list of them.
_CHANNELS = 3

#: Numbers of a row that are looked at first.
_FIRST = 256

#: So many samples are remembered to see whether they repeat by nature.
_MOST_REMEMBERED = 1_000_000


@dataclass(frozen=True)
class Overlap:
    """Calibration samples that the check uses too, and samples of the check that calibration uses too. `..._again`: the
    share of each that had been there before, in the same set, by nature."""

    shared: int
    calibration: int
    found: int = 0
    check: int = 0
    calibration_again: float = 0.0
    check_again: float = 0.0

    @property
    def refused(self) -> bool:
        return self._most_calibration or self._most_of_check

    @property
    def _most_calibration(self) -> bool:
        return self.shared > (MOST_SHARED + _BY_NATURE * self.check_again) * self.calibration

    @property
    def _most_of_check(self) -> bool:
        return self.found > (MOST_OF_CHECK + _BY_NATURE * self.calibration_again) * self.check

    def words(self, what: str = "calibration") -> str:
        if self._most_of_check and not self._most_calibration:
            counts = f"{self.found} of {self.check} samples that the check scores are among the {what} samples"
        else:
            counts = f"{self.shared} of {self.calibration} {what} samples are among those that the check scores"
        return f"{counts}: what is fitted to them looks better than it is"


@dataclass
class _Tally:
    """The samples of one cut. `by_any`: one was there before where any of its names was, as a table that goes into every call."""

    by_any: bool = False
    count: int = 0
    again: array[int] = field(default_factory=lambda: array("Q"))       # places of those that had been there before
    fixed: bool = False                 # a whole call was there before, in this order: what goes into every call
    shared: int = 0                     # those among what is looked for
    samples: list[tuple[str, ...]] = field(default_factory=list)
    _met: set[int] = field(default_factory=set)
    _calls: set[int] = field(default_factory=set)

    def begin(self, samples: list[tuple[str, ...]]) -> None:
        """Before those of a call are added."""
        call = hash(tuple(samples))
        self.fixed = self.fixed or bool(samples) and call in self._calls
        self._calls.add(call)

    def add(self, sample: tuple[str, ...], wanted: frozenset[str] | None) -> None:
        self.count += 1
        if not sample:
            return
        keys = {hash(name) for name in (sample if self.by_any else sample[:1])}
        if not keys.isdisjoint(self._met):
            self.again.append(self.count - 1)
        if len(self._met) < _MOST_REMEMBERED:
            self._met |= keys
        if wanted is None:
            self.samples.append(sample)
        elif not wanted.isdisjoint(sample):
            self.shared += 1
            self.samples.append(sample)

    @property
    def share_again(self) -> float:
        """Of those that had been there before, by nature: in one pass, where all of it is gone through several times. Values that
        coincide do so from the start on. The first half of the samples holds at least a quarter of those that were there before, a third
        of them a ninth, and so on, as they come the faster the more were there already."""
        for parts in range(2, 1 if self.fixed else _MOST_PASSES + 1):
            length = self.count // parts
            early = bisect_left(self.again, length)
            expected = len(self.again) / parts**2
            if early < expected and expected - early + (early * log(early / expected) if early else 0.0) > _SURE:     # Chernoff's bound
                return early / length
        return len(self.again) / self.count if self.count else 0.0


class Seen:
    """The samples of some calls. A call that was made before adds nothing.

    Equal, and as long, as its samples along the first dimension are. With `wanted` only those are kept that are among
    these names: of a training set there may be millions.
    """

    def __init__(self, wanted: frozenset[str] | None = None) -> None:
        self.cuts = {cut: _Tally(cut == "whole") for cut in CUTS}
        self._wanted = wanted
        self._calls: set[str] = set()

    def add(self, inputs: tuple[Any, ...]) -> None:
        call = Digest()
        call.feed(inputs)       # all of it: a table that goes into every call may be longer than the batches
        if call.hex() not in self._calls:
            self._calls.add(call.hex())
            for cut, samples in cuts(inputs).items():
                self.cuts[cut].begin(samples)
                for sample in samples:
                    self.cuts[cut].add(sample, self._wanted)

    def names(self) -> frozenset[str]:
        return frozenset(name for tally in self.cuts.values() for sample in tally.samples for name in sample)

    def __len__(self) -> int:
        return len(set(self.cuts["rows"].samples))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seen) and set(self.cuts["rows"].samples) == set(other.cuts["rows"].samples)

    __hash__ = None  # type: ignore[assignment]


def overlap(calibration: Iterable[tuple[Any, ...]], used: Seen) -> Overlap:
    """How many samples of the calibration batches are among those of the check, and of the check among them, by the cut
    that finds most."""
    given = Seen(used.names())
    for inputs in calibration:
        given.add(inputs)
    return between(given, used)


def between(given: Seen, used: Seen) -> Overlap:
    """The same of samples that were collected: `given` with the names of `used` as what was wanted."""
    names = given.names()
    every = []
    for cut in CUTS:
        ours, theirs = given.cuts[cut], used.cuts[cut]
        found = sum(not names.isdisjoint(sample) for sample in theirs.samples)
        every.append(Overlap(ours.shared, ours.count, found, theirs.count, ours.share_again, theirs.share_again))
    return next((one for one in every if one.refused), every[0])


def cuts(inputs: tuple[Any, ...]) -> dict[str, list[tuple[str, ...]]]:
    """The names of the samples in a call, for each way to cut it."""
    if listed := images(inputs):
        return {"rows": [_names([dense(image)]) for image in listed]}
    arrays = _arrays(inputs)
    if not arrays:
        return {"rows": names(inputs)}
    largest = arrays[0]
    dimensions = len(largest.shape)
    columns = largest.shape[1] if dimensions == 3 and len(arrays) == 1 and "float" in str(largest.dtype) else 0
    return {
        "rows": names(inputs),
        "columns": [_names([largest[:, place]]) for place in range(columns)],
        "whole": [_names(arrays)] if 1 < dimensions < 4 and prod(largest.shape) else [],
    }


def names(inputs: tuple[Any, ...]) -> list[tuple[str, ...]]:
    """For each sample of a batch the names that it goes by: its rows in all tensors that are as long as the largest one;
    without tensors, each text, each prompt, or the whole call.

    Rows of integers have a second name without what their ends repeat: padding differs with the batch that a text
    happens to be in. Rows of several tensors have one for each that could be told apart alone: noise may be drawn anew, a mask left out.
    A row of several dimensions that holds one number only (padding, a black image) has none.
    """
    arrays = _arrays(inputs)
    if not arrays:
        found = list(leaves(inputs))
        texts = [leaf for leaf in found if isinstance(leaf, (str, bytes))] or _prompts(inputs) or [found]
        return [(_name(repr(text).encode()),) for text in texts]
    if len(arrays) == 1 and len(arrays[0].shape) == 1:      # no batch: its numbers are no samples
        return [(_name(raw(arrays[0])),)]
    batch = arrays[0].shape[0]
    together = [array for array in arrays if array.shape[0] == batch]
    return [_names([array[row] for array in together]) for row in range(batch)]


def images(inputs: tuple[Any, ...]) -> list[Any]:
    """Those of a call that takes a list of them, (channels, height, width) each, as detectors do: each is a sample, and what the
    first dimensions have in common is the number of channels. Empty for any other call."""
    lists = [one for one in inputs if isinstance(one, (list, tuple)) and one]
    return next((list(one) for one in lists if all(is_tensor(image) and image.dim() == 3 and len(image) == _CHANNELS for image in one)), [])


def _prompts(inputs: tuple[Any, ...]) -> list[list[int]]:
    """Lists of whole numbers, where a call holds a list of these and nothing else: the tokens of each text."""
    rows = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], (list, tuple)) else ()
    told = all(isinstance(row, (list, tuple)) and row and all(type(token) is int for token in row) for row in rows)
    return [list(row) for row in rows] if told else []


def _arrays(inputs: tuple[Any, ...]) -> list[Any]:
    """Tensors with a dimension, the largest first."""
    found = [dense(leaf) for leaf in leaves(inputs) if len(getattr(leaf, "shape", ()))]
    return sorted(found, key=lambda array: -prod(array.shape))


def _names(rows: list[Any]) -> tuple[str, ...]:
    if len(rows[0].shape) > 1 and all(_different(row) < 2 for row in rows):
        return ()
    whole = _joint(rows)
    if len(rows[0].shape) != 1 or "int" not in str(rows[0].dtype):
        return whole, *([_name(raw(row)) for row in rows if _alone(row, rows[0])] if len(rows) > 1 else [])
    leading = max((row for row in rows if row.shape == rows[0].shape and "int" in str(row.dtype)), key=_says)
    numbers = leading.tolist()
    begin, end = _without_padding(numbers)
    padded = end - begin not in (0, len(numbers))
    cut = [row[begin:end] if row.shape == leading.shape else row for row in rows]
    found = [whole, *([_joint(cut)] if padded else [])]
    if len(rows) > 1 and len(numbers) >= _FEWEST_ALONE and len(set(numbers)) > 2 and not _counts(numbers):
        found += [_name(raw(leading)), *([_name(raw(leading[begin:end]))] if padded else [])]
    return tuple(found)


def _joint(rows: list[Any]) -> str:
    """One name for several tensors in whichever order they come: a check may give by keyword what others give by place."""
    if len(rows) == 1:
        return _name(raw(rows[0]))
    return _name("".join(sorted(_name(raw(row)) for row in rows)).encode())


def _says(row: Any) -> tuple[bool, int, str]:
    """Sort key of rows of integers: what is no count of places, and holds most different numbers, says which sample it is."""
    numbers = row.tolist()
    return not _counts(numbers), len(set(numbers)), _name(raw(row))


def _counts(numbers: list[int]) -> bool:
    """Whether they count places, as those of positions do: alike for every sample."""
    return 2 * sum(after - before == 1 for before, after in zip(numbers, numbers[1:])) >= len(numbers) - 1


def _alone(row: Any, largest: Any) -> bool:
    return prod(row.shape) == prod(largest.shape) >= _FEWEST_ALONE and "float" in str(row.dtype) and _different(row) > 2


def _different(row: Any) -> int:
    """How many different numbers there are, up to three; most rows tell with their first ones."""
    values = row.reshape(-1)
    first = _up_to_three(values[:_FIRST])
    return first if first == 3 or len(values) <= _FIRST else _up_to_three(values)


def _up_to_three(values: Any) -> int:
    for count in range(3):
        if not len(values):
            return count
        one = values[0]
        values = values[values != one] if one == one else values[values == values]      # no NaN equals itself
    return 3


def _without_padding(values: list[int]) -> tuple[int, int]:
    """Where a row begins and ends without the numbers that its ends repeat; one number is no padding."""
    begin, end = 0, len(values)
    while end and values[end - 1] == values[-1]:
        end -= 1
    while begin < end and values[begin] == values[0]:
        begin += 1
    return begin if begin > 1 else 0, end if len(values) - end > 1 else len(values)


class Digest:
    """Of all values that were fed to it, in order: equal where every bit is."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def feed(self, value: Any) -> None:
        for leaf in leaves(value):
            if hasattr(leaf, "shape"):
                self._hash.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
                self._hash.update(raw(leaf))
            else:
                self._hash.update(repr(leaf).encode())

    def hex(self) -> str:
        return self._hash.hexdigest()


def leaves(value: Any) -> Iterator[Any]:
    """What is inside tuples, lists, dictionaries and dataclasses, in order."""
    if isinstance(value, Mapping):
        items: Iterable[Any] = dict.values(value) if isinstance(value, dict) else value.values()      # an item may hide the method
    elif isinstance(value, (list, tuple)):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        yield value
        return
    for item in items:
        yield from leaves(item)


def tensors(value: Any) -> list[Any]:
    """The torch tensors among the leaves."""
    return [leaf for leaf in leaves(value) if is_tensor(leaf)]


def dense(array: Any) -> Any:
    """A tensor on the CPU, strided; anything else as it is."""
    if not is_tensor(array):
        return array
    array = array.detach().cpu()
    return array if str(array.layout) == "torch.strided" else array.to_dense()


def raw(array: Any) -> bytes:
    """The bytes of a tensor or an array."""
    if not is_tensor(array):
        return array.tobytes()
    plain = dense(array).resolve_conj().resolve_neg().contiguous()
    size_bytes = plain.numel() * plain.element_size()
    return ctypes.string_at(plain.data_ptr(), size_bytes) if size_bytes else b""    # numpy has no bfloat16


def is_tensor(value: Any) -> bool:
    """Whether it is a torch tensor; torch need not be imported for the question."""
    return hasattr(value, "untyped_storage")


def _name(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
