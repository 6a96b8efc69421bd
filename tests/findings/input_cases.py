"""Cases of the rules about input and copies."""

from __future__ import annotations

from rule_cases import Case, base, on_cpu

from saturate.records.observations import LoaderSeen

_WORKERS = ("loader-workers",)
_WORKERS_OR_CACHE = ("loader-workers", "dataset-cache")

DECODE = on_cpu(
    input_wait=0.5,
    input_wait_raw=0.5,
    loader=LoaderSeen(
        num_workers=0, cpu_count=2.0, busy_cores=1.0, fetch_cpu=0.98, io_wait=0.0, slowest="train.py:17"
    ),
)
DISK = on_cpu(
    input_wait=0.5,
    loader=LoaderSeen(
        num_workers=0, cpu_count=2.0, busy_cores=0.6, fetch_cpu=0.05, io_wait=0.9, read_bytes_per_s=1e6
    ),
)
ONE_WORKER = on_cpu(
    input_wait=0.5,
    loader=LoaderSeen(num_workers=1, cpu_count=2.0, busy_cores=1.3, fetch_cpu=0.95, io_wait=0.0),
)

CASES = [
    Case(
        "input-bound",
        base(input_wait=0.339, input_wait_raw=0.396, busy=0.56),
        lost=0.396,
        edges=(("input_wait", 0.10, 0.0999),),
        missing=("input_wait",),
        quiet={
            "hidden behind a busy device": {"input_wait": 0.01, "input_wait_raw": 0.9},
            "CPU-limited": {"loader": DECODE.loader},
            "storage-limited": {"loader": DISK.loader},
            "short of workers": {"loader": ONE_WORKER.loader},
        },
        still={
            "only the number of workers is known": {"loader": LoaderSeen(num_workers=4)},
            "as many workers as cores, and cores are free": {
                "loader": LoaderSeen(2, cpu_count=2.0, busy_cores=1.0, fetch_cpu=0.9)
            },
            "nobody knows how many cores are busy": {"loader": LoaderSeen(1, cpu_count=2.0, fetch_cpu=0.9)},
            "workers sleep while other programs have all cores": {
                "loader": LoaderSeen(4, cpu_count=2.0, busy_cores=2.0, fetch_cpu=0.03, io_wait=0.0)
            },
        },
        reason="33.9 %",
        techniques=_WORKERS_OR_CACHE,
    ),
    Case(
        "input-bound-cpu",
        DECODE,
        lost=0.5,
        edges=(("input_wait", 0.10, 0.0999), ("loader__fetch_cpu", 0.5, 0.4999)),
        missing=("input_wait", "loader__fetch_cpu", "loader__num_workers"),
        quiet={
            "a fetch that sleeps": {"loader__fetch_cpu": 0.02},
            "storage counts its own waiting": {"loader__io_wait": 0.5},
            "one worker, and a core is free": {"loader": ONE_WORKER.loader},
            "one sleeping worker beside a training that uses every core": {
                "loader__num_workers": 1,
                "loader__fetch_cpu": 0.1,
                "loader__busy_cores": 1.9,
            },
        },
        still={
            "busy cores do not matter without workers": {"loader__busy_cores": None},
            "all cores are busy": {"loader__num_workers": 2, "loader__busy_cores": 1.8},
            "eight workers on two cores": {"loader__num_workers": 8, "loader__busy_cores": 2.0},
            "a tenth of a large machine's cores is not free": {
                "loader__num_workers": 32,
                "loader__cpu_count": 64.0,
                "loader__busy_cores": 58.0,
            },
        },
        reason="in the training process, and a fetch computes for 98.0 % of its time, slowest at train.py:17",
        techniques=_WORKERS_OR_CACHE,
    ),
    Case(
        "input-bound-io",
        DISK,
        lost=0.5,
        edges=(("input_wait", 0.10, 0.0999),),
        missing=("input_wait",),
        quiet={
            "decoding": {"loader": DECODE.loader},
            "neither waiting nor computing was observed": {"loader__io_wait": None, "loader__fetch_cpu": None},
            "workers sleep while other programs have all cores": {
                "loader__io_wait": 0.0,
                "loader__num_workers": 4,
                "loader__busy_cores": 2.0,
            },
            "they do so in a short wait": {
                "input_wait": 0.103,
                "loader__io_wait": 0.0,
                "loader__num_workers": 1,
                "loader__busy_cores": 2.0,
            },
        },
        still={
            "the system does not count waiting": {"loader__io_wait": None},
            "the fetch sleeps": {"loader__io_wait": 0.0},
            "the fetch waits for storage, just": {"loader__io_wait": 0.5, "loader__fetch_cpu": 0.9},
            "workers that wait": {"loader__io_wait": None, "loader__num_workers": 4},
            "workers that wait beside a training that uses every core": {
                "input_wait": 0.12,
                "loader__io_wait": None,
                "loader__num_workers": 4,
                "loader__busy_cores": 1.8,
            },
        },
        reason="waits for storage during 90.0 % of its time",
        techniques=_WORKERS_OR_CACHE,
    ),
    Case(
        "input-bound-workers",
        ONE_WORKER,
        lost=0.5,
        edges=(("input_wait", 0.10, 0.0999), ("loader__fetch_cpu", 0.5, 0.4999), ("loader__busy_cores", 1.6, 1.75)),
        missing=("input_wait", "loader__fetch_cpu", "loader__num_workers", "loader__cpu_count", "loader__busy_cores"),
        quiet={
            "no workers: decoding in the training process": {"loader__num_workers": 0},
            "as many workers as cores": {"loader__num_workers": 2},
            "the worker waits for storage": {"loader__io_wait": 0.8},
            "a tenth of a large machine's cores is not enough": {
                "loader__num_workers": 4,
                "loader__cpu_count": 64.0,
                "loader__busy_cores": 60.0,
            },
        },
        still={
            "a tenth of a large machine's cores": {
                "loader__num_workers": 4,
                "loader__cpu_count": 64.0,
                "loader__busy_cores": 57.0,
            }
        },
        reason="1 worker computes for 95.0 % of the time, and 0.7 of 2 cores are free",
        techniques=_WORKERS,
    ),
    Case(
        "pageable-copies",
        base(copies__pageable_ms=8.0, copies__pageable_bytes=40_000_000, copies__exposed=0.05),
        lost=0.08,
        edges=(("copies__pageable_ms", 2.0, 1.999),),
        missing=("copies__pageable_ms", "step_ms"),
        quiet={
            "pinned copies": {"copies__pageable_ms": 0.0, "copies__pinned_bytes": 40_000_000},
            "a CPU copies nothing to a device": {"device": "cpu"},
        },
        still={"size unknown": {"copies__pageable_bytes": None}},
        reason="Copying 40.0 MB per step",
        techniques=("pin-memory", "device-prefetch"),
    ),
    Case(
        "exposed-copies",
        base(copies__exposed_from_host=0.3, copies__pageable_ms=0.0, copies__pinned_bytes=40_000_000, copies__exposed=0.4),
        lost=0.3,
        edges=(("copies__exposed_from_host", 0.1, 0.0999),),
        missing=("copies__exposed_from_host",),
        quiet={
            "copies from pageable memory: pageable-copies says so": {"copies__pageable_ms": 21.0},
            "copies to the host": {"copies__exposed_from_host": 0.0},
            "a CPU copies nothing to a device": {"device": "cpu"},
            "more than all of the step": {"copies__exposed_from_host": 1.01},
        },
        still={"size unknown": {"copies__pinned_bytes": None}},
        reason="Nothing but copies to the device runs in 30.0 %",
        techniques=("device-prefetch",),
    ),
    Case(
        "exposed-copies",
        base(copies__exposed_from_host=0.3),
        lost=0.3,
        reason="Nothing but copies to the device runs in 30.0 %",
        techniques=("pin-memory", "device-prefetch"),
    ),
]
