"""A glance at what workers hold a copy of: what it sees change, what it takes for equal, and that it ends."""

from __future__ import annotations

import array
import collections
import functools
import io
import logging
import os
import random
import sqlite3
import sys
import tempfile
import time
import types
import zipfile
from tempfile import mkdtemp

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from saturate.data import glance as glances  # noqa: E402
from saturate.data.contents import open_connection, open_file, own_generator, unseeded_source  # noqa: E402
from saturate.data.glance import glance  # noqa: E402

next(tempfile._get_candidate_names())       # the standard library's own generator is there from now on
LEVEL = types.SimpleNamespace(noise=0.1)


class Reads(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return (lambda: LEVEL.noise * index)()


def holder(**values):
    return types.SimpleNamespace(inner=types.SimpleNamespace(**values))


def change_text(thing):
    thing.inner.value = "other"


def in_place(thing):
    thing.inner.value += 1


def reassigned(thing):
    thing.inner.value = thing.inner.value.copy() if isinstance(thing.inner.value, dict) else list(thing.inner.value)
    if isinstance(thing.inner.value, dict):
        thing.inner.value["rate"] = 2
    else:
        thing.inner.value[150_000] = -1


@pytest.mark.parametrize(("value", "change"), [
    ("text", change_text), (1.5, in_place), (torch.zeros(1000), in_place), (numpy.zeros((50, 7)), in_place),
    (numpy.zeros((50, 7))[:, ::2], in_place), (torch.zeros(3, dtype=torch.bfloat16), in_place), ({"rate": 1}, reassigned),
])
def test_what_it_sees(value, change):
    thing = holder(value=value)
    before = glance(thing)
    assert glance(thing) == before
    change(thing)
    assert glance(thing) != before


def test_globals_closures_and_partial_functions(monkeypatch):
    dataset = Reads()
    before = glance(dataset)
    monkeypatch.setattr(LEVEL, "noise", 0.2)
    assert glance(dataset) != before
    rate = [1]

    def collate(batch):
        return rate[0], batch

    for function in (collate, functools.partial(collate, batch=[1])):
        before = glance(function)
        rate[0] += 1
        assert glance(function) != before


images = torch.zeros(3)


class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.images = torch.zeros(5)

    def __getitem__(self, index):
        return self.images[index]


def test_a_loop_of_the_script_that_calls_its_batch_as_the_dataset_its_attribute(monkeypatch):
    dataset = Images()
    before = glance(dataset)
    monkeypatch.setitem(globals(), "images", torch.ones(3))
    assert glance(dataset) == before
    dataset.images[1] = 1
    assert glance(dataset) != before


SETTINGS = types.ModuleType("settings_of_a_script")
SETTINGS.size, SETTINGS.conf, SETTINGS.other = 8, types.ModuleType("settings_of_a_script.conf"), 1
SETTINGS.conf.level = 1
CONFIG = type("Config", (), {"rate": 1, "__module__": __name__})


class Configured(torch.utils.data.Dataset):
    scale = 1
    ratios = (1, 2)

    def __getitem__(self, index):
        return self.load(index)

    def load(self, index):
        return index * SETTINGS.size * SETTINGS.conf.level * CONFIG.rate

    def report(self):
        return SETTINGS.other


class Below(Configured):
    pass


@pytest.mark.parametrize(("where", "name", "seen"), [
    (SETTINGS, "size", True), (SETTINGS.conf, "level", True), (CONFIG, "rate", True), (Configured, "scale", True), (Configured, "ratios", True),
    (SETTINGS, "other", False)])
def test_settings_in_modules_and_classes(where, name, seen, monkeypatch):
    monkeypatch.setitem(sys.modules, "settings_of_a_script", SETTINGS)
    monkeypatch.setitem(sys.modules, "settings_of_a_script.conf", SETTINGS.conf)
    dataset = torch.utils.data.Subset(Below(), range(3))
    before = glance(dataset)
    assert glance(dataset) == before
    monkeypatch.setattr(where, name, 2)
    assert (glance(dataset) != before) is seen


def test_nan_and_circles_are_equal_to_themselves():
    thing = holder(value=float("nan"), array=numpy.array([None, "x"], dtype=object), sparse=torch.eye(3).to_sparse())
    thing.inner.back = thing
    assert glance(thing) == glance(thing)


def test_what_is_near_is_seen_beside_what_is_large():
    deep = [[[number, [number]] for number in range(200)] for _ in range(250)]
    thing = types.SimpleNamespace(a=1, deep=deep, log=logging.getLogger("of the dataset"), z=1)
    for name in "az":
        before = glance(thing, deep)
        setattr(thing, name, 2)
        assert glance(thing, deep) != before
    before = glance(thing)
    logging.getLogger("of somebody else").warning("something")
    assert glance(thing) == before


def test_it_ends_soon_on_large_things():
    thing = holder(names=[f"{number}.jpg" for number in range(10**6)], table=[[number] * 100 for number in range(10**4)],
                   pixels=numpy.zeros((1000, 1000, 8)))
    began = time.thread_time()
    glance(thing)
    assert time.thread_time() - began < 1.0


def test_open_files_are_seen_wherever_they_are(tmp_path, monkeypatch):
    path = tmp_path / "data"
    path.write_bytes(b"0123")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(path, "data")
    log = logging.Logger("of the dataset")
    log.addHandler(logging.FileHandler(tmp_path / "log"))
    assert open_file(holder(log=log, data=io.BytesIO(b"0"), array=numpy.memmap(path, mode="r"))) == ""
    with open(path, "rb") as file:
        assert open_file(holder(parts=[{"a": file}])) == "BufferedReader"
        monkeypatch.setattr(LEVEL, "noise", file)
        assert open_file(Reads()) == "BufferedReader"
    assert open_file(Reads()) == ""                     # it is closed
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert open_file(holder(archive=archive)) == "BufferedReader"
    connection = sqlite3.connect(":memory:")
    assert open_file(holder(base=connection)) == "Connection"
    connection.close()


class Augments(torch.utils.data.Dataset):
    """By what everybody draws from."""

    log, shuffle = logging.getLogger(), random.shuffle

    def __init__(self):
        self.draw, self.of_everybody = numpy.random.rand, [random._inst, numpy.random.mtrand._rand, torch.default_generator]

    def __getitem__(self, index):
        return self.noise(index) + random.random() + torch.rand(1)

    def noise(self, index):
        return numpy.random.RandomState(index).rand() + len(mkdtemp.__name__)


def test_what_a_library_of_c_holds_open_is_seen_whatever_module_it_says_it_is_of(monkeypatch):
    """lmdb's classes say `builtins`: forked workers filled its table of readers, and the training's own reads failed."""
    lmdb = types.ModuleType("lmdb")
    lmdb.Environment = type("Environment", (), {"__module__": "builtins"})
    held = types.SimpleNamespace(env=lmdb.Environment(), other=type("Environment", (), {})())
    assert open_file(held) == "" == open_connection(held), "some other library's"
    monkeypatch.setitem(sys.modules, "lmdb", lmdb)
    assert open_file(held) == open_connection(held) == "Environment"
    for module, name in (("pysam.libcfaidx", "FastaFile"), ("soundfile", "SoundFile"), ("pyedflib.edfreader", "EdfReader"),
                         ("pyBigWig", "bigWigFile"), ("torchcodec.decoders._video_decoder", "VideoDecoder"),
                         ("torchcodec.decoders._audio_decoder", "AudioDecoder"), ("torio.io._streaming_media_decoder", "StreamingMediaDecoder")):
        assert open_file([type(name, (), {"__module__": module})()]) == name


@pytest.mark.parametrize("draw, name", [
    (lambda: random.SystemRandom().random(), "SystemRandom"), (lambda: os.urandom(1), "urandom"), (lambda: random.Random(), "Random"),
    (lambda: numpy.random.Generator(numpy.random.PCG64()), "PCG64"), (lambda: [numpy.random.default_rng() for _ in range(2)], "default_rng"),
    (lambda index: numpy.random.default_rng(index), ""), (lambda index: random.Random(index).random(), ""),
    (lambda: random.random() + numpy.random.rand(), ""),
])
def test_random_numbers_that_nothing_seeds_are_named_by_the_code(draw, name, monkeypatch):
    assert unseeded_source(draw) == unseeded_source(holder(transform=[functools.partial(draw)])) == name
    assert unseeded_source(Augments()) == ""
    monkeypatch.setattr(Augments, "noise", draw)            # named by another method
    assert unseeded_source(torch.utils.data.Subset(Augments(), [0])) == name


@pytest.mark.parametrize("make", [torch.Generator, random.Random, numpy.random.default_rng, numpy.random.RandomState, numpy.random.PCG64])
def test_generators_of_its_own_are_seen_wherever_they_are(make, monkeypatch):
    own, kind = make(), type(make()).__name__
    assert own_generator(Augments(), Augments().noise, torch.utils.data.default_collate) == ""
    for place in (holder(step=[own]), functools.partial(print, own), lambda index: own, [{"a": (own,)}]):
        assert own_generator(place) == kind
    monkeypatch.setitem(Augments.noise.__globals__, "mkdtemp", own)      # named by a method
    assert own_generator(Augments()) == kind
    monkeypatch.undo()
    monkeypatch.setattr(Augments, "chance", own, raising=False)
    assert own_generator(torch.utils.data.Subset(Augments(), [0])) == kind


MANY = 50_000
NAMES = [f"{number}.jpg" for number in range(MANY)]


@pytest.mark.parametrize(("make", "place", "value"), [
    (lambda: [0] * MANY, [31_337], 1),
    (lambda: [-1] * MANY, [31_337], -2),                # Python's hashes of the two are alike, and they are the usual marks
    (lambda: [1] * MANY, [31_337], 1.0),
    (lambda: NAMES.copy(), [31_337], "a.jpg"),
    (lambda: tuple([number, number] for number in range(MANY)), [31_337, 1], -1),
    (lambda: [[[0.0, 0.0, 1.0, 1.0] for _ in range(4)] for _ in range(5000)], [3333, 2, 3], 0.5),
    (lambda: dict.fromkeys(NAMES, 0), ["31337.jpg"], 1),
    (lambda: {name: {"label": 0} for name in NAMES}, ["31337.jpg", "label"], 1),
    (lambda: collections.Counter(NAMES), ["31337.jpg"], 2),
    (lambda: collections.deque([0] * MANY), [31_337], 1),
    (lambda: types.SimpleNamespace(rows=[types.SimpleNamespace(label=[0]) for _ in range(2000)]).rows, [1337, "label", 0], 1),
    (lambda: array.array("b", bytes(MANY)), [31_337], 1),
    (lambda: [numpy.int64(0)] * MANY, [31_337], numpy.int64(1)),
    (lambda: [numpy.zeros(3) for _ in range(2000)], [1337, 1], 1),
    (lambda: numpy.zeros((MANY, 9), numpy.uint8), [31_337, 4], 1),
    (lambda: numpy.zeros((MANY, 9), numpy.uint8)[::2, ::-1], [1337, 4], 1),
    (lambda: numpy.array(NAMES), [31_337], "a.jpg"),
    (lambda: numpy.array(NAMES, dtype=object), [31_337], "a.jpg"),
    (lambda: numpy.array([[0], *NAMES], dtype=object), [0, 0], 1),
    (lambda: numpy.ma.masked_equal(numpy.zeros(MANY), 1), [31_337], numpy.ma.masked),
    (lambda: torch.zeros(MANY, 9), [31_337, 4], 1),
    (lambda: torch.zeros(MANY, 9).data.numpy(), [31_337, 4], 1),
    (lambda: torch.zeros(MANY, dtype=torch.bfloat16), [31_337], 1),
])
def test_one_place_of_many_that_is_changed_where_it_lies(make, place, value):
    thing = holder(value=make())
    before = glance(thing)
    assert before is not None and glance(thing) == before
    *way, last = ["value", *place]
    inner = thing.inner
    for step in way:
        inner = getattr(inner, step) if isinstance(inner, types.SimpleNamespace) else inner[step]
    inner[last] = value
    assert glance(thing) != before


def test_a_tensor_that_is_changed_behind_its_version():
    thing = holder(value=torch.zeros(MANY, 9))
    before = glance(thing)
    thing.inner.value.data[31_337, 4] = 1
    assert glance(thing) != before


def test_frames():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"label": [0] * MANY, "name": NAMES, "any": numpy.array(NAMES, dtype=object)})
    thing = holder(value=frame)
    for column, value in (("label", 1), ("name", "a.jpg"), ("name", "b.jpg"), ("any", "a.jpg")):
        before = glance(thing)
        assert before is not None and glance(thing) == before
        frame.loc[31_337, column] = value
        assert glance(thing) != before


def test_a_file_that_is_mapped_for_reading_is_not_read(tmp_path):
    path = tmp_path / "tokens"
    path.write_bytes(bytes(1 << 20))
    whole = numpy.memmap(path, mode="r")
    before = glance(whole), glance(whole[:10]), glance(whole[10:20])
    assert before == (glance(whole), glance(whole[:10]), glance(whole[10:20])) and len(set(before)) == 3
    os.truncate(path, 4 << 10)              # to read what was behind that would end the process
    assert glance(whole) != before[0]


def test_what_cannot_be_told_is_not_taken_for_equal():
    circle = []
    circle.append(circle)
    assert glance(circle) is None
    thing = holder(names=NAMES)
    assert glance(thing, seconds=0.0) is None
    assert glance(thing, seconds=60.0) == glance(thing) is not None


def test_waiting_for_a_core_is_not_all_looking(monkeypatch):
    """On a busy machine a few looks used up what there is for them, and a cached second epoch was made again."""
    monkeypatch.setattr(glances, "glance", lambda *things, **how: time.sleep(0.2))
    watch, began = glances.Watch(), time.perf_counter()
    watch.within(1.0, [])
    assert 0.04 < watch.took_s < (time.perf_counter() - began) / 2


def test_a_glance_that_takes_too_long_is_not_begun_each_time(monkeypatch):
    seconds = []

    def look(*things, seconds=None, trained=frozenset(), of=seconds):
        of.append(seconds)
        return None

    monkeypatch.setattr(glances, "glance", look)
    watch = glances.Watch()
    for _ in range(9):
        assert watch.at_pass([]) is None
    assert 2 <= len(seconds) <= 4 and all(allowed >= glances.LOOKED_S for allowed in seconds)
    watch.within(10.0, [])
    assert seconds[-1] == 10.0, "as long as that it may take"


def test_what_is_trained_is_passed_over_with_the_modules_that_hold_it():
    trained, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    things = {"models": [torch.nn.Sequential(trained), other], "weight": trained.weight}
    ids = frozenset(map(id, trained.parameters()))
    before, whole = glance(things, trained=ids), glance(things)
    with torch.no_grad():
        trained.weight.add_(1.0)
    assert glance(things, trained=ids) == before and glance(things) != whole
    with torch.no_grad():
        other.weight.add_(1.0)
    assert glance(things, trained=ids) != before
