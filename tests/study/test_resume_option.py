"""The argument that makes a script resume, as its source names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from saturate.study.resume_option import PATH, resume_words, source_of

SAME = [["out/a.pt", "out/last.pt"], ["out/b.pt", "out/last.pt"]]

SOURCES = {
    "a path": ("p.add_argument('-r', '--resume', type=str)", ["--resume", "out/last.pt"]),
    "a flag": ("p.add_argument('--resume', action='store_true')", ["--resume"]),
    "a flag with its opposite": ("p.add_argument('--continue', action=argparse.BooleanOptionalAction)", ["--continue"]),
    "stored is no flag": ("p.add_argument('--resume', action='store')", ["--resume", "out/last.pt"]),
    "click": ("@click.option('--resume-from', default=None)\ndef main(resume_from): pass", ["--resume-from", "out/last.pt"]),
    "a flag of click": ("@click.option('--resume/--no-resume', is_flag=True)\ndef main(resume): pass", ["--resume"]),
    "typer": ("def main(restart: bool = Option(False, '--restart')): pass", ["--restart", "out/last.pt"]),
    "the surer one": ("p.add_argument('--checkpoint')\np.add_argument('--resume')", ["--resume", "out/last.pt"]),
    "another name": ("p.add_argument('--load_checkpoint')", ["--load_checkpoint", "out/last.pt"]),
    "when to save": ("p.add_argument('--checkpoint-every')\np.add_argument('--checkpoint_dir')", []),
    "what not to do": ("p.add_argument('--no-resume')", []),
    "a name that is made": ("p.add_argument(f'--{name}')\np.add_argument(name)\nadd_argument()", ["--resume", "out/last.pt"]),
    "takes no arguments": ("import torch\ntorch.save({}, 'a.pt')", []),
    "takes them by itself": ("import sys\npath = sys.argv[1]", ["--resume", "out/last.pt"]),
    "declares them elsewhere": ("from options import parse\nparse()", ["--resume", "out/last.pt"]),
    "a field that becomes a flag": (
        "from transformers import HfArgumentParser\n@dataclass\nclass More:\n    resume: bool = field(default=False)", ["--resume"]),
    "a field that becomes an option": (
        "import tyro\n@dataclasses.dataclass(frozen=True)\nclass Config:\n    restore: str | None = None\ntyro.cli(Config)",
        ["--restore", "out/last.pt"]),
    "a field of the library's own": ("from transformers import HfArgumentParser\n@dataclass\nclass More:\n    rows: int = 3\n",
                                     ["--resume", "out/last.pt"]),
    "transformers' own": ("from transformers import HfArgumentParser\nlast = training_args.resume_from_checkpoint",
                          ["--resume_from_checkpoint", "out/last.pt"]),
    "a parameter of fire": ("import fire\ndef train(lr: float, resume_from: str = None): pass\nfire.Fire({'run': train})",
                            ["--resume_from", "out/last.pt"]),
    "a parameter of typer": ("import typer\napp = typer.Typer()\n@app.command()\ndef main(restore_from: str, restart: bool = False): pass",
                             ["--restore-from", "out/last.pt"]),
    "a parameter of what is not called": ("import fire\ndef load(resume_from): pass\ndef train(lr): pass\nfire.Fire(train)",
                                          ["--resume", "out/last.pt"]),
    "LightningCLI": ("LightningCLI(Model, seed_everything_default=42)", ["--ckpt_path", "out/last.pt"]),
    "LightningCLI without subcommands": ("cli = LightningCLI(Model, run=False)\ncli.trainer.fit(cli.model)", ["--resume", "out/last.pt"]),
    "a configurator": ("init_from = 'scratch'\nexec(open('configurator.py').read())\nif init_from == 'resume': pass", ["--init_from=resume"]),
    "a value of an argument": ("p.add_argument('--init_from')\nargs = p.parse_args()\nif args.init_from == 'resume': pass", ["--init_from=resume"]),
    "a value of no argument": ("p.add_argument('--lr')\nif mode == 'resume': pass", []),
    "a field of no parser's": ("@dataclass\nclass State:\n    resume: bool = False", []),
    "no Python": ("exec python train.py --resume \"$1\"", ["--resume", "out/last.pt"]),
    "nothing": ("", ["--resume", "out/last.pt"]),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_option_is_read_from_the_source(name: str) -> None:
    source, words = SOURCES[name]
    assert resume_words(source, SAME) == words


def test_a_file_is_named_only_when_every_save_writes_that_one() -> None:
    for saved in ([], [["a.pt"], ["b.pt"]], [["a.pt", "b.pt"]], [["out/last.pt.tmp"]]):
        assert resume_words("", saved) == ["--resume", PATH], saved
    assert resume_words("", [["a.pt"]]) == resume_words("", [["a.pt.tmp", "a.pt"]]) == ["--resume", "a.pt"]


def test_a_script_that_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    assert source_of(None) == source_of(tmp_path / "gone.py") == source_of(tmp_path) == ""
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\nx = 1\n")
    assert "x = 1" in source_of(tmp_path / "latin.py")
    assert source_of(tmp_path / "latin.py", limit_bytes=4) == ""
