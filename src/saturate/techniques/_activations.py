"""What a forward saves for its backward, counted storage by storage, and whether it may run twice."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from saturate.techniques import _collectives, _common, _replay
from saturate.techniques._interrupts import from_signal_handler
from saturate.techniques._surroundings import Surroundings

#: Operators whose results are worth keeping: they cost most and their results are small beside it.
PRODUCTS = frozenset((
    "mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
))


#: Buffers up to this size are copied for each forward, whether or not it was seen to change them.
SMALL_BYTES = 1 << 16

#: For which a device is kept busy while a forward under watch is queued: about 20 ms.
BUSY_CYCLES = 40_000_000


def is_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator is one of `PRODUCTS` and draws no random numbers in this call: a result that is kept is not
    drawn again, and whatever is drawn after it would get its numbers."""
    schema = func._schema
    if not schema.name.startswith("aten::") or schema.name[6:] not in PRODUCTS:
        return False
    for place, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return not given
    return True


class Storages:
    """Tells storages apart, also after their memory was freed and used again."""

    def __init__(self, torch: Any):
        from torch.multiprocessing.reductions import StorageWeakRef

        self.sizes: dict[int, int] = {}
        self._torch = torch
        self._reference = StorageWeakRef
        self._held: dict[int, Any] = {}     # a weak reference keeps the address of the storage from being used again

    def key(self, tensor: Any) -> int:
        """The same number for all tensors that share memory."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):     # sparse tensors and wrappers have none: each is one of its own
            key = -1 - len(self.sizes)
            self.sizes[key] = tensor.numel() * tensor.element_size()
            return key
        reference = self._reference(storage)
        key = reference.cdata
        if key not in self._held:
            self._held[key] = reference
            self.sizes[key] = storage.nbytes()
        return key

    def keys(self, value: Any) -> list[int]:
        """Keys of every tensor in nested containers, in order."""
        return [self.key(tensor) for tensor in _common.tensors(value, self._torch)]

    def total(self, keys: Any) -> int:
        return sum(self.sizes[key] for key in keys)


class Stopwatch:
    """Times pieces of work: on a CUDA device by its own clock (read it when all is queued), else by the time that this
    thread had a core, which other load on the machine does not change. `device`: a `torch.device`, with its number."""

    def __init__(self, torch: Any, device: Any):
        self._cuda = torch.cuda if device.type == "cuda" else None
        self._device = device
        self._spans: list[tuple[Any, Any]] = []

    def time(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self._mark()
        result = function(*args, **kwargs)
        self._spans.append((before, self._mark()))
        return result

    @property
    def count(self) -> int:
        return len(self._spans)

    def _mark(self) -> Any:
        if self._cuda is None:
            return time.thread_time_ns()
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def ns(self) -> float:
        if self._cuda is None:
            return float(sum(after - before for before, after in self._spans))
        self._cuda.synchronize(self._device)
        return 1e6 * sum(before.elapsed_time(after) for before, after in self._spans)


@dataclass
class Trace:
    """What one run of a block's forward left behind. Storage keys, except for the numbers of arguments and results."""

    saved: set[int] = field(default_factory=set)
    products: set[int] = field(default_factory=set)
    read_arguments: frozenset[int] = frozenset()    # positions, among all tensors that it was given
    read_results: frozenset[int] = frozenset()      # positions, among all tensors that it returned
    inner_bytes: int = 0
    product_bytes: int = 0
    needed_bytes: int = 0
    buffer_bytes: int = 0
    buffers: tuple[tuple[str, str], ...] = ()       # (path, name) of those that the forward changes, or may change
    rest_share: float = 1.0                         # of its operators' time, spent outside of products
    operators: int = 0                              # how many it ran
    operators_why_not: str = ""
    output: Any = None


class NotRepeatable(Exception):
    """A forward cannot be run twice; the message is the reason."""


def rehearse(torch: Any, device: Any, inner: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
             parameters: set[int], storages: Storages) -> Trace:
    """Run a forward on copies of its arguments and buffers, and put back every random number that it drew: nothing of the
    training changes, and what the forward did outside of itself is undone. Saves nothing for a backward. Raises
    `NotRepeatable`."""
    reason = _replay.why_not_arguments((*args, *kwargs.values()), torch)
    if not reason and _replay.hooked(module):
        reason = "a module inside it has forward hooks, which would be called twice"
    around = Surroundings(module, torch)
    if not reason and around.generator:
        reason = f"it has a random generator of its own ({around.generator})"
    if reason:
        raise NotRepeatable(reason)
    held = _replay.attributes(module)
    names = _replay.buffers(module)
    trace = Trace()
    weights: list[tuple[Any, Any]] = []
    try:        # copies need memory too
        weights += [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
        state = _replay.State(module, names)
        given = _common.map_tensors((args, kwargs), lambda tensor: tensor.clone(), torch)
        filled = _replay.containers(given)
        before = _common.tensors(given, torch)
        versions = [tensor._version for tensor in before]
        devices = sorted({tensor.device.index for tensor in before if tensor.device.type == "cuda"})
        with torch.random.fork_rng(devices=devices), _no_other_checkpoint(), state.restored() as copies:
            _watched_run(torch, device, functools.partial(inner, module, *given[0], **given[1]), trace, storages)
            owners = [module.get_submodule(path) for path, _ in names]
            now = [owner._buffers[name] for owner, (_, name) in zip(owners, names)]
    except NotRepeatable:
        raise
    except Exception as error:  # the block runs plainly, so whatever is wrong lies in running it under watch
        if from_signal_handler(error):
            raise
        raise NotRepeatable(f"its forward does not run under watch: {type(error).__name__}: {error}") from error
    finally:
        left = _replay.changed_attribute(held)
        outside = around.restore()
        left = left or outside and f"its forward changes {outside}"
        for parameter, value in weights:
            if not _same(parameter, value, torch):
                parameter.data.copy_(value)
                left = left or "its forward changes a parameter"
    if left:
        raise NotRepeatable(left)
    if _replay.changed_container(filled):
        raise NotRepeatable("its forward changes a list or dict that it is given")
    if any(tensor._version != version for tensor, version in zip(before, versions)):
        raise NotRepeatable("its forward modifies an argument in place")
    # The buffers were copied before the forward saw them, so what differs from the real ones was changed by it. Small ones, as running
    # statistics are, may be changed in a branch that is only taken now and then (stochastic depth, a normalization for each domain).
    trace.buffers = tuple(
        place for place, owner, value, copy in zip(names, owners, now, copies)
        if value is not copy or _nbytes(copy) <= SMALL_BYTES or not _same(owner._buffers[place[1]], value, torch))
    trace.buffer_bytes = sum(_nbytes(module.get_submodule(path)._buffers[name]) for path, name in trace.buffers)
    _sort_out(trace, before, parameters | set(storages.keys((now, list(module.parameters())))), storages, torch)
    return trace


class Before:
    """The random numbers and buffers of a moment, to run a forward once more in place of one that already ran."""

    def __init__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], torch: Any):
        self._torch = torch
        self._state = _replay.State(module, _replay.buffers(module))
        self._random = torch.get_rng_state()
        self._devices = {tensor.device: torch.cuda.get_rng_state(tensor.device)
                         for tensor in _common.tensors((args, kwargs), torch) if tensor.device.type == "cuda"}

    def again(self, inner: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Its result; the buffers keep what the run that it replaces left in them."""
        self._torch.set_rng_state(self._random)
        for device, state in self._devices.items():
            self._torch.cuda.set_rng_state(state, device)
        with self._state.restored():
            return inner(module, *args, **kwargs)


def _nbytes(tensor: Any) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _watched_run(torch: Any, device: Any, run: Any, trace: Trace, storages: Storages) -> None:
    """Run with hooks that count what is saved and save nothing, and under a mode that times each operator."""
    watch = _operator_watch()(torch, device, trace, storages)

    def pack(tensor: Any) -> None:
        trace.saved.add(storages.key(tensor))

    def unpack(_: None) -> Any:
        raise NotRepeatable("its forward runs a backward of its own")

    keep_busy(torch, device)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), watch, _collectives.refused(NotRepeatable):
        trace.output = run()
    returned = trace.output.values() if isinstance(trace.output, Mapping) else (trace.output,)
    if _replay.why_not_arguments(returned, torch):
        raise NotRepeatable(f"it returns a {type(trace.output).__name__} that holds more than tensors")
    trace.operators = watch.products.count + watch.others.count
    everything = watch.products.ns() + watch.others.ns()
    trace.rest_share = watch.others.ns() / everything if everything > 0 else 1.0
    if any(tensor._version != version for tensor, version in watch.kept):
        trace.operators_why_not = "it modifies the result of a matrix product in place"


def keep_busy(torch: Any, device: Any) -> None:
    """Let a CUDA device wait until operators are queued. One that is idle runs each as soon as it is launched, and for a small one the
    time between two events is that of the launch then, not of its kernel."""
    if device.type == "cuda" and torch.version.hip is None:     # which counts the cycles of a slower clock
        with torch.cuda.device(device):
            torch.cuda._sleep(BUSY_CYCLES)


@functools.cache
def _operator_watch() -> type:
    from torch.utils._python_dispatch import TorchDispatchMode

    class OperatorWatch(TorchDispatchMode):
        """Times operators, and notes the results of products."""

        def __init__(self, torch: Any, device: Any, trace: Trace, storages: Storages):
            super().__init__()
            self.torch, self.trace, self.storages = torch, trace, storages
            self.products, self.others = Stopwatch(torch, device), Stopwatch(torch, device)
            self.kept: list[tuple[Any, int]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            product = is_product(func, args, kwargs)
            result = (self.products if product else self.others).time(func, *args, **kwargs)
            if product:
                for tensor in _common.tensors(result, self.torch):
                    self.trace.products.add(self.storages.key(tensor))
                    self.kept.append((tensor, tensor._version))
            return result

    return OperatorWatch


class _no_other_checkpoint:
    """Raises `NotRepeatable` where a block recomputes inside already."""

    def __enter__(self) -> None:
        from torch.utils import checkpoint

        self._module, self._original = checkpoint, checkpoint._infer_device_type

        def noticed(*args: Any) -> Any:
            raise NotRepeatable("the script recomputes inside of it already")

        checkpoint._infer_device_type = noticed

    def __exit__(self, *exception: Any) -> None:
        self._module._infer_device_type = self._original


def _sort_out(trace: Trace, given: list[Any], excluded: set[int], storages: Storages, torch: Any) -> None:
    """Split what was saved into arguments, results and what lies inside."""
    arguments = [storages.key(tensor) for tensor in given]
    results = [storages.key(tensor) for tensor in _common.tensors(trace.output, torch)]
    trace.read_arguments = frozenset(i for i, key in enumerate(arguments) if key in trace.saved)
    trace.read_results = frozenset(i for i, key in enumerate(results) if key in trace.saved and key not in arguments)
    if trace.products & set(results):
        trace.operators_why_not = "it returns the result of a matrix product, which may be modified in place"
    inside = trace.saved - set(arguments) - set(results) - excluded
    trace.inner_bytes = storages.total(inside)
    trace.product_bytes = storages.total(trace.products - set(arguments))
    trace.needed_bytes = storages.total(trace.products & inside)


def same_output(first: Any, second: Any, torch: Any) -> bool:
    """Whether two results hold the same tensors, bit by bit (nan equals nan)."""
    ours, theirs = _common.tensors(first, torch), _common.tensors(second, torch)
    alike = type(first) is type(second) and len(ours) == len(theirs)
    return alike and all(_same(a, b, torch) for a, b in zip(ours, theirs))


def _same(a: Any, b: Any, torch: Any) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def saved_after(tensors: Any, last_node: int, storages: Storages, torch: Any) -> tuple[set[int], set[int]]:
    """Storages that autograd nodes newer than `last_node` saved (a loss that is computed outside of the model), and those
    among them that no operator made (its targets)."""
    found: set[int] = set()
    leaves: set[int] = set()
    pending = [tensor.grad_fn for tensor in tensors if getattr(tensor, "grad_fn", None) is not None]
    seen = set()
    while pending:
        node = pending.pop()
        if node in seen or node._sequence_nr() <= last_node:
            continue
        seen.add(node)
        for tensor in _saved_by(node, torch):
            found.add(storages.key(tensor))
            if tensor.grad_fn is None and not tensor.is_floating_point():
                leaves.add(storages.key(tensor))
        pending += [parent for parent, _ in node.next_functions if parent is not None]
    return found, leaves


def _saved_by(node: Any, torch: Any) -> Iterator[Any]:
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            yield from _common.tensors(_attribute(node, name), torch)


def _attribute(node: Any, name: str) -> Any:
    try:
        return getattr(node, name)
    except RuntimeError:
        return None         # freed by an earlier backward
