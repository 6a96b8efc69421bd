"""The example scripts run as their README says: offline, with writes only below their output folder."""

import importlib.util
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
README = (EXAMPLES / "README.md").read_text()
COMMANDS = {Path(word).stem: line.split()
            for line in re.findall(r"^ {4}((?:python|torchrun) .*)$", README, re.MULTILINE)
            for word in line.split() if word.startswith("examples/")}

TINY_GPT = ["--layers", "2", "--width", "64", "--context", "32", "--batch", "16", "--log-every", "1"]
SHORT = {                                         # a handful of steps, on little data
    "char_gpt": [*TINY_GPT, "--steps", "4", "--eval-every", "2"],
    "photo_resnet": ["--epochs", "1", "--patches", "6"],
    "lightning_digits": ["--epochs", "1", "--steps", "4"],
    "hf_trainer": ["--steps", "2", "--characters", "100000", "--batch", "2", "--vocabulary", "500"],
    "accelerate_lm": ["--steps", "2", "--words", "20000", "--batch", "4"],
    "ddp_digits": ["--epochs", "2", "--width", "16"],
    "digits_cnn": ["--epochs", "1", "--width", "8"],
    "text_transformer": ["--epochs", "1", "--steps", "2", "--layers", "1", "--width", "16"],
    "speculative_toy": [*TINY_GPT, "--steps", "4", "--draft-width", "32", "--rehearsals", "1"],
}
NEEDS = {
    "char_gpt": ["torch"],
    "photo_resnet": ["torch", "PIL", "skimage", "sklearn"],
    "lightning_digits": ["torch", "lightning", "sklearn"],
    "hf_trainer": ["torch", "transformers", "tokenizers", "accelerate"],
    "accelerate_lm": ["torch", "accelerate"],
    "ddp_digits": ["torch", "sklearn"],
    "digits_cnn": ["torch", "sklearn"],
    "text_transformer": ["torch"],
    "speculative_toy": ["torch"],
}

# An audit hook sees what Python code of any library asks of a socket. It refuses, and leaves a trace that a library
# which catches the refusal cannot hide.
GUARD = """
import os, socket, sys

LOCAL = {None, "", b"", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::", socket.gethostname()}

def guard(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    else:
        return
    if host not in LOCAL:
        with open(os.environ["NETWORK_LOG"], "a") as log:
            log.write(f"{event} {host}\\n")
        raise OSError(f"no network in this test: {host}")

sys.addaudithook(guard)
"""


class Place:
    """A working directory, an empty home and a process environment without a network."""

    def __init__(self, root: Path):
        self.cwd, self.home, self.log = root / "cwd", root / "home", root / "network.log"
        for folder in (self.cwd, self.home, root / "tmp", root / "guard"):
            folder.mkdir()
        (root / "guard" / "sitecustomize.py").write_text(GUARD)
        # HF_HUB_OFFLINE must not be what keeps a script off the network.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
        self.env = kept | {
            "HOME": str(self.home), "TMPDIR": str(root / "tmp"), "PYTHONPATH": str(root / "guard"),
            "NETWORK_LOG": str(self.log), "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }

    def python(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *arguments], cwd=self.cwd, env=self.env, timeout=300,
                              capture_output=True, text=True)

    def run(self, name: str, *arguments: str, under: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
        """Run the README's command of an example with more arguments, behind the words of `under`."""
        missing = [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]
        if missing:
            pytest.skip(f"not installed: {', '.join(missing)}")
        program, *rest = COMMANDS[name]
        start = ["-m", "torch.distributed.run"] if program == "torchrun" else []
        front = [*under, sys.executable] if under else []
        rest = [str(EXAMPLES.parent / word) if word.startswith("examples/") else word for word in rest]
        done = self.python(*front, *start, *rest, *arguments)
        if start and "terminate called without an active exception" in done.stderr:
            # gloo's threads let go of their last work a moment after its waiter; an interpreter that ends meanwhile is
            # aborted (PyTorch #179291). The example's barrier makes that rare (without it: 3 of 12 on a loaded
            # machine, with it: 0 of 23), not impossible.
            done = self.python(*front, *start, *rest, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def printed(self, name: str, *arguments: str) -> str:
        return self.run(name, *arguments).stdout


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?<!validation )loss (\S+)", output)]


def test_every_example_has_a_command_and_does_not_know_the_tool():
    scripts = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert set(COMMANDS) == set(scripts) == set(SHORT)
    for name, text in scripts.items():
        assert "saturate" not in text
        assert f'"--output", type=Path, default=Path("runs/{name}")' in text
        assert " ".join(COMMANDS[name]) in text, "the docstring shows the command of the README"


@pytest.mark.parametrize("name", SHORT)
def test_runs_offline_and_writes_only_its_output(place, name):
    found = losses(place.printed(name, *SHORT[name], "--output", "else/where"))
    assert found and all(math.isfinite(loss) for loss in found)
    assert not place.log.exists(), place.log.read_text()
    assert [*place.cwd.iterdir(), *place.cwd.glob("*/*")] == [place.cwd / "else", place.cwd / "else" / "where"]
    assert any((place.cwd / "else" / "where").iterdir())
    assert list(place.home.iterdir()) == []


@pytest.mark.parametrize("name", ["lightning_digits", pytest.param("hf_trainer", marks=pytest.mark.slow), "accelerate_lm", "ddp_digits"])
def test_a_recipe_acts_in_every_framework(place, name):
    """What did not take effect, or is not in effect when the script ends, `run` says on stderr."""
    place.env["TMPDIR"] = tempfile.gettempdir()         # one with room for the sockets of workers
    steps = {"lightning_digits": ["--epochs", "1", "--steps", "16"], "ddp_digits": ["--epochs", "2", "--width", "16"]}.get(
        name, [*SHORT[name], "--steps", "60" if name == "hf_trainer" else "16"])
    plain = losses(place.printed(name, *steps))
    done = place.run(name, *steps, under=("-m", "saturate", "run", str(EXAMPLES / "recipe.toml"), "--"))
    found = losses(done.stdout)
    said = done.stderr.replace("saturate: fused-optimizer did not take effect: not_applied: AdamW is fused already", "" if name == "hf_trainer" else "?")
    assert "saturate:" not in said, done.stderr
    assert len(found) == len(plain) and found != plain and found == pytest.approx(plain, abs=0.1), "in bfloat16, on the same data"


def test_the_guard_sees_a_connection(place):
    attempt = "import socket\ntry:\n    socket.create_connection(('192.0.2.1', 80), 1)\nexcept OSError:\n    pass"
    assert place.python("-c", attempt).returncode == 0
    assert "192.0.2.1" in place.log.read_text()


def test_char_gpt_learns_and_repeats_itself_under_a_seed(place):
    first = losses(place.printed("char_gpt", *TINY_GPT, "--steps", "80"))
    assert len(first) == 80
    assert first[-1] < first[0] - 1.0
    assert losses(place.printed("char_gpt", *TINY_GPT, "--steps", "80")) == first
    assert losses(place.printed("char_gpt", *TINY_GPT, "--steps", "1", "--seed", "2")) != first[:1]


def test_photo_resnet_learns(place):
    found = losses(place.printed("photo_resnet", "--epochs", "3", "--patches", "40"))
    assert len(found) == 6                         # three epochs of 15 steps; each tenth is printed
    assert sum(found[-2:]) / 2 < found[0] - 0.5


def test_photo_resnet_goes_on_from_its_checkpoint(place):
    """Also where the cutting of patches was killed once: the final name of their folder was not yet taken."""
    torch = pytest.importorskip("torch")
    output = place.cwd / "runs" / "photo_resnet"
    (output / "tmpkilled" / "patches" / "train" / "00").mkdir(parents=True)
    place.run("photo_resnet", "--epochs", "1", "--patches", "6")
    assert len(list(output.glob("patches/train/*/*.jpg"))) == 12 * 6
    before = torch.load(output / "last.pt")
    printed = place.printed("photo_resnet", "--epochs", "2", "--patches", "6")
    after = torch.load(output / "last.pt")
    assert (before["epoch"], after["epoch"]) == (0, 1)
    assert re.findall(r"epoch +(\d+)  step", printed) == ["1"]
    assert [saved["schedule"]["last_epoch"] for saved in (before, after)] == [2, 4], "the schedule goes on too"
    assert not torch.equal(before["model"]["0.weight"], after["model"]["0.weight"])


GIVES = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("example", sys.argv[1])
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
model, batches, seen = example.build(), example.loader(), []

def run(*inputs):
    seen.append(inputs[0])
    return model(*inputs)

with torch.no_grad():
    right = example.score(run)
    answer = model(*batches[0])
rows = lambda tensors: {row.numpy().tobytes() for tensor in tensors for row in tensor}
used, calibration = rows(seen), rows(batch[0] for batch in batches)
shared = len(used & calibration) > 0.01 * len(calibration)         # lines may differ in words that nobody knows
print(len(right), set(map(type, right)) == {bool}, model.training, shared, len(answer) == len(batches[0][0]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name, count", [("digits_cnn", 1024), ("text_transformer", 2048)])
def test_a_trained_example_gives_its_model_batches_and_score(place, name, count):
    """Of data that is apart: what calibrates is not what scores."""
    place.run(name, *SHORT[name])
    done = place.python("-c", GIVES, str(EXAMPLES / f"{name}.py"))
    assert done.stdout.split() == [str(count), "True", "False", "False", "True"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name, arguments, drop", [
    ("char_gpt", ["--steps", "60"], 1.5),
    ("photo_resnet", ["--epochs", "3"], 1.0),
    ("lightning_digits", ["--epochs", "8"], None),
    ("ddp_digits", ["--epochs", "4"], None),
    ("hf_trainer", ["--steps", "30"], None),
    ("accelerate_lm", ["--steps", "30"], 1.0),
    ("digits_cnn", ["--epochs", "8"], None),
    ("text_transformer", ["--epochs", "3"], None),
])
def test_learns_at_its_default_size(place, name, arguments, drop):
    """Up to a minute each on one core. Where one batch's loss says little, the score on held-out data counts."""
    output = place.printed(name, *arguments)
    if drop is not None:
        found = losses(output)
        assert found[-1] < found[0] - drop
    elif name == "hf_trainer":
        assert float(re.findall(r"validation loss (\S+)", output)[-1]) < math.log(2000) - 1
    else:
        assert float(re.findall(r"val\w*[ _]accuracy[ │]+([\d.]+)", output)[-1]) > 0.6         # chance: 0.1
