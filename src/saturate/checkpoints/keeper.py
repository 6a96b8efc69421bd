"""Which saves of a running program go to the store, and what happens when that does not work.

The first two saves of a series (`ckpt_100.pt` and `ckpt_200.pt` are one) are left as they are and compared. Where the
forecast says that it pays, later ones are recorded in the store and their path gets a pointer; where not, nothing is
ever changed. Any failure of ours ends in the plain save that the program asked for, and in one line on standard
error. When the program ends, the newest checkpoint of each series becomes a plain file again, wherever the program
renamed it to.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from posix import getpid
from statistics import median
from typing import Any

from saturate.checkpoints import durable, forecast, manifests, pointer
from saturate.checkpoints.chunks import Store
from saturate.checkpoints.guards import standing_for
from saturate.checkpoints.manifests import Manifest
from saturate.checkpoints.recorder import Recorder
from saturate.records import sizes

#: The store may take this many times what plain files would, before saves are plain again: a script that overwrites
#: or removes its checkpoints must not fill the disk with what it no longer wants.
MOST_ROOM = 2.0

#: Saves of a series before that is judged.
SAVES_BEFORE_JUDGING = 3


#: Series whose first save is remembered, up to 32 MiB each, until a second one comes.
MOST_SAMPLES = 8


@dataclass
class Series:
    """Successive checkpoints under one name."""

    first: forecast.Sample | None = None    # of the first save, until there is a second
    helps: bool | None = None               # None: not known yet
    last: Manifest | None = None            # newest in the store


class Keeper:
    """One per process. `save(path, write)` stands for `write(path)`."""

    def __init__(self, folder: Path, chain: int, remember_bytes: int, say: Callable[[str], None]):
        self.folder = folder
        self.chain = chain
        self.remember_bytes = remember_bytes
        self.say = say
        self.store: Store | None = None
        self.series: dict[str, Series] = {}
        self.saved: list[Manifest] = []         # what this process answers for, oldest first: its own and those of earlier runs
        self.own: list[Manifest] = []           # those of this process
        self.paths: dict[str, set[str]] = {}    # of those of this process, by id: where files that name them were put
        self.plain_s: list[float] = []          # what saves took that were left as they are, to compare with
        self.problem = ""                       # why nothing is stored any more
        self._tidied: set[str] = set()          # folders in which nothing lies that a killed process left
        self._lock = threading.RLock()
        self._pid = getpid()
        self._began = manifests.new_id()        # behind the ids of earlier runs

    def save(self, path: str, write: Callable[[Any], None]) -> None:
        """`write(target)` writes the checkpoint to a path or to a binary stream. Raises what that raises."""
        if getpid() != self._pid or not _replaceable(path):
            write(path)
            return
        write = _interruptible(write)
        with self._lock:
            self._tidy(os.path.dirname(os.path.realpath(path)))
            series = self._series(path)
            if self.problem:
                _write_plain(path, write)
                return
            if not series.helps:
                began = time.monotonic()
                write(path)
                if series.helps is None:
                    self.plain_s.append(time.monotonic() - began)
                    self._observe(series, path)
                return
            problem = self._attempt(lambda: self._record(series, path, write))
            if problem:
                _write_plain(path, write)       # raises what is wrong with the object itself, which is none of ours
                self._stop(problem)

    def close(self) -> None:
        """The program ends: leave plain files where it would look for its newest checkpoints."""
        if getpid() != self._pid:
            return
        with self._lock:
            newest = {manifest.series: manifest for manifest in self.own}
            for manifest in newest.values():
                for path in self._named(manifest):
                    problem = self._attempt(lambda path=Path(path): pointer.plain(path))
                    if problem:
                        self.say(f"incremental-checkpoint: {path} stays in the store ({problem})")
            if self.own:
                wrote, instead = (sum(getattr(one, field) for one in self.own) for field in ("new_bytes", "file_bytes"))
                plain = f", a plain one {median(self.plain_s):.3g} s" if self.plain_s else ""
                self.say(f"incremental-checkpoint: {len(self.own)} saves wrote {sizes.decimal(wrote)} instead of {sizes.decimal(instead)}; each "
                         f"held the training for {median(one.save_s for one in self.own):.3g} s{plain}; "
                         f"`saturate checkpoint gc --store {self.folder}` shows what can be freed")
                self.own = []
            if self.store is not None:
                self.store.close()
                self.store = None
            self.problem = self.problem or "the program has ended"      # handlers of the script may save after this one

    def following(self, original: Callable[..., None], keeps: bool) -> Callable[..., None]:
        """`os.rename` and its like, which give files that name checkpoints, or folders of them, other names. `keeps`: the
        old ones too.
        """
        @standing_for(original)
        def function(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
            original(src, dst, *args, **kwargs)
            if self.paths:
                self._attempt(lambda: self._moved(_place(src), _place(dst), keeps))

        return function

    def _moved(self, old: str, new: str, keeps: bool) -> None:
        for paths in list(self.paths.values()):
            for path in [path for path in paths if path == old or path.startswith(old + os.sep)]:
                paths.add(new + path[len(old):])
                if not keeps:
                    paths.discard(path)

    def _named(self, manifest: Manifest) -> list[str]:
        """Where files name that checkpoint, as far as is known."""
        return [path for path in sorted(self.paths.get(manifest.id, {manifest.path})) if pointer.names(path, manifest)]

    # -- one save --------------------------------------------------------------------------------------------------

    def _attempt(self, act: Callable[[], Any]) -> str:
        """Run our own part; what went wrong, or ""."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the user's save must happen whatever is wrong with us
            return f"{type(error).__name__}: {error}"
        return ""

    def _tidy(self, folder: str) -> None:
        """Once: what a process that was killed in the middle of a save has left there can be as large as a checkpoint."""
        if folder not in self._tidied:
            self._tidied.add(folder)
            self._attempt(lambda: durable.remove_litter(folder))

    def _stop(self, problem: str) -> None:
        self.problem = problem
        self.say(f"incremental-checkpoint failed, saves are plain from now on ({problem})")

    def _series(self, path: str) -> Series:
        if self.store is None and not self.problem and (self.folder / "store.json").exists():
            problem = self._attempt(self._open)
            if problem:
                self._stop(problem)
        return self.series.setdefault(manifests.series_of(os.path.realpath(path)), Series())

    def _open(self) -> None:
        """Open the store. What an earlier run has kept there shows that it helps."""
        self.store = Store.create(self.folder, self.remember_bytes)
        for folder in (self.store.folder, self.store.packs, self.store.manifests):
            self._tidy(str(folder))
        found = manifests.all_of(self.store)[0]
        self.saved = [manifest for manifest in found if manifest.id < self._began]
        for manifest in found:
            series = self.series.setdefault(manifest.series, Series())
            series.helps, series.last = True, manifest

    def _observe(self, series: Series, path: str) -> None:
        """Look at a plain checkpoint that was just written."""
        name = manifests.series_of(os.path.basename(path))
        try:
            if os.path.getsize(path) < forecast.SMALLEST_BYTES:
                series.helps = False
                return
            now = forecast.sample(Path(path))
        except (OSError, ValueError) as error:
            series.helps = False
            self.say(f"incremental-checkpoint leaves {name} alone: {error}")
            return
        if series.first is None:
            series.first = now
            waiting = [one for one in self.series.values() if one.first is not None]
            if len(waiting) > MOST_SAMPLES:         # names that never come again must not fill the memory
                waiting[0].first, waiting[0].helps = None, False
            return
        found = forecast.compare(series.first, now)
        series.first, series.helps = None, found.helps
        self.say(f"incremental-checkpoint: {name}: {found.reason}"
                 + (f"; it is kept in {self.folder} from the next save on" if found.helps else ""))

    def _record(self, series: Series, path: str, write: Callable[[Any], None]) -> None:
        if self.store is None:
            self._open()
        assert self.store is not None
        path = os.path.realpath(path)
        with self.store.locked(alone=False):
            self.store.refresh()
            recorder = Recorder(self.store, series.last, self.chain)
            try:
                write(recorder)
                manifest = recorder.finish(path, series.last.number + 1 if series.last else 1)
            except BaseException:
                recorder.abandon()
                raise
            pointer.write(Path(path), self.store, manifest)
        series.last = manifest
        self.saved.append(manifest)
        self.own.append(manifest)
        self.paths[manifest.id] = {path}
        self._judge()

    def _judge(self) -> None:
        """Stop when what was stored takes more room than the files that it stands for. Other processes of the same run may share the
        store, as ranks do of which each saves its part: where they have put their files is not known here, and each judges its own.
        """
        assert self.store is not None
        if len(self.own) < SAVES_BEFORE_JUDGING:
            return
        wanted = sum(manifest.file_bytes for manifest in self.saved if self._named(manifest))
        room = min(self.store.pack_bytes(), sum(manifest.new_bytes for manifest in self.saved))     # gc may have freed some
        if room > MOST_ROOM * wanted:
            self.problem = "the store takes more room than plain files"
            self.say(f"incremental-checkpoint: the script replaces or removes its checkpoints, and what is stored of them ({sizes.decimal(room)}) takes "
                     f"more room than those that are left would as plain files ({sizes.decimal(wanted)}): saves are plain from now on; "
                     f"`saturate checkpoint gc --delete --store {self.folder} --look-in DIR` frees it, DIR being where checkpoints may lie")


def _place(path: Any) -> str:
    """Absolute, and without links but a last one, which is what a rename moves."""
    folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
    return os.path.join(os.path.realpath(folder), name)


def _interruptible(write: Callable[[Any], None]) -> Callable[[Any], None]:
    """`write`, out of which Ctrl-C comes as what it is. Where one ends a write to a stream, torch closes its archive, finds it unfinished,
    and raises an error about that in its place: to go on after that one would be to take no notice of the user."""
    def interruptible(target: Any) -> None:
        handled = sys.exc_info()[1]         # who saves because of an interruption was interrupted before
        try:
            write(target)
        except Exception as error:
            hidden = error.__context__
            while hidden is not None and hidden is not handled and isinstance(hidden, Exception):
                hidden = hidden.__context__
            if hidden is None or hidden is handled:
                raise
            raise hidden from None

    return interruptible


def _write_plain(path: str, write: Callable[[Any], None]) -> None:
    """A plain save. What stands at `path` may be the only checkpoint there is, so it stays until the new one is
    complete. Where the disk has no room for two, an old plain file is overwritten, as torch.save does.
    """
    if not os.path.exists(path):
        write(path)
        return
    try:
        durable.replace(Path(path), write)
    except Exception as error:
        if _of_the_system(error) not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS) or pointer.read(path) is not None:
            raise
        write(path)


def _of_the_system(error: BaseException | None) -> int | None:
    """What the file system said; torch's writer puts an error about its unfinished archive in the place of that."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error.errno if error is not None else None


def _replaceable(path: str) -> bool:
    """Whether putting a new file in the place of `path` does what a plain save does: not for devices and pipes, for
    files with several names (a plain save changes all of them), or that may not be written.
    """
    try:
        seen = os.stat(path)
    except OSError:
        return True         # not there yet; or torch.save will say what is wrong with it
    return stat.S_ISREG(seen.st_mode) and seen.st_nlink == 1 and os.access(path, os.W_OK)
