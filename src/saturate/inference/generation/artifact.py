"""A way to generate in a folder: the weights of the model and of its draft (safetensors), and how they are used.

Weights are stored as they came; those in fewer bits are made again when they are loaded. A model of transformers is
built from its configuration, which is plain data, by the class of that library for causal language models; of any other
model the artifact knows no code, and whoever loads it gives an instance of the class, whose weights are replaced. Nothing is
unpickled, and no code is imported that the artifact names, but those classes.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from saturate.errors import ArtifactDamaged, EnvironmentProblem, UsageError
from saturate.inference import artifact as artifacts
from saturate.inference import folders
from saturate.inference.failures import WorkerFailed
from saturate.inference.generation import measure, safetensors, weights
from saturate.inference.generation import prompts as shapes
from saturate.inference.generation.compare import agreement
from saturate.inference.generation.decode import Request
from saturate.inference.generation.host import Prepared, Refused, Served, Yard
from saturate.inference.generation.models import device_of
from saturate.inference.generation.recipe import Given, Recipe
from saturate.inference.generation.sampling import GREEDY, Sampling
from saturate.inference.modes import evaluating
from saturate.inference.techniques._api import Entry
from saturate.inference.wrapped import unwrapped
from saturate.measure.race import Estimate
from saturate.records.generation import GenerationCandidate
from saturate.records.inference import CandidateRecord

FORMAT = "generation"
_FILES = {"model": "model.safetensors", "draft": "draft.safetensors"}
_LIBRARY = "transformers"

#: The name that configurations of transformers give the number of layers, or map to their own.
_LAYERS = "num_hidden_layers"

#: The remedy where what was stored does not prove itself.
_NOT_ITS = ("a model of transformers that was changed by hand, in what is not stored, is not what its configuration builds: change its "
            "configuration, too; if it was not, this is a defect: report it with the model")

#: Bytes that a model may hold beside its weights, and as many as these: tables of positions, masks.
_MOST_BUFFERS = 1 << 30

#: A model that is outlined may have so many parts (modules, parameters, buffers), and so many for each tensor of its weights: a
#: mixture of experts has three.
_MOST_PARTS, _PARTS_OF_TENSOR = 10_000, 20

#: How words of a configuration begin that have other weights read, or fetched.
_LOADS = ("backbone", "checkpoint", "pretrained", "use_pretrained", "use_timm")


def store(torch: Any, folder: Path, given: Given, recipe: Recipe, request: Request, batch_size: int,
          record: GenerationCandidate, examples: Sequence[tuple[list[int], list[int]]]) -> Path:
    """A new artifact in `folder`. examples: prompts with their greedy tokens. Raises UsageError for what cannot be
    stored, EnvironmentProblem where the file system refuses."""
    for adapter in (given.adapter, given.draft_adapter):
        if adapter is not None and not isinstance(adapter, str):
            raise UsageError("the adapter is a function, which an artifact cannot hold",
                             remedy="give the model a forward(ids, cache), see saturate.inference.generation.models")
    modules = {"model": given.model, **({"draft": given.draft} if recipe.draft == "model" else {})}
    settings = {
        "recipe": asdict(recipe), "batch_size": batch_size, "max_new_tokens": request.max_new_tokens,
        "sampling": asdict(request.sampling), "eos": sorted(request.eos), "adapter": given.adapter,
        "draft_adapter": given.draft_adapter, "measured": msgspec.to_builtins(record),
        "architectures": {name: architecture(module) for name, module in modules.items()},
        "tokenizers": given.tokenizers is not None,
    }
    device, facts = str(device_of(given.model)), weights.facts_of(torch, given.model)
    settings["device"] = facts.device
    row = CandidateRecord(
        id=record.id, techniques=[{"id": record.id, "options": asdict(recipe)}], numerics=record.numerics,
        fate=record.fate, reason=record.reason, speedup=record.speedup, code=f"# {record.id}")
    given_examples = [(torch.tensor([prompt], device="cpu"),) for prompt, _ in examples]
    with folders.scratch("saturate-generation-") as program:
        for name, module in modules.items():
            try:
                with folders.in_scratch():
                    safetensors.write(torch, program / _FILES[name], module.state_dict())
            except safetensors.Unstorable as error:
                raise UsageError(f"the {name} cannot be stored: {error}", remedy="store plain tensors") from error
        entry = Entry(FORMAT, [_FILES[name] for name in modules], json.loads(json.dumps(settings)))
        with folders.problems(folder):
            return artifacts.store(folder, entry, program=program, record=row, facts=facts,
                                   threads=torch.get_num_threads(), inputs=given_examples,
                                   outputs=[[torch.tensor(tokens)] for _, tokens in examples], device=device)


def architecture(module: Any) -> dict[str, Any]:
    """What it takes to build the module again, as plain data; of most modules only the name of their class, and the formats of
    what lies beside their weights (frequencies of positions, which may be wider than these)."""
    kind, stored = type(module), module.state_dict()
    formats = {name: str(buffer.dtype).removeprefix("torch.") for name, buffer in module.named_buffers()
               if name not in stored and buffer.is_floating_point()}
    beside = {"beside": formats} if formats else {}
    if kind.__module__.partition(".")[0] != _LIBRARY or not _is_causal(type(module.config), kind):
        return {"class": kind.__qualname__, **beside}
    configuration = json.loads(module.config.to_json_string(use_diff=False))
    if _loading(_without_code(configuration)):      # nobody would build it from that
        return {"class": kind.__qualname__, **beside}
    return {"class": kind.__name__, **beside, "library": _LIBRARY, "configuration_class": type(module.config).__name__,
            "configuration": configuration}


class Program:
    """What loading gives: called with prompts, it returns the new tokens of each, long tensors [tokens]. seed: of sampling; None: the same at
    each call."""

    def __init__(self, torch: Any, given: Given, recipe: Recipe, request: Request, batch_size: int):
        self._torch, self._given, self._recipe = torch, given, recipe
        self.request, self.batch_size = request, batch_size
        self._served: Served | None = None

    def served(self, batch: Sequence[Sequence[int]], request: Request) -> Served:
        """The loop, prepared at the first call."""
        if self._served is None:
            self._served = Served.found(self._torch, self._given, self._recipe, batch, request)
        return self._served

    def __call__(self, prompts: Any, max_new_tokens: int | None = None, seed: int | None = None) -> list[Any]:
        request = self.request.like(max_new_tokens, seed)
        batches = shapes.batches(shapes.as_lists(prompts, self._given.model), self.batch_size)
        loop = self.served(batches[0], request).loop
        return [self._torch.tensor(row, device="cpu") for run in loop.generate_all(batches, request) for row in run.tokens]


def program(torch: Any, folder: Path, settings: dict[str, Any], model: Any = None, draft: Any = None, inference: bool = False) -> Program:
    """What `store` left. model, draft: instances of the classes that it names, where those are not of transformers; their weights are replaced.
    inference: see `recipe.Given`. Models of a GPU go to the current one: built, they are on the CPU. Raises UsageError without them,
    ArtifactDamaged where the weights are not theirs."""
    known, instances = settings["architectures"], {"model": unwrapped(torch, model), "draft": unwrapped(torch, draft)}
    loaded = {name: _filled(torch, folder, name, known[name], instances[name]) for name in _FILES if name in known}
    if settings.get("device") == "cuda":            # unknown to older artifacts
        loaded = {name: module.to("cuda") for name, module in loaded.items()}
    recipe = Recipe(**{**settings["recipe"], "lengths": tuple(settings["recipe"]["lengths"] or ()) or None})
    # Equal tokenizers were proved when it was made, and allow logits of different width.
    tokenizers = ({}, {}) if settings["tokenizers"] else None
    given = Given(loaded["model"], loaded.get("draft"), settings["adapter"], settings["draft_adapter"], tokenizers, inference=inference)
    request = Request(settings["max_new_tokens"], Sampling(**settings["sampling"]), frozenset(settings["eos"]))
    return Program(torch, given, recipe, request, settings["batch_size"])


def _filled(torch: Any, folder: Path, name: str, known: dict[str, Any], instance: Any) -> Any:
    if instance is None and known.get("library") != _LIBRARY:
        raise UsageError(f"the artifact {folder} does not know how to build its {name}, a {known['class']}",
                         remedy=f"saturate.load(folder, {name}=...), an instance of it with any weights")
    try:
        state = safetensors.read(torch, folders.inside(folder, _FILES[name]))
        module = _built(torch, known, state) if instance is None else instance
        module.eval()           # before its weights come: these were stored in this mode, in which an adapter may add to them
        _take_formats(torch, module, state, known.get("beside", {}))
        module.load_state_dict(state)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        line = next(iter(str(error).splitlines()), "")
        raise ArtifactDamaged(f"the weights in {folder} are not those of its {name}", cause=line,
                              remedy="give an instance of the very class and sizes, or make it again") from error
    return module.requires_grad_(False)


def _take_formats(torch: Any, module: Any, state: Mapping[str, Any], beside: Mapping[str, str]) -> None:
    """Give every weight the number format that it is stored in, and buffers that are not stored theirs. Raises ValueError for such
    a buffer that has been rounded since."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in state and tensor.is_floating_point() and tensor.dtype != state[name].dtype:
            tensor.data = tensor.data.to(state[name].dtype)
    for name, buffer in list(module.named_buffers()):
        if name in state or name not in beside:
            continue
        wanted = getattr(torch, beside[name], None)
        if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
            raise ValueError(f"{name} is {beside[name]!r}, which is no number format")
        if torch.finfo(buffer.dtype).eps > torch.finfo(wanted).eps:
            raise ValueError(f"{name} is {str(buffer.dtype).removeprefix('torch.')}, and was {beside[name]}: what is lost does not come back")
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = buffer.to(wanted)


def _built(torch: Any, known: dict[str, Any], state: Mapping[str, Any]) -> Any:
    """A model of transformers from its configuration, for these weights. Raises ValueError where they are not its."""
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentProblem("the artifact needs transformers, which is not installed here",
                                 remedy="pip install transformers") from error
    kind, configuration = (getattr(transformers, str(known[key]), None) for key in ("class", "configuration_class"))
    for found, base in ((kind, transformers.PreTrainedModel), (configuration, transformers.PreTrainedConfig)):
        if not (isinstance(found, type) and issubclass(found, base)):
            raise ArtifactDamaged(f"transformers {transformers.__version__} has no model {known['class']}",
                                  remedy="install the version that the manifest names")
    if not _is_causal(configuration, kind):
        raise ArtifactDamaged(f"{known['class']} is no causal language model of transformers {transformers.__version__}",
                              remedy="give an instance of the class, if you trust it: saturate.load(folder, model=...)")
    try:
        plain = _without_code(known["configuration"])
        if word := _loading(plain):
            raise _may_load(known["class"], word)
        for name in (_LAYERS, configuration.attribute_map.get(_LAYERS, _LAYERS)):
            if isinstance(plain.get(name), int):        # it makes lists of so many; what is none it refuses itself
                _check_layers(plain[name], state)
        configured = configuration.from_dict(plain)
        if parts := [name for name, value in vars(configured).items() if isinstance(value, transformers.PreTrainedConfig) and value.model_type]:
            raise _may_load(known["class"], parts[0])
        _check_sizes(torch, kind, configured, state)
        return kind(configured)
    except (ArtifactDamaged, ValueError):
        raise
    except Exception as error:          # whatever a model says of a configuration that is none
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _check_sizes(torch: Any, kind: type, configured: Any, state: Mapping[str, Any]) -> None:
    """A configuration may ask for any amount of time and memory: a model is outlined, without memory, before it is built. Raises
    ValueError unless its weights are those that lie there, and its other tensors no larger than they."""
    _check_layers(getattr(configured, _LAYERS, 0), state)
    with torch.device("meta"), _no_more_parts(torch, _MOST_PARTS + _PARTS_OF_TENSOR * len(state)):
        outline = kind(configured)
    wanted = {name: tuple(tensor.shape) for name, tensor in outline.state_dict().items()}
    stored = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name in sorted({*wanted, *stored}):
        if wanted.get(name) != stored.get(name):
            raise ValueError(f"{name} is {wanted.get(name, 'not there')} by its configuration, {stored.get(name, 'not there')} in the file")
    others = sum(buffer.nbytes for buffer in outline.buffers())
    if others > _MOST_BUFFERS + sum(tensor.nbytes for tensor in state.values()):
        raise ValueError(f"its configuration asks for {others} bytes beside its weights")


def _check_layers(layers: Any, state: Mapping[str, Any]) -> None:
    if not isinstance(layers, int) or layers > len(state):
        raise ValueError(f"its configuration has {layers} layers, and there are {len(state)} tensors of weights")


@contextmanager
def _no_more_parts(torch: Any, most: int) -> Iterator[None]:
    """A module that is made in here has no more parts than that: a configuration may ask for a thousand million experts. Raises ValueError."""
    count = itertools.count(1)

    def counted(*registered: Any) -> None:
        if next(count) > most:
            raise ValueError(f"its configuration asks for more than {most} modules and tensors, which is more than its weights are for")

    hooks = torch.nn.modules.module
    handles = [hook(counted) for hook in (hooks.register_module_module_registration_hook, hooks.register_module_parameter_registration_hook,
                                          hooks.register_module_buffer_registration_hook)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_causal(configuration: type, kind: type) -> bool:
    """Whether transformers has this class for causal language models of such a configuration. Others may fetch what their
    configuration names, a backbone for one."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if configuration not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    found = MODEL_FOR_CAUSAL_LM_MAPPING[configuration]
    return kind in (found if isinstance(found, (tuple, list)) else (found,))


def _loading(configuration: Any, inside: bool = False) -> str:
    """The word by which a configuration, or what lies `inside` of it, may have a part loaded when a model is built: the configuration of
    another model (a vision encoder of timm reads whatever file it names), a backbone, a checkpoint, a place. Empty: it is plain data,
    as the settings of positions are."""
    if isinstance(configuration, list):
        return next(filter(None, (_loading(one, True) for one in configuration)), "")
    for key, value in configuration.items() if isinstance(configuration, dict) else ():
        word, names = str(key), isinstance(value, (str, dict, list)) and bool(value)
        if (names or value is True) and (word in ("model_args", "architecture", "quant_method") or word.startswith(_LOADS)):
            return word
        if inside and names and (word == "model_type" or (isinstance(value, str) and ("/" in value or ":" in value))):
            return word
        if found := _loading(value, True):
            return f"{word}.{found}"
    return ""


def _may_load(kind: str, word: str) -> ArtifactDamaged:
    return ArtifactDamaged(f"the configuration of {kind} may load another part, by {word:.100}",
                           cause="what an artifact names is built from plain data alone",
                           remedy="give an instance of the class, if you trust it: saturate.load(folder, model=...)")


def _without_code(configuration: Any) -> Any:
    """A configuration without what names code: an implementation of attention may be a repository that transformers fetches and
    imports. It has its own choice where none is named."""
    if isinstance(configuration, dict):
        return {key: _without_code(value) for key, value in configuration.items()
                if key != "auto_map" and not str(key).endswith("_implementation")}
    return [_without_code(one) for one in configuration] if isinstance(configuration, list) else configuration


def proved(yard: Yard, stored: Path, batches: list[list[list[int]]], wanted: list[list[list[int]]],
           request: Request) -> Estimate:
    """Its speed over the plain loop, both in fresh processes. Raises ArtifactDamaged where it does not load there, or
    says something else."""
    greedy = replace(request, sampling=GREEDY)
    try:
        with yard.running(stored, batches[0], request) as host, yard.running(Recipe(), batches[0], request) as plain:
            for batch, tokens in zip(batches, wanted):
                took_s = plain.prepare(batch, greedy).total_ns / 1e9        # both meet each shape before they are timed
                yard.slowest_s = max(yard.slowest_s, took_s)        # by which a hang is told, also behind the end of the time
                same = agreement(batch, tokens, host.prepare(batch, greedy).tokens, host.ready.tolerance,
                                 host.last_logits)
                if same.different:
                    raise ArtifactDamaged("the stored way to generate says something else after it was loaded again",
                                          cause=same.words(), remedy=_NOT_ITS)
            found, _, _ = measure.race(lambda batch: plain.generate(batch, request),
                                       lambda batch: host.generate(batch, request), batches, yard.deadline - time.monotonic())
            return found
    except (WorkerFailed, Refused) as error:
        if isinstance(error, WorkerFailed) and error.kind == "disk_full":
            raise EnvironmentProblem("no space is left to prove the artifact", cause=str(error), remedy=folders.no_scratch()) from error
        raise ArtifactDamaged("the stored way to generate does not load in a fresh process", cause=str(error), remedy=_NOT_ITS) from error


def take_place(stored: Path, target: Path, found: Estimate) -> Path:
    """Copy the artifact to where the user wants it, with what was measured on it. Raises UsageError,
    EnvironmentProblem."""
    manifest = artifacts.checked(stored)
    again = {"speedup": found.speedup, "speedup_ci": list(found.speedup_ci)}
    manifest = msgspec.structs.replace(manifest, settings={**manifest.settings, "loaded_again": again})
    with folders.building(target, artifacts.is_artifact) as new:
        folders.copy(stored, new, [one.path for one in manifest.files])
        (new / artifacts.MANIFEST).write_bytes(artifacts.encoded(manifest))
    return target


# -- in a fresh process: the first argument is the worker's context --------------------------------------------------


def start(context: Any, folder: str, batch: list[list[int]], request: Request) -> Prepared:
    """Load the artifact and keep its loop, as users load it: models of transformers are built. Others that came with the process only
    lend their classes: their weights are spoilt first, so that what works came out of the folder."""
    holder, torch = context.model, context.torch
    settings = artifacts.checked(Path(folder)).settings
    lent = {}
    for name in _FILES:
        module = getattr(holder, name)
        if module is not None and settings["architectures"].get(name, {}).get("library") != _LIBRARY:
            lent[name] = module
        setattr(holder, name, None)         # a device may have no room for it beside what is built
    with torch.no_grad():
        for module in lent.values():
            for tensor in module.state_dict().values():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
    del module
    found = program(torch, Path(folder), settings, **lent, inference=True)
    with evaluating(torch, *lent.values()):
        holder.served = found.served(batch, request)
    return holder.served.ready
