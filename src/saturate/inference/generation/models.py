"""How a causal language model is called: one interface, `Decoder`, over three kinds of models.

huggingface   takes input_ids, position_ids, attention_mask and past_key_values; recognised by these names
cached        forward(ids, cache) -> logits; each attention layer calls `cache.update(keys, values, layer)`,
              attends under `cache.mask`, and takes positions from `cache.positions` (see cache.py)
recompute     forward(ids) -> logits of a causal model without a cache: every step computes the whole sequence again

Logits are [rows, count, vocabulary], or `.logits`, "logits" or the first member of what a model returns. A model that
gives those of the last token alone unless it gets targets (nanoGPT's way) gets them. What a model
cannot do is refused by name; that the way it is called is right for it is not assumed but proved, see proof.py.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from saturate import notices
from saturate.errors import UsageError
from saturate.inference.generation.cache import StaticCache
from saturate.inference.wrapped import unwrapped

#: Names under which models tell the longest sequence they take; Hugging Face's are looked for in `model.config`.
_CONTEXT = ("max_position_embeddings", "n_positions", "context", "context_length", "max_seq_len", "block_size")

#: A forward of at most so many tokens is a step of decoding, which a compiled decoder compiles. Others are prefills.
STEP_TOKENS = 16

_FIXED_SLOTS = 64  # capacity of a compiled decoder, in steps of this: a compiled forward is reused for like batches

#: Shapes that one compiled decoder may meet: numbers of rows, of tokens and of slots. dynamo's own limit is 8 by default,
#: and drafts alone feed nine numbers of tokens.
_MOST_SHAPES = 256


def slots_of(capacity: int) -> int:
    """Of a compiled decoder's cache, for sequences of at most `capacity` tokens."""
    return -(-capacity // _FIXED_SLOTS) * _FIXED_SLOTS


class Decoder(Protocol):
    """One model on one batch. Rows may be at different positions."""

    name: str
    device: Any
    dtype: Any                          # of its parameters
    context: int | None                 # the longest sequence; None: not known
    context_words: str                  # why it is no longer, in brackets; "": the model says so
    window: int | None                  # of its layers that see only the last so many tokens; None: all see all

    def start(self, rows: int, capacity: int) -> None:
        """A new batch; sequences will have at most `capacity` tokens."""

    def feed(self, ids: Any, starts: list[int], count: int, keep: int | None = None) -> Any:
        """Logits [rows, count, vocabulary] of the tokens ids[i, starts[i]:starts[i] + count]; with `keep`, it may be
        those of the last `keep` alone. What row i holds from starts[i] on is forgotten first, so going back is
        feeding again."""


def without_gradients(torch: Any, inference: bool) -> Any:
    """A block that records none. inference: torch's faster mode, of a process in which nobody trains: what a model keeps from call
    to call of its tensors cannot be trained with."""
    return torch.inference_mode() if inference else torch.no_grad()


def window(torch: Any, ids: Any, starts: list[int], count: int) -> Any:
    """ids[i, starts[i]:starts[i] + count] of every row, [rows, count]."""
    if min(starts) == max(starts):
        return ids[:, starts[0]:starts[0] + count]
    first = torch.tensor(starts, device=ids.device).unsqueeze(1)
    return ids.gather(1, first + torch.arange(count, device=ids.device))


class CachedDecoder:
    """A model that keeps keys and values in a `StaticCache`. call(ids, cache, keep) -> what the model returns."""

    def __init__(
        self,
        torch: Any,
        model: Any,
        call: Callable[[Any, StaticCache, int | None], Any],
        context: int | None,
        compile_mode: str | None = None,
        window: int | None = None,
        context_words: str = "",
    ):
        self.name, self.context, self.context_words, self.window = type(model).__name__, context, context_words, window
        self.device, self.dtype = device_of(model), dtype_of(torch, model)
        self._torch, self._call = torch, call
        self._cache: StaticCache | None = None
        self._compiled = None if compile_mode is None else _compiled(torch, call, compile_mode)
        self._met: set[tuple[Any, ...]] = set()         # shapes that were compiled

    def start(self, rows: int, capacity: int) -> None:
        window = self.window if self.window is not None and capacity > self.window else None
        if self._compiled is not None:
            capacity = slots_of(capacity)
        self._cache = StaticCache(self._torch, capacity, fixed=self._compiled is not None, window=window)

    def feed(self, ids: Any, starts: list[int], count: int, keep: int | None = None) -> Any:
        assert self._cache is not None
        self._cache.begin(starts, count, ids.device)
        tokens = window(self._torch, ids, starts, count)
        if self._compiled is None or count > STEP_TOKENS or not self._cache.allocated or not self._compiles(tokens.shape):
            return logits_of(self._call(tokens, self._cache, keep))
        if ids.is_cuda:
            self._torch.compiler.cudagraph_mark_step_begin()
        return logits_of(
            self._compiled(tokens.contiguous(), self._cache, None)
        ).clone()  # a CUDA graph's output is overwritten

    def _compiles(self, shape: Any) -> bool:
        """Whether there is a compiled step for this shape, or may be one more."""
        assert self._cache is not None
        key = (*shape, self._cache.capacity, self._cache.near is not None)
        if len(self._met) < _MOST_SHAPES:
            self._met.add(key)
        if key not in self._met:
            notices.tell_once(f"saturate: {self.name} met more than {_MOST_SHAPES} shapes: steps of others are not compiled\n")
        return key in self._met


class RecomputeDecoder:
    """A causal model without a cache. call(ids) -> what the model returns."""

    def __init__(self, torch: Any, model: Any, call: Callable[[Any], Any], context: int | None):
        self.name, self.context, self.context_words = type(model).__name__, context, ""
        self.window = None      # if it has one, it applies it itself
        self.device, self.dtype = device_of(model), dtype_of(torch, model)
        self._torch, self._call = torch, call

    def start(self, rows: int, capacity: int) -> None:
        """Nothing is kept: the tokens are the state."""

    def feed(self, ids: Any, starts: list[int], count: int, keep: int | None = None) -> Any:
        ids = ids[:, :max(starts) + count].contiguous()         # models flatten it by view
        if count == 1 and min(starts) == max(starts):
            return logits_of(self._call(ids))[:, -1:]
        logits = whole(self._call, ids)
        if min(starts) == max(starts):
            return logits[:, starts[0]:starts[0] + count]
        rows = self._torch.arange(len(starts), device=ids.device).unsqueeze(1)
        first = self._torch.tensor(starts, device=ids.device).unsqueeze(1)
        return logits[rows, first + self._torch.arange(count, device=ids.device)]


def whole(call: Callable[..., Any], ids: Any) -> Any:
    """The logits of every token from call(ids). Raises UsageError for a model that only gives the last one's."""
    logits = logits_of(call(ids))
    if logits.shape[1] == ids.shape[1]:
        return logits
    named = [name for name in ("targets", "labels") if name in _parameters(call)]
    found = logits_of(call(ids, **{named[0]: ids})) if named and logits.shape[1] == 1 else logits
    if found.shape[1] != ids.shape[1]:
        raise UsageError(
            f"{type(call).__name__} returned the logits of {found.shape[1]} of {ids.shape[1]} tokens",
            cause="which drafts stay, and whether the model is called rightly, takes the logits of every token",
            remedy="return all of them, at least when `targets` are given",
        )
    return found


Adapter = str | Callable[[Any, Any, Any], Any] | None


def decoder(torch: Any, model: Any, adapter: Adapter = None, compile_mode: str | None = None) -> Decoder:
    """The decoder for a model. adapter: "huggingface", "cached" or "recompute", or a function (model, ids, cache) ->
    logits that does what a cached model's forward does; None: by the names of the parameters of its forward. Raises
    UsageError for a model that cannot be called in any of these ways, with what to do."""
    model = unwrapped(torch, model)
    if not callable(model):
        raise UsageError(f"{type(model).__name__} is not a model", remedy="pass a torch.nn.Module in evaluation mode")
    if str(device_of(model)) == "meta":
        raise UsageError(f"{type(model).__name__} is on the meta device, without weights", remedy="load its weights, and move it to a device")
    kind = adapter if isinstance(adapter, str) else "function" if adapter is not None else _kind(model)
    context, window = context_of(model), window_of(model)
    if adapter != "recompute":          # that the whole text again needs no state is proved where it was asked for
        _refuse_stateful(model)
    if kind != "recompute":
        _refuse_other_masks(model)
    if kind == "huggingface":
        _refuse_huggingface(model)
        return CachedDecoder(torch, model, _huggingface(torch, model), context, compile_mode, window)
    if kind in ("cached", "function"):
        words = ""
        if window is not None and (context is None or window < context):    # its layers attend under one mask, of all
            context, words = window, f" (behind its sliding window of {window} tokens its layers would need another mask)"
        call = model if kind == "cached" else functools.partial(adapter, model)
        return CachedDecoder(torch, model, lambda ids, cache, keep: call(ids, cache), context, compile_mode,
                             context_words=words)
    if kind == "recompute":
        if compile_mode is not None:
            raise UsageError(f"{type(model).__name__} has no cache, so its steps have no fixed shape to compile",
                             remedy="give it a forward(ids, cache), see saturate.inference.generation.models")
        return RecomputeDecoder(torch, model, model, context)
    raise UsageError(
        f"no such adapter: {adapter!r}",
        remedy="huggingface, cached, recompute, or a function (model, ids, cache) -> logits",
    )


def plain_forward(torch: Any, model: Any, adapter: Adapter = None) -> Callable[[Any], Any]:
    """ids [1, n] -> logits [1, n, vocabulary], by the simplest way to call the model: in one piece, from nothing."""
    model = unwrapped(torch, model)
    kind = adapter if isinstance(adapter, str) else "function" if adapter is not None else _kind(model)
    if kind == "huggingface":
        return lambda ids: logits_of(model(input_ids=ids, use_cache=False))
    if kind == "recompute":
        return lambda ids: whole(model, ids)

    def forward(ids: Any) -> Any:
        fresh = decoder(torch, model, adapter)
        fresh.start(1, ids.shape[1])
        return fresh.feed(ids, [0], ids.shape[1])

    return forward


def logits_of(output: Any) -> Any:
    """The logits in what a model returned. Raises UsageError where there are none."""
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("logits")
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    if found is None:
        found = output
    if getattr(found, "ndim", None) != 3:
        raise UsageError(
            f"the model returned {type(output).__name__}, which holds no logits [rows, tokens, vocabulary]",
            remedy="return the logits, a tuple that begins with them, or an object with `.logits`",
        )
    return found


def context_of(model: Any) -> int | None:
    """The longest sequence that a model says it takes."""
    config = text_config(model)
    named = [getattr(owner, name, None) for owner in (config, model) if owner is not None for name in _CONTEXT]
    return min((value for value in named if isinstance(value, int) and not isinstance(value, bool) and value > 0), default=None)


def window_of(model: Any) -> int | None:
    """How many tokens the layers of a model see that do not see all; None where all do."""
    config = text_config(model)
    found = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return found if isinstance(found, int) and not isinstance(found, bool) and _slides(config) else None


def device_of(model: Any) -> Any:
    """Where the model's first parameter lies; the CPU for one without parameters."""
    parameter = next(model.parameters(), None) if hasattr(model, "parameters") else None
    return "cpu" if parameter is None else parameter.device


def dtype_of(torch: Any, model: Any) -> Any:
    """Of the first floating-point parameter; float32 for a model without one."""
    parameters = model.parameters() if hasattr(model, "parameters") else ()
    return next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)


def text_config(model: Any) -> Any:
    """The configuration of the language model in it; None for a model without one."""
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _slides(config: Any) -> bool:
    layers = getattr(config, "layer_types", None)
    return layers is None or any("sliding" in layer for layer in layers)


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """Of a model's forward, by name."""
    try:
        return inspect.signature(getattr(model, "forward", model)).parameters
    except (TypeError, ValueError) as error:
        raise UsageError(f"the signature of {type(model).__name__} cannot be read: {error}",
                         remedy="pass adapter=, a function (model, ids, cache) -> logits") from error


def _kind(model: Any) -> str:
    names = _parameters(model)
    if {"input_ids", "past_key_values"} <= names.keys():
        return "huggingface"
    if "cache" in names:
        return "cached"
    hidden = all(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in names.values())
    if hidden or hasattr(model, "get_base_model"):      # the latter: adapters of Hugging Face's peft, around a model with a cache
        raise UsageError(
            f"the forward of {type(model).__name__} does not say what it takes",
            cause="it hands its arguments on, so nobody knows whether the model inside of it has a cache",
            remedy='pass the model inside of it (of peft: model.get_base_model()), or adapter=, a function (model, ids, cache) -> logits, '
                   'or "recompute", which uses no cache',
        )
    return "recompute"


def _refuse_stateful(model: Any) -> None:
    """Raise UsageError for a model that says, in Hugging Face's words, that it keeps more than keys and values at
    positions: a class of models does, of which this one may have layers of attention only."""
    kinds = [kind for kind in _other_layers(model) if not _keeps_positions(kind)]
    says_layers = bool(getattr(text_config(model), "layer_types", None))
    if kinds or (getattr(model, "_is_stateful", False) and not says_layers):
        raise UsageError(
            f"{type(model).__name__} keeps a state that cannot be rolled back{': ' * bool(kinds)}{', '.join(kinds)}",
            cause="rejected drafts would stay in its recurrent state",
            remedy="use the model's own generate",
        )


def _other_layers(model: Any) -> list[str]:
    """The kinds of layers that it says it has, beside those that see all tokens, a sliding window of them, or each token alone."""
    usual = {"attention", "full_attention", "sliding_attention", "mlp", "moe", "dense", "sparse"}
    return sorted(set(getattr(text_config(model), "layer_types", None) or ()) - usual)


def _keeps_positions(kind: str) -> bool:
    """Whether a kind of layer keeps keys and values at positions, by its name: linear attention keeps a recurrent state."""
    return kind.endswith("attention") and "linear" not in kind


def _refuse_other_masks(model: Any) -> None:
    """Raise UsageError for layers that a cache with one mask of all tokens, and one of a window, does not serve."""
    if layers := _other_layers(model):
        raise UsageError(
            f"{type(model).__name__} has layers of {', '.join(layers)}, which need a mask that is not made here",
            remedy='pass adapter="recompute", which uses no cache, or use the model\'s own generate',
        )


def _refuse_huggingface(model: Any) -> None:
    """Raise UsageError for what cannot be told at which positions tokens are, or which slots to see."""
    name, config, text = type(model).__name__, getattr(model, "config", None), text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"{name} is an encoder-decoder; causal language models only", remedy="use the model's own generate"
        )
    lacks = {"position_ids", "attention_mask"} - set(inspect.signature(model.forward).parameters)
    if lacks:
        raise UsageError(
            f"{name}.forward takes no {' and no '.join(sorted(lacks))}, so rows cannot be at positions of their own",
            remedy='pass adapter="recompute", which uses no cache, or a function (model, ids, cache) -> logits',
        )
    attention = getattr(text, "_attn_implementation", None)
    if attention not in (None, "eager", "sdpa"):
        raise UsageError(
            f"{name} uses {attention}, which takes no mask of ours", remedy='model.set_attn_implementation("sdpa")'
        )


def _huggingface(torch: Any, model: Any) -> Callable[[Any, StaticCache, int | None], Any]:
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    dtype = dtype_of(torch, model)
    layers = set(getattr(text_config(model), "layer_types", None) or ())

    def bias_of(mask: Any) -> Any:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)

    def call(ids: Any, cache: StaticCache, keep: int | None) -> Any:
        bias = bias_of(cache.mask if cache.near is None else cache.near)
        if cache.near is not None and len(layers) > 1:      # each kind of layer takes its own
            bias = {"full_attention": bias_of(cache.mask), "sliding_attention": bias}
        more = {"logits_to_keep": keep} if keeps and keep is not None else {}
        return model(
            input_ids=ids,
            position_ids=cache.positions,
            attention_mask=bias,
            past_key_values=cache,
            use_cache=True,
            **more,
        )

    return call


def _compiled(torch: Any, call: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """`call`, compiled for each shape. fullgraph: a part left out, or a shape too many, is an error and no silent
    loss (`CachedDecoder` sends none too many). The code object is a copy: what torch compiles is counted, and limited, by code object."""
    own = types.FunctionType(
        call.__code__.replace(), call.__globals__, f"decode_{id(call)}", call.__defaults__, call.__closure__
    )
    settings = torch._dynamo.config         # before torch 2.7 the limit had its old name
    limit = "recompile_limit" if hasattr(settings, "recompile_limit") else "cache_size_limit"
    allowed = max(_MOST_SHAPES, getattr(settings, limit))
    compile_it = functools.partial(torch.compile, own, mode=mode, fullgraph=True, dynamic=False)
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return compile_it(recompile_limit=allowed)      # costs nothing at a call
    compiled = compile_it()
    many_shapes = settings.patch({limit: allowed})      # one for all calls: making it takes longer than entering it

    def run(*arguments: Any) -> Any:
        with many_shapes:
            return compiled(*arguments)

    return run
