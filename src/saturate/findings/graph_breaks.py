"""Compiled code falls apart into several graphs.

What it means
-------------
Where the compiler meets something that it cannot trace (a print, `.item()`, an unknown library), it ends the graph,
runs that in Python and starts another graph. Nothing is fused across the break.

Evidence
--------
Graph breaks of compiled code and their reasons.

Threshold
---------
1 graph break.

Not to be confused with
-----------------------
Recompilation, which costs time in every affected step. Code that nobody compiles: it has no graph to break.

What helps
----------
Moving the untraceable line out of the compiled function. `TORCH_LOGS=graph_breaks` shows each with its line. What
fusion across the break would give is not known, so there is no bound.

References
----------
PyTorch documentation, "torch.compile Troubleshooting", section on graph breaks, and `torch._dynamo.explain`.
"""

from __future__ import annotations

from saturate.findings._api import Rule
from saturate.findings._common import concludes, finding, number, one_line
from saturate.records.analysis import Finding
from saturate.records.observations import Observations

RULE = Rule(id="graph-breaks", title="graph breaks in compiled code")

BREAKS = 1


def detect(seen: Observations) -> Finding | None:
    compiler = seen.compiler
    if not concludes(seen, RULE) or compiler.graph_breaks is None or not compiler.graph_breaks >= BREAKS:
        return None
    if compiler.compiled is False:
        return None
    because = (
        f", the first because of: {one_line(compiler.graph_break_reasons[0])}" if compiler.graph_break_reasons else ""
    )
    count = "1 graph break" if compiler.graph_breaks == 1 else f"{compiler.graph_breaks} graph breaks"
    return finding(
        RULE,
        seen,
        f"The compiled code has {count}{because}.",
        number("graph breaks", compiler.graph_breaks, "breaks", BREAKS),
        None,
        advice="TORCH_LOGS=graph_breaks names the lines; move them out of the compiled function",
    )
