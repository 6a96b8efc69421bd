"""`saturate run` with micro-steps that are merged: the same training, also where it goes on from a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

SCRIPT = """
import json, sys, torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

class Texts(Dataset):
    rows = torch.randint(0, 50, (110, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}

class Counted(Trainer):
    calls = 0

    def compute_loss(self, *args, **kwargs):
        Counted.calls += 1
        return super().compute_loss(*args, **kwargs)

set_seed(0)
config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
arguments = TrainingArguments(sys.argv[1], max_steps=int(sys.argv[2]), per_device_train_batch_size=2, gradient_accumulation_steps=4,
                              learning_rate=1e-3, lr_scheduler_type="constant", report_to="none", save_steps=20, logging_steps=1,
                              disable_tqdm=True, use_cpu=True, seed=0)
trainer = Counted(model=GPT2LMHeadModel(config), train_dataset=Texts(), args=arguments)
trainer.train(resume_from_checkpoint=len(sys.argv) > 3 or None)
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(json.dumps({"losses": losses, "calls": Counted.calls, "weight": float(sum(p.double().sum() for p in trainer.model.parameters()))}))
"""


def test_a_run_and_how_it_goes_on(script, tmp_path, clean_environment):
    """It steps 20 times, and 20 times more from there: in the middle of an epoch of 14 updates. No jump of the loss is seen, although
    each backward pass begins with four times as much from the fifth update on."""
    path = str(script(SCRIPT))
    (tmp_path / "recipe.toml").write_text('schema = 1\n[[technique]]\nid = "merged-micro-batches"\n[technique.options]\nfactor = 4\n')
    merged = [sys.executable, "-m", "saturate", "run", "--on-divergence", "stop", "recipe.toml", "--", sys.executable, path]

    def trained(*command: str) -> dict:
        done = subprocess.run(command, cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "saturate:" not in done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    plain = trained(sys.executable, path, "plain", "40")
    first, rest = trained(*merged, "merged", "20"), trained(*merged, "merged", "40", "resume")
    assert plain["calls"] == 158, "40 updates, two of which are the last of an epoch and have three"
    assert first["calls"] < 75 and rest["calls"] < 75, "some are for the comparison of both ways"
    assert first["losses"] == pytest.approx(plain["losses"][:20], rel=1e-4)
    assert rest["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert rest["weight"] == pytest.approx(plain["weight"], rel=1e-4)
