"""Are the FLOPs that an analysis reads from a trace those of closed form?

    python bench/flops.py

Each case runs once under torch's profiler with shapes; the trace is exported, read and modelled as `saturate analyze`
does it. What comes out stands beside the closed form, worked out here from the case's own numbers, and beside torch's
FlopCounterMode around the same call (a dispatch mode: it sees the operators, and no trace). FlopCounterMode counts a
causal mask as if it hid nothing and knows no attention on a CPU; there only the closed form judges.
With a CUDA device the cases run there too, in bf16.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _output import close, write_json
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from saturate.trace.operators import groups
from saturate.trace.read import read
from saturate.trace.windows import CPU

TARGET = 0.01


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[], Any]
    closed_form: int
    kind: str


def cases(device: str, dtype: torch.dtype, scale: int) -> Iterator[Case]:
    """`scale` multiplies sizes."""

    def tensor(*sizes: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype, requires_grad=grad)

    m, k, n, b = 48 * scale, 80 * scale, 56 * scale, 4
    x, y = tensor(m, k), tensor(k, n)
    xs, ys, zs = tensor(b, m, k), tensor(b, k, n), tensor(b, m, n)
    weights, bias = tensor(n, k), tensor(n)
    gemm = 2 * m * k * n
    yield Case("mm", lambda: x @ y, gemm, "matrix")
    yield Case("bmm", lambda: torch.bmm(xs, ys), b * gemm, "matrix")
    yield Case("addmm", lambda: torch.addmm(bias, x, y), gemm, "matrix")
    yield Case("baddbmm", lambda: torch.baddbmm(zs, xs, ys), b * gemm, "matrix")
    yield Case("linear, batched, with bias", lambda: F.linear(xs, weights, bias), b * gemm, "matrix")
    yield Case("matmul, broadcast", lambda: torch.matmul(xs, y), b * gemm, "matrix")

    def backward() -> None:
        F.linear(tensor(m, k, grad=True), tensor(n, k, grad=True)).sum().backward()

    yield Case("linear, forward and backward", backward, 3 * gemm, "matrix")
    yield from _convolutions(tensor, scale)
    yield from _attention(tensor, scale)


def _convolutions(tensor: Callable[..., torch.Tensor], scale: int) -> Iterator[Case]:
    functions = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
    for name, dims, groups_, options in (
        ("conv1d", 1, 1, {"padding": 2}), ("conv2d", 2, 1, {"padding": 1}), ("conv2d, strided", 2, 1, {"stride": 2}),
        ("conv2d, dilated", 2, 1, {"dilation": 2}), ("conv2d, grouped", 2, 4, {}), ("conv3d", 3, 1, {"padding": 1}),
        ("conv2d, forward and backward", 2, 1, {"padding": 1}),
    ):
        channels, out_channels, size, kernel = 8 * scale, 16 * scale, {1: 64, 2: 20, 3: 10}[dims], 3
        given = {"stride": 1, "padding": 0, "dilation": 1} | options
        out = (size + 2 * given["padding"] - given["dilation"] * (kernel - 1) - 1) // given["stride"] + 1
        once = 2 * 2 * out_channels * out**dims * (channels // groups_) * kernel**dims
        train = "backward" in name
        x = tensor(2, channels, *[size] * dims, grad=train)
        w = tensor(out_channels, channels // groups_, *[kernel] * dims, grad=train)

        def run(x=x, w=w, dims=dims, given=given, groups_=groups_, train=train) -> None:
            result = functions[dims](x, w, groups=groups_, **given)
            if train:
                result.sum().backward()

        yield Case(name, run, once * (3 if train else 1), "convolution")
    channels, out_channels, size, kernel = 8 * scale, 16 * scale, 12, 4
    x, w = tensor(2, channels, size, size), tensor(channels, out_channels, kernel, kernel)
    yield Case("conv_transpose2d", lambda: F.conv_transpose2d(x, w, stride=2, padding=1),
               2 * prod(x.shape) * out_channels * kernel**2, "convolution")


def _attention(tensor: Callable[..., torch.Tensor], scale: int) -> Iterator[Case]:
    b, h, rows, columns, d = 2, 4, 32 * scale, 32 * scale, 64
    once = 4 * b * h * rows * columns * d
    q, k, v = tensor(b, h, rows, d), tensor(b, h, columns, d), tensor(b, h, columns, d)

    def backward() -> None:
        parts = [tensor(b, h, rows, d, grad=True) for _ in range(3)]
        F.scaled_dot_product_attention(*parts).sum().backward()

    yield Case("attention", lambda: F.scaled_dot_product_attention(q, k, v), once, "attention")
    yield Case("attention, causal", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), once // 2,
               "attention")
    yield Case("attention, forward and backward", backward, once * 7 // 2, "attention")


def from_a_trace(run: Callable[[], Any], device: str, folder: Path) -> int:
    """FLOPs of products, convolutions and attention, by way of a file."""
    run()           # libraries choose their algorithms the first time
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities, record_shapes=True) as recorder:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    path = folder / "trace.json"
    recorder.export_chrome_trace(str(path))
    found = groups(read(path), 0 if device == "cuda" else CPU)
    return sum(group.flops for group in found if group.cost is not None and group.cost.multiplies)


def counted(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small sizes, nothing judged")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    rows = []
    print(f"{'case':38}{'from the trace':>16}{'/ closed form':>15}{'/ FlopCounterMode':>19}")
    with tempfile.TemporaryDirectory() as folder:
        for device in devices:
            dtype = torch.bfloat16 if device == "cuda" else torch.float32
            for case in cases(device, dtype, 1 if options.smoke else 2):
                ours, theirs = from_a_trace(case.run, device, Path(folder)), counted(case.run)
                rows.append({"case": case.name, "device": device, "kind": case.kind, "flops": ours,
                             "closed_form": case.closed_form, "flop_counter": theirs,
                             "ratio": ours / case.closed_form})
                beside = f"{ours / theirs:19.4f}" if theirs else f"{'counts none':>19}"
                print(f"{device + ' ' + case.name:38}{ours:16,}{ours / case.closed_form:15.4f}{beside}")
    worst = max(rows, key=lambda row: abs(row["ratio"] - 1))
    met = abs(worst["ratio"] - 1) <= TARGET
    print(f"farthest from closed form: {worst['device']} {worst['case']}, {worst['ratio']:.4f}")
    write_json(options.json, "flops", rows, None if options.smoke else met)
    return close(met, options.smoke, f"every case within {TARGET:.0%} of closed form")


if __name__ == "__main__":
    sys.exit(main())
