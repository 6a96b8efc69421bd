"""A search whose model is on a GPU, up to its candidates: what is compared lies on the CPU. With a stand-in for the GPU, which no
test here needs."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cloudpickle", reason="the extra inference")

from saturate.inference import here, pickles  # noqa: E402 - after the check for torch
from saturate.inference.candidates import Candidate  # noqa: E402
from saturate.inference.lab import Lab  # noqa: E402
from saturate.inference.source import Source  # noqa: E402
from saturate.techniques._trees import copied  # noqa: E402

DEVICE = torch.device("cuda:0")


class OnDevice(torch.Tensor):
    """Its memory is the CPU's; `Device` says otherwise."""


class Device(torch.overrides.TorchFunctionMode):
    """Tensors that are moved to the device in here say that they are there, and refuse others, as those of a GPU do."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        place = next((str(one) for one in (*args[1:], *kwargs.values()) if isinstance(one, (str, torch.device))), "")
        if name == "to" and place.startswith("cuda"):
            return args[0].clone().as_subclass(OnDevice)
        if (name == "to" and place == "cpu") or name == "cpu":
            return args[0].clone().as_subclass(torch.Tensor)
        given = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = [isinstance(tensor, OnDevice) for tensor in given]
        if function == torch.Tensor.device.__get__ and there[0]:
            return DEVICE
        if name != "copy_" and any(there) and not all(there[place] for place, tensor in enumerate(given) if tensor.dim()):
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!")
        return function(*args, **kwargs)


class Summed(torch.nn.Module):
    """Fractions and whole numbers, of inputs on the device that it is on; in a process of its own that is the CPU here."""

    device = "cpu"

    def forward(self, x: Any) -> Any:
        if x.device.type != self.device:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {x.device}")
        return x.cumsum(1).tanh(), x.argmax(1)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """Of a model on the device; the processes that it starts are on the CPU, as the file says that they read."""
    inputs = [(torch.randn(6, 5, generator=torch.Generator().manual_seed(place)),) for place in range(4)]
    source = Source.write(tmp_path / "source", Summed(), inputs)
    read = pickles.load

    def load(torch: Any, path: Path, device: str = "cpu") -> Any:
        return copied(read(torch, path), lambda place, leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)

    monkeypatch.setattr(pickles, "load", load)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
    return Lab(dataclasses.replace(source, device=str(DEVICE)), tmp_path, 1, time.monotonic() + 600.0)


def on_cpu(answers: Any) -> bool:
    return all(not isinstance(tensor, OnDevice) for answer in answers for tensor in answer)


def test_what_is_compared_of_a_model_on_a_gpu_lies_on_the_cpu(lab: Lab) -> None:
    with Device(), lab.start(Candidate()) as worker:
        lab.facts = dataclasses.replace(worker.ready.facts, device="cuda")
        lab.observe(worker)
        worker, unknown = lab.probe(worker)
        assert not unknown and lab.twin is not None and lab.others
        assert on_cpu([*lab.reference, *(lab.again or ()), *lab.twin, *(one.batch for one in lab.others), *(one.answer for one in lab.others)])
        assert lab.examine(worker, Candidate()).problem is None and lab.other_sizes(worker, Candidate()) is None
        model = Summed()
        model.device = "cuda"
        assert here.compare(torch, model, lab) == []


def test_a_check_on_a_gpu_has_its_answers_there(lab: Lab) -> None:
    x = torch.randn(3, 5)
    with Device(), lab.start(Candidate()) as worker:
        answer = worker.run(x.to("cuda:0"))
        assert {str(tensor.device) for tensor in answer} == {"cuda:0"} and on_cpu([worker.run(x)])
        with pytest.raises(RuntimeError, match="same device"):
            answer[0] + x
