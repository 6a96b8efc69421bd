"""Models that come in a wrapping, with a cache of their own, or into training again: what they are called as, and what is said."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="generation needs torch")

import generation_models as toys  # noqa: E402
from torch import nn  # noqa: E402

from saturate.errors import EnvironmentProblem, UsageError  # noqa: E402
from saturate.inference.generation import build, generate, host, models, optimize, proof  # noqa: E402
from saturate.inference.generation.artifact import Program  # noqa: E402
from saturate.inference.generation.decode import Request  # noqa: E402
from saturate.inference.generation.recipe import MODEL, Given, Recipe  # noqa: E402
from saturate.inference.techniques._api import NotApplied  # noqa: E402

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 1, 2, 3]]


class Wrapper(nn.Module):
    """Hands on whatever it is given."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def llama():
    transformers = pytest.importorskip("transformers", reason="the models under test are its")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
        initializer_range=0.6, eos_token_id=None)).eval()


def test_a_forward_that_does_not_say_what_it_takes_is_refused():
    """It ran without a cache, and nobody was told."""
    for inner in (llama(), toys.Cached()):
        with pytest.raises(UsageError, match="does not say what it takes") as refused:
            generate(Wrapper(inner), PROMPTS, max_new_tokens=4)
        assert "adapter=" in refused.value.remedy and "inside" in refused.value.remedy
    wanted = generate(toys.Cached(), PROMPTS, max_new_tokens=4).tokens
    for adapter in ("recompute", lambda model, ids, cache: model(ids, cache)):
        assert generate(Wrapper(toys.Cached()), PROMPTS, max_new_tokens=4, adapter=adapter).tokens == wanted


def test_adapters_of_another_library_are_refused_by_what_they_offer():
    class Adapted(toys.Whole):
        def get_base_model(self):
            return self.inner

    with pytest.raises(UsageError, match="does not say what it takes") as refused:
        generate(Adapted(toys.Cached()), PROMPTS, max_new_tokens=4)
    assert "get_base_model" in refused.value.remedy


class DataParallel(Wrapper):
    """By its name torch's, which needs no device to be one."""

    def __init__(self, inner):
        super().__init__(inner)
        self.module = inner


@pytest.mark.parametrize("wrap", [lambda model: torch.compile(model, backend="eager"), DataParallel,
                                  lambda model: DataParallel(torch.compile(model, backend="eager"))])
def test_what_compiles_a_model_or_spreads_it_is_taken_off(wrap):
    for inner, prompts in ((llama(), PROMPTS), (toys.Cached(), PROMPTS)):
        found = models.decoder(torch, wrap(inner))
        assert isinstance(found, models.CachedDecoder) and found.name == type(inner).__name__
        wanted = generate(inner, prompts, max_new_tokens=6).tokens
        assert generate(wrap(inner), prompts, max_new_tokens=6).tokens == wanted
        assert generate(inner, prompts, max_new_tokens=6, draft=wrap(inner), lengths=(2,)).tokens == wanted
    result = optimize(wrap(toys.Cached()), PROMPTS, max_new_tokens=4, time="1s", ways=(), isolate=False)
    assert result.record.model == "Cached"


# -- models that do not mean what their parameters are called ---------------------------------------------------------


class OwnCache(toys.Cached):
    """A list of tensors, as people write it."""

    def forward(self, ids, cache=None):
        if cache is not None:
            cache.append((ids, len(cache)))
        return super().forward(ids, None)


class Narrow(nn.Module):
    """Hugging Face's names, as far as they were needed."""

    def __init__(self):
        super().__init__()
        self.inner = toys.Cached()

    def forward(self, input_ids, position_ids=None, attention_mask=None, past_key_values=None):
        return self.inner(input_ids, None)


class FlatMask(nn.Module):
    """Adds a mask [rows, tokens] to the scores, as its tokenizer gives it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)

    def forward(self, input_ids, position_ids=None, attention_mask=None, past_key_values=None, use_cache=None):
        x = self.token(input_ids)
        scores = x @ x.transpose(1, 2) + torch.full(x.shape[1:2] * 2, float("-inf")).triu(1)
        if attention_mask is not None:
            scores = scores + attention_mask.reshape(-1, 1, 3)
        return self.head(scores.softmax(-1) @ x)


@pytest.mark.parametrize(("model", "cause"), [(OwnCache(), "StaticCache"), (Narrow(), "use_cache"), (FlatMask(), "RuntimeError")])
def test_a_model_that_does_not_mean_it_so_is_told_of_the_way_without_a_cache(model, cause):
    for given in (model, toys.Cached()):
        draft = None if given is model else model
        with pytest.raises(UsageError, match=f"{type(model).__name__} cannot be called") as refused:
            generate(given, PROMPTS, max_new_tokens=4, draft=draft)
        assert cause in refused.value.cause and 'adapter="recompute"' in refused.value.remedy
    assert len(generate(model, PROMPTS, max_new_tokens=4, adapter="recompute").tokens[0]) == 4


def test_a_model_that_takes_no_tokens_alone_is_told_what_it_is_called_with():
    class Pair(nn.Module):
        def forward(self, ids, mask):
            return ids + mask

    with pytest.raises(UsageError, match="Pair cannot be called with token numbers alone") as refused:
        generate(Pair(), PROMPTS, max_new_tokens=4)
    assert "mask" in refused.value.cause and "recompute" not in refused.value.remedy


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("planted"), MemoryError("planted"),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory: planted")])
@pytest.mark.parametrize("window", [None, 8])
def test_where_memory_ends_nothing_is_said_of_masks(error, window):
    class Large(toys.Cached):
        def forward(self, ids, cache=None):
            if ids.shape[1] > 20:
                raise error
            return super().forward(ids, cache)

    model = Large()
    target = models.decoder(torch, model)
    target.window = window
    prove = proof.prove if window is None else proof.prove_behind_window
    with torch.no_grad(), pytest.raises(type(error), match="planted"):
        prove(torch, target, models.plain_forward(torch, model), PROMPTS, 2)


def test_what_a_compiler_raises_is_not_laid_to_the_cache():
    class Graph(RuntimeError):
        __module__ = "torch._dynamo.exc"

    class Uncompiled(toys.Cached):
        def forward(self, ids, cache=None):
            if ids.shape[1] == 1 and cache is not None and cache.allocated:
                raise Graph("planted")
            return super().forward(ids, cache)

    with pytest.raises(Graph, match="planted"):
        generate(Uncompiled(), PROMPTS, max_new_tokens=4)


# -- the user's own process -----------------------------------------------------------------------------------------------


class Rotating(toys.Cached):
    """Makes its table of positions when it is first needed, as hand-written models do."""

    def __init__(self):
        super().__init__()
        self.cos = None

    def forward(self, ids, cache=None):
        if self.cos is None:
            self.cos = torch.arange(1.0, 14.0).cos() + 2
        return super().forward(ids, cache) * self.cos


@pytest.mark.parametrize("draft", [None, "prompt-lookup"])
def test_a_model_that_generated_can_be_trained(draft):
    model = Rotating()
    generate(model, PROMPTS, max_new_tokens=4, draft=draft)
    assert not model.cos.is_inference()
    model.train()
    model(torch.tensor(PROMPTS[:1])).sum().backward()
    assert model.head.weight.grad.abs().sum() > 0


def test_a_process_of_its_own_has_the_faster_mode():
    given = Given(toys.Cached(), toys.Cached())
    own = Given.of(given.module(torch))
    assert not given.way(Recipe(MODEL)).inference and own.way(Recipe(MODEL)).inference
    for one in (given, own):
        seen = []
        hook = one.model.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.is_inference()))
        served = host.Served(torch, one, Recipe(MODEL), PROMPTS, Request(4))
        served.loop.generate(PROMPTS, Request(4))
        served.last_logits([1, 2])
        hook.remove()
        assert set(seen) == {one is own}, "the costs of drafts included"


# -- what a search says, and what the user is told ----------------------------------------------------------------------


def test_a_prompt_without_tokens_is_named():
    with pytest.raises(UsageError, match="prompt 2 of 2 is empty"):
        generate(toys.Cached(), [[1, 2], []], max_new_tokens=2)


def test_a_model_without_a_cache_is_not_told_of_the_way_without_one():
    """Two rows were fed as a view of more, which a forward that flattens by view does not take; nanoGPT's does."""
    class OneRow(toys.Whole):
        def forward(self, ids):
            if len(ids) > 1:
                raise RuntimeError("one at a time")
            return super().forward(ids)

    with pytest.raises(UsageError, match="cannot be called with several rows of tokens") as refused:
        generate(OneRow(toys.Cached()), [[1, 2, 3]], max_new_tokens=2)
    assert "recompute" not in refused.value.remedy


def test_what_was_found_refuses_a_prompt_in_the_users_words_from_the_first_call_on():
    result = optimize(toys.Cached(), PROMPTS, max_new_tokens=4, time="1s", ways=(), isolate=False)
    result.recipe = Recipe("prompt-lookup")
    for prompts, said in (([[0] * 500], "500 tokens of prompt"), ([[99]], "prompt 0 holds token 99")):
        for _ in range(2):
            with pytest.raises(UsageError, match=said) as refused:
                result.generate(prompts)
            assert refused.value.remedy
    assert len(result.generate(PROMPTS).tokens) == 2


def test_a_first_prompt_without_room_for_drafts_is_decoded_plainly():
    """A search has nothing to measure then; who calls what it found wants tokens."""
    short, long = toys.Cached(seed=9, context=16), [number % 13 for number in range(30)]
    given, request = Given(toys.Cached(), short), Request(6)
    with pytest.raises(host.Refused, match="no room for drafts"):
        host.Local(torch, given, Recipe(MODEL), [long], request)
    result = optimize(toys.Cached(), PROMPTS, max_new_tokens=6, draft=short, time="1s", ways=(), isolate=False)
    result.recipe = Recipe(MODEL)
    assert result.generate(long).tokens == generate(toys.Cached(), long, max_new_tokens=6).tokens


def test_a_technique_without_effect_is_named_to_the_user(monkeypatch):
    def nothing(*given):
        raise NotApplied("no layer was exchanged")

    monkeypatch.setattr(host.weights, "techniques", lambda torch, model: {"int8": (None, "")})
    monkeypatch.setattr(host.weights, "quantized", nothing)
    given = Given(toys.Cached())
    with pytest.raises(host.Refused, match="no layer") as refused:
        host.Local(torch, given, Recipe(weights="int8"), PROMPTS, Request(4))
    assert refused.value.fate == "not_applied"
    with pytest.raises(EnvironmentProblem, match="int8 takes no effect here") as raised:
        host.Served.found(torch, given, Recipe(weights="int8"), PROMPTS, Request(4))
    assert "no layer" in raised.value.cause and raised.value.remedy


# -- how drafts are counted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["itself", "prompt-lookup"])
def test_drafts_behind_the_end_of_a_text_did_not_stay(draft):
    """Five drafts stayed of a text that ended at the first of them."""
    model = toys.Cached()
    text = toys.greedy(model, PROMPTS[0], 24)
    drafts = model if draft == "itself" else draft
    found = generate(model, PROMPTS[:1], max_new_tokens=24, eos=text[1], draft=drafts, lengths=(5,))
    run = found.runs[0]
    assert found.tokens == [text[:2]] and run.stayed <= run.judged <= 1
    if draft == "itself":
        assert run.drafted == 5 and run.stayed == run.judged == 1 and found.acceptance_rate == 1


def test_build_takes_off_the_wrapping_too():
    loop = build.build(torch, torch.compile(toys.Cached(), backend="eager"), build.Way(), PROMPTS, Request(4))
    assert loop.target.name == "Cached" and loop.known_tokens == 13


# -- what is given beside tokens ----------------------------------------------------------------------------------------


class Seeing(toys.Cached):
    """A language model that may be shown a picture."""

    def forward(self, ids, cache=None, pixel_values=None, labels=None):
        return super().forward(ids, cache) + (0 if pixel_values is None else pixel_values.mean())


def test_a_picture_beside_the_tokens_is_not_dropped_without_a_word():
    """The text would be that of the tokens alone."""
    tokens, picture = {"input_ids": torch.tensor(PROMPTS[:1])}, {"pixel_values": torch.ones(1, 3, 2, 2)}
    found = optimize(Seeing(), PROMPTS, max_new_tokens=4, time="1s", ways=(), isolate=False)
    for call in (lambda prompts: generate(Seeing(), prompts, max_new_tokens=4), found.generate,
                 lambda prompts: optimize(Seeing(), prompts, max_new_tokens=4, time="1s", ways=(), isolate=False),
                 Program(torch, Given(Seeing()), Recipe(), Request(4), 1)):
        for prompts in ({**tokens, **picture}, SimpleNamespace(**tokens, **picture), [{**tokens, **picture}, PROMPTS[1]]):
            with pytest.raises(UsageError, match="hold pixel_values beside their tokens") as refused:
                call(prompts)
            assert refused.value.remedy
    columns = {"labels": tokens["input_ids"], "text": ["a column of a data set"], "pixel_values": None}
    assert found.generate({**tokens, **columns}).tokens == found.generate(PROMPTS[0]).tokens
    assert len(generate(toys.Cached(), {**tokens, **picture}, max_new_tokens=4).tokens) == 1, "a model that takes none"
