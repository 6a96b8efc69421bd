"""channels-last and what an optimizer keeps of each parameter: who may read it in which order of memory."""

from __future__ import annotations

import copy
import importlib
import io
import sys

import pytest

torch = pytest.importorskip("torch")

from torch.optim.optimizer import (  # noqa: E402 - after the import that decides whether to run at all
    _global_optimizer_pre_hooks,
)

from saturate.agent.context import Context  # noqa: E402
from saturate.techniques import channels_last  # noqa: E402
from saturate.techniques._api import NotApplied  # noqa: E402

OPTIONS = channels_last.Options()


class Blocks(torch.optim.Optimizer):
    """Momentum in 8 bits with a scale for each block of four, in the order of memory: as the kernels of bitsandbytes keep it."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data.contiguous()
                state = self.state[p]
                if not state:
                    state["codes"] = torch.full_like(p, 128, dtype=torch.uint8)
                    state["scales"] = torch.ones(p.numel() // 4)
                codes = state["codes"].as_strided((p.numel(),), (1,)).view(-1, 4)      # memory, whatever the strides
                momentum = (codes.float() - 128) / 127 * state["scales"][:, None]
                momentum = 0.9 * momentum + p.grad.contiguous().view(-1, 4)
                state["scales"] = momentum.abs().amax(1).clamp(min=1e-12)
                codes.copy_((momentum / state["scales"][:, None] * 127 + 128).round().to(torch.uint8))
                p.sub_(momentum.view_as(p), alpha=group["lr"])


def net():
    torch.manual_seed(0)
    return torch.nn.Conv2d(3, 8, 3, bias=False).train()


def step(model, optimizer, number):
    torch.manual_seed(1 + number)
    optimizer.zero_grad()
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()


def applied(model, optimizer, context=None):
    context = context or Context(torch)
    context.modules, context.optimizers, context.device = (model,), (optimizer,), "cpu"
    channels_last.apply(context.of("channels-last"), OPTIONS)
    return context


def test_state_in_the_order_of_memory_is_left_alone():
    def trained(converts):
        model = net()
        optimizer = Blocks(model.parameters())
        for number in range(4):
            if converts and number == 2:
                with pytest.raises(NotApplied, match="Blocks is not torch's own"):
                    applied(model, optimizer)
            step(model, optimizer, number)
        return model.weight.detach()

    assert torch.equal(trained(True), trained(False))


def test_only_floating_point_state_of_torch_s_own_optimizers_is_converted():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    state = optimizer.state[model.weight]
    state["codes"] = torch.zeros_like(model.weight, dtype=torch.uint8)
    context = applied(model, optimizer)
    assert state["codes"].is_contiguous() and not state["exp_avg"].is_contiguous()
    context.undo()
    assert state["exp_avg"].is_contiguous()


def test_a_checkpoint_of_the_technique_goes_on_without_it():
    """A load keeps strides, and torch's fused kernels for CPUs walk memory and look at none."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    context = applied(model, optimizer)
    step(model, optimizer, 1)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    assert not optimizer.state[model.weight]["exp_avg"].is_contiguous(), "what is trained stays as it is"
    context.undo()
    assert not optimizer._optimizer_state_dict_post_hooks

    def resumed(fused):
        file.seek(0)
        saved = torch.load(file)
        other = net()
        other.load_state_dict(saved["model"])
        further = torch.optim.Adam(other.parameters(), lr=0.1, fused=fused)
        saved["optimizer"]["param_groups"][0].update(fused=fused)
        further.load_state_dict(saved["optimizer"])
        assert all(value.is_contiguous() for value in further.state[other.weight].values())
        for number in range(2, 5):
            step(other, further, number)
        return other.weight.detach()

    torch.testing.assert_close(resumed(True), resumed(False))


@pytest.mark.parametrize("state", ["channels-last", "contiguous"])
def test_what_is_loaded_is_laid_out_alike_before_the_step_is_known(state):
    """A checkpoint in the other format: of weights as the script made them, or converted for DistributedDataParallel."""
    formats = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}

    def trained(prepares):
        model = net()
        earlier = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, earlier, 0)
        saved = copy.deepcopy(earlier.state_dict())
        saved["param_groups"][0].update(fused=True)
        for name in ("exp_avg", "exp_avg_sq"):
            saved["state"][0][name] = saved["state"][0][name].contiguous(memory_format=formats[state])
        context = Context(torch)
        if prepares:
            channels_last.prepare(context.of("channels-last at construction"), OPTIONS)
            if state == "contiguous":
                channels_last._convert(context, model.weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=prepares)
        saved["param_groups"][0].update(fused=prepares)
        optimizer.load_state_dict(saved)
        for number in range(1, 4):
            step(model, optimizer, number)
        if prepares and state == "channels-last":
            applied(model, optimizer, context)
        for number in range(4, 6):
            step(model, optimizer, number)
        if prepares:
            assert len(optimizer._optimizer_step_pre_hooks) == 1, "one is enough"
            assert all(value.is_contiguous() for value in optimizer.state_dict()["state"][0].values())
        context.undo()
        assert not optimizer._optimizer_step_pre_hooks and not _global_optimizer_pre_hooks
        return model.weight.detach()

    torch.testing.assert_close(trained(True), trained(False))


def test_a_forward_in_inference_mode_gets_what_it_was_given():
    """Of a script that evaluates without `eval()`: tensors made there do not tell who writes to them."""
    seen = []

    class Net(torch.nn.Conv2d):
        def forward(self, x):
            seen.append(x)
            return super().forward(x)

    model = Net(3, 4, 3).train()
    context = applied(model, torch.optim.SGD(model.parameters(), lr=0.1))
    images = torch.rand(2, 3, 8, 8)
    with torch.inference_mode():
        assert model(images).shape == (2, 4, 6, 6)
    assert seen[0] is images
    model(images)
    assert seen[1].is_contiguous(memory_format=torch.channels_last)
    context.undo()


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
def test_what_a_validation_gets_of_a_model_can_be_viewed(training, without_gradients):
    """Weights stay channels-last there, and what a convolution makes with them does too. Seen: a segmentation whose score is computed of
    `output.view(n, -1)` ended in its first validation, which no trial comes to."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 5, 3))
    context = applied(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = copy.deepcopy(model)
    for one in (model.train(training), average.train(training)):
        with without_gradients():
            assert one(torch.rand(2, 3, 8, 8)).view(2, -1).shape == (2, 80)
    context.undo()
    assert type(vars(model)) is dict


def test_what_a_script_traces_in_evaluation_is_what_it_wrote():
    model, x = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 5, 3)), torch.rand(2, 3, 8, 8)
    plain = torch.jit.trace(model.eval(), x).inlined_graph
    context = applied(model.train(), torch.optim.SGD(model.parameters(), lr=0.1))
    traced = torch.jit.trace(model.eval(), x)
    assert [node.kind() for node in traced.inlined_graph.nodes()] == [node.kind() for node in plain.nodes()]
    context.undo()


@pytest.mark.parametrize("imported", ["before", "after"])
def test_safetensors_saves_what_lies_channels_last(imported, tmp_path, monkeypatch):
    """Seen: "You are trying to save a non contiguous tensor", when the training was over."""
    safetensors = pytest.importorskip("safetensors.torch")
    save_file, save, load_file = safetensors.save_file, safetensors.save, safetensors.load_file
    if imported == "after":
        monkeypatch.delitem(sys.modules, "safetensors.torch")
    context = Context(torch)
    channels_last.prepare(context.of("channels-last at construction"), OPTIONS)
    if imported == "after":
        module = importlib.import_module("safetensors.torch")
        save_file, save, load_file = module.save_file, module.save, module.load_file
    model = net()
    applied(model, torch.optim.SGD(model.parameters(), lr=0.1), context)
    for one in (model, copy.deepcopy(model)):
        save_file(one.state_dict(), tmp_path / "a.safetensors")
        assert torch.equal(load_file(tmp_path / "a.safetensors")["weight"], model.weight)
        assert save(one.state_dict()) == (tmp_path / "a.safetensors").read_bytes()
    with pytest.raises(RuntimeError, match="share memory"):
        save_file({"a": model.weight.detach(), "b": model.weight.detach()}, tmp_path / "b.safetensors")
    context.undo()
    with pytest.raises(ValueError, match="non contiguous"):
        save_file({"a": torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)}, tmp_path / "b.safetensors")


def test_a_training_that_goes_on_with_weights_whose_format_had_to_stay():
    """A second phase with another optimizer, while the dictionary that the first one saved is still there. Seen: the door was gone, and
    outputs came channels-last."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 5, 3)).train()
    context = applied(model, torch.optim.SGD(model.parameters(), lr=0.1))
    saved = model.state_dict()
    context.undo({"channels-last"})
    assert not model[0].weight.is_contiguous()
    applied(model, torch.optim.SGD(model.parameters(), lr=0.1), context)
    assert model(torch.rand(2, 3, 8, 8)).view(-1).shape == (2 * 5 * 16,)
    assert saved["0.weight"].data_ptr() == model[0].weight.data_ptr()
    del saved
    context.undo({"channels-last"})
    assert model[0].weight.is_contiguous() and type(vars(model)) is dict
    applied(model, torch.optim.SGD(model.parameters(), lr=0.1), context)
    context.undo()
