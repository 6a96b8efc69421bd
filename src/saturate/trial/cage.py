"""The cage: what a trial writes lands in its own run folder, wherever the script thinks it wrote.

Mode "overlay" gives the trial a mount namespace of its own. Folders are covered by overlayfs, whose upper layers lie in
the run folder; everything else is read-only. Two layouts:

    root    one overlay on `/` and one on every other writable file system that takes one, entered with pivot_root
    user    a user namespace that maps this one id to itself; overlays on the folders that this user can write
            (home, /tmp, working directory, output folders, and others that `elsewhere` finds); an overlay on a folder of
            another owner would fail with EOVERFLOW, so the rest is read-only

Mode "intercept" is for machines that forbid namespaces: the agent redirects what Python writes (`agent/redirect.py`).
Landlock makes every other write outside the run folder fail, and a seccomp filter every other change of mode, owner, times
and extended attributes (`trial/metadata.py`), instead of reaching the user's files. Neither stops programs that are not
Python from writing files in /dev/shm: shared memory lives there.

`enter` runs in the supervisor, before the workload is started, so this file imports little. `trial/planning.py` decides
what it is told; `trial/layers.py` cleans up.
"""

from __future__ import annotations

import errno
import json
import os
from typing import NamedTuple

from saturate.trial import landlock, mounts

LAYERS = "layers"       # in the run folder: overlay layers
SHADOW = "shadow"       # in the run folder: what interception redirected
INDEX = "layers.json"   # in the run folder: which layer belongs to which folder

#: Mounts that stay writable: devices, and what processes say about themselves.
_SYSTEM = ("/dev", "/dev/pts", "/dev/mqueue", "/dev/hugepages", "/proc")


class CageRefused(Exception):
    """The kernel did not allow the cage; the message is the reason, in words for the user.

    `usable`: this process is as it was and may enter the plan `as_intercept()`; otherwise start a fresh process.
    """

    def __init__(self, reason: str, usable: bool):
        super().__init__(reason)
        self.usable = usable


class CagePlan(NamedTuple):
    """What `enter` does. Paths are absolute, without symbolic links, and exist unless said otherwise."""

    mode: str                           # "overlay" or "intercept"
    reason: str                         # why this mode, one sentence
    layout: str                         # of the overlays: "root" or "user"
    cwd: str
    run_dir: str                        # the only place that is really written
    study_dir: str                      # hidden from the trial, but for the run folder and the shared cache
    shared_cache: str                   # compiled kernels; really written, by every trial
    overlays: tuple[str, ...] = ()      # layout "user": folders to cover, none inside another
    caches: tuple[str, ...] = ()        # folders of caches, may not exist; in mode "intercept" really written
    lower_caches: str | None = None     # tree of caches by absolute path, seen below the trial's own writes
    passthrough: tuple[str, ...] = ()   # folders of sockets that stay reachable
    why_not_overlays: str = ""          # mode "intercept"
    asked: bool = False                 # mode "intercept": the user wants it (SATURATE_ISOLATION)
    scratch: str = ""                   # mode "intercept": folder for TMPDIR, short enough for sockets
    guarded: bool = False               # mode "intercept": Landlock is there
    attributes: bool = False            # mode "intercept": the supervisor answers for changes of mode, owner and times
    environment: dict[str, str] = {}    # variables for the workload
    intercepted: dict[str, str] = {}    # mode "intercept": more of them

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> CagePlan:
        fields = json.loads(text)
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})

    @property
    def redirect(self) -> dict[str, object] | None:
        """What the agent needs for interception; None in mode "overlay"."""
        if self.mode != "intercept":
            return None
        return {"root": os.path.join(self.run_dir, SHADOW), "allowed": list(really_writable(self)), "scratch": self.scratch,
                "study": self.study_dir if self.hides_study else ""}

    @property
    def hides_study(self) -> bool:
        """Whether a trial is not to find the study: it may work in a folder inside of one."""
        return _inside(self.run_dir, self.study_dir) and not _inside(self.cwd, self.study_dir)


def really_writable(plan: CagePlan) -> tuple[str, ...]:
    """Mode "intercept": the folders where writes are not redirected. Of /dev/shm, which keeps data, only what runtimes put
    there: see `agent/shadow.py`."""
    return (plan.run_dir, plan.shared_cache, plan.scratch, "/dev", "/proc",
            *(cache for cache in plan.caches if os.path.isdir(cache)))


def enter(plan: CagePlan) -> None:
    """Put this process, which must have one thread, and all it will start into the cage. Raises CageRefused."""
    if plan.mode == "intercept":
        if plan.guarded:
            folders = [path for path in really_writable(plan) if path not in ("/dev", "/proc")]
            landlock.restrict([*folders, "/dev/shm", "/dev/mqueue"], ["/dev", "/proc"])
        return
    _unshare(plan)
    stage = _Stage(plan)
    try:
        stage.build()
    except OSError as error:
        if stage.pivoted:       # what was mounted has other paths now, and the old tree is gone
            raise CageRefused(str(error), usable=False) from error
        raise CageRefused(f"{error.strerror or error} ({_cause(plan, error)})", usable=stage.unwind()) from error


def may_change(plan: CagePlan, path: str, older: set[str]) -> bool:
    """Mode "intercept": whether a trial may change mode, owner and times of `path`, which has no links in it. `older`: the
    names in /dev/shm before the trial."""
    if _inside(path, "/dev/shm"):
        return path != "/dev/shm" and path.split("/")[3] not in older
    folders = ("/dev/pts", *(folder for folder in really_writable(plan) if folder != "/dev"))
    return any(_inside(path, os.path.realpath(folder)) for folder in folders)


def _unshare(plan: CagePlan) -> None:
    uid, gid = os.geteuid(), os.getegid()
    flags = mounts.NEWNS if plan.layout == "root" else mounts.NEWNS | mounts.NEWUSER
    try:
        mounts.unshare(flags)
    except OSError as error:
        raise CageRefused(_namespace_reason(error), usable=True) from error
    try:
        if plan.layout == "user":
            mounts.map_own_ids(uid, gid)
        mounts.mount("none", "/", None, mounts.MS_REC | mounts.MS_PRIVATE)
    except OSError as error:
        raise CageRefused(f"the new namespace has no rights: {error}", usable=False) from error


def _namespace_reason(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "namespaces are used up or switched off (user.max_user_namespaces)"
    if error.errno in (errno.EPERM, errno.EACCES):
        return "this machine forbids namespaces (a container's seccomp filter, AppArmor or a sysctl)"
    return f"the kernel refuses namespaces: {error.strerror}"


def _cause(plan: CagePlan, error: OSError) -> str:
    """The likely cause of a refused overlay: the kernel only says EINVAL."""
    inside = [mount.at for mount in mounts.all_mounts() for at in plan.overlays if mount.at.startswith(at + "/")]
    if plan.layout == "user" and inside and "overlay" in str(error):
        return f"{inside[0]} is mounted inside a folder that needs an overlay"
    return "the file system of the study folder cannot hold overlay layers, or the kernel is older than 5.12"


class _Stage:
    """The mounts of one trial while they are made. `at` below is the prefix under which the trial's tree is built: empty
    in layout "user", the future root in layout "root"."""

    def __init__(self, plan: CagePlan):
        self.plan = plan
        self.prefix = ""
        self.pivoted = False
        self.made: list[str] = []
        self.index: list[dict[str, str]] = []
        self.kept = _index_of(plan.run_dir)     # of an earlier process of this trial, whose writes this one finds
        self.next = len(self.kept)
        self.handles: list[int] = []
        self.options = "" if mounts.initial_user_namespace() else ",userxattr"
        if not self.options:
            self.options = ",redirect_dir=on"   # folders that existed before can be renamed; needs trusted.* attributes
        # Everything real is reached through handles, since its path will soon lead to an overlay.
        self.run = self._handle(plan.run_dir)
        self.real = {path: self._handle(path)
                     for path in ("/dev/shm", plan.shared_cache, *plan.overlays, *plan.caches, *plan.passthrough)
                     if os.path.isdir(path)}

    def _handle(self, path: str) -> str:
        self.handles.append(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        return f"/proc/self/fd/{self.handles[-1]}"

    def build(self) -> None:
        os.makedirs(f"{self.run}/{LAYERS}", exist_ok=True)
        writable: list[str] = []
        if self.plan.layout == "root":
            writable += self._whole_tree()
        for at in filter(self.real.__contains__, self.plan.overlays):       # one may have been removed since it was planned
            self._overlay(at, [self.real[at]])
            writable.append(at)
        writable += self._shared_memory()
        writable += self._cached()
        for path in self.plan.passthrough:
            if path in self.real:
                self._bind(self.real[path], path)
        writable += self._run_folder()
        with open(f"{self.run}/{INDEX}", "w") as file:
            json.dump([*self.index, *self.kept], file)
        self._freeze(writable)
        if self.plan.layout == "root":
            mounts.pivot(self.prefix)
            self.pivoted = True
        os.chdir(self.plan.cwd)     # the old working directory still is the real folder under the overlay
        self._close()

    def unwind(self) -> bool:
        """Take back what was mounted; whether all of it could be."""
        done = True
        for at in reversed(self.made):
            try:
                mounts.detach(at)
            except OSError:
                done = False    # not raised: it would hide why the cage was refused
        self._close()
        return done

    def _close(self) -> None:
        for handle in self.handles:
            os.close(handle)
        self.handles.clear()

    def _whole_tree(self) -> list[str]:
        """Layout "root": an overlay of `/` at the stage, and in it every other mount, overlaid where it can be written."""
        stage = os.path.join(self.plan.run_dir, LAYERS, "root")
        os.makedirs(stage, exist_ok=True)
        table = [mount for mount in mounts.visible() if mount.at != "/"]
        self._overlay("/", ["/"], target=stage)
        self.prefix = stage
        writable = ["/"]
        for mount in table:
            if mount.at.startswith(("/proc/", "/sys/", "/dev/")):
                continue
            if mount.at in ("/proc", "/sys", "/dev"):
                self._bind(mount.at, mount.at, recursive=True)
            elif mount.read_only or mount.at == "/run" or not os.path.isdir(mount.at):
                self._bind(mount.at, mount.at)      # /run: an overlay would cut off the sockets of services
            elif self._covered(mount.at):
                writable.append(mount.at)
        return writable

    def _covered(self, at: str) -> bool:
        """Whether a mount could be overlaid. Of a file system that overlayfs refuses (FAT, as at /boot/efi) the rest need not suffer: it can
        be read, and a write fails. Not where every script may write."""
        try:
            self._overlay(at, [self._handle(at)])
        except OSError:
            if any(_inside(path, at) for path in (self.plan.cwd, "/tmp", "/var/tmp", *self.plan.caches)):
                raise
            self._bind(at, at)
            return False
        return True

    def _shared_memory(self) -> list[str]:
        """A /dev/shm of its own, as large as the real one, so that segments die with the trial; data that the user
        staged there can be read."""
        at = "/dev/shm"
        if at not in self.real:
            return []
        size = os.statvfs(at)
        limit = f",size={size.f_blocks * size.f_frsize}" if size.f_blocks else ""
        staged = bool(os.listdir(self.real[at]))
        self._tmpfs(at, "mode=1777" + limit)
        if staged:
            own = self._handle(self.prefix + at)
            self._layer_overlay(at, [self.real[at]], own)
        return [at]

    def _cached(self) -> list[str]:
        """Each folder of caches gets an overlay of its own, so that it can be handed on without anything else."""
        done = []
        for at in self.plan.caches:
            lowers = [self.real[at]] if at in self.real else []
            handed = f"{self.plan.lower_caches}{at}" if self.plan.lower_caches else ""
            if handed and os.path.isdir(handed):
                lowers.insert(0, self._handle(handed))
            try:
                os.makedirs(self.prefix + at, exist_ok=True)     # inside an overlay: not in the user's tree
            except OSError:
                continue                                         # in a place that is not writable at all: no cache there
            if not lowers:
                os.makedirs(f"{self.run}/{LAYERS}/empty", exist_ok=True)
                lowers = [f"{self.run}/{LAYERS}/empty"]
            self._overlay(at, lowers)
            done.append(at)
        return done

    def _run_folder(self) -> list[str]:
        """Hide the study from the trial (a script that searches its folder must not find other trials' checkpoints),
        and put the run folder and the shared cache back, for real."""
        plan = self.plan
        if plan.hides_study:
            self._tmpfs(plan.study_dir, "mode=755,size=64k")
        writable = []
        for at, source in ((plan.run_dir, self.run), (plan.shared_cache, self.real[plan.shared_cache])):
            os.makedirs(self.prefix + at, exist_ok=True)
            self._bind(source, at)
            writable.append(at)
        self._tmpfs(os.path.join(plan.run_dir, LAYERS), "mode=755,size=64k")
        return writable

    def _freeze(self, writable: list[str]) -> None:
        mounts.set_read_only(self.prefix or "/", True, recursive=True)
        try:
            for at in writable:
                mounts.set_read_only(self.prefix + at if at != "/" else self.prefix, False)
        except OSError:
            mounts.set_read_only(self.prefix or "/", False, recursive=True)
            raise
        for at in _SYSTEM:
            try:
                mounts.set_read_only(self.prefix + at, False)
            except OSError:
                continue    # not a mount here, or the container had made it read-only

    def _overlay(self, at: str, lowers: list[str], target: str | None = None) -> None:
        entry = next((kept for kept in self.kept if kept["at"] == at), None)
        if entry is None:
            entry = {"at": at, "upper": f"{LAYERS}/{self.next}/upper"}
            self.next += 1
        else:
            self.kept.remove(entry)
        layer = f"{self.run}/{entry['upper']}".removesuffix("/upper")
        os.makedirs(layer, exist_ok=True)
        self._layer_overlay(at, lowers, layer, target)
        self.index.append(entry)

    def _layer_overlay(self, at: str, lowers: list[str], layer: str, target: str | None = None) -> None:
        upper, work = f"{layer}/upper", f"{layer}/work"
        if not os.path.isdir(upper):
            os.mkdir(upper)
            os.mkdir(work)
            seen = os.stat(lowers[-1])      # the top layer gives the folder its mode and owner
            if os.geteuid() == 0:
                os.chown(upper, seen.st_uid, seen.st_gid)
            os.chmod(upper, seen.st_mode & 0o7777)
        options = f"lowerdir={':'.join(lowers)},upperdir={upper},workdir={work}{self.options}"
        target = target or self.prefix + at
        mounts.mount("overlay", target, "overlay", 0, options)
        self.made.append(target)

    def _tmpfs(self, at: str, options: str) -> None:
        mounts.mount("tmpfs", self.prefix + at, "tmpfs", 0, options)
        self.made.append(self.prefix + at)

    def _bind(self, source: str, at: str, recursive: bool = False) -> None:
        mounts.bind(source, self.prefix + at, recursive)
        self.made.append(self.prefix + at)


def _index_of(run_dir: str) -> list[dict[str, str]]:
    try:
        with open(os.path.join(run_dir, INDEX), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return []


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
