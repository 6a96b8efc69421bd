"""What the rules about a late host share: when the host sets the pace, and what idle time behind it may be due to."""

from __future__ import annotations

import math

from saturate.findings._common import at_most, below, per_step, recorded_ms, without
from saturate.records.observations import KernelsSeen, Observations, SyncSeen

#: Idle time (on a CPU: time outside operators), of the step, from which the host counts as late.
HOST_LATE = 0.15
#: The host is never ahead: kernels start this soon after their launch, or find this shallow a queue this often.
LAUNCH_DELAY_US = 20.0
SHALLOW_QUEUE = 0.5
#: Share of kernels below 10 us from which they count as short.
SHORT_KERNELS = 0.5
SHORT_US = 10.0
#: Marks a wait for a copy to the device in `SyncSeen.what`.
UPLOAD = "HtoD"
#: Values of `SyncSeen.what` whose time counts as outside operators on a CPU. No operator is around `tolist`. Of `print`, 41
#: to 46 % was measured to be in operators for 8 to 1,000 values; still all of it is taken off what is outside, as less would
#: lay a step that mostly prints to the code around it. `format` of one number is an `item`, and so an operator.
OUTSIDE_OPERATORS = frozenset({"Tensor.tolist", "print"})
#: On a CPU: time outside operators, per operator, that a launch can take. More is other code.
LAUNCH_US = 50.0
#: On a CPU: reads of values per operator, from which the operators are those of a loop that reads elements.
READS = 0.1


def never_ahead(kernels: KernelsSeen) -> bool | None:
    """Whether the host launches kernels only just in time; None where neither delays nor queues were observed."""
    delay, shallow = kernels.median_launch_delay_us, kernels.queue_shallow
    if delay is None and shallow is None:
        return None
    return (delay is not None and delay <= LAUNCH_DELAY_US) or (shallow is not None and shallow >= SHALLOW_QUEUE)


def tells_who_is_late(seen: Observations) -> bool:
    """Whether nobody's finding a late host says that it is none: of kernels that a graph replays nobody is asked, and the host may be late
    between two graphs."""
    return seen.device == "cpu" or not seen.kernels.graph_replay or below(seen.kernels.host_late, HOST_LATE)


def late(seen: Observations) -> float | None:
    """Share of the step in which the device waited for the host (on a CPU: spent outside operators and the loader), less
    what collector pauses, compilation and (on a CPU) communication and reads of many values are known to take."""
    if seen.device != "cpu":
        return without(seen.kernels.host_late, seen.gc_pause, seen.compiler.compile_share)
    return without(outside(seen), seen.gc_pause, seen.compiler.compile_share)


def outside(seen: Observations) -> float | None:
    """On a CPU: share of the step outside operators and the loader that neither communication nor reads of values take."""
    return without(seen.overhead, seen.communication.exposed, waited(seen, read_outside_operators(seen)))


def waited(seen: Observations, places: tuple[SyncSeen, ...]) -> float | None:
    """Share of the step that the host spends in these waits; None where the step was not timed. On a CPU of the recorded
    steps where those were the faster ones: waits are as long as they were recorded, and other shares are of those steps."""
    step_ms, recorded = seen.step_ms, recorded_ms(seen)
    if seen.device == "cpu" and step_ms is not None and recorded is not None:
        step_ms = min(step_ms, recorded)
    return per_step(sum(one.ms_per_step for one in places), step_ms)


def reading(seen: Observations) -> float | None:
    """On a CPU: share of the step that reads of values take, with the interpreter around them where they loop."""
    share = waited(seen, reads(seen))
    if share is None or not loops_over_elements(seen):
        return share
    in_operators = share if seen.busy is None else min(share, max(0.0, seen.busy))      # what is not is overhead already
    return max(share, at_most(in_operators, seen.overhead))


def loops_over_elements(seen: Observations) -> bool:
    """On a CPU: whether reads are so many that the step's operators are those of the reads."""
    count = seen.kernels.count_per_step
    return count is not None and count > 0 and sum(one.calls_per_step for one in reads(seen)) >= READS * count


def mendable(seen: Observations, waiting: float) -> float:
    """The most of the step that can vanish with waits of this share. Without them the host is no more than that much
    earlier, and what that shortens is idle time in which the device waited for the host."""
    return min(waiting, at_most(seen.sync_idle, late(seen)))


def outside_us(seen: Observations) -> float | None:
    """On a CPU: time outside operators, per operator, in microseconds."""
    share, count = late(seen), seen.kernels.count_per_step
    if share is None or seen.step_ms is None or count is None or not count > 0:
        return None
    return share * seen.step_ms * 1e3 / count


def reads(seen: Observations) -> tuple[SyncSeen, ...]:
    """The places where the host waits for results."""
    return tuple(one for one in _sensible(seen) if UPLOAD not in one.what)


def read_outside_operators(seen: Observations) -> tuple[SyncSeen, ...]:
    """On a CPU: the reads whose time counts as outside operators."""
    return tuple(one for one in reads(seen) if one.what in OUTSIDE_OPERATORS)


def read_in_operators(seen: Observations) -> tuple[SyncSeen, ...]:
    """On a CPU: the reads that are operators themselves (`aten::item`)."""
    return tuple(one for one in reads(seen) if one.what not in OUTSIDE_OPERATORS)


def uploads(seen: Observations) -> tuple[SyncSeen, ...]:
    """The places where the host waits until something was copied to the device."""
    return tuple(one for one in _sensible(seen) if UPLOAD in one.what)


def _sensible(seen: Observations) -> tuple[SyncSeen, ...]:
    return tuple(one for one in seen.syncs if 0.0 <= one.ms_per_step < math.inf)
