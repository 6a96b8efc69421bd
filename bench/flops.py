"""Are the FLOPs that an analysis reads from a trace, and that a profile counts inside a step, those of closed form?

    python bench/flops.py

Each case runs once under torch's profiler with shapes; the trace is exported, read and modelled as `saturate analyze`
does it. It runs once more under the count from inside that `saturate profile` and `tune` use. Both stand beside the closed
form, worked out here from the case's own numbers, and beside torch's FlopCounterMode around the same call (a dispatch
mode: it sees the operators, and no trace). FlopCounterMode counts a causal mask as if it hid nothing, ignores groups in
the gradient of a convolution's weights and knows no attention and no LSTM on a CPU; there only the closed form judges.
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

from saturate.agent.flopcount import flop_counter
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
    yield from _recurrent(tensor, device, dtype, scale)


def _convolutions(tensor: Callable[..., torch.Tensor], scale: int) -> Iterator[Case]:
    functions = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
    for name, dims, groups_, options in (
        ("conv1d", 1, 1, {"padding": 2}), ("conv2d", 2, 1, {"padding": 1}), ("conv2d, strided", 2, 1, {"stride": 2}),
        ("conv2d, dilated", 2, 1, {"dilation": 2}), ("conv2d, grouped", 2, 4, {}), ("conv3d", 3, 1, {"padding": 1}),
        ("conv2d, forward and backward", 2, 1, {"padding": 1}),
        ("conv2d, grouped, forward and backward", 2, 4, {}),
        ("conv2d, depthwise, forward and backward", 2, 8 * scale, {"padding": 1}),
        ("conv2d, 1x1, forward and backward", 2, 1, {}),
    ):
        channels, out_channels, size = 8 * scale, 16 * scale, {1: 64, 2: 20, 3: 10}[dims]
        kernel = 1 if "1x1" in name else 3
        given = {"stride": 1, "padding": 0, "dilation": 1} | options
        out = (size + 2 * given["padding"] - given["dilation"] * (kernel - 1) - 1) // given["stride"] + 1
        once = 2 * 2 * out_channels * out**dims * (channels // groups_) * kernel**dims
        train = "backward" in name
        x = tensor(2, channels, *[size] * dims, grad=train)
        w = tensor(out_channels, channels // groups_, *[kernel] * dims, grad=train)

        def run(x=x, w=w, dims=dims, given=given, groups_=groups_, train=train, kernel=kernel) -> None:
            threads = torch.get_num_threads()
            torch.set_num_threads(1 if kernel == 1 else threads)        # a CPU has another implementation for one thread
            result = functions[dims](x, w, groups=groups_, **given)
            if train:
                result.sum().backward()
            torch.set_num_threads(threads)

        yield Case(name, run, once * (3 if train else 1), "convolution")
    channels, out_channels, size, kernel = 8 * scale, 16 * scale, 12, 4
    x, w = tensor(2, channels, size, size), tensor(channels, out_channels, kernel, kernel)
    yield Case("conv_transpose2d", lambda: F.conv_transpose2d(x, w, stride=2, padding=1),
               2 * prod(x.shape) * out_channels * kernel**2, "convolution")
    gx, gw = tensor(2, channels, size, size, grad=True), tensor(channels, out_channels // 4, kernel, kernel, grad=True)
    yield Case("conv_transpose2d, grouped, both", lambda: F.conv_transpose2d(gx, gw, stride=2, groups=4).sum().backward(),
               3 * 2 * prod(gx.shape) * out_channels // 4 * kernel**2, "convolution")


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


def _recurrent(tensor: Callable[..., torch.Tensor], device: str, dtype: torch.dtype, scale: int) -> Iterator[Case]:
    """Every state has a gradient: then each gradient is as much work as the forward pass."""
    time, batch, inputs, hidden = 12, 4 * scale, 16 * scale, 24 * scale
    for kind, gates in ((torch.nn.LSTM, 4), (torch.nn.GRU, 3), (torch.nn.RNN, 1)):
        module = kind(inputs, hidden, device=device, dtype=dtype)
        x, state, cell = tensor(time, batch, inputs, grad=True), tensor(1, batch, hidden, grad=True), tensor(1, batch, hidden, grad=True)
        once = 2 * time * batch * gates * hidden * (inputs + hidden)

        def forward(module=module, x=x, states=(state, cell) if gates == 4 else state) -> torch.Tensor:
            return module(x, states)[0]

        yield Case(kind.__name__, forward, once, "matrix")
        yield Case(f"{kind.__name__}, forward and backward", lambda forward=forward: forward().sum().backward(), 3 * once, "matrix")


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


def from_inside(run: Callable[[], Any]) -> int:
    """As `saturate profile` counts; 0 where it says that it cannot."""
    with flop_counter(torch) as counter:
        run()
    return 0 if counter.unknown else counter.flops


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
    print(f"{'case':46}{'from the trace':>16}{'/ closed form':>15}{'/ FlopCounterMode':>19}{'from inside / closed form':>27}")
    with tempfile.TemporaryDirectory() as folder:
        for device in devices:
            dtype = torch.bfloat16 if device == "cuda" else torch.float32
            for case in cases(device, dtype, 1 if options.smoke else 2):
                ours, theirs = from_a_trace(case.run, device, Path(folder)), counted(case.run)
                inside = from_inside(case.run)
                rows.append({"case": case.name, "device": device, "kind": case.kind, "flops": ours,
                             "closed_form": case.closed_form, "flop_counter": theirs,
                             "ratio": ours / case.closed_form, "inside": inside / case.closed_form})
                beside = f"{ours / theirs:19.4f}" if theirs else f"{'counts none':>19}"
                print(f"{device + ' ' + case.name:46}{ours:16,}{ours / case.closed_form:15.4f}{beside}{inside / case.closed_form:27.4f}")
    worst, ratio = max(((row, row[way]) for row in rows for way in ("ratio", "inside")), key=lambda pair: abs(pair[1] - 1))
    met = abs(ratio - 1) <= TARGET
    print(f"farthest from closed form: {worst['device']} {worst['case']}, {ratio:.4f}")
    write_json(options.json, "flops", rows, None if options.smoke else met)
    return close(met, options.smoke, f"every case within {TARGET:.0%} of closed form")


if __name__ == "__main__":
    sys.exit(main())
