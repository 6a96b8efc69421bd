"""Copies of the next batch to the device, while the current one is computed on.

The script sees no difference: its batches stay host tensors, and `tensor.to(device)` returns the copy that was begun
before instead of beginning one. Copied ahead is only what lies finished in the loader's queue, and of it only the
tensors at the places whose tensors the script itself moved last time: nothing is fetched, drawn or waited for that
would not be anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from saturate.data.batches import tensors_of


@dataclass
class _Begun:
    """A copy that was begun. `source` is held, so that its id stays taken; its version tells whether it was written
    to."""

    source: Any
    version: int
    copy: Any
    device: Any
    token: Any


class Cuda:
    """Copies on a stream of their own, one for each device. `move` is torch's own `Tensor.to`."""

    def __init__(self, torch: Any, move: Any):
        self._torch = torch
        self._move = move
        self._streams: dict[Any, Any] = {}

    def begin(self, tensor: Any, device: Any) -> tuple[Any, Any]:
        """The copy, not yet there, and what says when it is."""
        cuda = self._torch.cuda
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device)
        stream = self._streams[device]
        # A pass in inference mode may be where the batch of a training is asked for, which cannot save a tensor that was made in it. To leave
        # the stream of a device that is not the current one would make a context on that one, which takes memory there.
        with self._torch.inference_mode(False), cuda.device(device), cuda.stream(stream):
            copy = self._move(tensor, device, non_blocking=True)
        return copy, stream.record_event()

    def hand_over(self, copy: Any, token: Any) -> None:
        """Once the copy is there: the script may write to its tensor from now on. Only this copy is waited for, which began a batch ago, and
        nothing that the device computes. Its memory is not used again before what is queued from now on is done."""
        with self._torch.cuda.device(copy.device):
            token.synchronize()
        copy.record_stream(self._torch.cuda.current_stream(copy.device))

    def busy(self) -> bool:
        """Whether nothing may be handed over now: what a graph captures must not wait for events outside of it."""
        return self._torch.cuda.is_current_stream_capturing()


class Copies:
    """Of one training process. As text: how much was copied ahead."""

    def __init__(self, torch: Any, device_copies: Any):
        self._torch = torch
        self._api = device_copies
        self._places: dict[int, int] = {}           # by id: where in the current batch a tensor stands
        self._batch: list[Any] = []
        self._moved: dict[int, Any] = {}            # by place: the device that the script moved its tensor to
        self._begun: dict[int, _Begun] = {}
        self.ahead = self.moved = 0
        self._problem = ""                          # with a batch, the first one

    def __str__(self) -> str:
        text = f"{self.ahead} of {self.moved} tensors that the script moved were copied ahead"
        if self._problem:
            return f"{text}; there was a batch that could not be looked at: {self._problem}"
        return text if self.moved else ""

    def next_batch(self, batch: Any, waiting: Any) -> None:
        """`batch` goes to the script now; `waiting` is the one after it, None where that is not finished."""
        self._batch = list(tensors_of(self._torch, batch))
        self._places = {id(tensor): place for place, tensor in enumerate(self._batch)}
        self._begun = {key: begun for key, begun in self._begun.items() if key in self._places}
        for place, tensor in enumerate(tensors_of(self._torch, waiting)):
            device = self._moved.get(place)
            host = tensor.device.type == "cpu" and not tensor.requires_grad and not tensor.is_inference()
            if device is not None and host and tensor.is_pinned():
                copy, token = self._api.begin(tensor, device)
                self._begun[id(tensor)] = _Begun(tensor, tensor._version, copy, device, token)

    def forget(self, problem: str) -> None:
        """Looking at a batch failed: nothing of it, or of the next one, is taken from here."""
        self._batch, self._places, self._begun = [], {}, {}
        self._problem = self._problem or problem

    def knows(self, tensor: Any) -> bool:
        """Whether it is a tensor of the current batch."""
        return id(tensor) in self._places

    def take(self, tensor: Any, device: Any) -> Any:
        """The script moves a tensor of the current batch to a device: the copy, if one was begun and still is one."""
        self._moved[self._places[id(tensor)]] = device
        self.moved += 1
        begun = self._begun.get(id(tensor))
        if begun is None or begun.source is not tensor or begun.device != device or self._api.busy():
            return None
        del self._begun[id(tensor)]                 # who moves it again gets another copy, as ever
        if tensor._version != begun.version:
            return None                             # it was written to since
        self._api.hand_over(begun.copy, begun.token)
        self.ahead += 1
        return begun.copy


def waiting_batch(iterator: Any) -> Any:
    """The batch that an iterator with workers will return next, if it lies finished in its queue; else None."""
    wanted = iterator._rcvd_idx
    early = iterator._task_info.get(wanted, ())
    if len(early) == 2:
        return early[1]
    finished = getattr(iterator._data_queue, "queue", None)     # of the thread that pins; processes have no such list
    for number, batch in list(finished or ()):
        if number == wanted:
            return batch
    return None
