"""A script that drops its model has the memory back, and `saturate run` still says what was not in effect."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

pytest.importorskip("torch")

#: A training in a function, as most are; what it used is gone when it returns. Told of each: whether its forward is wrapped, whether its
#: optimizer is fused, and how many of module, optimizer and parameter are still there once garbage is collected.
TRAININGS = """
import gc, sys, weakref, torch, torch.nn as nn
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self): super().__init__(); self.a = nn.Linear(64, 64); self.b = nn.Linear(64, 64)
    def forward(self, x): return x + self.b(torch.relu(self.a(x)))
class Net(nn.Module):
    def __init__(self): super().__init__(); self.blocks = nn.ModuleList(Block() for _ in range(4)); self.head = nn.Linear(64, 1)
    def forward(self, x):
        for block in self.blocks: x = block(x)
        return self.head(x)
class Pictures(Net):
    def __init__(self): super().__init__(); self.convolution = nn.Conv2d(4, 16, 3, padding=1)
    def forward(self, x): return super().forward(self.convolution(x.view(-1, 4, 4, 4)).mean(1).repeat(1, 1, 4).flatten(1))
x, y = torch.randn(16, 64), torch.randn(16, 1)
def train(steps):
    model = Pictures() if "convolutions" in sys.argv else Net(); optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none="zeroed" not in sys.argv)
        ((model(x) - y) ** 2).mean().backward(); optimizer.step()
    print("forward" in vars(model), bool(optimizer.param_groups[0].get("fused")), end=" ")
    return [weakref.ref(thing) for thing in (model, optimizer, *model.parameters())]
def left(things):
    gc.collect()
    print(sum(thing() is not None for thing in things), flush=True)
first = train(30); left(first)
second = train(60); left(first + second)
"""


def run(source, recipe, script, tmp_path, clean_environment, *arguments, timeout=240):
    (tmp_path / "recipe.toml").write_text("schema = 1\n" + recipe)
    return subprocess.run([sys.executable, "-m", "saturate", "run", "recipe.toml", "--", sys.executable, str(script(source)), *arguments],
                          cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=timeout)


def recipe_of(*identities, **options):
    """`options`: by identity, with underscores."""
    return "".join(f'[[technique]]\nid = "{one}"\n' + (f"options = {options[one.replace('-', '_')]}\n" if one.replace("-", "_") in options else "")
                   for one in identities)


#: name -> (recipe, arguments of the script, what is told of each training)
RECIPES = {
    "nothing of the model": (recipe_of("cpu-threads"), (), "False False 0"),
    "bf16 and fused": (recipe_of("bf16-autocast", "fused-optimizer"), (), "True True 0"),
    "compile": (recipe_of("compile", "fused-optimizer"), (), "True True 0"),
    "zero-grad-none": (recipe_of("zero-grad-none"), ("zeroed",), "False False 0"),
    "gc-freeze": (recipe_of("fused-optimizer", "gc-freeze"), (), "False True 0"),
    "optimizer-in-backward": (recipe_of("optimizer-in-backward"), (), "False False 0"),
    "optimizer-8bit": (recipe_of("optimizer-8bit"), (), "False False 0"),
    "micro-batch": (recipe_of("micro-batch"), (), "True False 0"),
    "dynamic-batch": (recipe_of("dynamic-batch"), (), "True False 0"),
    "channels-last": (recipe_of("channels-last"), ("convolutions",), "True False 0"),
    "activation-checkpointing": (recipe_of("activation-checkpointing", activation_checkpointing='{mode = "blocks"}'), (), "True False 0"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_what_the_script_drops_is_gone(name, script, tmp_path, clean_environment):
    if name == "compile" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("there is no C++ compiler")
    recipe, arguments, told = RECIPES[name]
    done = run(TRAININGS, recipe, script, tmp_path, clean_environment, *arguments)
    assert (done.returncode, done.stdout) == (0, f"{told}\n" * 2), done.stderr
    assert "effect" not in done.stderr, done.stderr


STOPS = """
import gc, sys, torch
def main():
    net = torch.nn.Conv2d(3, 4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(100):
        if step == 30 and len(sys.argv) > 1:
            net.weight.data = net.weight.data.contiguous()
        opt.zero_grad(); net(torch.ones(2, 3, 8, 8)).sum().backward(); opt.step()
main()
gc.collect()
print("done")
"""


@pytest.mark.parametrize("stops", [True, False])
def test_what_has_stopped_to_act_is_told_of_a_model_that_is_gone(stops, script, tmp_path, clean_environment):
    done = run(STOPS, recipe_of("channels-last"), script, tmp_path, clean_environment, *(["stops"] if stops else []))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    line = "saturate: channels-last was not in effect when the script ended: no parameter is stored channels-last\n"
    assert done.stderr == (line if stops else "")


WITHOUT_COLLECTING = """
import gc, sys, weakref, torch
from saturate.agent.context import Context
from saturate.techniques import fused_optimizer, optimizer_8bit
module = {"fused": fused_optimizer, "eight": optimizer_8bit}[sys.argv[1]]
model = torch.nn.Linear(128, 128)
optimizer = torch.optim.AdamW(model.parameters())
context = Context(torch)
context.modules, context.optimizers, context.device = (model,), (optimizer,), "cpu"
module.apply(context, module.Options())
for _ in range(3):
    model(torch.ones(1, 128)).sum().backward(); optimizer.step()
gc.collect()            # of what torch itself leaves of its first steps
gc.disable()
things = [weakref.ref(optimizer), weakref.ref(model.weight)]
del model, optimizer
print([thing() is None for thing in things])
"""


@pytest.mark.parametrize("technique", ["fused", "eight"])
def test_an_optimizer_goes_with_the_last_reference_to_it(technique, script):
    """Its hooks held what held it: gigabytes of weights and state stayed until Python looked for cycles, as it does by their number."""
    done = subprocess.run([sys.executable, str(script(WITHOUT_COLLECTING)), technique], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[True, True]\n", done.stdout + done.stderr
