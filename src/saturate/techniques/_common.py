"""What several techniques need: what they ask of the facts, trees of tensors, and wrapping the trained modules."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, MutableMapping, Sequence
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


def outermost(modules: Sequence[Any]) -> list[Any]:
    """Those that are no part of another of them: a step may call a model, and a part of it by itself, and then both are trained modules.
    What acts on parts must find each once."""
    inside = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inside]


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


def convolves(facts: Facts) -> bool:
    """Whether a trained module has layers of convolutions, in any number of dimensions."""
    return any(module.convolutions or module.other_convolutions for module in facts.modules)


def multiplies(facts: Facts) -> bool:
    """Whether trained modules have matrix products. Some write them by hand (`x @ self.weight`): where no layer is known that would
    do what was counted, something of the kind did."""
    if any(module.linears or module.recurrents or module.attentions for module in facts.modules):
        return True
    return bool(facts.modules and facts.flops_per_step) and not convolves(facts)


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
    """Apply `change` to each tensor in nested tuples, lists, mappings, dataclasses and probability distributions, keeping every
    container's type.

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
    elif isinstance(value, torch.distributions.Distribution):
        return _distribution(value, change, torch)
    return value


def _distribution(value: Any, change: Callable[[Any], Any], torch: Any) -> Any:
    """Another one where anything is changed: the module may keep this one, a learned prior. What is one tensor by two names stays one."""
    made: dict[int, Any] = {}

    def once(tensor: Any) -> Any:
        if id(tensor) not in made:
            made[id(tensor)] = change(tensor)
        return made[id(tensor)]

    held = vars(value)
    mapped = {name: map_tensors(old, once, torch) for name, old in held.items()}
    if all(mapped[name] is old for name, old in held.items()):
        return value
    other = copy.copy(value)
    vars(other).update(mapped)
    return other


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
