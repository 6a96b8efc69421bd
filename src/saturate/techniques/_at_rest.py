"""Optimizer state that rests in another form than the one it is stepped in: fewer bits, or host memory.

    in a step    `Optimizer.step` walks over its groups; it is shown them a few tensors at a time, whose state is woken
                 before and put to rest after, so never all of it exists in full
    at rest      what stands in `optimizer.state` is a tensor that looks like the original; whoever reads, copies or pickles
                 it gets ordinary values, and what is written to it, or to a view of it, is kept

The optimizer stays the user's own object with its own class, groups, hooks and kernels: a hook before its step hands
`step` a stand-in whose `param_groups` are walked through, everything else of which is the optimizer's own.
`state_dict` holds ordinary tensors, and what is loaded is put to rest at once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from saturate.techniques._weakly import OfOptimizer, weakly

#: Elements of a flat buffer that each tensor is padded to.
BLOCK = 256

#: Share of all state that is awake at once, and its bounds in elements: small models are one piece, and no piece is so large
#: that it shows in the peak unless a single tensor is.
SHARE, LEAST, MOST = 16, 1 << 18, 1 << 24


class Form(Protocol):
    """How state rests. Flat tensors of equal length, a multiple of BLOCK, by name."""

    names: tuple[str, ...] | None       # the state that rests; None: all that has the parameter's shape

    def rest(self, awake: dict[str, Any], before: Any, turn: int) -> Any:
        """What to keep of `awake`. `before`: what was kept the last time, to be used again; `turn` counts."""

    def wake(self, kept: Any, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        """The elements from `start` to `stop`."""

    def size_bytes(self, kept: Any) -> int: ...

    def tensors(self, kept: Any) -> list[Any]:
        """What `kept` consists of."""


@functools.cache
def resting_type(torch: Any) -> Any:
    """The class of a tensor at rest: any operation on it works on its values, and changes are kept. A view of one is one as well:
    it knows which views lead to it, and takes them again of whatever the values are then."""

    class Resting(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        @staticmethod
        def __new__(cls, piece: Any, name: str, index: int, like: Any, stride: Any, views: tuple[Any, ...] = ()) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, like.shape, strides=stride, dtype=like.dtype, device=like.device)

        def __init__(self, piece: Any, name: str, index: int, like: Any, stride: Any, views: tuple[Any, ...] = ()):
            self.piece, self.name_in_state, self.index, self.views = piece, name, index, views

        def lies_in(self) -> list[Any]:
            """What holds it, and others with it: who counts memory must not count what it looks like."""
            return self.piece.form.tensors(self.piece.kept)

        def values(self) -> Any:        # type: ignore[override]
            return self.seen_in(self.piece.read(self.name_in_state, self.index))

        def seen_in(self, whole: Any) -> Any:
            for view in self.views:
                whole = view(whole)
            return whole

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            from torch.utils._pytree import tree_map

            wholes: dict[Any, Any] = {}                 # several views of one tensor share its values
            seen: dict[int, tuple[Any, Any]] = {}

            def wake(value: Any) -> Any:
                if not isinstance(value, cls):
                    return value
                if id(value) not in seen:
                    place = value.piece, value.name_in_state, value.index
                    if place not in wholes:
                        wholes[place] = value.piece.read(value.name_in_state, value.index)
                    seen[id(value)] = value, value.seen_in(wholes[place])
                return seen[id(value)][1]

            result = func(*tree_map(wake, args), **tree_map(wake, kwargs or {}))
            if func._schema.is_mutable:
                for piece, name, index in _written(func, args, kwargs or {}, cls):
                    piece.write(name, index, wholes[piece, name, index])
            elif seen and any(returned.alias_info is not None for returned in func._schema.returns):
                return cls.viewed(next(iter(seen.values()))[0], func, args, kwargs or {}, result)
            back = {id(values): resting for resting, values in seen.values()}
            return tree_map(lambda value: back.get(id(value), value), result)

        @classmethod
        def viewed(cls, of: Any, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
            """What a view operator returns, as tensors at rest. Its first argument is what it looks at."""

            def again(number: int | None) -> Any:
                def view(values: Any) -> Any:
                    found = func(values, *args[1:], **kwargs)
                    return found if number is None else found[number]

                return view

            def one(like: Any, number: int | None) -> Any:
                with torch.inference_mode(False):       # a view is what its base is
                    return cls(of.piece, of.name_in_state, of.index, like, like.stride(), (*of.views, again(number)))

            if isinstance(result, (list, tuple)):
                return type(result)(one(like, number) for number, like in enumerate(result))
            return one(result, None)

        def __deepcopy__(self, memo: Any) -> Any:
            memo[id(self)] = self.values()
            return memo[id(self)]

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self.values().__reduce_ex__(protocol)

        def __repr__(self, **options: Any) -> str:      # type: ignore[override]
            return repr(self.values())

        @property
        def data(self) -> Any:
            return torch.Tensor.data.__get__(self)

        @data.setter
        def data(self, values: Any) -> None:
            """Scripts give it the same values on another device, as they do with weights. torch would put them where nobody looks."""
            if values.shape != self.shape:
                self._lies_nowhere()
            values = values.detach().to(self.device, self.dtype)        # it rests where it rests
            if not torch.equal(self, values):       # to put the same ones to rest anew would change them
                with torch.no_grad():
                    self.copy_(values)

        # What torch does for its own tensors only. What is written to an array would be lost: it is for reading.

        def numpy(self, *, force: bool = False) -> Any:
            found = self.values().numpy(force=force)
            found.flags.writeable = False
            return found

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            found = self.numpy()
            return found.astype(dtype or found.dtype, copy=bool(copy))

        def __dlpack__(self, **options: Any) -> Any:
            return self.values().__dlpack__(**options)

        def tolist(self) -> Any:
            return self.values().tolist()

        def _lies_nowhere(self, *args: Any) -> Any:
            raise RuntimeError("saturate keeps this state of the optimizer in another form, which has no memory to share or to point at: "
                               "use its .clone(), or take the technique (optimizer-8bit, cpu-offload) out of the recipe")

        share_memory_ = data_ptr = storage = _lies_nowhere

    return Resting


def _written(func: Any, args: Any, kwargs: Any, kind: Any) -> set[tuple[Any, str, int]]:
    """Which tensors at rest an operator writes to: to put one to rest anew that was only read would change its values."""
    from torch.utils._pytree import tree_leaves

    given = [args[place] if place < len(args) else kwargs.get(argument.name) for place, argument in enumerate(func._schema.arguments)
             if argument.alias_info is not None and argument.alias_info.is_write]
    return {(value.piece, value.name_in_state, value.index) for value in tree_leaves(given) if isinstance(value, kind)}


class Piece(OfOptimizer):
    """A few parameters of one group whose state is woken and put to rest together. Same device and dtype."""

    def __init__(self, torch: Any, optimizer: Any, form: Form, params: list[Any]):
        super().__init__(optimizer)
        self.torch, self.form, self.params = torch, form, params
        self.turn = 0
        self.kept: Any = None           # at rest; also later, to be used again
        self.asleep = False
        self.slots: list[tuple[Any, int, Any]] = []     # (parameter, offset, stride) of those in `kept`
        self.standing: dict[tuple[int, str], Any] = {}  # (index, name) -> a weak reference to what stands in the state
        self.plain_bytes = 0
        self.awake: dict[str, Any] = {}     # flat tensors that the state is views of, until it rests again

    def wake(self) -> None:
        """Give the state back. What somebody replaced or removed meanwhile stays as it is."""
        if not self.asleep:
            return
        self.awake = self.form.wake(self.kept)
        for (index, name), resting in self.standing.items():
            state = self.optimizer.state.get(self.slots[index][0], {})
            if name in state and state[name] is resting():
                state[name] = self._view(self.awake[name], index)
        self._forget()
        kind = resting_type(self.torch)
        for parameter in self.params:       # the script has put views there: `.detach()`
            state = self.optimizer.state.get(parameter, {})
            state.update({name: value.values() for name, value in state.items() if isinstance(value, kind)})

    def forget(self) -> None:
        """All state was replaced."""
        self._forget()
        self.kept, self.awake = None, {}

    def _forget(self) -> None:
        self.asleep, self.standing = False, {}

    def rest(self) -> None:
        """Put to rest what is awake."""
        if self.asleep:
            return
        names, members = self._find()
        if not members:
            return
        slots, end = [], 0
        for parameter in members:
            slots.append((parameter, end, self.torch.empty_like(parameter).stride()))
            end += -(-parameter.numel() // BLOCK) * BLOCK
        if [(id(p), stride) for p, _, stride in slots] != [(id(p), stride) for p, _, stride in self.slots]:
            self.kept, self.awake = None, {}
        self.slots = slots
        if set(self.awake) != set(names):
            like = members[0]
            self.awake = {name: self.torch.zeros(end, dtype=like.dtype, device=like.device) for name in names}
        plain_bytes = 0
        for index, parameter in enumerate(members):
            for name in names:
                value, place = self.optimizer.state[parameter][name], self._view(self.awake[name], index)
                if value.data_ptr() != place.data_ptr() or value.stride() != place.stride():
                    place.copy_(value)      # otherwise the step has worked in it
                plain_bytes += value.numel() * value.element_size()
        self.turn += 1
        # Until this has succeeded the state stays what the step has made of it: it may run out of memory, or be interrupted.
        kept = self.form.rest(self.awake, self.kept, self.turn)
        self.kept, self.awake, self.asleep, self.plain_bytes = kept, {}, True, plain_bytes
        for index, parameter in enumerate(members):
            for name in names:
                resting = resting_type(self.torch)(self, name, index, parameter.detach(), slots[index][2])
                self.standing[index, name] = weakref.ref(resting)       # it holds this piece
                self.optimizer.state[parameter][name] = resting

    def _find(self) -> tuple[tuple[str, ...], list[Any]]:
        """Names and parameters whose state can rest together."""
        found: dict[tuple[str, ...], list[Any]] = {}
        for parameter in self.params:
            state = self.optimizer.state.get(parameter, {})
            whole = tuple(name for name, value in state.items() if self._fits(value, parameter))
            names = whole if self.form.names is None else self.form.names
            if names and set(names) <= set(whole):
                found.setdefault(names, []).append(parameter)
        return max(found.items(), key=lambda item: len(item[1]), default=((), []))

    def _fits(self, value: Any, parameter: Any) -> bool:
        return (type(value) is self.torch.Tensor and value.shape == parameter.shape and value.dtype == parameter.dtype
                and value.device == parameter.device and value.layout == self.torch.strided)

    def _view(self, flat: Any, index: int, start: int = 0) -> Any:
        parameter, offset, stride = self.slots[index]
        return flat.as_strided(parameter.shape, stride, flat.storage_offset() + offset - start)

    # -- for whoever looks at the state between two steps ----------------------------------------------------------

    def read(self, name: str, index: int) -> Any:
        parameter, offset, _ = self.slots[index]
        if name in self.awake:
            return self._view(self.awake[name], index)
        end = offset + -(-parameter.numel() // BLOCK) * BLOCK
        return self._view(self.form.wake(self.kept, offset, end)[name], index, offset)

    def write(self, name: str, index: int, values: Any) -> None:
        if name in self.awake:
            return          # they are its own
        awake = self.form.wake(self.kept)
        self._view(awake[name], index).copy_(values)
        self.turn += 1
        self.kept = self.form.rest(awake, self.kept, self.turn)


def can_rest(torch: Any, parameter: Any, smallest: int) -> bool:
    return (type(parameter) in (torch.nn.Parameter, torch.Tensor) and parameter.numel() >= smallest
            and parameter.dtype in (torch.float32, torch.bfloat16, torch.float16) and parameter.layout == torch.strided)


def large_enough(torch: Any, optimizer: Any, smallest: int) -> bool:
    """Whether this optimizer holds anything whose state can rest."""
    return any(can_rest(torch, p, smallest) for group in optimizer.param_groups for p in group["params"])


class Keeper(OfOptimizer):
    """Puts the state of one optimizer to rest between its steps. `report(plain_bytes, resting_bytes, tensors)` is called
    after the first step, and when loaded state was put to rest."""

    def __init__(self, context: Any, optimizer: Any, form: Form, smallest: int, report: Any):
        super().__init__(optimizer)
        self.torch, self.form, self.smallest, self.report = context.torch, form, smallest, report
        self.pieces: dict[int, tuple[list[int], list[Piece]]] = {}      # by position of the group: ids it was made for
        for register, hook in ((optimizer.register_step_pre_hook, self._before_step),
                               (optimizer.register_state_dict_post_hook, self._saving),
                               (optimizer.register_load_state_dict_post_hook, self._loaded)):
            context.on_undo(register(hook).remove)
        context.on_undo(weakly(self.wake))      # the first that is undone: the hooks are what holds it
        if context.early:
            self.rest()         # what was loaded before training began

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        return (_StandIn(optimizer, self), *args[1:]), kwargs

    def groups(self) -> Iterator[dict[str, Any]]:
        """The optimizer's groups, in pieces: those that stay as they are, then one at a time what rests."""
        for position, group in enumerate(self.optimizer.param_groups):
            pieces = self._pieces(position, group)
            mine = {id(p) for piece in pieces for p in piece.params}
            yield {**group, "params": [p for p in group["params"] if id(p) not in mine]}
            for piece in pieces:
                piece.wake()
                yield {**group, "params": piece.params}
                piece.rest()
        self._tell()

    def _pieces(self, position: int, group: dict[str, Any]) -> list[Piece]:
        ids = [id(p) for p in group["params"]]
        known = self.pieces.get(position)
        if known is not None and known[0] == ids:
            return known[1]
        for piece in known[1] if known is not None else ():
            piece.wake()
        total = sum(p.numel() for g in self.optimizer.param_groups for p in g["params"])
        room = min(MOST, max(LEAST, total // SHARE))
        pieces: list[Piece] = []
        left, kind = 0, None
        for p in group["params"]:
            if not can_rest(self.torch, p, self.smallest):
                continue
            if p.numel() > left or (p.device, p.dtype) != kind:
                pieces.append(Piece(self.torch, self.optimizer, self.form, []))
                left, kind = room, (p.device, p.dtype)
            pieces[-1].params.append(p)
            left -= p.numel()
        self.pieces[position] = ids, pieces
        return pieces

    def _all(self) -> list[Piece]:
        return [piece for position, group in enumerate(self.optimizer.param_groups) for piece in self._pieces(position, group)]

    def rest(self) -> None:
        for piece in self._all():
            piece.rest()
        self._tell()

    def wake(self) -> None:
        for piece in self._all():
            piece.wake()

    def _tell(self) -> None:
        asleep = [piece for _, pieces in self.pieces.values() for piece in pieces if piece.asleep]
        if asleep and self.report is not None:
            self.report(sum(p.plain_bytes for p in asleep), sum(self.form.size_bytes(p.kept) for p in asleep),
                        sum(len(p.standing) for p in asleep))
            self.report = None

    def _saving(self, optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        kind = resting_type(self.torch)
        states = {index: {name: value.values() if isinstance(value, kind) else value for name, value in state.items()}
                  if isinstance(state, dict) else state for index, state in saved["state"].items()}
        return {**saved, "state": states}

    def _loaded(self, optimizer: Any) -> None:
        for _, pieces in self.pieces.values():
            for piece in pieces:
                piece.forget()
        self.rest()


class _StandIn:
    """An optimizer whose groups come in pieces."""

    def __init__(self, optimizer: Any, keeper: Keeper):
        self._optimizer, self._keeper = optimizer, keeper

    @property
    def param_groups(self) -> Iterator[dict[str, Any]]:
        return self._keeper.groups()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)
