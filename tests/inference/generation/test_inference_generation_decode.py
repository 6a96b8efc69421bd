"""The loop: the same greedy tokens however they are come by; rows of any length; the end of a text; what is refused,
by name."""

from __future__ import annotations

import dataclasses
import numbers

import pytest

torch = pytest.importorskip("torch", reason="generation needs torch")

import generation_models as toys  # noqa: E402

from saturate.errors import UsageError  # noqa: E402
from saturate.inference.generation import build, generate, measure, proof  # noqa: E402
from saturate.inference.generation.decode import Request, Sequences  # noqa: E402
from saturate.inference.generation.prompt_lookup import Index  # noqa: E402
from saturate.inference.generation.prompts import as_lists  # noqa: E402
from saturate.inference.generation.sampling import Sampling  # noqa: E402

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3], [9, 8, 9, 8, 9, 8, 9, 8, 9], [5, 5]]
NEW = 24


@pytest.fixture(scope="module")
def model():
    return toys.Cached()


@pytest.fixture(scope="module")
def texts(model):
    return [toys.greedy(model, prompt, NEW) for prompt in PROMPTS]


def drafts():
    near = toys.Cached()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    return {
        "itself": toys.Cached(),
        "near": near,
        "far": toys.Cached(seed=7),
        "whole": toys.Whole(near),
        "lookup": build.LOOKUP,
    }


DRAFTS = drafts()


def test_a_model_that_gives_the_last_logits_alone_unless_it_gets_targets(model, texts):
    alone = toys.LastAlone(model)
    assert generate(alone, PROMPTS, max_new_tokens=NEW).tokens == texts
    found = generate(alone, PROMPTS, max_new_tokens=NEW, draft=toys.LastAlone(DRAFTS["near"]), lengths=(3,))
    assert found.tokens == texts and found.acceptance_rate > 0
    with pytest.raises(UsageError, match="returned the logits of 1 of"):
        generate(toys.LastAlone(model, takes_targets=False), PROMPTS, max_new_tokens=NEW)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["batch", "alone"])
@pytest.mark.parametrize("recompute", [False, True])
def test_plain_is_the_plainest_loop(model, texts, prompts, recompute):
    assert (
        generate(toys.Whole(model) if recompute else model, prompts, max_new_tokens=NEW).tokens
        == texts[: len(prompts)]
    )


@pytest.mark.parametrize("lengths", [(1,), (3,), (7,), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_change_no_token(model, texts, name, lengths):
    found = generate(model, PROMPTS, max_new_tokens=NEW, draft=DRAFTS[name], lengths=lengths)
    assert found.tokens == texts
    if name == "itself" and len(lengths) == 1:
        assert found.acceptance_rate == 1 and found.steps <= -(-(NEW - 1) // (lengths[0] + 1)) + 1
    if name == "far" and len(lengths) == 1:
        assert found.acceptance_rate < 0.9


def test_drafts_change_no_token_without_a_cache(model, texts):
    assert (
        generate(toys.Whole(model), PROMPTS, max_new_tokens=NEW, draft=DRAFTS["near"], lengths=(3,)).tokens == texts
    )


def test_one_batch_after_the_other(model, texts):
    assert generate(model, PROMPTS, max_new_tokens=NEW, batch_size=3, draft=DRAFTS["near"]).tokens == texts


@pytest.mark.parametrize("draft", [None, "near", "itself"])
def test_a_row_ends_at_its_end_and_the_others_go_on(model, texts, draft):
    """With drafts the end lies somewhere inside of what stays."""
    ends = texts[0][5]
    wanted = [toys.greedy(model, prompt, NEW, ends) for prompt in PROMPTS]
    assert len({len(text) for text in wanted}) > 1
    found = generate(
        model, PROMPTS, max_new_tokens=NEW, eos=ends, draft=draft and DRAFTS[draft], lengths=(5,) if draft else None
    )
    assert found.tokens == wanted


@pytest.mark.parametrize("draft", ["near", "itself"])
def test_up_to_the_last_position_of_the_context(model, draft):
    prompts = [PROMPTS[0], PROMPTS[1] * 20]
    new = model.context - 20
    wanted = [toys.greedy(model, prompt, new) for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=new, draft=DRAFTS[draft], lengths=(4,)).tokens == wanted
    ends = wanted[1][2]         # the longer row is done early, and must not be fed beyond the context
    wanted = [toys.greedy(model, prompt, new, ends) for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=new, draft=DRAFTS[draft], lengths=(4,), eos=ends).tokens == wanted


def test_a_row_that_is_done_is_fed_where_the_others_are():
    """Or drafts behind its end would leave the context of the model."""
    sequences = Sequences(torch, [[1] * 9, [2] * 3, [3] * 4], Request(8), 30, "cpu")
    assert sequences.heads() == [9, 3, 4]
    sequences.done[0] = True
    assert sequences.heads() == [4, 3, 4]


def test_a_draft_with_a_shorter_context_helps_as_far_as_it_reaches(model, texts):
    short = toys.Cached(context=16)
    found = generate(model, PROMPTS, max_new_tokens=NEW, draft=short, lengths=(3,))
    assert found.tokens == texts and found.runs[0].rounds > 0


class Rounding:
    """A decoder whose forwards of several tokens are off by a little, as a GPU's are."""

    def __init__(self, inner, off):
        self.inner, self.off, self.noise = inner, off, torch.Generator().manual_seed(3)
        self.name, self.device, self.dtype, self.context = inner.name, inner.device, inner.dtype, inner.context

    def start(self, rows, capacity):
        self.inner.start(rows, capacity)

    def feed(self, ids, starts, count, keep=None):
        logits = self.inner.feed(ids, starts, count, keep)
        return logits if count == 1 else logits + self.off * (2 * torch.rand(logits.shape, generator=self.noise) - 1)


def test_a_round_that_ends_at_a_tie_gives_no_token_behind_its_drafts():
    """It was counted with one: more tokens were said to come of a round than came."""
    flat, prompt = toys.Cached(sharp=0.05), PROMPTS[:1]
    loop = build.build(torch, flat, build.Way(flat, lengths=(4,), may_stop=False), prompt, Request(40))
    loop.target, loop.tolerance = Rounding(loop.target, 0.01), 0.02
    run = loop.generate(prompt, Request(40))
    behind = run.new_tokens - 1 - (run.steps - run.rounds)      # the prefill gives one, and each plain step
    assert run.ties > 0 and run.steps > run.rounds
    assert measure.speculation("flat", [run], None, (4,)).tokens_per_round == behind / run.row_rounds


@pytest.mark.parametrize("careful", [True, False])
def test_near_ties_are_left_to_a_forward_of_one_token(model, careful):
    """A flat model, whose best tokens lie within its rounding now and then. Not careful: the test sees the
    difference."""
    flat = toys.Cached(sharp=0.05)
    loop = build.build(torch, flat, build.Way(flat, lengths=(4,), may_stop=False), PROMPTS, Request(NEW))
    plain = dataclasses.replace(loop, drafter=None).generate(PROMPTS, Request(NEW))
    off = 0.01
    loop.target = Rounding(loop.target, off)
    loop.tolerance = 2 * off if careful else 0.0
    first = [row[:1] for row in plain.tokens]
    run = loop.generate([prompt + token for prompt, token in zip(PROMPTS, first)], Request(NEW - 1))
    same = sum(a[1:] == b for a, b in zip(plain.tokens, run.tokens))
    assert (same == len(PROMPTS) and run.ties > 0) if careful else same < len(PROMPTS)


def test_the_tolerance_is_the_rounding_of_the_model(model):
    loop = build.build(torch, model, build.Way(), PROMPTS, Request(4))
    assert 0 < loop.tolerance < 1e-2
    noisy = Rounding(loop.target, 1e-3)
    with torch.inference_mode():
        assert proof.prove(torch, noisy, lambda ids: model(ids), PROMPTS) > 1e-3


# -- what is refused
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong, words", [
    (toys.Recurrent(), "keeps a state between calls that cannot be rolled back"),
    (toys.Bidirectional(), "not a causal language model"),
    (toys.Forgetful(), "does not keep what it should at the positions"),
])
def test_models_that_would_give_wrong_tokens_are_refused(wrong, words):
    with pytest.raises(UsageError) as refused:
        generate(wrong, PROMPTS, max_new_tokens=4)
    assert words in refused.value.cause


def test_dropout_is_switched_off_and_on_again():
    model = torch.nn.Sequential(torch.nn.Embedding(13, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 13))
    assert model.training
    found = [generate(model, [[1, 2]], max_new_tokens=6).tokens for _ in range(2)]
    assert found[0] == found[1] and model.training and model[1].training


def test_a_model_that_is_random_by_itself_is_refused():
    class Noisy(toys.Cached):
        def forward(self, ids, cache=None):
            return super().forward(ids, cache) + torch.randn(1)

    with pytest.raises(UsageError, match="other logits for the same tokens"):
        generate(Noisy(), PROMPTS, max_new_tokens=4)


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"draft": toys.Cached(vocabulary=11)},
            "the draft Cached has a vocabulary of 11 tokens, the target Cached of 13",
        ),
        (
            {"draft": toys.Cached(), "tokenizers": ({"a": 0, "b": 1}, {"a": 0, "b": 2})},
            "the tokenizers of Cached and Cached differ in 1 of 2",
        ),
        ({"draft": "medusa"}, "no such draft: 'medusa'"),
        ({"draft": toys.Recurrent()}, "Recurrent gives other logits"),
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"max_new_tokens": 60}, "9 tokens of prompt and 60 new ones; Cached takes 64"),
        ({"lengths": (0, 2), "draft": toys.Cached()}, "lengths of drafts"),
        ({"adapter": "magic"}, "no such adapter"),
        ({"batch_size": 0}, "batch_size 0"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(model, changes, words):
    with pytest.raises(UsageError, match=words):
        generate(model, PROMPTS, **{"max_new_tokens": 4, **changes})


def test_a_draft_that_pads_its_vocabulary_otherwise_goes_with_equal_tokenizers(model, texts):
    tokens = {str(number): number for number in range(11)}
    narrow = toys.Cached(vocabulary=20, seed=3)
    found = generate(
        model, PROMPTS, max_new_tokens=NEW, draft=narrow, tokenizers=(tokens, dict(tokens)), lengths=(2,)
    )
    assert found.tokens == texts
    chosen = Sampling(seed=1)
    assert (
        len(
            generate(
                model, PROMPTS, max_new_tokens=NEW, draft=narrow, tokenizers=(tokens, tokens), sampling=chosen
            ).tokens[0]
        )
        == NEW
    )


def test_logits_that_are_not_numbers_are_refused():
    broken = toys.Cached()
    with torch.no_grad():
        broken.head.weight[0, 0] = float("nan")
    with pytest.raises(UsageError, match="not finite"):
        generate(broken, PROMPTS, max_new_tokens=4)


def test_an_adapter_makes_any_model_follow_the_protocol(texts):
    class Odd(torch.nn.Module):
        context = 64

        def __init__(self):
            super().__init__()
            self.inner = toys.Cached()

        def forward(self, flag, ids, memory):
            return {"logits": self.inner(ids, memory)}

    found = generate(Odd(), PROMPTS, max_new_tokens=NEW, adapter=lambda model, ids, cache: model(True, ids, cache))
    assert found.tokens == texts


# -- prompts, lookup
# ---------------------------------------------------------------------------------------------------


class _Whole:
    """A whole number of another library: numpy's of 16 bits is none of Python's."""

    def __init__(self, value):
        self.value = value

    def __int__(self):
        return self.value


numbers.Integral.register(_Whole)


@pytest.mark.parametrize("given, rows", [
    ([1, 2], [[1, 2]]), (torch.tensor([1, 2]), [[1, 2]]), (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    ([[1], torch.tensor([2, 3])], [[1], [2, 3]]),
    ({"input_ids": torch.tensor([[0, 1], [2, 3]]), "attention_mask": torch.tensor([[0, 1], [1, 1]])}, [[1], [2, 3]]),
    ({"input_ids": torch.tensor([[0, 1], [2, 3]]), "attention_mask": torch.tensor([[False, True], [True, True]])}, [[1], [2, 3]]),
    ({"input_ids": torch.tensor([[0, 1], [2, 3]]), "attention_mask": torch.tensor([[0.0, 1.0], [1.0, 1.0]])}, [[1], [2, 3]]),
    ({"input_ids": [0, 1], "attention_mask": [False, True]}, [[1]]),
    ({"input_ids": [[0, 1], [2]], "attention_mask": [torch.tensor([0, 1]), [torch.tensor(True)]]}, [[1], [2]]),
    ([torch.tensor(1), torch.tensor(2)], [[1, 2]]), ([_Whole(1), _Whole(2)], [[1, 2]]),
])
def test_prompts_in_the_shapes_that_people_have(given, rows):
    assert as_lists(given) == rows


@pytest.mark.parametrize("wrong", ["text", [], [[]], 3, [["a"]], [[[1, 2], [3, 4]]], [1.5], [True], {"ids": [1, 2]}, {},
                                   [torch.tensor(1.5)], [torch.tensor(True)],
                                   {"input_ids": [[1, 2]], "attention_mask": [["1", "0"]]}, {"input_ids": [[1, 2]], "attention_mask": 1},
                                   {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1]]}, {"input_ids": [[1], [2]], "attention_mask": [[1]]}])
def test_what_is_no_prompt_is_refused(wrong):
    with pytest.raises(UsageError):
        as_lists(wrong)


@pytest.mark.parametrize("draft", ["prompt-lookup", "model"])
def test_one_token_behind_the_longest_prompt_needs_no_draft(draft):
    short = toys.Cached(context=16)
    prompt = [number % 12 for number in range(15)]
    wanted = generate(short, [prompt], max_new_tokens=1).tokens
    assert generate(short, [prompt], max_new_tokens=1, draft=toys.Cached(1, context=16) if draft == "model" else draft).tokens == wanted


def test_tokens_that_the_model_does_not_know_are_refused(model):
    for wrong in ([13, 1], [-1, 1]):
        with pytest.raises(UsageError, match="prompt 0 holds token"):
            generate(model, [wrong], max_new_tokens=2)


def test_lookup_proposes_what_followed_last():
    index = Index(longest=3, shortest=2)
    assert index.following([1, 2, 3, 9, 1, 2], 3) == [3, 9, 1]
    assert index.following([1, 2, 3, 9, 1, 2, 7, 1, 2], 2) == [7, 1], "the latest occurrence"
    assert index.following([1, 2, 3, 9, 1, 2, 7, 1, 2, 3], 2) == [9, 1], "the longest run, 1 2 3, first"
    assert index.following([1, 2, 3, 9, 1, 2, 7, 1, 2, 3, 4], 2) == []
    assert Index().following([5, 5], 3) == [] and Index().following([5, 5, 5], 3) == [5, 5, 5], "a period goes on"


@pytest.mark.parametrize("rows", [1, 3])
def test_where_a_text_repeats_itself_and_the_draft_is_wrong_the_text_is_quoted(rows):
    """A target that counts to ten again and again, and a draft that does not: a batch is quoted row by row."""
    counting, lost = torch.full((13, 13), 1e-6), torch.full((13, 13), 1e-6)
    for token in range(13):
        counting[token, (token + 1) % 10] = lost[token, (token + 2) % 10] = 1.0
    prompts = [[0, 1], [7], [4, 5, 6]][:rows]
    target = toys.Bigram(counting)
    wanted = generate(target, prompts, max_new_tokens=60).tokens
    found = generate(target, prompts, max_new_tokens=60, draft=toys.Bigram(lost), lengths=(4,))
    assert found.tokens == wanted and found.steps < 40, found.steps


@pytest.mark.parametrize("rows", [1, 3])
def test_what_was_quoted_is_not_counted_as_the_drafts(rows):
    """The draft of the test above is always wrong, the text always right."""
    counting, lost = torch.full((13, 13), 1e-6), torch.full((13, 13), 1e-6)
    for token in range(13):
        counting[token, (token + 1) % 10] = lost[token, (token + 2) % 10] = 1.0
    prompts = [[0, 1], [7], [4, 5, 6]][:rows]
    found = generate(toys.Bigram(counting), prompts, max_new_tokens=60, draft=toys.Bigram(lost), lengths=(4,))
    run = found.runs[0]
    assert found.acceptance_rate == 0 and run.stayed == 0 < run.judged <= run.drafted
    assert found.quoted_acceptance_rate == run.quoted_acceptance_rate > 0.9 and run.quoted_stayed > 20
    record = measure.speculation("lost", found.runs, None, (4,))
    assert (record.acceptance_rate, record.quoted_acceptance_rate) == (0, found.quoted_acceptance_rate)
    assert record.quoted_share == run.quoted / (run.quoted + run.drafted)
    behind = run.new_tokens - len(prompts)      # the prefill gives each row one
    assert record.tokens_per_round == behind / run.row_rounds, "a round gives what stayed, whoever proposed it"
    looked_up = generate(toys.Bigram(counting), prompts, max_new_tokens=60, draft=build.LOOKUP, lengths=(4,))
    assert looked_up.acceptance_rate > 0.9 and looked_up.quoted_acceptance_rate is None, "there the text is the draft"


def test_where_some_rows_quote_the_drafts_cache_holds_the_tokens_of_each():
    """What the draft model guessed for a row is fed to it before the quote takes its place: what differs is fed again."""
    counting, lost = torch.full((13, 13), 1e-6), torch.full((13, 13), 1e-6)
    for token in range(13):
        counting[token, (token + 1) % 10] = 1.0
        lost[token, (token + (1 if token < 6 else 2)) % 10] = 1.0       # right for a while
    prompts = [[*range(10), 0, 1, 2], [7], [4, 5, 6]]
    way = build.Way(toys.Bigram(lost), lengths=(4,), may_stop=False)
    loop = build.build(torch, toys.Bigram(counting), way, prompts, Request(NEW))
    decoder, fed = loop.drafter._model._decoder, {}
    feed = decoder.feed

    def watched(ids, starts, count, **more):
        for row, start in enumerate(starts):
            fed.update({(row, place): int(ids[row, place]) for place in range(start, start + count)})
        return feed(ids, starts, count, **more)

    decoder.feed = watched
    with torch.inference_mode():
        sequences, mixed = loop.prefill(prompts, Request(NEW)), 0
        while not all(sequences.done):
            loop.round(sequences, min(4, sequences.room()), Request(NEW))
            mixed += len(set(loop.drafter.quoted)) > 1
            for row, (tokens, held) in enumerate(zip(sequences.known, loop.drafter._model._held)):
                if not sequences.done[row]:
                    assert [fed[row, place] for place in range(held)] == tokens[:held], (row, held)
    assert mixed > 1, "some rows quote while others are drafted for"


@pytest.mark.parametrize("stayed", [0, 2])
def test_what_was_refused_is_forgotten_though_rounds_without_drafts_follow(model, stayed):
    """A draft that is the target's twin must guess everything, whatever its cache held before."""
    loop = build.build(torch, model, build.Way(toys.Cached(), lengths=(4,), may_stop=False), PROMPTS, Request(NEW))
    with torch.inference_mode():
        sequences = loop.prefill(PROMPTS, Request(NEW))
        honest = loop.drafter.propose

        def spoiled(*given):
            counts, q = honest(*given)
            for row, length in enumerate(sequences.lengths):
                sequences.ids[row, length + stayed] = (sequences.ids[row, length + stayed] + 1) % toys.VOCABULARY
            return counts, q

        loop.drafter.propose = spoiled
        assert loop.round(sequences, 4, Request(NEW)).stayed == [stayed] * len(PROMPTS)
        loop.drafter.propose = honest
        for _ in range(3):
            loop.round(sequences, 0, Request(NEW))
        assert loop.round(sequences, 4, Request(NEW)).stayed == [4] * len(PROMPTS)
