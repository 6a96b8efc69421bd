"""channels-last and what an optimizer keeps of each parameter: who may read it in which order of memory."""

from __future__ import annotations

import copy
import io

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
