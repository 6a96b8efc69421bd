"""The key changes when items would, and only then."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading
from os import environ as E
from os import getenv
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

sys.path.insert(0, str(Path(__file__).parent))
import cache_cases as cases  # noqa: E402

from saturate.data import cache_key  # noqa: E402
from saturate.data.cache_key import Unknowable, digest  # noqa: E402


@pytest.fixture
def root(tmp_path):
    return cases.write(tmp_path / "files")


def test_the_same_dataset_has_the_same_key(root):
    assert digest(cases.Files(root)) == digest(cases.Files(root)) != digest(cases.Files(root), 2)


def touch(root):
    path = root / "03.bin"
    os.utime(path, ns=(1, os.stat(path).st_mtime_ns + 1))


@pytest.mark.parametrize("change", [
    touch,
    lambda root: (root / "03.bin").write_bytes(b"x" * 61),
    lambda root: (root / "03.bin").unlink(),
    lambda root: (root / "99.bin").write_bytes(b"x" * 60),
], ids=["time", "size", "removed", "added"])
def test_files_that_change(root, change):
    before = digest(cases.Files(root)), digest({"root": str(root)})
    change(root)
    assert digest(cases.Files(root)) != before[0]
    assert digest({"root": str(root)}) != before[1]     # a folder by name, whatever the dataset does with it


def test_a_file_deep_below_a_folder(tmp_path):
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "x").write_bytes(b"1")
    before = digest(tmp_path)
    (deep / "x").write_bytes(b"2")
    os.utime(deep / "x", ns=(1, 1))
    assert digest(tmp_path) != before


def test_a_file_behind_a_link_to_a_folder(tmp_path):
    real, other, data = tmp_path / "disk" / "real", tmp_path / "disk" / "other", tmp_path / "data"
    for folder in (real / "deep", other, data):
        folder.mkdir(parents=True)
    (real / "deep" / "x").write_bytes(b"1")
    (data / "images").symlink_to(real)
    (real / "deep" / "others").symlink_to(other)
    (other / "up").symlink_to(tmp_path / "data")        # round and round
    (other / "itself").symlink_to("itself")
    keys = [digest(data)]
    os.utime(real / "deep" / "x", ns=(1, 1))
    keys.append(digest(data))
    (other / "y").write_bytes(b"1")
    os.utime(other, ns=(1, 1))
    keys.append(digest(data))
    assert len(set(keys)) == 3 and digest(data) == keys[-1]


def test_attributes(root):
    keys = {digest(cases.Files(root, scale)) for scale in (1.0, 2.0, None, "a", b"a", (1,), [1], {1: 2}, numpy.zeros(2), numpy.ones(2),
                                                          numpy.zeros(2, "f4"), torch.zeros(2), torch.ones(2), {3, 4}, print,
                                                          random.Random(0), random.Random(1), cases.Scale, cases.Scale(),
                                                          cases.RandomFlip(0.1), cases.RandomFlip(0.2), functools.partial(int, "3"))}
    assert len(keys) == 22


MODULE = """
    import helpers
    LIMIT = 3
    UNUSED = 1

    def load(path):
        return helpers.read(path) + LIMIT

    class Data:
        def __init__(self, path):
            self.path = path
        def __getitem__(self, index):
            return load(self.path)
        def __len__(self):
            return 3
"""
HELPERS = """
    def read(path):
        return [len(path) for _ in range(1)]

    def other():
        return 1
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write the module of a dataset and its helpers, and return the key of the dataset in it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def key(source=MODULE, helpers=HELPERS):
        for name, text in (("a_dataset", source), ("helpers", helpers)):
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return digest(importlib.import_module("a_dataset").Data("p"))

    yield key
    for name in ("a_dataset", "helpers"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("old, new", [("return load(self.path)", "return load(self.path)[1:]"), ("LIMIT = 3", "LIMIT = 4"),
                                      ("+ LIMIT", "- LIMIT")])
def test_code_that_changes(module, old, new):
    assert module() != module(MODULE.replace(old, new))


@pytest.mark.parametrize("old, new", [("len(path)", "-len(path)"), ("range(1)", "range(2)")])
def test_helpers_in_other_modules(module, old, new):
    assert module() != module(helpers=HELPERS.replace(old, new))


def test_globals_that_are_called_as_an_attribute(module):
    assert module("path = 1\n" + textwrap.dedent(MODULE)) == module("path = 2\n" + textwrap.dedent(MODULE))


def test_a_setting_in_a_module_of_a_package(tmp_path, monkeypatch):
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "conf.py").write_text("SIZE, OTHER = 8, 1\n")
    (package / "data.py").write_text(textwrap.dedent("""
        import a_package.conf
        class Data:
            def __getitem__(self, index):
                return [index] * a_package.conf.SIZE
    """))
    monkeypatch.syspath_prepend(str(tmp_path))
    data = importlib.import_module("a_package.data")
    try:
        before = digest(data.Data())
        data.a_package.conf.OTHER = 2
        assert digest(data.Data()) == before
        data.a_package.conf.SIZE = 16
        assert digest(data.Data()) != before
    finally:
        for name in ("a_package", "a_package.conf", "a_package.data"):
            sys.modules.pop(name, None)


def test_the_default_type_of_numbers(root):
    before = digest(cases.Files(root))
    torch.set_default_dtype(torch.float64)
    try:
        assert digest(cases.Files(root)) != before
    finally:
        torch.set_default_dtype(torch.float32)


def test_edits_that_cannot_matter_keep_the_key(module):
    edited = MODULE.replace("UNUSED = 1", "UNUSED = 2").replace("def load(path):", "def load(path):\n        # a comment")
    assert module() == module(edited, HELPERS.replace("return 1", "return 2"))


KEY = "A_VARIABLE"


def _indexed(x): return os.environ["A_VARIABLE"]
def _asked(x): return os.environ.get("A_VARIABLE", x)
def _called(x): return getenv("A_VARIABLE")
def _renamed(x): return E["A_VARIABLE"]
def _inside(x): return [os.environ["A_VARIABLE"] for _ in "x"]
def _looked_for(x): return "A_VARIABLE" in os.environ
def _imported(x):
    import os as o
    return f"{o.environ['A_VARIABLE']}-{x}"


def _by_constant(x): return os.environ[KEY]
def _computed(x): return os.environ[f"A_{x}"]
def _joined(x): return os.getenv("A_" + x)
def _joined_to_a_call(x): return os.getenv("A_" + x.lower())
def _all(x): return dict(os.environ)
def _handed_on(x): return x(E)
def _imported_by_name(x):
    from os import environ
    return environ["A_VARIABLE"]


@pytest.mark.parametrize("read", [_indexed, _asked, _called, _renamed, _inside, _looked_for, _imported])
def test_environment_variables_that_the_code_reads(read, monkeypatch, tmp_path):
    monkeypatch.delenv("A_VARIABLE", raising=False)
    keys = [digest(read)]
    monkeypatch.setenv("ANOTHER", "v1")
    assert digest(read) == keys[0]
    for value in ("v1", "v2"):
        monkeypatch.setenv("A_VARIABLE", value)
        keys.append(digest(read))
    monkeypatch.setenv("A_VARIABLE", str(tmp_path))
    keys.append(digest(read))
    (tmp_path / "new").touch()
    keys.append(digest(read))
    assert len(set(keys)) == 5


@pytest.mark.parametrize("read", [_by_constant, _computed, _joined, _joined_to_a_call, _all, _handed_on, _imported_by_name])
def test_environment_variables_whose_names_are_not_written_out_are_refused(read):
    with pytest.raises(Unknowable, match=f"{read.__name__} reads environment variables"):
        digest(read)


@pytest.mark.parametrize("make, reason", [
    (lambda: threading.Lock(), "lock"), (lambda: open(os.devnull), "TextIO"), (lambda: torch.nn.Linear(2, 2), "trained"),  # noqa: SIM115
    (lambda: torch.zeros(1, device="meta"), "meta"), (lambda: (i for i in range(3)), "generator"), (lambda: {object()}, "order"),
])
def test_what_cannot_be_told_is_refused_by_name(make, reason):
    dataset = cases.Texts()
    dataset.thing = make()
    with pytest.raises(Unknowable, match=f"attribute thing.*{reason}"):
        digest(dataset)


def test_limits(root, monkeypatch):
    monkeypatch.setattr(cache_key, "MOST_BYTES", 1000)
    with pytest.raises(Unknowable, match="too much to hash"):
        digest(numpy.zeros(2000, "u1"))
    monkeypatch.setattr(cache_key, "MOST_FILES", 10)
    with pytest.raises(Unknowable, match="too many to watch"):
        digest(root)


def test_a_separator_does_not_mean_every_file_of_the_machine(monkeypatch):
    monkeypatch.setattr(cache_key, "MOST_FILES", 0)
    assert digest(lambda path: path.split("/"))


def test_a_mapped_array_is_its_file(tmp_path):
    numpy.save(tmp_path / "x.npy", numpy.zeros(100))
    before = digest(numpy.load(tmp_path / "x.npy", mmap_mode="r"))
    numpy.save(tmp_path / "x.npy", numpy.ones(100))
    assert digest(numpy.load(tmp_path / "x.npy", mmap_mode="r")) != before


def test_cycles_end():
    dataset = cases.Texts()
    dataset.me = dataset
    assert len(digest(dataset)) == 32


def test_the_key_is_the_same_in_another_process(root):
    """Nothing in it depends on addresses, hash seeds or what else was imported."""
    code = (f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "import cache_cases as c; from saturate.data.cache_key import digest\n"
            f"print(digest(c.Folder({str(root)!r}, c.Compose([c.Scale(), c.RandomFlip()]))).hex())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONHASHSEED": "1"})
    here = digest(cases.Folder(str(root), cases.Compose([cases.Scale(), cases.RandomFlip()])))
    assert done.stdout.strip() == here.hex()


def test_looking_and_copying_keep_the_key(root):
    """Python notes things on a class when an instance is copied."""
    class Fresh(cases.Files):
        pass

    dataset = Fresh(root)
    before = digest(dataset)
    copy.copy(dataset)
    pickle.dumps(cases.Files(root))
    assert digest(dataset) == before


LATE = """
    class Data:
        def __init__(self, path):
            self.path = path
        def __getitem__(self, index):
            from helpers import read
            return read(self.path)
        def __len__(self):
            return 3
"""


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("old, new", [("len(path)", "-len(path)"), ("range(1)", "range(23)")])
def test_helpers_that_are_imported_when_an_item_is_made(module, loaded, old, new):
    source = ("import helpers as already\n" if loaded else "") + textwrap.dedent(LATE)
    assert not loaded or module(source) == module(source)
    assert module(source) != module(source, HELPERS.replace(old, new))


def test_what_is_imported_late_and_what_that_imports(tmp_path, monkeypatch):
    package = tmp_path / "a_package"
    (package / "deep").mkdir(parents=True)
    for name, text in (("__init__", ""), ("deep/__init__", ""), ("deep/first", "def f(x):\n    from ..second import g\n    return g(x)\n"), ("second", "import json\ng = len\n"),
                       ("other", ""), ("data", "class Data:\n    def __getitem__(self, index):\n        from .deep import first\n        return first.f(index)\n")):
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = importlib.import_module("a_package.data")
    try:
        before = digest(data.Data())
        (package / "other.py").write_text("1\n")
        assert digest(data.Data()) == before and "a_package.deep" not in sys.modules
        (package / "second.py").write_text("import json\ng = max\n\n")
        assert digest(data.Data()) != before
    finally:
        for name in ("a_package", "a_package.data"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("method", ["get", "__getitem__"])
def test_a_method_of_a_dictionary_is_what_that_holds(root, method):
    names = {"a": 1}
    before = digest(cases.Folder(root, target_transform=getattr(names, method)))
    assert digest(cases.Folder(root, target_transform=getattr({"a": 1}, method))) == before
    names["a"] = 2
    assert digest(cases.Folder(root, target_transform=getattr(names, method))) != before


def test_a_function_of_a_compiled_module_is_its_file(tmp_path, monkeypatch):
    """Built anew, it has the same name."""
    import _ctypes

    file = tmp_path / "compiled.so"
    file.write_bytes(b"1")
    monkeypatch.setattr(_ctypes, "__file__", str(file), raising=False)
    before = digest({"decode": _ctypes.sizeof})
    assert digest({"decode": _ctypes.sizeof}) == before
    file.write_bytes(b"22")
    assert digest({"decode": _ctypes.sizeof}) != before


class Repeated:
    """A class of the script's as a decorator, with settings of its own."""

    def __init__(self, function, times):
        functools.update_wrapper(self, function)
        self.times = times

    def __call__(self, image):
        return image * self.times


def test_an_object_that_wraps_a_function_has_settings_of_its_own(root):
    def one(times):
        return digest(cases.Folder(root, Repeated(len, times)))

    assert one(1) == one(1) != one(2)
