"""Does a technique keep the contract? For this package's own techniques and for those of third parties.

    from saturate.testing import conformance
    import my_package.my_technique

    def test_my_technique():
        conformance.require(my_package.my_technique)

`check` returns what is wrong as sentences. It needs torch, and trains a toy model (see `toy.py`) on the CPU.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import math
import pickle
import pickletools
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

from saturate.records import options as ranges
from saturate.records.facts import Evidence, Facts, LoaderFacts, MachineFacts, ModuleFacts, OptimizerFacts
from saturate.techniques import _registry
from saturate.techniques._api import Eligible, Ineligible, NotApplied, Proof, bound_of, variants_of

#: Largest relative deviation of the toy's losses that each numerics class may cause; None is not checked.
TOLERANCE = {"exact": 0.0, "reordering": 1e-4, "stream": 1e-3, "precision": 5e-2, "convergence": None}


def require(module: ModuleType, options: Any = None) -> None:
    """Raise `AssertionError` with every violation."""
    violations = check(module, options)
    if violations:
        raise AssertionError(f"{module.__name__} breaks the contract:\n" + "\n".join(f"- {line}" for line in violations))


def check(module: ModuleType, options: Any = None) -> list[str]:
    """Violations, in words. `options` is what to train the toy with (default: `module.Options()`)."""
    shape = _registry.check(module)
    if shape:
        return shape        # nothing below can be trusted to run
    samples = sample_facts()
    every = all_options(module, samples)
    found = [*import_effects(module), *decisions(module, samples, _is_share, "within 0 to 1"), *option_values(module, every),
             *_baseline_proofs(module, every)]
    if module.TECHNIQUE.stage == "environment":
        return found + list(_environment(module, every))
    try:
        return found + list(_training(module, options if options is not None else module.Options()))
    except NotApplied:
        return found        # refusing with a reason is fine; the loop reports it as not applied


# -- decisions, in the saturate process ------------------------------------------------------------------------------


def sample_facts() -> list[Facts]:
    """Typical, empty and hostile facts."""
    machine = MachineFacts(
        cpu_count=8.0, physical_cores=4, cpu_bf16_native=True, memory_bytes=1 << 34, shm_bytes=1 << 30, compiler="g++",
        preload_allocators=(("jemalloc", "/usr/lib/libjemalloc.so.2"), ("unheard-of", "")),
    )
    module = ModuleFacts(
        kind="Net", parameters=10**6, parameter_bytes=1 << 28, dtypes=("float32",), convolutions=3, linears=3,
        attentions=4, repeats=4, distributed=True,
    )
    adam = OptimizerFacts(kind="AdamW", module="torch.optim.adamw", parameters=9, dtypes=("float32",))
    loader = LoaderFacts(batch_size=8, dataset_length=10**4, batch_bytes=1 << 20)
    usual = Facts(
        torch="2.13.0", threads=4, sdpa_calls=4, zero_grad_set_to_none=False, gc_ms_per_step=5.0, step_ms=100.0,
        input_wait_ms=50.0, backward_ms=20.0, optimizer_ms=10.0, modules=(module,), optimizers=(adam,),
        loaders=(loader,), machine=machine, motif="F B S",
    )
    cuda = dataclasses.replace(
        usual, device="cuda", capability=(8, 0), cuda_bf16_native=True, host_to_device_bytes=1 << 20, world_size=4
    )
    old_gpu = dataclasses.replace(cuda, capability=(7, 5), cuda_bf16_native=False, shapes=100, micro_steps=4)
    limited = [dataclasses.replace(facts, memory_limit_bytes=1 << 30) for facts in (usual, cuda)]
    hopper = dataclasses.replace(cuda, capability=(9, 0), packages=("torchao",))
    found = [Facts(), usual, cuda, old_gpu, *limited, hopper]
    for bad in (math.nan, math.inf, -1.0, 0.0):
        times = dict.fromkeys(("step_ms", "input_wait_ms", "input_exposed_ms", "backward_ms", "optimizer_ms", "gc_ms_per_step"), bad)
        found += [dataclasses.replace(facts, **times) for facts in (usual, cuda)]
        found.append(dataclasses.replace(usual, input_wait_ms=bad, gc_ms_per_step=bad))
    hostile_loader = LoaderFacts(batch_bytes=1 << 60, iterable=True, holds_device_tensors=True, dataset_length=0)
    hostile = {
        "device": "", "world_size": 0, "shapes": 0, "threads": 0, "host_to_device_bytes": 1 << 62, "capability": None,
        "modules": (ModuleFacts(), ModuleFacts(forward_overridden=True), ModuleFacts(compiled=True)),
        "optimizers": (OptimizerFacts(), OptimizerFacts(kind="LBFGS", sparse=True, dtypes=("complex64",))),
        "loaders": (hostile_loader, LoaderFacts(batch_bytes=0), dataclasses.replace(loader, batch_bytes=1 << 60)),
        "machine": MachineFacts(cpu_count=0.0, physical_cores=0, memory_bytes=0, shm_bytes=0),
    }
    for name, value in hostile.items():
        found += [dataclasses.replace(facts, **{name: value}) for facts in (usual, cuda)]
    found.append(Facts(device="mps", **{name: value for name, value in hostile.items() if name != "device"}))
    return found


def _is_share(bound: float) -> bool:
    return 0.0 <= bound <= 1.0


def decisions(module: ModuleType, samples: Iterable[Any], allowed: Callable[[float], bool], kind: str) -> Iterator[str]:
    """What is wrong with the answers to sample facts. A bound is `allowed`, and then of this `kind`, or None."""
    for facts in samples:
        try:
            yield from _decide(module, facts, allowed, kind)
        except Exception as error:  # noqa: BLE001 - the violation is that it raises, whatever it raises
            yield f"deciding raised {type(error).__name__}: {error} for {facts}"


def _decide(module: ModuleType, facts: Any, allowed: Callable[[float], bool], kind: str) -> Iterator[str]:
    answer = module.eligible(facts)
    if not isinstance(answer, (Eligible, Ineligible)) or not answer.reason.strip():
        yield f"eligible returned {answer!r}, not Eligible or Ineligible with a reason"
        return
    bound = bound_of(module, facts)
    if bound is not None and not allowed(bound):
        yield f"bound returned {bound!r}, which is neither None nor {kind}"
    if not answer:
        return
    options = variants_of(module, facts)
    if not options:
        yield f"it is eligible ({answer.reason}) but variants is empty"
    if len(set(options)) != len(options):
        yield "variants holds the same options twice"
    yield from (f"variants holds {one!r}, not an Options" for one in options if not isinstance(one, module.Options))


def all_options(module: ModuleType, samples: Iterable[Any]) -> list[Any]:
    """The default options, and those that the technique offers for any of the sample facts."""
    found = [module.Options()]
    for facts in samples:
        with contextlib.suppress(Exception):        # `decisions` reports it
            found += variants_of(module, facts) if module.eligible(facts) else []
    return list(dict.fromkeys(one for one in found if isinstance(one, module.Options)))


def option_values(module: ModuleType, every: list[Any]) -> Iterator[str]:
    """Whether the options can be stored in a recipe and written as code."""
    try:
        module.Options(**{"no_such_option_": 1})
        yield "Options accepts unknown keys"
    except TypeError:
        pass        # what is wanted
    for options in every:
        stored = json.loads(json.dumps(dataclasses.asdict(options)))
        if module.Options(**stored) != options:
            yield f"{options} does not survive storing and reading back"
        for problem in ranges.problems(module.Options, stored):
            yield f"a recipe with {options} is refused: {problem.name} {problem.message}"
        code = module.as_code(options)
        if not isinstance(code, str) or not code.strip():
            yield f"as_code({options}) is empty"


def _baseline_proofs(module: ModuleType, every: list[Any]) -> Iterator[str]:
    """Nothing was applied, in a plain workload and in one whose author was busy: no proof may hold."""
    busy = Evidence(
        dynamo_frames=9, loaders=(LoaderFacts(num_workers=4, persistent_workers=True),), threads=4,
        live_workers=4, optimizers=(OptimizerFacts(kind="Adam", fused=True),), gc_frozen=1000, channels_last=5,
    )
    for options in every:
        for evidence in (Evidence(), busy):
            proof = module.active(evidence, options)
            if not isinstance(proof, Proof) or not proof.evidence:
                yield f"active returned {proof!r}, not a Proof with evidence"
            elif proof.active:
                yield f"active({options}) holds although nothing was applied: {proof.evidence}"


def _environment(module: ModuleType, every: list[Any]) -> Iterator[str]:
    for options in every:
        variables = module.environment(options)
        wrong = [key for key, value in variables.items() if not (isinstance(key, str) and isinstance(value, str))]
        if wrong or not variables:
            yield f"environment({options}) must map at least one name to text"


_PROBE = """
import gc, importlib, json, os, sys
sys.path[:] = json.loads(sys.argv[1])
_registry = importlib.import_module(sys.argv[4])
before = dict(os.environ), gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
_registry.load_one(sys.argv[2], sys.argv[3])
after = dict(os.environ), gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
print(json.dumps(["torch" in sys.modules, before != after]))
"""


def import_effects(module: ModuleType, registry: ModuleType = _registry) -> Iterator[str]:
    """What importing it does beside defining it, in a fresh process."""
    name, path = registry.origin(module)
    command = [sys.executable, "-c", _PROBE, json.dumps(sys.path), name, path, registry.__name__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"importing it in a fresh process failed: {done.stderr.strip().splitlines()[-1]}"
        return
    *noise, answer = done.stdout.splitlines()
    imported_torch, changed = json.loads(answer)
    if imported_torch:
        yield "importing it imports torch; use context.torch"
    if changed:
        yield "importing it changes the environment or the garbage collector"
    if noise:
        yield "importing it prints to stdout"


# -- the toy training ------------------------------------------------------------------------------------------------


def _training(module: ModuleType, options: Any) -> Iterator[str]:
    import torch

    from saturate.testing import snapshot, toy

    with torch.random.fork_rng(devices=[]):
        plain = toy.start()
        yield from _undone_at_once(module, options, snapshot, toy)
        before = snapshot.surroundings(torch)
        tuned = toy.start(module, options)
        structure = snapshot.structure(tuned.model, tuned.optimizer)
        if module.TECHNIQUE.stage == "model" and not isinstance(module.apply(tuned.context, options), str):
            yield "apply does not return a line for the manifest"
        for workload in (plain, tuned):
            torch.manual_seed(2)
            workload.train(toy.STEPS_AFTER)
        yield from _numerics(module, plain, tuned)
        yield from _copies(module, plain, tuned)
        yield from _reduced(tuned, toy)
        yield from _checkpoints(plain, tuned, toy)
        tuned.context.undo()
        loader_was_built_with_it = module.TECHNIQUE.stage == "import"
        after = {**snapshot.structure(tuned.model, tuned.optimizer), **snapshot.surroundings(torch)}
        for line in snapshot.differences({**structure, **before}, after):
            yield f"after training and undo, {line}"
        if not loader_was_built_with_it:
            yield from _same_again(plain, tuned)


def _undone_at_once(module: ModuleType, options: Any, snapshot: Any, toy: Any) -> Iterator[str]:
    import torch

    before = snapshot.surroundings(torch)
    workload = toy.start(module, options)
    state = {**snapshot.structure(workload.model, workload.optimizer), **snapshot.values(workload)}
    if module.TECHNIQUE.stage == "model":
        module.apply(workload.context, options)
    workload.context.undo()
    after = {**snapshot.structure(workload.model, workload.optimizer), **snapshot.values(workload)}
    for line in snapshot.differences({**before, **state}, {**after, **snapshot.surroundings(torch)}):
        yield f"after apply and undo, {line}"


def _numerics(module: ModuleType, plain: Any, tuned: Any) -> Iterator[str]:
    numerics = module.TECHNIQUE.numerics
    allowed = TOLERANCE[numerics]
    if allowed is None:
        return
    worst = max(abs(a - b) / max(abs(a), 1e-12) if b == b else math.inf for a, b in zip(plain.losses, tuned.losses))
    if worst > allowed:
        yield f"its class is {numerics}, but the toy's losses deviate by {worst:.2e} (allowed {allowed:.0e})"
    expected, got = plain.model.state_dict(), tuned.model.state_dict()
    if numerics == "exact" and not all(value.equal(got[name]) for name, value in expected.items()):
        yield "its class is exact, but the trained parameters differ from the baseline's"


#: What dynamo writes on the parameters of any model that it compiles, also one that the script compiles itself. torch alone loads
#: it, with weights_only as well.
_MARKS = {"_dynamo_static_input_type", "guarded", "unguarded", "_rebuild_parameter_with_state"}


def _copies(module: ModuleType, plain: Any, tuned: Any) -> Iterator[str]:
    """A deep copy (an EMA model, for one) must run its own weights, and a pickle must not need saturate."""
    import torch

    images = torch.rand(8, 3, 8, 8)
    twin = copy.deepcopy(tuned.model)
    expected = twin(images)["logits"].detach().clone()
    kept = copy.deepcopy(tuned.model.state_dict())
    with torch.no_grad():
        for parameter in tuned.model.parameters():
            parameter.add_(1.0)
    if not torch.equal(twin(images)["logits"], expected):
        yield "a deep copy of the model follows the original's weights"
    tuned.model.load_state_dict(kept)
    if not isinstance(tuned.model, type(plain.model)):
        yield "isinstance of the model changed"
    for label, dump in (("pickle", pickle.dumps), ("torch.save", _torch_save)):
        try:
            stored = dump(tuned.model)
        except Exception as error:  # noqa: BLE001 - the violation is that it cannot be stored, whatever is raised
            yield f"{label} of the model fails: {type(error).__name__}: {error}"
            continue
        if label == "pickle":
            # Also what torch.load(weights_only=True) refuses, and what a plain model does not need: a call of `getattr`.
            needed = sorted(_globals(stored) - _globals(dump(plain.model)) - _MARKS)
            if needed:
                yield f"a pickled model needs {', '.join(needed)} to load"
        loaded = pickle.loads(stored) if label == "pickle" else torch.load(io.BytesIO(stored), weights_only=False)
        if loaded.forward.__func__ is not type(loaded).forward:
            yield f"a model loaded from {label} still carries a wrapped forward"


def _reduced(tuned: Any, toy: Any) -> Iterator[str]:
    """Classes that say themselves how they are pickled may hand out their whole `__dict__` (torch.fx.GraphModule does)."""
    with mock.patch.object(toy.Model, "__reduce__", lambda model: (toy.remade, (vars(model),))):
        try:
            loaded = pickle.loads(pickle.dumps(tuned.model))
        except Exception as error:  # noqa: BLE001 - the violation is that it cannot be stored, whatever is raised
            yield f"pickle of a model with a __reduce__ of its own fails: {type(error).__name__}: {error}"
            return
    if loaded.forward.__func__ is not type(loaded).forward:
        yield "a pickled model with a __reduce__ of its own still carries a wrapped forward"


def _torch_save(model: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(model, buffer)
    return buffer.getvalue()


def _globals(stored: bytes) -> set[str]:
    """Text in a pickle that may name a module: what STACK_GLOBAL and GLOBAL take."""
    return {str(argument) for _, argument, _ in pickletools.genops(stored) if isinstance(argument, str)}


def _checkpoints(plain: Any, tuned: Any, toy: Any) -> Iterator[str]:
    import torch

    if list(plain.model.state_dict()) != list(tuned.model.state_dict()):
        yield "the keys of the model's state dict changed"
    expected, saved = plain.optimizer.state_dict(), tuned.optimizer.state_dict()
    if expected["param_groups"] != saved["param_groups"]:
        yield "the optimizer's saved groups differ from the user's own"
    fresh = toy.Model()
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.01)
    optimizer.load_state_dict(copy.deepcopy(saved))
    fresh(torch.rand(2, 3, 8, 8))["logits"].sum().backward()
    optimizer.step()        # raises where the saved state does not fit an untouched optimizer
    tuned.optimizer.load_state_dict(copy.deepcopy(expected))
    tuned.train(1)
    if tuned.optimizer.state_dict()["param_groups"] != expected["param_groups"]:
        yield "after loading a checkpoint, the optimizer's saved groups differ from the user's own"


def _same_again(plain: Any, tuned: Any) -> Iterator[str]:
    """With everything undone, both trainings continue bit by bit alike from the same state."""
    import torch

    results = []
    start = copy.deepcopy(plain.model.state_dict()), copy.deepcopy(plain.optimizer.state_dict())
    for workload in (plain, tuned):
        workload.model.load_state_dict(start[0])
        workload.optimizer.load_state_dict(copy.deepcopy(start[1]))
        torch.manual_seed(3)
        workload.losses.clear()
        workload.train(2)
        results.append(list(workload.losses))
    if results[0] != results[1]:
        yield f"after undo the training does not go on as before: losses {results[0]} and {results[1]}"
