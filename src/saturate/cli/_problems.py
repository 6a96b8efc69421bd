"""Problems of the environment that look like a bug of saturate: a library that is missing, a working directory that is gone."""

from __future__ import annotations

import errno
import os
import sys

from saturate.errors import EnvironmentProblem

#: What the system says of a path that nobody may look at, or that is none.
_OF_PATHS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)

#: What saturate is installed with.
_LIBRARIES = ("msgspec", "tomlkit", "rich", "pynvml")


def of_surroundings(error: Exception) -> EnvironmentProblem | None:
    """The problem of this environment that shows as `error`; None: it is another one."""
    if isinstance(error, (ImportError, AttributeError)):
        return _of_library(error)
    if isinstance(error, OSError) and _folder_is_gone():
        return EnvironmentProblem("the working directory was removed", cause=str(error), remedy="change to a folder that exists")
    if isinstance(error, OSError) and error.errno in _OF_PATHS and error.filename is not None:
        return EnvironmentProblem(f"{os.fsdecode(error.filename)} cannot be reached", cause=error.strerror or str(error),
                                  remedy="check the path, and who may read what lies on it")
    return None


def _of_library(error: ImportError | AttributeError) -> EnvironmentProblem | None:
    """What to say where one of saturate's own libraries is missing, or another than the one it was installed with."""
    owner = error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", None)
    library = str(owner).partition(".")[0]
    if library not in _LIBRARIES:
        return None
    place = getattr(sys.modules.get(library), "__file__", None)
    return EnvironmentProblem(
        f"saturate cannot use the library {library}, which it needs", cause=str(error), evidence=place or "",
        remedy="check PYTHONPATH: it leads to packages of another environment" if os.environ.get("PYTHONPATH")
        else "install saturate again: its libraries come with it")


def _folder_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False
