"""Memory ran out: was it that, and how what a failed attempt held is given back."""

from __future__ import annotations

import gc
import traceback
from typing import Any

#: What libraries say when an allocation fails. It is a class of errors, not one type and not one text.
_OUT_OF_MEMORY = (
    "out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory", "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED", "CUFFT_ALLOC_FAILED",
)


def out_of_memory(error: BaseException, torch: Any) -> bool:
    """Whether an allocation failed, on whichever device."""
    kinds = (MemoryError, getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError))
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and any(text.lower() in str(error).lower() for text in _OUT_OF_MEMORY))


def without_frames(error: Exception) -> Exception:
    """The error without its traceback, which holds everything that was computed; where it came from is kept as text."""
    places = "".join(traceback.format_tb(error.__traceback__, limit=-4))
    error.add_note(f"saturate: it was first raised at\n{places}".rstrip())
    return error.with_traceback(None)


def free(torch: Any) -> None:
    """Give back what a failed attempt held. Call it where the exception is not alive any more: it holds the frames."""
    gc.collect(1)               # what was just made; a full collection takes seconds in a large program
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
