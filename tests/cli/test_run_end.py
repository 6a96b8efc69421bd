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
