"""The workload's Python: does it run, does its torch import, do torch's libraries match, and how old are they?

It is asked in a process of its own, because it may be another Python than ours, or a broken one.
"""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

from saturate.machine import releases
from saturate.machine.checks import Check

_TIMEOUT_S = 120
_OLDEST_PYTHON = (3, 11)
_LIBRARIES = (("cuDNN", "cudnn"), ("NCCL", "nccl"), ("Triton", "triton"))
_OLD_RELEASES = 4               # torch comes every other month: more than this is most of a year

#: Runs in the workload's Python. Written for old ones too: it must say its version before anything can fail.
#: Each further question may fail by itself: `errors` says how.
_ASK = """
import json, sys
answer = {"version": sys.version.split()[0], "executable": sys.executable, "errors": {}}
def ask(name, question):
    try:
        answer[name] = question()
    except Exception as error:
        answer["errors"][name] = (str(error).splitlines() or [type(error).__name__])[0][:200]
if sys.argv[1:] == ["torch"]:
    import torch
    answer["torch"] = torch.__version__
    answer["cuda_build"] = torch.version.cuda
    answer["rocm_build"] = getattr(torch.version, "hip", None)
    answer["cuda_available"] = torch.cuda.is_available()
    if answer["cuda_available"]:
        ask("capabilities", lambda: [list(torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count())])
        ask("devices", lambda: [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])
    elif torch.version.cuda:
        ask("cuda_init", torch.cuda.init)
    if answer["cuda_build"]:
        ask("architectures", torch.cuda.get_arch_list)
        ask("nccl", lambda: ".".join(map(str, torch.cuda.nccl.version())))
    if answer["rocm_build"] and answer["cuda_available"]:
        ask("gcn", lambda: torch.cuda.get_device_properties(0).gcnArchName)
    ask("cudnn", torch.backends.cudnn.version)
    ask("cudnn_on", lambda: bool(torch.backends.cudnn.enabled))
    def headers():
        import os, sysconfig
        return os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
    ask("headers", headers)
    def installed():
        import re
        from importlib import metadata
        wanted = {}
        for line in metadata.requires("torch") or ():
            exact = re.match(r"((?:nvidia|cuda|triton|pytorch-triton)[\\w.-]*)(?:\\[[^]]*\\])? *\\(?([=~]=) *([\\w.]+)", line)
            if exact and "extra ==" not in line:
                wanted[exact[1]] = exact[2] + exact[3]
        found = {}
        for name in [*wanted, "triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm"]:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                pass
        return {"wanted": wanted, "found": found}
    ask("installed", installed)
sys.__stdout__.write("\\n" + json.dumps(answer) + "\\n")
"""


def ask(python: str, *arguments: str) -> dict[str, Any]:
    """The answer of the workload's Python. Raises ValueError with the reason when there is none."""
    try:
        done = subprocess.run([python, "-c", _ASK, *arguments], capture_output=True, text=True, errors="replace",
                              timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ValueError(f"no answer within {_TIMEOUT_S} s") from None
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        try:
            answer = json.loads(lines[-1])
        except json.JSONDecodeError:
            answer = None
        if isinstance(answer, dict) and "version" in answer:
            return answer
        raise ValueError(f"it answers {lines[-1][:100]!r}: is it a Python?")
    last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
    raise ValueError(f"exit code {done.returncode}: {last[0][:300]}")


def python(program: str, asked: dict[str, Any]) -> Check:
    """Whether the workload's Python runs, and is one that the agent runs in. Fills in `asked`."""
    try:
        asked.update(ask(program))
    except ValueError as error:
        return Check("python", "problem", f"{program} does not run: {error}",
                     "name the Python of your training: saturate doctor --python PATH")
    found = f"{asked['version']} ({asked['executable']})"
    values = {"version": asked["version"]}
    if tuple(int(part) for part in re.findall(r"\d+", asked["version"])[:2]) < _OLDEST_PYTHON:
        return Check("python", "problem", found, "the agent needs Python 3.11 or later in the training's environment", values)
    return Check("python", "ok", found, values=values)


def torch(program: str, asked: dict[str, Any], driver_cuda: tuple[int, int] | None = None) -> Check:
    """Whether torch imports, what it is built for and how old it is. Fills in `asked`. `driver_cuda`: the newest CUDA that
    the driver here knows; None: no driver."""
    if not asked:
        return Check("torch", "unknown", "the workload's Python does not run")
    try:
        asked.update(ask(program, "torch"))
    except ValueError as error:
        if "No module named 'torch'" in str(error):
            return Check("torch", "problem", f"not installed for {program}",
                         f"{program} -m pip install torch, or name another Python: saturate doctor --python PATH")
        return Check("torch", "problem", f"installed, but `import torch` fails: {error}",
                     f"{program} -m pip install --force-reinstall torch")
    known = releases.table()
    age = releases.age_of_torch(asked["torch"], known)
    found = f"{asked['torch']} ({build_of(asked)})"
    values = {"version": asked["torch"], "cuda": asked["cuda_build"], "rocm": asked["rocm_build"], "as_of": str(known.as_of),
              "releases_behind": age.behind if age else None, "months_behind": age.months if age else None}
    if age is None:
        return Check("torch", "ok", found, values=values)
    found += f", {age.words()} (as of {known.as_of})"
    if age.behind is None or age.behind > _OLD_RELEASES:
        return Check("torch", "note", found, _upgrade(program, age.newest, driver_cuda, known), values)
    return Check("torch", "ok", found, values=values)


def _upgrade(program: str, newest: releases.TorchRelease, driver_cuda: tuple[int, int] | None,
             known: releases.Table) -> str:
    """How to get the newest torch that the driver here can run."""
    upgrade = f"{program} -m pip install --upgrade torch"
    major = int(newest.cuda[-1].split(".")[0]) if newest.cuda else 0
    oldest = known.oldest_driver.get(major)
    if driver_cuda is None or driver_cuda[0] >= major or oldest is None:
        return upgrade
    fitting = releases.newest_torch_for(driver_cuda[0], known)
    stay = f"; or stay with this driver: the CUDA {fitting[1]} build of torch {fitting[0]}" if fitting else ""
    return f"install NVIDIA driver {oldest} or later, then {upgrade}{stay}"


def build_of(asked: dict[str, Any]) -> str:
    """What a torch is built for, in words."""
    if asked.get("cuda_build"):
        return f"CUDA {asked['cuda_build']}"
    return f"ROCm {asked['rocm_build']}" if asked.get("rocm_build") else "CPU only"


def libraries(program: str, asked: dict[str, Any]) -> Check:
    """Whether cuDNN, NCCL, Triton and the CUDA libraries are those that torch was built with."""
    if "torch" not in asked:
        return Check("libraries", "unknown", "torch does not import")
    errors = asked.get("errors", {})
    installed = asked.get("installed") or {"wanted": {}, "found": {}}
    wanted, found = installed["wanted"], installed["found"]
    loaded = cudnn_version(asked.get("cudnn"))
    triton = next((version for name, version in found.items() if "triton" in name), None)
    values = {"cudnn": loaded, "nccl": asked.get("nccl"), "triton": triton}
    words = ", ".join(f"{name} {values[key]}" for name, key in _LIBRARIES if values[key])
    if "cudnn" in errors:
        return Check("libraries", "problem", f"cuDNN does not load: {errors['cudnn']}", _unshadow(program), values)
    others = [name for name, wish in wanted.items() if name in found and not fits(found[name], wish)]
    if others:
        pins = " ".join(f"{name}{wanted[name]}" for name in others)
        listed = "; ".join(f"{name}=={found[name]} where torch wants {wanted[name]}" for name in others)
        return Check("libraries", "note", f"{words}; not those that torch was built with: {listed}",
                     f"{program} -m pip install {pins}", values)
    wheel = next((version for name, version in found.items() if name.startswith("nvidia-cudnn")), None)
    if loaded and wheel and not f"{wheel}.".startswith(f"{loaded}."):
        return Check("libraries", "note", f"torch loads cuDNN {loaded} although {_short(wheel)} was installed for it",
                     _unshadow(program), values)
    return Check("libraries", "ok", (words or "a CPU build needs none") + _newer(asked, values), values=values)


def fits(version: str, wish: str) -> bool:
    """Whether a version is the one of "==9.20.0.48", or compatible with "~=3.9.0" (3.9.0 or a later 3.9.x; PEP 440)."""
    operator, wanted = wish[:2], wish[2:]
    if operator == "==":
        return version == wanted
    ours, least = ([int(part) for part in re.findall(r"\d+", text)] for text in (version, wanted))
    return ours[:len(least) - 1] == least[:-1] and ours >= least


def _newer(asked: dict[str, Any], values: dict[str, Any]) -> str:
    """What the newest listed torch would bring instead."""
    if not asked.get("cuda_build"):
        return ""
    row = next((row for row in releases.table().torch if row.cudnn), None)
    ours = releases.age_of_torch(asked["torch"], releases.table())
    if row is None or ours is None or ours.release is None or ours.release.version == row.version or ours.behind == 0:
        return ""
    brings = [f"{name} {getattr(row, key)}" for name, key in _LIBRARIES
              if values[key] and getattr(row, key) and not f"{values[key]}.".startswith(f"{getattr(row, key)}.")]
    return f" (torch {row.version} brings {', '.join(brings)})" if brings else ""


def _unshadow(program: str) -> str:
    return f"unset LD_LIBRARY_PATH where a system cuDNN lies on it, or: {program} -m pip install --force-reinstall torch"


def cudnn_version(number: int | None) -> str | None:
    """cuDNN's version number in words: 8902 is 8.9.2, 91002 is 9.10.2 (cudnn_version.h changed its factor in 9.0)."""
    if not number:
        return None
    factor = 10000 if number >= 90000 else 1000
    return f"{number // factor}.{number % factor // 100}.{number % 100}"


def _short(version: str) -> str:
    return ".".join(version.split(".")[:3])


def headers(asked: dict[str, Any], install: str) -> Check:
    """Whether C extensions can be built for the workload's Python: Triton and inductor build them while training."""
    if "torch" not in asked:
        return Check("headers", "unknown", "torch does not import")
    present = asked.get("headers")
    if present is None:
        return Check("headers", "unknown", asked.get("errors", {}).get("headers", "not told"))
    if present:
        return Check("headers", "ok", "Python.h is there")
    return Check("headers", "note", "no Python.h: torch.compile cannot build its kernels", install)
