"""Which cage a trial gets: the folders to cover, the caches to share, and whether the kernel allows it.

`plan` asks the kernel instead of guessing: it rehearses the cage in a short-lived process and falls back to interception
with the reason the kernel gave.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from saturate.errors import UsageError
from saturate.trial import defeats, elsewhere, landlock
from saturate.trial.cage import CagePlan
from saturate.trial.layers import REHEARSAL, discard, inductor_folder, make_scratch
from saturate.trial.offline import environment_offline

#: Environment variable that decides the mode: "overlay", "intercept" or empty.
OVERRIDE = "SATURATE_ISOLATION"

#: Caches of libraries that training scripts use, by the variable that moves them.
CACHE_VARIABLES = (
    "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE",
    "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH",
    "NUMBA_CACHE_DIR", "MPLCONFIGDIR", "TIKTOKEN_CACHE_DIR", "NLTK_DATA", "KERAS_HOME",
)

#: What Hugging Face's libraries keep below HF_HOME. Of the folder itself, which may be one for data as well, only these are caches.
_OF_HUGGING_FACE = ("assets", "datasets", "hub", "modules", "xet")

#: Devices and what the kernel says: no folders of files that a trial could change.
_SYSTEM = ("/dev", "/proc", "/sys")

#: The folder that `trial/cage.py` says cannot be covered.
_REFUSED = re.compile(r"mount overlay on (.+?): ")

#: Compiled kernels go to the study, unless the user chose a place: one trial compiles, the others reuse.
_SHARED = (("TORCHINDUCTOR_CACHE_DIR", "torchinductor"), ("TRITON_CACHE_DIR", "triton"))

#: Decoded samples go there too, until the study is over (`forget_samples`), whatever the user chose: a trial must not fill the
#: user's own cache. A trial may make this many seconds' worth of them before its first step, so that it shows a warm cache.
SAMPLES_AHEAD_S = 20

#: Folders that are a cache by what they are called; all others the user has named by a variable.
_OF_HOME = (".cache", ".triton", ".nv")

_decisions: dict[tuple[object, ...], tuple[bool, str]] = {}


def plan(
    cwd: Path,
    run_dir: Path,
    argv: list[str],
    environ: Mapping[str, str],
    lower_caches: Path | None = None,
    study_dir: Path | None = None,
) -> CagePlan:
    """The cage of one trial that runs `argv` in `cwd` with `environ`. Creates `run_dir` and the shared cache. Raises UsageError for a
    command that nothing could isolate.

    `study_dir` is the folder that holds run folders (default: the nearest parent of `run_dir` named `.saturate`).
    `lower_caches` is what `collect_caches` returned for the baseline.
    """
    _refuse_daemons(argv)
    run_dir.mkdir(parents=True, exist_ok=True)
    discard(run_dir)    # layers of a trial with this name that was killed
    cwd, run_dir = cwd.resolve(), run_dir.resolve()
    study_dir = study_dir.resolve() if study_dir else _study_of(run_dir)
    shared = study_dir / "cache"
    shared.mkdir(parents=True, exist_ok=True)
    environment = environment_offline(run_dir, environ)
    # inductor names its files to the C++ compiler without quotes: below a folder with a space it keeps them where it does by itself.
    spaced = any(map(str.isspace, str(shared)))
    environment |= {name: str(shared / folder) for name, folder in _SHARED if not environ.get(name) and not spaced}
    environment |= {"SATURATE_DATA_CACHE": str(shared / "data"), "SATURATE_DATA_AHEAD_S": str(SAMPLES_AHEAD_S)}
    layout = "root" if os.geteuid() == 0 else "user"
    made = CagePlan(
        mode="overlay",
        reason="",
        layout=layout,
        cwd=str(cwd),
        run_dir=str(run_dir),
        study_dir=str(study_dir),
        shared_cache=str(shared),
        overlays=() if layout == "root" else _user_overlays(cwd, argv, environ, study_dir),
        caches=_caches(environ, study_dir, [cwd, *_places(argv[1:], cwd)]),
        lower_caches=str(lower_caches.resolve()) if lower_caches else None,
        passthrough=_sockets(environ),
        environment=environment,
        intercepted=_cache_in_study(environ, shared),
    )
    wanted = environ.get(OVERRIDE) or os.environ.get(OVERRIDE, "")
    if wanted == "intercept":
        return as_intercept(made._replace(asked=True), f"{OVERRIDE}=intercept")
    found = set(elsewhere.writable()) if layout == "user" else set()
    while True:
        tried = _widened(made, found)
        allowed, reason = _rehearsed(tried, argv)
        if allowed:
            return tried._replace(reason=reason)
        if tried.overlays == made.overlays:
            return as_intercept(made, reason)
        refused = _REFUSED.search(reason)       # a disk of another system (exFAT): the other folders can be covered all the same
        without = found - {Path(refused[1])} if refused else found
        found = without if without != found else set()


def _refuse_daemons(argv: list[str]) -> None:
    found = defeats.starts_elsewhere(argv)
    if found is None:
        return
    by, _ = found
    raise UsageError(
        f"what `{by}` starts cannot be isolated", cause="a service starts it, not the command: it would write to your files, and go on when its trial ends",
        remedy="add --scope to systemd-run" if by == "systemd-run" else f"put {by} in front of saturate, which then works where the training "
                                                                       f"runs: {by} ... saturate tune -- python train.py")


def _widened(plan: CagePlan, found: set[Path]) -> CagePlan:
    """The plan with an overlay on what the user can write elsewhere, too; the kernel may refuse that."""
    if not found:
        return plan
    outside = [folder for folder in found if not _below(folder, Path(plan.study_dir))]
    return plan._replace(overlays=_outermost([*map(Path, plan.overlays), *outside]))


def forget_samples(study_dir: Path) -> None:
    """Remove what trials have decoded: gigabytes, of which nobody would know."""
    for path in (study_dir / "cache" / "data").glob("*.samples"):
        with contextlib.suppress(OSError):
            path.unlink()


def as_intercept(plan: CagePlan, why_not_overlays: str) -> CagePlan:
    """The same trial in the other mode, with a TMPDIR of its own that `layers.discard` deletes."""
    guarded = landlock.abi() > 0
    attributes = guarded and _attributes_guarded()
    scratch = str(make_scratch(Path(plan.run_dir)))
    for cache in plan.caches:       # one that is no folder yet would be written to the shadow, anew in each trial
        if os.path.basename(cache) not in _OF_HOME:
            with contextlib.suppress(OSError):          # a home that nobody may write to
                os.makedirs(cache, exist_ok=True)
    return plan._replace(
        mode="intercept", reason=f"writes are intercepted: {why_not_overlays}; {guards()}", why_not_overlays=why_not_overlays,
        guarded=guarded, attributes=attributes, scratch=scratch,
        # What is imported is compiled and kept beside its source, and Python writes that past `os`: see `agent/redirect.py`.
        environment=plan.environment | plan.intercepted | {"TMPDIR": scratch, "PYTHONDONTWRITEBYTECODE": "1"},
    )


def guards() -> str:
    """Mode "intercept": what stops writes that do not go through Python, and what they still reach."""
    if not landlock.abi():
        return "no Landlock here: writes by C libraries and other programs are not covered"
    stopped = "Landlock blocks other writes but those in /dev/shm"
    return stopped if _attributes_guarded() else f"{stopped}; chmod, chown and touch by C libraries and other programs are not covered"


@functools.cache
def _attributes_guarded() -> bool:
    """Whether `metadata.install` works here: tried in a process of its own, since it cannot be taken back."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from saturate.trial import metadata; metadata.install()"
    tried = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(Path(__file__).resolve().parents[2])],
                           capture_output=True, timeout=60, check=False)
    return tried.returncode == 0


def unguarded(plan: CagePlan, why: str) -> CagePlan:
    """The same trial without Landlock, for a program that must write where none may; mode "overlay" needs no such thing."""
    if not plan.guarded:
        return plan
    return plan._replace(guarded=False, attributes=False,
                         reason=f"writes are intercepted: {plan.why_not_overlays}; {why}, so writes by C libraries are not covered")


def probe(folder: Path | None = None) -> tuple[bool, str]:
    """Whether this machine allows mode "overlay" for studies kept below `folder` (default: a temporary folder), and why
    or why not."""
    with tempfile.TemporaryDirectory(prefix="saturate-probe-", dir=folder) as top:
        cwd = Path(top).resolve() / "cwd"
        cwd.mkdir()
        run_dir = Path(top).resolve() / "study" / "run"
        run_dir.mkdir(parents=True)
        shared = run_dir.parent / "cache"
        shared.mkdir()
        layout = "root" if os.geteuid() == 0 else "user"
        trial = CagePlan(
            mode="overlay", reason="", layout=layout, cwd=str(cwd), run_dir=str(run_dir), study_dir=str(run_dir.parent),
            shared_cache=str(shared), overlays=() if layout == "root" else (str(cwd),),
        )
        return _rehearse(trial, [str(cwd)])


def _study_of(run_dir: Path) -> Path:
    return next((parent for parent in run_dir.parents if parent.name == ".saturate"), run_dir.parent)


def _named_folders(argv: list[str], cwd: Path) -> list[Path]:
    """Every path that the command names, also as `--option=PATH`."""
    named = []
    for word in argv:
        _, _, value = word.partition("=")
        for text in {word, value}:
            if "/" in text or text == "..":
                named.append(cwd / os.path.expanduser(text))
    return named


def _nearest_folder(path: Path) -> Path | None:
    """The deepest existing folder on the way to `path`."""
    try:
        path = path.resolve()
        for folder in (path, *path.parents):
            if folder.is_dir():
                return folder
    except (OSError, RuntimeError, ValueError):
        return None     # not a path after all: too long, a loop of links, a zero byte
    return None


def _places(argv: list[str], cwd: Path) -> set[Path]:
    """The folders of files that the command names, or that hold what it names."""
    found = (_nearest_folder(path) for path in _named_folders(argv, cwd) if not _of_system(path))    # /dev/stdout leads to any file
    return {folder for folder in found if folder and not _of_system(folder)}


def _of_system(path: Path) -> bool:
    return any(_below(path, Path(system)) for system in _SYSTEM)


def _user_overlays(cwd: Path, argv: list[str], environ: Mapping[str, str], study_dir: Path) -> tuple[str, ...]:
    """Layout "user": what this user can write and a script may want to, none inside another, no parent of them all."""
    home = environ.get("HOME") or os.path.expanduser("~")
    named = [environ[name] for name in (*CACHE_VARIABLES, "TMPDIR", "WANDB_DIR") if environ.get(name)]
    wanted = [Path(text) for text in (home, "/tmp", "/var/tmp", *named)]
    wanted += [cwd, *_places(argv, cwd)]
    if not os.access(cwd, os.W_OK):
        wanted += [path for path in cwd.glob("*/") if os.access(path, os.W_OK)]
    found = set()
    for path in wanted:
        folder = _nearest_folder(path)
        if folder and str(folder) != "/" and os.access(folder, os.W_OK) and not _below(folder, study_dir):
            found.add(folder)
    return _outermost(found)


def _outermost(folders: Iterable[Path]) -> tuple[str, ...]:
    """Those that lie in no other one."""
    found = set(folders)
    return tuple(sorted(str(path) for path in found if not found.intersection(path.parents)))


def _below(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def _caches(environ: Mapping[str, str], study_dir: Path, named: Iterable[Path] = ()) -> tuple[str, ...]:
    """Folders that hold caches and nothing else. A variable may name a general one, such as /tmp, or one that holds a folder which
    the command names (`named`): what a trial writes there is its own, to be neither kept nor handed on."""
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    own = [home / name for name in _OF_HOME if str(home) != "~"]      # a user without one, as in containers
    own.append(Path("/tmp") / inductor_folder())
    given = {_real(Path(environ[name], below)) for name in CACHE_VARIABLES if os.path.isabs(environ.get(name, ""))
             for below in (_OF_HUGGING_FACE if name == "HF_HOME" else ("",))}
    general = {_real(Path(text)) for text in ("/tmp", "/var/tmp", str(home), environ.get("TMPDIR") or tempfile.gettempdir())}
    general |= {_real(path) for path in named}
    found = {_real(path) for path in own} | {path for path in given if not any(_below(folder, path) for folder in general)}
    return tuple(sorted(
        str(path) for path in found
        if not any(path != other and _below(path, other) for other in found) and not _below(path, study_dir)
        and not _below(study_dir, path)     # a study inside a cache folder: it cannot be a layer of itself
    ))


def _cache_in_study(environ: Mapping[str, str], shared: Path) -> dict[str, str]:
    """Mode "intercept", a home without a folder of caches, as in fresh containers: a new one would be in the shadow of each trial, which
    would download all of it again, where C libraries and Python's own import do not find it."""
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    there = environ.get("XDG_CACHE_HOME") or (home / ".cache").is_dir()
    return {} if there else {"XDG_CACHE_HOME": str(shared / "home")}


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))     # `resolve` raises for a loop of links, before Python 3.13


def _sockets(environ: Mapping[str, str]) -> tuple[str, ...]:
    wanted = (environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "/tmp/.X11-unix")
    return tuple(path for path in wanted if os.path.isdir(path))


def _rehearsed(plan: CagePlan, argv: list[str]) -> tuple[bool, str]:
    """`_rehearse`, once per set of folders: the answer does not depend on the trial."""
    key = (plan.cwd, plan.study_dir, plan.overlays, plan.caches, plan.passthrough, tuple(argv))
    if key not in _decisions:
        trial_run = Path(plan.run_dir) / REHEARSAL
        trial_run.mkdir()
        try:
            named = _places(argv, Path(plan.cwd))
            # What lies in the study (a profiler's report) is not the user's; of it a trial may write its own folder only.
            places = {plan.cwd} | {str(folder) for folder in named if not _below(folder, Path(plan.study_dir))}
            if foreign := _foreign(plan):
                _decisions[key] = (False, foreign)
            else:
                _decisions[key] = _rehearse(plan._replace(run_dir=str(trial_run)), sorted(places))
        finally:
            discard(trial_run)
            shutil.rmtree(trial_run)
    return _decisions[key]


def _foreign(plan: CagePlan) -> str:
    """Layout "user": why overlays would break. Files of another owner or group that this user may write (shared
    folders) fail with EOVERFLOW under an overlay in a user namespace; the rehearsal would not meet all of them."""
    if plan.layout != "user":
        return ""
    with os.scandir(plan.cwd) as entries:
        inside = [entry.path for entry in entries if not entry.is_symlink()]
    for path in (*plan.overlays, *plan.caches, *inside):
        try:
            seen = os.stat(path)
        except OSError:
            continue    # a cache that does not exist yet, or whose link leads round in a loop; an entry that was removed while we looked
        shared_by_design = seen.st_mode & stat.S_ISVTX      # /tmp: everybody owns what lies in it
        if (seen.st_uid, seen.st_gid) != (os.geteuid(), os.getegid()) and not shared_by_design and os.access(path, os.W_OK):
            return f"{path} can be written but belongs to another user or group"
    return ""


_REHEARSAL = """
import os, sys
sys.path.insert(0, sys.argv[1])
from saturate.trial.cage import CagePlan, CageRefused, enter
before = [os.access(place, os.W_OK) for place in sys.argv[2:]]
try:
    enter(CagePlan.from_json(sys.stdin.read()))
    for place, writable in zip(sys.argv[2:], before):
        if writable:
            mark = os.path.join(place, ".saturate-rehearsal")
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT))
            os.unlink(mark)
except CageRefused as refused:
    sys.exit(str(refused))
except OSError as error:
    sys.exit(f"{error.filename}: {error.strerror}")
"""


def _rehearse(plan: CagePlan, places: list[str]) -> tuple[bool, str]:
    """Enter the cage in a process of its own and create a file in each of `places` that can be written outside."""
    package = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _REHEARSAL, package, *places],
        input=plan.to_json(), capture_output=True, text=True, timeout=60, check=False,
    )
    if done.returncode == 0:
        return True, f"overlays in a mount namespace ({plan.layout} layout)"
    return False, done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}"
