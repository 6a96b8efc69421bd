"""Folders that are whole or not there, and the rules by which a file of one is read.

A folder is written under another name beside its place, made durable, and renamed: a full disk or a kill leaves the
old one, or none. What a killed process leaves under such a name goes at the next save or load (`tidy`): a process holds
a lock on what it works on, and the system ends the lock with the process. Nothing is read through a link, from outside
of the folder, or with other bytes than its digest says.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from saturate.checkpoints import durable
from saturate.errors import ArtifactDamaged, EnvironmentProblem, UsageError
from saturate.inference import journal, pickles
from saturate.records.artifact import StoredFile
from saturate.trial import abandoned

#: Between the temporary name of a folder that is being replaced, and its own name.
_OF = "-of-"

#: Of processes, memory and descriptors, of which another folder has no more.
_NOT_OF_A_FOLDER = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def workplace(folder: Path) -> Path:
    """The absolute path of a folder to search in: new, empty, or that of an earlier search. It stays the same wherever the user's
    code changes to. Raises UsageError for any other: a search writes over files
    by their names, and removes some."""
    folder = Path(folder).absolute()
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UsageError(f"the workdir {os.fsencode(folder)!r} cannot be used", cause="its name is not UTF-8, and torch maps no file below such a one",
                         remedy="name another folder: workdir (--workdir DIR)") from None
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError:             # it is not there, or no folder: who takes its lock will say so
        return folder
    if names and not _searched(folder, names):
        raise UsageError(f"the workdir {folder} is not empty, and no search has worked in it", cause="a search writes over what has the names of its own files",
                         remedy="name a folder that is new, empty, or that of an earlier search: workdir (--workdir DIR)")
    return folder


def _searched(folder: Path, names: set[str]) -> bool:
    """Whether a search has left this: its lock, which holds the number of a process, and beside it the copy of the model, which
    nobody else can reach, or the journal, unless it ended before that."""
    try:
        lock = folder / "lock"
        ours = stat.S_ISREG(lock.lstat().st_mode) and not lock.read_bytes().strip(b"0123456789")
        mode = (folder / "source").lstat().st_mode if "source" in names else 0
    except OSError:
        return False
    return ours and (names == {"lock"} or journal.NAME in names or (stat.S_ISDIR(mode) and not mode & 0o077))


@contextmanager
def building(target: Path, ours: Callable[[Path], bool]) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `target` when the block ends without an error.

    What `target` holds is replaced where it is empty or `ours(target)`. Raises UsageError where it is neither, and
    EnvironmentProblem when the file system refuses; both leave `target` as it was.
    """
    target = Path(os.path.realpath(target))
    tidy(target)
    if os.path.lexists(target) and not target.is_dir():
        raise UsageError(f"{target} is a file", remedy="name a folder that is new, empty, or an artifact to replace")
    if target.is_dir() and any(target.iterdir()) and not ours(target):
        raise UsageError(
            f"{target} is not empty, and no artifact",
            remedy="name a folder that is new, empty, or an artifact to replace",
        )
    with problems(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _new(lambda: durable.temporary(target.parent)) as new:
            yield new
            synchronise(new)
            _take_place(new, target)


@contextmanager
def _new(name: Callable[[], Path], mode: int = 0o777) -> Iterator[Path]:
    """A temporary folder that is this process's as long as it lives; gone at the end, unless it was renamed. `name` gives a new one each
    time."""
    lock, mine = None, False
    while not mine:
        new = name()
        new.mkdir(mode)
        try:
            lock = abandoned.locked(new)
            mine = lock is not None         # else another process took it for abandoned, and removes it
        except OSError:
            mine = True                     # a file system without locks: there `tidy` removes nothing
    try:
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep others from taking for abandoned what is written inside of this folder."""
    try:
        lock = abandoned.locked(folder, wait=True)
    except OSError:
        lock = None                         # as in `_new`
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def tidy(target: Path) -> None:
    """Remove what killed processes left beside `target` and in it. Where one was killed between the two renames that
    replace `target`, the old one gets its name back. What is not ours to remove stays."""
    target = Path(target).absolute()
    with contextlib.suppress(OSError):      # a folder that nobody may write to, or without locks
        for left in sorted(target.parent.glob(f"{durable.TEMPORARY}*")):
            if not left.is_dir() or left.is_symlink() or (lock := abandoned.locked(left)) is None:
                continue
            try:
                name = left.name.partition(_OF)[2]
                if name and not os.path.lexists(target.parent / name):
                    os.rename(left, target.parent / name)
                else:
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
        durable.remove_litter(str(target))      # it need not be an artifact: a training may be writing a checkpoint there


@contextmanager
def problems(target: Path) -> Iterator[None]:
    """Errors of the file system in the user's words."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise EnvironmentProblem(
            f"no space is left to save {target.name}" if full else f"saving {target} failed",
            cause=str(error),
            remedy="free some space, or save it elsewhere" if full else "mend the cause, or save it elsewhere",
        ) from error


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A private temporary folder for what is made on the way, gone at the end. Those that killed processes have left go first. Raises
    EnvironmentProblem where there can be none."""
    with contextlib.ExitStack() as made:
        with in_scratch():
            place = Path(tempfile.gettempdir())
            abandoned.clear(place, prefix)
            folder = made.enter_context(_new(lambda: place / abandoned.name(prefix), 0o700))
        yield folder


@contextmanager
def in_scratch() -> Iterator[None]:
    """The same for errors of the file system about what is written there; `workdir`, or another place to save to, would not help."""
    try:
        yield
    except ArtifactDamaged:
        raise
    except (OSError, EnvironmentProblem) as error:
        cause = error.__cause__ if isinstance(error, EnvironmentProblem) else error
        if not pickles.of_the_file_system(cause) or getattr(cause, "errno", None) in _NOT_OF_A_FOLDER:
            raise
        raise EnvironmentProblem("what is made on the way cannot be written", cause=getattr(error, "cause", "") or str(error),
                                 remedy=no_scratch()) from error


def no_scratch() -> str:
    """The remedy where temporary files find no room."""
    try:
        place = f"in {tempfile.gettempdir()}"
    except OSError:                         # no folder that could be one
        place = "for temporary files"
    return f"free some space {place}, or name a larger folder in the variable TMPDIR"


def _take_place(new: Path, target: Path) -> None:
    # With its own name at the end: should this process be killed between the renames, the old one can be put back.
    old = Path(f"{durable.temporary(target.parent)}{_OF}{target.name}")
    with held(target):                      # the lock goes with the folder to its other name
        if target.exists():
            os.rename(target, old)
        try:
            os.rename(new, target)
        except OSError:
            if target.exists():  # another process was faster: its folder is as whole as ours
                shutil.rmtree(old, ignore_errors=True)
            elif old.exists():
                os.rename(old, target)
            raise
        durable.sync_folder(target.parent)
        shutil.rmtree(old, ignore_errors=True)


def synchronise(folder: Path) -> None:
    """Make every file in `folder`, and the names of all, durable."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as file:
                os.fsync(file.fileno())
        durable.sync_folder(Path(parent))


def copy(source: Path, target: Path, names: Sequence[str]) -> None:
    """Copy files by their names relative to `source`."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(inside(source, name), target / name)


def inventory(folder: Path, names: Sequence[str]) -> list[StoredFile]:
    """Sizes and digests of files."""
    found = []
    for name in sorted(set(names)):
        size_bytes, sha256 = digest(inside(folder, name))
        found.append(StoredFile(path=name, size_bytes=size_bytes, sha256=sha256))
    return found


def check(folder: Path, files: Sequence[StoredFile]) -> None:
    """Raises ArtifactDamaged, naming the first file that is missing, another, or not one."""
    for stored in files:
        path = inside(folder, stored.path)
        try:
            size_bytes, sha256 = digest(path, stored.size_bytes)
        except FileNotFoundError:
            raise damaged(folder, f"{stored.path} is missing") from None
        except OSError as error:
            raise damaged(folder, f"{stored.path} cannot be read: {error}") from error
        if size_bytes != stored.size_bytes:
            raise damaged(folder, f"{stored.path} has {size_bytes:,} bytes, and {stored.size_bytes:,} were stored")
        if sha256 != stored.sha256:
            raise damaged(folder, f"{stored.path} does not have the SHA-256 that the manifest names")


def inside(folder: Path, name: str) -> Path:
    """The path of a file of `folder`. Raises ArtifactDamaged for a name that leads out of it, also through a link."""
    pure = PurePosixPath(name)
    if (
        not name
        or "\0" in name
        or "\\" in name
        or pure.is_absolute()
        or ".." in pure.parts
        or str(pure) != name
        or name == "."
    ):
        raise damaged(folder, f"{name!r} is no name of a file inside of it")
    path = folder
    for part in pure.parts:
        path = path / part
        try:
            link = path.is_symlink()
        except OSError as error:            # a name that is too long, a folder that nobody may look into
            raise damaged(folder, f"{name:.100} cannot be looked for: {error.strerror}") from error
        if link:
            raise damaged(folder, f"{name} is a link, or lies behind one")
    return path


def digest(path: Path, wanted_bytes: int | None = None) -> tuple[int, str]:
    """Size and SHA-256 of a regular file; OSError where it is none. wanted_bytes: of a file of another size nothing is read: it may be
    so large that this would not end."""
    # Not blocking: a pipe in the place of a file must not be waited for.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if wanted_bytes not in (None, status.st_size):
            return status.st_size, ""
        found = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), found


def damaged(folder: Path, what: str) -> ArtifactDamaged:
    return ArtifactDamaged(
        f"the artifact {folder} is not whole",
        cause=what,
        remedy="copy it again from where it was made, or make it again",
    )
