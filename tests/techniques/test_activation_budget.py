"""Choosing what to recompute, as pure arithmetic."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saturate.techniques import activation_checkpointing
from saturate.techniques._api import NotApplied
from saturate.techniques._budget import KEEP, MODES, OPERATORS, WHOLE, Cost, Profile, Visit, choose

#: A chain: block i reads what block i - 1 returned, key i; a loss at the end.
blocks = st.lists(
    st.tuples(st.integers(1, 100), st.integers(0, 60), st.floats(1, 100), st.one_of(st.none(), st.floats(0, 100)), st.booleans()),
    min_size=1, max_size=6)


def chain(parts, edge=5, loss=7, repeat=1) -> Profile:
    visits, sizes = [], {}
    for index, (inner, products, _, _, read) in enumerate(parts):
        sizes[index], sizes[index + 1] = edge, edge
        visits.append(Visit(block=index, inner_bytes=inner, arguments=frozenset((index,)), read=frozenset((index,) if read else ()),
                            product_bytes=products, needed_bytes=min(inner, products)))
    visits.append(Visit(read=frozenset((len(parts),)), inner_bytes=loss))
    costs = tuple(Cost(whole, operators) for _, _, whole, operators, _ in parts)
    return Profile((tuple(visits),) * repeat, sizes, costs)


def alike(count, inner=40, products=15, whole=10.0, operators=4.0) -> Profile:
    return chain([(inner, products, whole, operators, True)] * count)


@settings(max_examples=300, deadline=None)
@given(blocks, st.floats(0, 1.2))
def test_the_budget_is_kept_and_nothing_is_given_in_vain(parts, share):
    profile = chain(parts)
    plain = [KEEP] * len(parts)
    budget = share * profile.peak(plain)
    modes = choose(profile, budget)
    every = [list(choice) for choice in product(MODES, repeat=len(parts)) if profile.time(choice) < float("inf")]
    if modes is None:
        assert profile.peak(profile.uniform(WHOLE)) > budget
        return
    assert profile.peak(modes) <= budget
    for index, mode in enumerate(modes):
        if mode != KEEP:        # no single block could be kept instead
            assert profile.peak([*modes[:index], KEEP, *modes[index + 1:]]) > budget
    fitting = [profile.time(choice) for choice in every if profile.peak(choice) <= budget]
    for mode, step in ((WHOLE, 1), (WHOLE, 2), (WHOLE, 4), (OPERATORS, 1)):
        rival = profile.uniform(mode, step)
        if profile.peak(rival) <= budget:
            assert profile.time(modes) <= profile.time(rival)
    # Against all choices there are: at most one block's cost away.
    assert profile.time(modes) <= min(fitting) + max(cost.whole_ns for cost in profile.costs) + 1e-9


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 24), st.integers(10, 100), st.floats(0.1, 1.0))
def test_alike_blocks_come_within_one_block_of_the_budget(count, inner, share):
    profile = chain([(inner, 0, 1.0, None, True)] * count)
    budget = share * profile.peak([KEEP] * count)
    modes = choose(profile, budget)
    if modes is not None and WHOLE in modes:
        assert budget - inner - 5 < profile.peak(modes) <= budget


def test_earlier_blocks_go_first():
    """Recomputing the last block needs its memory on top of everything; the first one's finds it free again."""
    profile = alike(8)
    assert profile.peak([WHOLE] + [KEEP] * 7) < profile.peak([KEEP] * 7 + [WHOLE])
    modes = choose(profile, profile.peak([KEEP] * 8) - 1)
    assert modes[0] != KEEP and modes[1:] == [KEEP] * 7


def test_products_are_kept_while_that_is_cheaper():
    profile = alike(8)
    plain, least = profile.peak([KEEP] * 8), profile.peak([OPERATORS] * 8)
    assert set(choose(profile, (plain + least) / 2)) == {KEEP, OPERATORS}
    assert WHOLE in choose(profile, least - 30)


def test_large_cheap_blocks_go_first():
    small, large = (10, 0, 9.0, None, True), (60, 0, 10.0, None, True)
    profile = chain([small, large, small, large])
    assert choose(profile, profile.peak([KEEP] * 4) - 40) == [KEEP, WHOLE, KEEP, KEEP]


def test_shared_storages_count_once_and_what_the_script_holds_is_never_freed():
    visits = (Visit(read=frozenset((1, 2))), Visit(block=0, inner_bytes=10, read=frozenset((2,)), arguments=frozenset((2,))))
    assert Profile((visits,), {1: 100, 2: 1000}, (Cost(1.0),)).peak([KEEP]) == 1110
    assert Profile((visits, visits), {1: 100, 2: 1000}, (Cost(1.0),)).peak([WHOLE]) == 1110
    late = (Visit(block=0, inner_bytes=10), Visit(read=frozenset((1,))))
    assert Profile((late,), {1: 100}, (Cost(1.0),)).peak([WHOLE]) == 100
    assert Profile((late,), {1: 100}, (Cost(1.0),), frozenset((1,))).peak([WHOLE]) == 110


def test_blocks_that_may_not_be_recomputed_stay():
    profile = chain([(40, 0, 1.0, None, True)] * 3)
    profile = Profile(profile.passes, profile.sizes, (Cost(), Cost(1.0), Cost()))
    assert profile.uniform(WHOLE) == [KEEP, WHOLE, KEEP] and profile.uniform(OPERATORS) == [KEEP] * 3
    assert choose(profile, profile.peak([KEEP] * 3) - 1) == [KEEP, WHOLE, KEEP]
    assert choose(profile, 20) is None


def test_copies_of_buffers_count():
    visit = Visit(block=0, inner_bytes=100, buffer_bytes=30)
    assert visit.held(WHOLE)[0] == 30 and visit.recomputed(WHOLE, {}) == 100


@pytest.mark.parametrize("count", [96])
def test_many_blocks_do_not_take_long(count):
    import time

    profile = alike(count)
    began = time.process_time()
    assert choose(profile, 0.3 * profile.peak([KEEP] * count))
    assert time.process_time() - began < 2.0


def test_recomputing_that_takes_more_than_it_frees_is_refused_as_that():
    given = Visit(block=0, arguments=frozenset((1,)), results=frozenset((2,)))      # of what the block is given its backward needs nothing
    profile = Profile(((given,),), {1: 3 << 20, 2: 1 << 20}, (Cost(1.0),))
    with pytest.raises(NotApplied, match="saves nothing: the peak would be 4.0 MiB of activations, without it 1.0 MiB"):
        activation_checkpointing.modes(profile, activation_checkpointing.Options())
