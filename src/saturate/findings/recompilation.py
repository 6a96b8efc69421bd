"""Compiled code is compiled again during training.

What it means
-------------
`torch.compile` guards what it assumed: shapes, types, values of Python variables. When a guard fails, it compiles
another version, for seconds; after some versions it gives up and runs the function eagerly from then on.

Evidence
--------
Recompilations in the observed steps, which lie after the warm-up; their reasons; time spent compiling, of the
observed time; whether the limit of recompilations was hit.

Threshold
---------
1 recompilation in the observed steps, or the limit was hit.

Not to be confused with
-----------------------
The first compilation, which every compiled function pays once. Graph breaks, which split the code but compile once.
Slow host code: time spent compiling is taken off there.

What helps
----------
`dynamic=True` or `torch._dynamo.mark_dynamic` for sizes that change, padding to few sizes, and tensors in place of
Python numbers that change each step.

References
----------
PyTorch documentation, "torch.compile Troubleshooting" and "Dealing with Recompilations".
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import at_most, concludes, finding, number, one_line, percent
from saturate.records.analysis import Evidence, Finding
from saturate.records.observations import Observations

RULE = Rule(id="recompilation", title="recompilation during training")

RECOMPILES = 1


def detect(seen: Observations) -> Finding | None:
    compiler = seen.compiler
    again = compiler.recompiles is not None and compiler.recompiles >= RECOMPILES
    if not concludes(seen, RULE) or not (again or compiler.recompile_limit_hit):
        return None
    because = f": {one_line(compiler.recompile_reasons[0])}" if compiler.recompile_reasons else ""
    evidence = [
        *number("recompilations", compiler.recompiles, f"in {seen.steps} steps", RECOMPILES),
        *number("compiling", compiler.compile_share, "of the observed time"),
    ]
    if again:
        taking = f", taking {percent(compiler.compile_share)} of the time" if compiler.compile_share else ""
        reason = f"Code was compiled again {compiler.recompiles} times in {seen.steps} steps{taking}{because}."
    else:
        reason = f"The compiler gave up after too many recompilations, and the function runs eagerly{because}."
        evidence = [Evidence(metric="limit of recompilations hit", value=1.0, unit="since the start", threshold=1.0)]
    lost = at_most(compiler.compile_share) if again and compiler.compile_share is not None else None
    return finding(
        RULE,
        seen,
        reason,
        evidence,
        lost,
        advice="mark what changes as dynamic (dynamic=True), or pad it to few sizes",
    )
