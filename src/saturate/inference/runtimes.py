"""How a module is executed: as it is, compiled by inductor, or replayed as CUDA graphs.

A technique makes the callable in the candidate's process; `formats.exported` makes it again from the same settings when
the artifact is loaded. Settings are plain data: {"kind": "eager" | "compile" | "cuda-graphs", ...}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

EAGER: dict[str, Any] = {"kind": "eager"}

RECORDING = ("max-autotune", "reduce-overhead")     # record CUDA graphs
MODES = ("default", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead")

#: CUDA graphs kept for as many input shapes; each holds its own buffers.
MOST_GRAPHS = 8


def executed(torch: Any, module: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
    """`module` executed as `settings` say. Raises ValueError for settings that are none."""
    kind = settings.get("kind")
    if kind == "eager":
        return module
    if kind == "compile":
        return compiled(torch, module, mode=settings["mode"], dynamic=settings["dynamic"], freezing=settings["freezing"])
    if kind == "cuda-graphs":
        return CudaGraphs(torch, module)
    raise ValueError(f"there is no runtime {kind!r}")


def compiled(torch: Any, module: Callable[..., Any], *, mode: str, dynamic: bool, freezing: bool) -> Callable[..., Any]:
    """`torch.compile` of the module. `freezing` folds the weights into the program; without `dynamic` the first shape gets kernels
    of its own, and a second one makes the sizes open."""
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, not one of {', '.join(MODES)}")
    import torch._inductor.config as inductor

    def run(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    # A function of its own: `torch.compile(module)` captures nothing where the root is one of torch's own classes.
    program = torch.compile(run, mode=mode, dynamic=True if dynamic else None)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), _freezing(inductor, bool(freezing)):      # freezing needs no_grad, and nobody trains this
            return program(*args, **kwargs)

    return _kept(torch, call) if mode in RECORDING else call


@contextmanager
def _freezing(inductor: Any, wanted: bool) -> Iterator[None]:
    """Inductor's switch for the length of a call, which compiles where it meets new shapes: what else this process compiles keeps its
    own. It is read while the model is traced, too, which options of `torch.compile` do not reach."""
    before = inductor.freezing
    if before == wanted:        # setting it takes microseconds
        yield
        return
    inductor.freezing = wanted
    try:
        yield
    finally:
        inductor.freezing = before


def _kept(torch: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, whose outputs on a GPU are copied: the next call writes where they lie, and reading them after that raises."""
    from torch.utils._pytree import tree_map_only

    def copying(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()      # of the calls before, nothing in a graph's memory is in use
        with torch.no_grad():
            return tree_map_only(torch.Tensor, lambda tensor: tensor.clone() if tensor.is_cuda else tensor, call(*args, **kwargs))

    return copying


class CudaGraphs:
    """A module's kernels recorded once for each shape of its inputs, and replayed: no launch costs anything any more.

    Inputs are copied into the recorded buffers, outputs are copied out of them, because the next call overwrites both.
    """

    def __init__(self, torch: Any, module: Callable[..., Any]):
        self._torch, self._module = torch, module
        self.recorded: dict[Any, tuple[Any, list[Any], Any, list[Any]]] = {}

    def __call__(self, *args: Any) -> Any:
        from saturate.inference import structure

        torch = self._torch
        description, tensors = structure.flatten(torch, args, distinct=True)
        key = repr(description), tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key not in self.recorded:
            if len(self.recorded) >= MOST_GRAPHS:
                return self._module(*args)
            self.recorded[key] = self._record(description, tensors)
        graph, inputs, outputs, produced = self.recorded[key]
        for held, given in zip(inputs, tensors):
            held.copy_(given, non_blocking=True)
        graph.replay()
        return structure.rebuild(outputs, [tensor.clone() for tensor in produced])

    def _record(self, description: Any, tensors: list[Any]) -> tuple[Any, list[Any], Any, list[Any]]:
        from saturate.inference import structure

        torch = self._torch
        with torch.inference_mode(False):       # what is made in inference mode cannot be written to outside of it
            inputs = [tensor.detach().clone() for tensor in tensors]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(aside):     # libraries choose kernels and take memory before recording
            for _ in range(3):
                self._module(*structure.rebuild(description, inputs))
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            result = self._module(*structure.rebuild(description, inputs))
        outputs, produced = structure.flatten(torch, result)
        return graph, inputs, outputs, produced
