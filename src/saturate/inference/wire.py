"""Messages between the search and a candidate's process: pickles over a socket, tensors beside them as raw bytes.

A tensor arrives on the CPU, or on the device that the receiver names, wherever it lived and however deep it was
nested: the pickler finds it, not a walk over known containers. Layout in memory (channels last) is kept. Of autograd it is kept
that an input asks for gradients, not how a tensor was computed.
"""

from __future__ import annotations

import functools
import io
import pickle
import socket
import struct
import sys
from typing import Any

from saturate.inference import pickles
from saturate.trial.deadline import Deadline

#: Bytes of the pickle, number of buffers; then the length of each buffer.
_HEADER = struct.Struct("!QI")
_LENGTH = struct.Struct("!Q")

#: What each part may take when the time is over, and how long parts may come then: one by one, they could come for ever.
_MOMENT_S = 0.01
_LATE_S = 30.0


class Closed(Exception):
    """The other end is gone."""


class Unsendable(Exception):
    """Something in the message cannot be pickled; nothing was sent. The message says what."""


class Unreadable(Exception):
    """A message has arrived whole, and cannot be made into objects here: a class is missing, or memory. It says
    why."""


def send(stream: socket.socket, message: Any, deadline_s: float | None = None,
         home: frozenset[tuple[str, str]] = frozenset()) -> None:
    """Send one message. `home`: classes (module, name) that came by value from the receiver, and go back by name.

    Raises Unsendable, Closed, or TimeoutError at `deadline_s` (time.monotonic), after which the stream is of no use.
    """
    data = io.BytesIO()
    sender = _sender()(data, home)
    try:
        sender.dump(message)
    except Exception as error:  # an object's own __reduce__ may raise anything; it is named and raised again
        raise Unsendable(f"{type(error).__name__}: {error}") from error
    payload, buffers = data.getbuffer(), [pickles.memory_of(tensor) for tensor in sender.tensors]
    head = _HEADER.pack(len(payload), len(buffers)) + b"".join(_LENGTH.pack(len(buffer)) for buffer in buffers)
    deadline = _deadline(deadline_s)
    try:
        for part in (head, payload, *buffers):
            stream.settimeout(_left(deadline))
            stream.sendall(part)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def receive(stream: socket.socket, deadline_s: float | None = None, device: str = "cpu") -> Any:
    """Wait for one message; its tensors are put on `device`. Raises Closed, Unreadable, or TimeoutError at
    `deadline_s`, a little later where the message is just coming."""
    deadline = _deadline(deadline_s)
    size, count = _HEADER.unpack(_exactly(stream, _HEADER.size, deadline))
    lengths = [_LENGTH.unpack(_exactly(stream, _LENGTH.size, deadline))[0] for _ in range(count)]
    payload = _exactly(stream, size, deadline)
    buffers = [_exactly(stream, length, deadline) for length in lengths]
    try:
        return _Receiver(io.BytesIO(payload), buffers, device).load()
    except Exception as error:  # an object's own __setstate__ may raise anything; it is named and raised again
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def _exactly(stream: socket.socket, size: int, deadline: Deadline | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        stream.settimeout(_left(deadline))
        try:
            got = stream.recv_into(view)
        except ConnectionResetError as error:
            raise Closed from error
        if not got:
            raise Closed
        view = view[got:]
    return data


def _deadline(at: float | None) -> Deadline | None:
    return None if at is None else Deadline(at, _LATE_S)


def _left(deadline: Deadline | None) -> float | None:
    """Seconds to wait, a moment also when the time is over."""
    return None if deadline is None else max(_MOMENT_S, deadline.left())


@functools.cache
def _sender() -> type[Any]:
    """The pickler with tensors apart."""

    class Sender(pickles.pickler()):  # type: ignore[misc]
        def __init__(self, stream: io.BytesIO, home: frozenset[tuple[str, str]]):
            super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
            self.home = home
            self.tensors: list[Any] = []        # as they are sent
            self._seen: dict[int, tuple[Any, Any]] = {}

        def persistent_id(self, thing: Any) -> Any:
            if isinstance(thing, type):
                name = thing.__module__, thing.__qualname__
                return ("class", *name) if name in self.home else None
            torch = sys.modules.get("torch")
            if torch is None or not isinstance(thing, torch.Tensor) or not _plain(torch, thing):
                return None
            if id(thing) not in self._seen:
                self._seen[id(thing)] = thing, self._taken(thing)
            return self._seen[id(thing)][1]

        def _taken(self, thing: Any) -> Any:
            tensor = thing.detach().cpu().resolve_conj().resolve_neg()
            order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
            tensor = tensor.permute(order).contiguous()
            self.tensors.append(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            asks = thing.requires_grad and thing.is_leaf and not isinstance(thing, sys.modules["torch"].nn.Parameter)
            return "tensor", len(self.tensors) - 1, dtype, tuple(tensor.shape), order, asks

    return Sender


def _plain(torch: Any, tensor: Any) -> bool:
    """Whether its bytes, shape and format are all there is to it; other tensors are pickled by torch."""
    return (type(tensor) in (torch.Tensor,
                             torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized
            and not tensor.is_nested and tensor.device.type != "meta")


class _Receiver(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, buffers: list[bytearray], device: str):
        super().__init__(stream)
        self._buffers, self._device = buffers, device
        self._made: dict[int, Any] = {}

    def persistent_load(self, reference: Any) -> Any:
        kind, *rest = reference
        if kind == "class":
            found = pickles.sent_class(*rest)
            if found is None:
                raise pickle.UnpicklingError(f"there is no class {'.'.join(rest)} here any more")
            return found
        index, dtype, shape, order, asks = rest
        if index not in self._made:
            self._made[index] = self._tensor(self._buffers[index], dtype, shape, order).requires_grad_(asks)
        return self._made[index]

    def _tensor(self, data: bytearray, dtype: str, shape: tuple[int, ...], order: list[int]) -> Any:
        import torch

        format = getattr(torch, dtype)
        flat = torch.frombuffer(data, dtype=torch.uint8).view(format) if data else torch.empty(0, dtype=format, device="cpu")
        back = sorted(range(len(order)), key=order.__getitem__)
        return flat.reshape(shape).permute(back).to(self._device)
