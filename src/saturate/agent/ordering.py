"""An order of trained tensors that is the same in every process of one training.

What two runs recorded is compared tensor by tensor, and an optimizer's order need not be the same in both: scripts hand it a set,
whose order follows the addresses of its members (Pyro builds one optimizer for each member of such a set).
"""

from __future__ import annotations

from typing import Any

from saturate.agent.observe import all_modules


def of_training(torch: Any, parameters: list[Any], used: dict[int, int]) -> list[Any]:
    """`parameters` as the outermost modules list them; then what no module holds, by its place in `used` (by id; see
    `agent.leaves`); what is left stays in the order in which it came."""
    place: dict[int, int] = {}
    for _, held in _in_order(torch, parameters, used):
        for p in held:
            place.setdefault(id(p), len(place))
    last = len(place)
    return sorted(parameters, key=lambda p: (place.get(id(p), last), used.get(id(p), len(used))))


def holders(torch: Any, parameters: list[Any], used: dict[int, int]) -> list[Any]:
    """The outermost modules that hold any of `parameters`, in the order of `of_training`."""
    return [module for module, _ in _in_order(torch, parameters, used)]


def _in_order(torch: Any, parameters: list[Any], used: dict[int, int]) -> list[tuple[Any, list[Any]]]:
    return sorted(_held(torch, {id(p) for p in parameters}), key=lambda pair: _signature(pair[1], used))


def _held(torch: Any, wanted: set[int]) -> list[tuple[Any, list[Any]]]:
    """Each outermost module with those of the wanted parameters that it holds, in its own order."""
    holding = [(module, held) for module in all_modules(torch) if (held := [p for p in module.parameters() if id(p) in wanted])]
    inner = {id(child) for module, _ in holding for child in module._modules.values()}
    return [(module, held) for module, held in holding if id(module) not in inner]


def _signature(held: list[Any], used: dict[int, int]) -> tuple[Any, ...]:
    """Modules come as the collector lists them, which is no order: by their shapes, and two of a kind by their first use."""
    return [tuple(p.shape) for p in held], [used.get(id(p), len(used)) for p in held]
