"""Weights of compiled libraries lie on cache lines: a malloc of their own is linked into them, which nobody else calls."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from quantize_kit import context  # noqa: E402

from saturate.inference.formats import _cache_lines, _program, aoti  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="AOTInductor's libraries are for Linux")

#: What AOTInductor's libraries do: C++, and std::malloc.
LIBRARY = """
#include <cstdlib>
extern "C" unsigned long remainder_of(unsigned long size) {
    void *block = std::malloc(size);
    unsigned long found = (unsigned long)block % 64;
    std::free(block);
    return found;
}
"""


def compiled(folder: Path, options: dict[str, Any]) -> Path:
    """A library as inductor links one: names with -l behind the objects."""
    source, library = folder / "library.cpp", folder / f"library{len(options)}.so"
    source.write_text(LIBRARY)
    names = [f"-l{name}" for name in options.get(_cache_lines.OPTION, ())]
    subprocess.run(["g++", "-O0", "-shared", "-fPIC", str(source), "-o", str(library), *names], check=True)
    return library


def mallocs(library: Path) -> list[str]:
    """What the loader sees of malloc in a library: U for one of others, T for one that it offers to others."""
    listed = subprocess.run(["nm", "-D", str(library)], check=True, capture_output=True, text=True).stdout
    return [line.split()[-2] for line in listed.splitlines() if line.split()[-1].partition("@")[0] == "malloc"]


def test_large_blocks_begin_at_a_cache_line(tmp_path: Path) -> None:
    with _cache_lines.weights("cpu", tmp_path) as options:
        assert options
        library = compiled(tmp_path, options)
    assert mallocs(library) == [], "neither libc's nor offered to others"
    assert {ctypes.CDLL(str(library)).remainder_of(size) for size in (1, 1000, 1 << 20, 1 << 27)} == {0}


def test_by_itself_it_does_not(tmp_path: Path) -> None:
    """The trap is still there: glibc's large blocks begin 16 bytes behind a page."""
    library = compiled(tmp_path, {})
    assert mallocs(library) == ["U"]
    if "glibc" not in os.confstr("CS_GNU_LIBC_VERSION") or "LD_PRELOAD" in os.environ:
        pytest.skip("another malloc than glibc's")
    assert ctypes.CDLL(str(library)).remainder_of(1 << 27) == 16


def test_where_the_linker_looks_is_as_before_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "/somewhere"):
        monkeypatch.delenv("LIBRARY_PATH", raising=False)
        if before:
            monkeypatch.setenv("LIBRARY_PATH", before)
        with pytest.raises(KeyError), _cache_lines.weights("cpu", tmp_path):
            assert os.environ["LIBRARY_PATH"].split(":") == [str(tmp_path), *filter(None, [before])]
            raise KeyError
        assert os.environ.get("LIBRARY_PATH") == before


def test_libraries_that_the_user_links_stay(tmp_path: Path) -> None:
    from torch._inductor import config

    with config.patch({_cache_lines.OPTION: ["m"]}), _cache_lines.weights("cpu", tmp_path) as options:
        assert options == {_cache_lines.OPTION: ["m", *_cache_lines.VALUE]}


@pytest.mark.parametrize("device, compiler, folder", [("cuda", None, "here"), ("cpu", "false", "here"), ("cpu", "/no/such/g++", "here"), ("cpu", None, "a:b")])
def test_elsewhere_libraries_are_as_torch_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, compiler: str | None, folder: str) -> None:
    from torch._inductor import cpp_builder

    (tmp_path / folder).mkdir()
    if compiler is not None:
        monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: compiler)
    with _cache_lines.weights(device, tmp_path / folder) as options:
        assert options == {}
    assert not list((tmp_path / folder).glob("*.so"))


def test_a_linker_that_looks_elsewhere_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would refuse the model's library, too."""
    monkeypatch.setattr(_cache_lines, "VALUE", [":not_what_was_made.o"])
    with _cache_lines.weights("cpu", tmp_path) as options:
        assert options == {}


def test_a_compiled_model_has_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    where = context(tmp_path, torch.nn.Linear(64, 64), torch.randn(2, 64))
    program = _program.capture(where)
    package = aoti.build(where, program, tmp_path / "model.pt2", {"freezing": True})
    for number, path in enumerate((package, aoti._beside(package))):
        with zipfile.ZipFile(path) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".so")]
            library = tmp_path / f"{number}.so"
            library.write_bytes(archive.read(name))
        assert mallocs(library) == []
    call = aoti.opened(torch, package, program.signature, "cpu", program.classes)
    for batch in (*where.inputs, (torch.randn(5, 64),)):
        torch.testing.assert_close(call(*batch), where.model(*batch))
