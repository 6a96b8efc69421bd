"""What the controller is told of the training: the facts that eligibility is decided from, and the evidence that techniques took effect."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from dataclasses import asdict
from typing import Any

from saturate import dynamo_times
from saturate.agent import formats
from saturate.agent.forwards import forward_overridden, is_ours
from saturate.agent.observe import trained_parameters, world_size
from saturate.records.facts import Evidence, Facts, MachineFacts, ModuleFacts, OptimizerFacts
from saturate.techniques import _common, _hf_trainer


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
    workers = [w for entry in session.loaders.values() for w in entry["workers"]]
    gradients = [p.grad for p in trained_parameters(session)]
    return Evidence(
        dynamo_frames=frames.get("ok", 0),
        graph_breaks=_graph_breaks(dynamo),
        recompiles=_recompiles(dynamo),
        recompile_limit_hit=recompile_limit_hit(counters),
        compile_s=dynamo_times.compile_s(dynamo),
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
            for m in _common.outermost(session.context.modules) for p in m.parameters()
        ),
        environment={key: os.environ[key] for key in session.plan.get("environment", ()) if key in os.environ},
        notes={key: str(value) for key, value in session.context.notes.items()},
    )


def recompile_limit_hit(counters: Any) -> bool:
    """Whether dynamo has given some code up that it had compiled again and again."""
    return any("recompile_limit" in str(key) or "cache_size_limit" in str(key) for key in counters.get("unimplemented", {}))


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
