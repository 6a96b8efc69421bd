"""Drafts change how fast tokens come, not which: exact enumeration on models whose every text has a known
probability."""

from __future__ import annotations

import itertools
import math

import pytest

torch = pytest.importorskip("torch", reason="generation needs torch")

from generation_models import Bigram  # noqa: E402

from saturate.errors import UsageError  # noqa: E402
from saturate.inference.generation import build, generate, sampling  # noqa: E402
from saturate.inference.generation.decode import Request  # noqa: E402
from saturate.inference.generation.sampling import (  # noqa: E402
    Sampling,
    accept_greedy,
    accept_sampled,
    distribution,
    draw,
)

#: Texts of SEEN tokens are counted; generation goes on behind them, or the last rounds would have room for short
#: drafts only.
ROWS, SEEN, NEW = 6_000, 4, 6
TARGET = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5], [0.7, 0.1, 0.2]])
DRAFT = torch.tensor([[0.2, 0.6, 0.2], [0.4, 0.4, 0.2], [0.2, 0.3, 0.5]])


def excess(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square in standard deviations above its mean; cells that cannot occur make it infinite if they do, rare
    ones count as one."""
    expected = probabilities * counts.sum()
    if counts[expected == 0].sum():
        return math.inf
    rare = (expected > 0) & (expected < 10)
    counts = torch.cat([counts[expected >= 10], counts[rare].sum(0, keepdim=True)])
    expected = torch.cat([expected[expected >= 10], expected[rare].sum(0, keepdim=True)])
    possible = expected > 0
    square = ((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    return (square - freedom) / math.sqrt(2 * freedom)


def texts(table: torch.Tensor, start: int) -> torch.Tensor:
    """Probability of each text of SEEN tokens after `start`."""
    found = []
    for text in itertools.product(range(3), repeat=SEEN):
        found.append(math.prod(table[a, b].item() for a, b in zip((start, *text), text)))
    return torch.tensor(found, dtype=torch.float64)


def generated(chosen: Sampling, draft: object, lengths: tuple[int, ...], rows: int = ROWS) -> torch.Tensor:
    """How often each text came."""
    way = build.Way(draft, lengths=lengths, may_stop=False)
    loop = build.build(torch, Bigram(TARGET), way, [[0, 1, 2, 0, 1, 2, 0, 1]], Request(8))
    prompt = [0, 0, 1, 1, 0, 2, 2, 1, 2, 0]
    run = loop.generate([prompt] * rows, Request(NEW, chosen))
    assert draft is None or run.judged > rows / 2
    numbers = [int("".join(map(str, row[:SEEN])), 3) for row in run.tokens]
    return torch.bincount(torch.tensor(numbers), minlength=3**SEEN).double()


WAYS = {
    "plain": (None, (1,)),
    "draft of 1": ("draft", (1,)),
    "draft of 2": ("draft", (2,)),
    "draft of 3": ("draft", (3,)),
    "lookup": (build.LOOKUP, (2,)),
}


@pytest.mark.parametrize("name", WAYS)
def test_texts_have_the_targets_distribution(name):
    draft, lengths = WAYS[name]
    counts = generated(Sampling(seed=5), Bigram(DRAFT) if draft == "draft" else draft, lengths)
    assert excess(counts, texts(TARGET, 0)) < 5


@pytest.mark.parametrize(
    "chosen",
    [
        Sampling(temperature=0.5, seed=1),
        Sampling(top_k=2, seed=2),
        Sampling(top_p=0.65, seed=3),
        Sampling(temperature=1.5, top_k=2, top_p=0.8, seed=4),
    ],
)
def test_and_do_so_after_temperature_top_k_and_top_p(chosen):
    transformed = distribution(torch, TARGET.log(), chosen)
    assert excess(generated(chosen, Bigram(DRAFT), (2,)), texts(transformed, 0)) < 5


def always(torch, p, q, drafted, counts, generator):
    return counts.clone(), draw(torch, p[torch.arange(len(p)), counts], generator)


def from_p(torch, p, q, drafted, counts, generator):
    stay, _ = accept_sampled(torch, p, q, drafted, counts, generator)
    return stay, draw(torch, p[torch.arange(len(p)), stay], generator)


@pytest.mark.parametrize("bug", [always, from_p])
@pytest.mark.parametrize("draft", [Bigram(DRAFT), build.LOOKUP], ids=["draft", "lookup"])
def test_the_test_sees_a_wrong_acceptance(bug, draft, monkeypatch):
    monkeypatch.setattr(sampling, "accept_sampled", bug)
    assert excess(generated(Sampling(seed=5), draft, (2,)), texts(TARGET, 0)) > 20


def test_the_test_sees_a_draft_that_hides_its_temperature(monkeypatch):
    """q must be what the draft was drawn from."""
    from saturate.inference.generation import speculative

    def other(self, sequences, length, chosen, generator):
        counts, q = honest(self, sequences, length, chosen, generator)
        return counts, q ** 2 / (q ** 2).sum(-1, keepdim=True)

    honest = speculative.ModelDrafter.propose
    monkeypatch.setattr(speculative.ModelDrafter, "propose", other)
    assert excess(generated(Sampling(seed=5), Bigram(DRAFT), (2,)), texts(TARGET, 0)) > 20


def test_rows_with_fewer_drafts_draw_from_p_behind_them():
    p = TARGET[None, [0, 1, 2]].repeat(ROWS, 1, 1)
    generator = torch.Generator().manual_seed(0)
    stay, following = accept_sampled(
        torch, p, None, torch.full((ROWS, 2), 0), torch.zeros(ROWS, dtype=torch.long), generator
    )
    assert not stay.any() and excess(torch.bincount(following, minlength=3).double(), TARGET[0].double()) < 5


def test_a_draft_equal_to_the_target_always_stays():
    p = TARGET[None, [0, 1, 2]].repeat(1000, 1, 1)
    drafted = torch.stack([draw(torch, p[:, 0], None), draw(torch, p[:, 1], None)], 1)
    stay, _ = accept_sampled(torch, p, p[:, :2], drafted, torch.full((1000,), 2), torch.Generator().manual_seed(0))
    assert stay.eq(2).all()


def test_the_same_seed_repeats_the_same_tokens():
    first, again, other = (generated(Sampling(seed=seed), Bigram(DRAFT), (2,), 500) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_top_k_and_top_p_keep_what_they_say():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert distribution(torch, logits, Sampling(top_k=2)).tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert distribution(torch, logits, Sampling(top_p=0.39)).tolist() == pytest.approx([0, 1, 0, 0])
    assert distribution(torch, logits, Sampling(top_p=0.45)).tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert distribution(torch, logits, Sampling(top_k=9, top_p=1.0)).tolist() == pytest.approx([0.1, 0.4, 0.2, 0.3])
    cold = distribution(torch, logits, Sampling(temperature=0.5))
    assert cold.tolist() == pytest.approx([value**2 / 0.3 for value in (0.1, 0.4, 0.2, 0.3)])


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"temperature": math.nan}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_sampling_that_means_nothing_is_refused(wrong):
    with pytest.raises(UsageError, match="no such sampling"):
        Sampling(**wrong)


@pytest.mark.parametrize("wrong", [{"top_k": 2.5}, {"top_k": "5"}, {"temperature": "1"}, {"temperature": None}, {"top_p": "0.5"},
                                   {"seed": 1.5}, {"seed": 2**64}])
def test_sampling_of_another_type_is_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Sampling(**wrong)


@pytest.mark.parametrize("wrong", ["5", None, 2.5, 0, -1])
def test_a_number_of_new_tokens_that_is_none_is_refused(wrong):
    model = Bigram(torch.eye(5))
    with pytest.raises(UsageError, match="max_new_tokens"):
        generate(model, [1, 2], max_new_tokens=wrong)
    for eos in ("x", 2.5, [1, "x"]):
        with pytest.raises(UsageError, match="eos"):
            generate(model, [1, 2], max_new_tokens=3, eos=eos)
    with pytest.raises(UsageError, match="lengths of drafts"):
        generate(model, [1, 2], max_new_tokens=3, draft="prompt-lookup", lengths=[2.5])


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-8])
@pytest.mark.parametrize("more", [{}, {"top_k": 2}, {"top_p": 0.9}])
def test_a_tiny_temperature_is_greedy(temperature, more):
    logits = torch.tensor([[[1e4, 9.999e3, -3.0, float("-inf")], [-7.0, -8.0, -5.5, -5.6]]])
    p = distribution(torch, logits, Sampling(temperature=temperature, **more))
    assert torch.equal(p, torch.tensor([[[1.0, 0, 0, 0], [0, 0, 1.0, 0]]]))
    table = torch.rand(13, 13, generator=torch.Generator().manual_seed(0))
    greedy, sampled = (generate(Bigram(table), [1], max_new_tokens=8, sampling=chosen).tokens
                       for chosen in (None, Sampling(temperature=temperature, **more)))
    assert sampled == greedy


def test_a_huge_temperature_knows_no_difference():
    p = distribution(torch, torch.tensor([[1.0, 50.0, 3.0, float("-inf")]]), Sampling(temperature=1e300))
    assert p[0, :3].tolist() == pytest.approx([1 / 3] * 3) and p[0, 3] == 0


def test_logits_that_are_not_finite_are_refused_while_sampling():
    class Late(torch.nn.Module):
        """Whole for as long as the prompt is tried, and then no more."""

        def forward(self, ids):
            logits = torch.zeros(*ids.shape, 5)
            return logits if len(proving) else logits.log() * 0

    proving = [True]
    loop = build.build(torch, Late(), build.Way(), [[1, 2]], Request(3))
    proving.clear()
    with pytest.raises(UsageError, match="not finite"):
        loop.generate([[1, 2]], Request(3, Sampling()))


class Guesses(torch.nn.Module):
    """A draft that knows `known` tokens, and has no numbers for what follows token 2."""

    def __init__(self, known: int = 3):
        super().__init__()
        self.table = torch.nn.Embedding.from_pretrained(torch.eye(known))

    def forward(self, ids):
        logits = self.table(ids) * 3
        logits[ids == 2] = float("nan") if len(ids[0]) > 30 else 1.0        # not while it is proved
        return logits


@pytest.mark.parametrize("chosen", [Sampling(seed=3), sampling.GREEDY])
def test_a_draft_without_numbers_is_a_bad_guess_and_no_end(chosen):
    target = Bigram(TARGET)
    prompt = [0, 2] * 16
    found = generate(target, [prompt], max_new_tokens=12, draft=Guesses(), sampling=chosen, lengths=(2,))
    assert len(found.tokens[0]) == 12
    if chosen.greedy:
        assert found.tokens == generate(target, [prompt], max_new_tokens=12).tokens


@pytest.mark.parametrize("chosen", [Sampling(seed=3), sampling.GREEDY])
def test_a_token_that_the_draft_cannot_look_up_is_no_end(chosen):
    """With equal tokenizers the target's logits may be wider, and it may say a token of the padding."""
    wide = torch.tensor([[0.01, 0.1, 0.02, 0.87], [0.5, 0.05, 0.4, 0.05], [0.1, 0.1, 0.02, 0.78], [0.8, 0.1, 0.05, 0.05]])
    tokenizer = {str(number): number for number in range(3)}
    for prompt in ([0, 1, 0, 2], [0, 3, 1, 0]):
        found = generate(Bigram(wide), [prompt], max_new_tokens=12, draft=Guesses(), tokenizers=(tokenizer, tokenizer), sampling=chosen,
                         lengths=(2,))
        assert 3 in found.tokens[0]
        if chosen.greedy:
            assert found.tokens == generate(Bigram(wide), [prompt], max_new_tokens=12).tokens


def test_numbers_of_numpy_become_python_s():
    numpy = pytest.importorskip("numpy")
    request = Request(numpy.int64(6), Sampling(numpy.float32(0.5), numpy.int64(3), numpy.float32(0.5), numpy.int64(1)), frozenset([numpy.int64(2)]))
    values = [request.max_new_tokens, *request.eos, *vars(request.sampling).values()]
    assert [type(value) for value in values] == [int, int, float, int, float, int]


def test_greedy_acceptance_by_hand():
    logits = torch.tensor([[[0.0, 5, 1], [0, 1, 5], [5, 0, 1]]])
    for drafted, count, stays, follows in (
        ([1, 2], 2, 2, 0),
        ([1, 0], 2, 1, 2),
        ([0, 2], 2, 0, 1),
        ([1, 2], 1, 1, 2),
        ([1, 2], 0, 0, 1),
    ):
        stay, following, unsure = accept_greedy(torch, logits, torch.tensor([drafted]), torch.tensor([count]), 0.1)
        assert (stay.item(), following.item(), unsure.item()) == (stays, follows, False)


def test_a_tie_ends_what_stays_and_only_where_it_matters():
    logits = torch.tensor([[[0.0, 5, 1], [0, 5.0, 4.95], [5, 0, 1]]])
    stay, _, unsure = accept_greedy(torch, logits, torch.tensor([[1, 1]]), torch.tensor([2]), 0.1)
    assert (stay.item(), unsure.item()) == (1, True)
    stay, _, unsure = accept_greedy(torch, logits, torch.tensor([[1, 2]]), torch.tensor([2]), 0.1)
    assert (stay.item(), unsure.item()) == (1, True), "the draft lost against a tie"
    stay, following, unsure = accept_greedy(torch, logits, torch.tensor([[0, 1]]), torch.tensor([2]), 0.1)
    assert (stay.item(), following.item(), unsure.item()) == (0, 1, False), "the tie lies behind what was refused"


def test_batches_of_a_call_draw_numbers_of_their_own():
    """Equal prompts: one batch of eight, and eight batches of one."""
    prompts, wanted = [[0, 1, 2]] * 8, Sampling(seed=3)
    model = Bigram(TARGET)
    for size in (None, 1, 3):
        first, second = (generate(model, prompts, max_new_tokens=8, sampling=wanted, batch_size=size).tokens for _ in range(2))
        assert first == second and len(set(map(tuple, first))) > 5
    assert wanted.of_batch(0) is wanted and wanted.of_batch(1) != Sampling(seed=4).of_batch(0)
