"""What the agent asks of torch.cuda, where there is no device: stand-ins that take what the installed torch's functions take."""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
import textwrap
import time
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from launch_queue import Machine  # noqa: E402 - after the check for torch

from saturate.agent import application, ceilings, facts, graphs, kinds, observe, randomness  # noqa: E402
from saturate.agent.gate import Gate  # noqa: E402
from saturate.agent.memory import DeviceMemory, limit_allocator  # noqa: E402
from saturate.agent.memorylines import CudaLines  # noqa: E402
from saturate.agent.motif import Step  # noqa: E402
from saturate.agent.profiling import Recording  # noqa: E402
from saturate.agent.session import Session  # noqa: E402
from saturate.agent.timeline import elapsed_ms, recorded  # noqa: E402
from saturate.agent.watchdog import Watchdog  # noqa: E402
from saturate.study import drill_process  # noqa: E402
from saturate.techniques import _common, allocator  # noqa: E402
from saturate.trial.outcome import REPLAYED  # noqa: E402
from saturate.trial.process import TrialEnded  # noqa: E402

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
PLAN = {"mode": "trial", "step": {"token": "S0", "count": 1, "tokens": ["B", "S0"]}, "techniques": []}


class Cuda:
    """torch.cuda as far as `answers` go: name -> function of the arguments. Each call must fit the real signature."""

    def __init__(self, **answers: Any):
        self.calls: list[tuple[Any, ...]] = []
        for name, answer in answers.items():
            setattr(self, name, self._checked(name, answer))

    def _checked(self, name: str, answer: Any) -> Any:
        signature = inspect.signature(getattr(torch.cuda, name))

        def call(*args: Any, **kwargs: Any) -> Any:
            signature.bind(*args, **kwargs)
            self.calls.append((name, *args))
            return answer(*args, **kwargs)

        return call


def session(cuda: Cuda, *devices: Any) -> Session:
    made = Session(types.SimpleNamespace(cuda=cuda, Tensor=torch.Tensor), PLAN)
    made.inspection = types.SimpleNamespace(device="cuda", devices=devices)
    made.context.device = "cuda"
    return made


def test_every_device_of_the_training_is_drained_and_no_other():
    """A rank that never called set_device has the first device as its current one, and trains on another."""
    cuda = Cuda(synchronize=lambda device: None)
    session(cuda, SECOND).drain()
    session(cuda, FIRST, SECOND).drain()
    assert cuda.calls == [("synchronize", SECOND), ("synchronize", FIRST), ("synchronize", SECOND)]


def test_memory_is_that_of_the_training_s_devices():
    cuda = Cuda(max_memory_reserved={FIRST: 0, SECOND: 7 << 30}.__getitem__)
    assert facts.reserved_bytes(session(cuda, SECOND)) == 7 << 30
    assert facts.reserved_bytes(session(cuda, FIRST, SECOND)) == 7 << 30
    plain = session(cuda)
    plain.inspection.device = "cpu"
    assert facts.reserved_bytes(plain) is None


def test_room_is_what_is_free_and_what_is_held_here_of_the_fullest_device():
    free = {FIRST: 30 << 30, SECOND: 3 << 30}
    cuda = Cuda(mem_get_info=lambda device: (free[device], 80 << 30), memory_reserved={FIRST: 1 << 30, SECOND: 20 << 30}.__getitem__)
    assert facts.room_bytes(session(cuda, FIRST, SECOND)) == 23 << 30
    assert facts.room_bytes(session(cuda, FIRST)) == 31 << 30
    plain = session(cuda)
    plain.inspection.device = "cpu"
    assert facts.room_bytes(plain) is None


def test_what_the_recorder_waits_for_has_a_label():
    """Without one it would be taken for a wait of the script's."""
    cuda, seen = Cuda(synchronize=lambda device: seen.append("wait")), []

    @contextlib.contextmanager
    def record_function(name):
        seen.append(name)
        yield
        seen.append("end")

    made = session(cuda, FIRST)
    made.torch.autograd = types.SimpleNamespace(profiler=types.SimpleNamespace(record_function=record_function))
    made.window = Recording(made, {"kind": "record", "skip": 1, "steps": 1})
    made.drain()
    made.window._running = True
    made.drain()
    assert seen == ["wait", "saturate.drain", "wait", "end"]


def test_pauses_of_the_collector_in_steps_that_are_not_timed_do_not_count():
    made = session(Cuda(synchronize=lambda device: None), FIRST)
    made.gate = gate = object.__new__(Gate)
    gate._timeline, gate._timed, gate.parts = types.SimpleNamespace(queued=True), 2, {}     # type: ignore[assignment]
    for gate.remaining in (3, 2, 1):
        made._collector("start", {})
        made._collecting -= 10**9
        made._collector("stop", {})
    assert 2 * 10**9 <= gate.parts["gc"] < 3 * 10**9


def allocator_of(**bytes_on: dict[Any, int]) -> Cuda:
    """The caching allocator of two devices; what is not told is 0."""
    known = {device: {name: found.get(device, 0) for name, found in bytes_on.items()} for device in (FIRST, SECOND)}
    return Cuda(
        synchronize=lambda device: None, empty_cache=lambda: None, reset_peak_memory_stats=lambda device: None,
        memory_stats=lambda device: {"num_alloc_retries": known[device].get("retries", 0)},
        mem_get_info=lambda device: (known[device].get("free", 0), 80 << 30), set_per_process_memory_fraction=lambda share, device: None,
        get_device_properties=lambda device: types.SimpleNamespace(total_memory=80 << 30),
        **{name: lambda device, name=name: known[device].get(name, 0) for name in ("memory_reserved", "max_memory_reserved", "memory_allocated")})


def test_what_a_fit_measures_is_of_the_training_s_device():
    cuda = allocator_of(max_memory_reserved={SECOND: 7}, memory_reserved={SECOND: 5}, memory_allocated={SECOND: 2},
                        free={FIRST: 79 << 30, SECOND: 1 << 30}, retries={SECOND: 3})
    memory = DeviceMemory(session(cuda, SECOND))
    assert memory.seen() == {"reserved_bytes": 7, "idle_bytes": 2, "room_bytes": (1 << 30) + 5, "retries": 3}
    memory.begin()
    assert memory.seen()["retries"] == 0, "those before the window are not its own"
    memory.limit(40 << 30)
    memory.limit(20 << 30)
    limits = [call[1:] for call in cuda.calls if call[0] == "set_per_process_memory_fraction"]
    assert limits == [(0.5, SECOND)], "once, of this device"
    assert not [call for call in cuda.calls if FIRST in call], "asking the other one would create a context there"


def test_of_several_devices_the_neediest_and_the_fullest_count():
    cuda = allocator_of(max_memory_reserved={FIRST: 9, SECOND: 7}, memory_reserved={FIRST: 9, SECOND: 5}, memory_allocated={FIRST: 1, SECOND: 2},
                        free={FIRST: 100, SECOND: 10}, retries={FIRST: 1, SECOND: 3})
    assert DeviceMemory(session(cuda, FIRST, SECOND)).seen() == {"reserved_bytes": 9, "idle_bytes": 2, "room_bytes": 15, "retries": 4}
    limit_allocator(cuda, (FIRST, SECOND), 160 << 30)
    assert [call[1:] for call in cuda.calls if call[0] == "set_per_process_memory_fraction"] == [(1.0, FIRST), (1.0, SECOND)]


def test_memory_of_a_cpu_is_not_asked_of_a_device():
    plain = session(Cuda())
    plain.context.device = "cpu"
    memory = DeviceMemory(plain)
    memory.limit(1)
    memory.begin()
    assert memory.seen() is None and plain.torch.cuda.calls == []


class Queues:
    """Launches that devices work off one after the other, while the host goes on. Times in ms."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy_until = {FIRST: 0.0, SECOND: 0.0}
        self.capturing = False
        self.cuda = Cuda(Event=lambda enable_timing: Event(), is_current_stream_capturing=lambda: self.capturing,
                         current_stream=lambda device: types.SimpleNamespace(moment=lambda: self.done(device)))

    def done(self, device: Any) -> float:
        """When what is queued now will have ended."""
        self.busy_until[device] = max(self.busy_until[device], self.now)
        return self.busy_until[device]

    def launch(self, device: Any, ms: float) -> None:
        self.now += 0.01
        self.busy_until[device] = self.done(device) + ms


class Event:
    captured = False

    def record(self, stream: Any) -> None:
        self.moment = stream.moment()

    def elapsed_time(self, other: Event) -> float:
        if self.captured:
            raise RuntimeError("CUDA error: operation not permitted on an event last recorded in a capturing stream")
        return other.moment - self.moment


@pytest.mark.parametrize(("devices", "work", "took"), [
    ((SECOND,), [(SECOND, 5.0)], 5.0), ((FIRST, SECOND), [(FIRST, 3.0)], 3.0), ((FIRST, SECOND), [(FIRST, 3.0), (SECOND, 5.0)], 5.0)])
def test_a_module_s_time_is_that_of_the_devices_that_run_it(devices, work, took):
    """The stream of an idle device would tell how long the host takes to launch."""
    queues = Queues()
    began = recorded(queues, devices)
    for device, ms in work:
        queues.launch(device, ms)
    assert elapsed_ms(began, recorded(queues, devices)) == pytest.approx(took, abs=0.05)
    assert {call[1] for call in queues.cuda.calls if call[0] == "current_stream"} == set(devices)


def test_an_event_of_a_captured_graph_has_no_time():
    queues = Queues()
    began, ended = recorded(queues, (FIRST, SECOND)), recorded(queues, (FIRST, SECOND))
    began[0].captured = True
    assert elapsed_ms(began, ended) == 0.0
    began[1].captured = True
    assert elapsed_ms(began, ended) is None
    queues.capturing = True
    assert recorded(queues, (FIRST, SECOND)) is None and elapsed_ms(None, ended) is None and elapsed_ms(began, None) is None


def test_the_profile_asks_the_training_s_device():
    """By name: before torch 2.6 the properties of the current device had to be asked for by its number."""
    stats = {f"{name}_bytes.all.peak": 5 for name in ("allocated", "active", "reserved")} | {"num_alloc_retries": 1}
    cuda = Cuda(memory_stats=lambda device: stats, get_device_properties=lambda device: types.SimpleNamespace(total_memory=9))
    assert kinds.device_memory(types.SimpleNamespace(cuda=cuda), SECOND) == {
        "peak": 5, "active_peak": 5, "reserved": 5, "retries": 1, "total": 9}
    assert {call[1:] for call in cuda.calls} == {(SECOND,)}


def test_devices_are_those_of_the_parameters():
    with torch.device("meta"):
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    assert observe.devices([*parameters, torch.nn.Parameter(torch.zeros(1))], "meta") == (torch.device("meta"),)


def test_the_device_is_the_accelerator_of_any_parameter():
    """Seen: an embedding that stays in the host's memory comes first, and a training on a device was timed as one on a CPU."""
    def on(*kinds):
        return [types.SimpleNamespace(device=types.SimpleNamespace(type=kind)) for kind in kinds]

    assert [observe.device_kind(on(*kinds)) for kinds in (("cpu", "cuda"), ("cuda", "cpu"), ("cpu", "xpu"), ("cpu", "cpu"), ("meta",), ())] \
        == ["cuda", "cuda", "xpu", "cpu", "meta", "cpu"]


def test_the_split_of_a_step_is_the_device_s():
    """The host queues a backward pass in a millisecond, and an optimizer's step as well."""
    machine, parts = Machine(), []
    made = Session(types.SimpleNamespace(cuda=machine.torch.cuda, Tensor=torch.Tensor), PLAN)
    made.inspection, made.context.device = types.SimpleNamespace(devices=machine.devices), "cuda"
    made.optimizers.built = [lambda: None]
    optimizer = types.SimpleNamespace()

    def add_part(part, began):
        ended = made.timeline.mark()
        machine.wait()
        parts.append((part, began[0].elapsed_time(ended[0])))

    fetched = []
    made.gate = types.SimpleNamespace(add_part=add_part, add_time=lambda *told: fetched.append(told))
    made.timeline.begin()
    made.guard = lambda function, *args: function(*args) if function in (made.timeline.mark, add_part) else None
    for splitting in (False, True):
        made.splitting = splitting
        machine.launch(100)
        made.backward_begins()
        machine.launch(180)
        made.backward_ends(())
        made.step_begins(optimizer)
        machine.launch(20)
        made.step_ends(optimizer)
        began = made.mark()
        machine.host(5)
        made.loader_waited(None, (), began, 5_000_000)
    assert parts == [("backward", 180), ("optimizer", 20), ("input", 5)] and fetched == [("fetch", 5_000_000)]
    made.pid = 0
    assert made.mark() is None, "a forked child must not ask the device"


@pytest.mark.parametrize("verifies", [False, True])
def test_a_loss_that_is_written_over_was_recorded_as_it_was(verifies):
    """A replayed CUDA graph writes its outputs where they were, also in the next micro-step of an update; reading them after that raises."""
    made = session(Cuda(is_initialized=lambda: True, is_current_stream_capturing=lambda: False))
    made.stepping, made.optimizers.built = 1, [lambda: None]     # neither the step nor what is trained is looked for here
    made.recording, made.watchdog = not verifies, Watchdog("warn")
    made.capture = types.SimpleNamespace(saw_backward=lambda torch, tensors: None) if verifies else None
    loss = torch.tensor(3.0)
    made.backward_ends(loss)
    loss.zero_()
    assert [float(one) for one in (*made.losses, *(one for _, one in made.watchdog._fresh))] == [3.0, 3.0]


@pytest.mark.parametrize(("built_for", "deterministic"), [("cuda", True), ("hip", True), ("", True), ("cuda", False)])
def test_seeding_does_not_start_the_driver(monkeypatch, built_for, deterministic):
    """Whoever asks whether a device is there starts the driver: choosing devices later has no effect, forks break."""
    def forbidden() -> bool:
        raise AssertionError("the driver was started")

    asked = []
    for name in ("is_available", "device_count", "init"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode, *, warn_only: asked.append((mode, warn_only)))
    for name in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, name, "13.0" if name == built_for else None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    before = torch.get_rng_state()
    try:
        randomness.seed_torch(torch, 3, deterministic=deterministic)
    finally:
        torch.set_rng_state(before)
    assert asked == ([(True, True)] if built_for and deterministic else [])
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None) == (":4096:8" if built_for else None)


@pytest.mark.parametrize("segments, active", [([{"is_expandable": True}, {"is_expandable": False}], True),
                                              ([{"is_expandable": False}], False), ([], False)])
def test_growing_segments_are_proved_by_the_allocator(segments, active):
    """torch 2.9.1 reads only one of the variables' two names for this setting (pytorch/pytorch issue 183387)."""
    from saturate.agent.context import Context
    from saturate.records.facts import Evidence

    for initialized in (True, False):
        context = Context(types.SimpleNamespace(cuda=Cuda(is_initialized=lambda now=initialized: now,
                                                          memory_snapshot=lambda: segments)))
        allocator.apply(context, allocator.Options())
        proof = allocator.active(Evidence(notes={key: str(value) for key, value in context.notes.items()},
                                          environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}), allocator.Options())
        assert proof.active is (active and initialized)
        assert "had no effect" in proof.evidence or proof.active
    assert "did not reach" in allocator.active(Evidence(), allocator.Options()).evidence


def test_the_allocator_s_history_is_asked_for_as_torch_takes_it(monkeypatch):
    """And an allocation that Python knows nothing of belongs to no line."""
    from torch.cuda import memory

    taken = inspect.signature(memory._record_memory_history_impl)
    asked: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)       # a build with CUDA starts the driver for this
    monkeypatch.setattr(memory, "_record_memory_history", lambda **kwargs: asked.append(taken.bind(**kwargs).arguments))
    frames = [{"filename": __file__, "line": 9, "name": "forward"}]
    events = [{"action": "alloc", "addr": 1, "size": 5, "frames": frames}, {"action": "alloc", "addr": 2, "size": 50}]
    monkeypatch.setattr(memory, "_snapshot", lambda: {"device_traces": [events]})
    lines = CudaLines(torch, (FIRST,))
    lines.start()
    assert [line[-1] for line in lines.largest()] == [5]
    lines.stop()
    assert [one["enabled"] for one in asked] == ["all", None]


@pytest.mark.parametrize("counted, partitions, recorded", [
    ({"cudagraph_recorded_non_static_inputs": 0}, True, True), ({"cudagraph_recorded_non_static_inputs": 2, "cudagraph_skips": 1}, False, True),
    ({"cudagraph_skips": 2}, False, False), ({}, True, False), ({}, False, None)])
def test_inductor_tells_whether_it_recorded_a_graph(monkeypatch, counted, partitions, recorded):
    config = types.SimpleNamespace(graph_partition=True) if partitions else types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch._inductor.config", config)
    assert facts.cuda_graphs({"inductor": counted} if counted else {}) is recorded


@pytest.mark.parametrize("devices", [(SECOND,), ()])
def test_ceilings_are_those_of_the_training_s_device(monkeypatch, devices):
    """Named "cuda" they are measured on the current one, and torch takes some memory of each device that it measures on."""
    made = session(Cuda(), *devices)
    monkeypatch.setattr(ceilings, "measure", lambda torch, device, where: {"where": where})
    assert application.answer(made, {"do": "ceilings"}) == {"where": SECOND if devices else None}


def test_nothing_is_asked_of_a_device_without_cuda():
    cuda = Cuda(is_initialized=lambda: False)
    assert _common.capturing(types.SimpleNamespace(cuda=cuda)) is False and cuda.calls == [("is_initialized",)]


class Captured(Exception):
    """What the driver says of a capture in which somebody waits."""


@pytest.mark.parametrize("optimizer", [True, False], ids=["optimizer", "by hand"])
def test_while_the_script_captures_its_step_nothing_waits_for_the_device(optimizer):
    """The fourth update of torch's own example is captured: the first end of a step after the third one showed what a step is."""
    def refuse(device: Any) -> None:
        raise Captured

    made = session(Cuda(is_initialized=lambda: True, is_current_stream_capturing=lambda: True, synchronize=refuse), FIRST)
    told: list[Any] = []
    made.phase, made.recording, made.watchdog = "active", True, Watchdog("warn")
    made.gate = types.SimpleNamespace(tell=told.append, boundary=lambda evaluated: made.drain(), split=False)
    loss, stepping = torch.tensor(3.0), types.SimpleNamespace()
    if optimizer:
        made.optimizers.built = [lambda: stepping]
        made.step_begins(stepping)
    made.backward_ends(loss)
    if optimizer:
        assert not told, "a graph may hold the backward pass alone, and the optimizer step after each replay"
        made.step_ends(stepping)
    assert [(one["at"], one["replayed"]) for one in told] == [("no_step", True)]
    assert made.dead and not made.counts and not made.losses and not made.watchdog._fresh and not made.boundaries
    made.step_ends(stepping)            # what is not captured later is none of ours either
    assert len(told) == 1 and not made.boundaries


def test_who_captures_only_the_backward_pass_goes_on_to_be_followed():
    now = [True]
    made = session(Cuda(is_initialized=lambda: True, is_current_stream_capturing=lambda: now[0]), FIRST)
    stepping = types.SimpleNamespace()
    made.optimizers.built = [lambda: stepping]
    made._stepped = lambda optimizer: made._token("S0")
    made._boundary = lambda: setattr(made, "boundaries", made.boundaries + 1)
    made.backward_ends(torch.tensor(3.0))
    now[0] = False
    for _ in range(3):
        made.step_ends(stepping)        # after each replay
    assert (made.boundaries, made.counts, made.dead) == (3, {"S0": 3}, False)


@pytest.mark.parametrize(("token", "ends"), [("B", False), ("S0", True), (None, False)])
def test_who_captures_only_the_optimizer_s_step_is_followed_by_backward_passes(token, ends):
    """Unless steps were what an optimizer ends: then no more of them are seen."""
    now = [False]
    made = session(Cuda(is_initialized=lambda: True, is_current_stream_capturing=lambda: now[0]), FIRST)
    told: list[Any] = []
    made.gate = types.SimpleNamespace(tell=told.append)
    made.step = Step(token, 1, (token,)) if token else None
    stepping = torch.optim.SGD([torch.zeros(1)])
    made.optimizers.built = [lambda: stepping]
    seen: list[Any] = []
    made.guard = lambda function, *args: function(*args) if function in (_common.capturing, graphs.captured_update) else seen.append(args)
    made.backward_ends(torch.tensor(3.0))
    now[0] = True
    made.step_begins(stepping)
    made.step_ends(stepping)
    now[0] = False
    made.backward_ends(torch.tensor(3.0))
    assert (made.dead, len(told), seen.count(("B",))) == (ends, int(ends), 1 if ends else 2)


def test_what_the_driver_says_of_an_earlier_launch_is_not_raised_at_our_question():
    """A kernel of the script that failed is reported by whatever is asked next."""
    def fails() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    for event in ("backward_ends", "step_ends"):
        made = session(Cuda(is_initialized=lambda: True, is_current_stream_capturing=fails), FIRST)
        told: list[Any] = []
        made.gate = types.SimpleNamespace(tell=told.append)
        getattr(made, event)(types.SimpleNamespace())
        assert made.dead and [one["at"] for one in told] == ["agent_failed"]


REPLAYING = """
import time, torch, torch.nn as nn
capturing = False
torch.cuda.is_initialized = lambda: True
torch.cuda.is_current_stream_capturing = lambda: capturing
model = nn.Linear(8, 1); opt = torch.optim.SGD(model.parameters(), lr=1e-3); x = torch.randn(4, 8)
def step():
    opt.zero_grad(); model(x).square().mean().backward(); opt.step()
for _ in range(WARM): step()
capturing = True; step(); capturing = False
print("captured", flush=True)
for _ in range(REPLAYS): time.sleep(0.01)       # call no Python of the training
"""


@pytest.mark.parametrize("warm", [3, 11])
def test_a_script_that_replays_whole_steps_is_told_why_nothing_is_seen(warm, script, start):
    """Before and after its first gate."""
    trial = start(str(script(REPLAYING.replace("WARM", str(warm)).replace("REPLAYS", "60000"))))
    with pytest.raises(TrialEnded) as ended:
        trial.wait_ready()
        trial.run_block(0, 50)
    assert ended.value.outcome == REPLAYED         # perhaps before it comes to print that it has captured


def test_a_recipe_is_without_effect_there_and_says_so(script, clean_environment, tmp_path):
    """And the script trains to its end."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('schema = 1\n\n[[technique]]\nid = "channels-last"\n', encoding="utf-8")
    path = script(REPLAYING.replace("WARM", "3").replace("REPLAYS", "1"))
    ran = subprocess.run([sys.executable, "-m", "saturate", "run", str(recipe), "--", sys.executable, str(path)],
                         capture_output=True, text=True, cwd=tmp_path, env=clean_environment, timeout=120)
    assert ran.returncode == 0 and "captured" in ran.stdout
    assert "replays a CUDA graph of whole steps; the recipe's model techniques are not applied" in ran.stderr


def test_a_drill_reads_no_tensor_of_a_capture_and_says_why_it_ends(script, start, tmp_path):
    """What a module is given and returns is written down in all other forward passes. No gate is read while a script is drilled."""
    watched = """
        tolist = torch.Tensor.tolist
        torch.Tensor.tolist = lambda tensor: (print("read in a capture" if capturing else "read", flush=True), tolist(tensor))[1]
    """
    (tmp_path / "events").mkdir()
    source = textwrap.dedent(REPLAYING).replace("def step", textwrap.dedent(watched) + "def step").replace("WARM", "3").replace("REPLAYS", "6000")
    trial = start(str(script(source)), capture={"seed": 1}, plan={"drill": {"folder": str(tmp_path / "events"), "written": [], "hold": None}})
    ran = drill_process._Follower(trial, tmp_path / "events", None).follow(lambda log: False, time.monotonic() + 120, 0.0)
    assert ran.ended == REPLAYED and not ran.late and len(ran.updates(ran.step)) == 3
    assert "captured" in trial.output() and "read\n" in trial.output() and "read in a capture" not in trial.output()
