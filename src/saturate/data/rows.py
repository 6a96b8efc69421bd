"""Rows of tensors in memory, a batch at a time."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

from saturate.data.stand_in import StandIn


def tensors_of(torch: Any, dataset: Any) -> tuple[Any, ...] | None:
    """The tensors whose rows a dataset hands out: those of a `TensorDataset`, or of one below `Subset`s; None for
    others."""
    while type(dataset) is torch.utils.data.Subset:
        dataset = dataset.dataset
    return tuple(dataset.tensors) if type(dataset) is torch.utils.data.TensorDataset else None


def refusal(torch: Any, loader: Any) -> str | None:
    """Why a loader's batches cannot be assembled at once; None when they can."""
    tensors = tensors_of(torch, loader.dataset)
    if not tensors:
        return "its dataset is no TensorDataset"
    if loader.batch_sampler is None or loader.collate_fn is not torch.utils.data.default_collate:
        return "it has a collate function of its own, or none"
    if any(type(t) is not torch.Tensor or t.device.type != "cpu" or t.layout is not torch.strided or not t.is_contiguous()
           or t.requires_grad or t.is_conj() or t.is_neg() or t.is_quantized for t in tensors):
        return "its tensors are not plain, contiguous and on the CPU"
    return None


class Rows(StandIn):
    """Such a dataset. Its tensors and indices are read anew for each batch: a script may replace or overwrite them."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return Rows, (self._saturate_source,)

    def __getitems__(self, indices: Iterable[Any]) -> list[Any]:
        """What the default collate function makes of these rows. Raises IndexError, as the dataset would."""
        import torch

        dataset, indices = self._saturate_source, list(indices)
        places = indices
        while _single(torch, places) and type(dataset) is torch.utils.data.Subset:
            places = [dataset.indices[place] for place in places]
            dataset = dataset.dataset
        if not _single(torch, places):
            return torch.utils.data.default_collate(_items(self._saturate_source, indices))
        wanted = torch.tensor([int(place) for place in places], device="cpu")    # whatever the script has made the default
        size = len(dataset)
        wanted = torch.where(wanted < 0, wanted + size, wanted)
        if len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < size:
            raise IndexError(f"a row of {places} is out of bounds for {size} rows")
        return [tensor.index_select(0, wanted) for tensor in dataset.tensors]


def _single(torch: Any, indices: list[Any]) -> bool:
    """Whether each index is that of one row: a list or a tensor of them selects several, a bool or a byte is a mask."""
    return {*map(type, indices)} <= {int} or all(
        index.dim() == 0 and index.dtype in (torch.int64, torch.int32, torch.int16, torch.int8) if isinstance(index, torch.Tensor)
        else isinstance(index, numbers.Integral) and not isinstance(index, bool) for index in indices)


def _items(dataset: Any, indices: list[Any]) -> list[Any]:
    """As torch's fetcher asks a dataset for them."""
    if getattr(dataset, "__getitems__", None):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]


def as_it_is(batch: list[Any]) -> list[Any]:
    """Collates what is a batch already."""
    return batch
