"""A copy of a model with weights in fewer bits, by the inference techniques that do that."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from saturate.inference.generation.models import device_of
from saturate.inference.techniques import _registry
from saturate.inference.techniques._api import Context, NotApplied, variants_of
from saturate.records.inference import ModelFacts

#: Techniques that leave activations alone, so that a step reads less and computes the same way.
WEIGHT_ONLY = ("torchao-weight-only", "torchao-int4")

#: What torchao changes in torch's compiler, for the whole process, and leaves so.
_COMPILER_SETTINGS = (
    "coordinate_descent_tuning",
    "coordinate_descent_check_all_directions",
    "force_fuse_int_mm_with_mul",
    "epilogue_fusion",
    "fx_graph_cache",
    "use_mixed_mm",
)


def techniques(torch: Any, model: Any) -> dict[str, tuple[Any, str]]:
    """id -> the technique, and why it cannot work here ("" where it can)."""
    facts = facts_of(torch, model)
    found = {}
    for name, module in _registry.load().items():
        if name in WEIGHT_ONLY:
            answer = module.eligible(facts)
            found[name] = (module, "" if answer else answer.reason)
    return found


def quantized(torch: Any, model: Any, technique: Any, folder: Path) -> Any:
    """A deep copy of the model with the technique's first variant. Raises NotApplied where it took no effect."""
    facts = facts_of(torch, model)
    context = Context(
        torch=torch,
        model=copy.deepcopy(model),
        device=facts.device,
        inputs=[],
        calibration=[],
        facts=facts,
        folder=folder,
        threads=torch.get_num_threads(),
    )
    options = variants_of(technique, facts)[0]
    with _process_as_it_was(torch):
        technique.apply(context, options)
    proof = technique.active(context, options)
    if not proof.active:
        raise NotApplied(proof.evidence)
    return context.model


def facts_of(torch: Any, model: Any) -> ModelFacts:
    """What those techniques ask for."""
    device = str(device_of(model)).partition(":")[0]
    parameters = list(model.parameters())
    return ModelFacts(
        kind=type(model).__name__,
        device=device,
        torch=str(torch.__version__),
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters if p.is_floating_point()})),
        linears=sum(isinstance(module, torch.nn.Linear) for module in model.modules()),
        installed={name: found for name in ("torchao",) if (found := _version(name))},
        capability=torch.cuda.get_device_capability() if device == "cuda" else None,
        threads=torch.get_num_threads(),
        generates=True,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@contextmanager
def _process_as_it_was(torch: Any) -> Iterator[None]:
    """It may be the user's own. Fused encoder layers are off while layers are exchanged, and do not take such weights anyway."""
    import torch._inductor.config as settings

    before = {name: getattr(settings, name) for name in _COMPILER_SETTINGS if hasattr(settings, name)}
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for name, value in before.items():
            setattr(settings, name, value)
