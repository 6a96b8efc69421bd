"""How the next token is chosen, and how drafted tokens are accepted so that the target's choice stays what it was.

Greedy: a drafted token stays where it is the target's own most probable token. Sampling: speculative sampling of
Leviathan et al. (ICML 2023) and Chen et al. (2023): with p the target's and q the draft's distribution, both after
temperature, top-k and top-p, a token x drawn from q stays with probability min(1, p(x) / q(x)); the first that does
not is replaced by one drawn from max(p - q, 0), normalised. Each token is then distributed as p, whatever q is.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from dataclasses import dataclass, replace
from typing import Any

from saturate.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. top_k: the k most probable tokens; top_p: the fewest tokens that hold this
    probability. Both are applied after the temperature, top_k first. The same seed repeats the same tokens, but for drafts whose
    lengths are chosen by measured costs: with those only one length (`generate(..., lengths=(4,))`) does."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for right, words in (
            (_number(self.temperature) and math.isfinite(self.temperature) and self.temperature >= 0,
             f"temperature {self.temperature!r}: a number, at least 0"),
            (self.top_k is None or (whole(self.top_k) and self.top_k >= 1), f"top_k {self.top_k!r}: a whole number, at least 1"),
            (self.top_p is None or (_number(self.top_p) and 0 < self.top_p <= 1),
             f"top_p {self.top_p!r}: a number above 0, at most 1"),
            (whole(self.seed) and -(2**63) <= self.seed < 2**64, f"seed {self.seed!r}: a whole number of 64 bits"),
        ):
            if not right:
                raise UsageError(
                    f"no such sampling: {words}", remedy="temperature 0 is greedy; None switches top_k or top_p off"
                )
        # numpy's numbers cannot be stored in an artifact
        for name, kind in (("temperature", float), ("top_k", int), ("top_p", float), ("seed", int)):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else kind(value))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def of_batch(self, number: int) -> Sampling:
        """The same for batch `number` of a call: with random numbers of its own, or equal prompts would get equal texts."""
        if not number or self.greedy:
            return self
        digest = hashlib.blake2b(f"{self.seed} {number}".encode(), digest_size=8).digest()
        return replace(self, seed=int.from_bytes(digest, "big"))


def whole(value: Any) -> bool:
    """Whether it is a whole number; numpy's are, too."""
    return isinstance(value, numbers.Integral)


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real)


GREEDY = Sampling(temperature=0)

#: Temperatures beyond these are no numbers of float32; at the least one, any difference of logits is a certainty.
_TEMPERATURES = (1.2e-38, 3.4e38)


def distribution(torch: Any, logits: Any, sampling: Sampling) -> Any:
    """Probabilities [..., vocabulary], float32, that `sampling` makes of logits of the same shape. Not for greedy."""
    logits = logits.float()
    # From the best one on: what is divided is then 0 there, and cannot overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)) / min(max(sampling.temperature, _TEMPERATURES[0]), _TEMPERATURES[1])
    if sampling.top_k is not None and sampling.top_k < scaled.shape[-1]:
        least = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < least, -math.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = scaled.sort(dim=-1, descending=True)
        shares = ordered.softmax(-1)
        beyond = shares.cumsum(-1) - shares >= sampling.top_p          # what comes before already holds enough
        scaled = scaled.masked_fill(beyond.gather(-1, order.argsort(-1)), -math.inf)
    return scaled.softmax(-1)


def draw(torch: Any, probabilities: Any, generator: Any) -> Any:
    """One token per row of [rows, vocabulary]: long [rows]. Rows need not be normalised."""
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


def accept_greedy(torch: Any, logits: Any, drafted: Any, counts: Any, tolerance: float) -> tuple[Any, Any, Any]:
    """Which drafts stay under greedy decoding.

    logits [rows, k + 1, vocabulary]: the target's, for the k drafted tokens and the one behind them; drafted long
    [rows, k]; counts long [rows]: how many of a row's drafts are real. Returns the number of drafts that stay, the
    token that follows them, and whether that token is unsure.

    A forward of k + 1 tokens adds up in another order than k + 1 forwards of one, so logits differ by rounding. Where
    the two best are closer than `tolerance`, the forward of several tokens does not decide: what stays ends before
    that place, and the row is unsure, for a forward of one token to decide, as without drafts.
    """
    best = logits.argmax(-1)
    k = drafted.shape[1]
    index = torch.arange(k + 1, device=logits.device)
    agrees = (drafted == best[:, :k]) & (index[:k] < counts.unsqueeze(1))
    stay = agrees.long().cumprod(1).sum(1)
    two = logits.topk(2, dim=-1).values
    close = two[..., 0] - two[..., 1] <= tolerance
    first_close = torch.where(close, index, k + 1).amin(1)
    unsure = first_close <= stay
    stay = torch.minimum(stay, first_close)
    return stay, best.gather(1, stay.unsqueeze(1)).squeeze(1), unsure


def accept_sampled(torch: Any, p: Any, q: Any | None, drafted: Any, counts: Any, generator: Any) -> tuple[Any, Any]:
    """Which drafts stay under sampling, and the token that follows them.

    p [rows, k + 1, vocabulary] and q [rows, k, vocabulary] are distributions; q None: each drafted token was certain
    (prompt lookup). drafted long [rows, k], counts long [rows] as above. A row whose real drafts all stay draws its
    next token from p.
    """
    k = drafted.shape[1]
    token = drafted.unsqueeze(2)
    p_of = p[:, :k].gather(2, token).squeeze(2)
    q_of = torch.ones_like(p_of) if q is None else q.gather(2, token).squeeze(2)
    chance = torch.rand(p_of.shape, generator=generator, device=p.device)
    real = torch.arange(k, device=p.device) < counts.unsqueeze(1)
    stay = ((chance * q_of < p_of) & real).long().cumprod(1).sum(1)
    rows = torch.arange(len(p), device=p.device)
    p_next = p[rows, stay]
    at = stay.clamp(max=k - 1)
    if q is None:
        q_next = torch.zeros_like(p_next).scatter_(1, drafted[rows, at].unsqueeze(1), 1.0)
    else:
        q_next = q[rows, at]
    rest = (p_next - q_next).clamp_min(0)
    refused = (stay < counts) & (rest.sum(1) > 0)  # p = q up to rounding leaves no rest, and refuses only by rounding
    return stay, draw(torch, torch.where(refused.unsqueeze(1), rest, p_next), generator)
