"""Does a compiled program run on this processor? It is tried in another process: an instruction that the processor does
not have ends a process by SIGILL, and nothing in it can catch that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from saturate.errors import EnvironmentProblem
from saturate.records.artifact import MadeOn, Manifest

#: Formats that hold machine code for the processor that they were made on.
NATIVE = ("aoti",)

#: Loading and a few calls take seconds; more is no answer.
LIMIT_S = 180.0


def other_processor(made: MadeOn, now: MadeOn) -> bool:
    """Whether machine code of the one may hold what the other does not have. The names count too: compilers use more
    instruction sets than a manifest lists."""
    lacking = set(made.cpu_flags) - set(now.cpu_flags)
    return bool(lacking) or (made.system, made.architecture, made.cpu) != (now.system, now.architecture, now.cpu)


def demand(folder: Path, manifest: Manifest, now: MadeOn) -> None:
    """Raises EnvironmentProblem where the program is machine code of another processor, and does not run here."""
    made = manifest.made_on
    if manifest.format not in NATIVE or made.device != "cpu" or not other_processor(made, now):
        return
    problem = tried(folder) if manifest.examples else "it has no stored inputs to try it on"
    if problem is not None:
        lacking = [flag for flag in made.cpu_flags if flag not in now.cpu_flags]
        without = f", and this is one without {', '.join(lacking)}" if lacking else ""
        raise EnvironmentProblem(
            f"the artifact {folder} is machine code for another processor, and was not loaded",
            cause=f"made on {made.cpu or made.architecture}{without}; {problem}",
            remedy="run saturate optimize here; or there with --skip aot-inductor, for an ONNX file or an exported "
                   "program, which other processors run too")


def tried(folder: Path) -> str | None:
    """How a trial in another process failed; None: it answered."""
    path = [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]
    code = f"import sys; sys.path[:] = {path!r}; from saturate.inference import artifact; artifact.answer_examples(sys.argv[1])"
    try:
        done = subprocess.run([sys.executable, "-c", code, str(Path(folder).absolute())], stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"a trial in another process took longer than {LIMIT_S:.0f} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"a trial in another process was ended by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return f"a trial in another process failed: {lines[-1][:300] if lines else f'exit code {done.returncode}'}"
