"""Programs that AOTInductor compiled into a shared library (.pt2): no Python and no compiler at the first call.

Made for the machine's instruction set and torch's version; Linux only. Where sizes are open (the batch), there are two
libraries: one for the sizes that were measured, which is much faster for some models, and one for all others, which is
loaded at the first call that needs it.

Trust: a library is machine code, and loading it runs it. No look at a file can make that safe, so an artifact of this
format is as trustworthy as whoever wrote its manifest: the digests there say that nobody changed the file since. Only a
package of one compiled program is loaded; an archive with an exported program beside it, which torch would unpickle, is
refused, and so is anything that is no archive.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from saturate.errors import ArtifactDamaged
from saturate.inference import compiling, session, structure
from saturate.inference.formats import _cache_lines, _program, _vetting
from saturate.inference.techniques._api import Context, Entry, NotApplied

FORMAT = "aoti"
NAME = "model.pt2"

#: The variable by which a candidate's process knows the folder that goes with it.
SCRATCH = "SATURATE_SCRATCH"


def build(context: Context, program: _program.Program, path: Path, configuration: dict[str, Any] | None = None) -> Path:
    """Compile a program with inductor's options into the package `path` (its name ends in .pt2), and for the measured
    sizes into one beside it; the signature then names these sizes as `fixed`.

    Raises NotApplied with what the compiler said.
    """
    with _cache_lines.weights(context.device, path.parent) as aligned:
        options = {**(configuration or {}), **weights_in_allocator(context.device), **aligned}
        with _program.kept_open(context.torch, program):
            _compile(context.torch, program.exported, path, options)
        fixed = _program.fixed(context.torch, program)
        if fixed is not None:
            _compile(context.torch, fixed, _beside(path), options)
            program.signature["fixed"] = [list(tensor.shape) for tensor in program.example or ()]
    return path


def weights_in_allocator(device: str) -> dict[str, Any]:
    """inductor's option for weights on a GPU that lie in torch's allocator, where it gives back and counts what all programs of the
    process take; by itself the library asks the device for them. Empty on a CPU, and where torch has no such option."""
    from torch._inductor import config

    name = "weight_use_caching_allocator"
    return {f"aot_inductor.{name}": True} if device == "cuda" and hasattr(config.aot_inductor, name) else {}


def _compile(torch: Any, exported: Any, path: Path, configuration: dict[str, Any]) -> None:
    try:
        with torch.no_grad(), compiling.clock():
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(path), inductor_configs=dict(configuration))
        _vetting.compiled(torch, path)
    except _vetting.Unsafe as error:
        raise NotApplied(f"torch {torch.__version__} packages programs in another way: {error}") from error
    except OSError:
        raise
    except Exception as error:
        raise NotApplied(f"AOTInductor does not compile the model: {_program.short(error)}") from error


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.stem}_fixed.pt2")


def opened(torch: Any, path: Path, signature: dict[str, Any], device: str,
           classes: dict[str, type] | None = None) -> Callable[..., Any]:
    """The program of packages that are trusted, as a function with the model's signature."""
    if "fixed" not in signature:
        return _program.callable_of(torch, signature, device, _runner(torch, path), classes, quiet=True)
    sizes = [torch.Size(shape) for shape in signature["fixed"]]
    fast, checked = _runner(torch, _beside(path)), _version(path)
    other: list[Callable[[list[Any]], Any]] = []

    def run(tensors: list[Any]) -> Any:
        if [tensor.shape for tensor in tensors] == sizes:
            return fast(tensors)
        if not other:
            if _version(path) != checked:
                raise ArtifactDamaged(f"{path} is not what it was when the artifact was loaded",
                                      cause="it holds the program for all sizes but the measured one, and was moved or replaced",
                                      remedy="load the artifact again, from where it is")
            other.append(_runner(torch, path))
        return other[0](tensors)

    return _program.callable_of(torch, signature, device, run, classes, quiet=True)


def _version(path: Path) -> tuple[int, ...] | None:
    """Changes with the file at a place; None: there is none."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns


def _runner(torch: Any, path: Path) -> Callable[[list[Any]], Any]:
    """Flat tensors in and out. The package's own call would parse the description of its inputs each time."""
    with _unpacked_in(os.environ.get(SCRATCH)):
        package = torch._inductor.aoti_load_package(str(path))
    return getattr(package.loader, "boxed_run", None) or (lambda tensors: package(*tensors))


@contextlib.contextmanager
def _unpacked_in(folder: str | None) -> Iterator[None]:
    """Where torch unpacks the library of a package. It removes that folder when its process ends by itself, and a candidate's
    process is killed."""
    before = os.environ.get("TMPDIR")
    if folder is not None:
        os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        if folder is not None and before is None:
            del os.environ["TMPDIR"]
        elif folder is not None and before is not None:
            os.environ["TMPDIR"] = before


def save(context: Context, folder: Path, package: Path, program: _program.Program) -> Entry:
    """Copy what `build` made into `folder`. Raises OSError when the disk is full."""
    target = Path(folder) / NAME
    files = {package: target, **({_beside(package): _beside(target)} if "fixed" in program.signature else {})}
    for source, copy in files.items():
        shutil.copyfile(source, copy)
    settings = {"device": context.device, "session": session.switches(context), **program.signature}
    return Entry(FORMAT, [copy.name for copy in files.values()], settings)


def lines(entry: Entry, threads: int, place: Callable[[str], str]) -> str:
    """See `inference.lines.serving`."""
    settings, name = entry.settings, entry.files[0]
    other = ""
    if "fixed" in settings:
        name, other = entry.files[1], f"      # for {settings['fixed']}; {entry.files[0]} takes other sizes"
    return (f"{_program.library_lines(settings)}{session.lines(settings['session'], threads)}\n"
            f"program = torch._inductor.aoti_load_package({place(name)}){other}\n"
            f"with torch.no_grad(): answers = program(*{structure.flat_inputs(settings['inputs'])})")


def load(torch: Any, folder: Path, entry: Entry) -> Callable[..., Any]:
    """The stored program as a function with the model's signature. The caller has checked the files' digests.

    Raises ArtifactDamaged, and EnvironmentProblem where a library whose operators it calls is missing.
    """
    path = Path(folder) / NAME
    remedy = "copy the artifact again, or run saturate optimize again here"
    wanted = [NAME, *([_beside(path).name] if "fixed" in entry.settings else [])]
    if entry.files != wanted:
        raise ArtifactDamaged(f"{folder} is not loaded", cause=f"its program is in {entry.files}, not in {wanted}", remedy=remedy)
    for name in wanted:
        try:
            _vetting.compiled(torch, Path(folder) / name)
        except _vetting.Unsafe as error:
            raise ArtifactDamaged(f"{Path(folder) / name} is not loaded", cause=str(error), remedy=remedy) from error
    _program.load_libraries(entry.settings)
    try:
        session.restore(torch, entry.settings["session"])
        return opened(torch, path, entry.settings, entry.settings["device"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactDamaged(f"the settings beside {path} are incomplete", cause=repr(error), remedy=remedy) from error
    except RuntimeError as error:
        raise ArtifactDamaged(f"torch {torch.__version__} does not load {path}", cause=_program.short(error),
                              evidence="a compiled program needs the torch version and the processor it was made for",
                              remedy=remedy) from error
