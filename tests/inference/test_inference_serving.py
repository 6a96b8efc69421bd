"""Climbing to the setting with the most samples per second."""

from __future__ import annotations

import pytest

from saturate.inference.serving import Setting, climb


def rates(curve: dict[Setting, float | None], cores: int = 4) -> dict[Setting, float]:
    return dict(climb(curve.get, 8, cores, lambda: True))


def test_the_batch_grows_while_it_pays_then_processes_do() -> None:
    found = rates({Setting(8): 100, Setting(16): 150, Setting(32): 151, Setting(64): 900, Setting(16, 2): 290, Setting(16, 4): 250})
    assert list(found) == [Setting(8), Setting(16), Setting(32), Setting(16, 2), Setting(16, 4)]
    assert max(found, key=found.__getitem__) == Setting(16, 2)


def test_what_does_not_run_ends_the_climb() -> None:
    assert rates({}) == {}
    assert list(rates({Setting(8): 100.0, Setting(8, 2): 90.0})) == [Setting(8), Setting(8, 2)]


def test_time_ends_the_climb() -> None:
    assert list(climb(lambda setting: 1.0 * setting.batch, 8, 4, lambda: False)) == [(Setting(8), 8.0)]


@pytest.mark.parametrize("cores", [1, 2])
def test_no_more_processes_than_cores(cores: int) -> None:
    found = dict(climb(lambda setting: 10.0 * setting.processes, 8, cores, lambda: True))
    assert max(setting.processes for setting in found) == cores
