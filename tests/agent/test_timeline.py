"""What a block says of steps that a host queues for accelerators, against what they take where nobody looks."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from types import SimpleNamespace

import pytest
from launch_queue import MS, Machine

from saturate.agent.gate import Gate
from saturate.agent.timeline import Timeline, in_order, wait_for
from saturate.measure import stationary
from saturate.trial import clocks
from saturate.trial.process import Block


def timeline(machine, devices=None):
    return Timeline(machine.torch, lambda: machine.now, machine.wait, lambda: machine.devices if devices is None else devices)


def blocks(machine, step, sizes, devices=None):
    """The gate's messages for blocks of these (skip, steps). `step(machine, number, gate)` is one step; true: it held an evaluation."""
    name, messages = f"saturate-test-{secrets.token_hex(8)}", []

    def controller(listener):
        connection = listener.accept()[0]
        with connection, connection.makefile("rwb") as file:
            for skip, steps in (*sizes, (0, 1)):
                while json.loads(line := file.readline())["at"] != "gate":
                    pass
                messages.append(json.loads(line))
                file.write(json.dumps({"do": "go", "skip": skip, "steps": steps}).encode() + b"\n")
                file.flush()

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen()
        thread = threading.Thread(target=controller, args=(listener,), daemon=True)
        thread.start()
        mine = Gate({"socket": name, "token": ""}, {"rank": 0}, timeline(machine, devices), lambda: machine.now, machine.wait,
                    lambda order: None)
        mine.boundary(False)
        number = 0
        for skip, steps in sizes:
            for _ in range(skip + steps):
                evaluated = bool(step(machine, number, mine))
                number += 1
                mine.boundary(evaluated)
        thread.join(10)
        mine._file.close()
        mine._socket.close()
    return [block(message, skip) for message, (skip, _) in zip(messages[1:], sizes)]


def block(message, skip):
    stamps = message["stamps"]
    durations = [later - earlier for earlier, later in zip(stamps, stamps[1:])][skip:]
    return Block(durations, message["parts"], evaluated=frozenset(index - skip for index in message["evaluations"]))


def truth_ms(make, step, many=2000):
    """Milliseconds a step of a training that nobody looks at, those with an evaluation left out."""
    machine, ends, training = make(), [], []
    unwatched = SimpleNamespace(add_part=lambda part, began: None, _timeline=SimpleNamespace(mark=lambda: None))
    for number in range(many):
        evaluated = step(machine, number, unwatched)
        ends.append(max(machine.now, *machine.free))
        if number > many // 2 and not evaluated:
            training.append(ends[-1] - ends[-2])
    return sum(training) / len(training) / MS


def device_bound(machine, number, gate):
    machine.host(4)
    machine.launch(20)


def host_bound(machine, number, gate):
    machine.host(20)
    machine.launch(4)


def hidden_loader(machine, number, gate):
    machine.host(50)
    machine.launch(200)


def slow_loader(machine, number, gate):
    machine.host(300)
    machine.launch(200)


def bursts(machine, number, gate):
    """Every fourth batch takes long, and the others hide it."""
    machine.host(60 if number % 4 == 0 else 2)
    machine.launch(20)


def synchronous(machine, number, gate):
    machine.host(5)
    machine.launch(20)
    machine.wait()


def now_and_then_read(machine, number, gate):
    """A loss is logged every tenth step."""
    machine.host(5)
    machine.launch(20)
    if number % 10 == 9:
        machine.wait()


def evaluating(machine, number, gate):
    machine.host(4)
    machine.launch(20)
    if number % 7 == 6:
        machine.launch(70)
        machine.wait()
        return True
    return False


def spread(machine, number, gate):
    """A model over two devices: the second works on what the first gives it."""
    machine.host(3)
    machine.launch(10, 0)
    machine.launch(30, 1, behind=0)
    machine.launch(10, 0, behind=1)


STEPS = [device_bound, host_bound, hidden_loader, slow_loader, bursts, synchronous, now_and_then_read, evaluating, spread]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_block_says_what_a_step_takes_where_nobody_looks(step):
    def make():
        return Machine(2 if step is spread else 1)

    true_ms = truth_ms(make, step)
    skip, steps = stationary.block_steps(true_ms, queued=True)
    many = 20 if step is now_and_then_read else steps           # whole turns of what happens every tenth step
    found = blocks(make(), step, [(skip, many)] * 4)
    assert [one.mean_ns / MS for one in found[1:]] == pytest.approx([true_ms] * 3, rel=0.02)


@pytest.mark.parametrize("behind", [2, 3, 4, 6, 10, 20])
@pytest.mark.parametrize("step", [device_bound, host_bound, hidden_loader, synchronous], ids=lambda step: step.__name__)
def test_the_warm_up_says_it_too(step, behind):
    """However many steps the device's queue holds."""
    true_ms = truth_ms(lambda: Machine(depth=behind), step)
    times = [t for one in blocks(Machine(depth=behind), step, [(0, 2), (0, 4), (0, 8), (0, 16)]) for t in stationary.with_lead(one.step_ns)]
    settled = stationary.warmed_up(times)
    assert settled is not None
    assert stationary.typical_ms(times[settled:]) == pytest.approx(true_ms, rel=0.02)


def test_nothing_is_drained_within_a_block():
    machine = Machine()
    found = blocks(machine, device_bound, [(1, 5)] * 3)
    assert [one.timed_ns for one in found] == [[20 * MS] * 5] * 3
    assert machine.drained <= 2 * 4     # at each of four gates, when a block ends and when it is waited for the next order


def test_the_clock_of_such_blocks_is_believed():
    """The stamps lie within the time of the block, and together take as long."""
    machine, lags = Machine(), []
    kept = timeline(machine)
    for _ in range(8):
        began = machine.now
        marks = [kept.begin()]
        for number in range(20):
            device_bound(machine, number, None)
            marks.append(kept.mark())
        machine.wait()
        stamps = kept.read(marks)
        assert clocks.problem(began, stamps, machine.now) is None
        lags.append((machine.now - began, stamps[-1] - stamps[0]))
    assert clocks.drift(lags) is None


def parted(machine, number, gate):
    """Hidden input of 50 ms, a forward of 100, a backward of 180 and an optimizer of 20: the host queues each in no time."""
    mark = gate._timeline.mark
    for part, host, device in (("input", 50, 0), (None, 1, 100), ("backward", 1, 180), ("optimizer", 2, 20)):
        began = mark()
        machine.host(host)
        if device:
            machine.launch(device)
        if part is not None:
            gate.add_part(part, began)


def test_parts_of_a_step_are_the_device_s():
    found = blocks(Machine(), parted, [(1, 5)])[0]
    assert {part: ns / 5 / MS for part, ns in found.parts.items()} == pytest.approx({"input": 0, "backward": 180, "optimizer": 20}, abs=0.01)
    assert found.mean_ns / MS == pytest.approx(300)


def test_input_is_what_the_device_waits_for():
    """A batch takes 400 ms, and the device has work for 300 of them."""
    def step(machine, number, gate):
        began = gate._timeline.mark()
        machine.host(400)
        gate.add_part("input", began)
        gate.add_time("fetch", 400 * MS)
        machine.launch(300)

    found = blocks(Machine(), step, [(1, 5)])[0]
    assert found.mean_ns / MS == pytest.approx(400) and found.parts == pytest.approx({"input": 500 * MS, "fetch": 2000 * MS})


def test_parts_within_a_capture_are_not_known():
    """An event that is recorded then becomes a part of the graph."""
    def step(machine, number, gate):
        machine.capturing = number == 2
        device_bound(machine, number, gate)
        began = gate._timeline.mark()
        machine.launch(10)
        gate.add_part("optimizer", began)

    found = blocks(Machine(), step, [(1, 5)])[0]
    assert found.parts == {"optimizer": 4 * 10 * MS}
    assert found.mean_ns / MS == pytest.approx(30) and 0 in found.timed_ns, "the boundary that is not known is that of the one before"


def test_on_a_cpu_it_is_the_clock():
    def step(machine, number, gate):
        machine.host(5)
        began = gate._timeline.mark()
        machine.host(2)
        gate.add_part("backward", began)

    found = blocks(Machine(), step, [(1, 4)], devices=())[0]
    assert found.timed_ns == [7 * MS] * 4 and found.parts == {"backward": 4 * 2 * MS}, "what is skipped is no part of what is timed"


def test_other_accelerators_are_drained_at_every_mark():
    """What overlaps counts in full there, but no step is shorter than its work."""
    found = blocks(Machine(), device_bound, [(1, 4)], devices=(SimpleNamespace(type="mps", index=0),))[0]
    assert found.timed_ns == [24 * MS] * 4


def test_times_are_in_order():
    assert in_order([5, 9, None, 8, 30], 5, 20) == [5, 9, 9, 9, 20]
    assert in_order([None, 7], 5, 20) == [5, 7]


def test_devices_are_waited_for_as_their_torch_can():
    waited = []
    xpu, mps, odd = (SimpleNamespace(type=kind) for kind in ("xpu", "mps", "odd"))
    accelerator = SimpleNamespace(current_accelerator=lambda: xpu, synchronize=lambda device: waited.append(device.type))
    wait_for(SimpleNamespace(accelerator=accelerator), xpu)
    wait_for(SimpleNamespace(accelerator=accelerator, mps=SimpleNamespace(synchronize=lambda: waited.append("mps"))), mps)
    wait_for(SimpleNamespace(mps=SimpleNamespace(synchronize=lambda: waited.append("old mps"))), mps)
    assert waited == ["xpu", "mps", "old mps"]
    with pytest.raises(RuntimeError, match="odd devices cannot be timed"):
        wait_for(SimpleNamespace(accelerator=accelerator), odd)


def test_a_wait_for_a_batch_begins_after_the_mark():
    """Devices without events are drained there: what they still had to do is no wait for input."""
    torch = pytest.importorskip("torch")
    from saturate.agent import seams

    now, waited = [0], []

    def mark() -> None:
        now[0] += 100 * MS

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            now[0] += 5 * MS
            return index

    session = SimpleNamespace(
        undo=[], gate=None, splitting=True, loaders_known=True, clock=lambda: now[0], mark=mark, signs_of_training=lambda: None,
        loader_arguments=lambda loader, init, args, kwargs: (args, kwargs),
        loader_waited=lambda iterator, batch, began, took_ns: waited.append(took_ns))
    seams._loaders(session, torch)
    try:
        next(iter(torch.utils.data.DataLoader(Rows())))
    finally:
        for undo in reversed(session.undo):
            undo()
    assert waited == [5 * MS]
