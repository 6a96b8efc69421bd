"""Whether torch itself can load what its AOTInductor has compiled for the device. On an H200 with torch 2.11+cu130 it could not: the
process ended by SIGSEGV in torch._inductor.aoti_load_package, with nothing of saturate in it."""

from __future__ import annotations

import functools
import subprocess
import sys

PLAIN = """
import tempfile, torch
model, x = torch.nn.Linear(64, 64).cuda().eval(), torch.randn(4, 64, device="cuda")
with torch.no_grad():
    package = torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=tempfile.mkdtemp() + "/plain.pt2")
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), model(x), rtol=1e-3, atol=1e-3)
"""


@functools.cache
def problem() -> str:
    """Why it cannot; "" where it can, or fails with an exception, which is for a test to tell."""
    code = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, timeout=300).returncode
    return f"torch's own program ends by signal {-code} when it loads what AOTInductor compiled" if code < 0 else ""
