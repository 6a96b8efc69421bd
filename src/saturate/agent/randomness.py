"""Randomness in verification runs: seeds where the script sets none, and alignment of what techniques may reorder.

Aligned runs answer: "apart from drawing other random numbers, is it the same training?" Dropout is off, compiled code draws
from torch's generators in the order of eager code, and each batch of a map-style dataset is drawn under its own seed, whichever
process draws it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import sys
import types
import zlib
from typing import Any

from saturate.importwatch import once_imported

_COMPILER_SETTINGS = "torch._inductor.config"


def seed_standard_library(seed: int, offset: int = 0) -> None:
    if offset:
        _shift(random, "seed", offset)
    random.seed(seed)


def seed_numpy(numpy: Any, seed: int, offset: int = 0) -> None:
    """The global generator, and each that is made without a seed, by its number: the system would seed it otherwise in every run."""
    make, made = numpy.random.default_rng, itertools.count(seed)

    @functools.wraps(make)
    def default_rng(seed: Any = None) -> Any:
        if seed is None:
            seed = next(made)
        return make(seed + offset if isinstance(seed, int) else seed)

    numpy.random.default_rng = default_rng
    if offset:
        _shift(numpy.random, "seed", offset)
    numpy.random.seed(seed % 2**32)


def seed_torch(torch: Any, seed: int, offset: int = 0, deterministic: bool = True) -> None:
    """Seed torch right after its import. A script that seeds itself does so later, and keeps its own seed, plus `offset`
    (other seeds of the same training, for an envelope). `deterministic`: choose algorithms that give the same bits, which may be
    slower and need more memory."""
    if offset:
        _shift(torch, "manual_seed", offset)
        torch.random.manual_seed = torch.manual_seed        # the same by another name
    torch.manual_seed(seed)
    # Not torch.cuda.is_available(): that starts the driver before the script could choose devices, or fork.
    if torch.version.cuda or torch.version.hip:
        # Read by cuBLAS when it is first used; without it the same product need not give the same bits.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)


def choose_no_algorithm_by_time(torch: Any) -> None:
    """With `cudnn.benchmark` each process takes the algorithm that was fastest in it: two runs of one script need not give the same
    bits, in deterministic mode neither."""
    if (torch.version.cuda or torch.version.hip) and torch.backends.cudnn.benchmark:
        torch.backends.cudnn.benchmark = False


def _shift(owner: Any, name: str, offset: int) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def shifted(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(seed + offset if isinstance(seed, int) else seed, *args, **kwargs)

    setattr(owner, name, shifted)


def align(torch: Any, seed: int) -> None:
    """Turn dropout off, let compiled code draw as eager code does, and seed every batch of samples by its first index."""
    # The compiler's cache of joint graphs names torch's functions and does not look into them: an aligned run would
    # get the graph of an ordinary one, with its dropout. Read when the compiler is imported, so later than here.
    os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
    once_imported(_COMPILER_SETTINGS, _draw_as_eager)
    functional = torch.nn.functional
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(functional, name, _never_drops(torch, name))
    attention = functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def without_dropout(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    with contextlib.suppress(AttributeError, ImportError):      # to TorchScript it stays the operator, which may drop; eager code calls this
        torch.jit._builtins._register_builtin(without_dropout, "aten::scaled_dot_product_attention")
    functional.scaled_dot_product_attention = without_dropout
    _no_recurrent_dropout(torch)
    _seed_each_batch(torch, seed)


def _draw_as_eager(settings: Any) -> None:
    """Inductor draws from a generator of its own unless told not to: stochastic depth and noise are no dropout, and would be
    other numbers in compiled code. The setting is part of the keys of inductor's cache."""
    if not hasattr(settings, "fallback_random"):
        return
    settings.fallback_random = True
    # In newer versions of torch what is set counts in the thread that sets it only; the default counts in all of them.
    entry = getattr(settings, "_config", {}).get("fallback_random")
    if hasattr(entry, "default"):
        entry.default = True


def _never_drops(torch: Any, name: str) -> Any:
    """A dropout that drops nothing. A script may have TorchScript compile what calls it: that reads the source, by the names of the module
    that a function is of, so this one has the module of torch's own, and no `__wrapped__`."""
    functional = torch.nn.functional
    function = types.FunctionType(_identity.__code__, vars(functional), name, _identity.__defaults__)
    function.__annotations__ = {"input": torch.Tensor, "p": float, "training": bool, "inplace": bool, "return": torch.Tensor}
    function.__module__, function.__qualname__, function.__doc__ = functional.__name__, name, getattr(functional, name).__doc__
    return function


def _identity(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:     # noqa: F821 - of torch.nn.functional
    return input


def _no_recurrent_dropout(torch: Any) -> None:
    original = torch.nn.RNNBase.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.dropout = 0.0

    torch.nn.RNNBase.__init__ = init


def _seed_each_batch(torch: Any, seed: int) -> None:
    """Wrap the fetcher that runs wherever samples are made: in this process, or in a worker forked from it."""
    from torch.utils.data._utils import fetch

    original = fetch._MapDatasetFetcher.fetch

    @functools.wraps(original)
    def fetch_seeded(self: Any, indices: Any) -> Any:
        states = torch.get_rng_state(), random.getstate()
        numpy = sys.modules.get("numpy")
        numpy_state = numpy.random.get_state() if numpy else None
        first = indices[0] if isinstance(indices, (list, tuple)) and indices else indices
        key = zlib.crc32(f"{seed}:{first!r}".encode())
        # Of the CPU alone, whose state is put back: torch.manual_seed sets the devices' generators, too, in the process that trains
        # where there are no workers, and not where there are.
        torch.default_generator.manual_seed(key)
        random.seed(key)
        if numpy:
            numpy.random.seed(key)
        try:
            return original(self, indices)
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            if numpy:
                numpy.random.set_state(numpy_state)

    fetch._MapDatasetFetcher.fetch = fetch_seeded
