"""The proof of a plan once more, at the size and in the chunks that are really run.

A few samples do not show everything: what couples samples may only begin beyond a size (a mixture of experts with room for
a share of the batch, and for a few tokens at least, drops nothing of a small one).
"""

from __future__ import annotations

from typing import Any

from saturate.techniques._chunk_modes import Randomness, devices_of, steady
from saturate.techniques._chunk_plan import Joined, NotSplittable, Plan, bounds
from saturate.techniques._chunk_proof import _OTHER_OUTPUTS, Proof
from saturate.techniques._interrupts import from_signal_handler
from saturate.techniques._out_of_memory import free, out_of_memory


def compare(module: Any, inner: Any, skeleton: Any, inputs: list[Any], plan: Plan, most: int, chunks: int, torch: Any) -> int:
    """How many samples of this batch agreed whole and in `chunks`: `most`, or half as many as often as it takes to fit (0:
    not even two do, and the first proof stands alone).

    Raises NotSplittable with the reason where they do not agree.
    """
    state = Randomness(torch, devices_of(module))
    try:
        while most > 1:
            try:
                Comparison(module, inner, skeleton, inputs, plan, most, chunks, torch).check()
                return most
            except NotSplittable as reason:
                raise NotSplittable(f"with {most} samples in {min(most, chunks)} chunks, {reason}") from None
            except Exception as error:  # the user's module on a part of its batch may raise anything
                if from_signal_handler(error):
                    raise
                if not out_of_memory(error, torch):
                    raise NotSplittable(f"on a part of the batch it raises {type(error).__name__}") from None
            free(torch)
            most //= 2
        return 0
    finally:
        state.restore()


class Comparison(Proof):
    """Holds one graph at a time: that of the whole takes what the script's own step takes."""

    def __init__(self, module: Any, inner: Any, skeleton: Any, inputs: list[Any], plan: Plan, most: int, chunks: int, torch: Any):
        super().__init__(module, inner, skeleton, inputs, torch, plan.dim, most)
        self.plan_to_check = plan
        self.ranges = bounds(self.samples, chunks)

    def check(self) -> None:
        """Raise NotSplittable where chunks do not give what the whole gives."""
        plan = self.plan_to_check
        with self.torch.enable_grad(), steady(self.torch):
            outputs, weights, whole = self._whole()
            with self.torch.no_grad():
                joined = Joined(plan, self.samples, self.torch)
                for start, stop in self.ranges:
                    run = self._run(start, stop)
                    joined.add(run[2], start, stop, run[3])
                tensors, self.totals = joined.finish()
                if not all(self._agree(ours, theirs) for ours, theirs in zip(tensors, outputs)):
                    raise NotSplittable(_OTHER_OUTPUTS)
            self._add_up(plan, whole, ((self._gradients_of_part(plan, self._run(start, stop), weights, start, stop), start, stop)
                                       for start, stop in self.ranges))

    def _whole(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Outputs without their graph, cotangents, gradients."""
        run = self._run(0, self.samples)
        if len(run[2]) != len(self.plan_to_check.outputs):
            raise NotSplittable("the model gives other outputs than when it was looked at")
        self.formats = self._formats(run[2])
        weights = [self._cotangent(output) for output in run[2]]
        return [output.detach() for output in run[2]], weights, self._gradients(run, weights)
