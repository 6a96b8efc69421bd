"""Whose line a look at a fetch names."""

from __future__ import annotations

import os
import sys
import sysconfig

import pytest

torch = pytest.importorskip("torch")

from saturate.agent.places import Places  # noqa: E402

LIBRARIES, MINE = sysconfig.get_paths()["purelib"], "/home/me"

#: A dataset of the user's and one of a library's, and the loops that ask for their batches. `look` takes the place of what is slow.
CODE = {
    f"{LIBRARIES}/images.py": "def decode():\n    return look()\ndef images():\n    return decode()\n",
    f"{MINE}/data.py": "def mine():\n    return decode()\n",
    f"{LIBRARIES}/bars.py": "def bar(batches):\n    for batch in batches:\n        yield batch\n",
    f"{LIBRARIES}/trainer.py": "def fit(batches):\n    for batch in batches:\n        return batch\n",
    f"{MINE}/train.py": "def loop(batches):\n    for batch in batches:\n        return batch\ndef train(batches):\n    return fit(batches)\n",
    os.path.join(os.path.dirname(torch.__file__), "loader.py"): "def collect(item):\n    return item()\n",
}


@pytest.fixture
def code():
    """What all of these define."""
    found = {}
    for file, text in CODE.items():
        exec(compile(text, file, "exec"), found)
    return found


def batches(collect, item):
    """The fetch: one batch after the other."""
    class Fetch:
        def __iter__(self):
            return self

        def __next__(self):
            return collect(item)

    return Fetch()


@pytest.mark.parametrize("loop, item, named", [
    ("loop", "mine", ("data.py", 2, "mine")),                # the user's own, although a library decodes
    ("train", "mine", ("data.py", 2, "mine")),
    ("loop", "images", ("train.py", 2, "loop")),                       # the user's loop waits for a library's dataset
    ("bar", "images", ("train.py", 2, "loop")),
    ("train", "images", ("images.py", 4, "images")),              # the user's line is the whole training
    ("train", "look", None),                                       # torch's own all the way
])
def test_the_line_that_a_batch_waits_for(code, loop, item, named):
    """Seen: "the slowest line of the input" was the call of `trainer.fit`."""
    places = Places(torch)
    places._known[__file__] = 0         # as the agent's own wrapper of the fetch
    seen = []
    code["look"] = lambda: seen.append(places.fetched(sys._getframe(1), fetch))
    data = batches(code["collect"], code[item])
    fetch = type(data).__next__.__code__
    (code["loop"](code["bar"](data)) if loop == "bar" else code[loop](data))
    (place,) = seen
    assert named == (place and (os.path.basename(place[0]), *place[1:]))


def test_outside_of_the_fetch_there_is_no_such_line(code):
    assert Places(torch).fetched(sys._getframe(), code["collect"].__code__) is None
