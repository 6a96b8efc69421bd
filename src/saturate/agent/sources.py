"""The files that hold the user's own code: those of the modules that are loaded, less installed packages and this one."""

from __future__ import annotations

import os
import sys

from saturate.techniques._standard import standard

sysconfig = standard("sysconfig")

#: Folders of installed packages, also those of an environment below or beside the one that runs.
_INSTALLED = ("site-packages", "dist-packages")


def own() -> list[str]:
    """Absolute paths, sorted. A module without a file, or whose file is compiled, is left out. With them the file that says which
    torch it is: another one is another program as well."""
    import saturate

    folders = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, os.path.dirname(saturate.__file__))
    found = {os.path.abspath(file) for file in map(_file_of, list(sys.modules.values())) if file.endswith(".py")}
    mine = {file for file in found if not file.startswith(tuple(folder + os.sep for folder in folders))
            and not any(part in _INSTALLED for part in file.split(os.sep))}
    return sorted(mine | found & {os.path.abspath(_file_of(sys.modules.get("torch.version")))})


def _file_of(module: object) -> str:
    """A lazy module is not asked for anything, which could load it; what stands in `sys.modules` need be no module."""
    try:
        file = vars(module).get("__file__")
    except TypeError:
        return ""
    return file if isinstance(file, str) else ""
