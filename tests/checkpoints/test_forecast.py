"""The forecast: near what is then written, for the kinds of training that differ most; files that are none are refused."""

from __future__ import annotations

import io
import json
import struct
import zipfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from saturate.checkpoints import forecast  # noqa: E402
from saturate.checkpoints.chunks import Store  # noqa: E402
from saturate.checkpoints.recorder import Recorder  # noqa: E402


def two(tmp_path, change) -> tuple[list, list]:
    """Two successive states, saved."""
    torch.manual_seed(0)
    state = {"large": torch.randn(700_000), "small": torch.randn(40_000)}
    states, paths = [], []
    for number in range(2):
        states.append({name: value.clone() for name, value in state.items()})
        paths.append(tmp_path / f"{number}.pt")
        torch.save(states[-1], paths[-1])
        change(state)
    return states, paths


CASES = {
    "adapter": (lambda s: s["small"].normal_(), 0.03, 0.07),
    "dense, a little": (lambda s: s["large"].mul_(1.0001), 0.3, 0.7),
    "sparse rows": (lambda s: s["large"].view(-1, 32).index_add_(0, torch.randperm(21_875)[:200], torch.ones(200, 32)), 0.005, 0.08),
    "all new": (lambda s: [value.normal_() for value in s.values()], 0.7, 1.0),
    "nothing": (lambda s: None, 0.0, 0.01),
}


@pytest.mark.parametrize("name", CASES)
def test_the_forecast_is_near_what_is_written(tmp_path, name):
    change, low, high = CASES[name]
    states, paths = two(tmp_path, change)
    found = forecast.compare(*(forecast.sample(path) for path in paths))
    with Store.create(tmp_path / "store", 1 << 24) as store:
        previous = None
        for state in states:
            recorder = Recorder(store, previous, 8)
            torch.save(state, recorder)
            previous = recorder.finish("/x.pt", 1)
    written = previous.new_bytes / previous.file_bytes
    assert low <= written <= high
    assert found.deltas_share == pytest.approx(written, abs=0.03)
    assert found.deltas_share <= found.blocks_share + 1e-9 and found.blocks_share <= found.whole_share + 1e-9
    assert found.helps is (written < forecast.NOT_WORTH)
    assert ("will not help" in found.reason) is not found.helps


def test_a_sample_of_a_large_file_is_bounded_and_still_near(tmp_path):
    _, paths = two(tmp_path, lambda s: s["large"].view(-1, 32).index_add_(0, torch.randperm(21_875)[:200], torch.ones(200, 32)))
    whole = forecast.compare(*(forecast.sample(path) for path in paths))
    part = forecast.compare(*(forecast.sample(path, most_chunks=12) for path in paths))
    assert sum(map(len, forecast.sample(paths[0], most_chunks=12).chunks.values())) <= 12 << 16
    assert sum(map(len, forecast.sample(paths[0], most_bytes=1 << 19).chunks.values())) <= 1 << 19
    assert part.sampled_share < 0.4 < 0.9 < whole.sampled_share
    assert part.deltas_share == pytest.approx(whole.deltas_share, abs=0.03)


def safetensors(path, tensors: dict[str, bytes], header: dict | None = None) -> None:
    place, entries = 0, {"__metadata__": {"format": "pt"}}
    for name, data in tensors.items():
        entries[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [place, place + len(data)]}
        place += len(data)
    text = json.dumps({**entries, **(header or {})}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def test_safetensors_files_are_understood(tmp_path):
    a, b = bytes(100_000), bytes(range(256)) * 400
    safetensors(tmp_path / "0.safetensors", {"a": a, "b": b})
    safetensors(tmp_path / "1.safetensors", {"a": a, "b": b[1:] + b"x"})
    found = forecast.compare(*(forecast.sample(tmp_path / f"{n}.safetensors") for n in (0, 1)))
    assert found.whole_share == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("header", [{"c": {"data_offsets": [5, 9]}}, {"c": {}}, {"c": 1}, {"c": {"data_offsets": ["a", "b"]}}])
def test_safetensors_headers_that_lie_are_refused(tmp_path, header):
    safetensors(tmp_path / "x.safetensors", {"a": bytes(100)}, header)
    with pytest.raises(ValueError):
        forecast.sample(tmp_path / "x.safetensors")


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300), st.sampled_from([b"", b"PK\x03\x04", struct.pack("<Q", 10), b"\x80\x02"]))
def test_files_that_are_none_raise_value_error_only(content, start):
    with pytest.raises(ValueError):
        forecast.pieces_of(io.BytesIO(start + content), len(start + content))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_damaged_zip_raises_value_error_only(data):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 50)
        archive.writestr("archive/data/0", b"y" * 100)
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        for piece in forecast.pieces_of(io.BytesIO(content), len(content)):
            assert piece.offset + piece.size <= len(content)
    except ValueError:
        pass        # the only way out
