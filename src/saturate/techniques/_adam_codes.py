"""The two running averages of Adam in one byte each.

Blocks of 256 values have scales of their own. The average of squares v is positive and spans decades, so its
logarithm is cut into 254 steps between the smallest and the largest value of the block: no value but zero becomes
zero, as a zero under the root would make the update explode. The average m is kept as a share of sqrt(v), which is
the update itself up to a factor, on a quadratic scale of 127 steps to either side.

Averages move by less than one step at a time (v by a thousandth), so rounding to the nearest would freeze them.
Instead each value is rounded up or down by a threshold that runs through a low-discrepancy sequence from turn to
turn: on average nothing is lost, no random numbers are drawn, and the same training gives the same numbers.

Block-wise 8-bit states: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861. Averages
that rounding freezes: Xu et al., "Pushing the Limits of Low-Bit Optimizers: A Focus on EMA Dynamics", arXiv
2505.00347.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from saturate.techniques._at_rest import BLOCK

#: Values that are worked on at once, for temporaries that stay in a core's cache, and on a device for few, large kernels.
SLICE, SLICE_ON_DEVICE = 1 << 17, 1 << 22

#: Irrational steps of the rounding thresholds, from value to value and from turn to turn (golden and plastic ratio).
_BY_PLACE, _BY_TURN = 0.7548776662466927, 0.6180339887498949


@dataclass
class Codes:
    """At rest. `m` int8 and `v` uint8 of n values; scales float32 of n / 256 blocks: `low` and `span` of log2 v, the largest
    |m| / sqrt(v)."""

    m: Any
    v: Any
    low: Any
    span: Any
    ratio: Any
    dtype: Any


class EightBits:
    """A `Form` (see `_at_rest`) for the state of Adam and AdamW."""

    names = ("exp_avg", "exp_avg_sq")

    def __init__(self, torch: Any):
        self.torch = torch

    def rest(self, awake: dict[str, Any], before: Codes | None, turn: int) -> Codes:
        m, v = awake["exp_avg"], awake["exp_avg_sq"]
        codes = before if before is not None else self._empty(m)
        place = self.torch.arange(BLOCK, device=m.device, dtype=self.torch.float64)
        threshold = (0.001 + 0.998 * ((place * _BY_PLACE + turn * _BY_TURN) % 1.0)).float()
        width = _width(m)
        for start in range(0, m.numel(), width):
            self._put(codes, start, m[start: start + width].float(), v[start: start + width].float(), threshold)
        return codes

    def _empty(self, like: Any) -> Codes:
        torch, n, device = self.torch, like.numel(), like.device
        scales = [torch.empty(n // BLOCK, dtype=torch.float32, device=device) for _ in range(3)]
        return Codes(torch.empty(n, dtype=torch.int8, device=device), torch.empty(n, dtype=torch.uint8, device=device),
                     *scales, like.dtype)

    def _put(self, codes: Codes, start: int, m: Any, v: Any, threshold: Any) -> None:
        """Encode the values from `start` on. What is special (zeros, values that are not finite) costs several passes more: on
        a CPU they are made only where there is any; on a device, asking would make it wait."""
        torch, stop = self.torch, start + m.numel()
        blocks = slice(start // BLOCK, stop // BLOCK)
        m, v = m.view(-1, BLOCK), v.view(-1, BLOCK)
        high, low = v.amax(1), v.amin(1)
        finite = high.isfinite()
        special = v.device.type != "cpu" or not (bool((low > 0).all()) and bool(finite.all()) and bool(m.isfinite().all()))
        if special:
            some = high > 0
            low = torch.where(v > 0, v, torch.inf).amin(1)
            low, high = torch.where(some, low, 1.0), torch.where(some, high, 1.0)
        span = high.log2() - low.log2()
        low = low.log2()
        if special:
            low = torch.where(finite, low, torch.nan)       # a block that is not finite any more stays so
        level = v.log2().sub_(low[:, None]).mul_((254.0 / span.clamp_min(1e-6))[:, None]).add_(threshold)
        level.floor_().clamp_(0.0, 254.0).add_(1.0)
        if special:
            level = torch.where(v > 0, level, 0.0).nan_to_num_()
        codes.v[start:stop] = level.view(-1).to(torch.uint8)
        codes.low[blocks], codes.span[blocks] = low, span
        share = m / self._roots(level, low, span)
        if special:
            share = torch.where((level > 0) | torch.isnan(m), share, 0.0)
        ratio = torch.maximum(share.amax(1), -share.amin(1))
        level = share.abs().mul_((127.0**2 / ratio.clamp_min(1e-30))[:, None]).sqrt_().add_(threshold)
        level.floor_().clamp_(0.0, 127.0).copysign_(share)
        codes.m[start:stop] = (level.nan_to_num_() if special else level).view(-1).to(torch.int8)
        codes.ratio[blocks] = ratio

    def _roots(self, level: Any, low: Any, span: Any) -> Any:
        """The root of v, of blocks. Half the exponent is the root."""
        step = span / 508.0
        return (level * step[:, None]).add_((low / 2.0 - step)[:, None]).exp2_()

    def wake(self, kept: Codes, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        stop = kept.m.numel() if stop is None else stop
        m, v = (self.torch.empty(stop - start, dtype=kept.dtype, device=kept.m.device) for _ in range(2))
        width = _width(m)
        for begin in range(start, stop, width):
            end = min(begin + width, stop)
            blocks = slice(begin // BLOCK, end // BLOCK)
            level = kept.v[begin:end].float().view(-1, BLOCK)
            roots = self._roots(level, kept.low[blocks], kept.span[blocks])
            if v.device.type != "cpu" or bool((kept.v[begin:end] == 0).any()):
                roots.mul_(level > 0)
            level = kept.m[begin:end].float().view(-1, BLOCK)
            share = level.abs().mul_(level).mul_((kept.ratio[blocks] / 127.0**2)[:, None])
            m[begin - start: end - start] = share.mul_(roots).view(-1)
            v[begin - start: end - start] = roots.mul_(roots).view(-1)
        return {"exp_avg": m, "exp_avg_sq": v}

    def size_bytes(self, kept: Codes) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors(kept))

    def tensors(self, kept: Codes) -> list[Any]:
        return [kept.m, kept.v, kept.low, kept.span, kept.ratio]


def _width(values: Any) -> int:
    return SLICE if values.device.type == "cpu" else SLICE_ON_DEVICE
