"""Looking at the user's training without disturbing it: which modules are trained, and the facts about them."""

from __future__ import annotations

import gc
import importlib.util
import io
import os
import sys
import weakref
from dataclasses import asdict
from typing import Any

from saturate import ranks
from saturate.agent import formats
from saturate.agent.context import living
from saturate.agent.forwards import forward_overridden, is_ours
from saturate.data import batches
from saturate.records.facts import Evidence, Facts, LoaderFacts, MachineFacts, ModuleFacts, OptimizerFacts
from saturate.techniques import _common, _hf_trainer
from saturate.techniques._given import referable

#: The launchers' variables as a trial's command was given them: whoever set them did not start the ranks of this trial.
inherited: dict[str, str] = {}


def rank() -> int:
    """This process's rank: what torch.distributed says, else the launcher's variable, else 0."""
    group = ranks.group()
    return group.get_rank() if group is not None else _declared()[0]


def world_size() -> int:
    group = ranks.group()
    return group.get_world_size() if group is not None else _declared()[1]


def _declared() -> tuple[int, int]:
    """What the variables say where no process group exists: not yet, or because ranks speak through another library."""
    present = {name: os.environ[name] for name in ranks.VARIABLES if name in os.environ}
    return (0, 1) if present == inherited else ranks.declared()


# -- modules ---------------------------------------------------------------------------------------------------------


#: Modules that lived when the script called `gc.freeze`: the collector does not list them any more.
_frozen: list[weakref.ref[Any]] = []


def all_modules(torch: Any) -> list[Any]:
    """Every living nn.Module. `type(o)`, not `isinstance`: lazy proxies must not be touched."""
    found = [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]
    listed = {id(module) for module in found}
    return found + [module for reference in _frozen if (module := reference()) is not None and id(module) not in listed]


def remember_modules(torch: Any) -> None:
    """Before `gc.freeze`."""
    _frozen[:] = [weakref.ref(module) for module in all_modules(torch)]


def trained_parameters(session: Any) -> list[Any]:
    """What the optimizers hold; without an optimizer, every module parameter that has a gradient; without those, the
    plain tensors that backward passes reach."""
    held = [p for o in session.optimizers.living() for group in o.param_groups for p in group["params"]]
    if held:
        return held
    found = {id(p): p for m in all_modules(session.torch) for p in m._parameters.values()
             if p is not None and p.is_leaf and p.requires_grad and p.grad is not None}      # of others, torch warns
    return list(found.values()) or [leaf for reference in session.leaves if (leaf := reference()) is not None]


def device_kind(parameters: list[Any]) -> str:
    """The accelerator that any of the parameters is on: some stay in the host's memory beside it, like large embeddings. "cpu" where
    there is none."""
    kinds = [p.device.type for p in parameters] or ["cpu"]
    return next((kind for kind in kinds if kind not in ("cpu", "meta")), kinds[0])


def devices(parameters: list[Any], kind: str) -> tuple[Any, ...]:
    """The devices of a kind that parameters are on, in the order of the parameters. A model may be spread over several."""
    return tuple(dict.fromkeys(p.device for p in parameters if p.device.type == kind))


class ChangeWatch:
    """Do parameters change between backward passes? For loops without an optimizer, while the step is being found.

    A checksum of a few parameters, because `p.data.add_()` does not bump a tensor's version counter. Parameters are
    looked up now and then only: a walk over all living objects takes tens of milliseconds. None is kept: nobody looks
    any more once the step is known.
    """

    def __init__(self) -> None:
        self._parameters: list[weakref.ref[Any]] = []
        self._checksum: list[float] = []
        self._calls = 0

    def changed(self, session: Any) -> bool:
        """Since the last call."""
        watched = living(self._parameters)
        if self._calls % 256 == 0 or len(watched) < len(self._parameters):
            found = trained_parameters(session)
            watched = tuple(found[:: max(1, len(found) // 8)][:8])
            self._parameters, self._checksum = list(map(weakref.ref, watched)), []
        self._calls += 1
        checksum = [float(_common.reals(p.detach(), session.torch).double().abs().sum()) for p in watched]
        before, self._checksum = self._checksum, checksum
        return bool(before) and before != checksum


# -- loaders ---------------------------------------------------------------------------------------------------------


#: Loaders that are told apart, at most: a script may build others in each epoch.
MOST_LOADERS = 8


def remember_loader(session: Any, iterator: Any, batch: Any) -> None:
    """Facts of a loader at its first batch, first of the one that is trained on: whose batches the most backward passes follow at once.
    Frameworks validate before they train, with a dataset of the same class. Kept as values: a reference would keep the user's
    dataset alive."""
    found = dict(session.loaders)       # another thread may fetch batches, too
    for one in found.values():
        if one["since"] is not None:    # its batch was the one before this
            one["trained_on"] += session.backwards > one["since"]
            one["since"] = None
    key = _which_loader(found, iterator)
    entry = found.setdefault(key, {"trained_on": 0}) | {"workers": getattr(iterator, "_workers", []), "since": session.backwards}
    entry["dataset"] = weakref.ref(iterator._dataset) if referable(iterator._dataset) else None
    if "facts" not in entry:
        entry["facts"] = _loader_facts(session.torch, iterator, batch)
    found[key] = entry
    if len(found) > MOST_LOADERS:
        del found[min((other for other in found if other != key), key=lambda other: found[other]["trained_on"])]
    session.loaders = dict(sorted(found.items(), key=lambda item: -item[1]["trained_on"]))


def _which_loader(loaders: dict[Any, Any], iterator: Any) -> tuple[Any, ...]:
    """The key of a loader. One that is built anew in each epoch is known again by its dataset, which may grow, or where its new dataset
    is as long as the one before."""
    dataset = iterator._dataset
    kind = type(dataset), iterator._num_workers, getattr(iterator._index_sampler, "batch_size", None)
    for key, entry in loaders.items():
        if key[:3] == kind and entry["dataset"] is not None and entry["dataset"]() is dataset:
            return key
    return *kind, _length(dataset)


def _loader_facts(torch: Any, iterator: Any, batch: Any) -> LoaderFacts:
    tensors = list(batches.tensors_of(torch, batch))
    dataset = iterator._dataset
    return LoaderFacts(
        num_workers=iterator._num_workers,
        batch_size=getattr(iterator._index_sampler, "batch_size", None),
        pin_memory=bool(iterator._pin_memory),
        persistent_workers=bool(getattr(iterator, "_persistent_workers", False)),
        prefetch_factor=getattr(iterator, "_prefetch_factor", None),
        iterable=isinstance(dataset, torch.utils.data.IterableDataset),
        dataset_length=_length(dataset),
        batch_bytes=sum(t.numel() * t.element_size() for t in tensors),
        holds_device_tensors=any(t.device.type not in ("cpu", "meta") for t in tensors),
        tensor_rows=_stacks_rows(torch, iterator),
    )


def unmade_batches(session: Any) -> int | None:
    """How many batches the workers of a loader have been asked for and have not made yet, of the loader that is furthest behind;
    0 where there are no workers, None where nobody can tell."""
    try:
        return max((_unmade(iterator) for iterator in session.iterators), default=0)
    except (AttributeError, NotImplementedError):       # a loader of another kind; a system whose queues have no length
        return None


def _unmade(iterator: Any) -> int:
    if not iterator._num_workers:
        return 0
    queues = {id(queue): queue for queue in (iterator._data_queue, iterator._worker_result_queue)}     # two where memory is pinned
    return max(0, iterator._tasks_outstanding - sum(queue.qsize() for queue in queues.values()))


def _stacks_rows(torch: Any, iterator: Any) -> bool:
    from saturate.data import rows

    own = getattr(iterator, "_collate_fn", None) is not torch.utils.data.default_collate
    return not own and bool(rows.tensors_of(torch, iterator._dataset))


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None                 # iterable datasets have none


# -- saves -----------------------------------------------------------------------------------------------------------


def saved_bytes(target: Any) -> int | None:
    """Size of what was just saved: to a path, or to a buffer that a library will write. None for a file that the script
    opened itself: no technique acts on it."""
    if isinstance(target, io.BytesIO):
        return target.getbuffer().nbytes
    try:
        return os.stat(target).st_size if isinstance(target, (str, os.PathLike)) else None
    except OSError:
        return None                 # moved away at once, by another thread


# -- facts -----------------------------------------------------------------------------------------------------------


def facts(session: Any) -> dict[str, Any]:
    """Everything that eligibility is decided from, as JSON. Step times are filled in by the controller."""
    torch, inspection = session.torch, session.inspection
    cuda = inspection.device == "cuda"
    return asdict(Facts(
        torch=torch.__version__,
        python=".".join(map(str, sys.version_info[:3])),
        device=inspection.device,
        device_name=inspection.device_name,
        capability=torch.cuda.get_device_capability(inspection.devices[0]) if cuda else None,
        rocm=torch.version.hip is not None,
        device_memory_bytes=torch.cuda.get_device_properties(inspection.devices[0]).total_memory if cuda else None,
        device_reserved_bytes=reserved_bytes(session) or 0,
        device_room_bytes=room_bytes(session),
        # Emulated bf16 exists since sm_53; tensor cores have it since sm_80.
        cuda_bf16_native=cuda and torch.cuda.get_device_capability(inspection.devices[0]) >= (8, 0),
        tf32_matmul=formats.matmul_allows_tf32(torch),
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        world_size=world_size(),
        motif=inspection.describe(),
        micro_steps=inspection.micro_steps,
        autocast=inspection.autocast,
        steps_in_forward=inspection.steps_in_forward,
        grad_scaler=session.grad_scaler,
        compiles=inspection.compiled,
        checkpointed=inspection.checkpointed,
        differentiates_gradients=inspection.differentiates_gradients,
        gradients_read=inspection.gradients_read,
        threads=torch.get_num_threads(),
        sdpa_calls=inspection.sdpa_calls,
        flops_per_step=inspection.flops,
        flops_unknown=inspection.flops_unknown,
        flops_left_out=inspection.flops_left_out,
        zero_grad_set_to_none=inspection.set_to_none,
        gc_enabled=gc.isenabled() and gc.get_threshold()[0] > 0,
        gc_objects=len(gc.get_objects()),
        host_to_device_bytes=inspection.host_to_device_bytes,
        shapes=max(1, len(inspection.shapes)),
        saves=len(session.saves),
        saves_into_files=session.saves_into_files,
        saves_into_memory=session.saves_into_memory,
        save_bytes=sum(size for size, _ in session.saves),
        save_s=sum(took for _, took in session.saves) / 1e9,
        modules=tuple(_module_facts(torch, m, inspection) for m in inspection.modules),
        optimizers=tuple(_optimizer_facts(o) for o in session.optimizers.living()),
        loaders=tuple(entry["facts"] for entry in session.loaders.values()),
        trainer=_hf_trainer.facts(torch),
        packages=_packages(),
        machine=MachineFacts(cpu_bf16_native=_cpu_flag(torch, "_is_avx512_bf16_supported"),
                             cpu_fp16_native=_cpu_flag(torch, "_is_amx_fp16_supported")),
    ))


def reserved_bytes(session: Any) -> int | None:
    """The most that torch's allocator took of any of the training's CUDA devices; None elsewhere."""
    if session.inspection.device != "cuda":
        return None
    return max(session.torch.cuda.max_memory_reserved(device) for device in session.inspection.devices)


def room_bytes(session: Any) -> int | None:
    """What torch's allocator could hold of the fullest of the training's CUDA devices: what it does, and what nobody does. Other
    programs have the rest, and this process's context. None elsewhere."""
    if session.inspection.device != "cuda":
        return None
    cuda = session.torch.cuda
    return min(cuda.memory_reserved(device) + cuda.mem_get_info(device)[0] for device in session.inspection.devices)


def _packages() -> tuple[str, ...]:
    """Of the packages that techniques can use, those that this environment has. None is imported."""
    return tuple(name for name in ("torchao",) if importlib.util.find_spec(name) is not None)


def _cpu_flag(torch: Any, name: str) -> bool:
    probe = getattr(torch.cpu, name, None)
    return bool(probe()) if probe is not None else False


def _module_facts(torch: Any, module: Any, inspection: Any) -> ModuleFacts:
    nn = torch.nn
    everything = list(module.modules())
    trainable = [p for p in module.parameters() if p.requires_grad]
    convolutions = [m for m in everything if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]
    kinds: dict[str, int] = {}
    for child in everything:
        if child is not module and next(child.children(), None) is not None:
            kinds[type(child).__name__] = kinds.get(type(child).__name__, 0) + 1
    for container in ("ModuleList", "Sequential", "ModuleDict"):
        kinds.pop(container, None)
    repeats = max(kinds.values(), default=0)
    return ModuleFacts(
        kind=type(module).__name__,
        parameters=sum(p.numel() for p in trainable),
        parameter_bytes=sum(p.numel() * p.element_size() for p in trainable),
        dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in trainable})),
        convolutions=len(convolutions),
        grouped_convolutions=sum(m.groups > 1 for m in convolutions),
        other_convolutions=sum(isinstance(m, nn.modules.conv._ConvNd) for m in everything) - len(convolutions),
        linears=sum(isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D" for m in everything),
        recurrents=sum(isinstance(m, (nn.RNNBase, nn.RNNCellBase)) for m in everything),
        recurrent_nets=sum(isinstance(m, nn.RNNBase) for m in everything),
        batch_norms=sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in everything),
        attentions=sum("attention" in type(m).__name__.lower() for m in everything),
        repeats=repeats if repeats >= 4 else 0,
        forward_overridden=forward_overridden(module) and not is_ours(module),
        compiled=inspection.compiles(module),
        distributed=inspection.distributed,
    )


def _optimizer_facts(optimizer: Any) -> OptimizerFacts:
    group = optimizer.param_groups[0]
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    return OptimizerFacts(
        kind=type(optimizer).__name__,
        module=type(optimizer).__module__,
        fused=group.get("fused"),
        capturable=group.get("capturable"),
        parameters=len(parameters),
        dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        sparse=any(p.grad is not None and p.grad.is_sparse for p in parameters),
        differentiable=bool(group.get("differentiable")),
    )


def evidence(session: Any) -> dict[str, Any]:
    """What shows that techniques took effect, as JSON."""
    return asdict(shown(session))


def shown(session: Any) -> Evidence:
    torch = session.torch
    dynamo = sys.modules.get("torch._dynamo")
    counters = dynamo.utils.counters if dynamo is not None else {}
    frames = counters.get("frames", {})
    limit_hit = any("recompile_limit" in str(key) or "cache_size_limit" in str(key)
                    for key in counters.get("unimplemented", {}))
    workers = [w for entry in session.loaders.values() for w in entry["workers"]]
    gradients = [p.grad for p in trained_parameters(session)]
    return Evidence(
        dynamo_frames=frames.get("ok", 0),
        graph_breaks=_graph_breaks(dynamo),
        recompiles=_recompiles(dynamo),
        recompile_limit_hit=limit_hit,
        compile_s=_compile_seconds(dynamo),
        cuda_graphs=cuda_graphs(counters) if session.inspection.device == "cuda" else None,
        cuda_graph_skips=counters.get("inductor", {}).get("cudagraph_skips", 0),
        loaders=tuple(entry["facts"] for entry in session.loaders.values()),
        live_workers=sum(w.is_alive() for w in workers),
        optimizers=tuple(_optimizer_facts(o) for o in session.optimizers.living()),
        threads=torch.get_num_threads(),
        allow_tf32=formats.matmul_allows_tf32(torch),
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        grads_none_after_zero=None if not gradients else all(g is None for g in gradients),
        gc_frozen=gc.get_freeze_count(),
        channels_last=sum(
            p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous()
            for m in session.context.modules for p in m.parameters()
        ),
        environment={key: os.environ[key] for key in session.plan.get("environment", ()) if key in os.environ},
        notes={key: str(value) for key, value in session.context.notes.items()},
    )


def _graph_breaks(dynamo: Any) -> int:
    """So far. Newer versions keep a list of reasons and leave the older ones' counter at 0."""
    if dynamo is None:
        return 0
    counted = sum(dynamo.utils.counters.get("graph_break", {}).values())
    return max(counted, len(getattr(dynamo.utils, "graph_break_reasons", ())))


def _recompiles(dynamo: Any) -> int:
    """So far, of the last compilations that dynamo remembers (64): those that have a reason to be one more of the same code."""
    if dynamo is None:
        return 0
    return sum(bool(getattr(metrics, "recompile_reason", None)) for metrics in dynamo.utils.get_compilation_metrics())


def cuda_graphs(counters: Any) -> bool | None:
    """Whether inductor recorded any CUDA graph so far; None where this torch does not tell. Newer versions count the inputs of each
    that they record, and skip some without counting that."""
    found = counters.get("inductor", {})
    if "cudagraph_recorded_non_static_inputs" in found:
        return True
    inductor = sys.modules.get("torch._inductor.config")
    return False if found.get("cudagraph_skips") or hasattr(inductor, "graph_partition") else None


def _compile_seconds(dynamo: Any) -> float:
    """Total wall time of frame compilation so far; dynamo keeps it per phase."""
    if dynamo is None:
        return 0.0
    return float(sum(dynamo.utils.compilation_time_metrics.get("_compile.compile_inner", [])))
