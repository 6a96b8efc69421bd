"""The plan names the imports that wake the agent: all of those that it acts on."""

from __future__ import annotations

import json
import random

import pytest

from saturate.agent import bootstrap, redirect
from saturate.trial import launch


@pytest.mark.parametrize(("mode", "more", "as_well"), [
    ("run", {}, set()), ("trial", {}, set()), ("verify", {"capture": {"seed": 7}}, {"random"}),
])
def test_a_plan_wakes_the_agent_at_each_import_that_it_acts_on(mode, more, as_well):
    state = random.getstate()
    text = launch.plan_text(mode, [], **more)
    assert text.startswith('{"wakes": "torch'), "read without a parser"
    plan = json.loads(text)
    try:
        assert set(plan["wakes"].split()) == set(bootstrap.start(plan)) | as_well
    finally:
        random.setstate(state)


def test_redirection_begins_with_the_process(monkeypatch):
    installed = []
    monkeypatch.setattr(redirect, "install_from_plan", installed.append)
    plan = json.loads(launch.plan_text("trial", [], redirect={"root": "/r", "allowed": []}))
    assert plan["wakes"] == ""
    assert {"torch", "sqlite3", "safetensors", "wandb"} <= set(bootstrap.start(plan))
    assert installed == [plan["redirect"]]
