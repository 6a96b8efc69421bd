"""A candidate misses the accuracy budget: which layers go back to the original precision?

    repair = Repair(ranking, ends=("stem.conv", "head"))
    keep = repair.next("fail")              # of the candidate as it was
    while keep is not None:
        keep = repair.next(judge(candidate with `keep`))
    repair.best                             # the smallest set that passed, or None

First and last layer are tried first: they are cheap to keep and often the cause. Then the 1, 2, 4, 8 ... most sensitive
ones, until a set passes, and then sizes between the largest that failed and the smallest that passed. That takes about
2 log2(n) trials for n layers. It relies on more kept layers being no less accurate, which noise may break: `best` is
always a set that was really judged.

Pure, and without processes: the search builds, checks and times each set, and may stop asking at any time.
"""

from __future__ import annotations

from collections.abc import Sequence

from saturate.records.inference import Verdict

#: Beyond this share of the layers a candidate is the original with an exception, not the other way round.
LARGEST_SHARE = 0.5


def inner(names: Sequence[str]) -> list[str]:
    """Without modules in which all others lie, such as the model itself (""), whose own forward may multiply too: to keep one in its own
    precision would be to keep everything.

    >>> inner(["", "net.head", "net", "net.stem"]), inner(["stem", "head", "head.out"])
    (['net.head', 'net.stem'], ['stem', 'head', 'head.out'])
    """
    found = list(names)
    while len(found) > 1 and (outer := [name for name in found if not name or all(f"{other}.".startswith(f"{name}.") for other in found)]):
        found = [name for name in found if name not in outer]
    return found


class Repair:
    """Sets of layers to keep, one at a time. `ranking`: names, the most sensitive first. `ends`: the first and the last
    layer in the order of the model."""

    def __init__(self, ranking: Sequence[str], ends: Sequence[str] = ()):
        self.ranking = list(dict.fromkeys(ranking))
        self.largest = int(len(self.ranking) * LARGEST_SHARE)
        self.best: frozenset[str] | None = None
        self._ends = frozenset(ends) & frozenset(self.ranking)
        self._asked: frozenset[str] | None = None
        self._failed = 0                    # the largest number of top layers that did not pass
        self._passed: int | None = None     # the smallest that did

    def next(self, verdict: Verdict) -> frozenset[str] | None:
        """The next set to try, given what became of the last one (at the beginning: of the candidate itself). `undecided`
        counts as not passed. None: nothing is left to try."""
        if self._asked is None:
            if verdict == "pass":
                self.best = frozenset()
                return None
            self._asked = frozenset()
            if self._ends and len(self._ends) <= self.largest:
                return self._ask(self._ends)
        else:
            self._learn(verdict == "pass")
        size = self._size()
        return None if size is None else self._ask(frozenset(self.ranking[:size]))

    def _ask(self, keep: frozenset[str]) -> frozenset[str]:
        self._asked = keep
        return keep

    def _learn(self, passed: bool) -> None:
        top = self._asked == frozenset(self.ranking[: len(self._asked)])
        if passed:
            if self.best is None or len(self._asked) < len(self.best):
                self.best = self._asked
            self._passed = min(len(self._asked), self._passed or len(self._asked))
        elif top:
            self._failed = max(self._failed, len(self._asked))

    def _size(self) -> int | None:
        """How many of the most sensitive layers to keep next."""
        if self._passed is not None:
            return (self._failed + self._passed) // 2 if self._passed - self._failed > 1 else None
        size = min(2 * self._failed or 1, self.largest)
        return size if size > self._failed else None
