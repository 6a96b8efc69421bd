"""The windows of a profile, in real trainings: what they see, and that nothing of them stays."""

from __future__ import annotations

import errno
import gzip
import json
import os
import socket
import sys
from pathlib import Path

import pytest
from waiting import until

from saturate.agent import profiling
from saturate.trial.process import Trial, TrialEnded, TrialSpec, Workload

MODEL = """
import gc, os, sys, time, torch, torch.nn as nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 4)
    def forward(self, x):
        return self.head(self.body(x))
model = Net()
opt = torch.optim.Adam(model.parameters())
x, y = torch.randn(8, 16), torch.randint(4, (8,))
def loss_of(): return nn.functional.cross_entropy(model(x), y)
"""

PLAIN = MODEL + """
while True:
    opt.zero_grad()
    loss = loss_of()
    loss.backward()
    opt.step()
    text = f"{loss.item():.3f}"     # the line that reads
    print(loss, file=open(os.devnull, "w"))
"""


def events(path: str) -> list[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def labels(path: str) -> list[dict]:
    return sorted((event for event in events(path) if event["cat"] == "user_annotation"), key=lambda event: event["ts"])


def crossing(found: list[dict]) -> list[str]:
    """Labels that begin inside another one and end after it."""
    open_until, bad = [], []
    for event in sorted(found, key=lambda event: (event["ts"], -event["dur"])):
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        end = event["ts"] + event["dur"]
        if open_until and end > open_until[-1] + 0.001:
            bad.append(event["name"])
        open_until.append(end)
    return bad


@pytest.fixture
def record(start, script, tmp_path):
    """Record some steps of a script: what the window saw, and the trial."""

    def run(source: str, steps: int = 3, **options):
        trial = start(str(script(source)))
        trial.wait_ready()
        trial.run_block(1, 3)
        return trial.look("record", 1, steps, folder=str(tmp_path), **options), trial

    return run


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """All windows of one run of the plain loop, and its lines."""
    folder = tmp_path_factory.mktemp("plain")
    path = folder / "train.py"
    path.write_text(PLAIN, encoding="utf-8")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SATURATE", "PYTHON", "PYTEST"))}
    with Trial(Workload([sys.executable, str(path)], folder, clean, 60.0),
               TrialSpec(id="plain", purpose="test", folder=folder / "trial")) as trial:
        trial.wait_ready()
        trial.run_block(1, 3)
        found = {"sample": trial.look("sample", 1, 3)}
        for name, step_ms in (("long", 200.0), ("short", 1.0)):
            (folder / name).mkdir()
            found[name] = trial.look("record", 1, 4, folder=str(folder / name), step_ms=step_ms)
        found["modules"] = trial.look("modules", 1, 3)
        assert trial.run_block(1, 3).step_ns        # it goes on
    return {**found, "lines": PLAIN.splitlines()}


def test_a_recording_holds_whole_steps(plain):
    seen = plain["long"]
    found = labels(seen["trace"])
    names = [event["name"] for event in found]
    steps = [event for event in found if event["name"].startswith("ProfilerStep#")]
    assert len(steps) == 4 and not crossing(found)
    for label in ("saturate.backward", "Optimizer.step#Adam.step", "saturate.module Net (Net)", "saturate.module head (Linear)"):
        assert names.count(label) == 4, label
    for step in steps:
        inside = [event["name"] for event in found
                  if step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"]]
        assert inside.count("saturate.backward") == inside.count("Optimizer.step#Adam.step") == 1


def test_labels_of_modules_stay_cheap(plain):
    """In a step of one millisecond only the outermost module gets one."""
    seen = plain["short"]
    assert {name for name in (event["name"] for event in labels(seen["trace"])) if name.startswith("saturate.module")} == \
        {"saturate.module Net (Net)"}


def test_every_read_has_its_line(plain):
    seen, lines = plain["long"], plain["lines"]
    found = {what: (lines[line - 1].strip(), calls, ns) for file, line, what, calls, ns in seen["syncs"]}
    assert set(found) == {"Tensor.item", "print"}
    assert "the line that reads" in found["Tensor.item"][0] and found["Tensor.item"][1] == 4
    assert found["print"][0].startswith("print(loss") and found["print"][1] == 4
    assert all(ns > 0 for _, _, ns in found.values())


def test_folders_that_torch_cannot_name_are_recorded_all_the_same(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9\nline")
    folder.mkdir()
    path = folder / "train.py"
    path.write_text(PLAIN, encoding="utf-8")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SATURATE", "PYTHON", "PYTEST"))}
    with Trial(Workload([sys.executable, str(path)], folder, clean, 60.0),
               TrialSpec(id="odd", purpose="test", folder=folder / "trial")) as trial:
        trial.wait_ready()
        trial.run_block(1, 3)
        found = trial.look("record", 1, 3, folder=str(folder))
    assert Path(found["trace"]).parent == folder
    reads = [event["name"] for event in labels(found["trace"]) if "Tensor.item" in event["name"]]
    assert len(reads) == 3
    assert all("caf\\xe9" in file for file, *_ in found["syncs"])


def test_reads_by_torch_itself_are_not_the_users(record):
    """Adam reads its step count, a sampler its permutation, a dataset its own tensors."""
    seen, _ = record(MODEL + """
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return x[index] * float(torch.ones(()).item())
opt = torch.optim.Adam(model.parameters(), foreach=False)
while True:
    for batch in DataLoader(Numbers(), batch_size=2, shuffle=True):
        opt.zero_grad(); model(batch).pow(2).mean().backward(); opt.step()
""", 6)
    assert seen["syncs"] == []


LOOPS = {
    "by hand": """
while True:
    model.zero_grad(); loss_of().backward()
    for p in model.parameters(): p.data.add_(p.grad, alpha=-1e-3)
""",
    "accumulation": """
while True:
    for _ in range(3): (loss_of() / 3).backward()
    opt.step(); opt.zero_grad()
""",
    "closure": """
opt = torch.optim.LBFGS(model.parameters(), max_iter=2)
def closure():
    opt.zero_grad(); loss = loss_of(); loss.backward(); return loss
while True: opt.step(closure)
""",
    "one step is the whole training": """
opt = torch.optim.LBFGS(model.parameters(), max_iter=10**9, tolerance_grad=-1, tolerance_change=-1)
def closure():
    opt.zero_grad(); loss = loss_of(); loss.backward(); return loss
opt.step(closure)
""",
    "scaler": """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=10**9)
n = 0
while True:
    n += 1
    opt.zero_grad(); scaler.scale(loss_of() * (float("inf") if n % 3 == 0 else 1.0)).backward(); scaler.step(opt); scaler.update()
""",
}


@pytest.mark.parametrize("name", ["by hand", "one step is the whole training",
                                  *(pytest.param(name, marks=pytest.mark.slow) for name in ("accumulation", "closure", "scaler"))])
def test_other_loops_have_whole_steps_too(record, name):
    seen, _ = record(MODEL + LOOPS[name], 4)
    found = labels(seen["trace"])
    assert sum(event["name"].startswith("ProfilerStep#") for event in found) == 4
    assert not crossing(found)


RESIDUE = MODEL + """
def state():
    from torch.nn.modules import module as hooks
    from torch.utils.data.dataloader import _BaseDataLoaderIter
    return {
        "tensor": {name: vars(torch.Tensor).get(name) for name in ("item", "tolist", "__bool__", "__repr__", "__format__", "cpu", "to")},
        "backward": torch.autograd.backward, "exit": torch.autograd.profiler.record_function.__exit__,
        "next": _BaseDataLoaderIter.__next__, "gc": list(gc.callbacks), "interval": sys.getswitchinterval(),
        "hooks": [dict(hooks._global_forward_hooks), dict(hooks._global_forward_pre_hooks)],
        "threads": [thread.name for thread in __import__("threading").enumerate()],
        "modes": torch.utils._python_dispatch._get_current_dispatch_mode() if hasattr(torch.utils, "_python_dispatch") else None,
    }
states = []
while True:
    opt.zero_grad(); loss = loss_of(); loss.backward(); opt.step()
    states.append(state())
    print("SAME" if states[-1] == states[0] else "OTHER", flush=True)
"""


def test_nothing_of_a_window_stays(start, script, tmp_path):
    trial = start(str(script(RESIDUE)))
    trial.wait_ready()
    trial.run_block(1, 3)
    for kind in ("sample", "record", "modules"):
        before = len(said(trial))
        trial.look(kind, 1, 3, folder=str(tmp_path))
        trial.run_block(1, 6)
        during = said(trial)[before:]
        assert "OTHER" in during, f"{kind} changed nothing: is the test looking?"
        assert during[-3:] == ["SAME"] * 3, kind


PLAYS = PLAIN.replace("while True:", """
steps = 0
while True:
    steps += 1
    if steps > 30:          # an episode of play, in which something is printed all the time
        for _ in range(600): time.sleep(0.1); print("plays", flush=True)
""")


def test_a_look_waits_no_longer_than_it_may(start, script):
    trial = start(str(script(PLAYS)))
    trial.wait_ready()
    trial.run_block(1, 3)
    with pytest.raises(TrialEnded) as ended:
        trial.look("sample", 1, 60, patience_s=2.0)
    assert ended.value.outcome.kind == "not_in_time" and "it had not come to where it is measured" in ended.value.outcome.reason


def said(trial) -> list[str]:
    """Of each step but the last, which it ends behind the gate: what was printed travels through a pipe."""
    def lines() -> list[str]:
        return [line for line in trial.output().splitlines() if line in ("SAME", "OTHER")]

    return until(lambda: found if len(found := lines()) >= trial.steps - 1 else [])


def test_a_script_that_ends_while_it_is_recorded_just_ends(start, script, tmp_path):
    """A profiler that still ran when the interpreter went down took the process with it, and the script was blamed."""
    source = """
    import gc, torch, torch.nn as nn
    model = nn.Linear(64, 64); opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    class Kept: pass
    for _ in range(40):
        kept = [Kept() for _ in range(2000)]
        for one in kept: one.others = kept      # something for the collector at the end
        opt.zero_grad(); model(torch.randn(32, 64)).pow(2).mean().backward(); opt.step()
    """
    trial = start(str(script(source)))
    trial.wait_ready()
    trial.run_block(1, 3)
    with pytest.raises(TrialEnded) as ended:
        trial.look("record", 1, 1000, folder=str(tmp_path))
    assert ended.value.outcome.kind == "too_short", ended.value.outcome
    assert "Traceback" not in trial.output()


def test_a_script_that_profiles_itself_goes_on(record):
    seen, trial = record(MODEL + """
prof = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]); prof.start()
while True:
    opt.zero_grad(); loss_of().backward(); opt.step()
""", 2)
    assert "the script runs torch.profiler itself" in seen["problem"] and "trace" not in seen
    assert trial.run_block(1, 3).step_ns


@pytest.mark.parametrize(("wait", "warmup"), [(0, 10**6), (8, 1), (9, 1), (10, 1)])
def test_a_schedule_of_the_scripts_own_is_not_in_the_way(record, wait, warmup):
    """Its profiler warms up when the window opens, or takes its turn within it: two at once end the process."""
    seen, trial = record(MODEL + f"""
schedule = torch.profiler.schedule(wait={wait}, warmup={warmup}, active=1)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as prof:
    while True:
        opt.zero_grad(); loss_of().backward(); opt.step(); prof.step()
""", 8)
    assert "the script runs torch.profiler itself" in seen["problem"] and "trace" not in seen
    assert trial.run_block(1, 20).step_ns


def test_gradients_that_are_asked_for_are_a_backward_pass(record):
    seen, trial = record(MODEL + """
parameters = list(model.parameters())
while True:
    for parameter, grad in zip(parameters, torch.autograd.grad(loss_of(), parameters)):
        parameter.grad = grad
    opt.step()
""")
    assert [event["name"] for event in labels(seen["trace"])].count("saturate.backward") == 3
    assert trial.look("sample", 1, 3)["parts"]["backward"] > 0


def test_a_trace_tells_no_host_name(plain):
    seen = plain["long"]
    with gzip.open(seen["trace"], "rt", encoding="utf-8") as file:
        read = json.load(file)
    assert read.get("host_name", "") == ""
    assert socket.gethostname() not in {value for value in read.values() if isinstance(value, str)}


# -- sample ------------------------------------------------------------------------------------------------------------

INPUT = MODEL + """
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, index):
        {work}
        return x[0], 1
def train():
    while True:
        for inputs, labels in DataLoader(Slow(), batch_size=4, num_workers={workers}):
            opt.zero_grad(); nn.functional.cross_entropy(model(inputs), labels).backward(); opt.step()
if __name__ == "__main__":
    train()
"""


@pytest.fixture
def sample(start, script):
    def run(source: str, steps: int = 30):
        trial = start(str(script(source)))
        trial.wait_ready()
        return trial.look("sample", 2, steps)

    return run


def test_input_that_sleeps(sample, tmp_path):
    seen = sample(INPUT.format(work="time.sleep(0.03)       # the slow line", workers=0), steps=10)
    assert seen["fetch_ns"] > 0.7 * seen["wall_ns"] and seen["fetch_cpu_ns"] < 0.5 * seen["fetch_ns"]
    file, line, function, _ = seen["lines"][0]
    assert (function, "the slow line" in (tmp_path / "train.py").read_text().splitlines()[line - 1]) == ("__getitem__", True)
    assert file == str(tmp_path / "train.py")


def test_input_that_computes(sample):
    seen = sample(INPUT.format(work="sum(range(60_000))", workers=0), steps=160)     # of a few looks, most may be at the batch being put together
    assert seen["fetch_cpu_ns"] > 0.5 * (seen["fetch_ns"] - seen["fetch_queued_ns"])
    assert seen["lines"][0][2] == "__getitem__"


def test_input_by_a_worker(sample):
    """Its stack cannot be seen: the dataset is named instead."""
    seen = sample(INPUT.format(work="sum(range(600_000))", workers=1))      # much more than the step beside it, which may have to wait for a core
    assert seen["workers"] == 1 and seen["worker_cpu_ns"] > 0.5 * (seen["wall_ns"] - seen["worker_queued_ns"])
    assert seen["dataset"]["kind"] == "Slow" and seen["dataset"]["function"] == "__getitem__" and seen["dataset"]["line"] > 0


def test_a_loader_that_another_thread_reads_is_told(sample):
    seen = sample(MODEL + """
import queue, threading
batches = queue.Queue(1)
def feed():
    for batch in torch.utils.data.DataLoader(range(10_000_000), batch_size=4): batches.put(batch)
threading.Thread(target=feed, daemon=True).start()
while True:
    batches.get()
    opt.zero_grad(); loss_of().backward(); opt.step()
""")
    assert seen["fetched_elsewhere"] and seen["dataset"] is None and "input" not in seen["parts"]


def test_pauses_of_the_collector_are_timed(sample):
    seen = sample(MODEL + """
kept = [[number] for number in range(20_000)]
while True:
    opt.zero_grad(); loss_of().backward(); opt.step(); gc.collect()
""")
    assert seen["gc_pauses"] == 30 and seen["gc_ns"] > 0.1 * seen["wall_ns"]
    (file, line, ns), = seen["gc_called"]
    assert file.endswith(".py") and line > 0 and seen["gc_ns"] <= ns <= seen["wall_ns"]


def test_page_faults_of_blocks_that_are_mapped_anew(sample):
    seen = sample(MODEL + """
while True:
    opt.zero_grad(); loss_of().backward(); torch.ones(16 << 20); opt.step()     # 64 MiB, above what glibc takes from its heap
""")
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    page = 2 << 20 if setting.exists() and "[always]" in setting.read_text() else os.sysconf("SC_PAGE_SIZE")
    assert seen["page_faults"] / seen["steps"] > 0.9 * (64 << 20) / page
    assert 0 < seen["kernel_ns"] <= seen["process_cpu_ns"]


def test_memory_of_what_lives_from_step_to_step(plain):
    parameters = 4 * (16 * 32 + 32 + 32 * 4 + 4)
    assert plain["sample"]["memory"] == {"parameters": parameters, "gradients": parameters, "optimizer_state": 2 * parameters + 4 * 4}


# -- modules -----------------------------------------------------------------------------------------------------------


def by_name(seen: dict) -> dict[str, dict]:
    return {row["name"]: row for row in seen["modules"]}


def test_operations_and_time_by_module(plain):
    seen, rows = plain["modules"], by_name(plain["modules"])
    body, head = 2 * 8 * 16 * 32, 2 * 8 * 32 * 4
    assert {name: row["flops"] for name, row in rows.items()} == \
        {"Net": body + head, "body": body, "head": head, "body.0": body, "body.1": 0}
    assert seen["flops"] == 2 * body + 3 * head         # no gradient for the first layer's input
    assert seen["recomputed_flops"] == 0
    inner = rows["body.0"]["forward_ms"] + rows["body.1"]["forward_ms"]
    assert rows["body"]["forward_ms"] == pytest.approx(rows["body"]["self_ms"] + inner)
    assert rows["Net"]["forward_ms"] > rows["body"]["forward_ms"] > 0


def test_a_wait_in_one_of_the_timed_steps_is_no_time_of_a_module(start, script):
    """As of a process that has to wait for another program: of two steps, one is seldom hit."""
    trial = start(str(script(MODEL + """
step = 0
model.head.register_forward_pre_hook(lambda *given: time.sleep(2 * (step % 2)))
while True:
    step += 1
    opt.zero_grad(); loss_of().backward(); opt.step()
""")))
    trial.wait_ready()
    rows = by_name(trial.look("modules", 1, 3))
    assert rows["body.0"]["forward_ms"] < rows["Net"]["forward_ms"] < 1000


def test_recomputation_is_counted_apart(start, script):
    trial = start(str(script(MODEL + """
from torch.utils.checkpoint import checkpoint
while True:
    opt.zero_grad()
    nn.functional.cross_entropy(model.head(checkpoint(model.body, x.clone().requires_grad_(), use_reentrant=False)), y).backward()
    opt.step()
""")))
    trial.wait_ready()
    seen = trial.look("modules", 1, 2)
    assert seen["recomputed_flops"] == 2 * 8 * 16 * 32
    assert by_name(seen)["Sequential"]["flops"] == 2 * 8 * 16 * 32       # head and body are called by themselves


EVALUATING = MODEL + """
step = 0
while True:
    opt.zero_grad(); loss_of().backward(); opt.step()
    step += 1
    if step % {every} == 0:
        model.eval()
        with torch.no_grad():
            for _ in range(4000): model(x)
        model.train()
"""


@pytest.mark.parametrize("every", [1, 2])
def test_an_evaluation_is_no_part_of_a_step(start, script, every):
    trial = start(str(script(EVALUATING.replace("{every}", str(every)))))
    trial.wait_ready()
    both = [trial.look("modules", 1, steps) for steps in (4, 5)]
    assert sorted(seen["evaluated"] for seen in both) == [every == 1, True]
    for seen in both:
        rows = by_name(seen)
        if seen["evaluated"]:
            assert "evaluation" in seen["flops_unknown"] and {row["flops"] for row in rows.values()} == {None}
        else:
            assert not seen["flops_unknown"] and rows["Net"]["flops"] == 2 * 8 * 16 * 32 + 2 * 8 * 32 * 4
        assert every == 1 or rows["Net"]["forward_ms"] < 25         # with an evaluation among the timed ones it is twice that


def test_operations_in_other_threads_are_missed_and_said_so(start, script):
    """A helper thread that runs modules of its own is no part of the step."""
    source = """
import torch
from concurrent.futures import ThreadPoolExecutor
from torch import nn
pool = ThreadPoolExecutor(1)
class Two(nn.Module):
    def __init__(self): super().__init__(); self.near, self.far = nn.Linear(16, 16), nn.Linear(16, 16)
    def forward(self, x): return self.near(x) + pool.submit({far}, x).result()
other = nn.Linear(16, 16)
model = Two(); opt = torch.optim.SGD(model.parameters(), 0.01); x = torch.randn(8, 16)
while True:
    opt.zero_grad(); model(x).sum().backward(); opt.step()
"""
    for far, told in (("self.far", True), ("other", False)):
        trial = start(str(script(source.replace("{far}", far))))
        trial.wait_ready()
        seen = trial.look("modules", 1, 2)
        rows = {row["name"]: row["flops"] for row in seen["modules"]}
        assert ("another thread" in seen["flops_unknown"]) == told and rows["near"] == 2 * 8 * 16 * 16
        assert rows["Two"] == (None if told else 2 * 8 * 16 * 16)


RECOMPUTED = """
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
weights = list(model.parameters())
opt = torch.optim.SGD(weights, 1e-3)
x = torch.randn(8, 16, requires_grad=True)
def block(layer, h, reentrant=False): return checkpoint(lambda h: layer(h).sin().cos(), h, use_reentrant=reentrant)
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w):
        ctx.save_for_backward(h, w)
        return h @ w
    @staticmethod
    def backward(ctx, g):
        h, w = ctx.saved_tensors
        return g @ w.t(), h.t() @ g
while True:
    opt.zero_grad()
    {step}
    opt.step()
"""


@pytest.mark.parametrize(("step", "again"), [
    ("block(model[1], block(model[0], x, True), True).sum().backward()", 2),        # each with a backward pass of its own inside
    ("checkpoint(lambda h: linear(linear(h, weights[0]).sin(), weights[1]).cos(), x, use_reentrant=False).sum().backward()", 2),
    ("for w, g in zip(weights, torch.autograd.grad(block(model[1], block(model[0], x)).sum(), weights)): w.grad = g", 2),
    ("g, = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True); g.square().sum().backward()", 0),
    ("g, = torch.autograd.grad(block(model, x).sum(), x, create_graph=True); g.sum().backward()", 4),     # once in each pass
    ("Own.apply(Own.apply(x, weights[0]), weights[1]).sum().backward()", 0),
], ids=["reentrant", "no module", "autograd.grad", "penalty", "penalty with recomputation", "custom Function"])
def test_recomputation_is_told_apart_from_gradients(start, script, step, again):
    trial = start(str(script(RECOMPUTED.replace("{step}", step))))
    trial.wait_ready()
    seen, product = trial.look("modules", 1, 2), 2 * 8 * 16 * 16
    assert seen["recomputed_flops"] == again * product < seen["flops"]
    assert {row["flops"] for row in seen["modules"]} <= {None, product, 2 * product}


def test_torch_func_inside_of_a_step_goes_on(start, script):
    """It refuses where hooks watch what is saved, as ours do."""
    trial = start(str(script("""
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
net = nn.Linear(4, 1); opt = torch.optim.SGD(net.parameters(), 0.01)
def loss(p, x): return functional_call(net, p, (x,)).square().mean()
def adapted(p, x):
    g = grad(loss)(p, x)
    return loss({k: p[k] - 0.1 * g[k] for k in p}, x)
while True:
    opt.zero_grad()
    vmap(adapted, in_dims=(None, 0))(dict(net.named_parameters()), torch.randn(3, 8, 4)).mean().backward()
    opt.step()
""")))
    trial.wait_ready()
    assert trial.look("modules", 1, 2)["saved_bytes"] > 0


def test_a_module_with_a_product_that_nobody_can_count_has_no_count(start, script):
    trial = start(str(script("""
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self): super().__init__(); self.pair = nn.Bilinear(8, 8, 8); self.head = nn.Linear(8, 4)
    def forward(self, x): return self.head(self.pair(x, x))
model = Net(); opt = torch.optim.SGD(model.parameters(), 0.01); x = torch.randn(16, 8)
while True:
    opt.zero_grad(); model(x).sum().backward(); opt.step()
""")))
    trial.wait_ready()
    seen = trial.look("modules", 1, 2)
    rows = {row["name"]: row["flops"] for row in seen["modules"]}
    assert rows == {"Net": None, "pair": None, "head": 2 * 16 * 8 * 4}
    assert "aten::_trilinear" in seen["flops_unknown"] and seen["flops_left_out"] == ["aten::_trilinear"]


def test_what_is_kept_for_the_backward_pass(plain):
    """ReLU keeps its output, which the next layer keeps as its input; the first layer its own input; the loss two."""
    seen, rows = plain["modules"], by_name(plain["modules"])
    assert rows["body.1"]["memory_bytes"] == 4 * 8 * 32
    assert seen["saved_bytes"] >= 4 * 8 * 32 + 4 * 8 * 16


def test_memory_by_line(plain):
    """All of it is kept by lines of the script, most by the one that holds the widest layer."""
    seen = plain["modules"]
    assert all(os.path.basename(file) == "train.py" and library == "" for file, _, _, library, *_ in seen["memory_lines"])
    assert sum(line[-1] for line in seen["memory_lines"]) == seen["saved_bytes"]
    sizes = [line[-1] for line in seen["memory_lines"]]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] >= 4 * 8 * 32


# -- compiled ----------------------------------------------------------------------------------------------------------

COMPILED = MODEL + """
torch._dynamo.config.recompile_limit = 10**6
compiled = torch.compile(model, backend="eager")
class Named(nn.Module):
    def __init__(self): super().__init__(); self.inner = model
    def forward(self, x, name): return self.inner(x) * (2 if name == "" else 1)
named = torch.compile(Named(), backend="eager")
n = 0
while True:
    n += 1
    opt.zero_grad(); {forward}.pow(2).mean().backward(); opt.step()
"""


@pytest.mark.slow
def test_looking_at_compiled_code_does_not_compile_it_again(record):
    seen, _ = record(COMPILED.format(forward="compiled(x)"))
    assert (seen["compiler"]["compiled"], seen["compiler"]["recompiles"], seen["compiler"]["graph_breaks"]) == (True, 0, 0)


@pytest.mark.slow
def test_recompilations_are_counted_with_their_reason(record):
    seen, _ = record(COMPILED.format(forward="named(x, str(n))"))
    assert seen["compiler"]["recompiles"] == 3 and seen["compiler"]["compile_s"] > 0
    assert "name == " in seen["compiler"]["recompile_reasons"][0]


@pytest.mark.slow
def test_graph_breaks_have_their_line(record, tmp_path):
    seen, _ = record(MODEL + """
class Looks(nn.Module):
    def __init__(self): super().__init__(); self.inner = model
    def forward(self, x):
        x = self.inner.body(x)
        if x.sum() > 1e9: x = x / 2     # the break
        return self.inner.head(x)
looks = torch.compile(Looks(), backend="eager")
while True:
    opt.zero_grad(); looks(x).pow(2).mean().backward(); opt.step()
""")
    line = 1 + (tmp_path / "train.py").read_text().splitlines().index("        if x.sum() > 1e9: x = x / 2     # the break")
    assert seen["compiler"]["graph_breaks"] == 1 and seen["compiler"]["recompiles"] == 0
    assert f"train.py:{line}: " in seen["compiler"]["graph_break_reasons"][0]


def test_a_trace_that_cannot_be_written_ends_nothing(record):
    """As on a full disk. Bytecode that Python caches would be cut short as well, and stay so."""
    found, trial = record("import resource, sys\nsys.dont_write_bytecode = True\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n" + PLAIN)
    assert found["problem"].startswith("the trace could not be written") and "trace" not in found
    assert len(trial.run_block(0, 2).timed_ns) == 2


def test_nothing_of_a_trace_is_left_where_its_gzip_does_not_fit(tmp_path, monkeypatch):
    """Half of one would be taken for a trace, and diagnosed."""
    def full(source, target, length):
        target.write(source.read(length))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "trace-rank0.json").write_text('{"traceEvents": []}' + " " * 100_000, encoding="utf-8")
    monkeypatch.setattr(profiling.shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        profiling._compressed(str(tmp_path / "trace-rank0.json"))
    assert list(tmp_path.iterdir()) == []
