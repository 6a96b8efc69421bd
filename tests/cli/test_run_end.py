"""What `saturate run` says of a script that ends before its techniques have their turn."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, torch
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    opt.zero_grad(); net(torch.ones(8, 4)).sum().backward(); opt.step()
print("done")
"""


def test_a_script_of_few_steps(script, tmp_path, clean_environment):
    (tmp_path / "recipe.toml").write_text('schema = 1\n[[technique]]\nid = "micro-batch"\n')
    path = str(script(SCRIPT))
    for steps, words in ((0, ""), (2, "saturate: micro-batch did not take effect: the script ended"), (40, "")):
        done = subprocess.run([sys.executable, "-m", "saturate", "run", "recipe.toml", "--", sys.executable, path, str(steps)],
                              cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
        assert done.stderr.startswith(words) and done.stderr.count("did not take effect") == bool(words), done.stderr


SHORT = """
import sys, torch
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
plain = torch.nn.Linear.forward
def forward(self, x):
    if len(x) > 4 and step >= int(sys.argv[1]):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return plain(self, x)
torch.nn.Linear.forward = forward
for step in range(8):
    opt.zero_grad(); net(torch.ones(8, 4)).sum().backward(); opt.step()
print("done")
"""


def test_memory_that_runs_out_in_the_first_steps(script, tmp_path, clean_environment):
    """What acts from the first forward on goes on; what does not says that it had no turn, and what to do."""
    path = str(script(SHORT))
    for technique, step in (("dynamic-batch", 0), ("dynamic-batch", 1), ("micro-batch", 0), ("micro-batch", 2)):
        (tmp_path / "recipe.toml").write_text(f'schema = 1\n[[technique]]\nid = "{technique}"\n')
        done = subprocess.run([sys.executable, "-m", "saturate", "run", "recipe.toml", "--", sys.executable, path, str(step)],
                              cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=120)
        if technique == "dynamic-batch":
            assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
            assert "Linear ran out of memory; batches of this size run in 2 chunks" in done.stderr
        else:
            assert done.returncode == 1
            assert "micro-batch did not take effect: the script ran out of memory" in done.stderr
            assert "`saturate fit` finds a batch that fits" in done.stderr
