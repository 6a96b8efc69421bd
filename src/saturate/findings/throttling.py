"""The device lowers its clock because it is too hot or draws too much power.

What it means
-------------
The same kernels take longer, and nothing in the program shows why.

Evidence
--------
Reasons for a lowered clock that the driver names; the clock, of its maximum; temperature; power, of the board's
limit.

Threshold
---------
A thermal, power or hardware slowdown reason is active and the clock is at least 15 % below its maximum. Where the
clock is not known, only a thermal or hardware reason counts, with low confidence.

Not to be confused with
-----------------------
A clock that is low because the device has nothing to do: the driver then names no such reason. A power cap that the
clock does not feel. Clocks that somebody set. A device of the machine that others use: beside a training on the CPU the
rule is silent.

What helps
----------
Cooling, airflow, or another slot; a higher power limit where one was set. The bound assumes that all time scales
with the clock.

References
----------
NVIDIA Management Library (NVML) documentation, "Clocks Event Reasons". gpuprof warns from 82 C together with a
clock 15 % lower.
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import concludes, finding, number, percent, reaches
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(id="throttling", title="lowered clocks")

#: Clock below its maximum.
LOWERED = 0.15
_SLOWDOWNS = ("thermal", "slowdown", "brake")
_POWER = ("power",)


def detect(seen: Observations) -> Finding | None:
    machine = seen.machine
    if seen.device == "cpu" or not concludes(seen, RULE) or machine.throttle is None:
        return None
    lowered = None if machine.clock_share is None else 1.0 - machine.clock_share
    reasons = _named(machine.throttle, _SLOWDOWNS if lowered is None else _SLOWDOWNS + _POWER)
    if not reasons or (lowered is not None and not reaches(lowered, LOWERED)):
        return None
    clock = f"{percent(lowered)} below its maximum" if lowered is not None else "lowered"
    return finding(
        RULE,
        seen,
        f"The clock is {clock}, because of: {', '.join(reasons)}.",
        [
            *number("slowdown reasons", len(reasons), "reasons", 1.0),
            *number("clock below its maximum", lowered, "of the maximum", LOWERED),
            *number("temperature", machine.temperature_c, "degrees Celsius"),
            *number("power", machine.power_share, "of the limit"),
        ],
        lowered,
        direct=lowered is not None,
        advice="check cooling and power limit: saturate doctor",
    )


def _named(reasons: tuple[str, ...], words: tuple[str, ...]) -> list[str]:
    return [reason for reason in reasons if any(word in reason.lower() for word in words)]
