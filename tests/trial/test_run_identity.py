"""`saturate run` in front of a command is the command: same bytes, same exit, same signals, same view of the world."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from saturate.records import recipe as recipes

SATURATE = [sys.executable, "-m", "saturate"]
TECHNIQUES = ["bf16-autocast", "channels-last", "fused-optimizer"]

_PROBE = """
import os, sys
print("argv", sys.argv)
print("path", [p for p in sys.path])
print("main", __name__, sys.modules["__main__"].__dict__.get("__file__"), globals().get("__spec__") and __spec__.name)
print("torch", "torch" in sys.modules, "saturate" in sys.builtin_module_names)
print("customized", "sitecustomize" in sys.modules)
print("cwd", os.getcwd(), os.listdir("."))
print("stdin", sys.stdin.read())
print("stdout", sys.stdout.encoding, sys.stdout.line_buffering, sys.flags)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """Write a recipe of these techniques outside the working directory."""

    def write(*ids: str) -> Path:
        path = tmp_path / f"recipe-{len(ids)}.toml"
        if ids:
            recipes.write(path, recipes.Recipe(techniques=[recipes.Entry(id=identity) for identity in ids]))
        else:
            path.write_text("", encoding="utf-8")
        return path

    return write


class Place:
    """A working directory, and commands that run in it with and without saturate."""

    def __init__(self, folder: Path, environment: dict[str, str], recipe: Callable[..., Path]):
        self.folder = folder
        self.environment = environment
        self.recipe = recipe

    def write(self, source: str, name: str = "train.py") -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return name

    def plain(self, *command: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(command, cwd=self.folder, env=self.environment, input=stdin, capture_output=True, timeout=120)

    def under(self, ids: list[str], *command: str, stdin: bytes = b"", options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[bytes]:
        return self.plain(*SATURATE, "run", *options, str(self.recipe(*ids)), "--", *command, stdin=stdin)

    def same(self, *command: str, stdin: bytes = b"", code: int | None = None, stderr: bool = True) -> bytes:
        """The command's output, after it was the same with an empty recipe and with a full one."""
        plain = self.plain(*command, stdin=stdin)
        if code is not None:
            assert plain.returncode == code, plain.stderr
        for ids in ([], ["zero-grad-none"]):
            ours = self.under(ids, *command, stdin=stdin)
            assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout), (ids, ours.stderr)
            if stderr:
                assert ours.stderr == plain.stderr, ids
        return plain.stdout


@pytest.fixture
def place(tmp_path: Path, clean_environment: dict[str, str], recipe: Callable[..., Path]) -> Place:
    folder = tmp_path / "work"
    folder.mkdir()
    return Place(folder, clean_environment, recipe)


# -- what the script sees ----------------------------------------------------------------------------------------------


def test_script_module_and_command_line_source(place: Place) -> None:
    place.write(_PROBE)
    place.write(_PROBE, "pkg/__main__.py")
    place.write("", "pkg/__init__.py")
    arguments = ["--", "-x", "a b", "é", "--help", ""]
    assert b"'a b'" in place.same(sys.executable, "train.py", *arguments, stdin=b"one\ntwo\xc3\xa9")
    place.same(sys.executable, "-m", "pkg", *arguments)
    place.same(sys.executable, "-c", _PROBE, *arguments)
    place.same(sys.executable, "-u", "-W", "error::UserWarning", "train.py")
    place.same(sys.executable, "-", stdin=_PROBE.encode())


def test_exec_relative_to_the_working_directory(place: Place) -> None:
    place.write("value = 41\n", "configurator.py")
    place.write("exec(open('configurator.py').read()); print(value + 1)")
    assert place.same(sys.executable, "train.py") == b"42\n"


def test_shell_script_and_pipe(place: Place) -> None:
    """Python ignores SIGPIPE, and what is ignored stays so in the next program."""
    place.write(_PROBE)
    place.write(f'grep -E "Sig(Ign|Blk)" /proc/self/status; umask; {sys.executable} train.py "$@" | tail -n 3; exit 7\n', "train.sh")
    assert b"SigIgn" in place.same("bash", "train.sh", "a", "b c", code=7)


def test_environment_with_an_empty_recipe(place: Place) -> None:
    for language in ({}, {"LANG": "C"}, {"LANG": "C.UTF-8"}, {"LC_CTYPE": "C"}, {"LC_CTYPE": "POSIX", "LANG": "C.UTF-8"}):
        place.environment = {**{k: v for k, v in place.environment.items() if not k.startswith(("LANG", "LC_"))}, **language}
        assert place.under([], "env", "-0").stdout == place.plain("env", "-0").stdout


def test_console_script(place: Place) -> None:
    name = place.write(f"#!{sys.executable}\n{_PROBE}", "bin/train")
    os.chmod(place.folder / name, 0o755)
    place.environment = {**place.environment, "PATH": f"{place.folder / 'bin'}{os.pathsep}{place.environment['PATH']}"}
    place.same("train", "x")


@pytest.mark.parametrize("options", [
    ["PYTHONPATH=lib"], ["A=1", "PYTHONPATH=lib:more"], ["PYTHONPATH="], ["-u", "PYTHONPATH"], ["--unset=PYTHONPATH", "B=2"],
    ["-i", "HOME=/"], ["-", "PYTHONPATH=lib"], ["-C", "lib", "-u", "SATURATE_PLAN"], ["A=1"],
])
def test_env_in_front_of_the_command(place: Place, options: list[str]) -> None:
    """It may set or clear what carries the agent, which must get through, and show as little as ever."""
    place.write(_PROBE, "lib/train.py")
    script = "train.py" if "-C" in options else "lib/train.py"
    place.environment["PYTHONPATH"] = str(place.folder)
    assert b"argv" in place.same("env", *options, sys.executable, script)
    broken = place.recipe("zero-grad-none")
    for front in (["env"], ["nice", "env"]):
        asked = place.plain(*SATURATE, "run", str(broken), "--", *front, *options, sys.executable, "-c",
                            "import sys; print(getattr(sys, '_saturate_awake', False))")
        assert asked.stdout == b"True\n", asked.stderr


def test_torch_is_not_imported_before_the_script_does(place: Place) -> None:
    place.write("import sys; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'msgspec', 'rich')])")
    assert place.same(sys.executable, "train.py") == b"[]\n"


def test_nothing_is_loaded_before_the_script(place: Place) -> None:
    """Helper processes of a training, say, lie beside modules of their own that are called like those of the standard library.
    What is part of the interpreter itself is never looked for in a folder."""
    place.write("import sys; print(sorted(set(sys.modules) - set(sys.builtin_module_names)))")
    place.same(sys.executable, "train.py")
    names = ["json", "types", "enum", "functools", "operator", "random", "saturate"]
    for name in names:
        place.write(f"def mine(): return {name!r}\n", f"prep/{name}.py")
    place.write("".join(f"import {name}; print({name}.mine())\n" for name in names), "prep/make.py")
    assert place.same("bash", "-c", f"cd prep && {sys.executable} make.py").split() == [name.encode() for name in names]


def test_a_module_of_the_users_that_is_called_saturate(place: Place) -> None:
    """It is theirs, whether torch is imported before or after it; the agent says that it cannot be there as well."""
    place.write("def mine(): return 5\n", "prep/saturate.py")
    for source in ("import saturate\nimport torch\n", "import torch\nimport saturate\n"):
        place.write(source + "print(saturate.mine())", "prep/train.py")
        ours = place.under(["zero-grad-none"], sys.executable, "prep/train.py")
        assert (ours.returncode, ours.stdout) == (0, b"5\n")
        assert str(place.folder / "prep/saturate.py").encode() in ours.stderr and b"nothing was changed" in ours.stderr
    no_text = os.fsdecode(b"caf\xe9")
    place.write("", f"{no_text}/saturate.py")
    place.write("import torch\n", f"{no_text}/train.py")
    assert b"/caf\\udce9/saturate.py, and both cannot be loaded" in place.under(["zero-grad-none"], sys.executable, f"{no_text}/train.py").stderr
    strict = place.under(["zero-grad-none"], sys.executable, "prep/train.py", options=("--strict",))
    assert (strict.returncode, strict.stdout) == (3, b"")


def test_what_lies_in_the_working_directory_is_not_run(place: Place) -> None:
    """By saturate's own process, that is; it leaves standard input alone, too."""
    for name in ("csv", "platform", "shutil", "hashlib", "tomllib", "msgspec"):
        place.write(f"open('ran-{name}', 'w')\n", f"{name}.py")
    place.write("import sys; print(sys.stdin.read())", "scripts/train.py")
    assert place.same(sys.executable, "scripts/train.py", stdin=b"one\ntwo") == b"one\ntwo\n"
    assert not list(place.folder.glob("ran-*"))


def test_other_versions_of_our_libraries_in_pythonpath(place: Place) -> None:
    for name in ("msgspec", "tomlkit", "rich", "pynvml"):
        place.write("X = 1\n", f"lib/{name}.py")
    place.write("import msgspec, rich; print(msgspec.X, rich.X)")
    place.environment = {**place.environment, "PYTHONPATH": "lib"}
    assert place.same(sys.executable, "train.py") == b"1 1\n"
    unusable = place.plain(*SATURATE, "bench", "artifact/")      # looks for modules in the user's order
    assert unusable.returncode == 3 and b"error[E300] saturate cannot use the library" in unusable.stderr
    assert b"help: check PYTHONPATH" in unusable.stderr and b"Traceback" not in unusable.stderr


def test_a_working_directory_that_was_removed(place: Place) -> None:
    recipe = place.recipe("zero-grad-none")
    for front in ("", f"{' '.join(SATURATE)} run {recipe} -- "):
        done = place.plain("bash", "-c", f"mkdir -p gone; cd gone; rmdir ../gone; {front}{sys.executable} -c 'print(1)'")
        assert (done.returncode, done.stdout, done.stderr) == (0, b"1\n", b"")


# -- how it ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source, code", [
    ("", 0), ("raise SystemExit(1)", 1), ("import os; os._exit(7)", 7), ("raise SystemExit('a text')", 1), ("1 / 0", 1),
    ("import sys; sys.stdout.write('no newline'); sys.exit(3)", 3),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
])
def test_exit(source: str, code: int, place: Place) -> None:
    place.write(source)
    place.same(sys.executable, "train.py", code=code)


@pytest.mark.parametrize("ids", [
    ["zero-grad-none", "bf16-autocast", "fused-optimizer", "gc-freeze"], ["async-checkpoint"], ["incremental-checkpoint"],
    ["optimizer-in-backward"], ["loader-workers"], ["dataset-cache"], ["micro-batch"]])
def test_a_training_that_ctrl_c_ended_died_of_it(ids: list[str], place: Place) -> None:
    """A shell's loop goes on after a program with another status. Python forgets why it ends when a handler of the exit makes
    a dataclass or a named tuple, as the import of a module may."""
    place.write("""
import signal, torch
net, data = torch.nn.Linear(4, 1), torch.utils.data.TensorDataset(torch.ones(256, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for number, (x,) in enumerate(torch.utils.data.DataLoader(data, batch_size=8)):
    opt.zero_grad(); net(x).sum().backward(); opt.step()
    if number in (10, 20):
        torch.save([net.state_dict(), opt.state_dict()], "kept.pt")
signal.raise_signal(signal.SIGINT)
""")
    done = place.under(ids, sys.executable, "train.py")
    assert done.returncode == -signal.SIGINT, done.stderr
    assert b"KeyboardInterrupt" in done.stderr and (place.folder / "kept.pt").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("ids", [[], ["zero-grad-none"]])
def test_signals_reach_the_command(number: signal.Signals, ids: list[str], place: Place) -> None:
    """The process that was started is the one that trains, and gets the signal itself."""
    place.write("import time; print('up', flush=True); time.sleep(600)")
    statuses = []
    for front in ([], [*SATURATE, "run", str(place.recipe(*ids)), "--"]):
        process = subprocess.Popen([*front, sys.executable, "train.py"], cwd=place.folder, env=place.environment,
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        time.sleep(0.05)
        process.send_signal(number)
        statuses.append(process.wait(timeout=60))
        process.stdout.close()
    assert statuses == [-number, -number]


# -- other customisations, other options -------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["", "raise ImportError('on purpose')", "raise ModuleNotFoundError('x', name='x')"])
def test_the_users_own_sitecustomize_runs_once(ending: str, place: Place) -> None:
    place.write(f"import sys; sys.custom = 1\nif sys.orig_argv[1] == 'train.py': sys.stdout.write('custom\\n')\n{ending}\n", "own/sitecustomize.py")
    place.write("import sys; print(sys.custom, 'sitecustomize' in sys.modules)")
    place.environment = {**place.environment, "PYTHONPATH": "own"}      # saturate's own Python runs it as well
    assert place.same(sys.executable, "train.py", stderr=False).count(b"custom") == 1


@pytest.mark.parametrize(("ending", "said"), [
    ("raise RuntimeError('on purpose')", b"on purpose"), ("raise ImportError('on purpose')", b"on purpose"), ("1/0", b"division by zero")])
def test_a_sitecustomize_that_fails_keeps_the_agent_not_out(ending: str, said: bytes, place: Place) -> None:
    place.write(f"import sys; sys.custom = 1\n{ending}\n", "own/sitecustomize.py")
    place.write("import sys; print(sys.custom, getattr(sys, '_saturate_awake', False))")
    place.environment = {**place.environment, "PYTHONPATH": "own"}
    plain, ours = place.plain(sys.executable, "train.py"), place.under(["zero-grad-none"], sys.executable, "train.py")
    assert (plain.stdout, ours.stdout) == (b"1 False\n", b"1 True\n")
    assert said in ours.stderr


@pytest.mark.parametrize("given", [":src", "src:", ":", "src::other", ""])
def test_an_empty_entry_among_the_places_of_modules_is_the_working_directory(given: str, place: Place) -> None:
    place.write("value = 1", "pkg/__init__.py")
    place.write("import sys; print(sys.path)\ntry: import pkg; print(pkg.value)\nexcept ImportError: print('none')", "tools/train.py")
    place.environment = {**place.environment, "PYTHONPATH": given}
    assert (b"1" if given else b"none") in place.same(sys.executable, "tools/train.py").splitlines()


@pytest.mark.parametrize("option", ["-I", "-E", "-S", "-Es"])
def test_options_that_keep_the_agent_out_are_named(option: str, place: Place) -> None:
    place.write("print('trained')")
    ours = place.under(["zero-grad-none"], sys.executable, option, "train.py")
    assert (ours.returncode, ours.stdout) == (0, b"trained\n")
    assert b"E330" in ours.stderr and f"python {option[:2]}".encode() in ours.stderr
    strict = place.under(["zero-grad-none"], sys.executable, option, "train.py", options=("--strict",))
    assert strict.returncode == 3 and not strict.stdout


def test_an_older_plan_in_the_environment_does_no_harm(place: Place) -> None:
    place.write("print('trained')")
    plain = place.plain(sys.executable, "train.py")
    place.environment = {**place.environment, "SATURATE_PLAN": "/nowhere/plan.json"}
    for ids in ([], ["zero-grad-none"]):
        ours = place.under(ids, sys.executable, "train.py")
        assert (ours.returncode, ours.stdout) == (0, plain.stdout)


# -- while it trains ---------------------------------------------------------------------------------------------------

_TRAIN = """
import copy, io, pickle, sys
import torch, torch.nn as nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 1)
    def forward(self, x): return self.head(torch.relu(self.conv(x)).mean((2, 3)))
def main():
    model = Net(); optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(8, 3, 12, 12), torch.randn(8, 1)
    for update in range(UPDATES):
        optimizer.zero_grad(); loss = nn.functional.mse_loss(model(x), y); LOSS; loss.backward(); optimizer.step()
    return model, optimizer, x
"""


def train(updates: int = 30, loss: str = "pass", rest: str = "") -> str:
    return _TRAIN.replace("UPDATES", str(updates)).replace("LOSS", loss) + "if __name__ == '__main__':\n" + textwrap.indent(
        textwrap.dedent(f"model, optimizer, x = main()\n{rest}\nprint('done')\n"), "    ")


def test_models_stay_what_they_are(place: Place) -> None:
    """Copies, pickles, state dicts, types: under a recipe as without."""
    rest = """
print(type(model).__name__, isinstance(model, Net), sorted(model.state_dict()), sorted(model.__dict__.get("_forward_hooks", {})))
print(sorted(optimizer.state_dict()["state"][0]), model(x).dtype, {p.dtype for p in model.parameters()})
twin = copy.deepcopy(model)
with torch.no_grad():
    for p in twin.parameters(): p.zero_()
print(twin(x).abs().sum().item(), model(x).abs().sum().item() > 0)
again = pickle.loads(pickle.dumps(model))
print(type(again) is Net, all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters())))
file = io.BytesIO(); torch.save(model, file); file.seek(0)
print(type(torch.load(file, weights_only=False)) is Net, b"saturate" in file.getvalue())
file = io.BytesIO(); torch.save(model.state_dict(), file); print(Net().load_state_dict(torch.load(io.BytesIO(file.getvalue()))))
fresh = torch.optim.AdamW(twin.parameters(), lr=1e-3); fresh.load_state_dict(optimizer.state_dict())
twin(x).sum().backward(); fresh.step()
"""
    place.write(train(rest=rest))
    plain = place.plain(sys.executable, "train.py")
    assert plain.returncode == 0, plain.stderr
    ours = place.under(TECHNIQUES, sys.executable, "train.py")
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, plain.stdout, b"")


def test_the_recipe_really_acts(place: Place) -> None:
    """The test above would pass if nothing were applied."""
    place.write(train(rest="print(optimizer.param_groups[0]['fused'], model.conv.weight.is_contiguous(), 'forward' in vars(model))"))
    assert place.plain(sys.executable, "train.py").stdout == b"None True False\ndone\n"
    assert place.under(TECHNIQUES, sys.executable, "train.py").stdout == b"True False True\ndone\n"


@pytest.mark.parametrize("method", ["spawn", "fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_children_are_left_alone(method: str, place: Place) -> None:
    rest = f"""
import multiprocessing as mp
with mp.get_context({method!r}).Pool(2) as pool: print(pool.map(abs, [-1, -2, -3]))
from torch.utils.data import DataLoader
print(sum(len(b) for b in DataLoader(list(range(40)), batch_size=4, num_workers=2, multiprocessing_context={method!r})))
"""
    place.write(train(rest=rest))
    # Python 3.11's tracker of semaphores races with a pool's shutdown and then warns of a leak, with and without us.
    place.environment["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"
    plain = place.plain(sys.executable, "train.py")
    assert plain.returncode == 0, plain.stderr
    ours = place.under(TECHNIQUES, sys.executable, "train.py")
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, plain.stdout, plain.stderr)


def test_divergence_warns_or_stops(place: Place) -> None:
    place.write(train(60, "loss = loss * float('nan') if update >= 33 else loss"))
    warned = place.under(["zero-grad-none"], sys.executable, "train.py")
    assert (warned.returncode, warned.stdout) == (0, b"done\n")
    assert b"the loss became nan at step 34" in warned.stderr and warned.stderr.count(b"the loss became") == 1
    stopped = place.under(["zero-grad-none"], sys.executable, "train.py", options=("--on-divergence", "stop"))
    assert (stopped.returncode, stopped.stdout) == (5, b"") and b"at step 34" in stopped.stderr
    unwatched = place.under([], sys.executable, "train.py", options=("--on-divergence", "stop"))
    assert (unwatched.returncode, unwatched.stdout) == (0, b"done\n")
    assert b"nothing watches its loss" in unwatched.stderr     # and does not seem to
    assert b"saturate" not in place.under([], sys.executable, "train.py").stderr


def test_a_healthy_run_is_quiet(place: Place) -> None:
    place.write(train(200))
    ours = place.under(TECHNIQUES, sys.executable, "train.py")
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, b"done\n", b"")


def test_the_workloads_environment_needs_none_of_our_packages(place: Place) -> None:
    """saturate may live elsewhere: in the workload its dependencies cannot be imported, nor is it on the path."""
    blocked = "import sys\nfor name in ('msgspec', 'rich', 'tomlkit', 'pynvml'): sys.modules[name] = None\n"
    place.write(blocked + train(rest="print('forward' in vars(model))"))
    ours = place.under(TECHNIQUES, sys.executable, "train.py")
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, b"True\ndone\n", b"")


def test_ranks_of_torchrun(place: Place) -> None:
    source = """
    import os, torch, torch.nn as nn, torch.distributed as dist
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(12):
        optimizer.zero_grad(); model(torch.randn(4, 8)).mean().backward(); optimizer.step()
    open(f"rank{dist.get_rank()}", "w").write(str(optimizer.param_groups[0]["fused"]))
    import time; time.sleep(0.5)      # gloo's threads let go of their last work a moment later; a process that ends before them is aborted (PyTorch #179291)
    dist.destroy_process_group()
    raise SystemExit(0)
    """
    place.write(source)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    ours = place.under(["fused-optimizer"], *command)
    assert (ours.returncode, ours.stdout) == (0, b""), ours.stderr
    assert [(place.folder / f"rank{rank}").read_text() for rank in (0, 1)] == ["True", "True"]


def test_weights_are_converted_before_the_buckets_of_ranks_are_laid_out(place: Place) -> None:
    """What is applied to the model once the step is known had its turn when it was constructed as well."""
    source = """
    import torch, torch.nn as nn, torch.distributed as dist
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 1)).double())
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(12):
        optimizer.zero_grad(); loss = model(torch.randn(4, 3, 6, 6).double()).square().mean(); loss.backward(); optimizer.step()
    weight = model.module[0].weight
    open(f"rank{dist.get_rank()}", "w").write(f"{loss.item():.9f} {weight.is_contiguous()}")
    import time; time.sleep(0.5)
    dist.destroy_process_group()
    raise SystemExit(0)
    """
    place.write(source)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    seen = []
    for recipe in ([], ["channels-last"]):
        ours = place.under(recipe, *command)
        assert (ours.returncode, ours.stdout) == (0, b"") and b"did not take effect" not in ours.stderr, ours.stderr
        seen.append([(place.folder / f"rank{rank}").read_text().split() for rank in (0, 1)])
    plain, tuned = seen
    assert [loss for loss, _ in plain] == [loss for loss, _ in tuned]
    assert [laid for _, laid in (*plain, *tuned)] == ["True", "True", "False", "False"]


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_launch(place: Place) -> None:
    place.write(train(rest="print(optimizer.param_groups[0]['fused'])"))
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "train.py"]
    ours = place.under(["fused-optimizer"], *launcher)
    assert (ours.returncode, ours.stdout) == (0, b"True\ndone\n"), ours.stderr
    place.write(_PROBE)
    place.same(*launcher, "a b", "--flag", stdin=b"one")


def test_workers_that_compile_are_left_alone(place: Place) -> None:
    """Inductor's import torch in an environment like the script's own."""
    seen = "sorted(name for name in __import__('sys').modules if name.startswith('saturate')), 'torch' in __import__('sys').modules"
    place.write(train(rest=f"""
from torch._inductor.compile_worker.subproc_pool import SubprocPool
pool = SubprocPool(1)
print(pool.submit(eval, {seen!r}).result())
pool.shutdown()
print(optimizer.param_groups[0]['fused'])
"""))
    ours = place.under(["fused-optimizer"], sys.executable, "train.py")
    assert (ours.returncode, ours.stdout) == (0, b"([], True)\nTrue\ndone\n") and b"saturate:" not in ours.stderr, ours.stderr


@pytest.fixture
def uv_run() -> list[str]:
    """`uv run` of this interpreter's environment, without a project and without a network."""
    uv = pytest.importorskip("uv", reason="uv is not installed")
    return [uv.find_uv_bin(), "run", "--offline", "--no-project", "--python", sys.executable]


def test_uv_run(place: Place, uv_run: list[str]) -> None:
    place.write(_PROBE)
    assert b"'a b'" in place.same(*uv_run, "train.py", "a b", "--flag", stdin=b"one")
    place.same(*uv_run, "python", "-c", "raise SystemExit(7)", code=7)
    place.write(train(rest="print(optimizer.param_groups[0]['fused'])"))
    ours = place.under(["fused-optimizer"], *uv_run, "python", "train.py")
    assert (ours.returncode, ours.stdout, b"saturate:" in ours.stderr) == (0, b"True\ndone\n", False), ours.stderr


@pytest.mark.parametrize("kind", ["module", "console script", "shell script", "accelerate launch", "uv run"])
def test_the_step_is_found_however_the_training_is_started(kind: str, place: Place, start: Callable, request: pytest.FixtureRequest) -> None:
    source = train(updates=10**6)
    path = place.folder.parent / "train.py"         # where trials of tests begin
    path.write_text(f"#!{sys.executable}\n{source}", encoding="utf-8")
    path.chmod(0o755)
    shell = path.with_name("train.sh")
    shell.write_text(f'{sys.executable} train.py "$@"\n', encoding="utf-8")
    if kind == "accelerate launch" and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    command = {
        "module": lambda: ["-m", "train"], "console script": lambda: ["./train.py", "x"], "shell script": lambda: ["bash", str(shell), "x"],
        "accelerate launch": lambda: [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "train.py"],
        "uv run": lambda: [*request.getfixturevalue("uv_run"), "train.py"],
    }[kind]()
    if kind == "console script":        # found on the PATH, as installed ones are
        path.rename(path.with_name("my-trainer"))
        command = [str(path.with_name("my-trainer")), "x"]
    assert start(*command).wait_ready()["motif"].endswith("AdamW.step")
