"""What is stored loads again as it was; whatever was done to it meanwhile has a name; nothing in it is ever executed."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from saturate.checkpoints import durable
from saturate.errors import ArtifactDamaged, EnvironmentProblem, UsageError
from saturate.inference import artifact, examples, facts, folders, hardware, probe
from saturate.inference.formats import exported
from saturate.inference.techniques._api import Context, Entry
from saturate.records.artifact import MadeOn
from saturate.records.inference import Best, CandidateRecord, ModelFacts, Timing

torch = pytest.importorskip("torch")

FACTS = ModelFacts(kind="Tiny", torch=torch.__version__, batch_size=4, installed={"numpy": "1.0"})
RECORD = CandidateRecord(id="exported \"as\" it is\\", techniques=[{"id": "channels-last", "options": {}}], numerics="reordering", fate="dominated",
                         reason="", code="model = model.to(memory_format=torch.channels_last)", agreement=120.0)
BEST = Best(recipe=RECORD.techniques, latency_ms=Timing(p50=1.0, p90=1.1, p99=1.2, calls=10), speedup=2.0, speedup_ci=(1.9, 2.1))


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 3)

    def forward(self, x, scale=None):
        y = self.linear(x)
        return {"logits": y if scale is None else y * scale, "hidden": (x.relu(), None)}


def batch(rows=4):
    return (torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)), torch.tensor(2.0))


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A stored program, its entry, the model, and a batch."""
    torch.manual_seed(0)
    model, folder, inputs = Tiny().eval().requires_grad_(False), tmp_path_factory.mktemp("program"), batch()
    entry = exported.save(Context(torch=torch, model=model, device="cpu", inputs=[inputs], calibration=[], facts=FACTS,
                                  folder=folder, threads=1), folder)
    return folder, entry, model, inputs


def make(program, target, **changes):
    folder, entry, model, inputs = program
    given = {"program": folder, "record": RECORD, "facts": FACTS, "threads": 1, "inputs": [inputs], "outputs": [model(*inputs)]}
    return artifact.store(target, entry, **{**given, **changes})


@pytest.fixture(scope="module")
def whole(program, tmp_path_factory):
    return make(program, tmp_path_factory.mktemp("whole") / "artifact")


@pytest.fixture
def stored(whole, tmp_path):
    """One to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "artifact"))


def rewrite(folder, change):
    """Change the manifest as a forger would."""
    path = folder / artifact.MANIFEST
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps({**plain, "digest": artifact.digest(plain)}))


def leftovers(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(durable.TEMPORARY)]


# -- as it was ---------------------------------------------------------------------------------------------------------


def test_it_is_called_as_the_model_was(program, whole):
    model, inputs = program[2:]
    loaded = artifact.load(whole)
    assert loaded.info.candidate in repr(loaded) and str(whole) in repr(loaded) and len(repr(loaded)) < 120 + len(str(whole))
    for answer in (loaded(*inputs), loaded(inputs[0], scale=inputs[1])):
        assert torch.allclose(answer["logits"], model(*inputs)["logits"], atol=1e-6)
        assert answer["hidden"][1] is None and isinstance(answer["hidden"], tuple)
    answer["logits"] += 1       # no tensor of inference mode, which could not be changed
    other = batch(7)
    assert torch.allclose(loaded(*other)["logits"], model(*other)["logits"], atol=1e-6)


def test_copies_are_loaded_from_the_folder_again(program, whole, stored):
    model, inputs = program[2:]
    loaded = artifact.load(whole)
    for other in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert torch.allclose(other(*inputs)["logits"], model(*inputs)["logits"], atol=1e-6) and other.folder == whole
    gone = pickle.dumps(artifact.load(stored))
    shutil.rmtree(stored)
    with pytest.raises(ArtifactDamaged):
        pickle.loads(gone)


@pytest.mark.parametrize("change", [{"dtype": "float64", "shape": [2, 5]}, {"dtype": "bool"}])
def test_an_answer_of_another_number_type_does_not_verify(stored, change):
    rewrite(stored, lambda plain: plain["examples"][0]["output_leaves"][0].update(change))
    found = artifact.load(stored).verify()
    assert not found.ok and "number types" in found.reason


def test_it_verifies_on_the_machine_that_made_it(whole):
    found = artifact.load(whole, verify=True).verify()
    assert found.ok and found.agreement_db > 100 and found.demanded_db == 60


def test_the_manifest_says_what_it_is(whole):
    manifest = artifact.read(whole)
    assert (manifest.model, manifest.candidate, manifest.format) == ("Tiny", RECORD.id, "exported")
    assert manifest.made_on.versions["torch"] == torch.__version__ and manifest.made_on.device == "cpu"
    assert {one.path for one in manifest.files} == {"model.pt2", "examples.bin", "reproduce.py"}
    assert manifest.scores is None and manifest.examples[0].output_leaves[0].shape == [4, 3]
    source = (whole / "reproduce.py").read_text()
    compile(source, "reproduce.py", "exec")
    assert RECORD.code in source and "Tiny" in source
    assert (whole / "examples.bin").stat().st_size < 2000


def test_scores_are_added_when_they_are_known(stored):
    artifact.confirm(stored, BEST)
    assert artifact.read(stored).scores == BEST
    assert artifact.load(stored).info.scores.speedup == 2.0


def test_save_copies_and_replaces(stored, tmp_path):
    loaded = artifact.load(stored)
    target = tmp_path / "new" / "copy"
    assert loaded.save(target) == target
    (target / "model.pt2").write_bytes(b"damaged")
    loaded.save(target)         # what is damaged may be replaced
    assert artifact.load(target, verify=True).info == loaded.info
    loaded.save(stored)         # onto itself
    artifact.load(stored)
    assert leftovers(tmp_path) == leftovers(tmp_path / "new") == []


def test_nothing_else_is_replaced(stored, tmp_path):
    loaded = artifact.load(stored)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "manifest.json").write_text('{"name": "a web app"}')
    (tmp_path / "file").write_text("x")
    for target in ("full", "manifests", "file"):
        with pytest.raises(UsageError):
            loaded.save(tmp_path / target)
    assert (tmp_path / "full" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    loaded.save(tmp_path / "empty")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    loaded.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and artifact.load(tmp_path / "link")


def test_a_damaged_source_is_not_copied(stored, tmp_path):
    loaded = artifact.load(stored)
    (stored / "model.pt2").write_bytes(b"gone bad since")
    with pytest.raises(ArtifactDamaged, match="not whole"):
        loaded.save(tmp_path / "copy")
    assert not (tmp_path / "copy").exists() and leftovers(tmp_path) == []


# -- without saturate --------------------------------------------------------------------------------------------------


def snippet(name):
    """A block of code in docs/optimize.md."""
    text = (Path(__file__).parents[2] / "docs" / "optimize.md").read_text(encoding="utf-8")
    return re.search(rf"^```python {name}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]


def test_the_documented_lines_load_it_in_plain_torch(tmp_path, monkeypatch):
    from saturate.inference.formats import exported

    model, inputs = torch.nn.Linear(8, 3).eval().requires_grad_(False), (torch.randn(4, 8),)
    entry = exported.save(Context(torch=torch, model=model, device="cpu", inputs=[inputs], calibration=[], facts=FACTS, folder=tmp_path, threads=1),
                          tmp_path)
    artifact.store(tmp_path / "artifact", entry, program=tmp_path, record=RECORD, facts=FACTS, threads=1)
    monkeypatch.chdir(tmp_path)
    names = {"x": inputs[0]}
    exec(snippet("exported"), names)
    assert torch.allclose(names["outputs"][0], model(*inputs), atol=1e-6)


@pytest.mark.parametrize(("form", "library", "own"), [
    ("onnx", "onnxruntime", {"device": "cpu", "spin": False}), ("openvino", "openvino", {"precision": "f32", "sizes": None})])
def test_the_documented_lines_load_it_in_a_runtime_of_its_own(tmp_path, monkeypatch, form, library, own):
    onnx = pytest.importorskip("onnx", reason="the extra saturate[inference]")
    pytest.importorskip(library, reason="the extra saturate[inference]")
    from onnx import TensorProto, helper

    shape = ["n", 2]
    graph = helper.make_graph([helper.make_node("Relu", ["input_0"], ["output_0"])], "g", [
        helper.make_tensor_value_info("input_0", TensorProto.FLOAT, shape)], [helper.make_tensor_value_info("output_0", TensorProto.FLOAT, shape)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), tmp_path / "model.onnx")
    settings = {"inputs": {"tuple": [[0]]}, "outputs": {"dict": [["logits", [0]]]}, "parameters": ["x"], "threads": 1, **own,
                "tensors": [{"dtype": "float32", "shape": shape}], "ranges": {"n": [0, None]}}
    x = torch.tensor([[1.0, -1.0]])
    artifact.store(tmp_path / "artifact", Entry(form, ["model.onnx"], settings), program=tmp_path, record=RECORD, facts=FACTS, threads=1,
                   inputs=[(x,)], outputs=[{"logits": x.relu()}])
    loaded = artifact.load(tmp_path / "artifact", verify=True)
    assert torch.equal(loaded(x=x)["logits"], x.relu())
    monkeypatch.chdir(tmp_path)
    names = {"x": x}
    exec(snippet(form), names)
    assert names["outputs"][0].tolist() == [[1.0, 0.0]]


# -- damage ------------------------------------------------------------------------------------------------------------


def flip(folder):
    path = folder / "model.pt2"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replaced_by(name, how):
    def damage(folder):
        (folder / name).unlink()
        how(folder / name)

    return damage


DAMAGE = {
    "a flipped bit": (flip, "SHA-256"),
    "a truncated file": (lambda folder: os.truncate(folder / "model.pt2", 100), "bytes"),
    "a missing file": (lambda folder: (folder / "examples.bin").unlink(), "missing"),
    "a link": (replaced_by("model.pt2", lambda path: path.symlink_to("/etc/hostname")), "link"),
    "a pipe": (replaced_by("model.pt2", os.mkfifo), "no regular file"),
    "a folder": (replaced_by("model.pt2", os.mkdir), "cannot be read"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
    "a manifest that is a pipe": (replaced_by("manifest.json", os.mkfifo), "no file of the kind"),
    "a manifest that is a link": (replaced_by("manifest.json", lambda path: path.symlink_to("/dev/zero")), "no file of the kind"),
    "an empty manifest": (lambda folder: (folder / "manifest.json").write_text(""), "not readable"),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 200), "not readable"),
    "a manifest that is not text": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe\x00"), "not readable"),
    "a deep manifest": (lambda folder: (folder / "manifest.json").write_text('{"kind": ' + "[" * 100_000), "not readable"),
    "another kind": (lambda folder: rewrite(folder, lambda plain: plain.update(kind="npm")), "of another kind"),
    "a later version": (lambda folder: rewrite(folder, lambda plain: plain.update(schema=3)), "schema is 3"),
    "a field of another type": (lambda folder: rewrite(folder, lambda plain: plain.update(files=7)), "not readable"),
    "an unknown format": (lambda folder: rewrite(folder, lambda plain: plain.update(format="os")), "format 'os'"),
    "a private module as format": (lambda folder: rewrite(folder, lambda plain: plain.update(format="_program")), "format"),
    "a program that is not listed": (lambda folder: rewrite(folder, lambda plain: plain.update(program=["other.pt2"])), "does not list"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_has_a_name(stored, name):
    damage, words = DAMAGE[name]
    damage(stored)
    with pytest.raises(ArtifactDamaged) as caught:
        artifact.load(stored)
    assert words in caught.value.card() and "help:" in caught.value.card()


def test_every_flipped_bit_of_a_manifest_is_damage_or_changes_nothing(stored, program):
    """White space and the order of keys mean nothing; all else is under the digest."""
    artifact.confirm(stored, BEST)
    path, inputs = stored / artifact.MANIFEST, program[3]
    whole, known = path.read_bytes(), artifact.read(stored)
    found = 0
    for place in range(0, len(whole), 3):
        data = bytearray(whole)
        data[place] ^= 1 << place % 7
        path.write_bytes(data)
        try:
            assert artifact.read(stored) == known, bytes(data[max(0, place - 20):place + 20])
        except ArtifactDamaged:
            found += 1
    assert found > 0.8 * len(whole) / 3     # the rest is white space
    path.write_bytes(whole)
    assert artifact.load(stored)(*inputs)["logits"].shape == (4, 3)


def test_an_artifact_of_the_first_version_has_no_digest_and_gets_one_when_it_is_saved(stored, tmp_path):
    path = stored / artifact.MANIFEST
    plain = json.loads(path.read_text())
    path.write_text(json.dumps({**{key: value for key, value in plain.items() if key != "digest"}, "schema": 1}))
    artifact.load(stored, verify=True).save(tmp_path / "again")
    again = json.loads((tmp_path / "again" / artifact.MANIFEST).read_text())
    assert again == plain and again["schema"] == 2 and again["digest"] == artifact.digest(again)


@pytest.mark.parametrize("outputs", [[7], [-1], [True], [0, 1], {"class": "os:system"}, {"list": 3}, {"dict": [[{"x": 1}, [0]]]}, {"dict": [[[None, {}], [0]]]}, {"value": []}, 7,
                                     {"tuple of": 3, "fields": [["a", [0]]]}, {"fields of": "a:b", "fields": [[3, [0]]]}])
def test_outputs_that_are_no_description_of_the_answer_are_refused_when_it_is_loaded(stored, outputs):
    rewrite(stored, lambda plain: plain["settings"].update(outputs=outputs))
    with pytest.raises(ArtifactDamaged):
        artifact.load(stored)


def test_what_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "nothing"):
        with pytest.raises(ArtifactDamaged, match="no artifact"):
            artifact.load(path)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret", "a\\b", "./model.pt2", "", ".", "model.pt2/", "a//b", "x\0y"])
def test_no_name_leads_out_of_the_folder(stored, name):
    (stored.parent / "secret").write_text("s")
    rewrite(stored, lambda plain: plain["files"].append({"path": name, "size_bytes": 1, "sha256": folders.digest(stored.parent / "secret")[1]}))
    with pytest.raises(ArtifactDamaged, match="not whole"):
        artifact.load(stored)


def test_a_folder_that_is_a_link_inside(stored, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "data").write_text("s")
    (stored / "sub").symlink_to(tmp_path / "outside")
    size, sha = folders.digest(tmp_path / "outside" / "data")
    rewrite(stored, lambda plain: plain["files"].append({"path": "sub/data", "size_bytes": size, "sha256": sha}))
    with pytest.raises(ArtifactDamaged) as caught:
        artifact.load(stored)
    assert "link" in caught.value.cause


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("forged", [False, True])
def test_a_pickle_is_never_executed(stored, tmp_path, forged):
    """In place of the program: by itself, and with a manifest that was rewritten to fit."""
    mark = tmp_path / "executed"
    for content in (pickle.dumps(Bomb(mark)), torch_file(Bomb(mark), tmp_path)):
        (stored / "model.pt2").write_bytes(content)
        if forged:
            forge(stored)
        with pytest.raises(ArtifactDamaged):
            artifact.load(stored)
        assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists(), "the bomb works"


def forge(folder):
    """Make the manifest fit the program that is there."""
    size, sha = folders.digest(folder / "model.pt2")
    rewrite(folder, lambda plain: [one.update(size_bytes=size, sha256=sha) for one in plain["files"] if one["path"] == "model.pt2"])


def torch_file(thing, folder):
    torch.save(thing, folder / "bomb.pt")
    return (folder / "bomb.pt").read_bytes()


@pytest.mark.parametrize("leaf", [{"offset": 10**9}, {"shape": [10**12]}, {"shape": [-1, 3]}, {"dtype": "load"}, {"dtype": "nothing"}, {"dtype": "quint8"},
                                  {"offset": -5}, {"shape": [0, 2**62, 4]}, {"shape": [0, 2**63]}])
def test_forged_examples_are_refused(stored, leaf):
    rewrite(stored, lambda plain: plain["examples"][0]["input_leaves"][0].update(leaf))
    with pytest.raises(ArtifactDamaged, match="not whole"):
        artifact.load(stored).verify()


def test_examples_of_another_structure(stored):
    rewrite(stored, lambda plain: plain["examples"][0].update(outputs={"value": 3}))
    found = artifact.load(stored).verify()
    assert not found.ok
    for forged in ({"inputs": [7]}, {"inputs": {"value": 1}}, {"outputs": {"list": 3}}, {"outputs": [9]}):
        rewrite(stored, lambda plain, forged=forged: plain["examples"][0].update(forged))
        with pytest.raises(ArtifactDamaged):
            artifact.load(stored).verify()


@pytest.mark.parametrize("value", [None, -1, "x", [], {}, 1e308])
def test_forged_settings_end_in_a_named_error(stored, value):
    """Or in a program that answers as it did."""
    plain = json.loads((stored / artifact.MANIFEST).read_text())
    for key in plain["settings"]:
        rewrite(stored, lambda new, key=key: new.update(settings={**plain["settings"], key: value}))
        try:
            artifact.load(stored).verify()
        except (ArtifactDamaged, EnvironmentProblem) as error:
            assert error.remedy


@pytest.mark.parametrize("settings", [{"threads": 2}, {"session": {"threads": "2"}}])
def test_a_program_takes_no_more_threads_than_its_process_is_given(stored, monkeypatch, settings):
    """Each of two processes that serve on two cores took both: whatever brings its threads along seemed to gain nothing by a second one."""
    plain, seen = json.loads((stored / artifact.MANIFEST).read_text()), []
    rewrite(stored, lambda new: new.update(settings={**plain["settings"], **settings}))
    monkeypatch.setattr(exported, "load", lambda torch, folder, entry: seen.append(entry.settings.get("threads") or int(entry.settings["session"]["threads"])))
    for given in (None, 1, 2, 3):
        copy.copy(artifact.load(stored, threads=given))
    assert seen == [2, 2, 1, 1, 2, 2, 2, 2], "a copy takes as many"
    for wrong in (0, True, "2"):
        with pytest.raises(UsageError, match="threads is"):
            artifact.load(stored, threads=wrong)


@pytest.mark.parametrize("settings", [{"threads": 10**6}, {"threads": "9" * 5000}, {"session": {"threads": "1000000"}}, None])
def test_a_number_of_threads_that_no_machine_has_is_not_tried(stored, monkeypatch, settings):
    """torch started as many as the machine let it, and no other program there could start anything for a minute."""
    plain, tried = json.loads((stored / artifact.MANIFEST).read_text()), []
    monkeypatch.setattr(torch, "set_num_threads", tried.append)
    rewrite(stored, lambda new: new.update(settings={**plain["settings"], **settings}) if settings else new["made_on"].update(threads=10**6))
    with pytest.raises(ArtifactDamaged, match="number of threads"):
        artifact.load(stored)
    assert tried == []


# -- full disk, kill -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["fsync", "rename", "mkdir"])
def test_a_full_disk_leaves_the_old_one(program, stored, monkeypatch, failing):
    real, calls = getattr(os, failing), []

    def full(*arguments, **options):
        calls.append(arguments)
        if failing != "rename" or len(calls) == 2:      # the second rename: the old one is out of its place already
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **options)

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(EnvironmentProblem) as caught:
        make(program, stored)
    monkeypatch.undo()
    assert "no space" in caught.value.message and calls
    artifact.load(stored, verify=True)
    assert leftovers(stored.parent) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_really_full_disk(program, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        make(program, disk / "artifact")
        size = sum(path.stat().st_size for path in (disk / "artifact").iterdir())
        (disk / "filler").write_bytes(bytes(max(0, os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - size // 2)))
        for target in ("artifact", "another"):
            with pytest.raises(EnvironmentProblem, match="no space"):
                make(program, disk / target)
        assert leftovers(disk) == [] and not (disk / "another").exists()
        artifact.load(disk / "artifact", verify=True)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


#: A process that is stopped or killed while it saves: before the folder is durable, before it takes its place, and after
#: the old one has left it.
SAVING = """
import os, signal, sys
from saturate.inference import artifact, folders
moment, end = sys.argv[2], getattr(signal, sys.argv[3])
def stop(*_):
    print("there", flush=True)
    os.kill(os.getpid(), end)
if moment == "renamed":
    rename = os.rename
    os.rename = lambda *paths: (rename(*paths), stop())
else:
    setattr(folders, moment, stop)
with folders.building(sys.argv[1], artifact.is_artifact) as new:
    (new / "manifest.json").write_text("half")
"""


@pytest.mark.parametrize("moment", ["synchronise", "_take_place", "renamed"])
def test_a_kill_leaves_the_old_one_and_the_next_load_tidies_up(stored, moment):
    done = subprocess.run([sys.executable, "-c", SAVING, str(stored), moment, "SIGKILL"], stdout=subprocess.DEVNULL)
    assert done.returncode == -9 and leftovers(stored.parent)
    artifact.load(stored, verify=True)
    assert leftovers(stored.parent) == []


def test_what_a_living_process_works_on_stays(stored, tmp_path):
    saving = subprocess.Popen([sys.executable, "-c", SAVING, str(stored), "synchronise", "SIGSTOP"], stdout=subprocess.PIPE)
    try:
        assert saving.stdout.readline() == b"there\n"
        artifact.load(stored).save(tmp_path / "another")
        assert len(leftovers(stored.parent)) == 1
    finally:
        saving.kill()
        saving.communicate()
    artifact.load(stored).save(tmp_path / "another")
    assert leftovers(stored.parent) == []


def test_a_killed_change_of_the_manifest_is_tidied_up_and_other_files_stay(stored):
    for path in (stored / f"{durable.TEMPORARY}0", stored.parent / f"{durable.TEMPORARY}1"):
        path.write_text("half")             # beside it: perhaps of a checkpoint that is being written
    (stored.parent / f"{durable.TEMPORARY}2-of-old").mkdir()
    (stored.parent / "old").mkdir()
    artifact.load(stored)
    assert leftovers(stored.parent) == [f"{durable.TEMPORARY}1"] and leftovers(stored) == []


@pytest.mark.parametrize("how", ["save", "load"])
def test_what_another_program_is_writing_in_a_folder_that_was_named_by_mistake_stays(stored, tmp_path, how):
    """As a training does where its checkpoints are."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "last.pt").write_bytes(b"old")

    def write(stream):
        stream.write(b"new")
        with pytest.raises((ArtifactDamaged, UsageError)):
            artifact.load(stored).save(folder) if how == "save" else artifact.load(folder)

    durable.replace(folder / "last.pt", write)
    assert (folder / "last.pt").read_bytes() == b"new" and leftovers(folder) == []


def test_artifacts_of_one_search_do_not_replace_each_other(tmp_path):
    for name in ("1", "3", f"{durable.TEMPORARY}0"):
        (tmp_path / name).mkdir()
    assert artifact.next_folder(tmp_path).name == "4" and artifact.next_folder(tmp_path / "none").name == "1"


# -- elsewhere ---------------------------------------------------------------------------------------------------------


def elsewhere(monkeypatch, **changes):
    real = hardware.here
    monkeypatch.setattr(hardware, "here", lambda *words: msgspec.structs.replace(real(*words), **changes))


def test_no_warning_where_it_was_made(stored, recwarn):
    assert artifact.load(stored).differences == () and not recwarn.list


@pytest.mark.parametrize("change, words", [
    ({"cpu_flags": []}, "lacks"),
    ({"architecture": "riscv64"}, "riscv64"),
    ({"cpu_flags": ["everything"]}, "lacks"),
])
def test_another_machine_warns_and_offers_to_verify(stored, monkeypatch, change, words):
    rewrite(stored, lambda plain: plain["made_on"].update(cpu_flags=["avx2", "avx512_vnni"]))
    elsewhere(monkeypatch, **change)
    with pytest.warns(UserWarning, match=r"verify\(\)") as caught:
        loaded = artifact.load(stored)
    assert words in str(caught[0].message) and words in " ".join(loaded.differences)
    assert str(caught[0].filename) == __file__, "the warning points at the caller"
    assert loaded.verify().ok


#: A program as a foreign processor meets it: the process that calls it ends at the first instruction that it does not know.
ILLEGAL = "import os, signal\n\ndef load(torch, folder, entry):\n    return lambda *inputs: os.kill(os.getpid(), signal.{})\n"


@pytest.fixture
def native(stored, monkeypatch, tmp_path):
    """An artifact of machine code, made on another processor. Its format, for the trial too, is a file of the test."""
    def make(code):
        places = tmp_path / "site"
        places.mkdir()
        (places / "native_code.py").write_text(code)
        monkeypatch.syspath_prepend(str(places))
        monkeypatch.setattr(probe, "NATIVE", ("exported",))
        child = "from saturate.inference import artifact; import native_code; artifact.importlib.import_module = lambda name: native_code; "
        run = subprocess.run
        monkeypatch.setattr(probe.subprocess, "run", lambda argv, **more: run(
            [*argv[:2], argv[2].replace("from saturate.inference import artifact; ", child), *argv[3:]], **more))
        return stored

    rewrite(stored, lambda plain: plain["made_on"].update(cpu_flags=["avx2", "amx_int8", "nonsense"]))
    return make


def test_machine_code_that_this_processor_does_not_know_is_refused_and_this_process_lives(native):
    folder = native(ILLEGAL.format("SIGILL"))
    with pytest.raises(EnvironmentProblem, match="machine code for another processor") as caught:
        artifact.load(folder)
    assert "ended by SIGILL" in caught.value.cause and "nonsense" in caught.value.cause
    assert "--skip aot-inductor" in caught.value.remedy


def test_machine_code_that_a_trial_shows_to_run_is_loaded_with_a_warning(native):
    folder = native("def load(torch, folder, entry):\n    return lambda *inputs: None\n")
    with pytest.warns(UserWarning, match="lacks"):
        artifact.load(folder)


def test_what_cannot_be_tried_is_refused_and_what_is_at_home_is_not_tried(stored, monkeypatch):
    monkeypatch.setattr(probe, "NATIVE", ("exported",))
    monkeypatch.setattr(probe, "tried", lambda folder: pytest.fail("tried"))
    artifact.load(stored)
    rewrite(stored, lambda plain: plain.update(examples=[], made_on={**plain["made_on"], "cpu": "another"}))
    with pytest.raises(EnvironmentProblem, match="machine code") as caught:
        artifact.load(stored)
    assert "no stored inputs" in caught.value.cause


def test_a_gpu_that_is_not_here(stored, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rewrite(stored, lambda plain: plain["made_on"].update(device="cuda", device_name="H200"))
    with pytest.raises(EnvironmentProblem, match="made for a GPU"):
        artifact.load(stored)


def test_other_versions_are_told():
    made = MadeOn(device="cpu", versions={"torch": "2.13.0+cpu", "onnxruntime": "1.30.0", "torchao": "0.18.0"})
    now = MadeOn(device="cpu", versions={"torch": "2.13.1", "onnxruntime": "1.31.0"})
    assert hardware.other_software(made, now) == ["it was made with onnxruntime 1.30.0, and 1.31.0 is installed",
                                                  "torchao 0.18.0 is not installed here"]


@pytest.mark.parametrize("factor, ok", [(1.0, True), (1 + 1e-5, True), (1.01, False)])
def test_verification_sees_other_answers(program, tmp_path, factor, ok):
    model, inputs = program[2:]
    answer = model(*inputs)
    folder = make(program, tmp_path / "artifact", outputs=[{**answer, "logits": answer["logits"] * factor}])
    found = artifact.load(folder).verify()
    assert found.ok is ok
    if not ok:
        assert "40 dB, and 60 dB are asked for" in found.reason
        with pytest.raises(EnvironmentProblem, match="does not verify"):
            artifact.load(folder, verify=True)


class Noisy(torch.nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


def test_a_model_with_randomness_verifies_and_the_users_numbers_go_on(tmp_path):
    """What was stored is what it answered behind a seed, as all that is compared in a search."""
    inputs, folder = batch()[:1], tmp_path / "program"
    folder.mkdir()
    context = Context(torch=torch, model=Noisy(), device="cpu", inputs=[inputs], calibration=[], facts=dataclasses.replace(FACTS, random=True),
                      folder=folder, threads=1)
    entry = exported.save(context, folder)
    with torch.random.fork_rng():
        facts.seed(torch)
        answers = [context.model(*inputs)]
    loaded = artifact.load(make((folder, entry, context.model, inputs), tmp_path / "artifact", outputs=answers))
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    assert loaded.verify().ok and loaded.verify().ok
    assert torch.equal(torch.rand(3), wanted)


def test_what_a_verification_asks_for_follows_from_the_candidate(whole):
    manifest = artifact.read(whole)
    asked = {numerics: [artifact._demanded_db(msgspec.structs.replace(manifest, numerics=numerics, agreement_db=agreed))
                        for agreed in (None, 5.0, 35.0, 200.0)] for numerics in ("reordering", "precision")}
    assert asked == {"reordering": [60, 60, 60, 60], "precision": [30, 20, 35, 60]}


@pytest.mark.parametrize(("dtype", "demanded"), [("bfloat16", 30), ("float16", 45), ("float64", 60), ("int64", 60)])
def test_a_lossless_program_of_a_shorter_format_need_not_agree_better_than_that_format_does(whole, dtype, demanded):
    """Sums in another order, as on another processor, leave some 40 dB in bfloat16."""
    manifest = artifact.read(whole)
    leaves = [msgspec.structs.replace(leaf, dtype=dtype) for leaf in manifest.examples[0].output_leaves]
    manifest = msgspec.structs.replace(manifest, numerics="reordering", examples=[msgspec.structs.replace(manifest.examples[0], output_leaves=leaves)])
    assert artifact._demanded_db(manifest) == demanded


def test_a_program_that_fails_on_its_own_inputs_does_not_verify(stored):
    loaded = artifact.load(stored)

    def broken(*inputs):
        raise RuntimeError("illegal instruction")

    loaded._call = broken
    found = loaded.verify()
    assert not found.ok and "illegal instruction" in found.reason


def test_a_verification_that_compares_nothing_is_none(program, tmp_path):
    folder = make(program, tmp_path / "artifact", outputs=[None])
    loaded = artifact.load(folder)
    loaded._call = lambda *inputs: None
    found = loaded.verify()
    assert not found.ok and "no tensor" in found.reason


# -- examples ----------------------------------------------------------------------------------------------------------


def test_examples_hold_every_kind_of_tensor(tmp_path):
    tensors = (torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16), torch.tensor([True, False]), torch.arange(6).reshape(2, 3).T,
               torch.zeros(0, 4), torch.tensor(3.0), torch.tensor([1 + 2j]).conj(), torch.tensor([math.nan, math.inf]),
               torch.ones(3).to(torch.float8_e4m3fn))
    inputs = (*tensors, [1, None, "text", {"key": tensors[0]}])
    found, why = examples.write(torch, tmp_path / "x", [inputs], [tensors[0]])
    again = msgspec.json.decode(msgspec.json.encode(found), type=list[type(found[0])])
    (given, answers), = examples.read(torch, (tmp_path / "x").read_bytes(), again)
    assert why == "" and given[-1] == [1, None, "text", {"key": given[0]}]
    for before, after in zip(tensors, given):
        assert before.dtype == after.dtype and before.shape == after.shape
        assert torch.equal(before.to(torch.complex64).nan_to_num(), after.to(torch.complex64).nan_to_num())
    assert torch.equal(answers[0], tensors[0])


def test_examples_that_cannot_be_stored_say_why(program, tmp_path):
    folder = make(program, tmp_path / "a", inputs=[(object(),)])
    found = artifact.load(folder).verify()
    assert not found.ok and "object" in found.reason
    sparse = torch.eye(3).to_sparse()
    assert examples.write(torch, tmp_path / "y", [(sparse,)], [sparse]) == ([], "a tensor is sparse")
    assert examples.write(torch, tmp_path / "z", [], []) == ([], "it was stored without examples")


def test_examples_stay_small(tmp_path, monkeypatch):
    monkeypatch.setattr(examples, "MOST_BYTES", 1000)
    one = torch.zeros(100)      # 400 bytes, twice
    found, _ = examples.write(torch, tmp_path / "x", [(one,)] * 3, [one] * 3)
    assert len(found) == 1
    monkeypatch.setattr(examples, "MOST_BYTES", 10**6)
    assert len(examples.write(torch, tmp_path / "y", [(one,)] * 9, [one] * 9)[0]) == examples.MOST


def test_agreement():
    a = torch.tensor([1.0, math.nan, math.inf])
    agree = examples.agreement_db
    assert agree(torch, a, a.clone()) == math.inf
    assert agree(torch, a, torch.tensor([1.1, math.nan, math.inf])) == pytest.approx(20, abs=0.01)
    assert agree(torch, a, torch.tensor([1.0, 0.0, math.inf])) == -math.inf
    assert agree(torch, torch.zeros(2), torch.ones(2)) == -math.inf
    assert agree(torch, torch.tensor([1, 2]), torch.tensor([1, 3])) == -math.inf


def test_another_batch_size():
    inputs = (torch.arange(6).reshape(3, 2), torch.tensor(5), "text")
    wider = examples.of_size(torch, inputs, 4)
    assert wider[0].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]] and wider[1] == 5 and wider[2] == "text"
    assert examples.of_size(torch, inputs, 1)[0].tolist() == [[0, 1]]
    assert examples.of_size(torch, (torch.zeros(2, 3), torch.zeros(4)), 2) is None
    assert examples.of_size(torch, (torch.tensor(1.0),), 2) is None


def test_an_artifact_is_not_built_at_a_link_that_leads_to_itself(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to("model")
    with pytest.raises(UsageError, match="is a file"), folders.building(tmp_path / "model", artifact.is_artifact):
        pytest.fail("there is no folder to fill")
    assert (tmp_path / "model").is_symlink()
