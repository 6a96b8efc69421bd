"""`saturate checkpoint advise`: how often to save, what a save costs, and whether saving otherwise would help."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from saturate.cli._options import add_trial_options, duration, must_exist, words
from saturate.cli._output import paint, show_json, span, table
from saturate.cli._running import Progress, one_signal_interrupts, show_log
from saturate.errors import SaturateError, UsageError
from saturate.records import sizes

if TYPE_CHECKING:
    from saturate.records.checkpoint import Forecast, Interval, SaveCosts

DESCRIPTION = """\
The interval between saves that loses the least time (Young 1974, Daly 2006), from what a save costs and how often the
job fails; and what incremental saving would write, forecast from two successive checkpoints.

With a command, that is run isolated, as in `saturate tune`, to measure how much training time a checkpoint costs, as it
saves now and with async-checkpoint, how many bytes it writes, and how soon it trains again after a kill."""

_UNITS_S = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save-cost", type=seconds, metavar="TIME",
                        help="training time that a save costs (default: measured, from the command or from the store)")
    parser.add_argument("--restart-cost", type=seconds, metavar="TIME", help="from a failure until training goes on (default: measured, with a command)")
    parser.add_argument("--mtbf", type=seconds, metavar="TIME", help="mean time between failures of one node, such as 30d")
    parser.add_argument("--nodes", type=_positive, default=1, metavar="N", help="nodes that the job runs on (default: 1)")
    parser.add_argument("--step-time", type=seconds, metavar="TIME", help="of one step: shows the interval in steps too")
    parser.add_argument("--forecast", nargs=2, type=Path, metavar=("OLD", "NEW"), help="two successive plain checkpoints")
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="a training to run: what its checkpoints cost, and how soon it recovers")
    parser.add_argument("--resume-args", type=words, metavar="ARGS",
                        help="what to add to the command when it is started again (default: what its source suggests)")
    parser.add_argument("--budget", type=duration, default=300.0, metavar="TIME", help="how long the command may be watched (default: 5m)")
    add_trial_options(parser)


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


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes")
    return int(text)


def execute(arguments: argparse.Namespace) -> int:
    from saturate.records.checkpoint import Advice

    if arguments.mtbf is None and arguments.forecast is None and not arguments.command:
        raise UsageError("saturate checkpoint advise needs the mean time between failures of a node, two checkpoints to compare, or a command",
                         remedy="saturate checkpoint advise --mtbf 30d --nodes 8 --save-cost 20s, or --forecast OLD.pt NEW.pt, "
                                "or --mtbf 30d -- python train.py")
    forecast = _forecast(*arguments.forecast) if arguments.forecast is not None else None      # before anything runs for minutes
    costs = _costs(arguments) if arguments.command else None
    now, later, source = None, None, ""
    if arguments.mtbf is not None:
        cost, source = _save_cost(arguments, costs)
        if cost is not None:
            now = _interval(arguments, cost, source, costs)
            if costs is not None and arguments.save_cost is None and costs.after_s and costs.after_s < cost:
                later = _interval(arguments, costs.after_s, f"measured, {_way(costs.best_way)}", costs)
    if arguments.json:
        show_json(Advice(interval=now, interval_async=later, costs=costs, forecast=forecast))
        return 0
    parts = [_costs_text(costs)] if costs else []
    parts += [_interval_text(now, later)] if now else [f"How often to save is not known: {source}."] if arguments.mtbf is not None else []
    parts += [_forecast_text(forecast)] if forecast else []
    print("\n\n".join(parts))
    return 0


# -- what a checkpoint costs -----------------------------------------------------------------------------------------


def _costs(arguments: argparse.Namespace) -> SaveCosts:
    from saturate.study import save_costs
    from saturate.study.state import Request
    from saturate.study.tune import environment_of_user

    must_exist(arguments.command)
    request = Request(argv=arguments.command, cwd=Path.cwd(), environment=environment_of_user(), directory=arguments.dir.absolute(),
                      budget_s=arguments.budget, timeout_s=arguments.timeout, step=arguments.step)
    try:
        with one_signal_interrupts(), Progress(sys.stderr, arguments.budget) as say:
            return save_costs.measure(request, arguments.resume_args, say)
    except SaturateError as problem:
        show_log(problem)
        raise


def _way(way: str) -> str:
    return {"sync": "written at once, to the disk", "thread": "async-checkpoint by a thread", "process": "async-checkpoint by a process"}[way]


def _costs_text(costs: SaveCosts) -> str:
    before = span(costs.before_s) if costs.before_s is not None else "unknown"
    after = f", {span(costs.after_s)} as {_way(costs.best_way)}" if costs.after_s is not None else ""
    rows = [("as the script saves", before, "does not wait for the disk" if costs.before_s is not None else costs.unknown["before_s"])]
    rows += [(_way(one.way), span(one.lost_s) if one.lost_s is not None else "unknown", f"{one.measured} measured, each on the disk")
             for one in costs.ways]
    lines = [paint(f"a checkpoint costs {before} of training as the script saves{after}", "bold"), table(rows, "  ")]
    if costs.checkpoint_bytes is not None and costs.checkpoint_files is not None:
        lines.append(f"It is {sizes.decimal(costs.checkpoint_bytes)} in {costs.checkpoint_files:.3g} file{'s' * (costs.checkpoint_files != 1)}; "
                     f"a step takes {span(costs.step_s)}.")
    if costs.after_s is None:
        lines.append(f"What async-checkpoint would give is not known: {costs.unknown['after_s']}.")
    if costs.recovery_s is None:
        lines.append(f"How soon it recovers is not known: {costs.unknown['recovery_s']}.")
    elif costs.resumed:
        lines.append(f"After a kill it trains again within {span(costs.recovery_s)}; it read what was saved.")
    else:
        lines.append(f"After a kill it trains again within {span(costs.recovery_s)}, but from the beginning: it read nothing that was saved. "
                     "If an argument makes it resume, name it: --resume-args ARGS.")
    if costs.before_s is not None and costs.after_s is not None and costs.after_s < costs.before_s:
        lines += ["To save so, put this into the recipe:", "", "[[technique]]", 'id = "async-checkpoint"']
    return "\n".join(lines)


# -- how often -------------------------------------------------------------------------------------------------------


def _save_cost(arguments: argparse.Namespace, costs: SaveCosts | None) -> tuple[float | None, str]:
    """Training time that a save costs now, and where that is known from; None, and why it is not known."""
    if arguments.save_cost is not None:
        return arguments.save_cost, "given"
    if costs is None:
        return _measured(arguments.store)
    if costs.before_s is not None:
        return costs.before_s, "measured, as the script saves"
    if costs.after_s is not None:
        return costs.after_s, f"measured, {_way(costs.best_way)}"
    return None, costs.unknown["after_s"]


def _interval(arguments: argparse.Namespace, cost: float, source: str, costs: SaveCosts | None) -> Interval:
    from saturate.checkpoints import advice
    from saturate.records.checkpoint import Interval, IntervalLoss

    job, step = arguments.mtbf / arguments.nodes, arguments.step_time or (costs and costs.step_s)
    restart = arguments.restart_cost if arguments.restart_cost is not None else costs.recovery_s if costs and costs.resumed else None
    best = advice.daly_s(cost, job)

    def steps(interval_s: float) -> int | None:
        return max(1, round(interval_s / step)) if step else None

    def lost(interval_s: float) -> float:
        return advice.lost_share(interval_s, cost, restart or 0.0, job)

    return Interval(
        interval_s=best, interval_steps=steps(best), young_interval_s=advice.young_s(cost, job), save_cost_s=cost,
        save_cost_from=source, restart_cost_s=restart, mtbf_s=arguments.mtbf, nodes=arguments.nodes,
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


def _interval_text(found: Interval, later: Interval | None) -> str:
    def every(interval_s: float, steps: int | None) -> str:
        return f"{span(interval_s)}" + (f" ({steps} steps)" if steps else "")

    rows = [(every(one.interval_s, one.interval_steps), f"{one.lost_share:.2%} of the time is lost") for one in (
        found.around[0], found, found.around[1])]
    beside = "" if found.restart_cost_s is not None else " Without --restart-cost the time of restarts is left out."
    otherwise = (f"As {later.save_cost_from.removeprefix('measured, ')}: every {every(later.interval_s, later.interval_steps)}, and "
                 f"{later.lost_share:.2%} of the time is lost.\n" if later else "")
    return (paint(f"save every {every(found.interval_s, found.interval_steps)} of training", "bold") + "\n" + table(rows, "  ") + "\n" + otherwise +
            f"A save costs {span(found.save_cost_s)} ({found.save_cost_from}), a failure comes every {span(found.job_mtbf_s)} "
            f"({span(found.mtbf_s)} a node, {found.nodes} node{'s' * (found.nodes > 1)}).\n"
            "Daly 2006; assumes failures that come independently at a constant rate (Poisson)." + beside)


# -- incremental saving ----------------------------------------------------------------------------------------------


def _forecast(old: Path, new: Path) -> Forecast:
    from saturate.checkpoints import forecast, pointer
    from saturate.records.checkpoint import Forecast
    from saturate.records.command_line import joined

    samples = []
    for path in (old, new):
        if pointer.read(path) is not None:
            raise UsageError(f"{path} only names a checkpoint of a store", cause="what would be compared is the file, not what it names",
                             remedy=f"make it a plain file: {joined(['saturate', 'checkpoint', 'export', str(path), '--output', 'FILE'])}")
        try:
            samples.append(forecast.sample(path, most_chunks=4096, most_bytes=1 << 28))
        except OSError as error:
            raise UsageError(f"{path} cannot be read", cause=str(error), remedy="name two checkpoints of one training") from error
        except ValueError as error:
            raise UsageError(f"{path} cannot be compared", cause=str(error),
                             remedy="name plain files of torch.save or safetensors; saturate checkpoint export makes them") from error
    found = forecast.compare(*samples)
    return Forecast(
        old=str(old), new=str(new), file_bytes=found.file_bytes, whole_tensor_share=found.whole_share, block_share=found.blocks_share,
        delta_share=found.deltas_share, compressed_share=found.compressed_share, sampled_share=found.sampled_share,
        coding_s=found.coding_s, helps=found.helps, reason=found.reason)


def _forecast_text(found: Forecast) -> str:
    rows = [("tensors that changed", found.whole_tensor_share), ("blocks that changed", found.block_share),
            ("blocks as deltas", found.delta_share), ("all, compressed", found.compressed_share)]
    lines = [paint(found.reason, "bold"),
             table([(name, f"{share:7.1%}", f"{sizes.decimal(share * found.file_bytes)}") for name, share in rows], "  "),
             f"of {sizes.decimal(found.file_bytes)}; {found.sampled_share:.0%} of it was compared, coding would take {span(found.coding_s)} a save"]
    if found.helps:
        lines += ["To use it, put this into the recipe:", "", "[[technique]]", 'id = "incremental-checkpoint"']
    return "\n".join(lines)
