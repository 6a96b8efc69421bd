"""What stands for a dataset in a loader's iterator, and in its workers for `get_worker_info().dataset`: scripts read and set attributes
of it there, to give each worker its part."""

from __future__ import annotations

from typing import Any


class StandIn:
    """All is the dataset's own but what a class below says."""

    __slots__ = ("_saturate_source", "__weakref__")

    def __init__(self, source: Any):
        object.__setattr__(self, "_saturate_source", source)

    @property
    def __class__(self) -> Any:
        return type(self._saturate_source)

    def __len__(self) -> int:
        return len(self._saturate_source)

    def __getitem__(self, index: Any) -> Any:
        return self._saturate_source[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._saturate_source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._saturate_source, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._saturate_source, name)
