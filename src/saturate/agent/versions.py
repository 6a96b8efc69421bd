"""Is this the torch and the Python that the recipe was measured with?

Asked in every process that imports torch, right after it: what a command such as `bash train.sh` or `uv run` ends in does
not show from outside. A launcher imports torch before it starts its ranks, so it is the one that speaks, or refuses.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from saturate import notices
from saturate.agent import observe
from saturate.errors import RecipeError


def check(torch: Any, plan: dict[str, Any]) -> None:
    """Say what has changed, once in a family of processes; with `plan["strict"]`, end this process with exit code 2."""
    present = {"torch": str(torch.__version__), "python": f"{sys.version_info[0]}.{sys.version_info[1]}"}
    changes = [change for change in changed(plan["doubts"], present) if change not in plan.get("said", ())]
    if not changes:
        return
    if plan["strict"]:
        error = RecipeError.outdated(changes)
        notices.tell(error.card() + "\n")       # in one piece: other ranks may speak at the same time
        notices.flush()
        os._exit(error.exit_code)       # as an exception it could be caught, and then it would train
    if observe.rank() == 0:
        notices.tell("".join(f"saturate: {change}\n" for change in changes))
    os.environ["SATURATE_PLAN"] = json.dumps({**plan, "said": [*plan.get("said", ()), *changes]})   # for those started from here


def changed(doubts: Mapping[str, Sequence[str]], present: Mapping[str, str]) -> list[str]:
    """One sentence for each field of `present` that is not what the recipe was made for. `doubts`: by field what that was, and
    what follows from a change, as `machine.fingerprint.doubts` tells."""
    return [f"{field} changed from {old} to {present[field]}: {consequence}" for field, (old, consequence) in doubts.items()
            if present[field] != old]
