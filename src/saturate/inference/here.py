"""Does the user's model answer in the user's process as it does in a process of its own? What a process sets for all of its
modules (a module's global, torch's default dtype, a function that is replaced) does not travel with the model: what is
proved would be proved of another function.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from saturate.errors import WorkloadFailed
from saturate.inference import batches, guards, modes, session, users_code
from saturate.inference.called import callable_of
from saturate.inference.lab import Lab, computed_in
from saturate.techniques._trees import copied


def compare(torch: Any, model: Any, lab: Lab) -> list[str]:
    """Call the user's own callable once, and compare with what the baseline's process said to the same batch; what is not known
    for want of an answer. Raises WorkloadFailed where it is another function here. Nothing is called that is random, or that
    keeps something from call to call: those answers differ anyway."""
    assert lab.facts is not None
    if lab.facts.random:
        return []
    module, call = callable_of(torch, model)
    try:
        with _as_there(torch, module, lab):
            own = _answer(torch, call, lab.source.inputs(torch)[0], lab.source.device)
    except users_code.RAISED as error:      # there may be no room for a second one on the device
        return ["the model cannot be called in this process, so nobody knows whether it answers here as it does in those of candidates: "
                + users_code.last_words(error)]
    problem = _difference(torch, lab, own)
    if problem is not None:
        raise WorkloadFailed(
            "the model answers otherwise in a process of its own", evidence=problem,
            cause="it follows something that was set for the whole of this process: a global of a module, torch's default dtype, a function "
                  "that was replaced; other processes import the modules anew, and get the weights and attributes of the model only",
            remedy="keep it in the model (an attribute, a buffer, an argument of functools.partial), or set it where its module is imported")
    return []


def known_differences(torch: Any, model: Any) -> list[str]:
    """What torch computes otherwise when it calls this model than in any program made of it."""
    module, _ = callable_of(torch, model)
    encoders = [name or "the model" for name, part in module.named_modules()
                if isinstance(part, torch.nn.TransformerEncoder) and getattr(part, "use_nested_tensor", False)]
    return [f"{encoders[0]} is a torch.nn.TransformerEncoder, which answers 0 at padded places (src_key_padding_mask) when torch calls it, and "
            "with other numbers in exported or compiled programs: where those places matter, candidates are wrong or rejected; build it with "
            "enable_nested_tensor=False"] if encoders else []


def _difference(torch: Any, lab: Lab, own: list[Any]) -> str | None:
    """What tells the answer here from the one there, as no other order of sums would."""
    there, facts = lab.reference[:1], lab.facts
    assert facts is not None
    kinds = [[str(tensor.dtype).removeprefix("torch.") for tensor in answer] for answer in (own, there[0])]
    if len(kinds[0]) == len(kinds[1]) and kinds[0] != kinds[1]:
        return f"its output is {', '.join(kinds[0])} here, {', '.join(kinds[1])} there"
    # Products of shorter numbers are a switch of the process, too: they make no other function. A GPU's switches travel with the model.
    shorter = lab.source.device == "cpu" and session.shorter_on_cpu(torch)
    precision = "bfloat16" if shorter else computed_in(facts, lab.source.switches)
    found = guards.examine(torch, there, [own], numerics="reordering", precision=precision, again=lab.again and lab.again[:1], twin=lab.twin and lab.twin[:1], generates=facts.generates,
                           spare=1)     # one tie in a few classes is no reason to refuse a model
    failed = next((finding for finding in found.findings if not finding.passed), None)
    if failed is not None and failed.guard == "agreement" and found.agreement_db is not None:
        return f"the answers to the first batch of inputs agree to {found.agreement_db:.0f} dB only"
    return None if failed is None else f"on the first batch of inputs, there against here: {failed.what}"


def _answer(torch: Any, call: Callable[..., Any], batch: tuple[Any, ...], device: str) -> list[Any]:
    """The tensors of the model's answer, on the CPU, where they are compared. What the call takes of a device is free behind it."""
    there = copied(batch, lambda path, leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)
    return [tensor.detach().to("cpu", copy=True) for tensor in batches.tensors(torch, call(*there))]


@contextmanager
def _as_there(torch: Any, module: Any, lab: Lab) -> Iterator[None]:
    """Evaluation mode, no gradients and no autocast, as a candidate's process has it; the modes and buffers of all parts, and random
    numbers, are as they were behind it."""
    assert lab.facts is not None
    buffers = [(part, dict(part._buffers)) for part in module.modules()]
    values = modes.Kept(torch, list(module.buffers()))
    states = random.getstate(), (sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None)
    device = lab.source.device
    # Not inference mode: what a model keeps of such a call could not be trained with.
    grad = torch.enable_grad if lab.facts.mode == "enable_grad" else torch.no_grad
    try:
        with (users_code.forks_end(), torch.random.fork_rng([] if device == "cpu" else [device]), grad(),
              torch.autocast(device.partition(":")[0], enabled=False), modes.evaluating(torch, *[module] * lab.source.training)):
            yield
    finally:
        if device != "cpu":
            torch.cuda.empty_cache()        # or this process keeps what the call took, and candidates lack it
        for part, held in buffers:
            part._buffers.update(held)
        values.restore()
        random.setstate(states[0])
        if states[1] is not None:
            sys.modules["numpy"].random.set_state(states[1])
