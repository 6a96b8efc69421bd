"""`saturate optimize`: names of functions, what it hands to the search, and what it prints however the search ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import types
from pathlib import Path

import pytest

from saturate.cli import main, optimize
from saturate.cli._callables import resolve
from saturate.cli._running import one_signal_interrupts
from saturate.errors import EnvironmentProblem, TooNoisy, UsageError, WorkloadFailed
from saturate.inference import users_code
from saturate.inference.api import known

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "inference"))
import optimizations

USER = '''
"""A user's module."""
import sys
print("imported")

class Model: pass
def build(): print("building"); return Model()
def closes(): raise GeneratorExit
def forks():
    import os
    child = os.fork()
    if child: os.waitpid(child, 0)
    return Model()
def forks_and_leaves():
    import os
    child = os.fork()
    if not child: sys.exit(0)
    os.waitpid(child, 0)
    return Model()
def loader(): return [(1,), (2,)]
def calibration(): return [(3,)]
def nothing(): pass
def score(run): return [1.0, 0.0]
def train(): return [(1, 2)], max
def moves():
    import os
    os.chdir("mypkg")
    return Model()
def wrong_train(): return 7
def gpu(): raise RuntimeError("Found no NVIDIA driver on your system.")
def leaves(): sys.exit(3)
constant = 7
class Network:      # as a torch.nn.Module that was built already
    def __call__(self, x): return x
    def named_modules(self): return []
network = Network()
class Space:
    def inner(): return Model()
'''


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A folder with the user's package, as the working directory; what it imports is forgotten afterwards."""
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "__init__.py").touch()
    (tmp_path / "mypkg" / "model.py").write_text(USER)
    (tmp_path / "mypkg" / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "mypkg" / "bad.py").write_text("def build(:\n")
    (tmp_path / "single.py").write_text(USER)
    (tmp_path / "json.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def api(monkeypatch):
    """The search, replaced: `asked` is what it was asked, `answer` what it does."""
    module = types.ModuleType("saturate.inference.api")
    fake = types.SimpleNamespace(asked=None, answer=lambda: types.SimpleNamespace(record=optimizations.win()))

    def optimized(model, **options):
        fake.asked = {"model": model, **options}
        options["progress"]("a step")
        print("a library prints")
        return fake.answer()

    module.optimize, module.known = optimized, known
    monkeypatch.setitem(sys.modules, "saturate.inference.api", module)
    import saturate.inference

    monkeypatch.setattr(saturate.inference, "api", module, raising=False)
    return fake


WORDS = ["mypkg.model:build", "--inputs", "mypkg.model:loader"]
CHECKED = [*WORDS, "--check", "mypkg.model:score", "--max-drop", "1%"]


def call(capfd, *words):
    code = main.main(["optimize", *map(str, words)])
    captured = capfd.readouterr()
    return code, captured.out, captured.err


# -- what the search is asked ------------------------------------------------------------------------------------------


def test_it_asks_the_search(capfd, user, api):
    code, out, err = call(capfd, *CHECKED, "--train", "mypkg.model:train", "--calibration", "mypkg.model:calibration", "--budget", "20m", "--objective", "throughput", "--limit", "p99_ms=15",
                          "--limit", "peak_memory_gb=4", "--threads", "2", "--only", "threads,compile-inference", "--skip", "tf32-products", "--workdir", "runs/r18",
                          "--lower-is-better", "--relative", "--confidence", "90%", "--metric", "top1",
                          "--score-range", "-1", "2.5")
    assert code == 0
    asked = api.asked
    assert type(asked["model"]).__name__ == "Model" and list(asked["inputs"]) == [(1,), (2,)] and asked["check"](None) == [1.0, 0.0]
    budget = asked["budget"]
    assert (budget.max_drop, budget.relative, budget.higher_is_better, budget.confidence, budget.metric) == (0.01, True, False, 0.9, "top1")
    assert budget.score_range == (-1.0, 2.5)
    assert asked["limits"] == {"p99_ms": 15, "peak_memory_gb": 4} and asked["time"] == 1200 and asked["objective"] == "throughput"
    assert asked["train"].loader == [(1, 2)] and asked["train"].loss is max
    assert asked["calibration"] == [(3,)]
    assert (asked["threads"], set(asked["only"]), set(asked["skip"]), asked["workdir"]) == (2, {"threads", "compile-inference"}, {"tf32-products"}, Path("runs/r18").absolute())
    assert out.splitlines()[-1].startswith("next") and "6.82x faster" in out and "a step" in err


def test_without_a_check_there_is_no_budget(capfd, user, api):
    assert call(capfd, *WORDS)[0] == 0
    assert api.asked["budget"] is None is api.asked["check"] is api.asked["train"] is api.asked["calibration"]
    assert api.asked["workdir"] == Path(".saturate/optimize").absolute(), "where `saturate report` finds it, and a study of training does not lie"


@pytest.mark.parametrize("text, points", [("1%", 0.01), ("0.01", 0.01), ("0", 0.0), ("0.5%", 0.005), ("2.5", 2.5)])
def test_points_of_the_score(capfd, user, api, text, points):
    assert call(capfd, *WORDS, "--check", "mypkg.model:score", "--max-drop", text, "--confidence", "none")[0] == 0
    assert api.asked["budget"].max_drop == pytest.approx(points) and api.asked["budget"].confidence is None


@pytest.mark.parametrize("words, part", [
    ([*WORDS, "--check", "mypkg.model:score"], "belong together"),
    ([*WORDS, "--max-drop", "1%"], "belong together"),
    ([*WORDS, "--limit", "p99_msec=3"], "did you mean 'p99_ms'?"),
    ([*WORDS, "--limit", "p99_ms=fast"], "is not a limit"),
    ([*WORDS, "--limit", "p99_ms=1", "--limit", "p99_ms=2"], "given twice"),
    ([*CHECKED[:-1], "-1%"], "expected one argument"),
    ([*CHECKED[:-1], "nan"], "is not a drop"),
    ([*CHECKED, "--confidence", "30%"], "is not a confidence"),
    ([*CHECKED, "--threads", "0"], "is not a number of threads"),
    ([*CHECKED, "--budget", "soon"], "is not a time"),
    ([*CHECKED, "--objective", "lateny"], "did you mean 'latency'?"),
    ([*CHECKED, "--train", "mypkg.model:wrong_train"], "returned a int"),
    ([*CHECKED, "--calibration", "mypkg.model:calibraton"], "did you mean 'calibration'?"),
    ([*CHECKED, "--calibration", "mypkg.model:nothing"], "nothing() returned None"),
    (WORDS[:1], "required: --inputs"),
])
def test_bad_options_are_named(capfd, user, api, words, part):
    code, out, err = call(capfd, *words)
    assert (code, out) == (2, "") and part in err


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, part", [
    ("mypkg.model:biuld", "did you mean 'build'?"),
    ("mypkg.modle:build", "did you mean 'model'?"),
    ("mypgk.model:build", "did you mean 'mypkg'?"),
    ("mypkg.model:Space.iner", "did you mean 'inner'?"),
    ("sinlge.py:build", "did you mean 'single.py'?"),
    ("mypkg.model", "is not a name such as"),
    ("mypkg.model:", "is not a name such as"),
    (":build", "is not a name such as"),
    ("mypkg.model:build()", "is not a name such as"),
    ("my-pkg:build", "is not the name of a module"),
    ("mypkg.model:constant", "is a int, and must be a function"),
    ("mypkg.model:network", "is a Network, and must be a function"),
    ("mypkg/json2.py:build", "there is no file"),
    ("json.py:build", "another module is called 'json'"),
])
def test_a_name_that_leads_nowhere(capfd, user, api, name, part):
    code, out, err = call(capfd, name, "--inputs", "mypkg.model:loader", "--json")
    assert code == 2 and part in err and json.loads(out)["verdict"] == "inconclusive", err
    assert api.asked is None


@pytest.mark.parametrize("name", ["mypkg.model:build", "mypkg.model:Space.inner", "single.py:build", "mypkg/model.py:build", "./single.py:build"])
def test_a_name_that_leads_somewhere(user, name):
    assert type(resolve(name, "model")()).__name__ == "Model"


def test_a_file_elsewhere(user, tmp_path_factory):
    other = tmp_path_factory.mktemp("elsewhere") / "faraway.py"
    other.write_text("class Far: pass\ndef build(): return Far()\n")
    made = resolve(f"{other}:build", "model")()
    assert type(made).__module__ == "faraway" and sys.path[0] == str(other.parent), "other processes find its class by that name"


# -- the user's code fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, parts", [
    ("mypkg.model:gpu", ["RuntimeError: Found no NVIDIA driver", "it needs a GPU", "mypkg.model:gpu() failed", "def gpu()"]),
    ("mypkg.model:leaves", ["it ends the process (exit code 3)", "__main__"]),
    ("mypkg.model:closes", ["GeneratorExit", "mypkg.model:closes() failed"]),
    ("mypkg.broken:build", ["importing mypkg.broken failed", "No module named 'nothing_of_that_name'", "install what it imports"]),
    ("mypkg.bad:build", ["SyntaxError", "importing mypkg.bad failed"]),
])
def test_users_code_that_fails_is_shown(capfd, user, api, name, parts):
    code, out, err = call(capfd, name, "--inputs", "mypkg.model:loader", "--json")
    assert code == 4
    for part in parts:
        assert part in err
    if name.startswith("mypkg.model:"):
        assert "mypkg/model.py" in err and "_callables.py" not in err, "the user's frames, and no others"
    record = json.loads(out)
    assert record["verdict"] == "inconclusive" and record["best"] is None and "failed" in record["baseline"]["reason"]


@pytest.mark.parametrize("name", ["forks", "forks_and_leaves"])
def test_a_fork_of_the_users_code_is_no_second_search(capfd, user, api, name):
    code, out, err = call(capfd, f"mypkg.model:{name}", "--inputs", "mypkg.model:loader", "--json")
    assert code == 0 and json.loads(out)["verdict"] == "faster" and err.count("a step") == 1


# -- what it prints ------------------------------------------------------------------------------------------------------


def test_json_is_alone_on_standard_output(capfd, user, api):
    code, out, err = call(capfd, *CHECKED, "--json")
    assert code == 0 and out.count("\n") == 1
    record = json.loads(out)
    for key in ("baseline", "best_lossless", "best", "candidates", "artifact", "report"):
        assert key in record
    for key in ("recipe", "latency_ms", "speedup", "speedup_ci", "speedup_over_lossless", "accuracy", "accuracy_drop_ci", "verdict", "samples_needed",
                "peak_memory_bytes"):
        assert key in record["best"]
    assert set(record["best"]["latency_ms"]) >= {"p50", "p90", "p99"} and {"id", "fate", "reason"} <= set(record["candidates"][0])
    for noise in ("imported", "building", "a library prints", "6.82x faster"):
        assert noise in err


def test_what_libraries_write_below_python_is_kept_out(capfd, user, api):
    import os

    def answer():
        os.write(1, b"from C\n")
        return types.SimpleNamespace(record=optimizations.win())

    api.answer = answer
    _, out, err = call(capfd, *CHECKED, "--json")
    assert json.loads(out) and "from C" in err


@pytest.mark.parametrize("error, code", [(WorkloadFailed("the model does not run", cause="shape"), 4), (TooNoisy("too noisy"), 6),
                                         (UsageError("the model is no torch.nn.Module"), 2)])
def test_json_on_every_exit(capfd, user, api, error, code):
    api.answer = lambda: (_ for _ in ()).throw(error)
    got, out, err = call(capfd, *CHECKED, "--json")
    assert got == code and error.message in json.loads(out)["notes"][0] and error.code in err
    got, out, err = call(capfd, *CHECKED)
    assert got == code and out == ""


def test_only_what_the_parser_refuses_goes_without_json(capfd, user, api):
    assert call(capfd, *CHECKED, "--json", "--threads", "0")[:2] == (2, "")
    assert call(capfd, *WORDS, "--json", "--max-drop", "1%")[0] == 2


def interruption(record):
    """As the search interrupts itself: with what it knows."""
    error = KeyboardInterrupt()
    if record is not None:
        error.record = record
    return error


@pytest.mark.parametrize("record, verdict, speedup", [
    (optimizations.win(), "faster", 6.82), (optimizations.nothing(), "inconclusive", None), (None, "inconclusive", None)])
def test_an_interruption_hands_over_what_was_found(capfd, user, api, record, verdict, speedup):
    api.answer = lambda: (_ for _ in ()).throw(interruption(record))
    code, out, err = call(capfd, *CHECKED, "--json")
    found = json.loads(out)
    assert code == 130 and found["verdict"] == verdict and (found["best"] or {}).get("speedup") == speedup
    assert found["notes"][0].startswith("interrupted") and len(found["candidates"]) == (len(record.candidates) if record else 0)
    assert ("goes on from here" in err) is (record is not None)


def swallowed(times, end=None):
    """The user's code takes so many signals for errors of its own, and goes on."""
    for _ in range(times):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("a signal in the user's code is always raised")
    if end is not None:
        raise end


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("end", [None, ValueError("no such key")])
def test_a_signal_that_the_users_code_swallows_ends_it_all_the_same(times, end):
    with one_signal_interrupts():
        with pytest.raises(KeyboardInterrupt), users_code.forks_end():
            swallowed(times, end)
        os.kill(os.getpid(), signal.SIGINT)         # we clean up by now
        with users_code.forks_end():
            pass                                    # what is past does not end other code


def test_later_signals_do_not_end_the_cleaning_up():
    with one_signal_interrupts():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)


def test_what_was_found_is_told_whatever_comes():
    """A second Ctrl-C while the answer was printed left none on standard output."""
    told = []
    with one_signal_interrupts() as signals:
        signals.enough()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
            told.append(number)
    assert told == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def test_a_signal_while_the_answer_is_printed_costs_none_of_it(capfd, user, api, monkeypatch):
    real = optimize.show_json

    def shown(record, stream):
        os.kill(os.getpid(), signal.SIGINT)
        real(record, stream)

    monkeypatch.setattr(optimize, "show_json", shown)
    code, out, _ = call(capfd, *WORDS, "--json")
    assert code == 0 and json.loads(out)["verdict"] == "faster"


def test_a_technique_that_there_is_none_of_costs_no_building(capfd, user, api):
    code, _, err = call(capfd, *WORDS, "--only", "onnx-runtme,zzz")
    assert code == 2 and api.asked is None and "there is no inference technique 'onnx-runtme'" in err and "onnx-runtime" in err


def test_a_machine_that_gives_out_hands_over_what_was_found(capfd, user, api):
    """A full disk: the exit code is that of the machine, and what was measured is not lost."""
    problem = EnvironmentProblem("int8 cannot be stored", cause="No space left on device", remedy="free some space")
    problem.record = optimizations.stopped()
    api.answer = lambda: (_ for _ in ()).throw(problem)
    code, out, err = call(capfd, *CHECKED, "--json")
    found = json.loads(out)
    assert code == 3 and found["verdict"] == "inconclusive" and found["best"] is None
    assert found["unconfirmed"]["artifact"] == "/home/u/runs/r18/artifacts/2" and len(found["candidates"]) == len(problem.record.candidates)
    assert "not confirmed" in err and found["unconfirmed"]["artifact"] in err and "free some space" in err
