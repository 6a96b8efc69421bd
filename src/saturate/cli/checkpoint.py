"""Check, copy out, thin out and plan checkpoints.

The technique incremental-checkpoint keeps checkpoints in a store, and a small file that names each at its path. These
verbs look after both; verify also reads plain files of torch.save, of safetensors and of torch.distributed.checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from saturate.cli import _advice
from saturate.cli._output import paint, safe_line, show_json, table
from saturate.errors import CheckpointDamaged, EnvironmentProblem, UsageError
from saturate.records import sizes

STORE = Path(".saturate/checkpoints")


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
    advise = actions.add_parser("advise", help="how often to save, and whether saving otherwise would help", description=_advice.DESCRIPTION,
                                formatter_class=parser.formatter_class)
    _advice.configure(advise)
    for action in (verify, export, collect, advise):
        action.add_argument("--store", type=Path, default=None if action in (export,) else STORE, metavar="DIR",
                            help="the store (default: the one that the file names)" if action is export else f"the store (default: {STORE})")
        action.add_argument("--json", action="store_true", help="print one JSON object")


def execute(arguments: argparse.Namespace) -> int:
    return {"verify": _verify, "export": _export, "gc": _gc, "advise": _advice.execute}[arguments.action](arguments)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of checkpoints")
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
            said = safe_line(check.path + (f"  ({check.problem})" if check.problem else ""))
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
            yield from checks.check_files(files)
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
            raise EnvironmentProblem(f"{target} was not written", cause=str(error),
                                     remedy="nothing was changed; name a place with room that you may write to, and see that the store can be read") from error
    size = target.stat().st_size
    if arguments.json:
        show_json(Exported(path=str(target), checkpoint=found and found.checkpoint, size_bytes=size))
    else:
        print(f"{target} is a plain file {'now' if found else 'already'}: {sizes.decimal(size)}")
    return 0


# -- gc --------------------------------------------------------------------------------------------------------------


def _gc(arguments: argparse.Namespace) -> int:
    from saturate.checkpoints import collect
    from saturate.checkpoints.chunks import Store
    from saturate.records import checkpoint as records

    for place in arguments.look_in:
        if not place.is_dir():
            raise UsageError(f"there is no folder {place}", remedy="--look-in names folders that files of checkpoints lie in")
    with Store.open(arguments.store) as store, store.locked(alone=arguments.delete):
        plan = collect.plan(store, arguments.keep, arguments.keep_every, arguments.look_in)
        if arguments.delete:
            try:
                collect.carry_out(store, plan)
            except OSError as error:
                raise EnvironmentProblem("not everything could be removed", cause=str(error),
                                         remedy="what is kept is whole; see that you may write there, and run it again") from error
    if arguments.json:
        show_json(records.Collected(
            store=str(arguments.store), deleted=arguments.delete, damaged=plan.damaged,
            kept=[records.Kept(checkpoint=m.id, path=m.path, reason=reason) for m, reason in plan.kept],
            removed=[records.Removed(checkpoint=m.id, path=m.path) for m in plan.removed],
            store_bytes=plan.store_bytes, freed_bytes=plan.freed_bytes))
        return 0
    rows = [(safe_line(m.saved), "keep  ", safe_line(f"{m.path}  ({reason})")) for m, reason in plan.kept]
    rows += [(safe_line(m.saved), "remove", safe_line(m.path)) for m in plan.removed]
    print(table(sorted(rows)) or "the store is empty")
    for name, problem in plan.damaged.items():
        print(f"damaged: {safe_line(name)} ({safe_line(problem)}); no chunk is freed before it is removed by hand")
    unfound = sum(reason == plan.unsure for _, reason in plan.kept)
    if unfound and plan.unsure != collect.UNFOUND:
        unread = "; ".join(f"{folder} ({why})" for folder, why in list(plan.unread.items())[:3])
        print(f"{unfound} stay only because a file that names them may be where nothing could be read: {safe_line(unread)}. "
              "Make that readable, or name other folders with --look-in")
    elif unfound:
        print(f"{unfound} stay only because the files that name them may have been moved: with --look-in DIR, all folders where those "
              "may be, they go unless one is found")
    verb = "freed" if arguments.delete else "would be freed; --delete does it"
    print(f"{sizes.decimal(plan.freed_bytes)} of {sizes.decimal(plan.store_bytes)} {verb}")
    return 0
