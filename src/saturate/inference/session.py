"""Switches of a process that a candidate was measured with, kept beside its program so that loading sets them again.

They are torch's own and hold for the whole process; a user who does not want that loads the artifact in a process of its
own. `of_process` reads those that the user's process has set for models on a GPU: every process of a search starts with
them, so that candidates race the model as the user runs it. `switch` sets one and remembers it, `switches` is what goes into
`Entry.settings["session"]`, `restore` sets them again. Values are texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from saturate.inference.techniques._api import Context, NotApplied
from saturate.records.inference import ModelFacts

_NOTE = "session: "

#: Keys of torch.backends.cuda by attention implementation; the names hold for the CPU's implementations as well.
ATTENTION = {"flash": "enable_flash_sdp", "efficient": "enable_mem_efficient_sdp", "cudnn": "enable_cudnn_sdp",
             "math": "enable_math_sdp"}


#: What the user's process may have chosen for the attention of a model, by implementation: the getters of `ATTENTION`'s switches.
_ATTENTION_ENABLED = {"flash": "flash_sdp_enabled", "efficient": "mem_efficient_sdp_enabled", "cudnn": "cudnn_sdp_enabled", "math": "math_sdp_enabled"}

#: Values of torch's enumeration of attention implementations (`SDPBackend`), of which its order of preference is a list.
_SDP_NUMBERS = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3}

#: Of torch.backends.cudnn: whether it times its convolutions to choose among them, and whether sums keep their order.
_CUDNN = {"cudnn_benchmark": "benchmark", "cudnn_deterministic": "deterministic"}

#: Operators of cuDNN, by torch's names, that have a precision of their own since torch 2.9.
_CUDNN_OPERATORS = ("conv", "rnn")


def float32_products(torch: Any) -> str:
    """The precision of float32 products on a GPU: "highest", "high" or "medium". Kernels follow torch's newer switch
    (`fp32_precision`, since 2.9), which the older one sets too; where it was set by itself, torch may refuse to read the older."""
    try:
        older = str(torch.get_float32_matmul_precision())
    except RuntimeError:
        older = "high"
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return older if newer in (None, "tf32") else "highest"


def shorter_on_cpu(torch: Any) -> bool:
    """Whether a CPU may compute float32 products of shorter numbers."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:        # as in `float32_products`
        return torch.backends.mkldnn.matmul.fp32_precision not in ("none", "ieee")


def _cudnn_tf32(torch: Any) -> str:
    """Which operators of cuDNN may round their inputs to TensorFloat-32."""
    cudnn = torch.backends.cudnn
    if not hasattr(cudnn, "conv"):
        return " ".join(_CUDNN_OPERATORS) if cudnn.allow_tf32 else ""
    return " ".join(name for name in _CUDNN_OPERATORS if getattr(cudnn, name).fp32_precision == "tf32")


def of_process(torch: Any) -> dict[str, str]:
    """What this process has set for all models on a GPU that changes how fast they are, or how their numbers are rounded."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    found = {"products": float32_products(torch), "cudnn_tf32": _cudnn_tf32(torch),
             **{name: getattr(cudnn, attribute) for name, attribute in _CUDNN.items()},
             **{f"{name}_attention": getattr(cuda, getter)() for name, getter in _ATTENTION_ENABLED.items() if hasattr(cuda, getter)}}
    return {name: str(value) for name, value in found.items()}


def rounds_to_tf32(found: Mapping[str, str], facts: ModelFacts) -> bool:
    """Whether a process with the switches `found` computes products of the model's float32 numbers in TensorFloat-32."""
    if facts.device != "cuda" or facts.capability is None or tuple(facts.capability) < (8, 0):
        return False
    used = {"conv": facts.convolutions, "rnn": facts.recurrents}
    return found.get("products", "highest") != "highest" or any(used[name] for name in found.get("cudnn_tf32", "").split())


def _truth(value: Any) -> bool:
    if str(value) not in ("True", "False"):
        raise ValueError(f"a switch is {value!r}, neither True nor False")
    return str(value) == "True"


def _precision(torch: Any, value: Any) -> None:
    if float32_products(torch) != value:        # by the older switch: inductor asks for it, and must be answered
        torch.set_float32_matmul_precision(str(value))


def _cudnn_precision(torch: Any, value: Any) -> None:
    allowed = _operators(value)
    if _cudnn_tf32(torch).split() == allowed:
        return
    if len(allowed) in (0, len(_CUDNN_OPERATORS)):      # by the older switch, which can be read after that
        torch.backends.cudnn.allow_tf32 = bool(allowed)
        return
    for name in _CUDNN_OPERATORS:
        getattr(torch.backends.cudnn, name).fp32_precision = "tf32" if name in allowed else "ieee"


def _operators(value: Any) -> list[str]:
    if not set(found := str(value).split()) <= set(_CUDNN_OPERATORS):
        raise ValueError(f"operators of cuDNN are {' and '.join(_CUDNN_OPERATORS)}, not {value!r}")
    return found


def _cudnn_flag(attribute: str) -> Callable[[Any, Any], None]:
    return lambda torch, value: setattr(torch.backends.cudnn, attribute, _truth(value))


def _attention_flag(name: str) -> Callable[[Any, Any], None]:
    def set_(torch: Any, value: Any) -> None:
        if hasattr(torch.backends.cuda, ATTENTION[name]):
            getattr(torch.backends.cuda, ATTENTION[name])(_truth(value))

    return set_


def _threads(torch: Any, value: Any) -> None:
    torch.set_num_threads(int(value))


def _attention(torch: Any, value: Any) -> None:
    """One implementation, and the plain one for the calls that it does not support. torch's own order may have the plain one before
    cuDNN's, which would never run: so the chosen one comes first (torch 2.6 and later)."""
    if value not in ATTENTION:
        raise ValueError(f"there is no attention {value!r}")
    for name, setter in ATTENTION.items():
        if hasattr(torch.backends.cuda, setter):        # cuDNN's came with torch 2.5
            getattr(torch.backends.cuda, setter)(name in (value, "math"))
    if takes_attention_order(torch):
        number = _SDP_NUMBERS[str(value)]
        torch._C._set_sdp_priority_order(sorted(torch._C._get_sdp_priority_order(), key=lambda one: one != number))


def takes_attention_order(torch: Any) -> bool:
    """Whether this torch can be told which attention it is to look for first."""
    return hasattr(torch._C, "_set_sdp_priority_order")


def _products(torch: Any, value: Any) -> None:
    torch.set_float32_matmul_precision(str(value))
    torch.backends.cudnn.allow_tf32 = value != "highest"


#: In the order in which they are set: first what the user's process has, then what techniques make of it.
_SETTERS: dict[str, Callable[[Any, Any], None]] = {
    "products": _precision, "cudnn_tf32": _cudnn_precision,
    **{name: _cudnn_flag(attribute) for name, attribute in _CUDNN.items()},
    **{f"{name}_attention": _attention_flag(name) for name in ATTENTION},
    "threads": _threads, "attention": _attention, "float32_products": _products,
}


def switch(context: Context, name: str, value: Any) -> None:
    """Set one now, and remember it for the artifact. Raises NotApplied where torch refuses the value."""
    try:
        _SETTERS[name](context.torch, value)
    except (RuntimeError, ValueError) as error:
        raise NotApplied(f"torch refuses {name} = {value}: {error}") from error
    context.notes[_NOTE + name] = str(value)


def remember(context: Context, found: Mapping[str, str]) -> None:
    """What the candidate's process was started with, for the artifact."""
    context.notes.update({_NOTE + name: value for name, value in found.items()})


def switches(context: Context) -> dict[str, str]:
    """What was switched, and what the process was started with, for `Entry.settings`."""
    return {key.removeprefix(_NOTE): value for key, value in context.notes.items() if key.startswith(_NOTE)}


def _lines_of_process(found: Mapping[str, Any]) -> list[str]:
    """Statements that set what `of_process` found."""
    statements = [f"torch.set_float32_matmul_precision({str(found['products'])!r})"] if "products" in found else []
    if "cudnn_tf32" in found:
        allowed = _operators(found["cudnn_tf32"])
        statements += ([f"torch.backends.cudnn.allow_tf32 = {bool(allowed)}"] if len(allowed) in (0, len(_CUDNN_OPERATORS)) else
                       [f"torch.backends.cudnn.{name}.fp32_precision = {'tf32' if name in allowed else 'ieee'!r}" for name in _CUDNN_OPERATORS])
    statements += [f"torch.backends.cudnn.{attribute} = {_truth(found[name])}" for name, attribute in _CUDNN.items() if name in found]
    return statements + [f"torch.backends.cuda.{setter}({_truth(found[f'{name}_attention'])})" for name, setter in ATTENTION.items()
                         if f"{name}_attention" in found]


def lines(found: Mapping[str, Any], threads: int) -> str:
    """What `restore` does, and the number of threads, as one line of Python."""
    statements = [f"torch.set_num_threads({int(found.get('threads', threads))})", *_lines_of_process(found)]
    if "float32_products" in found:
        precision = str(found["float32_products"])
        statements += [f"torch.set_float32_matmul_precision({precision!r})", f"torch.backends.cudnn.allow_tf32 = {precision != 'highest'}"]
    if "attention" in found:
        statements += attention_lines(found["attention"])
    return "; ".join(statements)


def attention_lines(backend: str) -> list[str]:
    """Statements that have attention computed by a kernel of `ATTENTION`, with the plain one behind it."""
    statements = [f"torch.backends.cuda.{setter}({name in (backend, 'math')})" for name, setter in ATTENTION.items()]
    if backend == "cudnn":       # only that one may come behind the plain one
        order = f"sorted(torch._C._get_sdp_priority_order(), key=lambda one: one != {_SDP_NUMBERS['cudnn']})"
        statements.append(f"torch._C._set_sdp_priority_order({order})")
    return statements


def restore(torch: Any, found: Mapping[str, Any]) -> None:
    """Set what `switches` or `of_process` returned, in another process. Raises ValueError for a switch that does not exist."""
    for name in found:
        if name not in _SETTERS:
            raise ValueError(f"there is no switch {name!r}")
    for name, set_ in _SETTERS.items():
        if name in found:
            set_(torch, found[name])
