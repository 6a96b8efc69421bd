"""nn.MultiheadAttention whose heads together are narrower than its embedding.

torch's own takes the width of a head from the embedding's (`embed_dim // num_heads`), so it cannot lose one. The class
here does; its parameters, their names and its signature are the same. It is made on first use, because torch is not
imported before that; pickle finds it by its name in this module.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "PrunedMultiheadAttention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    made = _made(torch)
    globals()[name] = made
    return made


def why_not(torch: Any, module: Any) -> str:
    """Why an nn.MultiheadAttention cannot lose heads, empty where it can."""
    known = (torch.nn.MultiheadAttention, globals().get("PrunedMultiheadAttention"))
    if type(module) not in known:
        return f"it is a {type(module).__name__}, whose own code would be lost"
    if module.bias_k is not None or module.bias_v is not None:
        return "its keys and values have a bias of their own (add_bias_kv)"
    if module.add_zero_attn:
        return "it attends to a position of zeros (add_zero_attn)"
    return ""


def _made(torch: Any) -> Any:
    functional = torch.nn.functional

    class PrunedMultiheadAttention(torch.nn.MultiheadAttention):
        """`num_heads` heads of `head_dim` channels each; `embed_dim` is the width of query and output alone."""

        def forward(self, query: Any, key: Any, value: Any, key_padding_mask: Any = None, need_weights: bool = True,
                    attn_mask: Any = None, average_attn_weights: bool = True, is_causal: bool = False) -> tuple[Any, Any]:
            """As nn.MultiheadAttention's. `is_causal` is a hint about `attn_mask`, which is what acts. A mask for each
            head has places for heads that are gone: ValueError."""
            batched, first = query.dim() == 3, self.batch_first
            if not batched:
                query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
            elif not first:
                query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
            query, key, value = (
                functional.linear(tensor, weight, bias).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                for tensor, (weight, bias) in zip((query, key, value), self._projections()))
            mask = self._mask(attn_mask, key_padding_mask, query.dtype)
            dropout = self.dropout if self.training else 0.0
            weights = None
            if need_weights:
                scores = query @ key.transpose(-2, -1) * self.head_dim ** -0.5
                weights = functional.dropout((scores if mask is None else scores + mask).softmax(dim=-1), dropout)
                found = weights @ value
                weights = weights.mean(dim=1) if average_attn_weights else weights
            else:
                found = functional.scaled_dot_product_attention(query, key, value, mask, dropout)
            found = self.out_proj(found.transpose(1, 2).flatten(-2))
            if not batched:
                return found.squeeze(0), None if weights is None else weights.squeeze(0)
            return found if first else found.transpose(0, 1), weights

        def _projections(self) -> list[tuple[Any, Any]]:
            packed = self.in_proj_weight
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if packed is None else packed.chunk(3)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            return list(zip(weights, biases))

        def _mask(self, attention: Any, padding: Any, dtype: Any) -> Any:
            """Both masks as one that is added to (batch, heads, length, length)."""
            if attention is not None and attention.dim() != 2:
                raise ValueError("an attention mask for each head does not fit: some heads were pruned")
            if padding is not None:
                padding = padding.unsqueeze(0) if padding.dim() == 1 else padding
                padding = padding[:, None, None, :]
            masks = [_additive(torch, mask, dtype) for mask in (attention, padding) if mask is not None]
            return sum(masks) if masks else None

    PrunedMultiheadAttention.__module__ = __name__
    PrunedMultiheadAttention.__qualname__ = "PrunedMultiheadAttention"
    return PrunedMultiheadAttention


def _additive(torch: Any, mask: Any, dtype: Any) -> Any:
    """A boolean mask says where not to look."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
