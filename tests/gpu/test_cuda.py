"""What only a CUDA device can show. Run by `pytest -m gpu`, and by bench/gpu_evidence.py."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from saturate.study.candidates import Candidate
from saturate.techniques import _registry
from saturate.trial.launch import Chosen
from saturate.trial.outcome import REPLAYED
from saturate.trial.process import TrialEnded

pytestmark = pytest.mark.gpu

LOOP = """
import torch, torch.nn as nn
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.Flatten(),
                      nn.Linear(32 * 32 * 32, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
while True:
    x = torch.randn(256, 3, 32, 32); y = torch.randint(10, (256,))
    opt.zero_grad(); nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward(); opt.step()
"""

GRAPHED = """
import torch, torch.nn as nn
torch.manual_seed(0)
model = nn.Linear(64, 64).cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
x = torch.randn(32, 64, device="cuda")
def step():
    opt.zero_grad(set_to_none=True); model(x).square().mean().backward(); opt.step()
side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(WARM): step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): step()
for _ in range(2000): graph.replay(); torch.cuda.synchronize()
print("replayed", flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def device():
    probe = subprocess.run([sys.executable, "-c", "import torch; print(torch.cuda.is_available())"], capture_output=True, text=True)
    if probe.stdout.strip() != "True":
        pytest.skip("no CUDA device")


def chosen(identity: str, **options: object) -> Chosen:
    module = _registry.load()[identity]
    return Candidate(module, module.Options(**options)).chosen()


@pytest.mark.parametrize("warm", [3, 11])
def test_a_script_captures_its_own_steps_undisturbed(warm, script, start):
    """torch's example of a whole step in a graph; our first gate would lie inside the capture."""
    trial = start(str(script(GRAPHED.replace("WARM", str(warm)))), timeout_s=60.0)
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
        trial.run_block(0, 50)
    assert ended.value.outcome == REPLAYED, trial.output()


def test_a_recipe_leaves_a_script_that_captures_its_own_steps_as_it_is(script, tmp_path, clean_environment):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('schema = 1\n[[technique]]\nid = "channels-last"\n', encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "saturate", "run", str(recipe), "--", sys.executable, str(script(GRAPHED.replace("WARM", "3")))],
                          capture_output=True, text=True, cwd=tmp_path, timeout=200,
                          env={**clean_environment, "PYTHONPATH": os.pathsep.join(sys.path)})      # it may not be installed here
    assert done.returncode == 0 and "replayed" in done.stdout, done.stderr
    assert "replays a CUDA graph of whole steps" in done.stderr


@pytest.mark.parametrize("identity, options", [
    ("bf16-autocast", {}), ("tf32", {}), ("compile", {}), ("compile", {"mode": "reduce-overhead"}), ("channels-last", {}),
    ("fused-optimizer", {}), ("cudnn-benchmark", {}), ("allocator", {}), ("fp8-linear", {}),
])
def test_techniques_take_effect(identity, options, script, start, clean_environment):
    import msgspec

    from saturate.records.facts import Evidence

    if identity == "fp8-linear":
        pytest.importorskip("torchao", reason="the extra torchao")
        clean_environment["PYTHONPATH"] = os.pathsep.join(sys.path)     # where it may lie
    technique = chosen(identity, **options)
    trial = start(str(script(LOOP)), timeout_s=240.0, techniques=[technique])
    hello = trial.wait_ready()
    assert hello["applied"] == [{"id": identity, "problem": ""}]
    trial.run_block(10, 5)
    module = _registry.load()[identity]
    proof = module.active(msgspec.convert(trial.ask("evidence"), Evidence), module.Options(**options))
    assert proof.active, proof.evidence


def test_losses_that_replayed_graphs_write_over_are_recorded(start, script):
    """The model returns its loss, as nanoGPT does: it lies in a graph's memory, which the next step overwrites. The script
    itself keeps losses, too, and reads them some steps later."""
    source = """
        import torch, torch.nn as nn
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            def forward(self, x):
                return (self.layers(x) - x).square().mean()
        torch.manual_seed(0)
        model = Net().cuda()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        kept = []
        while True:
            x = torch.randn(128, 64, device="cuda")
            opt.zero_grad(); loss = model(x); loss.backward(); opt.step()
            kept.append(loss.detach())
            if len(kept) == 5:
                assert len({one.item() for one in kept}) == 5
                kept.clear()
    """
    found = []
    for techniques in ([], [chosen("compile", mode="reduce-overhead")]):
        trial = start(str(script(source)), timeout_s=240.0, techniques=techniques, step={"token": "S0", "count": 1, "tokens": ["B", "S0"]})
        trial.wait_ready()
        trial.run_block(20, 5)
        found.append([loss for update in trial.losses for loss in update])
        trial.stop()
    assert len(found[0]) >= 20 and found[1][:20] == pytest.approx(found[0][:20], rel=1e-2)


def test_the_line_that_allocates_most(start, script) -> None:
    """The allocator's own history names the line of the wide layer."""
    trial = start(str(script("""
        import torch, torch.nn as nn
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.narrow, self.wide = nn.Linear(64, 64), nn.Linear(64, 4096)
            def forward(self, x):
                x = torch.tanh(self.narrow(x))
                return self.wide(x).pow(2).mean()
        model = Net().cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(512, 64, device="cuda")
        while True:
            opt.zero_grad(); model(x).backward(); opt.step()
    """)))
    trial.wait_ready()
    seen = trial.look("modules", 1, 3)
    first = seen["memory_lines"][0]
    assert first[1] == 9 and first[2] == "forward" and first[-1] >= 512 * 4096 * 4
    assert seen["saved_bytes"] >= 512 * 4096 * 4


#: Without set_device, the first device stays the current one.
ON = """
import os
{before}
import torch, torch.nn as nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))).to("{device}")
opt = torch.optim.SGD(model.parameters(), lr=1e-4)
x = torch.randn(8192, 4096, device="{device}")
while True:
    opt.zero_grad(); model(x).square().mean().backward(); opt.step()
"""
LAYER_BYTES = 8192 * 4096 * 4


def test_modules_of_a_training_on_another_device_than_the_current_one(start, script):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    trial = start(str(script(ON.format(before="", device="cuda:1"))), timeout_s=120.0)
    trial.wait_ready()
    seen = trial.look("modules", 1, 3)
    layers = [row for row in seen["modules"] if row["kind"] == "Linear"]
    assert len(layers) == 8 and all(row["forward_ms"] > 0.5 and row["memory_bytes"] >= LAYER_BYTES for row in layers)
    assert seen["memory_lines"] and trial.ask("ceilings")["bfloat16"] > 1e12


def test_an_allocator_without_a_history_costs_the_lines_only(start, script):
    before = 'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "backend:cudaMallocAsync"'
    trial = start(str(script(ON.format(before=before, device="cuda"))), timeout_s=120.0)
    trial.wait_ready()
    seen = trial.look("modules", 1, 3)
    assert seen["modules"] and seen["memory_lines"] == [] and "keeps no history" in seen["memory_lines_unknown"]
    assert trial.run_block(1, 2).step_ns        # it goes on


def test_a_history_that_the_script_records_goes_on(start, script):
    source = ON.format(before="", device="cuda").replace("while True:", """
torch.cuda.memory._record_memory_history(max_entries=1000)
while True:
    assert torch._C._cuda_isHistoryEnabled()""")
    trial = start(str(script(source)), timeout_s=120.0)
    trial.wait_ready()
    assert "the script itself" in trial.look("modules", 1, 3)["memory_lines_unknown"]
    assert trial.run_block(1, 2).step_ns


CONVOLUTIONS = """
    import contextlib, sys, torch, torch.nn as nn
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1, bias=False),
                          nn.BatchNorm2d(32), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).cuda()
    around = contextlib.nullcontext()
    if sys.argv[1] == "autocast": around = torch.autocast("cuda", torch.bfloat16)
    if sys.argv[1] == "held": model.to(torch.bfloat16)
    x, y = torch.randn(64, 3, 32, 32, device="cuda").to(model[0].weight.dtype), torch.randint(10, (64,), device="cuda")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    while True:
        with around: loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad(); loss.float().backward(); opt.step()
"""


@pytest.mark.parametrize(("how", "arithmetic"), [("plain", "tfloat32"), ("autocast", "bfloat16"), ("held", "bfloat16")])
@pytest.mark.parametrize(("identity", "options"), [("compile", {}), ("fused-optimizer", {}), ("channels-last", {})])
def test_what_is_right_is_accepted_in_the_formats_that_devices_compute_in(how, arithmetic, identity, options, script, start, tmp_path):
    """Fused operators round in other places, other memory layouts have kernels in TensorFloat-32."""
    from saturate.study.verification import SEED, UPDATES
    from saturate.verify import compare, series
    from saturate.verify.tolerance import tolerance

    path, rounding = str(script(CONVOLUTIONS)), series.ROUNDING[arithmetic]

    def recorded(name, techniques=(), perturb=None):
        folder = tmp_path / name
        folder.mkdir()
        capture = {"folder": str(folder), "updates": UPDATES, "seed": SEED, "aligned": False, "perturb": perturb}
        step = {"token": "S0", "count": 1, "tokens": ["B", "S0"]}
        trial = start(path, how, capture=capture, step=step, techniques=list(techniques), timeout_s=240.0)
        trial.wait_ready()
        trial.stop()
        return series.read(folder)

    baseline, repetition = recorded("baseline"), recorded("repetition")
    assert (baseline.arithmetic, baseline.device) == (arithmetic, "cuda")
    assert compare.bitwise(baseline, repetition), "no algorithm is chosen by a measurement"
    twins = [recorded(f"twin {seed}", perturb={"relative": rounding, "seed": seed}) for seed in (1, 2, 3)]
    verdict = compare.compare(baseline, recorded("candidate", [chosen(identity, **options)]), tolerance(baseline, [repetition], twins, rounding))
    assert verdict.passed, verdict.reason
