"""Layout "user": folders that nobody named and that this user can write all the same, such as /scratch/$USER or /data.

A script may have an output folder of its own written down. What is found is bounded, since it is looked for before every
trial: mount points, and two levels below `/`.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from saturate.trial import mounts

#: Devices, what the kernel says, and the sockets of services, which an overlay would cut off.
_KEPT = ("/dev", "/proc", "/sys", "/run")
#: Inside those: where programs put their locks.
_LOCKS = "/run/lock"

#: A folder with more entries is one of homes or of data, not the way to a place to write.
_MOST_ENTRIES = 1000
_MOST_FOLDERS = 32


def writable() -> list[Path]:
    """Folders that an overlay can cover: this user's own, or everybody's as /tmp is."""
    table = mounts.all_mounts()
    looked_into = ["/", *_folders_in("/")]
    places = [mount.at for mount in table if not mount.read_only and mount.at != "/"]
    skipped = {mount.at for mount in table if mount.kind == "autofs"}       # to look into one mounts what is there
    candidates = dict.fromkeys([_LOCKS, *places, *(
        folder for parent in dict.fromkeys([*looked_into, *places]) if not _kept(parent) and parent not in skipped
        for folder in _folders_in(parent))])
    found = (path for path in candidates if (path == _LOCKS or not _kept(path)) and path not in skipped and _coverable(path))
    mounted = [mount.at for mount in table]
    return [Path(path) for path in itertools.islice(without_mounts_inside(found, mounted), _MOST_FOLDERS)]


def without_mounts_inside(folders: Iterable[str], mounted: Iterable[str]) -> Iterable[str]:
    """The kernel refuses an overlay whose folder has a mount inside.

    >>> list(without_mounts_inside(["/data", "/data/disk", "/scratch"], ["/data/disk"]))
    ['/data/disk', '/scratch']
    """
    parents = {str(parent) for at in mounted for parent in Path(at).parents}
    return (folder for folder in folders if folder not in parents)


def _kept(path: str) -> bool:
    return any(path == kept or path.startswith(f"{kept}/") for kept in _KEPT)


def _folders_in(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in itertools.islice(entries, _MOST_ENTRIES) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []       # closed to this user, or gone


def _coverable(path: str) -> bool:
    try:
        seen = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    ours = (seen.st_uid, seen.st_gid) == (os.geteuid(), os.getegid()) or seen.st_mode & stat.S_ISVTX
    return bool(stat.S_ISDIR(seen.st_mode) and ours and os.access(path, os.W_OK | os.X_OK))
