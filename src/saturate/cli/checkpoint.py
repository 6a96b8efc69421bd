"""Check, copy out, thin out and plan checkpoints.

The technique incremental-checkpoint keeps checkpoints in a store, and a small file that names each at its path. These
verbs look after both; verify also reads plain files of torch.save, of safetensors and of torch.distributed.checkpoint.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from saturate.cli._output import paint, show_json, table
from saturate.errors import CheckpointDamaged, SaturateError, UsageError

STORE = Path(".saturate/checkpoints")
_UNITS_S = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="verify | export | gc | advise")
    verify = actions.add_parser("verify", help="is everything whole?", description=(
        "Hash every chunk of the store, and check files as far as their formats tell. Exit code 3 when something is damaged."))
    verify.add_argument("paths", nargs="*", type=Path, help="checkpoint files, folders of them, or stores (default: the store)")
    export = actions.add_parser("export", help="make a checkpoint a plain file", description=(
        "Write a checkpoint of the store as the plain file that torch.save would have written."))
    export.add_argument("checkpoint", help="a file that names one, or its id")
    export.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to (default: in the place of the file that names it)")
    collect = actions.add_parser("gc", help="free what no checkpoint needs", description=(
        "Remove checkpoints that no file names any more, and the chunks that only they need. Says what it would do; --delete does it. "
        "A script may have moved the files that name them: nothing is removed for want of one before --look-in says where they may be."))
    collect.add_argument("--keep", type=_count, default=1, metavar="N", help="keep the newest N of each series as well (default: 1)")
    collect.add_argument("--keep-every", type=_count, metavar="K", help="keep every K-th save of each series as well")
    collect.add_argument("--look-in", type=Path, action="append", default=[], metavar="DIR",
                         help="a folder where files may name checkpoints, searched to its bottom; repeatable (those they were saved "
                              "to are searched too)")
    collect.add_argument("--delete", action="store_true", help="do it")
    advise = actions.add_parser("advise", help="how often to save, and whether incremental saving would help", description=(
        "The interval between saves that loses the least time (Young 1974, Daly 2006), from what a save costs and how often the\n"
        "job fails; and what incremental saving would write, forecast from two successive checkpoints."),
        formatter_class=argparse.RawDescriptionHelpFormatter)
    advise.add_argument("--save-cost", type=seconds, metavar="TIME", help="training time that a save costs (default: measured, from the store)")
    advise.add_argument("--restart-cost", type=seconds, metavar="TIME", help="from a failure until training goes on")
    advise.add_argument("--mtbf", type=seconds, metavar="TIME", help="mean time between failures of one node, such as 30d")
    advise.add_argument("--nodes", type=_positive, default=1, metavar="N", help="nodes that the job runs on (default: 1)")
    advise.add_argument("--step-time", type=seconds, metavar="TIME", help="of one step: shows the interval in steps too")
    advise.add_argument("--forecast", nargs=2, type=Path, metavar=("OLD", "NEW"), help="two successive plain checkpoints")
    for action in (verify, export, collect, advise):
        action.add_argument("--store", type=Path, default=None if action in (export,) else STORE, metavar="DIR",
                            help="the store (default: the one that the file names)" if action is export else f"the store (default: {STORE})")
        action.add_argument("--json", action="store_true", help="print one JSON object")


def execute(arguments: argparse.Namespace) -> int:
    return {"verify": _verify, "export": _export, "gc": _gc, "advise": _advise}[arguments.action](arguments)


def seconds(text: str) -> float:
    """Seconds in "0.5", "90s", "10m", "1.5h", "30d", "200ms".

    >>> seconds("30d")
    2592000.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(ms|s|m|min|h|d|)", text.strip())
    value = float(match[1]) * {**_UNITS_S, "ms": 1e-3}[match[2]] if match else 0.0
    if not 1e-9 <= value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 0.5s, 10m, 2h or 30d")
    return value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of checkpoints")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes")
    return int(text)


# -- verify ----------------------------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    from saturate.records import checkpoint as records

    checks = []
    for check in _checks(arguments.paths, arguments.store):
        checks.append(records.Check(path=check.path, kind=check.kind, outcome=check.outcome, size_bytes=check.size_bytes,
                                    problem=check.problem))
        if not arguments.json and (check.outcome != "whole" or check.kind != "pack"):
            color = {"whole": "green", "damaged": "red", "unknown": "yellow"}[check.outcome]
            said = shown(check.path + (f"  ({check.problem})" if check.problem else ""))
            print(f"{paint(check.outcome.ljust(7), color)}  {said}", flush=True)
    counts = {outcome: sum(check.outcome == outcome for check in checks) for outcome in ("whole", "damaged", "unknown")}
    if arguments.json:
        show_json(records.Verified(checks=checks, **counts))
    else:
        print(f"{counts['whole']} whole, {counts['damaged']} damaged, {counts['unknown']} that cannot be checked")
    return CheckpointDamaged.exit_code if counts["damaged"] else 0


def _checks(paths: list[Path], store_folder: Path) -> Iterator:
    """Of what is named, or of the store where nothing is."""
    from saturate.checkpoints import checks
    from saturate.checkpoints.chunks import Store

    for path in paths or [store_folder]:
        if (path / "store.json").exists() or not paths:
            with Store.open(path) as store, store.locked(alone=False):
                yield from checks.check_store(store)
        elif path.is_dir():
            files = list(checks.files_in(path))
            if not files:
                raise UsageError(f"there is no checkpoint in {path}", cause=f"looked for {', '.join(checks.ENDINGS)}, also in its folders",
                                 remedy="name another folder, a file, or a store")
            yield from (checks.check_file(file, named=False) for file in files)
            yield from checks.check_folders(files)
        elif path.exists():
            yield checks.check_file(path)
        else:
            raise UsageError(f"there is no {path}", remedy="name a checkpoint file, a folder of them, or a store")


# -- export ----------------------------------------------------------------------------------------------------------


def _export(arguments: argparse.Namespace) -> int:
    from saturate.checkpoints import manifests, pointer
    from saturate.records.checkpoint import Exported

    named = Path(arguments.checkpoint)
    if manifests.is_id(arguments.checkpoint) and not named.exists():
        if arguments.output is None:
            raise UsageError("an id alone does not say where to", remedy=f"saturate checkpoint export {named} --output FILE")
        target = arguments.output
        found = pointer.Pointer(str((arguments.store or STORE).absolute()), ".", arguments.checkpoint)
    else:
        target = arguments.output or named
        found = pointer.read(named)
        if not named.is_file():
            raise UsageError(f"there is no file {named}", remedy="name a file that torch.save wrote, or the id of a checkpoint")
        if found is None and (arguments.output is not None or arguments.store is not None):
            raise UsageError(f"{named} names no checkpoint of a store: it is a plain file already", remedy="copy it as it is")
    if found is not None:
        try:
            with pointer.resolved(found, named, arguments.store) as (store, manifest):
                manifests.copy(store, manifest, target)
        except OSError as error:
            raise SaturateError(f"{target} could not be written", cause=str(error), remedy="nothing was changed") from error
    size = target.stat().st_size
    if arguments.json:
        show_json(Exported(path=str(target), checkpoint=found and found.checkpoint, size_bytes=size))
    else:
        print(f"{target} is a plain file {'now' if found else 'already'}: {amount(size)}")
    return 0


# -- gc --------------------------------------------------------------------------------------------------------------


def _gc(arguments: argparse.Namespace) -> int:
    from saturate.checkpoints import collect
    from saturate.checkpoints.chunks import Store
    from saturate.records import checkpoint as records

    for place in arguments.look_in:
        if not place.is_dir():
            raise UsageError(f"there is no folder {place}")
    with Store.open(arguments.store) as store, store.locked(alone=arguments.delete):
        plan = collect.plan(store, arguments.keep, arguments.keep_every, arguments.look_in)
        if arguments.delete:
            try:
                collect.carry_out(store, plan)
            except OSError as error:
                raise SaturateError("not everything could be removed", cause=str(error),
                                    remedy="what is kept is whole; run it again") from error
    if arguments.json:
        show_json(records.Collected(
            store=str(arguments.store), deleted=arguments.delete, damaged=plan.damaged,
            kept=[records.Kept(checkpoint=m.id, path=m.path, reason=reason) for m, reason in plan.kept],
            removed=[records.Removed(checkpoint=m.id, path=m.path) for m in plan.removed],
            store_bytes=plan.store_bytes, freed_bytes=plan.freed_bytes))
        return 0
    rows = [(shown(m.saved), "keep  ", shown(f"{m.path}  ({reason})")) for m, reason in plan.kept]
    rows += [(shown(m.saved), "remove", shown(m.path)) for m in plan.removed]
    print(table(sorted(rows)) or "the store is empty")
    for name, problem in plan.damaged.items():
        print(f"damaged: {shown(name)} ({shown(problem)}); no chunk is freed before it is removed by hand")
    unfound = sum(reason == collect.UNFOUND for _, reason in plan.kept)
    if unfound:
        print(f"{unfound} stay only because the files that name them may have been moved: with --look-in DIR, all folders where those "
              "may be, they go unless one is found")
    verb = "freed" if arguments.delete else "would be freed; --delete does it"
    print(f"{amount(plan.freed_bytes)} of {amount(plan.store_bytes)} {verb}")
    return 0


# -- advise ----------------------------------------------------------------------------------------------------------


def _advise(arguments: argparse.Namespace) -> int:
    from saturate.records.checkpoint import Advice

    if arguments.mtbf is None and arguments.forecast is None:
        raise UsageError("saturate checkpoint advise needs the mean time between failures of a node, or two checkpoints to compare",
                         remedy="saturate checkpoint advise --mtbf 30d --nodes 8 --save-cost 20s, or --forecast OLD.pt NEW.pt")
    advice = Advice(interval=_interval(arguments) if arguments.mtbf is not None else None,
                    forecast=_forecast(*arguments.forecast) if arguments.forecast is not None else None)
    if arguments.json:
        show_json(advice)
        return 0
    parts = [_interval_text(advice.interval)] if advice.interval else []
    parts += [_forecast_text(advice.forecast)] if advice.forecast else []
    print("\n\n".join(parts))
    return 0


def _interval(arguments: argparse.Namespace):
    from saturate.checkpoints import advice
    from saturate.records.checkpoint import Interval, IntervalLoss

    cost, source = (arguments.save_cost, "given") if arguments.save_cost is not None else _measured(arguments.store)
    job, step = arguments.mtbf / arguments.nodes, arguments.step_time
    best = advice.daly_s(cost, job)

    def steps(interval_s: float) -> int | None:
        return max(1, round(interval_s / step)) if step else None

    def lost(interval_s: float) -> float:
        return advice.lost_share(interval_s, cost, arguments.restart_cost or 0.0, job)

    return Interval(
        interval_s=best, interval_steps=steps(best), young_interval_s=advice.young_s(cost, job), save_cost_s=cost,
        save_cost_from=source, restart_cost_s=arguments.restart_cost, mtbf_s=arguments.mtbf, nodes=arguments.nodes,
        job_mtbf_s=job, step_time_s=step, lost_share=lost(best),
        around=[IntervalLoss(interval_s=t, interval_steps=steps(t), lost_share=lost(t)) for t in (best / 2, best * 2)])


def _measured(folder: Path) -> tuple[float, str]:
    """The median time that a save into the store held the training."""
    from saturate.checkpoints import manifests
    from saturate.checkpoints.chunks import Store

    try:
        with Store.open(folder) as store:
            took = [manifest.save_s for manifest in manifests.all_of(store)[0]]
    except SaturateError as error:
        raise UsageError("what a save costs is not known", cause=error.message, remedy="give it with --save-cost") from error
    if not took or median(took) <= 0:
        raise UsageError("what a save costs is not known", cause=f"{folder} holds no save", remedy="give it with --save-cost")
    return median(took), f"the median of {len(took)} saves in {folder}"


def _interval_text(found) -> str:
    def every(interval_s: float, steps: int | None) -> str:
        return f"{span(interval_s)}" + (f" ({steps} steps)" if steps else "")

    rows = [(every(one.interval_s, one.interval_steps), f"{one.lost_share:.2%} of the time is lost") for one in (
        found.around[0], found, found.around[1])]
    beside = "" if found.restart_cost_s is not None else " Without --restart-cost the time of restarts is left out."
    return (paint(f"save every {every(found.interval_s, found.interval_steps)} of training", "bold") + "\n" + table(rows, "  ") + "\n"
            f"A save costs {span(found.save_cost_s)} ({found.save_cost_from}), a failure comes every {span(found.job_mtbf_s)} "
            f"({span(found.mtbf_s)} a node, {found.nodes} node{'s' * (found.nodes > 1)}).\n"
            "Daly 2006; assumes failures that come independently at a constant rate (Poisson)." + beside)


def _forecast(old: Path, new: Path):
    from saturate.checkpoints import forecast
    from saturate.records.checkpoint import Forecast

    samples = []
    for path in (old, new):
        try:
            samples.append(forecast.sample(path, most_chunks=4096, most_bytes=1 << 28))
        except OSError as error:
            raise UsageError(f"{path} cannot be read", cause=str(error)) from error
        except ValueError as error:
            raise UsageError(f"{path} cannot be compared", cause=str(error),
                             remedy="name plain files of torch.save or safetensors; saturate checkpoint export makes them") from error
    found = forecast.compare(*samples)
    return Forecast(
        old=str(old), new=str(new), file_bytes=found.file_bytes, whole_tensor_share=found.whole_share, block_share=found.blocks_share,
        delta_share=found.deltas_share, compressed_share=found.compressed_share, sampled_share=found.sampled_share,
        coding_s=found.coding_s, helps=found.helps, reason=found.reason)


def _forecast_text(found) -> str:
    rows = [("tensors that changed", found.whole_tensor_share), ("blocks that changed", found.block_share),
            ("blocks as deltas", found.delta_share), ("all, compressed", found.compressed_share)]
    lines = [paint(found.reason, "bold"),
             table([(name, f"{share:7.1%}", f"{amount(share * found.file_bytes)}") for name, share in rows], "  "),
             f"of {amount(found.file_bytes)}; {found.sampled_share:.0%} of it was compared, coding would take {span(found.coding_s)} a save"]
    if found.helps:
        lines += ["To use it, put this into the recipe:", "", "[[technique]]", 'id = "incremental-checkpoint"']
    return "\n".join(lines)


def shown(text: str) -> str:
    """Text from a file as one printable line: a manifest must not drive the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def span(value_s: float) -> str:
    """Seconds for a person.

    >>> span(5400)
    '1.5 h'
    """
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if value_s >= length:
            return f"{value_s / length:.3g} {unit}"
    return f"{value_s:.3g} s" if value_s >= 1 else f"{value_s * 1000:.3g} ms"


def amount(count: float) -> str:
    """Bytes for a person, in powers of 1,000."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
