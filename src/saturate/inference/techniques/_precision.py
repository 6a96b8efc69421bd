"""Running a float32 model in a narrower floating-point format: what bf16 and fp16 share."""

from __future__ import annotations

from typing import Any

from saturate.inference.techniques import _census, _wrap
from saturate.inference.techniques._api import Context, Ineligible, NotApplied, Proof
from saturate.records.inference import ModelFacts

#: Multiplies bfloat16 many times as fast as float32. AVX512-BF16 alone gives 2 at most, and costs conversions.
AMX = "amx_bf16"


def refusal(facts: ModelFacts, name: str) -> Ineligible | None:
    """Why no narrower format can help this model, whatever the device; None when one might."""
    if "float32" not in facts.dtypes and "float64" not in facts.dtypes:
        held = f"its parameters are {', '.join(facts.dtypes)}" if facts.dtypes else "it has no floating-point parameters"
        return Ineligible(f"{held}, {name} is no narrower")
    if not (facts.linears or facts.convolutions or facts.recurrents or facts.attentions):
        return Ineligible("no matrix products or convolutions to speed up")
    return None


def apply(context: Context, dtype: Any, autocast: bool, id: str) -> str:
    """Cast the module, or run it under autocast; notes under `id` what the layers then computed in. One sentence."""
    _check_kept(context)
    if autocast:
        under_autocast(context, dtype)
    else:
        _cast(context, dtype)
    seen, among = _census.count(context, _census.PRODUCTS, lambda tensor: tensor.dtype is dtype)
    short = str(dtype).removeprefix("torch.")
    if not seen:
        raise NotApplied(f"none of the model's {among} products is computed in {short}")
    context.notes[id] = f"{seen} of {among} products are computed in {short}"
    kept = f", {len(context.keep)} modules kept" if context.keep else ""
    return f"{'autocast to' if autocast else 'parameters, buffers and inputs in'} {short}, outputs as before{kept}"


def active(context: Context, id: str) -> Proof:
    """From what `apply` saw in a forward of real inputs."""
    seen = context.notes.get(id, "")
    return Proof(bool(seen), seen or "no product was seen in the narrower format")


def _check_kept(context: Context) -> None:
    names = {name for name, _ in context.model.named_modules()}
    missing = sorted(context.keep - names)
    if missing:
        raise NotApplied(f"the model has no module {missing[0]!r} to keep in the original precision")


def _cast(context: Context, dtype: Any) -> None:
    torch, model = context.torch, context.model
    wide = {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} & {torch.float32, torch.float64}
    original = _format(torch, model) or (torch.float64 if torch.float64 in wide else torch.float32)
    kept = {name: module for name, module in model.named_modules() if name in context.keep}
    formats = {name: found for name, module in kept.items() if (found := _format(torch, module)) is not None}
    spared = {id(tensor) for module in kept.values() for tensor in (*module.parameters(), *module.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in wide and id(tensor) not in spared:
            tensor.data = tensor.data.to(dtype)         # in place: tied weights stay tied
    for name, module in kept.items():
        _wrap.around(module, _borders(torch, {dtype}, formats.get(name, original), dtype))
    _wrap.around(model, _borders(torch, {torch.float32, torch.float64}, dtype, original))


def _format(torch: Any, module: Any) -> Any:
    """The widest format of its parameters, which its answers have; None without any. A buffer may be a number in another format."""
    found = {parameter.dtype for parameter in module.parameters()}
    return next((dtype for dtype in (torch.float64, torch.float32) if dtype in found), None)


def _borders(torch: Any, sources: set[Any], inside: Any, outside: Any) -> _wrap.Around:
    """Floating-point inputs of `sources` become `inside`, outputs of `inside` become `outside`."""

    def wrapper(inner: Any, args: Any, kwargs: Any) -> Any:
        def inward(tensor: Any) -> Any:
            return tensor.to(inside) if tensor.dtype in sources else tensor

        def outward(tensor: Any) -> Any:
            return tensor.to(outside) if tensor.dtype is inside else tensor

        output = inner(*_wrap.mapped(torch, args, inward), **_wrap.mapped(torch, kwargs, inward))
        return _wrap.mapped(torch, output, outward)

    return wrapper


def under_autocast(context: Context, dtype: Any) -> None:
    """The model's forward, but for modules that are to stay as they are, computes in `dtype` what autocast lets; its answers are float32."""
    torch, device = context.torch, context.device

    def within(inner: Any, args: Any, kwargs: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            output = inner(*args, **kwargs)
        return _wrap.mapped(torch, output, lambda tensor: tensor.float() if tensor.dtype is dtype else tensor)

    def without(inner: Any, args: Any, kwargs: Any) -> Any:
        def widen(tensor: Any) -> Any:
            return tensor.float() if tensor.dtype is dtype else tensor

        with torch.autocast(device, enabled=False):
            return inner(*_wrap.mapped(torch, args, widen), **_wrap.mapped(torch, kwargs, widen))

    for name, module in context.model.named_modules():
        if name in context.keep:
            _wrap.around(module, without)
    _wrap.around(context.model, within)


def as_code(dtype: str, autocast: bool = False) -> str:
    """Lines that put another number format inside of `model`, with inputs and answers as they are. Both may be nested, or hold None."""
    return _AUTOCAST_CODE.format(dtype) if autocast else _CAST_CODE.format(dtype)


# Not eval(): parts of the model may be in another mode on purpose.
_CAST = f"""\
{_wrap.MAPPED_CODE}\
def cast(tree, formats, dtype):
    return mapped(lambda x: x.to(dtype) if x.dtype in formats else x, tree)
"""

_AUTOCAST_CODE = _CAST + """\
class Autocast(torch.nn.Module):      # products in {0}, answers as before
    def __init__(self, model):
        super().__init__()
        self.model, self.training = model, False
        self.device = (*model.parameters(), *model.buffers())[0].device.type
    def forward(self, *inputs):
        with torch.autocast(self.device, dtype=torch.{0}):
            output = self.model(*inputs)
        return cast(output, (torch.{0},), torch.float32)
model = Autocast(model)"""

_CAST_CODE = _CAST + """\
class Cast(torch.nn.Module):      # {0} inside, answers as before
    wide = (torch.float64, torch.float32)
    def __init__(self, model):
        super().__init__()
        self.model, self.training = model, False
        held = [x.dtype for x in model.parameters()]
        self.outside = next((dtype for dtype in self.wide if dtype in held), torch.float32)
        for x in (*model.parameters(), *model.buffers()):
            x.data = cast(x.data, self.wide, torch.{0})
    def forward(self, *inputs):
        return cast(self.model(*cast(inputs, self.wide, torch.{0})), (torch.{0},), self.outside)
model = Cast(model)"""
