"""Real batches, and what a program answered to them, in a file of raw tensors that the manifest describes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from saturate.inference import batches, structure
from saturate.records.artifact import Example, Leaf

#: At most so many batches, and after the first one no more than so many bytes, of inputs and outputs together.
MOST = 4
MOST_BYTES = 64 * 2**20

_ALIGNMENT = 64


def write(
    torch: Any, path: Path, inputs: Sequence[tuple[Any, ...]], outputs: Sequence[Any]
) -> tuple[list[Example], str]:
    """Write a new file; returns the examples as a manifest describes them, or none of them and why."""
    found: list[Example] = []
    why_none = "it was stored without examples"
    with open(path, "xb") as file:
        for given, answer in list(zip(inputs, outputs))[:MOST]:
            try:
                (into, tensors), (out_of, answers) = structure.flatten(torch, given), structure.flatten(torch, answer)
            except structure.NotDescribable as problem:
                why_none = str(problem)
                break
            if any(one.layout != torch.strided for one in (*tensors, *answers)):
                why_none = "a tensor is sparse"
                break
            size_bytes = sum(one.numel() * one.element_size() for one in (*tensors, *answers))
            if found and file.tell() + size_bytes > MOST_BYTES:
                break
            found.append(
                Example(
                    inputs=into,
                    input_leaves=[_write(file, one) for one in tensors],
                    outputs=out_of,
                    output_leaves=[_write(file, one) for one in answers],
                )
            )
    return found, "" if found else why_none


def _write(file: BinaryIO, tensor: Any) -> Leaf:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    file.write(bytes(-file.tell() % _ALIGNMENT))
    offset, size_bytes = file.tell(), plain.numel() * plain.element_size()
    # Not through numpy, which has no bfloat16 and may not be there.
    file.write(ctypes.string_at(plain.data_ptr(), size_bytes) if size_bytes else b"")
    return Leaf(shape=list(plain.shape), dtype=str(plain.dtype).removeprefix("torch."), offset=offset)


def read(torch: Any, data: bytes, examples: Sequence[Example]) -> list[tuple[tuple[Any, ...], list[Any]]]:
    """The batches on the CPU, each with the tensors of its answer, as often as they occur in it. ValueError where the
    description does not fit the data."""
    found = []
    if sum(_size_bytes(torch, leaf) for one in examples for leaf in (*one.input_leaves, *one.output_leaves)) > len(data):
        raise ValueError("its tensors do not lie in the file, or on top of each other")     # each is a copy
    for one in examples:
        structure.places(one.inputs)        # a negative one would be taken from the end
        inputs = structure.rebuild(one.inputs, [_tensor(torch, data, leaf) for leaf in one.input_leaves])
        if not isinstance(inputs, tuple):
            raise ValueError("the inputs of an example are no tuple")
        answers = [_tensor(torch, data, leaf) for leaf in one.output_leaves]
        try:
            found.append((inputs, [answers[place] for place in structure.places(one.outputs)]))
        except IndexError as error:
            raise ValueError(f"not a description of nested tensors: {one.outputs!r}") from error
    return found


def _size_bytes(torch: Any, leaf: Leaf) -> int:
    dtype = getattr(torch, leaf.dtype, None)
    if not isinstance(dtype, torch.dtype) or not _number(torch, dtype) or leaf.offset < 0 or any(size < 0 for size in leaf.shape):
        raise ValueError(f"{leaf} is no tensor")
    return math.prod(leaf.shape) * dtype.itemsize


def _tensor(torch: Any, data: bytes, leaf: Leaf) -> Any:
    dtype, end = getattr(torch, leaf.dtype), leaf.offset + _size_bytes(torch, leaf)
    if end > len(data):
        raise ValueError(f"{leaf} ends behind the end of the file")
    if end == leaf.offset:
        try:
            return torch.empty(leaf.shape, dtype=dtype, device="cpu")
        except (RuntimeError, TypeError, OverflowError) as error:       # without elements, and too large for torch all the same
            raise ValueError(f"{leaf} is no tensor") from error
    return torch.frombuffer(bytearray(data[leaf.offset : end]), dtype=dtype).reshape(leaf.shape)


def _number(torch: Any, dtype: Any) -> bool:
    """Whether its values are numbers as they are. A tensor of a quantized type needs more than its bytes: made of them alone it ends the process."""
    name = str(dtype).removeprefix("torch.")
    return dtype.is_floating_point or dtype.is_complex or dtype is torch.bool or name.startswith(("int", "uint"))


def tensors_of(torch: Any, value: Any) -> list[Any]:
    """The tensors of an answer, as often as they occur: a program may return one twice, or two that are equal."""
    description, tensors = structure.flatten(torch, value)
    return [tensors[place] for place in structure.places(description)]


def agreement_db(torch: Any, expected: Any, got: Any) -> float:
    """Signal-to-noise ratio of `got` against `expected`, dB; infinite where they are equal, also in what is not
    finite. Integers and booleans that differ anywhere agree in nothing: minus infinity."""
    if torch.equal(expected, got.to(expected.dtype)):
        return math.inf
    if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
        return -math.inf
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    a, b = expected.to(wide), got.to(wide)
    zero = torch.zeros_like(a)
    error = float(torch.where((a == b) | (a.isnan() & b.isnan()), zero, a - b).abs().square().sum())
    signal = float(torch.where(a.isfinite(), a, zero).abs().square().sum())
    if error == 0.0:
        return math.inf
    return 10 * math.log10(signal / error) if math.isfinite(error) and signal > 0 else -math.inf


def moved(torch: Any, inputs: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """A batch with its tensors on another device."""
    description, tensors = structure.flatten(torch, inputs)
    return structure.rebuild(description, [one.to(device) for one in tensors])


def of_size(torch: Any, inputs: tuple[Any, ...], count: int) -> tuple[Any, ...] | None:
    """The batch with `count` samples: the first ones, or some of them again. None where its tensors do not share a
    first dimension."""
    rows = batches.samples(torch, inputs)
    if not rows:
        return None
    description, tensors = structure.flatten(torch, inputs)

    def chosen(tensor: Any) -> Any:
        return tensor.index_select(0, torch.arange(count, device=tensor.device) % rows) if tensor.dim() else tensor

    return structure.rebuild(description, [chosen(one) for one in tensors])
