"""Where the host waits, as a profile tells it."""

from __future__ import annotations

from saturate.records.observations import Observations, SyncSeen
from saturate.study import waits


def test_a_copy_to_the_device_has_its_line_and_an_operator_its_name() -> None:
    seen = Observations(device="cuda", syncs=(SyncSeen("/home/u/train.py:12", "Tensor.to (HtoD)", 2.0, 4.0),
                                              SyncSeen("aten::nonzero", "cudaStreamSynchronize", 1.0, 3.0),
                                              SyncSeen("", "cudaDeviceSynchronize", 1.0, 2.0)))
    found = waits.of_trace(seen, lambda file: file.removeprefix("/home/u/"), 0.5)
    assert [(one.where, one.ms_per_step) for one in found] == [("train.py:12", 2.0), ("aten::nonzero", 1.5), ("", 1.0)]
    assert [(one.file, one.line, one.what) for one in map(waits.shown, found)] == [
        ("train.py", 12, "Tensor.to (HtoD)"), ("", 0, "cudaStreamSynchronize in aten::nonzero"), ("", 0, "cudaDeviceSynchronize")]
    assert waits.of_trace(Observations(device="cpu", syncs=seen.syncs), str, 1.0) == ()


def test_what_was_clocked_is_told_for_each_step() -> None:
    record = {"steps": 4, "syncs": [["/home/u/train.py", 7, "Tensor.item", 8, 40_000_000]]}
    assert waits.timed(record, lambda file: file.rpartition("/")[2], 0.5) == (SyncSeen("train.py:7", "Tensor.item", 2.0, 5.0),)
    assert waits.timed({"steps": 4}, str, 1.0) == ()
