"""The options are an interface: scripts depend on them, so a change must be meant.

After a meant change:    python tests/cli/test_frozen.py --write
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from pathlib import Path

from saturate.cli import main

SNAPSHOT = Path(__file__).with_name("options.json")


def options() -> dict[str, list[str] | None]:
    """What each verb takes: options, and positional arguments in capitals; null: the verb has no module yet."""
    found: dict[str, list[str] | None] = {}
    for name, path, _ in main.VERBS:
        if importlib.util.find_spec(path) is None:
            found[name] = None
            continue
        module = importlib.import_module(path)
        found[name] = words(main.parser_of(name, module)) + (["-- COMMAND"] if main.takes_command(module) else [])
    return found


def words(parser: argparse.ArgumentParser) -> list[str]:
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                found += [f"{name} {word}" for word in words(sub)]
            continue
        choices = f" {{{','.join(map(str, action.choices))}}}" if action.choices else ""
        found.append((", ".join(action.option_strings) or f"{action.dest.upper()}{action.nargs or ''}") + choices)
    return found


def test_options_are_those_of_the_snapshot():
    assert options() == json.loads(SNAPSHOT.read_text()), "if the change is meant: python tests/cli/test_frozen.py --write"


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    SNAPSHOT.write_text(json.dumps(options(), indent=1) + "\n")
