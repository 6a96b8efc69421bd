"""The floating-point operations of a step, counted from inside it: matrix products, convolutions, attention and recurrent
nets, forward and backward, by the formulas that a trace is read with (`saturate.trace._matrix_costs`).

torch's own registry of formulas is not used: it ignores groups in the gradient of a convolution's weights, and has no
formula for attention and LSTMs on a CPU, which it counts as nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from saturate.trace._arguments import Arguments, Tensor, Unknown
from saturate.trace._matrix_costs import FORMULAS, NAMESPACES

#: Operators that multiply matrices, by their names. Without a formula for one of them a count is worth nothing.
_PRODUCT = re.compile(r"(?<!sy)(?<!co)mm(?![a-z])|conv(?!ert)|attention|attn|rnn|lstm|gru|linear|matmul|transformer|einsum|"
                      r"(?:multi_|tensor)dot|chain_|::inner$")
#: Not those: they only look like it.
_NO_PRODUCT = re.compile(r"upsample|prepack|unpack|reorder|flatten_weight|fused_(?:lstm|gru)_cell|sdp_choice")
#: Other arithmetic that is no elementwise pass, and rarely much of a step: left out, and named.
_OTHER = re.compile(r"linalg_(?!.*norm|cross|diagonal|check|vecdot)|cdist|_fft_|cholesky|svd|_solve|_spsolve")
#: Why a sum is not known where a mode that counts has not seen everything.
ELSEWHERE = "modules of the model ran in another thread, whose operations are not seen"
#: A count depends on the format of complex numbers only.
_FORMAT, _COMPLEX = "float32", "complex64"


class Called(Arguments):
    """The arguments of a live call, read as those of a recorded one."""

    def __init__(self, torch: Any, function: Any, args: Any, kwargs: Any):
        self._torch = torch
        self._values = [args[place] if place < len(args) else kwargs.get(one.name, one.default_value)
                        for place, one in enumerate(function._schema.arguments)]

    def optional(self, position: int) -> Tensor | None:
        value = self._value(position)
        return self._sizes(value) if isinstance(value, self._torch.Tensor) else None

    def is_list(self, position: int) -> bool:
        return isinstance(self._value(position), (list, tuple))

    def list(self, position: int) -> list[Tensor]:
        return [self._sizes(tensor) for tensor in self._value(position) or ()]

    def integer(self, position: int) -> int:
        return self.integers(position, 1)[0]

    def integers(self, position: int, count: int | None = None) -> tuple[int, ...]:
        value = self._value(position)
        values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        values *= count if count is not None and len(values) == 1 else 1
        if not all(isinstance(one, int) for one in values) or count not in (None, len(values)):
            raise Unknown(f"argument {position} is no list of {count or 'some'} integers")
        return values

    def booleans(self, position: int) -> list[bool]:
        return [bool(one) for one in self.integers(position)]

    def text(self, position: int) -> str:
        return ""           # formats only, which do not matter

    def _value(self, position: int) -> Any:
        return self._values[position] if position < len(self._values) else None

    def _sizes(self, tensor: Any) -> Tensor:
        if not isinstance(tensor, self._torch.Tensor):
            raise Unknown("a list holds no tensors")
        if tensor.is_nested or str(tensor.layout).startswith("torch.sparse"):
            raise Unknown("the sizes of a nested or sparse tensor do not tell its work")
        if not all(isinstance(size, int) for size in tensor.shape):
            raise Unknown("sizes are symbols")
        return Tensor(tuple(tensor.shape), _COMPLEX if tensor.is_complex() else _FORMAT)


def flops_of(torch: Any, function: Any, args: Any, kwargs: Any) -> int:
    """Operations of one call; 0 of what multiplies no matrices. Raises `Unknown`."""
    name = name_of(function)
    formula = FORMULAS.get(name)
    if formula is not None:
        return formula(Called(torch, function, args, kwargs)).flops
    if is_product(name) or _OTHER.search(name) or name.partition("::")[0] not in NAMESPACES:
        raise Unknown("no formula is known")
    return 0


def name_of(function: Any) -> str:
    """ "aten::mm"; of what has no schema (`torch.ops.higher_order`), its namespace and name."""
    schema = getattr(function, "_schema", None)
    return schema.name if schema is not None else f"{getattr(function, 'namespace', 'python')}::{function.__name__}"


def is_product(name: str) -> bool:
    """Whether an operator of this name multiplies matrices, convolves or attends."""
    return bool(_PRODUCT.search(name)) and not _NO_PRODUCT.search(name)


def _plain(torch: Any, value: Any) -> bool:
    """Whether all tensors in it are ordinary ones: others may have kernels of their own for the whole of an operator."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return all(_plain(torch, one) for one in value)
    return not isinstance(value, torch.Tensor) or \
        (type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_nested and value.layout == torch.strided)


def flop_counter(torch: Any, again: Callable[[], bool] = lambda: False) -> Any:
    """A dispatch mode that adds up. `flops` so far; `recomputed`: of them, those of calls for which `again()` holds; `missed`: calls
    of products that could not be counted; `left_out`: operators that may do arithmetic and count as 0, with the reason;
    `unknown`: why the sum is not known, "" where it is."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        supports_higher_order_operators = True

        def __init__(self) -> None:
            super().__init__()
            self.flops = 0
            self.recomputed = 0
            self.missed = 0
            self.off = False            # it may stay on the stack of a thread that does not come back: see `agent.threadbound`
            self.left_out: dict[str, str] = {}

        @property
        def unknown(self) -> str:
            products = {name: why for name, why in self.left_out.items() if is_product(name)}
            return "; ".join(f"{name} could not be counted: {why}" for name, why in products.items())

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if self.off:
                return function(*args, **kwargs)
            try:
                flops = flops_of(torch, function, args, kwargs)
                self.flops += flops
                self.recomputed += flops if again() else 0
            except Exception as error:  # noqa: BLE001 - whatever a formula makes of a call, the user's step goes on
                if torch.is_inference_mode_enabled() and _plain(torch, (args, kwargs)) and hasattr(function, "decompose"):
                    # Operators come whole here that otherwise arrive in parts, which have formulas.
                    with self:
                        out = function.decompose(*args, **kwargs)
                    if out is not NotImplemented:
                        return out
                name = name_of(function)
                self.missed += is_product(name)
                self.left_out.setdefault(name, str(error))
            return function(*args, **kwargs)

    return Counter()
