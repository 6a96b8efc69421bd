"""Construct DistributedDataParallel with options that save copies and communicate better.

What it does
------------
Lets gradients be views into the communication buckets, tells DDP that the graph is the same in every step, and may
change the size of the buckets.

When it helps
-------------
Several ranks. Views save one copy of all gradients; a static graph saves the search for unused parameters; larger
buckets amortize latency, smaller ones start to communicate earlier.

When it hurts
-------------
`static_graph` is wrong for models whose graph changes between steps: DDP then raises, or leaves parameters out.

Numerics
--------
`reordering`: other buckets reduce in another order.

How it is applied
-----------------
Arguments that stand at their defaults are changed when DistributedDataParallel is constructed.

References
----------
PyTorch documentation, "torch.nn.parallel.DistributedDataParallel" and "Distributed Data Parallel" (design note).
Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

from saturate.records.facts import Evidence, Facts
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, Technique, Touch

TECHNIQUE = Technique(
    id="ddp-options",
    title="DistributedDataParallel options",
    numerics="reordering",
    stage="import",
    touches=(Touch("ddp-constructor"),),
)

#: torch's own default, MiB.
BUCKET_MIB = 25


@dataclass(frozen=True)
class Options:
    """`bucket_mib` is `bucket_cap_mb`; 0 leaves torch's default."""

    bucket_view: bool = True
    static_graph: bool = False
    bucket_mib: int = field(default=0, metadata={"minimum": 0, "maximum": 2**20})


def eligible(facts: Facts) -> Eligible | Ineligible:
    if facts.world_size < 2:
        return Ineligible("the training runs on one rank")
    if not any(module.distributed for module in facts.modules):
        return Ineligible("no trained module is wrapped in DistributedDataParallel")
    return Eligible(f"{facts.world_size} ranks with DistributedDataParallel")


def variants(facts: Facts) -> list[Options]:
    found = [Options(), Options(static_graph=True)]
    largest = max((module.parameter_bytes for module in facts.modules if module.distributed), default=0)
    if largest > BUCKET_MIB << 20:      # otherwise everything fits into one bucket of the default size
        found.append(Options(bucket_mib=4 * BUCKET_MIB))
    found.append(Options(bucket_mib=max(1, BUCKET_MIB // 5)))
    return found


def apply(context: Any, options: Options) -> str:
    if not context.torch.distributed.is_available():
        raise NotApplied("this torch was built without distributed training")
    cls = context.torch.nn.parallel.DistributedDataParallel
    original = cls.__init__
    signature = inspect.signature(original)
    wanted = {"gradient_as_bucket_view": options.bucket_view, "static_graph": options.static_graph}
    if options.bucket_mib:
        wanted["bucket_cap_mb"] = options.bucket_mib

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        changes = {
            name: value for name, value in wanted.items()
            if value and (name not in given or given[name] in (None, False, signature.parameters[name].default))
        }
        changes = {name: value for name, value in changes.items() if name in signature.parameters}
        original(self, **{**_named(given), **changes})
        if changes:
            context.note(TECHNIQUE.id, ", ".join(f"{name}={value}" for name, value in changes.items()))

    context.set_attribute(cls, "__init__", init)
    return f"DistributedDataParallel gets {', '.join(f'{name}={value}' for name, value in wanted.items())}"


def _named(given: dict[str, Any]) -> dict[str, Any]:
    """Bound arguments as keywords, without self and with **kwargs spread out."""
    named = {name: value for name, value in given.items() if name not in ("self", "kwargs")}
    return {**named, **given.get("kwargs", {})}


def active(evidence: Evidence, options: Options) -> Proof:
    seen = evidence.notes.get(TECHNIQUE.id, "")
    return Proof(bool(seen), f"constructed with {seen}" if seen else "no DistributedDataParallel was constructed so")


def as_code(options: Options) -> str:
    bucket = f", bucket_cap_mb={options.bucket_mib}" if options.bucket_mib else ""
    return (
        "from torch.nn.parallel import DistributedDataParallel\n"
        "model = DistributedDataParallel(model, "
        f"gradient_as_bucket_view={options.bucket_view}, static_graph={options.static_graph}{bucket})"
    )
