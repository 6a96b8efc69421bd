"""Free what no checkpoint needs. A checkpoint goes only when no file names it, it is not among the newest of its
series, and the caller removes at all and said where files may be that name checkpoints: a script may have moved them
anywhere, and only its owner knows where to. What remains is complete at every moment, so it may be killed anywhere.

Order: manifests first, then packs that nothing needs, then packs that are mostly dead are written anew before the old
one goes. What a writer left behind when it was killed goes too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from saturate.checkpoints import durable, manifests, pointer
from saturate.checkpoints.chunks import PackWriter, Store
from saturate.checkpoints.manifests import Manifest
from saturate.errors import CheckpointDamaged

#: A pack is written anew when less than this share of it is still needed.
REWRITE_BELOW = 0.5

#: Why a checkpoint stays that nothing else speaks for.
UNFOUND = "no file was found that names it; --look-in decides"
UNSEEN = "no file was found that names it, but one may be in"

#: What the kernel answers where a path leads nowhere; anything else may hide a file.
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

#: Folders deep that pointers are looked for below the folders that checkpoints were saved to.
_DEEPEST = 3


@dataclass
class Plan:
    """What would be removed, and why the rest stays."""

    kept: list[tuple[Manifest, str]] = field(default_factory=list)      # with the reason
    removed: list[Manifest] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)               # manifests that cannot be read; they stay
    unread: dict[Path, str] = field(default_factory=dict)               # folders that could not be looked through, with the reason
    unsure: str = ""                                                    # why nothing goes for want of a file that names it; "": it does
    dead_packs: list[str] = field(default_factory=list)
    rewritten_packs: list[str] = field(default_factory=list)
    leftovers: list[Path] = field(default_factory=list)
    needed: set[bytes] = field(default_factory=set)                     # chunks of what is kept
    store_bytes: int = 0
    freed_bytes: int = 0


def plan(store: Store, keep: int, keep_every: int | None, places: list[Path]) -> Plan:
    """What `gc` would do. `keep`: the newest of each series that stay; `keep_every`: each k-th save stays; `places`:
    folders to look for files that name checkpoints, besides those that they were saved to. Without any, or where not all
    of them could be read, nothing is removed only because no file was found that names it.
    """
    store.refresh()
    found, damaged = manifests.all_of(store)
    plan = Plan(damaged=damaged, store_bytes=store.pack_bytes())
    named: dict[str, Path] = {}
    for _ in range(2):      # a file that a script renames meanwhile may be seen under neither name, but not twice
        named |= _named([Path(m.path).parent for m in found], store.folder, _DEEPEST, plan.unread)
        named |= _named(places, store.folder, None, plan.unread)
    plan.unsure = UNFOUND if not places else f"{UNSEEN} {next(iter(plan.unread))}" if plan.unread else ""
    newest: dict[str, int] = defaultdict(int)
    for manifest in reversed(found):
        newest[manifest.series] += 1
        if manifest.id in named:
            plan.kept.append((manifest, f"{named[manifest.id]} names it"))
        elif newest[manifest.series] <= keep:
            plan.kept.append((manifest, f"among the newest {keep} of its series"))
        elif keep_every and manifest.number % keep_every == 0:
            plan.kept.append((manifest, f"save {manifest.number}, every {keep_every} are kept"))
        elif plan.unsure:
            plan.kept.append((manifest, plan.unsure))
        else:
            plan.removed.append(manifest)
    _weigh_packs(store, plan)
    plan.leftovers = list(_leftovers(store, found))
    plan.freed_bytes += sum(path.stat().st_size for path in plan.leftovers)
    return plan


def _leftovers(store: Store, found: list[Manifest]) -> Iterator[Path]:
    """What killed processes left in the store and beside their checkpoints. Where a file system has no locks, only what is in the store
    is told from what is being written: that is held meanwhile."""
    own = (store.folder, store.packs, store.manifests)
    for folder in dict.fromkeys([*own, *(Path(manifest.path).parent for manifest in found)]):
        for path in folder.glob(f"{durable.TEMPORARY}*"):
            if path.is_file() and durable.is_written(path) in ((False, None) if folder in own else (False,)):
                yield path


def _named(folders: list[Path], store: Path, deepest: int | None, unread: dict[Path, str]) -> dict[str, Path]:
    """Checkpoints that files below these folders name, at most so deep -> one such file. Folders that cannot be read are added
    to `unread`, with the reason.
    """
    found: dict[str, Path] = {}
    for top, guessed in _tops(folders).items():
        problems: dict[Path, str] = {}
        for path in _files_below(top, store, deepest, problems):
            try:
                pointed = pointer.look(path)
            except OSError as error:
                _note(problems, path.parent, error)
                continue
            if pointed is not None:
                found.setdefault(pointed.checkpoint, path)
        if not guessed:
            unread |= problems
    return found


def _tops(folders: list[Path]) -> dict[Path, bool]:
    """Where to begin, and whether that is a guess: a folder that is gone may have been renamed, so its siblings are looked
    through, whose owner may be somebody else.
    """
    tops: dict[Path, bool] = {}
    for folder in folders:
        if _may_be_folder(folder):
            tops[folder] = False
        elif os.path.isdir(folder.parent) and folder.parent != Path(folder.anchor):      # never the whole machine
            with contextlib.suppress(OSError):
                for path in folder.parent.iterdir():
                    if os.path.isdir(path):
                        tops.setdefault(path, True)
    return tops


def _may_be_folder(path: Path) -> bool:
    """Also where that cannot be seen: to walk it says why."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except ValueError:          # no path at all
        return False
    except OSError as error:
        return error.errno not in _NOTHING_THERE


def _files_below(top: Path, store: Path, deepest: int | None, problems: dict[Path, str]) -> Iterator[Path]:
    depth = len(top.parts)
    seen: set[str] = set()
    for place, folders, names in os.walk(top, onerror=lambda error: _note(problems, Path(error.filename), error), followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()             # a link that leads back
            continue
        seen.add(real)
        if Path(place) == store or deepest is not None and len(Path(place).parts) - depth >= deepest:
            folders.clear()
        yield from (Path(place) / name for name in names)


def _note(problems: dict[Path, str], folder: Path, error: OSError) -> None:
    if error.errno not in _NOTHING_THERE:
        problems.setdefault(folder, error.strerror or str(error))


def _weigh_packs(store: Store, plan: Plan) -> None:
    """Which packs go, and which shrink. With a manifest that cannot be read, or a pack, nothing may be judged
    dead.
    """
    if plan.damaged or store.problems:
        return
    for manifest, _ in plan.kept:
        try:
            plan.needed |= store.bases_of(manifests.addresses(store, manifest))
        except CheckpointDamaged as error:
            plan.damaged[manifest.id] = error.message
            return
    total: dict[str, int] = defaultdict(int)
    alive: dict[str, int] = defaultdict(int)
    for digest, entry in store.index.items():
        total[entry.pack] += entry.stored_bytes
        alive[entry.pack] += entry.stored_bytes if digest in plan.needed else 0
    for path in sorted(store.packs.glob("*.pack")):
        if not alive[path.name]:
            plan.dead_packs.append(path.name)
            plan.freed_bytes += path.stat().st_size
        elif alive[path.name] < REWRITE_BELOW * total[path.name]:
            plan.rewritten_packs.append(path.name)
            plan.freed_bytes += total[path.name] - alive[path.name]


def carry_out(store: Store, plan: Plan) -> None:
    """Remove what the plan says. Hold the lock alone since before it was made."""
    for manifest in plan.removed:
        (store.manifests / f"{manifest.id}.json").unlink()
    for path in plan.leftovers:
        path.unlink(missing_ok=True)
    durable.sync_folder(store.manifests)        # before chunks go: a manifest must never come back without them
    for name in plan.rewritten_packs:
        _rewrite(store, name, plan.needed)
    for name in plan.dead_packs:
        (store.packs / name).unlink()
    durable.sync_folder(store.packs)
    store.refresh()


def _rewrite(store: Store, name: str, needed: set[bytes]) -> None:
    """Copy what is needed of a pack into a new one, as it is coded, then remove the old one."""
    writer = PackWriter(store)
    try:
        for digest, entry in store.index.items():
            if entry.pack == name and digest in needed:
                payload = store.payload(entry)
                if len(payload) != entry.stored_bytes:
                    raise CheckpointDamaged(f"{store.packs / name} is damaged", cause="it ends too early")
                writer.add(digest, payload, entry.coding, entry.raw_bytes, entry.base, entry.depth)
        writer.commit()
    except BaseException:
        writer.abandon()
        raise
    (store.packs / name).unlink()
