"""Does an inference technique keep the contract? For this package's own techniques and for those of third parties.

    from saturate.testing import inference_conformance
    import my_package.my_technique

    def test_my_technique():
        inference_conformance.require(my_package.my_technique)

`check` returns what is wrong as sentences. It needs torch, and applies the technique to two toy models (see
`inference_toys.py`) on the CPU: decisions for hostile facts, a proof that can say no, outputs of the same structure, types
and shapes also for other batch sizes, numerics within the declared class, and the same answers from a fresh process that
loads what was stored. Techniques that change the process are undone as far as torch's public switches go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from saturate.inference import structure
from saturate.inference.formats import NotDeployable, exported
from saturate.inference.techniques import _registry
from saturate.inference.techniques._api import Context, Entry, NotApplied, Proof, variants_of
from saturate.records.inference import ModelFacts
from saturate.testing import conformance

#: The least agreement with the baseline's outputs in dB that a numerics class promises (a float32 sum in another order
#: keeps 110 dB and more, bfloat16 throughout about 40); infinite is bit for bit, None is not checked.
AGREEMENT_DB = {"exact": math.inf, "reordering": 90.0, "stream": 90.0, "precision": 10.0, "convergence": None}

#: The least agreement of a stored program, loaded by another process, with the one that was stored.
RELOADED_DB = 90.0


def require(module: ModuleType, options: Any = None) -> None:
    """Raise `AssertionError` with every violation."""
    violations = check(module, options)
    if violations:
        raise AssertionError(f"{module.__name__} breaks the contract:\n" + "\n".join(f"- {line}" for line in violations))


def check(module: ModuleType, options: Any = None) -> list[str]:
    """Violations, in words. `options` is what to apply (default: the first of `variants` for each toy)."""
    shape = _registry.check(module)
    if shape:
        return shape        # nothing below can be trusted to run
    found = decisions(module)
    if found:
        return found        # what it is applied to, and with which options, depends on them
    with tempfile.TemporaryDirectory() as folder:
        stored: list[Stored] = []
        found += applied(module, options, Path(folder), stored)
        return found + reloaded(stored)


# -- decisions, in the process that searches -----------------------------------------------------------------------------


def decisions(module: ModuleType) -> list[str]:
    """What is wrong with its import, its decisions and its options; nothing is applied."""
    samples = sample_facts()
    every = conformance.all_options(module, samples)
    return [*conformance.import_effects(module, _registry), *conformance.decisions(module, samples, _is_speedup, "a speed-up"),
            *conformance.option_values(module, every), *_unapplied(module, every)]


def sample_facts() -> list[ModelFacts]:
    """Typical, empty and hostile facts."""
    packages = {"torchao": "0.18.0", "onnx": "1.23.2", "onnxruntime": "1.30.0", "onnxscript": "0.7.2", "openvino": "2026.4.1"}
    flags = frozenset({"avx2", "avx512f", "avx512_vnni", "avx512_bf16"})
    usual = ModelFacts(
        kind="Net", torch="2.13.0", parameters=10**6, parameter_bytes=1 << 22, dtypes=("float32",), linears=5,
        convolutions=5, embeddings=1, norms=2, batch_norms=2, attentions=2, batch_size=8, exportable=True,
        installed=packages, cpu_flags=flags, cores=8, threads=4, calibration_samples=64,
    )
    packages = {**packages, "tensorrt": "11.4.0", "torch_tensorrt": "2.14.0"}
    cuda = dataclasses.replace(usual, device="cuda", capability=(9, 0), installed=packages)
    changes: list[dict[str, Any]] = [
        {"trainable": True}, {"trainable": True, "student": True}, {"varying_shapes": True, "batch_size": None},
        {"random": True}, {"exportable": False, "export_problem": "control flow that depends on data"}, {"exportable": None},
        {"generates": True}, {"cpu_flags": frozenset()}, {"installed": {}}, {"torch": ""}, {"torch": "2.4.1"},
        {"torch": "nonsense"}, {"dtypes": ()}, {"dtypes": ("bfloat16",)}, {"capability": None}, {"capability": (7, 5)},
        {"cores": 1, "threads": 1}, {"threads": 10**6}, {"convolutions": 0}, {"linears": 0, "attentions": 0},
        {"reused_modules": ("relu",)}, {"calibration_samples": 0}, {"device": "mps"},
    ]
    return [ModelFacts(), usual, cuda, *(dataclasses.replace(facts, **change) for facts in (usual, cuda) for change in changes)]


def _is_speedup(bound: Any) -> bool:
    return isinstance(bound, (int, float)) and 0 < bound < math.inf


def _unapplied(module: ModuleType, every: Sequence[Any]) -> Iterator[str]:
    """Nothing was applied, or something else was: no proof may hold."""
    from saturate.testing import inference_toys

    for toy in inference_toys.toys():
        for options in every:
            context = _context(toy, Path(tempfile.gettempdir()))
            context.notes["another"] = "was applied"
            proof = module.active(context, options)
            if not isinstance(proof, Proof) or not proof.evidence:
                yield f"active returned {proof!r}, not a Proof with evidence"
            elif proof.active:
                yield f"active({options}) holds although nothing was applied: {proof.evidence}"


# -- applied to toys -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Stored:
    """A program in a folder, and what it must answer: `case.pt` holds flat tensors in and out."""

    label: str
    folder: Path
    entry: dict[str, Any]
    inputs: Any             # description, see inference.structure
    outputs: Any


def applied(module: ModuleType, options: Any, folder: Path, stored: list[Stored]) -> list[str]:
    """What is wrong when it is applied to the toys that it takes; what it stored is added to `stored`."""
    from saturate.testing import inference_toys

    found: list[str] = []
    for toy in inference_toys.toys():
        if not module.eligible(toy.facts):
            continue
        chosen = options if options is not None else variants_of(module, toy.facts)[0]
        here = folder / f"{module.TECHNIQUE.id}-{toy.name}"
        here.mkdir(parents=True)
        with undone():
            try:
                found += [f"{toy.name}: {line}" for line in _applied(module, chosen, toy, here, stored)]
            except NotApplied:
                continue    # refusing with a reason is fine; the search reports it as not applied
    return found


def _applied(module: ModuleType, options: Any, toy: Any, folder: Path, stored: list[Stored]) -> Iterator[str]:
    import torch

    baseline = toy.make()
    context = _context(toy, folder)
    before = _surroundings(torch, context)
    said = module.apply(context, options)
    if not isinstance(said, str) or not said.strip():
        yield "apply does not return a sentence"
    if _surroundings(torch, context) == before:
        yield "apply changed nothing that could be seen, and did not raise NotApplied"
    call = context.call or context.model
    with torch.inference_mode():
        for batch in (*toy.batches, *_other_batches(toy.batches[0])):
            try:
                got = call(*batch)
            except Exception as error:  # noqa: BLE001 - the violation is that it raises, whatever it raises
                yield f"a batch of {len(batch[0])} raised {type(error).__name__}: {error}"
                continue
            yield from _compared(torch, module.TECHNIQUE.numerics, baseline(*batch), got, len(batch[0]))
    proof = module.active(context, options)
    if not isinstance(proof, Proof) or not proof.active:
        yield f"it was applied, but active says {proof!r}; raise NotApplied where it cannot take effect"
    yield from _stored(torch, context, call, toy, folder, stored, module.TECHNIQUE.id)


def _other_batches(batch: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """One row, and one row less than the batch has."""
    return [tuple(tensor[:rows] for tensor in batch) for rows in (1, len(batch[0]) - 1)]


def _compared(torch: Any, numerics: str, expected: Any, got: Any, rows: int) -> Iterator[str]:
    wanted, wanted_tensors = structure.flatten(torch, expected)
    try:
        found, tensors = structure.flatten(torch, got)
    except structure.NotDescribable as error:
        yield f"its output cannot be compared: {error}"
        return
    if not structure.same(found, wanted):
        yield f"its output is arranged as {found}, the model's as {wanted}"
        return
    for one, other in zip(wanted_tensors, tensors):
        if one.shape != other.shape or one.dtype != other.dtype:
            yield f"for {rows} rows it answers {other.dtype} {tuple(other.shape)}, the model {one.dtype} {tuple(one.shape)}"
            return
    least, agreement = AGREEMENT_DB[numerics], min(agreement_db(torch, *pair) for pair in zip(wanted_tensors, tensors))
    if least is not None and agreement < least:
        yield (f"its class is {numerics}, but for {rows} rows its outputs agree with the model's to {agreement:.0f} dB only "
               f"(at least {least})")


def agreement_db(torch: Any, expected: Any, got: Any) -> float:
    """Signal-to-noise ratio of `got` against `expected`; infinite where they are equal, minus infinite for NaN."""
    if torch.equal(expected, got):
        return math.inf
    noise = (expected.double() - got.double()).square().sum().item()
    signal = expected.double().square().sum().item()
    return 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else -math.inf


def _context(toy: Any, folder: Path) -> Context:
    import torch

    return Context(
        torch=torch, model=toy.make(), device="cpu", inputs=list(toy.batches), calibration=list(toy.calibration), facts=toy.facts,
        folder=folder, threads=max(toy.facts.cores, torch.get_num_threads()), train=toy.train if toy.facts.trainable else None,
    )


def _surroundings(torch: Any, context: Context) -> Any:
    """What a technique can change: the model, the callable, and torch's switches."""
    model = context.model
    tensors = [(name, tensor.dtype, tuple(tensor.shape), tensor.stride(), _content(torch, tensor.data))
               for name, tensor in model.state_dict(keep_vars=True).items()]
    modules = [(name, type(module), sorted(vars(module)), len(module._forward_hooks))
               for name, module in model.named_modules()]
    return id(model), id(context.call), tensors, modules, tuple(_switches(torch).values())


def _content(torch: Any, data: Any) -> Any:
    """A number that changes with the values; of a tensor subclass, which may not add up, its type."""
    return float(data.detach().double().sum()) if type(data) is torch.Tensor else type(data)


def _switches(torch: Any) -> dict[str, Any]:
    cuda = torch.backends.cuda
    return {"threads": torch.get_num_threads(), "products": torch.get_float32_matmul_precision(),
            "flash": cuda.flash_sdp_enabled(), "efficient": cuda.mem_efficient_sdp_enabled(),
            "math": cuda.math_sdp_enabled(), "cudnn": cuda.cudnn_sdp_enabled(),
            "order": torch._C._get_sdp_priority_order() if hasattr(torch._C, "_set_sdp_priority_order") else None}


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """torch's switches as they were, and nothing compiled that another technique would find."""
    import torch

    before = _switches(torch)
    try:
        yield
    finally:
        torch.set_num_threads(before["threads"])
        torch.set_float32_matmul_precision(before["products"])
        torch.backends.cuda.enable_flash_sdp(before["flash"])
        torch.backends.cuda.enable_mem_efficient_sdp(before["efficient"])
        torch.backends.cuda.enable_math_sdp(before["math"])
        torch.backends.cuda.enable_cudnn_sdp(before["cudnn"])
        if before["order"] is not None:
            torch._C._set_sdp_priority_order(before["order"])
        if "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].reset()


# -- stored, and loaded by a fresh process -------------------------------------------------------------------------------


def _stored(torch: Any, context: Context, call: Any, toy: Any, folder: Path, stored: list[Stored],
            label: str) -> Iterator[str]:
    program = folder / "program"
    program.mkdir()
    try:
        entry = context.save(program) if context.save else exported.save(context, program)
    except NotDeployable:
        return      # it says why; the search reports it
    missing = [name for name in entry.files if not (program / name).is_file()]
    if missing or not entry.files:
        yield f"save names files that are not there: {missing}" if missing else "save names no files"
        return
    try:
        plain = json.loads(json.dumps(dataclasses.asdict(entry)))
    except (TypeError, ValueError) as error:
        yield f"what save returns is no JSON: {error}"
        return
    rows = _other_batches(toy.batches[0])[1]
    with torch.inference_mode():
        cases = [(batch, call(*batch)) for batch in (toy.batches[0], rows)]
    described = [(structure.flatten(torch, batch), structure.flatten(torch, answer)) for batch, answer in cases]
    torch.save([[[tensor.clone() for tensor in tensors] for _, tensors in pair] for pair in described], folder / "case.pt")
    stored.append(Stored(f"{label} on {toy.name}", folder, plain, described[0][0][0], described[0][1][0]))


_AGAIN = ("import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
          "from saturate.testing import inference_conformance as kit; kit.load_again()")


def load_again() -> None:
    """In the fresh process: load what standard input lists, run it, and print what is wrong as JSON."""
    import torch

    found: list[str] = []
    for case in json.loads(sys.stdin.read()):
        try:
            found += _loaded(torch, Stored(case["label"], Path(case["folder"]), case["entry"], case["inputs"], case["outputs"]))
        except Exception as error:  # noqa: BLE001 - the violation is that it raises, whatever it raises
            found.append(f"{case['label']}: loading it in a fresh process raised {type(error).__name__}: {error}")
    print(json.dumps(found))


def _loaded(torch: Any, one: Stored) -> Iterator[str]:
    entry = Entry(**one.entry)
    call = importlib.import_module(f"saturate.inference.formats.{entry.format}").load(torch, one.folder / "program", entry)
    named = any(word in json.dumps(one.outputs) for word in ("fields of", "tuple of"))      # classes that are not known here
    for given, expected in torch.load(one.folder / "case.pt", weights_only=True):
        with torch.inference_mode():
            description, tensors = structure.flatten(torch, call(*structure.rebuild(one.inputs, given)))
        if not structure.same(description, one.outputs) and not named:
            yield f"{one.label}: loaded again, its output is arranged as {description}, not {one.outputs}"
        elif [tensor.shape for tensor in tensors] != [tensor.shape for tensor in expected]:
            yield f"{one.label}: loaded by a fresh process, its outputs have other shapes"
        elif (worst := min(agreement_db(torch, *pair) for pair in zip(expected, tensors))) < RELOADED_DB:
            yield f"{one.label}: loaded by a fresh process, it answers otherwise ({worst:.0f} dB)"


def reloaded(stored: Sequence[Stored]) -> list[str]:
    """What is wrong with stored programs in one fresh process that knows nothing of the models."""
    if not stored:
        return []
    cases = [{**vars(one), "folder": str(one.folder)} for one in stored]
    command = [sys.executable, "-c", _AGAIN, json.dumps(sys.path)]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=False)
    if done.returncode:
        return [f"the process that loads what was stored failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"]
    return list(json.loads(done.stdout.splitlines()[-1]))
