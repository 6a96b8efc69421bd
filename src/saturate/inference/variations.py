"""Inputs that are not the user's own and follow from them: batches of other sizes, and the same ones by one rounding away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saturate.inference import batches, samples
from saturate.techniques import _trees


def other_batches(inputs: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """A batch of one sample and a partial one, cut from the first batch; none where it has no batch dimension, one
    sample only, a tensor that is not dense, or anything else that may belong to the samples (a text, the number of them).
    Worth a comparison where the baseline takes them."""
    if not inputs:
        return []
    leaves = [leaf for _, leaf in _trees.leaves(inputs[0])]
    sizes = {leaf.shape[0] for leaf in leaves if samples.is_tensor(leaf) and leaf.dim()}
    if len(sizes) != 1 or samples.images(inputs[0]):
        return []
    size = sizes.pop()
    if not all(_dense(leaf) if samples.is_tensor(leaf) else leaf is None or isinstance(leaf, (bool, int, float)) for leaf in leaves):
        return []
    if not all(samples.is_tensor(one) or _belongs_to_none(one, size) for one in inputs[0]):
        return []
    return [_trees.copied(inputs[0], lambda path, leaf, count=count: batches.apart(leaf[:count], leaf) if samples.is_tensor(leaf) and leaf.dim() else leaf)
            for count in sorted({1, size - size // 3} - {size, 0})]


def shown(batch: tuple[Any, ...]) -> str:
    """A batch by the shapes of its tensors.

    >>> shown(())
    'an input without tensors'
    """
    shapes = [str(list(tensor.shape)) for tensor in samples.tensors(batch) if tensor.dim()]
    return f"an input of {', '.join(shapes)}" if shapes else "an input without tensors"


def _belongs_to_none(given: Any, size: int) -> bool:
    """Whether an argument that is no tensor stays as it is in a batch of another size, but for the tensors inside: a setting. A number
    may be that of the samples, and inside of a container it may belong to one of them."""
    if isinstance(given, (bool, float)) or given is None:
        return True
    if isinstance(given, int):
        return given != size
    plain = [leaf for leaf in samples.leaves(given) if not samples.is_tensor(leaf)]
    return len(plain) != size and all(leaf is None or isinstance(leaf, bool) for leaf in plain)


def perturbed(torch: Any, inputs: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]] | None:
    """The same batches with every fraction moved by one rounding of its format, up or down; None where there is none."""
    generator = torch.Generator().manual_seed(0)

    def movable(leaf: Any) -> bool:
        return samples.is_tensor(leaf) and leaf.is_floating_point() and _dense(leaf)

    def moved(path: tuple[Any, ...], leaf: Any) -> Any:
        if not movable(leaf):
            return leaf
        sign = 2 * torch.randint(2, leaf.shape, generator=generator, device="cpu").to(leaf) - 1
        return batches.apart(leaf * (1 + sign * torch.finfo(leaf.dtype).eps), leaf)

    if not any(map(movable, samples.tensors(inputs))):
        return None
    return [_trees.copied(batch, moved) for batch in inputs]


def _dense(tensor: Any) -> bool:
    return str(tensor.layout) == "torch.strided"
