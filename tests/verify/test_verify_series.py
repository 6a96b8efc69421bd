import json
import math
from array import array
from dataclasses import replace

import pytest
from captures import write
from hypothesis import given, settings
from hypothesis import strategies as st

from saturate.verify.series import CAPTURE, SAMPLES, CaptureDamaged, Series, read

SERIES = Series(losses=[[2.5, 2.25], [2.0, 1.75], [1.5, 1.0]], grad_norms=[1.0, 0.5, 0.25],
                samples=[array("f", [0.5, -1.0, 2.0]), array("f", [0.25, -1.5, 2.0]), array("f", [0.0, 0.0, 1.0])],
                motif="F B F B S", digests=["a", "b", "c"], segments=[1, 2])


def test_what_was_written_is_read(tmp_path):
    write(SERIES, tmp_path)
    assert read(tmp_path) == SERIES
    assert SERIES.loss(1) == 1.875
    assert SERIES.parts() == [(0, 1), (1, 3)]


def test_buffers_are_read_beside_the_samples(tmp_path):
    both = replace(SERIES, statistics=[array("f", [1.0, 0.5, k]) for k in range(3)], statistics_segments=[2, 1])
    write(both, tmp_path)
    assert read(tmp_path) == both
    assert both.statistics_parts() == [(0, 2), (2, 3)] and SERIES.statistics_parts() == []


def test_float64_is_kept(tmp_path):
    fine = replace(SERIES, samples=[array("d", [1 / 3, 7e6 + 1e-4, k]) for k in range(3)], precision="float64")
    write(fine, tmp_path)
    assert read(tmp_path) == fine
    assert (SERIES.rounding, fine.rounding) == (2.0**-24, 2.0**-53)


def test_numbers_that_are_not_finite_survive(tmp_path):
    odd = replace(SERIES, losses=[[math.nan], [math.inf], []], grad_norms=[math.nan, math.inf, 1.0])
    write(odd, tmp_path)
    found = read(tmp_path)
    assert math.isnan(found.losses[0][0]) and found.losses[1] == [math.inf] and found.losses[2] == []
    assert math.isnan(found.loss(0)) and math.isnan(found.loss(1)) and math.isnan(found.loss(2))
    assert math.isnan(found.grad_norms[0])


def test_null_is_read_as_not_measured_and_unknown_fields_are_ignored(tmp_path):
    header, update = {"dims": 0, "later": 1}, {"update": 0, "losses": [1.0, None], "grad_norm": None, "norm": 3.0}
    (tmp_path / CAPTURE).write_text(json.dumps(header) + "\n" + json.dumps(update) + "\n")
    found = read(tmp_path)
    assert len(found) == 1 and math.isnan(found.grad_norms[0]) and math.isnan(found.losses[0][1])
    assert found.digests == [""] and found.parts() == [(0, 0)]


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(min_value=1, max_value=400), samples=st.booleans())
def test_a_run_that_was_killed_is_read_up_to_its_last_whole_update(tmp_path_factory, cut, samples):
    folder = tmp_path_factory.mktemp("cut")
    write(SERIES, folder)
    path = folder / (SAMPLES if samples else CAPTURE)
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    try:
        found = read(folder)
    except CaptureDamaged:          # nothing is left of the header
        assert not samples and cut > len(whole) - len(whole.splitlines()[0])
        return
    n = len(found)
    assert n < 3 or cut <= 1        # the last newline may go without loss
    assert (found.losses, found.samples) == (SERIES.losses[:n], SERIES.samples[:n])


@pytest.mark.parametrize("text, reason", [
    ("", "empty"), ("nonsense\n", "not JSON"), ("[1]\n", "not a capture"), ('{"schema": 99, "dims": 0}\n', "schema 3"),
    ('{"dims": -1}\n', "no valid dims"), ('{"dims": "3"}\n', "no valid dims"),
    ('{"dims": 0, "precision": "float128"}\n', "precision is no known number format"),
    ('{"dims": 0}\n{"update": 0}\n{"update": 1, "losses": []}\n', "line 2"),
    ('{"dims": 0}\n{"update": 1, "losses": []}\n', "update 0 is missing")])
def test_damage_is_named(tmp_path, text, reason):
    (tmp_path / CAPTURE).write_text(text)
    with pytest.raises(CaptureDamaged, match=reason):
        read(tmp_path)


def test_no_capture_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path)


def test_settings_and_dimensions_come_back(tmp_path):
    one, other = (("lr", 0.1), ("betas", (0.9, 0.999))), (("lr", 0.2),)
    known = replace(SERIES, dimensions=[2, 1], settings=[[one, None] if k % 2 else [other, one] for k in range(len(SERIES))])
    write(known, tmp_path)
    assert read(tmp_path) == known
