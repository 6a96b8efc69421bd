"""What several techniques need: what they ask of the facts, trees of tensors, and looking into an autograd graph."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from saturate.records.facts import Facts, LoaderFacts, ModuleFacts
from saturate.techniques._api import Eligible, Ineligible, NotApplied

#: Share of the step below which waiting for input is not worth a trial.
LEAST_WAIT = 0.02

#: A copy from pageable memory is at least this fast, bytes per millisecond (1 GB/s): bounds what copies can cost.
SLOWEST_COPY = 1e6

NO_LOADER = "the training does not read from a DataLoader"

#: Of what hooks would show, which compiled code must not be given.
NOT_WATCHED = "the script compiles something, so calls inside its model, and their shapes, were not watched"


def share(part_ms: float, step_ms: float) -> float | None:
    """`part_ms / step_ms` within [0, 1]; None when the step was not timed or the numbers make no sense."""
    if not (step_ms > 0 and part_ms >= 0):      # also refuses NaN
        return None
    return min(1.0, part_ms / step_ms)


def computing(facts: Facts, most: float = 1.0) -> float | None:
    """Bound of what acts on forward and backward: at `most` this part of the share of a step that neither waits for
    input nor is the optimizer's; None when the step was not timed."""
    rest = share(exposed_input_ms(facts) + facts.optimizer_ms, facts.step_ms)
    return None if rest is None else most * (1.0 - rest)


def exposed_input_ms(facts: Facts) -> float:
    """What a step would be shorter by if a batch took no time. The rest of `input_wait_ms` an accelerator hides, as long as its own
    part of the step is no shorter: what shortens the wait may show only beside what shortens that."""
    return facts.input_wait_ms if facts.input_exposed_ms is None else facts.input_exposed_ms


def waiting(facts: Facts) -> float | None:
    """Share of the step that waits for input; None when the step was not timed."""
    return share(facts.input_wait_ms, facts.step_ms)


def hardly_waits(facts: Facts) -> Ineligible | None:
    """Why nothing that shortens the wait for input is worth a trial; None when it may be, or when the step was not timed."""
    waits = waiting(facts)
    return None if waits is None or waits >= LEAST_WAIT else Ineligible(f"only {waits:.1%} of the step waits for input")


def waits_for_loaders(facts: Facts, refusal: Callable[[LoaderFacts], str]) -> Eligible | Ineligible:
    """Whether there is a wait for input to shorten. `refusal`: why a loader cannot be helped, or ""."""
    if not facts.loaders:
        return Ineligible(NO_LOADER)
    refusals = [refusal(loader) for loader in facts.loaders]
    if all(refusals):
        return Ineligible(refusals[0])
    if (refused := hardly_waits(facts)) is not None:
        return refused
    waits = waiting(facts)
    return Eligible("the step waits for its input" if waits is None else f"{waits:.0%} of the step waits for input")


def why_no_copies(facts: Facts) -> Ineligible | None:
    """Why no batch is copied from a DataLoader to a device; None where one is."""
    if not facts.loaders:
        return Ineligible(NO_LOADER)
    if all(loader.holds_device_tensors for loader in facts.loaders):
        return Ineligible("the dataset yields tensors that live on the device already")
    if not facts.host_to_device_bytes:
        return Ineligible("no bytes are copied from host to device in a step")
    return None


def copies_batches(facts: Facts) -> Eligible:
    """For techniques that make copies of batches cheaper: how much is copied."""
    return Eligible(f"{facts.host_to_device_bytes / 1e6:.1f} MB are copied to the device in each step")


def bound_of_copies(facts: Facts) -> float | None:
    """Bound of what makes copies of batches cheaper: the most of the step that these and the wait for input can take."""
    return share(facts.host_to_device_bytes / SLOWEST_COPY + facts.input_wait_ms, facts.step_ms)


def wrappable(facts: Facts) -> tuple[ModuleFacts, ...]:
    """Trained modules whose forward is that of their class: for techniques that change what it gets or what it does."""
    return tuple(module for module in facts.modules if not module.forward_overridden)


def spelled(kind: str, module: str) -> str:
    """The class of an optimizer, by its names; others than torch's are called Adam, too, and then it is said whose it is."""
    return f"{kind} of {module}" if module and not module.startswith("torch.optim") else kind


def is_compiled(module: Any) -> bool:
    """Whether the script compiles this module, by `torch.compile` or `Module.compile`."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def compiled_already(modules: Sequence[ModuleFacts]) -> str:
    """Why none of these modules is known to run eagerly; "" where one is, or there is none."""
    if not modules or any(module.compiled is False for module in modules):
        return ""
    if any(module.compiled for module in modules):
        return "the script already compiles its model"
    return "the script compiles something itself, and whether its model is in it is not known"


def why_no_chunks(facts: Facts) -> Ineligible | None:
    """Why no forward can be run in chunks of its batch; None where one may be."""
    if not wrappable(facts):
        return Ineligible("no trained module was seen whose forward is its class's own")
    if why := compiled_already([module for module in facts.modules if module.compiled is not False]):
        return Ineligible(f"{why}, and a compiled forward is not cut")
    if any(module.batch_norms for module in facts.modules):
        return Ineligible("BatchNorm normalizes over the batch, so its samples depend on each other")
    return None


def why_no_autocast(facts: Facts) -> Ineligible | None:
    """Why no autocast can help, whatever its dtype; None when one might."""
    if facts.autocast:
        return Ineligible(_own_autocast(facts.autocast))
    if facts.steps_in_forward:
        return Ineligible(_STEPS_IN_FORWARD)
    if facts.grad_scaler:
        return Ineligible("the script scales its loss itself, so it manages its own precision")
    modules = facts.modules
    if not modules:
        return Ineligible("no trained module was seen")
    if not any("float32" in module.dtypes for module in modules):
        return Ineligible("the trained modules hold no float32 parameters")
    if not (multiplies(facts) or convolves(facts)):
        return Ineligible("the trained modules have no matrix products or convolutions to speed up")
    return None


def convolves(facts: Facts) -> bool:
    """Whether a trained module has layers of convolutions, in any number of dimensions."""
    return any(module.convolutions or module.other_convolutions for module in facts.modules)


def multiplies(facts: Facts) -> bool:
    """Whether trained modules have matrix products. Some write them by hand (`x @ self.weight`): where no layer is known that would
    do what was counted, something of the kind did."""
    if any(module.linears or module.recurrents or module.attentions for module in facts.modules):
        return True
    return bool(facts.modules and facts.flops_per_step) and not convolves(facts)


#: As in implementations of MAML, whose module trains an inner one when it is called.
_STEPS_IN_FORWARD = "the model's forward trains it: its backward pass and the optimizer's step would run under autocast, too"


def _own_autocast(dtype: str) -> str:
    return f"the script already runs under {dtype} autocast"


def reals(tensor: Any, torch: Any) -> Any:
    """The numbers of a tensor, as they are compared: in float64 where they are in it, in float32 elsewhere. Complex ones are pairs of
    real ones, in a dimension more: torch's own conversion would drop the imaginary part."""
    pairs = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return pairs if pairs.dtype == torch.float64 else pairs.float()


def per_rank(amount: float, facts: Facts) -> int:
    """A rank's part of something that all ranks of the machine share, at least 1 (all ranks are taken as local)."""
    return max(1, int(amount / max(1, facts.world_size)))


def mebibytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def in_forward_mode(torch: Any) -> bool:
    """Whether a level of forward-mode differentiation is open: tensors may have tangents, which hooks on what is saved and compiled
    code do not know."""
    return bool(torch.autograd.forward_ad._current_level >= 0)


def map_tensors(value: Any, change: Callable[[Any], Any], torch: Any) -> Any:
    """Apply `change` to each tensor in nested tuples, lists, mappings and dataclasses, keeping every container's type.

    Mappings that are not plain dictionaries (a ModelOutput), and dataclasses, are changed in place: they were made by
    the forward that just returned, and may not be constructible from their items. Other objects are left alone.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, change, torch) for item in value]
        if type(value) is tuple:
            return tuple(items)
        if hasattr(value, "_make"):
            return type(value)._make(items)
        changed = any(new is not old for new, old in zip(items, value))
        return type(value)(items) if changed and hasattr(value, "n_fields") else value      # torch.return_types; torch.Size
    if type(value) is list:
        return [map_tensors(item, change, torch) for item in value]
    if type(value) is dict:
        return {key: map_tensors(item, change, torch) for key, item in value.items()}
    if isinstance(value, MutableMapping):
        for key in list(value.keys()):      # a TensorDict iterates over its rows
            old = value[key]
            new = map_tensors(old, change, torch)
            if new is not old:
                value[key] = new
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            new = map_tensors(old, change, torch)
            if new is not old:
                object.__setattr__(value, field.name, new)      # frozen ones too
    return value


def tensors(value: Any, torch: Any) -> list[Any]:
    """Every tensor that `map_tensors` would reach."""
    found: list[Any] = []

    def collect(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    map_tensors(value, collect, torch)
    return found


def memory_holders(tensor: Any, torch: Any) -> int:
    """How many hold the memory of a tensor, with what asking adds."""
    if not hasattr(torch._C, "_storage_Use_Count"):
        raise NotApplied("this version of torch does not tell who else holds a parameter")
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def shares_memory(tensor: Any, torch: Any) -> bool:
    """Whether other tensors, or other processes, have the memory of this one as well (on CUDA, where each tensor counts as shared
    with other processes, that is not known)."""
    return memory_holders(tensor, torch) > memory_holders(torch.empty(1, device="cpu"), torch) or (tensor.device.type == "cpu" and tensor.is_shared())


def roots(given: Any, torch: Any) -> tuple[Any, ...]:
    """What `torch.autograd.backward` is to begin with, tensors and edges of the graph. Whoever looks at it passes this on:
    a generator gives its losses only once."""
    if torch.overrides.is_tensor_like(given) or isinstance(given, torch.autograd.graph.GradientEdge):
        return (given,)
    return tuple(given)


def graph_nodes(output: Any, torch: Any, limit: int = 4000) -> Iterator[Any]:
    """Nodes of the autograd graph that produced `output`, breadth first."""
    pending = [tensor.grad_fn for tensor in tensors(output, torch) if tensor.grad_fn is not None]
    seen = set()
    while pending and len(seen) < limit:
        node = pending.pop(0)
        if node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(parent for parent, _ in node.next_functions if parent is not None)


def node_name(node: Any) -> str:
    """The name of an autograd node. Of a function of the script's own, the node has the attributes that its author gave `ctx`, `name`
    too, which hide the node's."""
    return str(type(node).name(node))


def leaf_of(node: Any) -> Any:
    """The tensor that an autograd node adds to the gradient of; None of other nodes, whatever their authors call `variable`."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


def computed_in(output: Any, dtype: Any, torch: Any) -> str:
    """The name of an autograd node behind `output` that worked in `dtype`, or "" when there is none.

    Eager nodes tell by the dtype of their results, without unpacking what they saved: unpacking under activation
    checkpointing would run the forward again. A compiled region is one node whose results may be float32 while its
    inside is not, so there the saved tensors are looked at; nothing inside a compiled region is checkpointed by hooks.
    """
    for node in graph_nodes(output, torch):
        if node_name(node).startswith("ToCopy"):
            continue        # a cast proves nothing about the arithmetic
        results = [metadata.dtype for metadata in getattr(node, "_input_metadata", ())]
        if "CompiledFunction" in node_name(node):
            results += [saved.dtype for saved in _saved_tensors(node)]
        if dtype in results:
            return node_name(node)
    return ""


def capturing(torch: Any) -> bool:
    """Whether what is queued now goes into a CUDA graph of the script's own. Without CUDA it costs nothing, and starts no driver."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def device_of(context: Any) -> Any:
    """The `torch.device` of what is trained, with its number: CUDA's current device is another one where a script names "cuda:1" and
    sets none. Of several, the first."""
    trained = (p for module in context.modules for p in module.parameters())
    stepped = (p for optimizer in context.optimizers for group in optimizer.param_groups for p in group["params"])
    found = (p.device for p in itertools.chain(trained, stepped) if p.device.type == context.device)
    return next(found, None) or context.torch.device(context.device or "cpu")


def _saved_tensors(node: Any) -> tuple[Any, ...]:
    """None once a backward pass has used and freed them."""
    try:
        return tuple(getattr(node, "saved_tensors", ()))
    except RuntimeError:
        return ()


def observe_first_call(context: Any, module: Any, look: Callable[[Any], None]) -> None:
    """Call `look(output)` once, after the module's first wrapped forward, outside of every other wrapper. One without gradients, of which
    scripts ask for an action or a target before they train, leaves no graph to look at, and does not count.

    Outermost, so that it also sees what a compiled forward returns. It steps aside while a compiler traces.
    """
    torch = context.torch
    pending = [True]

    def wrap(inner: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = inner(self, *args, **kwargs)
            if pending and not torch.compiler.is_compiling() and torch.is_grad_enabled():
                pending.clear()
                look(output)
            return output

        return forward

    context.wrap_forward(module, OBSERVER_ORDER, wrap, around=True)


#: Further out than any technique.
OBSERVER_ORDER = 1000


def wrap_all(context: Any, wrap_one: Callable[[Any], None]) -> int:
    """Run `wrap_one(module)` for each trained module, and count. A module that refuses does not spoil the others;
    when all of them refuse, the first refusal is raised."""
    if not context.modules:
        raise NotApplied("no trained module is known")
    refusals = []
    for module in context.modules:
        try:
            wrap_one(module)
        except NotApplied as refusal:
            refusals.append(refusal)
    if len(refusals) == len(context.modules):
        raise refusals[0]
    return len(context.modules) - len(refusals)


def wrap_autocast(context: Any, dtype: Any, key: str, wanted: Callable[[], bool] = lambda: True,
                  inside: Callable[[Any, Any], list[Any]] | None = None) -> int:
    """Run each trained module's forward under autocast, hand its outputs back as float32, and note (under `key`) the
    first autograd node that really computed in `dtype`. Returns how many modules were wrapped: the trained ones, or those parts of
    them that `inside(torch, module)` names. Not where the script autocasts itself: its nodes would be taken for what this did."""
    if context.autocast:
        raise NotApplied(_own_autocast(context.autocast))
    if context.steps_in_forward:
        raise NotApplied(_STEPS_IN_FORWARD)
    torch, device = context.torch, context.device
    caches = not cache_loses_gradients(context, dtype)

    def widen(tensor: Any) -> Any:
        return tensor.float() if tensor.dtype == dtype else tensor

    def wrap(inner: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not wanted():
                return inner(self, *args, **kwargs)
            with torch.autocast(device, dtype=dtype, cache_enabled=caches):
                output = inner(self, *args, **kwargs)
            return map_tensors(output, widen, torch)

        return forward

    def look(output: Any) -> None:
        node = computed_in(output, dtype, torch)
        if node:
            context.note(key, f"{node} computed in {str(dtype).removeprefix('torch.')}")

    def wrap_one(module: Any) -> None:
        if dtype != torch.float16 and any(isinstance(part, torch.nn.DataParallel) and len(part.device_ids) > 1 for part in module.modules()):
            raise NotApplied("the threads of torch.nn.DataParallel autocast to float16, whatever the dtype around them")
        parts = [module] if inside is None else inside(torch, module)
        if not parts:
            raise NotApplied(f"{type(module).__name__} has no layer that could compute in {str(dtype).removeprefix('torch.')} alone")
        for part in parts:
            context.wrap_forward(part, AUTOCAST_ORDER, wrap, around=True)
        wrapped.extend(parts)
        observe_first_call(context, module, look)

    wrapped: list[Any] = []
    wrap_all(context, wrap_one)
    return len(wrapped)


AUTOCAST_ORDER = 30


def cache_loses_gradients(context: Any, dtype: Any) -> bool:
    """Whether this torch takes a weight that autocast has cast under `no_grad` once more where gradients are wanted: they would end
    there. A diffusion model that is conditioned on itself runs its net so."""
    torch, device = context.torch, device_of(context)
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.ones(1, 1, device=device, requires_grad=True)
        with torch.autocast(device.type, dtype=dtype):
            with torch.no_grad():
                torch.mm(weight, weight)
            return torch.mm(weight, weight).grad_fn is None
