"""Techniques that lie about their class, their numerics, their effect or the time: none is kept.

All but a few are really faster (see `parties`), so that without its lie each would end up in the recipe.
"""

from __future__ import annotations

import os
import sys
import time

import pytest
from parties import TECHNIQUES, WORKLOAD, identity, publish

from saturate.records.facts import Facts
from saturate.study.bench import Bench
from saturate.study.racing import Racer
from saturate.study.search import Search
from saturate.study.store import Store
from saturate.study.tune import AA
from saturate.study.verification import Verifier
from saturate.techniques import _registry
from saturate.trial.process import Workload

pytestmark = pytest.mark.slow

#: name -> (fates that are right, words of the reason)
LIARS = {
    "perturbs": ({"rejected_numerics"}, "not bit-identical"),
    "hidden_bf16": ({"rejected_numerics"}, "deviates"),
    "one_over_n": ({"rejected_numerics"}, "gradient norm"),
    "nan_at_40": ({"rejected_numerics"}, ""),
    "skips_updates": ({"rejected_numerics"}, ""),
    "other_seed": ({"rejected_numerics"}, ""),
    "half_batch": ({"rejected_numerics"}, "other data"),
    "half_forward": ({"rejected_numerics"}, "deviates"),
    "skips_pairs": ({"rejected_numerics", "slower", "no_difference", "inconclusive"}, ""),      # a slower step
    "counts_twice": ({"rejected_numerics"}, "backward runs 1.00 times a step"),
    "slow_clocks": ({"no_difference", "inconclusive", "slower"}, ""),
    "slow_agent_clock": ({"failed"}, "clock"),
    "two_faced": ({"rejected_numerics"}, "trains otherwise when it is timed"),
    "stands_still": ({"rejected_numerics"}, "did not move"),
    "inactive": ({"no_difference", "inconclusive", "slower"}, ""),
    "admits_it": ({"not_applied"}, "nothing shows it"),
    "raises": ({"failed"}, "broken technique"),
    "active_raises": ({"failed"}, "broken proof"),
    "crashes": ({"failed"}, "SIGABRT"),
}


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Search:
    """One search over all of them, with the real trials, races and verification runs."""
    top = tmp_path_factory.mktemp("liars")
    work = top / "work"
    work.mkdir()
    (work / "train.py").write_text(WORKLOAD, encoding="utf-8")
    site = publish(top / "site", list(LIARS))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SATURATE", "PYTHON", "PYTEST"))}
    study = work / ".saturate"
    store = Store(study / "run")
    bench = Bench(Workload([sys.executable, "train.py"], work, environment, 120.0), study / "run", study, store, 60.0, print)
    try:
        live = bench.live("baseline", ())
        bench.step, bench.reference_events = live.hello["step"], live.events
        bench.finish_live(live)
        verifier = Verifier(bench)
        assert verifier.check_baseline() is None
        registry = {identity(name): _registry.load_one(name, str(site / f"{name}.py")) for name in LIARS}
        racer = Racer(bench, 0.02)
        # As tune does before it searches: what the baseline's losses are when it is timed is known from here on.
        racer.run("A/A", (), (), AA, time.monotonic() + 60.0, share_base=True)
        search = Search(registry, Facts(), racer, verifier, time.monotonic() + 1200.0, print)
        search.run()
        search.racer.drop_base()
    finally:
        bench.close()
        store.close()
        for name in LIARS:
            sys.modules.pop(name, None)
    return search


@pytest.mark.parametrize("name", LIARS)
def test_a_liar_is_found_out(searched: Search, name: str) -> None:
    fate = searched.fates[identity(name)]
    fates, words = LIARS[name]
    assert fate.fate in fates, (fate.fate, fate.reason)
    assert words in fate.reason
    assert name in TECHNIQUES


def test_no_liar_is_kept(searched: Search) -> None:
    assert searched.kept == ()


def test_their_gain_was_real(searched: Search) -> None:
    """Otherwise the lie was never put to the test."""
    for name in ("perturbs", "hidden_bf16", "one_over_n", "skips_updates", "two_faced"):
        gain = searched.fates[identity(name)].gain
        assert gain is not None and gain > 0.2, (name, gain)
