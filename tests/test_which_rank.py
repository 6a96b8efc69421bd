"""Which rank a process is, and how many share its machine, by whoever started it."""

from __future__ import annotations

import sys
import types

import pytest

from saturate import ranks

NAMES = (*ranks.VARIABLES, "LOCAL_WORLD_SIZE")


@pytest.fixture
def told(monkeypatch):
    """Set what launchers say, and which process group there is: (rank, number of ranks), or None."""

    def tell(group=None, **variables):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        rank, size = group or (0, 1)
        monkeypatch.setitem(sys.modules, "torch.distributed", types.SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: group is not None, get_rank=lambda: rank, get_world_size=lambda: size))

    return tell


def test_the_process_group_is_asked_first(told):
    told()
    assert (ranks.rank(), ranks.here()) == (0, 1)
    told(RANK="3", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4")
    assert (ranks.rank(), ranks.here()) == (3, 4)
    told((1, 2))                                # as `mp.spawn` leaves the variables
    assert (ranks.rank(), ranks.here()) == (1, 2)
    told((5, 8), RANK="5", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4")
    assert (ranks.rank(), ranks.here()) == (5, 4)


def test_variables_that_mean_something_else(told):
    told(RANK="first", WORLD_SIZE="8", LOCAL_WORLD_SIZE="all")
    assert (ranks.rank(), ranks.here()) == (0, 1)
    told((1, 2), LOCAL_WORLD_SIZE="0")
    assert ranks.here() == 2


def test_without_torch(monkeypatch, told):
    told()
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert (ranks.group(), ranks.rank(), ranks.here()) == (None, 0, 1)
