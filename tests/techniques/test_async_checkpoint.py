"""The technique `async-checkpoint` in the house: facts, options, frameworks, ranks, `saturate run`."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import types

import pytest
import torch

from saturate.agent.context import Context
from saturate.errors import RecipeError
from saturate.records.facts import Evidence, Facts
from saturate.records.options import options_from
from saturate.techniques import async_checkpoint
from saturate.testing import conformance

RECIPE = '[[technique]]\nid = "async-checkpoint"\noptions = { mode = "thread" }\n'


def test_conformance():
    conformance.require(async_checkpoint)


def test_eligibility_needs_a_save():
    assert "no checkpoint was saved" in async_checkpoint.eligible(Facts()).reason
    found = async_checkpoint.eligible(Facts(saves=2, save_bytes=20_000_000, save_s=0.5))
    assert found and found.reason == "2 save(s) of 10.0 MB took 0.250 s each"
    assert not async_checkpoint.active(Evidence(), async_checkpoint.Options()).active
    opened = async_checkpoint.eligible(Facts(saves_into_files=3))
    assert not opened and "3 save(s) went into files that the script opened itself" in opened.reason


def test_an_unknown_mode_is_refused():
    with pytest.raises(RecipeError, match="option mode of async-checkpoint: expected one of 'auto', .*, got 'fast'"):
        options_from(async_checkpoint, {"mode": "fast"})


TRAIN = """
    import sys, torch
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(8):
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
            open("latest", "w").write(str(step))
    print("done", torch.load("model.pt")["step"])
    sys.exit(4)
"""


def test_under_run(tmp_path, script, clean_environment):
    """Standard output and exit code are the command's own; one line on standard error says what was saved."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    done = subprocess.run([sys.executable, "-m", "saturate", "run", "recipe.toml", "--", sys.executable, script(TRAIN)],
                          cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("done 7\n", 4), done.stderr
    assert "saturate: async-checkpoint: 4 checkpoint(s) in 4 file(s)" in done.stderr
    assert torch.load(tmp_path / "model.pt")["step"] == 7 and (tmp_path / "latest").read_text() == "7"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "model.pt", "recipe.toml", "train.py"]


OWN_SAVE = """
    import torch
    model = torch.nn.Linear(300, 300)
    saved = []

    def save(state, path):
        saved.append(path)
        torch.serialization.save(state, path)

    torch.save = save
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save({"step": step, "model": model.state_dict()}, f"model{step}.pt")
    print(len(saved), torch.load("model3.pt")["step"])
"""


NAMED_SAVE = """
    import torch
    from torch import save
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        model(torch.randn(4, 1000)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        save({"step": step, "model": model.state_dict()}, f"model{step}.pt")
"""


@pytest.mark.parametrize("technique", ["async-checkpoint", "incremental-checkpoint"])
def test_a_save_that_was_taken_by_name_is_seen(tmp_path, script, clean_environment, technique):
    (tmp_path / "recipe.toml").write_text(f'[[technique]]\nid = "{technique}"\n')
    done = subprocess.run([sys.executable, "-m", "saturate", "run", "recipe.toml", "--", sys.executable, script(NAMED_SAVE)],
                          cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and f"saturate: {technique.split('-')[0]}" in done.stderr, done.stderr


@pytest.mark.parametrize("technique", ["async-checkpoint", "incremental-checkpoint"])
def test_a_torch_save_of_the_script_s_own_is_called_for_what_the_script_saves(tmp_path, script, clean_environment, technique):
    (tmp_path / "recipe.toml").write_text(f'[[technique]]\nid = "{technique}"\n')
    done = subprocess.run([sys.executable, "-m", "saturate", "run", "recipe.toml", "--", sys.executable, script(OWN_SAVE)],
                          cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("4 3\n", 0), done.stderr


def test_facts_of_a_trial(start, script):
    """Saves are seen in the unchanged workload, and the technique proves itself in a trial."""
    endless = TRAIN.replace("range(8)", "range(10**9)")
    trial = start(str(script(endless)))
    trial.wait_ready()
    trial.run_block(1, 20)
    facts = trial.ask("facts")
    known = {field.name for field in dataclasses.fields(Facts)}
    assert facts["saves"] >= 10 and facts["save_bytes"] > facts["saves"] * 1_000_000 and facts["save_s"] > 0
    assert set(facts) <= known
    trial.stop()
    from saturate.trial import launch

    chosen = launch.Chosen("async-checkpoint", async_checkpoint.__name__, async_checkpoint.__file__, {"mode": "auto"}, {})
    trial = start(str(script(endless)), techniques=[chosen])
    trial.wait_ready()
    for _ in range(3):
        trial.run_block(1, 10)
        trial.freeze()
        trial.thaw()
    proof = async_checkpoint.active(Evidence(notes=trial.ask("evidence")["notes"]), async_checkpoint.Options())
    assert proof.active and "checkpoint(s)" in proof.evidence


RANKS = """
    import os, sys, time, torch, torch.distributed as dist
    from torch.distributed import barrier
    from saturate.agent.context import Context
    from saturate.checkpoints import persist
    from saturate.techniques import async_checkpoint

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    write = persist.write
    def slowly(descriptor, buffers):
        time.sleep(1.0 if rank else 0.0)
        return write(descriptor, buffers)
    persist.write = slowly
    if "--guarded" in sys.argv:
        async_checkpoint.apply(Context(torch), async_checkpoint.Options("thread"))
    else:
        from saturate.techniques import async_checkpoint as bare
        bare._BARRIERS = ()
        bare.apply(Context(torch), bare.Options("thread"))
    torch.save({"rank": rank, "x": torch.ones(1000)}, f"shard{rank}.pt")
    if "--scattered" in sys.argv:       # rank 1 tells the others
        dist.scatter_object_list([None], ["saved", "saved"] if rank else None, src=1)
    else:
        barrier() if "--named" in sys.argv else dist.barrier()
    if not rank:
        os.symlink("shard1.pt", "latest")
        print(int(os.path.exists("shard1.pt")), flush=True)
    dist.barrier()
    time.sleep(0.5)     # gloo's threads let go of their last work a moment later; a process that ends before them is aborted (PyTorch #179291)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("guarded, how", [(True, ""), (True, "--named"), (True, "--scattered"), pytest.param(False, "", marks=pytest.mark.slow)])
def test_a_barrier_means_durable_on_every_rank(tmp_path, script, clean_environment, guarded, how):
    """Rank 1's disk is slow. Without the guard on barriers, rank 0 moves `latest` too early, and that is seen."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone",
               str(script(RANKS)), *["--guarded"] * guarded, *[how] * bool(how)]
    done = subprocess.run(command, cwd=tmp_path, env={**clean_environment, "OMP_NUM_THREADS": "1"}, capture_output=True,
                          text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(int(guarded))
    assert torch.load(tmp_path / "latest")["rank"] == 1


SHARDS = """
    import os, sys, time, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.nn.parallel import DistributedDataParallel
    from saturate.agent.context import Context
    from saturate.techniques import async_checkpoint

    if "--ranks" in sys.argv:
        dist.init_process_group("gloo")
    ranks = dist.is_initialized()
    rank = dist.get_rank() if ranks else 0
    context = Context(torch)
    async_checkpoint.apply(context, async_checkpoint.Options("thread"))
    torch.manual_seed(0)
    bare = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 300))
    model = DistributedDataParallel(bare) if ranks else bare
    optimizer = torch.optim.AdamW(model.parameters())
    kept, losses, results, blocked = {}, {}, {}, []

    class Odd:
        def __deepcopy__(self, memo):
            raise TypeError("not to be copied")

        def __reduce__(self):
            return str, ("odd",)

    for step in range(9):
        loss = model(torch.randn(8, 300)).square().mean()
        loss.backward()                                             # all-reduces of its own, meanwhile
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            kept[step] = {name: value.clone() for name, value in bare.state_dict().items()}
            losses[step] = loss.detach().clone()
            extra = {"step": step, "list": [step]}
            if not rank and step == 5:
                extra["odd"] = Odd()                                # of one rank: all of them save plainly
            results[step] = dcp.save({"model": bare.state_dict(), "loss": loss, "extra": extra}, checkpoint_id=f"step{step}")
            extra["list"].append("late")
            for parameter in bare.parameters():
                parameter.data.mul_(1.5)
            if not rank and step == 5:
                os.symlink("step5", "latest")
                assert os.path.exists("step5/.metadata")
    names = set(results[8].state_dict_metadata)
    assert "model.0.weight" in names, names
    if ranks:
        dist.barrier()
    for step, wanted in kept.items():
        found = {"model": {name: torch.zeros_like(value) for name, value in wanted.items()}, "loss": torch.zeros(()), "extra": {"step": 0, "list": []}}
        dcp.load(found, checkpoint_id=f"step{step}")
        assert all(torch.equal(value, wanted[name]) for name, value in found["model"].items()), step
        assert found["loss"] > 0 if ranks else torch.equal(found["loss"], losses[step])     # of one rank, torch chooses which
        assert found["extra"] == {"step": step, "list": [step]}, found["extra"]
    if ranks:
        dist.barrier()
    old = {name for name in os.listdir("step8") if name.endswith(".distcp")}
    for writer in (None, dcp.FileSystemWriter("step8", thread_count=2)):         # over an old one, twice
        given = {"storage_writer": writer, "planner": dcp.DefaultSavePlanner()} if writer else {"checkpoint_id": "step8"}
        wanted = {name: value.clone() for name, value in bare.state_dict().items()}
        later = dcp.save({"model": bare.state_dict()}, **given)
        assert type(later).__name__ == "Later"
        for parameter in bare.parameters():
            parameter.data.mul_(1.5)
        assert later.state_dict_metadata
        if ranks:
            dist.barrier()
        names = {name for name in os.listdir("step8") if name.endswith(".distcp")}
        assert names and not names & old, (names, old)
        old = names
        found = {"model": {name: torch.zeros_like(value) for name, value in wanted.items()}}
        dcp.load(found, checkpoint_id="step8")
        assert all(torch.equal(value, wanted[name]) for name, value in found["model"].items())
        if ranks:
            dist.barrier()
    if ranks:
        time.sleep(0.5)     # see above
        dist.destroy_process_group()
    print(context.notes)
"""


@pytest.mark.parametrize("ranks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_distributed_checkpoints(tmp_path, script, clean_environment, ranks):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"] if ranks else []
    done = subprocess.run([sys.executable, *launcher, str(script(SHARDS)), *(["--ranks"] if ranks else [])], cwd=tmp_path,
                          env={**clean_environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "not to be copied" in done.stderr
    assert done.stdout.count("2 checkpoint(s) in 4 file(s)") == 1 + ranks       # ranks may write into one line


OWN_CHECKPOINTS = """
    import os, time, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from saturate.agent.context import Context
    from saturate.techniques import async_checkpoint

    context = Context(torch)
    async_checkpoint.apply(context, async_checkpoint.Options("thread"))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    kinds = [type(dcp.save({"x": torch.full((4,), float(rank))}, checkpoint_id=f"own{step}", use_collectives=False)).__name__ for step in range(2)]
    kinds.append(type(dcp.save({"x": torch.zeros(4)}, checkpoint_id="shared", no_dist=False)).__name__)
    context.undo()
    dist.barrier()
    assert {"__0.metadata", "__1.metadata"} <= set(os.listdir("own1")), os.listdir("own1")
    found = {"x": torch.full((4,), -1.0)}
    dcp.load(found, checkpoint_id="own1")
    dist.barrier()
    time.sleep(0.5)     # see above
    dist.destroy_process_group()
    print(f"<{rank}{found['x'].tolist()}{kinds}>")
"""


def test_ranks_that_each_save_a_checkpoint_of_their_own_keep_what_is_theirs(tmp_path, script, clean_environment):
    """`use_collectives=False` was taken for a default, and of each name the item of one rank was saved."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script(OWN_CHECKPOINTS))],
                          cwd=tmp_path, env={**clean_environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        assert f"<{rank}{[float(rank)] * 4}['Metadata', 'Metadata', 'Later']>" in done.stdout, done.stdout


FAILS = """
    import errno, os, sys, time, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import save
    from saturate.agent.context import Context
    from saturate.checkpoints import persist
    from saturate.techniques import async_checkpoint

    assert not dist.is_initialized()
    context = Context(torch)
    async_checkpoint.apply(context, async_checkpoint.Options("thread"))     # as when the script is about to make its group
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {"x": torch.arange(1000.0)}
    write, failures = persist.write, [OSError(errno.ENOSPC, "No space left on device")]
    def failing(descriptor, buffers):
        if not rank and failures:
            raise failures.pop()
        return write(descriptor, buffers)
    persist.write = failing
    torch.save({"rank": rank}, f"meta{rank}.pt")        # fails on one rank alone
    outcomes = []
    for step in (1, 2):
        state["x"] += 1
        try:
            later = save(state, checkpoint_id=f"step{step}")        # taken by name
            outcomes.append(type(later).__name__)
        except OSError as error:
            outcomes.append(error.errno)
    context.undo()
    found = {"x": torch.zeros(1000)}
    dcp.load(found, checkpoint_id="step2")
    assert torch.equal(found["x"], state["x"]) and not os.path.exists("step1"), os.listdir()
    dist.barrier()
    time.sleep(0.5)
    dist.destroy_process_group()
    print(f"<{rank}{outcomes}>")
"""


def test_a_save_that_failed_on_one_rank_ends_the_next_one_on_all(tmp_path, script, clean_environment):
    """One rank raised alone, after all had agreed: the others waited for it, or wrote shards of another step into its checkpoint."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script(FAILS))],
                          cwd=tmp_path, env={**clean_environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"<0[{errno.ENOSPC}, 'Later']>" in done.stdout and f"<1[{errno.EIO}, 'Later']>" in done.stdout


def test_a_distributed_checkpoint_that_memory_does_not_hold_twice_is_saved_plainly(tmp_path, monkeypatch, capsys):
    from torch.distributed import checkpoint as dcp

    from saturate.checkpoints import distributed

    monkeypatch.setattr(distributed, "available_bytes", lambda: 5000)
    context, state, planner = Context(torch), {"x": torch.arange(1000.0)}, dcp.DefaultSavePlanner()
    async_checkpoint.apply(context, async_checkpoint.Options("thread"))
    try:
        found = dcp.save(state, checkpoint_id=tmp_path / "short")
        assert type(found).__name__ == "Metadata" and "saved plainly: MemoryError: 4,000 bytes" in capsys.readouterr().err
        monkeypatch.undo()
        found = dcp.save(state, checkpoint_id=tmp_path / "run" / "step1", planner=planner)
        assert type(found).__name__ == "Later" and os.listdir(tmp_path / "run") == ["step1"], "who lists its parent waits"
        assert not hasattr(planner, "state_dict"), "the script's planner holds no copy"
        caching = dcp.DefaultSavePlanner(enable_plan_caching=True)
        assert type(dcp.save(state, checkpoint_id=tmp_path / "cached", planner=caching)).__name__ == "Metadata"
    finally:
        context.undo()


def test_ranks_that_mp_spawn_started_share_the_memory(tmp_path, monkeypatch, capsys):
    """Each took all of it for its own: no variable says how many there are."""
    from torch.distributed import checkpoint as dcp

    from saturate import ranks
    from saturate.checkpoints import distributed

    monkeypatch.setattr(distributed, "available_bytes", lambda: 4 * 4000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    context = Context(torch)
    async_checkpoint.apply(context, async_checkpoint.Options("thread"))
    try:
        for size, kind in ((2, "Later"), (3, "Metadata")):
            monkeypatch.setattr(ranks, "group", lambda size=size: types.SimpleNamespace(get_world_size=lambda: size))
            assert type(dcp.save({"x": torch.arange(1000.0)}, checkpoint_id=tmp_path / f"of{size}")).__name__ == kind
    finally:
        context.undo()
    assert "saved plainly: MemoryError: 4,000 bytes" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="needs safetensors")
def test_safetensors(tmp_path):
    from safetensors.torch import load_file, save_file

    opened = sys.modules["safetensors"].safe_open
    wanted = {"a": torch.randn(100, 100), "b": torch.arange(7)}
    save_file(wanted, tmp_path / "plain.safetensors", metadata={"format": "pt"})
    context = Context(torch)
    for mode in ("thread", "process", "sync"):
        async_checkpoint.apply(context, async_checkpoint.Options(mode))
        save_file(wanted, tmp_path / "a.safetensors", metadata={"format": "pt"})
        before = wanted["a"].clone()
        wanted["a"].add_(1)
        found = load_file(tmp_path / "a.safetensors")
        assert torch.equal(found["a"], before) and torch.equal(found["b"], wanted["b"])
        context.undo()
        assert sys.modules["safetensors.torch"].safe_open is opened
    save_file(found, tmp_path / "plain.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()


LATE = """
    import sys, torch
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())

    def save(path):
        from safetensors.torch import save_file
        save_file(model.state_dict(), path)

    for step in range(4):
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        save("model.safetensors")
"""


@pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="needs safetensors")
def test_what_is_imported_at_the_first_save_is_seen(tmp_path, script, clean_environment):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    done = subprocess.run([sys.executable, "-m", "saturate", "run", "recipe.toml", "--", sys.executable, script(LATE)],
                          cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "saturate: async-checkpoint: 4 checkpoint(s) in 4 file(s)" in done.stderr, done.stderr


SPAWNED = """
    import os, sys, time, torch, torch.distributed as dist, torch.multiprocessing as mp

    def train(rank, rendezvous):
        dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=2)
        model = torch.nn.Linear(30, 30)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            model(torch.randn(4, 30)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert step or "torch.distributed.checkpoint" not in sys.modules
            from torch.distributed.checkpoint import save
            later = save(model.state_dict(), checkpoint_id=f"step{step}")
        dist.barrier()
        time.sleep(0.5)     # see above
        dist.destroy_process_group()
        print(f"<{rank}{type(later).__name__}>", flush=True)

    if __name__ == "__main__":
        mp.spawn(train, args=(os.path.abspath("rendezvous"),), nprocs=2)
"""


def test_distributed_checkpoints_that_are_imported_at_the_first_save_are_seen(tmp_path, script, clean_environment):
    """Whoever started the ranks: `mp.spawn` sets no variable by which they could be known before their group exists."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    done = subprocess.run([sys.executable, "-m", "saturate", "run", "recipe.toml", "--", sys.executable, script(SPAWNED)],
                          cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "<0Later>" in done.stdout and "<1Later>" in done.stdout, done.stdout


NEVER = """
    import sys, torch
    from saturate.agent.context import Context
    from saturate.techniques import async_checkpoint

    finders, context = list(sys.meta_path), Context(torch)
    async_checkpoint.apply(context, async_checkpoint.Options("thread"))
    assert "torch.distributed.checkpoint" not in sys.modules
    if "taken-back" in sys.argv:
        context.undo()
    import importlib.util
    assert importlib.util.find_spec("torch.distributed.checkpoint").origin.endswith("__init__.py")      # looked for, and not imported
    from torch.distributed import checkpoint
    assert (checkpoint.save.__module__, sys.meta_path) == ("torch.distributed.checkpoint.state_dict_saver", finders)
    print(checkpoint.save.__code__.co_qualname.startswith("Shards."))
"""


@pytest.mark.parametrize("taken_back", [False, True])
def test_distributed_checkpoints_are_not_imported_for_those_who_use_none(script, clean_environment, taken_back):
    """Neither where a launcher says that there are ranks."""
    done = subprocess.run([sys.executable, script(NEVER), *["taken-back"] * taken_back], env={**clean_environment, "WORLD_SIZE": "2", "RANK": "0"},
                          capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == (str(not taken_back), 0), done.stderr


FRAMEWORKS = {
    "lightning": """
        import torch, lightning as L
        class Net(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(32, 32)
            def training_step(self, batch, index):
                return self.layer(batch[0]).square().mean()
            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters())
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 32)), batch_size=8)
        trainer = L.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                            callbacks=[L.pytorch.callbacks.ModelCheckpoint(dirpath="out", save_last=True)])
        trainer.fit(Net(), data)
        found = torch.load("out/last.ckpt", weights_only=False)
        assert found["epoch"] == 2, found["epoch"]
        L.Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_progress_bar=False,
                  enable_checkpointing=False).fit(Net(), data, ckpt_path="out/last.ckpt", weights_only=False)
        print("ok")
    """,
    "transformers": """
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
        data = [{"input_ids": torch.arange(16) % 64, "labels": torch.arange(16) % 64} for _ in range(32)]
        arguments = TrainingArguments("out", max_steps=8, save_steps=2, save_total_limit=2, per_device_train_batch_size=4,
                                      report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=100)
        Trainer(model, arguments, train_dataset=data).train()
        Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=True)
        import os
        assert sorted(os.listdir("out")) == ["checkpoint-6", "checkpoint-8"], os.listdir("out")
        GPT2LMHeadModel.from_pretrained("out/checkpoint-8")
        print("ok")
    """,
    "accelerate": """
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(6):
            accelerator.backward(model(torch.randn(4, 64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                accelerator.save_state("out")
                kept = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            model.weight.zero_()
        accelerator.load_state("out")
        assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
        print("ok")
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks(name, tmp_path, clean_environment):
    """Where the frameworks are installed: they save, rotate, resume, and the technique was at work."""
    if subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True).returncode:
        pytest.skip(f"needs {name}")
    (tmp_path / "train.py").write_text(textwrap.dedent(FRAMEWORKS[name]))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    done = subprocess.run([sys.executable, "-m", "saturate", "run", "recipe.toml", "--", sys.executable, "train.py"],
                          cwd=tmp_path, env={**clean_environment, **{k: v for k, v in os.environ.items() if k == "PYTHONPATH"}},
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("ok"), done.stderr[-3000:]
    assert "saturate: async-checkpoint: " in done.stderr, done.stderr[-3000:]
    assert json.dumps(done.stderr).count("saved plainly") == 0
