"""The coding of chunks: bit-exact both ways, robust against anything that is not one."""

from __future__ import annotations

import random
import tracemalloc
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saturate.checkpoints import deltas

CODINGS = [deltas.AS_IS] + [deltas.Coding(width, lanes) for width in deltas.WIDTHS for lanes in {0, 1, (1 << width) - 1, 0b1010 % (1 << width)}]


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300), st.sampled_from(CODINGS))
def test_decoding_gives_the_bytes_back(data, coding):
    assert deltas.decode(deltas.encode(data, coding), coding, len(data)) == data


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300), st.sampled_from(CODINGS), st.integers(0, 300))
def test_what_is_no_coding_raises_value_error_and_nothing_else(payload, coding, size):
    try:
        assert len(deltas.decode(payload, coding, size)) == size
    except ValueError:
        pass        # the only way out


def test_a_stream_that_unpacks_to_far_more_is_refused():
    """And takes no memory for it."""
    bomb = zlib.compress(bytes(1 << 26))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="another length"):
            deltas.decode(bomb, deltas.Coding(1, 1), 100)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200).flatmap(lambda a: st.tuples(st.just(a), st.binary(min_size=len(a), max_size=len(a)))))
def test_xor_is_its_own_inverse(pair):
    a, b = pair
    assert deltas.xor(deltas.xor(a, b), b) == a
    assert deltas.xor(a, a) == bytes(len(a))


def test_xor_of_different_lengths_is_refused():
    with pytest.raises(ValueError):
        deltas.xor(b"ab", b"abc")


def test_noise_is_stored_as_it_is():
    assert deltas.choose([random.Random(0).randbytes(1 << 14)]) == (deltas.AS_IS, 1.0)


def test_only_the_lanes_that_shrink_are_compressed():
    noise = random.Random(0)
    numbers = b"".join(bytes([noise.randrange(256), noise.randrange(256), noise.randrange(4), 63]) for _ in range(4000))
    coding, share = deltas.choose([numbers])
    assert coding == deltas.Coding(4, 0b1100)
    assert 0.5 < share < 0.6
    assert len(deltas.encode(numbers, coding)) < 0.6 * len(numbers)


def test_nothing_to_sample_is_stored_as_it_is():
    assert deltas.choose([]) == deltas.choose([b""]) == (deltas.AS_IS, 1.0)
