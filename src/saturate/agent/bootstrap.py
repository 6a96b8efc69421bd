"""From the first import that matters to the first sign of training: what to do after which import, and the seams in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def start(plan: dict[str, Any]) -> dict[str, Callable[[Any], None]]:
    """Called by `sitecustomize` with the plan that the launcher wrote, when the first module was imported that the plan waits
    for. Returns what to call with which module, right after its import.

    Plan keys: `wakes` (names of those modules, see `trial.launch.plan_text`), `package` (folder of this package), `mode`
    ("trial", "verify" or "run"), `techniques` (id, module, path, options), `step` (known motif or null), and per mode `socket`
    and `token`, `capture`, `drill`, `fit` (see `agent.batching`), `redirect`, `on_divergence`, `strict`, `doubts` (see `agent.versions`).
    `early` (true: techniques that must act before memory is taken do so in a verification run, too) and `early_facts` (a path:
    what is known before the first training forward is written there): see `agent.early`; `device_limit_bytes`; `ended` (the
    beginning of a path: what was seen by a process that trained and ended before the gate is written there); `inherited` (see
    `agent.observe`); `turn` (a path: see `agent.turn`).
    """
    if plan.get("turn"):
        from saturate.agent import turn  # noqa: F401 - what it uses is not replaced yet

    callbacks: dict[str, Callable[[Any], None]] = {"torch": lambda torch: _on_torch(torch, plan)}
    if plan.get("redirect"):
        from saturate.agent import redirect, redirect_libraries

        redirect.install_from_plan(plan["redirect"])
        callbacks.update(redirect_libraries.callbacks())
    if plan["mode"] != "run":
        from saturate.agent import trackers

        callbacks.update(trackers.callbacks())
    capture = plan.get("capture")
    if capture:
        from saturate.agent import randomness

        seeds = capture["seed"], capture.get("seed_offset", 0)
        randomness.seed_standard_library(*seeds)
        callbacks["numpy"] = lambda numpy: randomness.seed_numpy(numpy, *seeds)
    return callbacks


def _on_torch(torch: Any, plan: dict[str, Any]) -> None:
    from saturate.agent import observe, seams
    from saturate.agent.session import Session

    observe.inherited.update(plan.get("inherited", {}))
    if plan.get("doubts"):
        from saturate.agent import versions

        versions.check(torch, plan)
    if plan.get("redirect"):
        from saturate.agent import redirect_libraries

        redirect_libraries.on_torch(torch)
    capture = plan.get("capture")
    if capture:
        from saturate.agent import randomness

        randomness.seed_torch(torch, capture["seed"], capture.get("seed_offset", 0), capture.get("deterministic", True))
        if capture.get("aligned"):
            randomness.align(torch, capture["seed"])
    session = Session(torch, plan)
    session.guard(session.whole, seams.install, session)
    if plan.get("drill"):
        from saturate.agent.drill import Drill

        session.capture = session.guard(Drill, session, plan["drill"])
