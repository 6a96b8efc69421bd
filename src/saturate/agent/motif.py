"""Finding the train step in the sequence of what happens: backward passes and optimizer steps.

Tokens: "B" is one backward pass outside an optimizer, "S0", "S1", ... one step of the n-th optimizer (numbered in the
order in which they first step). Backward passes inside `optimizer.step(closure)` belong to that step; where one call is
the whole training, as in `LBFGS(max_iter=50_000)`, each of them is a step of its own, "C".
"""

from __future__ import annotations

from dataclasses import dataclass

#: The token of one evaluation of a closure, where a single step of the optimizer is the whole training.
CLOSURE = "C"

#: Longest period searched. A GAN with five critic steps has twelve tokens; accumulation over 40 has 41.
LONGEST = 512


@dataclass(frozen=True)
class Step:
    """What ends a step: the `count`-th occurrence of `token`. `tokens` is one whole period, for the reader."""

    token: str
    count: int = 1
    tokens: tuple[str, ...] = ()

    def describe(self) -> str:
        """The period in words, runs folded: "B x4 S0"."""
        words: list[str] = []
        run = 0
        for index, token in enumerate(self.tokens):
            run += 1
            if index + 1 == len(self.tokens) or self.tokens[index + 1] != token:
                words.append(token if run == 1 else f"{token} x{run}")
                run = 0
        return " ".join(words)


def period(tokens: list[str], repeats: int) -> tuple[str, ...] | None:
    """The shortest tuple that the end of `tokens` repeats at least `repeats` times, and that holds every optimizer seen.

    >>> period(["B", "S0", "B", "S0", "B", "S0"], 3)
    ('B', 'S0')
    """
    optimizers = {token for token in tokens if token != "B"}
    for length in range(1, min(LONGEST, len(tokens) // repeats) + 1):
        last = tokens[-length:]
        if optimizers <= set(last) and all(
            tokens[len(tokens) - (k + 1) * length: len(tokens) - k * length] == last for k in range(1, repeats)
        ):
            return tuple(last)
    return None


def find(tokens: list[str], ranks: int = 1) -> Step | None:
    """The step, if the tokens so far show one that ends with the newest token. `ranks`: how many train together.

    Three repetitions are asked of short periods and two of long ones; of several ranks always three, see `_of_a_rank`. When a new
    optimizer turns up later, the caller starts over with all tokens (five critic steps look like a step of their own until the
    generator's comes).
    """
    if not tokens or tokens[-1] == "B":
        return None
    if ranks > 1:
        return _of_a_rank(tokens)
    found = period(tokens, 3) or (period(tokens, 2) if len(tokens) > 24 else None)
    if found is None or (found[0] != "B" and "B" in found):     # the middle of an update: some of its optimizers are still to step
        return None
    return Step(found[-1], found.count(found[-1]), found)


def _of_a_rank(tokens: list[str]) -> Step | None:
    """The step by the optimizers' steps alone, of which all ranks make the same: one may accumulate over more backward passes than
    another, and if it found its step an update sooner it would stand at the gate while the others wait for its gradients. So updates
    of two lengths in turn are two steps here, where they are one in a single process.

    >>> _of_a_rank(["B", "S0", "B", "B", "S0", "B", "B", "S0"]).describe()
    'B x2 S0'
    """
    places = [index for index, token in enumerate(tokens) if token != "B"]
    found = period([tokens[index] for index in places], 3)
    if found is None:
        return None
    return Step(found[-1], found.count(found[-1]), tuple(tokens[places[-len(found) - 1] + 1:]))


def irregular(tokens: list[str]) -> Step | None:
    """For loops in which nothing repeats exactly (a random number of backward passes): one step of the optimizer that
    steps most often. None without an optimizer.

    >>> irregular(["B", "B", "S0", "B", "S0", "B", "B", "B", "S0"]).describe()
    'S0'
    """
    steps = [token for token in tokens if token != "B"]
    if not steps:
        return None
    token = max(sorted(set(steps)), key=steps.count)
    return Step(token, 1, (token,))


def find_manual(changes: list[bool]) -> Step | None:
    """The step of a loop that updates parameters by hand. `changes[i]`: did parameters change before backward i since
    the one before it. The step ends with the last backward before a change, every n-th backward.

    >>> find_manual([False, True, True, True]).describe()
    'B'
    """
    positions = [index for index, changed in enumerate(changes) if changed]
    if len(positions) < 3:
        return None
    gaps = {later - earlier for earlier, later in zip(positions[-3:], positions[-2:])}
    if len(gaps) != 1:
        return None
    count = gaps.pop()
    return Step("B", count, ("B",) * count)
