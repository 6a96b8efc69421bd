"""What optimizers are set to, for every tensor that they train: a schedule that a technique detached, or a weight decay that it lost,
shows there at once, and in what is trained long after a verification run has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

#: Of a group of parameters, as torch's optimizers and most others name them.
NAMES = ("lr", "weight_decay", "momentum", "betas", "eps")


def of_parameters(optimizers: Iterable[Any], parameters: list[Any]) -> dict[str, Any]:
    """{"sets": different settings, "of": the number of each parameter's in them, -1 where not just one group holds it}. optimizers: those
    that step now, for one that has given its part to another may hold the same. Those around another one share its groups."""
    groups = {id(group): group for optimizer in optimizers for group in optimizer.param_groups}.values()
    holders = Counter(id(p) for group in groups for p in group["params"])
    sets: list[dict[str, Any]] = []
    place_of: dict[int, int] = {}
    for group in groups:
        found = {name: _plain(group[name]) for name in NAMES if name in group}
        if found not in sets:
            sets.append(found)
        place_of.update({id(p): sets.index(found) for p in group["params"] if holders[id(p)] == 1})
    return {"sets": sets, "of": [place_of.get(id(parameter), -1) for parameter in parameters]}


def _plain(value: Any) -> Any:
    """A number, or a list of them; None of what is neither. A rate may be a tensor."""
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
