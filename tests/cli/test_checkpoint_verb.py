"""`saturate checkpoint`: what it prints, its exit codes, and that gc removes nothing that a file still names."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.checkpoint")

from saturate.checkpoints import checks, collect, durable, keeper, manifests, pointer, target  # noqa: E402
from saturate.checkpoints.chunks import Store  # noqa: E402
from saturate.cli import main  # noqa: E402


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory after a run: ckpt_0 and ckpt_1 plain, ckpt_2 to ckpt_6 in the store."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    frozen = torch.randn(300_000)
    keeping = keeper.Keeper(tmp_path / ".saturate" / "checkpoints", 3, 1 << 22, lambda line: None)
    for step in range(7):
        state = {"frozen": frozen, "moving": torch.randn(40_000), "step": step}
        keeping.save(str(tmp_path / f"ckpt_{step}.pt"), lambda target, state=state: torch.save(state, target))
    keeping.store.close()
    return tmp_path


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main.main(["checkpoint", *words])
    out, err = capsys.readouterr()
    return code, out, err


def found(capsys, *words: str) -> dict:
    code, out, err = run(capsys, *words, "--json")
    assert out.count("\n") == 1, (code, out, err)
    return {**json.loads(out), "exit": code}


# -- verify ----------------------------------------------------------------------------------------------------------


def test_a_whole_store_is_whole(folder, capsys):
    said = found(capsys, "verify")
    assert said["exit"] == 0 and said["damaged"] == said["unknown"] == 0
    assert [check["kind"] for check in said["checks"]] == ["pack"] * 5 + ["checkpoint"] * 5
    assert run(capsys, "verify")[1].splitlines()[-1] == "10 whole, 0 damaged, 0 that cannot be checked"


def test_flipped_bits_are_named_with_the_checkpoints_that_they_hurt(folder, capsys):
    packs = sorted((folder / ".saturate/checkpoints/packs").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(packs[0].read_bytes())
    content[100] ^= 4
    packs[0].write_bytes(content)
    said = found(capsys, "verify")
    assert said["exit"] == 3
    damaged = [check for check in said["checks"] if check["outcome"] == "damaged"]
    assert {check["kind"] for check in damaged} == {"pack", "checkpoint"}
    assert packs[0].name in damaged[0]["path"]
    assert 1 <= sum(check["kind"] == "checkpoint" for check in damaged) < 5
    for path in folder.glob("ckpt_*.pt"):       # what verify says is what a restore meets
        pointed = pointer.read(path)
        if pointed is not None:
            named = [check for check in said["checks"] if check["path"].startswith(pointed.checkpoint)]
            assert (named[0]["outcome"] == "whole") is (run(capsys, "export", str(path), "-o", "out.pt")[0] == 0)


def test_missing_chunks_and_manifests_of_other_versions_are_named(folder, capsys):
    packs = sorted((folder / ".saturate/checkpoints/packs").iterdir(), key=lambda path: path.stat().st_size)
    packs[-1].unlink()
    said = found(capsys, "verify")
    assert said["exit"] == 3 and sum(check["outcome"] == "damaged" and "missing" in check["problem"] for check in said["checks"]) == 5
    path = sorted((folder / ".saturate/checkpoints/manifests").iterdir())[0]
    path.write_text(path.read_text().replace('"schema":1', '"schema":2'))
    assert "digest" in [check for check in found(capsys, "verify")["checks"] if check["path"] == path.stem][0]["problem"]


def test_plain_files_and_folders(folder, capsys):
    content = bytearray((folder / "ckpt_0.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "bad.pt").write_bytes(content)
    (folder / "short.pt").write_bytes(content[:1000])
    torch.save({"a": 1}, folder / "old.pth", _use_new_zipfile_serialization=False)
    (folder / "x.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{      }")
    (folder / "y.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{      }more")
    said = {Path(check["path"]).name: (check["kind"], check["outcome"]) for check in found(capsys, "verify", ".")["checks"]}
    assert said == {
        "ckpt_0.pt": ("torch", "whole"), "ckpt_1.pt": ("torch", "whole"), **{f"ckpt_{n}.pt": ("pointer", "whole") for n in range(2, 7)},
        "bad.pt": ("torch", "damaged"), "short.pt": ("torch", "damaged"), "old.pth": ("other", "unknown"),
        "x.safetensors": ("safetensors", "whole"), "y.safetensors": ("safetensors", "damaged")}
    code, out, _ = run(capsys, "verify", "bad.pt", "ckpt_2.pt")
    assert code == 3 and "checksum" in out and out.endswith("1 whole, 1 damaged, 0 that cannot be checked\n")


def test_what_only_has_the_name_of_a_checkpoint_is_not_called_damaged(tmp_path, capsys):
    """Tokens, archives and packed files in a folder; unless the file is named, or what a power failure leaves."""
    (tmp_path / "train.bin").write_bytes(bytes(range(1, 200)) * 10)
    (tmp_path / "images.tar").write_bytes(b"etc/hostname" + b"\0" * 500)
    (tmp_path / "packed.pth").write_bytes(b"\x1f\x8b\x08\x08" + b"a" * 99)
    code, out, _ = run(capsys, "verify", str(tmp_path))
    assert code == 0 and out.count("neither torch's zip format nor safetensors") == 3 and "0 damaged, 3 that cannot be checked" in out
    assert run(capsys, "verify", str(tmp_path / "packed.pth"))[0] == 3
    (tmp_path / "zeros.bin").write_bytes(b"\0" * 999)
    for name, content in (("empty.bin", b""), ("zeros.pt", b"\0" * 999), ("a.safetensors", b"x" * 99),
                          ("other.bin", b"\x08\0\0\0\0\0\0\0{      }more")):
        (tmp_path / name).write_bytes(content)
    said = {Path(check["path"]).name: check["outcome"] for check in found(capsys, "verify", str(tmp_path))["checks"]}
    assert {name for name, outcome in said.items() if outcome == "damaged"} == {"empty.bin", "zeros.pt", "a.safetensors", "other.bin"}


def test_a_folder_without_a_checkpoint_says_so(tmp_path, capsys):
    (tmp_path / "notes.txt").touch()
    code, _, err = run(capsys, "verify", str(tmp_path))
    assert code == 2 and "there is no checkpoint in" in err and ".safetensors" in err


@pytest.mark.parametrize("way", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_one_bad_file_does_not_end_the_check_of_others(tmp_path, capsys, way):
    with zipfile.ZipFile(tmp_path / "1.pt", "w", way) as archive:
        archive.writestr("a/data.pkl", b"abc" * 1000)
        start = archive.infolist()[0].header_offset + 30 + len("a/data.pkl")
    content = bytearray((tmp_path / "1.pt").read_bytes())
    for place in range(start, start + 20):
        content[place] ^= 0xff
    (tmp_path / "1.pt").write_bytes(content)
    os.mkfifo(tmp_path / "2.pt")
    torch.save({"a": 1}, tmp_path / "3.pt")
    assert [check["outcome"] for check in found(capsys, "verify", str(tmp_path))["checks"]] == ["damaged", "unknown", "whole"]


@pytest.mark.parametrize(("way", "name"), [
    ("whole", ""), ("cut", "__0_0.distcp"), ("flipped", "__0_0.distcp"), ("zeros", "__0_0.distcp"), ("no shard", ".metadata"),
    ("no metadata", ".metadata"), ("half a metadata", ".metadata"), ("of a killed save", "")])
@pytest.mark.filterwarnings("ignore")       # torch says that there is one process
def test_a_distributed_checkpoint_is_checked_tensor_by_tensor(tmp_path, capsys, way, name):
    torch.distributed.checkpoint.save({"a": torch.randn(2000), "b": torch.randn(3000)}, checkpoint_id=str(tmp_path))
    metadata, shard = tmp_path / ".metadata", tmp_path / "__0_0.distcp"
    content = shard.read_bytes()
    if way == "cut":
        shard.write_bytes(content[:-5000])
    elif way == "flipped":          # in the first of its tensors
        shard.write_bytes(content[:3000] + bytes([content[3000] ^ 1]) + content[3001:])
    elif way == "zeros":
        shard.write_bytes(bytes(len(content)))
    elif way == "no shard":
        shard.rename(tmp_path / "__1_0.distcp")
    elif way == "no metadata":
        metadata.unlink()
    elif way == "half a metadata":
        metadata.write_bytes(metadata.read_bytes()[:-40])
    elif way == "of a killed save":
        (tmp_path / "__0_0a1b2c3d_0.distcp").write_bytes(content[:-5000])
    said = found(capsys, "verify", str(tmp_path))
    damaged = [Path(check["path"]).name for check in said["checks"] if check["outcome"] == "damaged"]
    assert damaged == ([name] if name else []) and said["exit"] == (3 if name else 0)
    assert said["whole"] == (0 if name == "__0_0.distcp" or way == "no shard" else 1)
    assert said["unknown"] == (1 if way in ("no shard", "of a killed save") else 0)     # the checkpoint does not name it


def test_what_a_killed_save_left_is_found_and_what_is_being_saved_told_from_it(tmp_path, capsys):
    """A save into a folder of its own is never followed by another one there, which would have removed it."""
    torch.save({"a": 1}, tmp_path / "model.pt")
    (tmp_path / "step1").mkdir()
    (tmp_path / "step1" / f"{target.LITTER}01").write_bytes(b"half")
    now = target.Target(str(tmp_path / "step2.pt"))
    said = found(capsys, "verify", str(tmp_path))
    now.discard()
    left = {check["problem"] for check in said["checks"] if check["kind"] == "leftover"}
    assert left == {"a process was killed while it saved; it can be removed", "a process saves it now"} and said["exit"] == 0


def test_what_is_being_replaced_is_told_from_what_a_killed_process_left(tmp_path, monkeypatch):
    """Also where nobody else's file may be opened, or the file system has no locks."""
    def problems() -> list[str]:
        return [check.problem for check in checks.check_files(list(checks.files_in(tmp_path)))]

    told: list[str] = []
    durable.replace(tmp_path / "state", lambda stream: told.extend(problems()))
    assert told == ["a process saves it now"] and problems() == []
    durable.temporary(tmp_path).touch()
    assert problems() == ["a process was killed while it saved; it can be removed"]

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(durable.fcntl, "flock", no_locks)
    durable.replace(tmp_path / "state", lambda stream: stream.write(b"1"))
    assert (tmp_path / "state").read_bytes() == b"1" and "or was killed" in problems()[0]


@pytest.mark.filterwarnings("ignore")       # torch says that there is one process
def test_what_a_training_removes_meanwhile_is_left_out(tmp_path):
    """As one does that keeps the latest few: neither does verify end, nor is a file damaged that is not there."""
    torch.save({"a": 1}, tmp_path / "old.pt")
    for name in (f"{target.LITTER}01", f"{durable.TEMPORARY}01", "a.safetensors"):
        shutil.copy(tmp_path / "old.pt", tmp_path / name)
    (tmp_path / "lost.pt").symlink_to(tmp_path / "nowhere.pt")
    for name in ("old", "shard"):
        torch.distributed.checkpoint.save({"a": torch.randn(20)}, checkpoint_id=str(tmp_path / name))
    shutil.copy(tmp_path / "shard" / "__0_0.distcp", tmp_path / "shard" / "__1_0.distcp")
    looked_at = checks.check_files(list(checks.files_in(tmp_path)))
    first = next(looked_at)         # all is listed by now
    for path in [*tmp_path.glob("*01"), *tmp_path.glob("old.pt"), *tmp_path.glob("*/__1_0.distcp"), *tmp_path.glob("a.*")]:
        path.unlink()
    shutil.rmtree(tmp_path / "old")
    assert first.problem.startswith("a process was killed")
    assert [(Path(check.path).name, check.outcome) for check in looked_at] == [("lost.pt", "damaged"), ("__0_0.distcp", "whole")]
    assert checks.check_file(tmp_path / "old.pt").outcome == "unknown"


EMPTY = b"\x08\0\0\0\0\0\0\0{      }"       # safetensors without a tensor


def parts(folder: Path, *numbers: int, of: int = 3, name: str = "model", ending: str = "safetensors") -> list[str]:
    names = [f"{name}-{number:05d}-of-{of:05d}.{ending}" for number in numbers]
    for one in names:
        (folder / one).write_bytes(EMPTY if ending == "safetensors" else b"tokens, say")
    return names


def index(folder: Path, names: list[str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {str(at): name for at, name in enumerate(names)}}))


@pytest.mark.parametrize(("make", "damaged"), [
    (lambda at: parts(at, 1, 3), ["model-00002-of-00003.safetensors"]),
    (lambda at: parts(at, 1, 2), ["model-00003-of-00003.safetensors"]),
    (lambda at: parts(at, 2, ending="bin"), ["model-00001-of-00003.bin"]),
    (lambda at: index(at, [*parts(at, 1, 2), "model-00003-of-00003.safetensors"]), ["model.safetensors.index.json"]),
    (lambda at: (parts(at, 1, 2, 3), (at / "model.safetensors.index.json").write_text('{"weight_')), ["model.safetensors.index.json"]),
    (lambda at: index(at, parts(at, 1, 2, 3)), []), (lambda at: parts(at, 1, 2, 3), []),
    (lambda at: parts(at, 0, 1, of=2, name="train", ending="bin"), []),
    (lambda at: parts(at, 1, of=10**30), [f"model-00002-of-{10**30}.safetensors"]),
])
def test_a_model_in_several_files_is_whole_with_all_of_them(tmp_path, capsys, make, damaged):
    make(tmp_path)
    said = found(capsys, "verify", str(tmp_path))
    assert [Path(check["path"]).name for check in said["checks"] if check["outcome"] == "damaged"] == damaged
    assert said["exit"] == (3 if damaged else 0)


def test_a_model_that_becomes_whole_meanwhile_is(tmp_path):
    parts(tmp_path, 1, 2)
    looked_at = checks.check_files(list(checks.files_in(tmp_path)))
    next(looked_at)
    parts(tmp_path, 3)
    assert {check.outcome for check in looked_at} == {"whole"}


def test_what_is_not_there_is_an_error(folder, capsys):
    assert run(capsys, "verify", "nothing.pt")[0] == 2
    code, _, err = run(capsys, "verify", "--store", "elsewhere")
    assert code == 3 and "no checkpoint store" in err
    code, _, err = run(capsys, "verify", "--store", "ckpt_0.pt")
    assert code == 3 and "error[E300] there is no checkpoint store in ckpt_0.pt" in err


# -- export ----------------------------------------------------------------------------------------------------------


def test_export_in_place_elsewhere_and_by_id(folder, capsys):
    name = pointer.read(folder / "ckpt_3.pt").checkpoint
    assert found(capsys, "export", "ckpt_3.pt", "-o", "out.pt")["checkpoint"] == name
    assert torch.load(folder / "out.pt")["step"] == 3 and pointer.read(folder / "ckpt_3.pt")
    assert run(capsys, "export", "ckpt_3.pt")[0] == 0
    assert torch.load(folder / "ckpt_3.pt")["step"] == 3
    assert found(capsys, "export", "ckpt_3.pt")["checkpoint"] is None      # plain already
    assert run(capsys, "export", name, "-o", "byid.pt")[0] == 0
    assert (folder / "byid.pt").read_bytes() == (folder / "out.pt").read_bytes()
    assert run(capsys, "export", name)[0] == 2
    assert run(capsys, "export", "nothing.pt")[0] == 2
    assert run(capsys, "export", "ckpt_0.pt", "-o", "copy.pt")[0] == 2


def test_export_from_a_store_that_moved(folder, capsys):
    os.rename(folder / ".saturate/checkpoints", folder / "kept")
    code, _, err = run(capsys, "export", "ckpt_3.pt")
    assert code == 3 and "--store" in err and pointer.read(folder / "ckpt_3.pt")
    assert run(capsys, "export", "ckpt_3.pt", "--store", "kept")[0] == 0
    assert torch.load(folder / "ckpt_3.pt")["step"] == 3


def test_export_that_cannot_write_changes_nothing(folder, capsys):
    before = sorted(path.name for path in folder.iterdir())
    code, _, err = run(capsys, "export", "ckpt_3.pt", "-o", "no/such/folder.pt")
    assert code == 3 and "nothing was changed" in err
    os.mkfifo(folder.parent / "pipe")
    code, _, err = run(capsys, "export", "ckpt_3.pt", "-o", str(folder.parent / "pipe"))
    assert code == 3 and "Not a regular file" in err and (folder.parent / "pipe").is_fifo()
    assert sorted(path.name for path in folder.iterdir()) == before


# -- gc --------------------------------------------------------------------------------------------------------------


def kept(said: dict) -> list[str]:
    return sorted(Path(entry["path"]).name for entry in said["kept"])


def test_gc_says_first_and_removes_only_what_no_file_names(folder, capsys):
    for step in (2, 4, 6):
        os.unlink(folder / f"ckpt_{step}.pt")
    before = sorted(path.name for path in (folder / ".saturate").rglob("*"))
    said = found(capsys, "gc", "--look-in", ".")
    assert not said["deleted"] and len(said["removed"]) == 2
    assert sorted(path.name for path in (folder / ".saturate").rglob("*")) == before
    done = found(capsys, "gc", "--delete", "--look-in", ".")
    assert done["deleted"] and done["removed"] == said["removed"]
    for step in (3, 5):
        assert run(capsys, "export", f"ckpt_{step}.pt")[0] == 0 and torch.load(folder / f"ckpt_{step}.pt")["step"] == step
    assert found(capsys, "verify")["damaged"] == 0


def test_gc_frees_what_it_said(folder, capsys):
    for path in folder.glob("ckpt_*.pt"):
        path.unlink()
    said = found(capsys, "gc", "--keep", "0", "--delete", "--look-in", ".")
    left = sum(path.stat().st_size for path in (folder / ".saturate/checkpoints/packs").iterdir())
    assert len(said["removed"]) == 5 and left == 0 and said["freed_bytes"] == said["store_bytes"] > 1_000_000


def test_gc_keeps_the_newest_and_every_kth(folder, capsys):
    for path in [*folder.glob("ckpt_*.pt")]:
        path.unlink()
    with Store.open(folder / ".saturate/checkpoints") as store:
        numbers = {manifest.id: manifest.number for manifest in manifests.all_of(store)[0]}
    assert sorted(numbers.values()) == [1, 2, 3, 4, 5]

    def left(*words: str) -> list[int]:
        return sorted(numbers[entry["checkpoint"]] for entry in found(capsys, "gc", "--look-in", ".", *words)["kept"])

    assert left() == [5]
    assert left("--keep", "2") == [4, 5]
    assert left("--keep-every", "2") == [2, 4, 5]
    assert left("--keep", "0", "--keep-every", "3") == [3]


def test_gc_finds_what_was_renamed_and_looks_where_it_is_told(folder, capsys, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (folder / "below" / "deep").mkdir(parents=True)
    os.rename(folder / "ckpt_2.pt", folder / "below" / "deep" / "any.name")
    os.rename(folder / "ckpt_3.pt", other / "moved.pt")
    with_place = found(capsys, "gc", "--look-in", str(folder), "--look-in", str(other))
    assert len(with_place["kept"]) == 5
    assert run(capsys, "gc", "--look-in", "nowhere")[0] == 2


def test_gc_removes_nothing_for_want_of_a_file_that_may_have_been_moved(folder, capsys, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    deep = elsewhere / "a/b/c/d/e"
    deep.mkdir(parents=True)
    for step in (2, 3):
        os.rename(folder / f"ckpt_{step}.pt", deep / f"best_{step}.pt")
    os.unlink(folder / "ckpt_4.pt")
    os.unlink(folder / "ckpt_5.pt")
    torch.save({}, folder / "ckpt_5.pt")
    said = found(capsys, "gc", "--delete")
    assert len(said["kept"]) == 5 and not said["removed"]
    assert "4 stay only because the files that name them may have been moved" in run(capsys, "gc")[1]
    os.symlink(elsewhere, folder / "best")      # where a script keeps them on another disk
    os.symlink(folder, deep / "back")
    assert len(found(capsys, "gc", "--delete", "--look-in", ".")["removed"]) == 2
    assert "--look-in" not in run(capsys, "gc", "--look-in", ".")[1]
    for step in (2, 3):
        assert run(capsys, "export", str(deep / f"best_{step}.pt"))[0] == 0 and torch.load(deep / f"best_{step}.pt")["step"] == step


def denying(place: Path, function: Callable) -> Callable:
    """As a file system answers who may not read there."""
    def denied(path: object = ".", *args: object) -> object:
        if isinstance(path, (str, Path)) and place.name in Path(path).parts[-2:]:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return function(path, *args)

    return denied


@pytest.mark.parametrize("what", ["folder", "file"])
def test_gc_removes_nothing_that_a_file_may_name_where_it_cannot_read(folder, capsys, monkeypatch, what):
    best = folder / "best"
    best.mkdir()
    os.rename(folder / "ckpt_2.pt", best / "ckpt_2.pt")
    for step in (3, 4, 5):
        os.unlink(folder / f"ckpt_{step}.pt")
    (folder / "lost").symlink_to("nowhere")
    (folder / "round").symlink_to("round")
    with monkeypatch.context() as patched:
        if what == "folder":
            patched.setattr(os, "scandir", denying(best, os.scandir))
        else:
            patched.setattr(pointer, "open", denying(best, open), raising=False)
        said = found(capsys, "gc", "--delete", "--look-in", ".")
        assert not said["removed"] and [str(best) in entry["reason"] for entry in said["kept"]].count(True) == 4
        out = run(capsys, "gc", "--look-in", ".")[1]
        assert f"4 stay only because a file that names them may be where nothing could be read: {best} (Permission denied)" in out
    assert len(found(capsys, "gc", "--delete", "--look-in", ".")["removed"]) == 3
    assert run(capsys, "export", str(best / "ckpt_2.pt"))[0] == 0


def test_gc_keeps_what_a_script_renames_while_it_looks(folder, capsys, monkeypatch, tmp_path_factory):
    """Its folder is listed, and then the file has another name."""
    other = tmp_path_factory.mktemp("other")
    os.rename(folder / "ckpt_2.pt", other / "last.pt")
    for step in (3, 4, 5):
        os.unlink(folder / f"ckpt_{step}.pt")
    look = pointer.look

    def renamed(path):
        if Path(path) == other / "last.pt":
            os.rename(path, other / "best.pt")
        return look(path)

    monkeypatch.setattr(pointer, "look", renamed)
    assert len(found(capsys, "gc", "--delete", "--look-in", str(other))["removed"]) == 3
    assert run(capsys, "export", str(other / "best.pt"))[0] == 0


def test_where_a_folder_may_have_been_renamed_to_is_looked_for_as_far_as_that_can_be(tmp_path, monkeypatch):
    """Its siblings may be somebody else's."""
    (tmp_path / "runs" / "other").mkdir(parents=True)
    unread: dict[Path, str] = {}
    monkeypatch.setattr(os, "scandir", denying(tmp_path / "runs" / "other", os.scandir))
    assert collect._named([tmp_path / "runs" / "gone"], tmp_path, 3, unread) == {} and unread == {}
    assert collect._named([tmp_path / "runs" / "other"], tmp_path, 3, unread) == {} and list(unread) == [tmp_path / "runs" / "other"]


def test_gc_rewrites_packs_that_are_mostly_dead(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    noise = random.Random(0)
    keeping = keeper.Keeper(tmp_path / ".saturate/checkpoints", 0, 0, lambda line: None)
    parts = [noise.randbytes(70_000) for _ in range(20)]
    for step in range(4):
        if step == 3:
            parts[1:] = [noise.randbytes(70_000) for _ in parts[1:]]
        keeping.series.setdefault(manifests.series_of(str(tmp_path / "ckpt_0.pt")), keeper.Series()).helps = step > 1 or None
        if step > 1:
            keeping.save(str(tmp_path / f"ckpt_{step}.pt"), lambda target: [target.write(part) for part in parts])
    keeping.store.close()
    os.unlink(tmp_path / "ckpt_2.pt")
    said = found(capsys, "gc", "--delete", "--look-in", ".")
    size = sum(path.stat().st_size for path in (tmp_path / ".saturate/checkpoints/packs").iterdir())
    assert len(said["removed"]) == 1 and size < 20 * 70_000 + 20_000
    assert said["freed_bytes"] > 1_300_000
    assert run(capsys, "export", "ckpt_3.pt")[0] == 0
    assert (tmp_path / "ckpt_3.pt").read_bytes() == b"".join(parts)


def test_gc_frees_no_chunk_while_a_manifest_cannot_be_read(folder, capsys):
    for path in folder.glob("ckpt_*.pt"):
        path.unlink()
    path = sorted((folder / ".saturate/checkpoints/manifests").iterdir())[2]
    path.write_text("damaged")
    packs = sorted((folder / ".saturate/checkpoints/packs").iterdir())
    said = found(capsys, "gc", "--keep", "0", "--delete", "--look-in", ".")
    assert list(said["damaged"]) == [path.stem] and path.exists()
    assert sorted((folder / ".saturate/checkpoints/packs").iterdir()) == packs


# -- advise ----------------------------------------------------------------------------------------------------------


def test_the_interval(folder, capsys):
    said = found(capsys, "advise", "--save-cost", "60", "--mtbf", "30d", "--nodes", "30", "--restart-cost", "5m", "--step-time", "0.5")
    interval = said["interval"]
    assert interval["job_mtbf_s"] == 86_400 and interval["young_interval_s"] == pytest.approx(3219.94, abs=0.01)
    assert interval["interval_s"] == pytest.approx(3180, rel=0.01) and interval["interval_steps"] == round(interval["interval_s"] / 0.5)
    assert [one["interval_s"] / interval["interval_s"] for one in interval["around"]] == [0.5, 2]
    assert all(one["lost_share"] > interval["lost_share"] > 0 for one in interval["around"])
    assert said["forecast"] is None
    out = run(capsys, "advise", "--save-cost", "60", "--mtbf", "30d", "--nodes", "30", "--step-time", "0.5")[1]
    assert "save every 53" in out and "steps)" in out and "Poisson" in out and "Without --restart-cost" in out


def test_the_cost_of_a_save_is_measured_where_it_is_not_given(folder, capsys):
    said = found(capsys, "advise", "--mtbf", "1d")["interval"]
    with Store.open(folder / ".saturate/checkpoints") as store:
        took = sorted(manifest.save_s for manifest in manifests.all_of(store)[0])
    assert said["save_cost_s"] == took[2] and "5 saves" in said["save_cost_from"]
    code, _, err = run(capsys, "advise", "--mtbf", "1d", "--store", "elsewhere")
    assert code == 2 and "--save-cost" in err


def test_the_forecast(folder, capsys):
    said = found(capsys, "advise", "--forecast", "ckpt_0.pt", "ckpt_1.pt")["forecast"]
    assert said["helps"] and 0.05 < said["delta_share"] < 0.2 and said["file_bytes"] == (folder / "ckpt_1.pt").stat().st_size
    assert 'id = "incremental-checkpoint"' in run(capsys, "advise", "--forecast", "ckpt_0.pt", "ckpt_1.pt")[1]
    code, _, err = run(capsys, "advise", "--forecast", "ckpt_0.pt", "ckpt_2.pt")       # which only names a checkpoint
    assert code == 2 and "ckpt_2.pt only names a checkpoint" in err and "saturate checkpoint export ckpt_2.pt --output FILE" in err
    torch.save(torch.randn(300_000), folder / "a.pt")
    torch.save(torch.randn(300_000), folder / "b.pt")
    out = run(capsys, "advise", "--forecast", "a.pt", "b.pt")[1]
    assert "will not help this job" in out and "incremental-checkpoint" not in out


@pytest.mark.parametrize("words", [
    ["advise"], ["advise", "--mtbf", "soon"], ["advise", "--mtbf", "0"], ["advise", "--mtbf", "1d", "--nodes", "0"], ["gc", "--keep", "-1"],
    ["advise", "--mtbf", "1d", "--save-cost", "1s", "--nodes", "1" + "0" * 309], ["advise", "--mtbf", "1d", "--save-cost", "1s", "--step-time", "1e-320s"],
    ["advise", "--mtbf", "1d", "--store", "ckpt_0.pt"],
    ["gc", "--keep-every", "x"], ["advise", "--forecast", "no.pt", "nothing.pt"], ["frobnicate"], []])
def test_bad_input_is_named(folder, capsys, words):
    code, out, err = run(capsys, *words)
    assert code == 2 and out == "" and err.startswith("error[E200]")


def test_a_manifest_does_not_drive_the_terminal(folder, capsys):
    from saturate.checkpoints.chunks import digest_of

    path = sorted((folder / ".saturate/checkpoints/manifests").iterdir())[0]
    fields = json.loads(path.read_bytes().partition(b"\n")[0])
    line = json.dumps({**fields, "path": f"{folder}/x\x1b]0;owned\x07\nwhole  y"}).encode()
    path.write_bytes(line + b"\n" + digest_of(line).hex().encode() + b"\n")
    for words in (["verify"], ["gc"]):
        out = run(capsys, *words)[1]
        assert "\x1b" not in out and "\x07" not in out and not any(row.startswith("whole  y") for row in out.splitlines())
