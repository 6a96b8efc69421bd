"""bench/gpu_evidence.py, rehearsed without a GPU: what is found is on disk, whatever the next part does; what is old is flagged."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CITING = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture
def bench(monkeypatch):
    """The script as a module, without torch: the probe answers for a machine."""
    module = types.SimpleNamespace(**runpy.run_path(str(ROOT / "bench" / "gpu_evidence.py")))
    machine = {"missing": [], "python": "3.12.3", "torch": "2.11.0", "cuda": "13.0", "device": "NVIDIA H200", "capability": [9, 0]}
    module.globals = module.main.__globals__
    monkeypatch.setitem(module.globals, "PROBE", f"print({json.dumps(json.dumps(machine))})")
    module.part = lambda name, code, seconds=30.0, read=module._object, speaks_of=("bench/gpu_evidence.py",): module.Part(
        name, seconds, speaks_of, lambda seconds, folder: ["-c", code], read)
    return module


def written(tmp_path):
    return json.loads((tmp_path / "nvidia-h200.json").read_text())


SEES = "import json, os, sys; print(json.dumps({'seen': {k: v['status'] for k, v in json.load(open(sys.argv[1]))['parts'].items()}}))"


def test_what_was_found_is_on_disk_before_the_next_part_begins(bench, tmp_path, capfd):
    look = SEES.replace("sys.argv[1]", repr(str(tmp_path / "nvidia-h200.json")))
    parts = [bench.part("first", "print('{\"speedup\": 1.5, \"recipe\": \"/home/me/x\"}')"),
             bench.part("broken", "import sys; print('no JSON'); print('the cause', file=sys.stderr); sys.exit(7)"),
             bench.part("second", look), bench.part("other", "print(1)")]
    assert bench.main(["--out", str(tmp_path), "--only", "first,broken,second"], parts) == 1
    found = written(tmp_path)
    assert found["parts"]["first"]["found"] == {"exit_code": 0, "speedup": 1.5}
    assert found["parts"]["broken"]["status"] == "failed" and found["parts"]["broken"]["exit_code"] == 7
    assert "the cause" in found["parts"]["broken"]["output"] and "no JSON" in found["parts"]["broken"]["output"]
    assert found["parts"]["second"]["found"]["seen"] == {"first": "done", "broken": "failed", "second": "not run", "other": "not run"}
    assert found["machine"]["device"] == "NVIDIA H200" and found["machine"]["cores"]
    assert capfd.readouterr().out == f"{tmp_path / 'nvidia-h200.json'}\n"
    assert os.listdir(tmp_path) == ["nvidia-h200.json"]


def test_what_is_kept_names_no_place_of_the_machine(bench, tmp_path):
    code = "import os, sys; print({0!r} + '/tests/a.py', os.path.relpath({0!r}) + '/tests/b.py', os.getcwd() + '/c', sys.prefix + '/bin', {0!r} + '-2'); sys.exit(1)"
    bench.main(["--out", str(tmp_path)], [bench.part("fails", code.format(str(ROOT)))])
    said = written(tmp_path)["parts"]["fails"]["output"]
    assert said.split() == ["./tests/a.py", "./tests/b.py", "FOLDER/c", "PYTHON/bin", f"{ROOT}-2"]


def test_a_part_that_hangs_is_ended_with_what_it_started_and_the_rest_is_run(bench, tmp_path, monkeypatch):
    stubborn = ("import os, signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
                "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(child.pid, flush=True); time.sleep(60)")
    wait = bench._wait
    monkeypatch.setitem(bench.globals, "_wait", lambda process, seconds: wait(process, seconds, patience=0.5))
    parts = [bench.part("hangs", stubborn, seconds=10.0), bench.part("fine", "print('{}')")]
    assert bench.main(["--out", str(tmp_path)], parts) == 1
    found = written(tmp_path)["parts"]
    assert found["hangs"]["status"] == "timed out" and found["fine"]["status"] == "done"
    child = int(found["hangs"]["output"].split()[0])
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] in "ZX"


def test_no_part_begins_that_could_not_end(bench, tmp_path):
    assert bench.main(["--out", str(tmp_path), "--minutes", "0.2"], [bench.part("late", "print('{}')")]) == 1
    assert written(tmp_path)["parts"]["late"] == {"status": "not run", "reason": "the time was over"}


def test_parts_of_an_earlier_call_stay_while_they_are_true(bench, tmp_path):
    parts = [bench.part("one", "print('{\"n\": 1}')"), bench.part("two", "print('{\"n\": 2}')")]
    for only in ("one", "two"):
        assert bench.main(["--out", str(tmp_path), "--only", only], parts) == 0
    assert [part["found"]["n"] for part in written(tmp_path)["parts"].values()] == [1, 2]
    changed = written(tmp_path)
    changed["parts"]["one"]["sources"] = "older"
    (tmp_path / "nvidia-h200.json").write_text(json.dumps(changed))
    bench.main(["--out", str(tmp_path), "--only", "two"], parts)
    assert written(tmp_path)["parts"]["one"]["status"] == "not run"


def test_what_is_missing_is_named_before_anything_runs(bench, tmp_path, monkeypatch, capfd):
    for found, said in (({"missing": ["msgspec", "tomlkit"]}, "missing here: msgspec, tomlkit"), ({"missing": [], "device": ""}, "no CUDA device")):
        monkeypatch.setitem(bench.globals, "PROBE", f"print({json.dumps(json.dumps(found))})")
        assert bench.main(["--out", str(tmp_path)], []) == 3 and said in capfd.readouterr().err
    monkeypatch.setitem(bench.globals, "PROBE", "raise SystemExit('libcudart is missing')")
    assert bench.main(["--out", str(tmp_path)], []) == 3 and "libcudart is missing" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="holds no wheels"):
        bench.main(["--out", str(tmp_path), "--wheels", str(tmp_path)], [])
    assert os.listdir(tmp_path) == []


def test_outcomes_of_tests_are_read_from_what_pytest_prints(bench):
    output = ("tests/gpu/test_cuda.py::test_a[compile-options3] PASSED      [ 50%]\n"
              "tests/gpu/test_cuda.py::test_b FAILED [100%]\n== short summary ==\nFAILED tests/gpu/test_cuda.py::test_b - AssertionError\n")
    found = bench._tests(output, 1)
    assert found["counts"] == {"FAILED": 1, "PASSED": 1} and "AssertionError" in found["failures"]
    assert found["outcomes"] == {"test_cuda.py::test_a[compile-options3]": "PASSED", "test_cuda.py::test_b": "FAILED"}
    beside = "[gw1] [ 50%] PASSED tests/gpu/test_cuda.py::test_a[compile-options3] \n[gw0] [100%] FAILED tests/gpu/test_cuda.py::test_b \n"
    assert bench._tests(beside, 1)["outcomes"] == found["outcomes"], "by pytest-xdist"
    assert bench._tests(output, 2)["counts"] == {"FAILED": 1, "PASSED": 1}, "cut short"
    broken = "ERROR tests/gpu/test_cuda_memory.py - ImportError: no\n" + output + "ERROR tests/gpu/test_cuda.py::test_c - RuntimeError\n"
    assert bench._tests(broken, 1)["outcomes"] == {**found["outcomes"], "test_cuda_memory.py": "ERROR"}, "a file that cannot be read"
    for bad in ((output, 3), ("", 2), ("", 5), ("", 0)):
        with pytest.raises(ValueError):
            bench._tests(*bad)


def test_tests_that_were_all_skipped_are_no_answer(bench, tmp_path):
    """Such as where a package is missing that every file asks for. A rehearsal has no device to run them on."""
    lines = "print('test_cuda.py::test_a SKIPPED (no)\\ntest_cuda.py::test_b SKIPPED (no)')"
    part = bench.part("tests", lines, read=bench._tests)
    assert bench.main(["--out", str(tmp_path)], [part]) == 1
    found = written(tmp_path)["parts"]["tests"]
    assert found["status"] == "failed" and found["reason"] == "every test was skipped" and found["found"]["counts"] == {"SKIPPED": 2}
    assert bench.main(["--out", str(tmp_path), "--rehearse"], [part]) == 0
    assert bench.main(["--out", str(tmp_path)], [bench.part("tests", lines.replace("b SKIPPED", "b PASSED"), read=bench._tests)]) == 0


def test_the_next_call_goes_on_where_the_last_one_ended(bench, tmp_path, monkeypatch):
    parts = [bench.part("one", "print('{\"n\": 1}')"), bench.part("long", "print('{\"n\": 2}')", seconds=600.0),
             bench.part("broken", "raise SystemExit(7)")]
    assert bench.main(["--out", str(tmp_path), "--rest", "--minutes", "5"], parts) == 1
    first = written(tmp_path)["parts"]
    assert {name: part["status"] for name, part in first.items()} == {"one": "done", "long": "not run", "broken": "failed"}, "a shorter one has its turn"
    monkeypatch.setitem(bench.globals, "KEPT", tmp_path)
    (tmp_path / "next").mkdir()
    assert bench.main(["--out", str(tmp_path / "next"), "--rest", "--minutes", "12"], parts) == 0, "an empty folder, as on another machine"
    second = written(tmp_path / "next")["parts"]
    assert second == first | {"long": second["long"]} and second["long"]["found"] == {"exit_code": 0, "n": 2}


def test_a_public_script_runs_in_its_folder_and_is_left_as_it_was(bench, tmp_path, capfd):
    public, out = tmp_path / "public", tmp_path / "out"
    (public / "theirs").mkdir(parents=True)
    (public / "theirs" / "train.py").write_text("print('train')\n")
    reads = "import json, pathlib; print(json.dumps({'script': pathlib.Path('train.py').read_text()}))"
    writes = reads + "; pathlib.Path('train.py').write_text('other')"
    parts = [bench.part("own", "print('{}')")] + [
        dataclasses.replace(bench.part(name, ""), where="theirs", command=lambda seconds, folder, code=code: ["-c", code])
        for name, code in (("public_reads", reads), ("public_writes", writes))]
    assert bench.main(["--out", str(out)], parts) == 0
    assert written(out)["parts"]["public_reads"]["status"] == "not run", "no folder was named"
    assert bench.main(["--out", str(out), "--public", str(public)], parts) == 1
    found = written(out)["parts"]
    assert found["public_reads"]["found"]["script"] == "print('train')\n" and found["public_reads"]["files"]
    assert (found["public_writes"]["status"], found["public_writes"]["reason"]) == ("failed", "the script's files are not as they were")
    for where in ([], ["--public", str(tmp_path / "elsewhere")]):
        with pytest.raises(SystemExit):
            bench.main(["--out", str(out), "--only", "public_reads", *where], parts)
        assert "no script for public_reads" in capfd.readouterr().err


def test_every_part_speaks_of_sources_that_exist_and_four_calls_cover_all(bench):
    for part in bench.PARTS:
        assert all((ROOT / name).exists() for name in part.speaks_of), part.name
        command = part.command(part.seconds, ROOT / "tests")
        assert all(Path(word).exists() for word in command if word.startswith(str(ROOT)) and word.endswith(".py"))
    listed = " ".join(word for part in bench.PARTS for word in part.command(60, ROOT))
    assert all(file.name in listed for file in (ROOT / "tests" / "gpu").glob("test_*.py")), "a file of GPU tests that no part runs"
    waiting = list(bench.PARTS)
    for _ in range(4):
        left = bench.CALL_S - bench.ENDING_S
        for part in tuple(waiting):
            if bench.enough(part, left, False):
                left -= min(part.seconds, left)
                waiting.remove(part)
    assert waiting == [], "even where each takes all that it may"


def test_every_technique_that_a_part_asks_for_exists_and_the_check_tells_right_from_wrong(bench, monkeypatch):
    from saturate.inference.techniques import _registry

    torch = pytest.importorskip("torch")
    asked = {name for part in bench.PARTS for command in [part.command(60, ROOT)] if "--only" in command
             for name in command[command.index("--only") + 1].split(",")}
    assert asked and asked <= set(_registry.load())
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    workload = types.SimpleNamespace(**runpy.run_path(str(ROOT / "bench" / "workloads" / "gpu_inference.py")))
    model = workload.model()
    with torch.no_grad():
        right, wrong = workload.check(model), workload.check(lambda images: -model(images))
    assert set(right) == {1.0} and sum(wrong) < len(wrong) / 2
    assert type(workload.transformer_model()).__name__ == "ViT" and len(workload.transformer_inputs()) > 1


@pytest.mark.slow
def test_decoding_is_compared_with_what_the_device_copies():
    """On a CPU: a rehearsal of the part that never ran elsewhere."""
    pytest.importorskip("torch")
    code = [sys.executable, str(ROOT / "bench" / "workloads" / "gpu_decode.py"), "--budget", "30"]
    done = subprocess.run(code, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"})
    found = json.loads(done.stdout)
    plain = found["ways"][0]
    assert plain["id"] == "plain" and 0 < plain["share_of_copy"] == plain["read_bytes_per_s"] / found["copy_bytes_per_s"]


# -- evidence that is older than the code it speaks of ---------------------------------------------------------------


def cited_but_stale(bench, folder: Path, pages: list[Path], root: Path = ROOT) -> list[str]:
    """"page: file: part" wherever a page names a file of evidence that is missing, or a part's sources have changed."""
    found = []
    for page in pages:
        for name in sorted(set(re.findall(r"evidence/([\w.-]+\.json)", page.read_text(encoding="utf-8")))):
            file = folder / name
            parts = bench.stale(json.loads(file.read_text()), root) if file.is_file() else ["the file is missing"]
            found += [f"{page.name}: {name}: {part}" for part in parts]
    return found


def test_cited_evidence_is_of_the_code_as_it_is(bench):
    assert cited_but_stale(bench, ROOT / "evidence", CITING) == [], "run bench/gpu_evidence.py again, or take the numbers out"


def test_a_change_of_the_sources_is_flagged_where_they_are_cited(bench, tmp_path):
    source = tmp_path / "src" / "part"
    source.mkdir(parents=True)
    (source / "a.py").write_text("x = 1\n")
    (source / "notes.md").write_text("not code")
    page, evidence = tmp_path / "page.md", tmp_path / "gpu.json"
    part = {"status": "done", "speaks_of": ["src/part"], "sources": bench.source_hash(["src/part"], tmp_path)}
    evidence.write_text(json.dumps({"parts": {"tune": part, "tests": part | {"status": "failed", "sources": "?"}}}))

    def flagged(text: str = "1.5x ([evidence](evidence/gpu.json))") -> list[str]:
        page.write_text(text)
        return cited_but_stale(bench, tmp_path, [page], tmp_path)

    assert flagged() == [] and flagged("no number") == []
    assert flagged("evidence/other.json") == ["page.md: other.json: the file is missing"]
    (source / "notes.md").write_text("still not code")
    assert flagged() == []
    for change in (lambda: (source / "a.py").write_text("x = 2\n"), lambda: (source / "a.py").rename(source / "b.py"),
                   lambda: (source / "b.py").unlink(), source.rename):
        change(tmp_path / "src" / "gone") if change == source.rename else change()
        assert flagged() == ["page.md: gpu.json: tune"] and flagged("no number") == []
