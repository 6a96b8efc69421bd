"""Exceptions that a signal handler of the script raises while code of ours runs: a time limit, a preemption notice. Python calls a
handler between any two instructions, so such an exception comes out of whatever was running, and it is the script's to catch.
"""

from __future__ import annotations

from typing import Any


def from_signal_handler(error: BaseException) -> bool:
    """Whether it was raised in a signal handler, or in a trace function.

    Told by the frames: only those are called with the very frame that they interrupt. What is registered by now does not tell: many
    handlers put another one in their place before they raise.
    """
    traceback = error.__traceback__
    while traceback is not None:
        if _interrupts_its_caller(traceback.tb_frame):
            return True
        traceback = traceback.tb_next
    return False


def _interrupts_its_caller(frame: Any) -> bool:
    caller = frame.f_back
    if caller is None or frame.f_code.co_name == "<module>":    # the variables of a module are not arguments
        return False
    if str(frame.f_globals.get("__name__")).startswith("saturate."):     # code of ours looks at its caller, and handles no signals
        return False
    return any(value is caller or (type(value) is tuple and any(one is caller for one in value))    # of `*arguments`
               for value in frame.f_locals.values())
