"""Keys and values of every layer in place, with a position of its own for each row.

A row's tokens lie in slots 0, 1, 2, ... and a query at position p sees the slots up to p. What lies behind a row's
length is never seen: the query that could see a slot has written it first. So going back after rejected drafts costs
nothing: the next forward starts at an earlier position. Rows of different length need no padding on the left.
"""

from __future__ import annotations

from typing import Any


class StaticCache:
    """What a model's attention layers write to and read from, during one `feed` of a decoder.

    positions    long [rows, count], of the tokens that are fed
    mask         bool [rows, 1, count, slots]: which slots a query sees
    near         the same of layers with a sliding window; None: there are none, or the window holds all
    update       (keys, values, layer) -> all keys, all values

    `fixed`: reads always span all `capacity` slots, so that shapes never change; what a compiled forward needs.
    Otherwise they end at the longest row.
    """

    def __init__(self, torch: Any, capacity: int, *, fixed: bool = False, window: int | None = None):
        """window: of the layers that see only the last so many tokens, that of the query among them."""
        self.capacity, self.fixed, self.window = capacity, fixed, window
        self.near: Any = None
        self.positions: Any = None
        self.mask: Any = None
        self._torch = torch
        self._stored: dict[int, tuple[Any, Any]] = {}
        self._reach = capacity
        self._first: int | None = None          # where all rows start, if they start together
        self._slots: Any = None                 # 0, 1, 2, ...
        self._rows: Any = None
        self._seen: Any = None

    def begin(self, starts: list[int], count: int, device: Any) -> None:
        """The next forward feeds `count` tokens to each row, row i from position starts[i] on."""
        torch = self._torch
        if self._slots is None:
            self._slots = torch.arange(self.capacity, device=device)
            self._rows = torch.arange(len(starts), device=device).unsqueeze(1)
            self._seen = torch.ones(len(starts), 1, 1, self.capacity, dtype=torch.bool, device=device)
        aligned = not self.fixed and min(starts) == max(starts)
        self._first = starts[0] if aligned else None
        self._reach = self.capacity if self.fixed else max(starts) + count
        if aligned:
            self.positions = self._slots[starts[0]:self._reach].expand(len(starts), count)
        else:
            self.positions = torch.tensor(starts, device=device).unsqueeze(1) + self._slots[:count]
        if aligned and count == 1:
            self.mask = self._seen[..., :self._reach]       # the commonest step sees all there is
        else:
            self.mask = (self._slots[:self._reach] <= self.positions.unsqueeze(2)).unsqueeze(1)
        if self.window is not None:
            self.near = self.mask & (self._slots[:self._reach] > self.positions.unsqueeze(2) - self.window).unsqueeze(1)

    def update(self, keys: Any, values: Any, layer: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Keep `keys` and `values`, both [rows, heads, count, width], of one layer, and return all that the layer
        sees, [rows, heads, slots, width]. `layer` is any number that is this layer's own. (Hugging Face passes more;
        it is not needed.)
        """
        if layer not in self._stored:
            self._stored[layer] = (self._empty(keys), self._empty(values))
        stored = self._stored[layer]
        for new, kept in zip((keys, values), stored):
            if self._first is not None:
                kept[:, :, self._first:self._first + new.shape[2]] = new
            else:
                kept[self._rows, :, self.positions] = new.transpose(1, 2)
        return stored[0][:, :, :self._reach], stored[1][:, :, :self._reach]

    @property
    def allocated(self) -> bool:
        """Whether a forward has been through it, which a compiled one must not be the first to do."""
        return bool(self._stored)

    def _empty(self, like: Any) -> Any:
        rows, heads, _, width = like.shape
        empty = like.new_zeros(rows, heads, self.capacity, width)  # zeros: a hidden NaN would still spoil a product
        if self.fixed:
            self._torch._dynamo.mark_static_address(empty)            # or CUDA graphs would copy it at every step
        return empty

    # What Hugging Face's models ask of their own caches. Positions and mask are given to them, so the answers only
    # have to be consistent.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._reach

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.capacity

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self._reach, 0

    @property
    def is_compileable(self) -> bool:
        return self.fixed
