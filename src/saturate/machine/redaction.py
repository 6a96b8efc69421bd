"""What must not leave this machine: secrets never, names and addresses not in what is pasted into a public issue.

Nothing is looked up: the environment, the user's name and the host's name are compared, and known shapes of tokens and
addresses are recognized. A secret of an unknown shape in an unknown place is not found.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_HIDDEN = "[hidden]"
_SECRET_NAME = re.compile(r"(?:^|_|API|ACCESS)KEYS?(?:_|\d|$)|TOKEN(?!IZ)|SECRET|PASSW|CREDENTIAL|(?:^|_)AUTH(?:_|$)"
                          r"|COOKIE|WEBHOOK", re.IGNORECASE)
_SHORTEST_SECRET = 8
#: Tokens by the shapes that their issuers document; then `password=...` and `user:password@` of addresses.
_TOKENS = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|pypi-|npm_|AKIA|ASIA|AIza|nvapi-|wandb_v1_)[\w-]{8,}"
    r"|\beyJ[\w-]{6,}\.[\w-]{6,}(?:\.[\w-]*)?"
    r"|\b[0-9a-f]{40}\b"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
    r"|(?i:(?<=password=)|(?<=passwd=)|(?<=token=)|(?<=secret=)|(?<=api_key=)|(?<=bearer ))[^\s&\"',;]+"
)
_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_SERIAL = re.compile(r"(?i)(\bserial(?: number)?\b[\s:=#]*)[\w-]{6,}")
_MAC = re.compile(r"\b[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}\b")
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
# Not behind "==" or a letter: cuDNN 9.20.0.48 and package==10.3.9.90 are versions.
_IPV4 = re.compile(rf"(?<![\w.=-]){_OCTET}(?:\.{_OCTET}){{3}}(?![\w.-])")
_GROUPS = r"[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4})*"
# Eight groups, or "::" with a group beside it: 12:34:56 is a time and 0000:17:00.0 a PCI address.
_IPV6 = re.compile(rf"(?<![\w:.])(?:(?:[0-9a-fA-F]{{1,4}}:){{7}}[0-9a-fA-F]{{1,4}}|{_GROUPS}::(?:{_GROUPS})?|::{_GROUPS})"
                   r"(?![\w:])")


def without_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text without tokens, and without the values of environment variables whose names say that they are secret."""
    environment = os.environ if environment is None else environment
    secrets = {value for name, value in environment.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET}
    for value in sorted(secrets, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", _HIDDEN, text)
    return _TOKENS.sub(_HIDDEN, text)


def hide_secrets_in(path: Path, environment: Mapping[str, str]) -> None:
    """The same of a file that nobody writes to any more, if there is one. It is removed where that cannot be written."""
    try:
        with open(path, "r+b") as file:
            said = file.read()
            kept = without_secrets(said.decode("utf-8", "surrogateescape"), environment).encode("utf-8", "surrogateescape")
            if kept != said:
                file.seek(0)
                file.write(kept)
                file.truncate()
    except FileNotFoundError:
        return
    except OSError:         # a full disk: what is hidden may be longer than what it hides
        path.unlink(missing_ok=True)


def without_names(text: str) -> str:
    """The text without the user's name, home folder, this host's name, addresses, UUIDs and serial numbers, fit for a
    public issue."""
    home, user, node = os.path.expanduser("~"), _user(), os.uname().nodename
    if len(home) > 1:
        text = re.sub(re.escape(home) + r"(?![\w-])", "~", text)
    text = re.sub(r"(/home/|/Users/)[^/\s\"']+", r"\1USER", text)
    names = [(user, "USER")] if user not in ("", "root") else []
    names += [(host, "HOST") for host in sorted({node, node.split(".")[0]}, key=len, reverse=True)]
    for name, shown in names:
        if name and name != "localhost":
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown, text)
    for shape, shown in ((_UUID, "[uuid]"), (_SERIAL, r"\1[serial]"), (_MAC, "[mac]"), (_IPV4, "[ip]"), (_IPV6, "[ip]")):
        text = shape.sub(shown, text)
    return text


def printable(text: str) -> str:
    """The text without control characters: what a library reports must not move the terminal's cursor."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", text)


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with `change` applied to every text in it; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: each_text(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [each_text(inner, change) for inner in value]
    return value


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without an entry, as in many containers
        return ""
