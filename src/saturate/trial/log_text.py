"""What the log of a command says of its end: the exception that ended it, or its last line."""

from __future__ import annotations

import itertools
import re

TRACEBACK = "Traceback (most recent call last)"
#: Between the exceptions of one chain.
_CHAINS = ("During handling of the above exception, another exception occurred:",
           "The above exception was the direct cause of the following exception:")
_RANK = re.compile(r"\[(?:rank|default)\d+\]: ?")         # what torch and torchrun put before each line of a rank
_GROUP = "  | "                                           # and Python before each line of an exception group
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?::|$)")
#: Compilers of torch's, which say in a line below what they met and where; and the most of that which is said.
_COMPILERS = ("torch._dynamo.exc.", "torch._inductor.exc.")
_MET = re.compile(r"^ *Explanation: (?:.*?: got )?(?P<met>.+)", re.MULTILINE)
_USER_CODE = re.compile(r"^from user code:\n(?P<frames>(?: +.*\n?)+)", re.MULTILINE)
_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in ', re.MULTILINE)
_MOST_MET = 200
#: What a launcher raises because a process of its own failed; why it failed was printed before.
_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessExitedException")


def last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def decisive(log: str) -> str:
    """What tells why a process ended: its last exception, those that led to it, and what follows. A message before them was
    survived. All of the log where there is no traceback, or several processes wrote it."""
    lines = log.splitlines(keepends=True)
    found = _exceptions(log)
    if not found or found[-1][1] in _LAUNCHERS or any(rank for rank, _, _ in found):
        return log
    start, chained = 0, False
    for index, line in enumerate(lines):
        if TRACEBACK in line:
            start, chained = start if chained else index, False
        elif line.strip() in _CHAINS:
            chained = True
    return "".join(lines[start:])


def _exceptions(log: str) -> list[tuple[str, str, str]]:
    """(rank, class, line) of the exception below each traceback."""
    inside: dict[str, bool] = {}
    found: list[tuple[str, str, str]] = []
    lines = [_of_rank(line) for line in log.splitlines()]
    for number, (rank, text) in enumerate(lines):
        exception = _EXCEPTION.match(text)
        if TRACEBACK in text:
            inside[rank] = True
        elif inside.get(rank) and exception:
            inside[rank] = False
            said = text.strip()[:300]
            if text.startswith(_COMPILERS):
                below = (more for other, more in lines[number + 1:] if other == rank)
                said += _compilers_reason(said, "\n".join(itertools.takewhile(lambda more: TRACEBACK not in more, below)))
            elif said.endswith(":") and ": " in said:       # what it is about stands below
                said += _next_line([more for other, more in lines[number + 1:] if other == rank])
            found.append((rank, exception.group(1).rpartition(".")[2], said))
    return found


def _next_line(below: list[str]) -> str:
    """What goes on behind a colon; "" where something else begins, or a list of things that are set in."""
    line = below[0].rstrip() if below else ""
    return f" {line[:_MOST_MET]}" if line and not line[0].isspace() and TRACEBACK not in line and line not in _CHAINS else ""


def _of_rank(line: str) -> tuple[str, str]:
    """The mark of its rank, and what stands behind that."""
    mark = _RANK.match(line)
    rank = mark.group() if mark else ""
    return rank, line[len(rank):].removeprefix(_GROUP)


def _compilers_reason(said: str, below: str) -> str:
    """What a compiler of torch's met, and the line of the training where: its first line says only what it was about to do, and what is
    below it is pages. "" where it does not tell."""
    met = _MET.search(below)
    opens = said.endswith(":")      # "backend='inductor' raised:"
    text = met["met"].strip() if met else below.partition("\n")[0].strip() if opens else ""
    text = text if len(text) <= _MOST_MET else f"{text[:_MOST_MET - 3]}..."
    code = _USER_CODE.search(below)
    frames = _FRAME.findall(code["frames"]) if code else []
    place = f" ({frames[-1][0]}:{frames[-1][1]})" if frames else ""
    return (f"{'' if opens else ':'} {text}" if text else "") + place


def logged_exception(log: str) -> str:
    """The exception that the output of a command ends with, which ended normally all the same: scripts log what broke their training
    off, and go on to their own end. "" where they printed something after it."""
    said = last_exception(log)
    if said is None or said.startswith(_COMPILERS):     # below these follow pages of advice
        return said or ""
    _, after, rest = log.rpartition(said)
    message = rest.splitlines()[1:]
    return said if after and all(not line.strip() or line[0].isspace() for line in message) else ""


def exception_line(text: str) -> str:
    """The first line of the exception that a log, or a traceback alone, ends with: what follows it is advice (a CUDA error has five
    lines, of which the last says the same of any error) or comes from somewhere else; a compiler of torch's says the reason there,
    which is put behind it. The last line where there is none."""
    return last_exception(text) or last_line(text)


def last_exception(log: str) -> str | None:
    """The last exception in the log, whatever was printed after it; where that is a launcher's, the one below it. Of several
    ranks' then the first, since the others may only have lost their peer. None where there is no exception."""
    found = _exceptions(log)
    if not found:
        return None
    causes = [(rank, text) for rank, kind, text in found if kind not in _LAUNCHERS]
    if found[-1][1] not in _LAUNCHERS or not causes:
        return found[-1][2]
    ranks = [text for rank, text in causes if rank]
    return ranks[0] if ranks else causes[-1][1]


def line_of(log: str, position: int) -> str:
    start = log.rfind("\n", 0, position) + 1
    end = log.find("\n", position)
    return log[start: end if end >= 0 else len(log)].strip()[:300]
