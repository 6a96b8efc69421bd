"""What an analysis says, in words and numbers: shared by its terminal summary and its HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saturate.records import sizes
from saturate.records.analysis import Analysis, Device, Finding, LoaderCost, Operator, Profile, Sync, at_work
from saturate.report import words

UNKNOWN = "not known"

#: Verdict -> its title, and what it means.
LIMITS = {
    "input-bound": ("Input-bound", "the device waits for the next batch"),
    "host-bound": ("Host-bound", "the host launches work too late for the device"),
    "sync-bound": ("Sync-bound", "the host stops to wait for the device, which then runs dry"),
    "communication-bound": ("Communication-bound", "communication that no computation hides"),
    "device-wait-bound": ("Device-wait-bound", "work was queued, but waited for other work, peers or events"),
    "memory-bound": ("Memory-bound", "most busy time moves bytes"),
    "compute-bound": ("Compute-bound", "most busy time does arithmetic"),
    "unknown": ("No verdict", "the evidence does not carry one"),
}
#: What else a verdict means where no work is launched, and no device waits.
_ON_A_CPU = {
    "input-bound": "training waits for the next batch",
    "host-bound": "the interpreter works, or calls operators that have next to nothing to do",
    "sync-bound": "the interpreter reads values out of tensors",
}


@dataclass(frozen=True)
class Part:
    """One exclusive part of a window. `letter` and `block` draw it in text, `shade` in the page (see
    `analysis_style`); `waits`: the device does not work in it."""

    key: str
    name: str
    ns: int
    letter: str
    block: str
    shade: int
    waits: bool = False


#: key -> name, letter, block, shade, waits. The four parts of a device's window:
_PARTS = {
    "compute": ("computation", "C", "\u2588", 0, False),
    "exposed_communication": ("exposed communication", "N", "\u2593", 3, False),
    "exposed_copy": ("exposed copies", "M", "\u2592", 4, False),
    "idle": ("idle", ".", "\u2591", 5, True),
}
#: The parts of a profiled step. Eight shades of grey cannot be told apart, so their bar is written in letters.
_SPLIT = {
    "forward": ("forward", "F", "F", 0, False),
    "backward": ("backward", "B", "B", 1, False),
    "optimizer": ("optimizer", "O", "O", 2, False),
    "communication": ("communication", "C", "C", 3, False),
    "host_to_device": ("host-to-device", "H", "H", 4, False),
    "input": ("input wait", "I", "I", 6, True),
    "sync": ("sync", "S", "S", 7, True),
    "idle": ("idle", ".", ".", 5, True),
}
#: Causes of idle time, in the order in which they are decided.
_GAPS = {
    "input": ("input", 6),
    "host_late": ("host late", 8),
    "sync": ("sync", 7),
    "already_launched": ("already launched", 9),
    "unattributed": ("unattributed", 5),
}
MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "other": "other",
}


def share(value: float | None) -> str:
    """0.511 as "51.1 %"; two decimals below one per cent, where one would hide most of the number."""
    if value is None:
        return UNKNOWN
    return f"{100 * value:.2f} %" if 0 < abs(value) < 0.01 else words.percent(value)


def of(part_ns: int | None, whole_ns: int | None) -> float | None:
    """A part of a whole as a share; None where either is unknown or the whole is empty."""
    return None if part_ns is None or not whole_ns else part_ns / whole_ns


def time(ns: int | None) -> str:
    """Nanoseconds with a readable unit."""
    if ns is None:
        return UNKNOWN
    if abs(ns) < 100_000:
        return f"{ns / 1000:.1f} us" if abs(ns) >= 1000 else f"{ns} ns"
    return f"{words.ms(ns / 1e6)} ms" if abs(ns) < 100_000_000_000 else words.seconds(ns / 1e9)


def loader_cost(cost: LoaderCost) -> list[str]:
    """What `--synthetic-input` found, in parts of a sentence."""
    low, high = cost.share_ci
    ends = [f"{words.ms(cost.step_ms)} ms with the loader", f"{words.ms(cost.replayed_step_ms)} ms with one batch replayed"]
    if low <= 0:
        return [*ends, f"no difference that can be told from noise ({share(low)} to {share(high)} of the step)"]
    return [*ends, f"it costs {words.ms(cost.cost_ms)} ms, {share(cost.share)} of the step ({share(low)} to {share(high)})"]


def size(count: float | None, unit: str = "B") -> str:
    """Bytes or FLOPs with a decimal prefix: "1.5 GB", "312 TFLOP"."""
    return UNKNOWN if count is None else sizes.decimal(count, unit)


def window(device: Device) -> tuple[int | None, str]:
    """Length and name of what a device's four parts sum to."""
    if device.step_ns is not None:
        return device.step_ns, "the steps"
    return device.span_ns, "the span"


def parts(device: Device) -> list[Part]:
    """The four exclusive parts of the window; empty where they are not known."""
    lengths = {key: getattr(device, f"{key}_ns") for key in _PARTS}
    if any(ns is None for ns in lengths.values()):
        return []
    return [
        Part(key, name, lengths[key], letter, block, shade, waits)
        for key, (name, letter, block, shade, waits) in _PARTS.items()
    ]


def split(profile: Profile) -> list[Part]:
    """The parts of the recorded steps, in the order of a step; parts of other names come last, as they are."""
    known = {key: profile.split[key] for key in _SPLIT if key in profile.split}
    rest = {key: ns for key, ns in profile.split.items() if key not in _SPLIT}
    return [
        Part(key, name, known[key], letter, block, shade, waits)
        for key, (name, letter, block, shade, waits) in _SPLIT.items()
        if key in known
    ] + [Part(key, words.one_line(key.replace("_", " ")), ns, "?", "?", 5) for key, ns in rest.items()]


def line(one: Sync) -> str:
    """The line of code, where it is known."""
    return f"{one.file}:{one.line}" if one.file else "unknown line"


def gaps(device: Device) -> list[tuple[str, float, int]]:
    """(cause, share of the idle time inside the span, shade); empty where no cause is known."""
    found = [(name, getattr(device.gaps, key), shade) for key, (name, shade) in _GAPS.items()]
    return [(name, value, shade) for name, value, shade in found if value is not None]


def edges(device: Device) -> list[str]:
    """The idle time of the steps before the first and after the last device event, and its causes; [] for none."""
    whole = sum(device.edge_ns.values())
    causes = [
        f"{_GAPS[key][0] if key in _GAPS else words.one_line(key)} {time(ns)}"
        for key, ns in device.edge_ns.items()
        if ns
    ]
    return [f"{time(whole)} before the first or after the last event", *causes] if whole else []


def focus(analysis: Analysis) -> Device | None:
    """The device that page and summary describe: of those with the verdict of the whole, the most idle one."""

    def idleness(device: Device) -> float:
        return of(device.idle_ns, window(device)[0]) or 0.0

    working = at_work(analysis.devices)
    alike = [device for device in working if device.verdict == analysis.verdict] or working
    return max(alike, key=idleness, default=None)


def named(device: Device) -> str:
    """What the device is called."""
    if device.id < 0 and (device.name or device.kernels is not None):
        return "CPU"
    return words.one_line(device.name) or "unnamed device"


def place(device: Device) -> str:
    """Which one it is: "rank 3, device 0"."""
    rank = [f"rank {device.rank}"] if device.rank is not None else []
    return ", ".join([*rank, *([f"device {device.id}"] if device.id >= 0 else [])]) or "CPU"


def places(devices: Sequence[Device]) -> list[str]:
    """Which ones they are, with their file where that alone tells them apart: two recordings of one process, say."""
    found = [place(device) for device in devices]
    twice = len(set(found)) < len(found)
    files = _short([device.source for device in devices])
    return [f"{each} in {file}" if twice and file else each for each, file in zip(found, files)]


def _short(paths: list[str]) -> list[str]:
    """Names of files; whole paths where one name is that of several files."""
    names = [path.rpartition("/")[2] for path in paths]
    shown = names if len(set(names)) == len(set(paths)) else paths
    return [words.one_line(each) for each in shown]


def because(analysis: Analysis) -> str:
    """The number that the verdict rests on, and what it means."""
    device = focus(analysis)
    on_cpu = device is not None and device.id < 0
    meaning = (_ON_A_CPU if on_cpu else {}).get(analysis.verdict, LIMITS[analysis.verdict][1])
    if analysis.verdict == "unknown":
        return _no_verdict(analysis)
    number = _amount(analysis, device)
    return f"{number}: {meaning}" if number else meaning


def _amount(analysis: Analysis, device: Device | None) -> str:
    if device is None:
        return ""
    whole, name = window(device)
    idle = {key: device.window_gap_ns.get(key, 0) for key in _GAPS}
    lengths = {
        "input-bound": _input_wait(analysis, device),
        "communication-bound": of(device.exposed_communication_ns, whole),
        "host-bound": _of_the_host(device, whole) if device.id < 0 else of(idle["host_late"], whole),
        "sync-bound": of(idle["sync"], whole),
        "device-wait-bound": of(idle["already_launched"], whole),
        "memory-bound": of(None if device.idle_ns is None or whole is None else whole - device.idle_ns, whole),
        "compute-bound": of(None if device.idle_ns is None or whole is None else whole - device.idle_ns, whole),
    }
    value = lengths.get(analysis.verdict) or None  # 0: the verdict rests on something else, such as a live profile
    if value is None:
        return ""
    busy = "busy " if analysis.verdict in ("memory-bound", "compute-bound") else ""
    return f"{busy}{share(value)} of {name}"


def _input_wait(analysis: Analysis, device: Device) -> float | None:
    """On a CPU, of the steps that the split is of: the recorded ones are fewer, and others."""
    if isinstance(analysis, Profile) and device.id < 0 and analysis.split:
        return of(analysis.split.get("input"), sum(analysis.split.values()))
    return device.data_wait.exposed


def _of_the_host(device: Device, whole: int | None) -> float | None:
    """On a CPU: between operators, and in those that are little more than their call."""
    idle = of(device.idle_ns, whole)
    calls = of(sum(one.time_ns for one in device.roofline.operators if one.limit == "latency"), whole)
    return None if idle is None else min(1.0, idle - (device.data_wait.exposed or 0.0) + (calls or 0.0))


def _no_verdict(analysis: Analysis) -> str:
    """The reason for the verdict itself; else what blocks conclusions. A mere note is no reason."""
    device = focus(analysis)
    why = {**analysis.unknown, **(device.unknown if device is not None else {})}
    blocking = next((problem.message for problem in analysis.integrity.problems if problem.blocks), "")
    if device is None:
        return why.get("verdict") or why.get("devices") or blocking or "the trace holds no accelerator events"
    return why.get("verdict") or blocking or LIMITS["unknown"][1]


def title(analysis: Analysis) -> str:
    """The verdict, in words."""
    return LIMITS[analysis.verdict][0]


def bound(finding: Finding, times: str = "x") -> str:
    """The most that mending it could give."""
    return words.bound(finding.bound, times) if finding.bound is not None else "no bound"


def helps(finding: Finding) -> str:
    """What to do about it: the techniques that `tune` tries, else advice."""
    techniques = "tune tries " + ", ".join(finding.techniques) if finding.techniques else ""
    return "; ".join(filter(None, (techniques, words.one_line(finding.advice).rstrip("."))))


def operators(device: Device) -> list[Operator]:
    """Operators by recoverable time, those that are not modelled last, by their time."""

    def key(operator: Operator) -> tuple[bool, int, int]:
        return operator.recoverable_ns is None, -(operator.recoverable_ns or 0), -operator.time_ns

    return sorted(device.roofline.operators, key=key)


def signature(operator: Operator) -> str:
    """Shapes and number formats of an operator."""
    return words.one_line(f"{operator.shapes} {operator.dtypes}")


def kind(operator: Operator) -> str:
    """ "memory, inefficient" """
    return ", ".join(filter(None, (operator.limit or "not modelled", "inefficient" if operator.inefficient else "")))


def unknowns(analysis: Analysis, told: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    """(names, reason) of all that is not known: the whole's, then the shown device's; names of one reason together.
    Fields in `told` are left out."""
    device = focus(analysis)
    memory = analysis.memory.unknown if isinstance(analysis, Profile) else {}
    found = {
        **analysis.unknown,
        **(device.unknown if device else {}),
        **{f"memory.{k}": v for k, v in memory.items()},
    }
    reasons: dict[str, list[str]] = {}
    for name, reason in found.items():
        if name.partition(".")[0] not in told:
            reasons.setdefault(reason, []).append(name.removesuffix("_ns").replace("_", " ").replace(".", ": "))
    return [(", ".join(names), reason) for reason, names in reasons.items()]


def left_out(profile: Profile) -> str:
    """Operators whose arithmetic a profile counts as 0, because no formula is known."""
    first, *others = profile.flops_left_out
    return f"not counted: {first}" + (f" and {words.count(len(others), 'other')}" if others else "")


def no_findings(analysis: Analysis) -> str:
    """Why there are none, where that is known."""
    device = focus(analysis)
    if device is not None and not device.steps:
        return "none: rules conclude from whole steps, and none were recorded"
    if analysis.devices and any(problem.blocks for problem in analysis.integrity.problems):
        return "none: the trace does not carry what the rules need"
    return "none"


def next_command(analysis: Analysis) -> str:
    """What to type next."""
    if isinstance(analysis, Profile) and analysis.next_command:
        return words.typed(analysis.next_command)
    techniques = list(dict.fromkeys(name for finding in analysis.findings for name in finding.techniques))
    if techniques:
        return words.shell(["saturate", "tune", "--only", ",".join(techniques), "--", "python", "train.py"])
    if analysis.findings:
        return words.shell(["saturate", "explain", analysis.findings[0].id])
    return "saturate profile -- python train.py"
