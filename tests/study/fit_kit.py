"""Drives `saturate fit` as a user does, in a process of its own, on scripts whose memory is known."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tune_kit import Folder

import saturate
from saturate.records.fit import Fit

#: saturate with shorter proofs and fewer rounds: what is tested is the search.
_SATURATE = f"""
import sys
sys.path.insert(0, {str(Path(saturate.__file__).parents[1])!r})
from saturate.cli import main
from saturate.study import fit_search, fit_throughput
fit_search.PROOF_STEPS, fit_search.MORE_STEPS = 8, 2
fit_throughput.ROUNDS = fit_throughput.LEAST_ROUNDS = 4
fit_throughput.BLOCK_S, fit_throughput.MOST_SIZES = 0.02, 3
sys.exit(main.main(sys.argv[1:]))
"""

#: A sample of n KiB keeps about nine times n KiB for the backward pass, and the peak holds some more.
TRAINING = """
import sys, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
torch.manual_seed(0)
KIB = 256

class Rows(Dataset):
    def __len__(self): return 4096
    def __getitem__(self, index): return torch.full((KIB * 256,), index / 4096)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(1)) for _ in range(8))
    def forward(self, rows):
        for scale in self.scales:
            rows = torch.tanh(rows * scale)
        return rows.mean()

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def step(rows):
    loss = model(rows)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@dataclass
class Fitted:
    code: int
    stdout: str
    stderr: str

    @property
    def found(self) -> Fit:
        """The one object on standard output."""
        assert self.stdout.count("\n") == 1, f"not one line: {self.stdout!r}\n{self.stderr}"
        return msgspec.json.decode(self.stdout, type=Fit)


class FitFolder(Folder):
    """A user's folder with a script. Large blocks are mapped by themselves unless `heaps`: glibc moves the size from which it
    does so, and from its heaps the peaks of one batch differ from run to run by more than the sizes that are tested for."""

    heaps = False

    def environment(self) -> dict[str, str]:
        return super().environment() | ({} if self.heaps else {"MALLOC_MMAP_THRESHOLD_": "131072"})

    def fit_command(self, *options: str, argv: tuple[str, ...] = ()) -> list[str]:
        return [sys.executable, "-c", _SATURATE, "fit", "--json", "--timeout", "60s", *options, "--", *(argv or (sys.executable, "train.py"))]

    def begin(self, *options: str, argv: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        return subprocess.Popen(self.fit_command(*options, argv=argv), cwd=self.path, env=self.environment(),
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def fit(self, *options: str, argv: tuple[str, ...] = ()) -> Fitted:
        with self.begin(*options, argv=argv) as process:
            stdout, stderr = process.communicate(timeout=660)      # behind the default budget
        return Fitted(process.returncode, stdout, stderr)
