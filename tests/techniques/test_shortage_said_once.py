"""A technique that stays out says why, once, however many models the training goes on with."""

from __future__ import annotations

import torch

from saturate.agent.context import Context
from saturate.techniques import _shortage


def test_the_same_reason_is_said_once(capfd):
    context = Context(torch)
    for reason in ("nothing to gain for the first", "nothing to gain for the first", "nothing to gain for another", "nothing to gain for the first"):
        _shortage.refuse(context, "some-technique", reason)
    assert capfd.readouterr().err.count("did not take effect") == 2
    assert _shortage.refusal(context.notes, "some-technique") == "nothing to gain for the first"
