"""What a save stores is what was there when it was called, whatever happens next, and loads as it always did."""

from __future__ import annotations

import collections
import copy
import random
import threading

import pytest
import torch
from saving_kit import Disk, applied, same, state

from saturate.checkpoints import staging
from saturate.records.facts import Evidence
from saturate.techniques import async_checkpoint


@pytest.mark.parametrize("mode", ["thread", "process", "sync", "auto"])
def test_a_save_is_loaded_as_it_was(tmp_path, mode):
    path = tmp_path / "model.pt"
    with applied(mode):
        for seed in range(4):
            wanted = state(seed)
            torch.save(wanted, path)
            assert same(torch.load(path), wanted)
    assert same(torch.load(path), state(3))
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]


def changes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: dict) -> None:
    """Everything that a script may do right after a save."""
    model(torch.randn(4, 16)).sum().backward()          # moves the running statistics too
    optimizer.step()
    for parameter in model.parameters():
        parameter.data.zero_()
    with torch.no_grad():
        model[1].running_mean.fill_(7.0)
    extra["list"].append("late")
    extra["nested"]["value"] = None
    extra["array"].fill_(-1)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_nothing_that_comes_later_gets_in(tmp_path, mode, monkeypatch):
    disk = Disk(monkeypatch)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16))
    optimizer = torch.optim.AdamW(model.parameters())
    changes(model, optimizer, {"list": [], "nested": {}, "array": torch.zeros(1)})
    extra = {"list": [1], "nested": {"value": 2}, "array": torch.arange(3), "random": random.getstate()}
    with applied(mode):
        disk.hold()
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra, "module": model}
        wanted = copy.deepcopy(whole)
        torch.save(whole, tmp_path / "a.pt")
        changes(model, optimizer, extra)
        disk.go()
        found = torch.load(tmp_path / "a.pt", weights_only=False)
    assert str(found["optimizer"]) == str(wanted["optimizer"]) and str(found["extra"]) == str(wanted["extra"])
    for name, tensor in wanted["model"].items():
        assert torch.equal(found["model"][name], tensor), name
        assert torch.equal(found["module"].state_dict()[name], tensor), name


def test_a_missing_copy_is_seen(tmp_path, monkeypatch):
    """The bug planted: what is written are the live tensors."""
    disk = Disk(monkeypatch)
    original = staging.stage

    def no_copy(torch_, records, arena, alignment):
        staged = original(torch_, records, arena, alignment)
        monkeypatch.setattr(staged, "contents", lambda: staging.raw_contents(torch, records))
        return staged

    monkeypatch.setattr(staging, "stage", no_copy)
    wanted = state()
    live = copy.deepcopy(wanted)
    with applied():
        disk.hold()
        torch.save(live, tmp_path / "a.pt")
        live["weight"].add_(1)
        disk.go()
        assert not same(torch.load(tmp_path / "a.pt"), wanted)


def test_shared_storages_stay_shared_and_views_stay_views(tmp_path):
    base = torch.arange(100.0)
    tied = torch.nn.Linear(10, 10, bias=False)
    given = {"base": base, "part": base[20:30], "turned": base.view(10, 10).t(), "tied": [tied.weight, tied.weight],
             "ordered": collections.OrderedDict(z=1, a=2), "empty": torch.zeros(0), "tuple": (1, (base[::2],)),
             "expanded": torch.ones(1).expand(50)}
    with applied():
        torch.save(given, tmp_path / "a.pt")
        found = torch.load(tmp_path / "a.pt")
    assert found["part"].untyped_storage().data_ptr() == found["base"].untyped_storage().data_ptr()
    assert found["turned"].stride() == given["turned"].stride() and found["expanded"].stride() == (0,)
    assert found["tied"][0] is found["tied"][1] or found["tied"][0].data_ptr() == found["tied"][1].data_ptr()
    assert list(found["ordered"]) == ["z", "a"] and isinstance(found["tuple"], tuple)
    assert torch.equal(found["turned"], given["turned"])


class SavesInside:
    """Pickling it saves something else."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        torch.save({"inner": torch.ones(5)}, self.path)
        return (str, ("done",))


def test_an_object_that_saves_while_it_is_saved(tmp_path):
    with applied():
        torch.save({"x": SavesInside(tmp_path / "inner.pt"), "y": torch.zeros(3)}, tmp_path / "outer.pt")
        assert torch.load(tmp_path / "outer.pt", weights_only=False)["x"] == "done"
        assert torch.equal(torch.load(tmp_path / "inner.pt")["inner"], torch.ones(5))


def test_what_cannot_be_pickled_leaves_the_file_alone(tmp_path):
    with applied():
        torch.save(state(1), tmp_path / "a.pt")
        with pytest.raises(Exception, match="[Pp]ickle"):
            torch.save({"x": torch.ones(9), "f": lambda: 0}, tmp_path / "a.pt")
        assert same(torch.load(tmp_path / "a.pt"), state(1))


def test_saves_from_several_threads(tmp_path):
    with applied():
        def work(index: int) -> None:
            for seed in range(5):
                torch.save(state(10 * index + seed, 5000), tmp_path / f"{index}.pt")

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(same(torch.load(tmp_path / f"{index}.pt"), state(10 * index + 4, 5000)) for index in range(4))


def test_saves_that_are_left_alone(tmp_path):
    """File objects, the old format, special files, hard links: as without the technique."""
    import io
    import os

    with applied() as context:
        buffer = io.BytesIO()
        torch.save(state(1), buffer)
        buffer.seek(0)
        assert same(torch.load(buffer), state(1))
        torch.save(state(2), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        assert same(torch.load(tmp_path / "old.pt"), state(2))
        torch.save(state(3), "/dev/null")
        torch.save(state(4), tmp_path / "first.pt")
        os.link(tmp_path / "first.pt", tmp_path / "second.pt")
        torch.save(state(5), tmp_path / "first.pt")
        assert same(torch.load(tmp_path / "second.pt"), state(5))
        with pytest.raises(RuntimeError, match="[Pp]arent directory"):
            torch.save(state(6), tmp_path / "missing" / "a.pt")
        assert "1 file(s)" in context.notes["async-checkpoint"]


def test_links_and_permissions_stay(tmp_path):
    import os

    (tmp_path / "deep").mkdir()
    os.symlink("deep/real.pt", tmp_path / "latest.pt")
    with applied():
        torch.save(state(1), tmp_path / "latest.pt")
        assert (tmp_path / "latest.pt").is_symlink() and same(torch.load(tmp_path / "deep" / "real.pt"), state(1))
        os.chmod(tmp_path / "deep" / "real.pt", 0o640)
        torch.save(state(2), tmp_path / "latest.pt")
        assert os.stat(tmp_path / "deep" / "real.pt").st_mode & 0o777 == 0o640
    plain, ours = tmp_path / "plain.pt", tmp_path / "ours.pt"
    mask = os.umask(0o027)
    try:
        torch.save(1, plain)
        with applied():
            torch.save(1, ours)
    finally:
        os.umask(mask)
    assert os.stat(plain).st_mode == os.stat(ours).st_mode


def test_saves_inside_of_inference_mode_and_outside_share_memory(tmp_path, capsys):
    """As an evaluation that keeps the best model does, between checkpoints of the training."""
    large = 1 << 23                 # copied by several threads
    with applied("thread") as context:
        for step in range(3):
            with torch.inference_mode():
                torch.save({**state(step, large), "made here": torch.ones(3)}, tmp_path / "best.pt")
            torch.save(state(step + 10, large), tmp_path / "last.pt")
            assert torch.equal(torch.load(tmp_path / "best.pt")["weight"], state(step, large)["weight"])
            assert same(torch.load(tmp_path / "last.pt"), state(step + 10, large))
        assert "6 checkpoint(s)" in context.notes["async-checkpoint"]
    assert "saved plainly" not in capsys.readouterr().err


def test_a_failure_of_ours_falls_back_to_a_plain_save(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(staging, "stage", lambda *_: 1 / 0)
    with applied():
        torch.save(state(1), tmp_path / "a.pt")
    assert same(torch.load(tmp_path / "a.pt"), state(1))
    assert "is saved plainly: ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("why", [PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")])
def test_a_folder_that_takes_no_new_file(tmp_path, monkeypatch, why):
    """But whose file may be written: torch's own save can."""
    from saturate.checkpoints import target

    def refuse(folder, prefix):
        raise why

    monkeypatch.setattr(target.durable, "open_locked", refuse)
    with applied():
        torch.save(state(1), tmp_path / "a.pt")
    assert same(torch.load(tmp_path / "a.pt"), state(1))


def test_addresses_instead_of_storages(tmp_path, monkeypatch):
    """Old releases of torch hand over a number: it is read at once, and nothing on a GPU is left there."""
    from saturate.checkpoints import seams

    write = staging.Recorder.write_record

    def older(self, name, data, size):
        write(self, name, data.data_ptr() if isinstance(data, torch.UntypedStorage) else data, size)

    monkeypatch.setattr(staging.Recorder, "write_record", older)
    assert not seams._hands_over_storages(torch, torch.serialization._open_zipfile_writer)
    with applied():
        assert "cpu" not in vars(torch.UntypedStorage)
        torch.save(state(1), tmp_path / "a.pt")
    assert same(torch.load(tmp_path / "a.pt"), state(1))


def test_storages_stay_on_the_gpu_only_while_records_are_written(tmp_path):
    """Anywhere else `storage.cpu()` must be what it was: here a storage that says it is on a GPU."""
    import types

    from saturate.checkpoints import seams

    storage = types.SimpleNamespace(device=torch.device("cuda"))
    hook = seams.Saves(torch, None, None).storage_cpu(lambda storage: "copied")
    assert hook(storage) == "copied"
    recorder = seams._LocalRecorder()
    recorder.write_record("data.pkl", b"", 0)
    assert hook(storage) is storage and hook(types.SimpleNamespace(device=torch.device("cpu"))) == "copied"
    with applied():
        torch.save(state(1), tmp_path / "a.pt")
        assert hook(storage) == "copied"
        with pytest.raises(Exception, match="[Pp]ickle"):
            torch.save(lambda: 0, tmp_path / "b.pt")
        assert hook(storage) == "copied"


def test_little_memory_means_a_synchronous_save(tmp_path, monkeypatch):
    from saturate.checkpoints import arena

    monkeypatch.setattr(arena, "available_bytes", lambda: 1 << 20)
    with applied() as context:
        torch.save(state(1), tmp_path / "a.pt")
        assert same(torch.load(tmp_path / "a.pt"), state(1))
        assert "host memory held" not in context.notes["async-checkpoint"]


def test_one_checkpoint_at_a_time_is_on_its_way(tmp_path, monkeypatch):
    """Files of a slow disk do not queue up: a kill would cost them all."""
    disk = Disk(monkeypatch)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(4)
    with applied("thread"):
        optimizer.step()
        disk.hold()
        torch.save(state(1), tmp_path / "step1.pt")
        torch.save(state(2), tmp_path / "optimizer1.pt")        # of the same checkpoint: neither waits
        optimizer.step()
        disk.waits(lambda: torch.save(state(3), tmp_path / "step2.pt"))
        assert same(torch.load(tmp_path / "step1.pt"), state(1)) and len(disk.written) >= 2
    assert same(torch.load(tmp_path / "step2.pt"), state(3))


def test_saves_into_open_files_are_told_apart(tmp_path):
    """They stay synchronous, and the account says so instead of saying that nothing was saved."""
    with applied("thread") as context:
        with open(tmp_path / "opened.pt", "wb") as file:
            torch.save(state(1), file)
        seen = async_checkpoint.active(Evidence(notes=dict(context.notes)), async_checkpoint.Options())
        assert not seen.active and seen.evidence == "1 save(s) into files that the script opened itself stayed synchronous"
        torch.save(state(2), tmp_path / "named.pt")
        seen = async_checkpoint.active(Evidence(notes=dict(context.notes)), async_checkpoint.Options())
        assert seen.active and "1 checkpoint(s) in 1 file(s)" in seen.evidence and "stayed synchronous" in seen.evidence
    assert same(torch.load(tmp_path / "opened.pt"), state(1))
