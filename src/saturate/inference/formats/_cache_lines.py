"""Weights of a library that AOTInductor compiles for a CPU lie on cache lines.

A library keeps all of its weights in one block of memory, each at a multiple of 64 bytes from the block's beginning. But it asks
malloc for that block (torch 2.13, aoti_runtime/model_base.h: `RAII_cpuMalloc`), which gives multiples of 16, so that each load of 64 bytes
touches two lines: an int8 BERT-base on a CPU with AMX was 1.17 times as fast without that (`bench/cache_lines.py`). So a malloc of their own is linked into these
libraries. Nobody else calls it, and free takes back what it gives.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Hidden: otherwise the loader would find libc's first. That takes -fno-builtin.
SOURCE = """\
#include <stddef.h>
extern "C" int posix_memalign(void **, size_t, size_t) noexcept;
extern "C" __attribute__((visibility("hidden"))) void *malloc(size_t size) noexcept {
    void *block;
    return posix_memalign(&block, 64, size) ? nullptr : block;
}
"""

OBJECT = "saturate_malloc.o"

#: How it is compiled; the compiler goes before, the object's path after it.
FLAGS = ("-x", "c++", "-O2", "-fPIC", "-fno-builtin", "-c", "-", "-o")

#: inductor's option whose names the linker gets with -l; a colon says that it is the name of a file.
OPTION, VALUE = "aot_inductor.custom_op_libs", [f":{OBJECT}"]


@contextlib.contextmanager
def weights(device: str, folder: Path) -> Iterator[dict[str, Any]]:
    """inductor's options for it, to compile with inside of this context; the object lies in `folder`. Empty for a GPU, and where the
    compiler does not link it: libraries are as torch makes them then."""
    from torch._inductor import config

    if device != "cpu" or sys.platform != "linux" or os.pathsep in str(folder) or not hasattr(config.aot_inductor, "custom_op_libs"):
        yield {}
        return
    before = os.environ.get("LIBRARY_PATH")
    os.environ["LIBRARY_PATH"] = os.pathsep.join([str(folder.resolve()), *filter(None, [before])])      # where compilers let the linker look, too
    try:
        yield {OPTION: [*(config.aot_inductor.custom_op_libs or []), *VALUE]} if _made(folder) else {}
    finally:
        if before is None:
            del os.environ["LIBRARY_PATH"]
        else:
            os.environ["LIBRARY_PATH"] = before


def _made(folder: Path) -> bool:
    """Whether torch's compiler makes the object, and links what is named that way."""
    from torch._inductor import cpp_builder

    probe = folder / "saturate_malloc.so"
    try:
        command = cpp_builder.get_cpp_compiler().split()
        subprocess.run([*command, *FLAGS, str(folder / OBJECT)], input=SOURCE, text=True, check=True, capture_output=True)
        subprocess.run([*command, "-shared", *(f"-l{name}" for name in VALUE), "-o", str(probe)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError, RuntimeError):      # a slower library serves as well; if nothing compiles, the model's own says why
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


#: The same, as lines for the user, before a model is compiled with `VALUE`.
CODE = f"""\
import os, subprocess, tempfile
folder = tempfile.mkdtemp()         # torch's libraries keep weights across cache lines, unless malloc gives them whole ones
source = '''
{SOURCE}'''
subprocess.run(["g++", *"{' '.join(FLAGS)}".split(), f"{{folder}}/{OBJECT}"], input=source, text=True, check=True)
os.environ["LIBRARY_PATH"] = folder
"""
