"""`saturate bench`: batch sizes in processes of their own, rows with reasons, ratios from a race."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from saturate.cli import bench, main
from saturate.errors import EnvironmentProblem
from saturate.records.bench import BatchRow, BenchRecord, Measured
from saturate.records.inference import CandidateRecord, ModelFacts, Timing

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Two artifacts of a small model: `open` takes any batch, `fixed` one of four."""
    from saturate.inference import artifact
    from saturate.inference.formats import exported
    from saturate.inference.techniques._api import Context

    class Fixed(torch.nn.Module):
        def forward(self, x):
            return x.reshape(4, 8).softmax(1)

    root = tmp_path_factory.mktemp("bench")
    inputs = (torch.randn(4, 8),)
    for name, model in (("open", torch.nn.Linear(8, 8).requires_grad_(False)), ("fixed", Fixed())):
        facts = ModelFacts(kind=name, torch=torch.__version__, batch_size=4)
        (root / f"program-{name}").mkdir()
        entry = exported.save(Context(torch=torch, model=model.eval(), device="cpu", inputs=[inputs], calibration=[], facts=facts,
                                      folder=root, threads=1), root / f"program-{name}")
        record = CandidateRecord(id=name, techniques=[], fate="kept", reason="")
        artifact.store(root / name, entry, program=root / f"program-{name}", record=record, facts=facts, threads=1, inputs=[inputs],
                       outputs=[model(*inputs)])
    return root


def rewrite(folder, manifest):
    """Another manifest, as one that was made so."""
    from saturate.inference import artifact

    (folder / artifact.MANIFEST).write_text(json.dumps({**manifest, "digest": artifact.digest(manifest)}))


class Process:
    """A candidate's process, acted: `ms` per call of a batch of one."""

    def __init__(self, folder, inputs, threads, ms):
        from saturate.inference.failures import WorkerFailed

        rows = inputs[0].shape[0]
        if Path(folder).name == "fixed" and rows != 4:
            raise WorkerFailed("failed", f"input tensor 0 has shape [{rows}, 8], this program was made for [4, 8]")
        self.ns = int(ms * rows * 1e6)
        self.ready = type("Ready", (), {"prepare_s": 1.0, "first_call_s": 0.5})
        self.open = True
        self.cpu, self.shares = None, 1

    def block(self, count, *, cpu=None):
        assert self.open
        return [self.ns] * count

    def freeze(self): ...

    def thaw(self): ...

    def memory_bytes(self):
        return 100 * 2**20

    def close(self):
        self.open = False


@pytest.fixture
def acted(monkeypatch):
    monkeypatch.setattr(bench, "_MEASURE_S", 0.0)

    def starter(work, inputs, threads, device):
        return lambda folder: Process(folder, inputs, threads, 2.0 if Path(folder).name == "fixed" else 1.0)

    monkeypatch.setattr(bench, "_starter", starter)


def call(capsys, *words):
    code = main.main(["bench", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_rows_of_batch_sizes(capsys, stored, acted):
    code, out, _ = call(capsys, stored / "open", "--batch", "1,8,32", "--json")
    record = json.loads(out)
    assert code == 0 and [row["batch"] for row in record["rows"]] == [1, 8, 32] and record["threads"] == 1
    for row in record["rows"]:
        assert row["artifact"]["latency_ms"]["p50"] == row["batch"] and row["artifact"]["throughput_per_s"] == 1000
        assert row["artifact"]["memory_bytes"] == 100 * 2**20 and row["artifact"]["load_s"] == 1.5 and row["against"] is None
    code, out, _ = call(capsys, stored / "open", "--batch", "1,8,32")
    assert code == 0 and len(out.splitlines()) == 5 and "samples/s" in out and "100 MiB" in out


@pytest.mark.parametrize("end", [KeyboardInterrupt(), EnvironmentProblem("no process can be started for a candidate", cause="Resource temporarily unavailable")])
def test_sizes_that_were_measured_outlive_an_end_in_a_later_one(capsys, stored, acted, monkeypatch, end):
    measure = bench._row

    def row(work, folder, other, size, *more):
        if size == 32:
            raise end
        return measure(work, folder, other, size, *more)

    monkeypatch.setattr(bench, "_row", row)
    code, out, _ = call(capsys, stored / "open", "--batch", "1,8,32", "--json")
    record = json.loads(out)
    assert code == (130 if isinstance(end, KeyboardInterrupt) else 3) and [row["batch"] for row in record["rows"]] == [1, 8] and record["reason"]
    assert "samples/s" in call(capsys, stored / "open", "--batch", "1,8,32")[1]


def test_a_batch_that_is_too_large_is_ended_before_the_machine_runs_out(monkeypatch, tmp_path):
    """Nothing limited its memory: the kernel ended whatever it chose."""
    from saturate.inference import api, process

    given = {}
    monkeypatch.setattr(process, "Worker", lambda *names, **more: given.update(more))
    monkeypatch.setattr(api, "memory_limit", {"cpu": 10**9}.get)
    bench._starter(tmp_path, (torch.zeros(4, 8),), 1, "cpu")(tmp_path)
    assert given["memory_bytes"] == 10**9


def test_the_stored_size_is_the_default(capsys, stored, acted):
    assert [row["batch"] for row in json.loads(call(capsys, stored / "open", "--json")[1])["rows"]] == [4]


def test_a_size_that_it_cannot_take_is_a_row_with_a_reason(capsys, stored, acted):
    code, out, _ = call(capsys, stored / "fixed", "--batch", "1,4", "--json")
    first, second = json.loads(out)["rows"]
    assert code == 0 and "this program was made for [4, 8]" in first["artifact"]["reason"] and first["artifact"]["latency_ms"] is None
    assert second["artifact"]["latency_ms"]["p50"] == 8 and second["artifact"]["reason"] == ""
    assert "this program was made for" in call(capsys, stored / "fixed", "--batch", "1,4")[1]
    code, out, err = call(capsys, stored / "fixed", "--batch", "1,2", "--json")
    assert code == 3 and len(json.loads(out)["rows"]) == 2 and "at none of these batch sizes" in err


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory:\n you tried"), MemoryError("no room"),
                                   EnvironmentProblem("inputs cannot be written", cause="No space left on device")])
def test_a_size_that_the_machine_does_not_hold_is_a_row_with_a_reason(capsys, stored, acted, monkeypatch, error):
    from saturate.inference import examples

    made = examples.of_size

    def of_size(torch, batch, size):
        if size > 1000:
            raise error
        return made(torch, batch, size)

    monkeypatch.setattr(examples, "of_size", of_size)
    assert main.main(["bench", str(stored / "open"), "--batch", "8,9999999", "--json"]) == 0
    small, large = json.loads(capsys.readouterr().out)["rows"]
    assert small["artifact"]["latency_ms"]["p50"] > 0 and large["artifact"]["latency_ms"] is None
    assert (getattr(error, "cause", "") or str(error).split()[0]) in large["artifact"]["reason"]


def test_against_another(capsys, stored, acted):
    code, out, _ = call(capsys, stored / "open", "--against", stored / "fixed", "--batch", "4,8", "--json")
    four, eight = json.loads(out)["rows"]
    assert code == 0 and four["verdict"] == "faster" and four["speedup"] == pytest.approx(2.0, rel=0.01)
    assert four["speedup_ci"][0] < 2.0 < four["speedup_ci"][1] and four["against"]["latency_ms"]["p50"] == 8
    assert eight["verdict"] is None and "made for" in eight["against"]["reason"] and eight["artifact"]["latency_ms"]["p50"] == 8
    code, out, err = call(capsys, stored / "open", "--against", stored / "fixed", "--batch", "8", "--json")
    assert code == 3 and json.loads(out)["rows"][0]["artifact"]["latency_ms"], "what was measured is told"
    assert "raced at none" in err and "made for [4, 8]" in err, "of an artifact of another model it was 0, as if there had been a race"
    text = call(capsys, stored / "open", "--against", stored / "fixed", "--batch", "4")[1]
    assert "faster" in text and "against" in text and "2.00x [" in text


@pytest.mark.parametrize("words, part", [
    (["--batch", "0"], "is not a list of batch sizes"),
    (["--batch", "1,,2"], "is not a list of batch sizes"),
    (["--threads", "none"], "is not a number of threads"),
    (["--agianst", "x"], "did you mean '--against'?"),
])
def test_bad_options_are_named(capsys, stored, words, part):
    code, out, err = call(capsys, stored / "open", *words)
    assert (code, out) == (2, "") and part in err


def test_settings_that_somebody_made_up_are_damage(capsys, stored, acted, tmp_path):
    """They ended in a traceback, and without the object that was asked for."""
    for number, settings in enumerate(({"threads": "abc"}, {"session": [1]}, {"threads": -1})):
        folder = Path(shutil.copytree(stored / "open", tmp_path / f"made{number}"))
        plain = json.loads((stored / "open" / "manifest.json").read_text())
        rewrite(folder, {**plain, "settings": {**plain["settings"], **settings}})
        code, out, err = call(capsys, folder, "--json")
        assert code == 3 and "names no number of threads" in json.loads(out)["reason"] and "Traceback" not in err, err


def test_threads_that_the_program_brings_along(capsys, stored, acted, tmp_path):
    """ONNX Runtime's threads are stored: another number would be a lie in the table."""
    for settings in ({"threads": 1}, {"session": {"threads": "1"}}):
        folder = Path(shutil.copytree(stored / "open", tmp_path / "fixed", dirs_exist_ok=True))
        plain = json.loads((stored / "open" / "manifest.json").read_text())
        rewrite(folder, {**plain, "settings": {**plain["settings"], **settings}})
        code, out, err = call(capsys, folder, "--threads", "2", "--json")
        assert code == 2 and "runs on 1 thread," in err and "runs on 1 thread," in json.loads(out)["reason"]
        assert call(capsys, folder, "--threads", "1")[0] == call(capsys, folder)[0] == 0
    plain = json.loads((stored / "open" / "manifest.json").read_text())
    rewrite(folder, {**plain, "settings": {**plain["settings"], "threads": 2}})
    assert json.loads(call(capsys, folder, "--threads", "1", "--json")[1])["threads"] == 1
    assert json.loads(call(capsys, stored / "open", "--threads", "2", "--json")[1])["threads"] == 2


def test_two_programs_with_other_threads_are_not_raced_as_if_they_had_the_same(capsys, stored, acted, tmp_path):
    folder = Path(shutil.copytree(stored / "fixed", tmp_path / "two threads"))
    plain = json.loads((folder / "manifest.json").read_text())
    rewrite(folder, {**plain, "settings": {**plain["settings"], "threads": 2}})
    code, out, err = call(capsys, stored / "open", "--against", folder, "--json")
    assert code == 2 and "runs on 1 thread" in err and "on 2" in err and not json.loads(out)["rows"]
    assert call(capsys, stored / "open", "--against", folder, "--threads", "2")[0] == 0


def test_a_race_that_fails_leaves_the_numbers(capsys, stored, acted, monkeypatch):
    from saturate.inference import racing
    from saturate.inference.failures import WorkerFailed

    def race(*starts):
        raise WorkerFailed("timeout", "a call took longer than 600 s")

    monkeypatch.setattr(racing, "race", race)
    row = json.loads(call(capsys, stored / "open", "--against", stored / "fixed", "--json")[1])["rows"][0]
    assert "longer than 600 s" in row["reason"] and row["speedup"] is None and row["artifact"]["latency_ms"]
    assert "the race failed" in call(capsys, stored / "open", "--against", stored / "fixed")[1]


def test_a_damaged_artifact_has_a_name(capsys, stored, tmp_path):
    folder = Path(shutil.copytree(stored / "open", tmp_path / "bad"))
    (folder / "model.pt2").write_bytes(b"x")
    for words in ([folder], [stored / "open", "--against", folder], [tmp_path]):
        code, out, err = call(capsys, *words, "--json")
        assert code == 3 and "E350" in err and json.loads(out)["rows"] == [] and json.loads(out)["reason"]


def test_an_artifact_without_inputs(capsys, stored, tmp_path):
    folder = Path(shutil.copytree(stored / "open", tmp_path / "bare"))
    plain = json.loads((folder / "manifest.json").read_text())
    rewrite(folder, {**plain, "examples": [], "no_examples": "a tensor is sparse"})
    code, _, err = call(capsys, folder)
    assert code == 3 and "holds no inputs" in err and "a tensor is sparse" in err


def test_inputs_without_a_common_dimension(stored, monkeypatch):
    from saturate.inference import artifact

    monkeypatch.setattr(artifact, "examples_of", lambda torch, folder: [((torch.zeros(2, 3), torch.zeros(4)), [])])
    row = bench._row(stored, stored / "open", None, 8, 1, "cpu", lambda text: None)
    assert "do not share a first dimension" in row.artifact.reason


def test_a_record_is_shown_whatever_it_holds():
    times = Timing(p50=1.0, p90=1.1, p99=1.2, calls=9)
    record = BenchRecord(artifact="a", candidate="x", rows=[
        BatchRow(batch=None, artifact=Measured(latency_ms=times)), BatchRow(batch=3, artifact=Measured(reason="no"), against=Measured(reason="nor this"))])
    text = bench.shown(record)
    assert "as stored" in text and "nor this" in text


@pytest.mark.slow
def test_real_processes(capsys, stored, monkeypatch):
    """Two processes per size, really started, timed and raced."""
    monkeypatch.setattr(bench, "_MEASURE_S", 0.2)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, out, err = call(capsys, stored / "open", "--against", stored / "fixed", "--batch", "1,4", "--json")
    one, four = json.loads(out)["rows"]
    assert code == 0, err
    assert one["against"]["latency_ms"] is None and "this program was made for" in one["against"]["reason"]
    assert one["artifact"]["latency_ms"]["p50"] > 0 and one["artifact"]["memory_bytes"] > 10 * 2**20
    assert four["speedup"] > 0 and four["speedup_ci"][0] <= four["speedup"] <= four["speedup_ci"][1]
