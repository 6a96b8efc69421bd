"""Whatever the file holds: a trace whose columns fit together, or a TraceError; soon, and nothing else."""

from __future__ import annotations

import gzip

import kineto_text as made
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from kineto_text import document, training

from saturate.errors import TraceError
from saturate.trace import _json_stream, kineto
from saturate.trace.columns import Trace
from saturate.trace.read import read

SEED = document([*training(3), made.kernel("ncclKernel", 50, 5, 9, **{"Collective name": "allreduce", "Seq": 1})],
                deviceProperties=[{"id": 0, "name": "A", "numSms": 80}], distributedInfo={"rank": 0, "world_size": 2}, last=True)
#: A file takes milliseconds; one that takes seconds would be a hang on a real one.
LIMITS = settings(max_examples=100, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["ProfilerStep#1", "[memory]", "7", "aten::mm", "</script>", "\ud800", '},{"ph"', "\0"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(
        ["device", "stream", "correlation", "External id", "grid", "Input Dims", "Input type", "Collective name", "Bytes"]), inner),
    max_leaves=8)
categories = st.sampled_from(["kernel", "cpu_op", "cuda_runtime", "user_annotation", "cpu_instant_event", "Operator", "gpu_memcpy"])
events = st.fixed_dictionaries({}, optional={
    "ph": st.sampled_from("XXXXBiMsf") | json_values, "cat": categories | categories | json_values, "name": st.text() | json_values,
    "pid": json_values, "tid": json_values, "ts": st.integers(0, 10**6) | st.integers() | json_values,
    "dur": st.integers(0, 10**4) | json_values, "args": json_values})


#: Columns that are narrower where every value fits (columns.py).
NARROW = {"name", "tid", "shapes", "device", "stream", "correlation", "external", "bytes", "blocks", "shared_bytes"}


def sound(trace: Trace) -> None:
    """What every analysis relies on."""
    for table in (trace.gpu, trace.operators, trace.calls, trace.annotations, trace.memory):
        lengths = {len(column) for column in vars(table).values()}
        assert len(lengths) == 1
        for name, column in vars(table).items():
            stated = getattr(type(table)(), name).dtype
            assert column.dtype == stated or (name in NARROW and column.dtype.kind == "i" and column.itemsize < stated.itemsize), name
        start = table.time if table is trace.memory else table.start
        assert (np.diff(start) >= 0).all() and (start >= 0).all()
        if table is not trace.memory:
            assert (table.end >= start).all() and (table.name >= 0).all() and (table.name < len(trace.names)).all()
    for host in (trace.operators, trace.calls, trace.annotations):
        assert ((host.tid >= 0) & (host.tid < len(trace.threads))).all() and (host.shapes < len(trace.signatures)).all()
    assert set(trace.collectives) <= set(range(len(trace.gpu.start))) and set(trace.gpu.device.tolist()) <= set(trace.devices)
    assert all(isinstance(count, int) and count > 0 for count in trace.left_out.values())
    assert all(identity and message for identity, message in trace.problems)


def try_to_read(path, text: bytes) -> Trace | None:
    path.write_bytes(text)
    try:
        trace = read(path)
    except TraceError as error:
        assert path.name in error.card()
        return None
    sound(trace)
    return trace


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(_json_stream, "BLOCK", 512)


@LIMITS
@given(flips=st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes(tmp_path, small_blocks, flips):
    text = bytearray(SEED)
    for at, byte in flips:
        text[at] = byte
    try_to_read(tmp_path / "t.json", bytes(text))


def test_every_bit_of_a_structural_byte(tmp_path, small_blocks):
    """Each bracket, quote, comma and colon of the head and of one step, replaced by others."""
    for at in range(0, 450):
        if SEED[at] in b'{}[]",:\\':
            for byte in b'{]",x':
                try_to_read(tmp_path / "t.json", SEED[:at] + bytes([byte]) + SEED[at + 1:])


@LIMITS
@given(cuts=st.lists(st.integers(0, len(SEED)), min_size=2, max_size=6), zipped=st.booleans())
def test_shuffled_pieces(tmp_path, small_blocks, cuts, zipped):
    """Pieces of the file left out, repeated, in another order."""
    text = b"".join(SEED[min(a, b):max(a, b)] for a, b in zip(cuts, cuts[1:]))
    try_to_read(tmp_path / "t.json", gzip.compress(text, 1) if zipped else text)


@LIMITS
@given(flips=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=3), cut=st.integers(0, 2000))
def test_damaged_gzip(tmp_path, flips, cut):
    packed = bytearray(gzip.compress(SEED, 1))
    for at, byte in flips:
        packed[at % len(packed)] = byte
    try_to_read(tmp_path / "t.json.gz", bytes(packed[:max(1, len(packed) - cut % len(packed))]))


@LIMITS
@given(content=st.lists(events, max_size=6), top=st.dictionaries(
    st.sampled_from(["deviceProperties", "distributedInfo", "baseTimeNanoseconds", "metadata", "traceEvents"]), json_values))
def test_any_events(tmp_path, content, top):
    """Valid JSON of the right outline with anything in it; NaN and lone surrogates, as the standard library writes them."""
    try_to_read(tmp_path / "t.json", document([*content, *training(1)], last=True, **{k: v for k, v in top.items() if k != "traceEvents"}))
    if "traceEvents" in top:
        try_to_read(tmp_path / "t.json", made.dumps(top).encode("utf-8", "surrogateescape"))


@LIMITS
@given(content=st.lists(events, max_size=6))
@example(content=[{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2, "pid": 0, "tid": "7", "args": {"grid": [1, 2]}}])
def test_quick_and_careful_agree(tmp_path, content):
    """Whatever is in a block, it does not matter which of the two ways it took."""
    text = document([*content, *training(1)])
    quick = try_to_read(tmp_path / "t.json", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kineto._Reader, "_quickly", _unable)
        careful = try_to_read(tmp_path / "t.json", text)
    assume(quick is not None)
    assert careful is not None and made.contents(careful) == made.contents(quick)


def _unable(self, array: bytes) -> None:
    raise ValueError


@LIMITS
@given(text=st.binary(max_size=300))
def test_any_bytes(tmp_path, text):
    try_to_read(tmp_path / "t.json", text)
    try_to_read(tmp_path / "t.json", b'{"traceEvents": [' + text)


def test_a_sound_check_can_fail():
    trace = Trace(source="", kind="kineto", names=[], threads=[], signatures=[], devices={}, left_out={"x": 0})
    with pytest.raises(AssertionError):
        sound(trace)
