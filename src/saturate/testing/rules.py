"""Does a rule of `findings` keep the contract? For this package's own rules and for those of third parties.

    from saturate.records.observations import Observations
    from saturate.testing import rules

    def test_my_rule():
        rules.require(my_package.my_rule, fires=[Observations(steps=5, gc_pause=0.3)])

`check` returns what is wrong as sentences. It needs no torch. The rule is asked about typical, empty, hostile and random
observations; `fires` are those that it must answer with a finding.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, get_args, get_origin, get_type_hints

from saturate.findings import _registry
from saturate.findings._api import STEPS_TO_CONCLUDE
from saturate.records.analysis import Confidence, Evidence, Finding
from saturate.records.observations import (
    CommunicationSeen,
    CompilerSeen,
    CopySeen,
    KernelsSeen,
    LoaderSeen,
    MachineSeen,
    MemorySeen,
    Observations,
    OperatorSeen,
    SyncSeen,
)

#: Random observations that `check` tries.
SAMPLES = 200

_WORDS = (
    "", "cpu", "cuda", "mps", "aten::bmm", "aten::mm", "aten::_softmax", "bfloat16", "float", "c10::Half", "latency",
    "memory", "compute", "Tensor.item", "Memcpy HtoD", "LBFGS", "AdamW", "thermal_slowdown", "gpu_idle", "power_cap",
    "cutlass_tensorop_bf16_align1", "simt_sgemm_align1", "unknown", "</script>\x1b[31m", "\ud800",
)  # fmt: skip
_HOSTILE = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1.0, 1.0000001, 1e300, 5e-324)


def require(module: ModuleType, fires: Iterable[Observations] = ()) -> None:
    """Raise `AssertionError` with every violation."""
    violations = check(module, fires)
    if violations:
        raise AssertionError(
            f"{module.__name__} breaks the contract:\n" + "\n".join(f"- {line}" for line in violations)
        )


def check(module: ModuleType, fires: Iterable[Observations] = ()) -> list[str]:
    """Violations, in words, each once."""
    shape = _registry.check(module)
    if shape:
        return shape  # nothing below can be trusted to run
    must = list(fires)
    draw = random.Random(0)
    tried = [*must, *typical(), *(arbitrary(draw) for _ in range(SAMPLES))]
    found = [line for seen in tried for line in of_answer(module, seen)]
    found += [f"it finds nothing in {seen}" for seen in must if _safe(module, seen) is None]
    found += _abstentions(module, tried)
    return list(dict.fromkeys(found))


def of_answer(module: ModuleType, seen: Observations) -> Iterator[str]:
    """What is wrong with the answer to one observation."""
    before = repr(seen)
    try:
        first, second = module.detect(seen), module.detect(seen)
    except Exception as error:  # noqa: BLE001 - the violation is that it raises, whatever it raises
        yield f"detect raised {type(error).__name__}: {error}"
        return
    if repr(first) != repr(second):
        yield "detect answers the same observations differently"
    if repr(seen) != before:
        yield "detect changes what it looks at"
    if first is None:
        return
    if not isinstance(first, Finding):
        yield f"detect returned a {type(first).__name__}, not a Finding or None"
        return
    yield from _of_finding(module, first)


def _of_finding(module: ModuleType, found: Finding) -> Iterator[str]:
    rule = module.RULE
    if found.id != rule.id or found.title != rule.title:
        yield f"a finding is called {found.id!r}, {found.title!r}, not as RULE says"
    if not found.reason.strip() or "\n" in found.reason:
        yield "a finding's reason is not one line of text"
    if found.bound is not None and not (math.isfinite(found.bound) and found.bound >= 1.0):
        yield f"a bound is {found.bound!r}, neither None nor at least 1"
    if found.confidence not in get_args(Confidence):
        yield f"a confidence is {found.confidence!r}"
    surplus = set(found.techniques) - set(rule.techniques)
    if surplus:
        yield f"a finding names techniques that RULE does not: {', '.join(sorted(surplus))}"
    if not found.techniques and not found.advice.strip():
        yield "a finding names neither a technique nor advice"
    yield from _of_evidence(found.evidence)


def _of_evidence(evidence: list[Evidence]) -> Iterator[str]:
    if not any(one.threshold is not None for one in evidence):
        yield "the evidence holds no threshold"
    for one in evidence:
        if not one.metric.strip():
            yield "a number of the evidence has no name"
        if not all(value is None or math.isfinite(value) for value in (one.value, one.threshold)):
            yield f"{one.metric!r} is {one.value!r}, compared with {one.threshold!r}"


def _abstentions(module: ModuleType, tried: list[Observations]) -> Iterator[str]:
    if _safe(module, Observations()) is not None or _safe(module, Observations(steps=100)) is not None:
        yield "it finds something where nothing was observed"
    for seen in tried:
        if _safe(module, seen) is None:
            continue
        if _safe(module, dataclasses.replace(seen, steps=STEPS_TO_CONCLUDE - 1)) is not None:
            yield f"it concludes from fewer than {STEPS_TO_CONCLUDE} steps"
        for conclusion in module.RULE.needs:
            blocked = dataclasses.replace(seen, integrity_blocks=seen.integrity_blocks | {conclusion})
            if _safe(module, blocked) is not None:
                yield f"it concludes although the trace cannot carry {conclusion!r}"


def _safe(module: ModuleType, seen: Observations) -> Any:
    try:
        return module.detect(seen)
    except Exception:  # noqa: BLE001 - `of_answer` reports it
        return None


# -- observations ----------------------------------------------------------------------------------------------------


def typical() -> list[Observations]:
    """A busy accelerator, an idle one with every cause at once, and the same on a CPU."""
    calm = Observations(
        device="cuda",
        device_name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        bf16_native=True,
        steps=20,
        step_ms=100.0,
        busy=0.95,
        input_wait=0.0,
        input_wait_raw=0.3,
        sync_idle=0.0,
        device_wait=0.01,
        forward=0.3,
        backward=0.6,
        optimizer=0.04,
        gc_pause=0.0,
        kernel_time=0.01,
        page_faults=10.0,
        optimizer_kind="AdamW",
        optimizer_fused=True,
        fp32_matmul=0.0,
        tf32_allowed=True,
        attention_eager=0.0,
        elementwise=0.1,
        batch_size=64,
        off_device=(),
        limit="compute-bound",
        loader=LoaderSeen(num_workers=8, cpu_count=32.0, busy_cores=9.0, fetch_cpu=0.7, io_wait=0.1),
        copies=CopySeen(pageable_bytes=0, pageable_ms=0.0, pinned_bytes=1 << 26, exposed=0.0),
        kernels=KernelsSeen(900.0, 0.2, 80.0, 4000.0, 0.01, 0.02, False),
        communication=CommunicationSeen(world_size=1, exposed=0.0),
        memory=MemorySeen(0.8, 0.05, 0),
        compiler=CompilerSeen(compiled=False, recompiles=0, graph_breaks=0),
        machine=MachineSeen((), 0.99, 60.0, 0.9),
    )
    product = OperatorSeen(
        "aten::bmm",
        "[16, 5185, 64] [16, 64, 5185]",
        "bfloat16",
        ("cutlass_75_tensorop_bf16_align1",),
        2.0,
        0.2,
        "memory",
        0.06,
        0.15,
        ((16, 5185, 64), (16, 64, 5185)),
    )
    everything = dataclasses.replace(
        calm,
        busy=0.4,
        input_wait=0.3,
        sync_idle=0.2,
        device_wait=0.3,
        optimizer=0.2,
        optimizer_fused=False,
        gc_pause=0.05,
        kernel_time=0.3,
        page_faults=50_000.0,
        fp32_matmul=0.3,
        tf32_allowed=False,
        attention_eager=0.3,
        elementwise=0.5,
        overhead=0.4,
        off_device=("Net.position",),
        syncs=(SyncSeen("train.py:41", "Tensor.item", 40.0, 20.0),),
        operators=(product,),
        copies=CopySeen(1 << 26, 10.0, 0, 0.1),
        kernels=KernelsSeen(9000.0, 0.9, 3.0, 8.0, 0.9, 0.4, False),
        communication=CommunicationSeen(4, 0.4, 0.1, 0.5, 2, 30.0),
        memory=MemorySeen(0.95, 0.4, 3),
        compiler=CompilerSeen(True, 4, ("size changed",), 0.3, 2, ("print",)),
        machine=MachineSeen(("sw_thermal_slowdown",), 0.7, 88.0, 1.0),
    )
    return [
        calm,
        everything,
        dataclasses.replace(everything, device="cpu", capability=None, off_device=None),
        dataclasses.replace(calm, device="cpu", capability=None, overhead=0.02),
    ]


def arbitrary(draw: random.Random) -> Observations:
    """Random observations: every field is missing, sensible or hostile."""
    return _struct(Observations, draw)


def _struct(cls: type, draw: random.Random) -> Any:
    hints = get_type_hints(cls)
    return cls(**{field.name: _value(hints[field.name], draw) for field in dataclasses.fields(cls)})


def _value(hint: Any, draw: random.Random) -> Any:
    options, container = get_args(hint), get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return _struct(hint, draw)  # type: ignore[arg-type]
    if hint is bool:
        return draw.random() < 0.5
    if hint is int:
        return draw.choice((0, 1, 2, 5, 20, 64, 5185, -1, 1 << 62))
    if hint is float:
        return (
            draw.choice(_HOSTILE) if draw.random() < 0.2 else draw.random() * draw.choice((1.0, 1.0, 1.0, 30.0, 1e4))
        )
    if hint is str:
        return draw.choice(_WORDS)
    if container is frozenset:
        return frozenset(draw.sample(sorted(_registry.CONCLUSIONS), draw.choice((0, 0, 0, 1, 3))))
    if container is tuple:
        count = draw.choice((0, 1, 3)) if options[-1] is Ellipsis else len(options)
        return tuple(_value(options[0], draw) for _ in range(count))
    known = [option for option in options if option is not type(None)]
    if not known:
        raise TypeError(f"no way to draw a {hint}")
    return None if draw.random() < 0.15 else _value(draw.choice(known), draw)
