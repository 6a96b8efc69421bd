"""The memories between which a copy goes, by the names that each backend writes."""

from __future__ import annotations

import pytest
from traces import V100, Recording

from saturate.trace.analyze import analyze_one
from saturate.trace.copies import FROM_HOST, FROM_PAGEABLE, FROM_PINNED, TO_HOST, TO_PAGEABLE
from saturate.trace.observe import observations

TABLE = {"from host": FROM_HOST, "from pageable": FROM_PAGEABLE, "from pinned": FROM_PINNED, "to host": TO_HOST,
         "to pageable": TO_PAGEABLE}


@pytest.mark.parametrize("name, expected", [
    ("Memcpy HtoD (Pageable -> Device)", {"from host", "from pageable"}),
    ("Memcpy HtoD (Pinned -> Device)", {"from host", "from pinned"}),
    ("Memcpy DtoH (Device -> Pageable)", {"to host", "to pageable"}),
    ("Memcpy DtoH (Device -> Pinned)", {"to host"}),
    ("Memcpy DtoD (Device -> Device)", set()),
    ("Memcpy PtoP (Device -> Device)", set()),
    ("Memcpy HtoD (Host -> Device)", {"from host"}),
    ("Memcpy DtoH (Device -> Host)", {"to host"}),
    ("CopyHostToDevice", {"from host"}),
    ("CopyDeviceToHost", {"to host"}),
    ("CopyDeviceToDevice", set()),
    ("MEMORY_COPY_HOST_TO_DEVICE", {"from host"}),
    ("MEMORY_COPY_DEVICE_TO_HOST", {"to host"}),
    ("MEMORY_COPY_DEVICE_TO_DEVICE", set()),
    ("Memcpy M2D (MEMORY(Unknown) -> DEVICE)", {"from host", "from pageable"}),
    ("Memcpy M2D (HOST -> DEVICE)", {"from host", "from pageable"}),
    ("Memcpy H2D (HOST -> DEVICE)", {"from host", "from pinned"}),
    ("Memcpy D2M (DEVICE -> MEMORY(Unknown))", {"to host", "to pageable"}),
    ("Memcpy D2H (DEVICE -> HOST)", {"to host"}),
    ("Memcpy D2D (DEVICE -> DEVICE)", set()),
    ("Memcpy S2D (SHARED -> DEVICE)", set()),
])
def test_each_backend_says_it_in_its_words(name: str, expected: set[str]) -> None:
    assert {kind for kind, pattern in TABLE.items() if pattern.search(name)} == expected


@pytest.mark.parametrize("up, down, by", [
    ("Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)", "cudaMemcpyAsync"),
    ("Memcpy M2D (MEMORY(Unknown) -> DEVICE)", "Memcpy D2M (DEVICE -> MEMORY(Unknown))", "urEnqueueUSMMemcpy"),
])
def test_the_same_step_reads_the_same(up: str, down: str, by: str) -> None:
    made = Recording(V100)
    for at in (0, 1_000_000):
        made.step(at, at + 1_000_000)
        made.copy(up, at + 10_000, at + 410_000, launched=at + 5_000, by=by, bytes=1 << 20)
        made.kernel("gemm", at + 420_000, at + 800_000, launched=at + 410_000)
        correlation = made.call(by, at + 415_000, at + 900_000)
        made.copy(down, at + 810_000, at + 890_000, correlation=correlation, bytes=1 << 10)
    trace = made.trace()
    found = observations(trace, analyze_one(trace).devices[0])
    assert (found.copies.pageable_ms, found.copies.exposed_from_host, found.copies.exposed) == (0.4, 0.4, 0.48)
    assert [one.what for one in found.syncs] == [by]
