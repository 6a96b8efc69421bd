"""Young's and Daly's intervals, against numbers worked out elsewhere and against the model they come from."""

from __future__ import annotations

import math
import random
from statistics import mean

import pytest

from saturate.checkpoints.advice import daly_s, lost_share, young_s


def test_young_and_daly_by_hand():
    assert young_s(60, 86_400) == pytest.approx(3219.94, abs=0.01)                 # sqrt(2 * 60 * 86400)
    x = 60 / (2 * 86_400)
    assert daly_s(60, 86_400) == pytest.approx(3219.94 * (1 + math.sqrt(x) / 3 + x / 9) - 60, abs=0.01)
    assert daly_s(1000, 400) == 400             # saving takes longer than the job lives


@pytest.mark.parametrize("save_s, restart_s, mtbf_s", [(0.5, 0, 3600), (20, 120, 86_400), (300, 600, 20_000), (60, 1000, 5000)])
def test_daly_is_within_a_percent_of_the_least_loss(save_s, restart_s, mtbf_s):
    best = min(lost_share(save_s * 1.02**k / 10, save_s, restart_s, mtbf_s) for k in range(900))
    found = lost_share(daly_s(save_s, mtbf_s), save_s, restart_s, mtbf_s)
    assert found <= best * 1.01
    for factor in (0.5, 2):
        assert lost_share(factor * daly_s(save_s, mtbf_s), save_s, restart_s, mtbf_s) > found


def test_the_loss_is_that_of_a_simulated_job():
    """Failures at random, as the formula assumes: also during saves and restarts."""
    interval, save_s, restart_s, mtbf_s = 900.0, 60.0, 120.0, 4000.0
    draw = random.Random(0)
    losses = []
    for _ in range(60):
        clock, done, failure = 0.0, 0, draw.expovariate(1 / mtbf_s)
        while done < 200:
            needed = interval + save_s
            while clock + needed > failure:
                clock = failure
                failure = clock + draw.expovariate(1 / mtbf_s)
                needed = restart_s + interval + save_s      # a failure during the restart starts it anew
            clock += needed
            done += 1
        losses.append(1 - 200 * interval / clock)
    assert mean(losses) == pytest.approx(lost_share(interval, save_s, restart_s, mtbf_s), abs=0.01)


def test_extremes_are_shares():
    for arguments in [(1e9, 1, 1, 1), (1, 1, 1e9, 1), (0, 1, 1, 1), (1, 1, 0, math.inf), (1e-9, 1e-12, 0, 1e12)]:
        assert 0.0 <= lost_share(*arguments) <= 1.0
