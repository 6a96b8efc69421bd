"""Before and after: what changed between two analyses, per step, each quantity with its denominator."""

from __future__ import annotations

from collections.abc import Callable

from saturate.records.analysis import Analysis, Device, Finding, Operator
from saturate.records.comparison import Change, Comparison, DeviceComparison, OperatorChange

PARTS = ("compute", "exposed_communication", "exposed_copy", "idle")

#: An operator has changed when its time per step has, by at least this share of the larger of the two steps. Two
#: recordings of one program differ by less.
WORTH_A_LINE = 0.002
MOST_OPERATORS = 30


def compare(old: Analysis, new: Analysis, judges: Callable[[str, Analysis], bool] = lambda id, analysis: True) -> Comparison:
    """Old against new; ratios are old / new. Devices are paired by rank and id, findings by id.

    `judges`: whether an analysis could have had a finding of this id. Where it could not, a finding of the other one
    is neither gone nor new.
    """
    pairs, notes = _pairs(old.devices, new.devices)
    for before, after in pairs:
        notes += _limits(before, after)
    before_ids, after_ids = ({finding.id for finding in analysis.findings} for analysis in (old, new))
    notes += _integrity("old", old) + _integrity("new", new)

    def only(findings: list[Finding], wanted: Callable[[str], bool]) -> list[Finding]:
        return [finding for finding in findings if wanted(finding.id)]

    return Comparison(
        old=old.sources, new=new.sources, devices=[_device(before, after) for before, after in pairs],
        old_verdict=old.verdict, new_verdict=new.verdict,
        findings_gone=only(old.findings, lambda id: id not in after_ids and judges(id, new)),
        findings_new=only(new.findings, lambda id: id not in before_ids and judges(id, old)),
        findings_kept=only(new.findings, lambda id: id in before_ids),
        not_judged_by_new=only(old.findings, lambda id: id not in after_ids and not judges(id, new)),
        not_judged_by_old=only(new.findings, lambda id: id not in before_ids and not judges(id, old)),
        notes=list(dict.fromkeys(notes)),
    )


def _pairs(old: list[Device], new: list[Device]) -> tuple[list[tuple[Device, Device]], list[str]]:
    """Devices of the same rank and id; a single device on each side belongs together whatever it is called."""
    if len(old) == len(new) == 1:
        return [(old[0], new[0])], []
    # Where files do not say their rank, it is a number that only a comparison of several ranks gives.
    said = all(device.rank is not None for device in (*old, *new))
    before, after = ({(device.rank if said else None, device.id): device for device in devices} for devices in (old, new))
    notes = []
    if len(before) < len(old) or len(after) < len(new):
        notes.append("several devices of one analysis have the same rank and id; only one of each is compared")
    for mine, theirs, where in ((before, after, "old"), (after, before, "new")):
        alone = [key for key in mine if key not in theirs]
        if alone:
            notes.append(f"only in the {where} analysis, and not compared: "
                         + ", ".join(_named(*key) for key in alone))
    return [(device, after[key]) for key, device in before.items() if key in after], notes


def _named(rank: int | None, id: int) -> str:
    return f"device {id}" if rank is None else f"device {id} of rank {rank}"


def _limits(old: Device, new: Device) -> list[str]:
    """What keeps this pair from being a fair comparison."""
    notes = []
    if old.name != new.name:
        notes.append(f"the devices differ ({old.name or 'not named'} against {new.name or 'not named'}): what "
                     "changed is theirs as well as the program's")
    if bool(old.steps) != bool(new.steps):
        notes.append(f"only the {'old' if old.steps else 'new'} trace marks its steps, so no length can be compared")
    elif not old.steps:
        notes.append("neither trace marks its steps: lengths depend on how much was recorded, so only shares are "
                     "compared")
    elif old.steps != new.steps:
        notes.append(f"{old.steps} steps against {new.steps}: lengths are per step")
    return notes


def _integrity(which: str, analysis: Analysis) -> list[str]:
    return [f"the {which} trace: {problem.message}" for problem in analysis.integrity.problems if problem.blocks]


def _device(old: Device, new: Device) -> DeviceComparison:
    lengths = bool(old.steps and new.steps)
    operators, left_out, unknown = _operators(old, new) if lengths else ([], 0, "at least one trace marks no steps")
    return DeviceComparison(
        id=new.id, rank=new.rank, old_name=old.name, new_name=new.name, old_steps=old.steps, new_steps=new.steps,
        step=_length("step", lambda device: device.step_ns, old, new, "step_ns"),
        span=_change("span", "ns", old.span_ns, new.span_ns, old, new, "span_ns", ratio=False),
        parts=[_length(part, lambda device, part=part: getattr(device, f"{part}_ns"), old, new, f"{part}_ns")
               for part in PARTS],
        shares=_shares(old, new), gaps=_gaps(old, new), operators=operators, operators_left_out=left_out,
        old_verdict=old.verdict, new_verdict=new.verdict, unknown={"operators": unknown} if unknown else {},
    )


def _length(name: str, of: Callable[[Device], int | None], old: Device, new: Device, field: str) -> Change:
    """A length per step. None without steps: then it says how much was recorded, not how long a step takes."""
    def per_step(device: Device) -> float | None:
        total = of(device)
        return None if total is None or not device.steps else total / device.steps

    return _change(name, "ns per step", per_step(old), per_step(new), old, new, field)


def _change(name: str, unit: str, before: float | None, after: float | None, old: Device, new: Device, field: str,
            ratio: bool = True) -> Change:
    reasons = []
    for value, device, which in ((before, old, "old"), (after, new, "new")):
        if value is None:
            why = device.unknown.get(field) or ("it marks no steps" if unit == "ns per step" and not device.steps else
                                                "it was not recorded, or there was none")
            reasons.append(f"the {which} trace: {why}")
    return Change(name=name, unit=unit, old=before, new=after, unknown="; ".join(reasons),
                  ratio=before / after if ratio and before is not None and after else None)


def _shares(old: Device, new: Device) -> list[Change]:
    window = "the step" if old.steps and new.steps else "the span"
    same = bool(old.steps) == bool(new.steps)

    def share(device: Device, part: str) -> float | None:
        total, length = getattr(device, f"{part}_ns"), device.step_ns if device.steps else device.span_ns
        return None if total is None or not length or not same else total / length

    def change(name: str, of: str, field: str, value: Callable[[Device], float | None]) -> Change:
        return _change(name, f"of {of}", value(old), value(new), old, new, field, ratio=False)

    return [
        change("busy_of_step", "the step", "busy_of_step", lambda device: device.busy_of_step),
        change("busy_of_span", "the span", "busy_of_span", lambda device: device.busy_of_span),
        *(change(part, window, f"{part}_ns", lambda device, part=part: share(device, part)) for part in PARTS),
        change("communication_overlap", "communication", "communication_overlap",
               lambda device: device.communication_overlap),
        change("data_wait_raw", window, "data_wait", lambda device: device.data_wait.raw),
        change("data_wait_exposed", window, "data_wait", lambda device: device.data_wait.exposed),
    ]


def _gaps(old: Device, new: Device) -> list[Change]:
    """Idle time by cause. A cause that one side never met is 0 there, if that side knows its gaps."""
    causes = dict.fromkeys([*old.window_gap_ns, *new.window_gap_ns])

    def of(device: Device, cause: str) -> int | None:
        if not device.window_gap_ns or (cause == "input" and device.data_wait.raw is None):
            return None
        return device.window_gap_ns.get(cause, 0)

    def field(cause: str) -> str:
        return "data_wait" if cause == "input" and all(device.window_gap_ns for device in (old, new)) else "gaps"

    return [_length(cause, lambda device, cause=cause: of(device, cause), old, new, field(cause)) for cause in causes]


def _operators(old: Device, new: Device) -> tuple[list[OperatorChange], int, str]:
    """The changed operators, how many changed too little, and why there are none."""
    before, after = (_by_identity(device.roofline.operators) for device in (old, new))
    silent = [which for which, table in (("old", before), ("new", after)) if not table]
    if silent:
        return [], 0, f"the {' and the '.join(silent)} trace has no operators with kernels"
    shaped = [which for which, table in (("old", before), ("new", after)) if any(shapes for _, shapes, _ in table)]
    if len(shaped) == 1:
        return [], 0, f"only the {shaped[0]} trace has the shapes of its operators, so none can be paired"
    least = WORTH_A_LINE * max((device.step_ns or 0) / device.steps for device in (old, new))
    changes = [_operator(before.get(key, []), after.get(key, []), old.steps, new.steps)
               for key in {**before, **after}]
    worth = [change for change in changes if abs(change.new_ns - change.old_ns) >= least]
    worth.sort(key=lambda change: (-abs(change.new_ns - change.old_ns), change.name, change.shapes))
    return worth[:MOST_OPERATORS], len(changes) - len(worth[:MOST_OPERATORS]), ""


def _by_identity(operators: list[Operator]) -> dict[tuple[str, str, str], list[Operator]]:
    table: dict[tuple[str, str, str], list[Operator]] = {}
    for operator in operators:
        table.setdefault((operator.name, operator.shapes, operator.dtypes), []).append(operator)
    return table


def _operator(old: list[Operator], new: list[Operator], old_steps: int, new_steps: int) -> OperatorChange:
    one = (new or old)[0]
    old_ns, new_ns = (sum(operator.time_ns for operator in side) / steps
                      for side, steps in ((old, old_steps), (new, new_steps)))
    calls_old, calls_new = (sum(operator.calls for operator in side) / steps
                            for side, steps in ((old, old_steps), (new, new_steps)))
    before, after = (list(dict.fromkeys(name for operator in side for name in operator.kernels))
                     for side in (old, new))
    differ = set(before) != set(after)
    return OperatorChange(
        name=one.name, shapes=one.shapes, dtypes=one.dtypes,
        fate="changed" if old and new else "vanished" if old else "appeared",
        old_ns=old_ns, new_ns=new_ns, calls_old=calls_old, calls_new=calls_new,
        ratio=old_ns / new_ns if old and new_ns else None,
        kernels_old=before if differ else [], kernels_new=after if differ else [],
    )
