"""Models of Hugging Face transformers: the loop gives what their own `generate` gives; what it cannot do is refused
by name."""

from __future__ import annotations

import types

import pytest

torch = pytest.importorskip("torch", reason="generation needs torch")
transformers = pytest.importorskip("transformers", reason="the models under test are its")

import generation_models as toys  # noqa: E402

from saturate.errors import UsageError  # noqa: E402
from saturate.inference.generation import Sampling, generate, models  # noqa: E402
from saturate.inference.generation.build import eos_of, not_done  # noqa: E402
from saturate.inference.generation.models import context_of, decoder, window_of  # noqa: E402

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 4], [9, 8, 9, 8, 9, 8, 9, 8, 9]]
NEW = 20
SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.6,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def made(name, seed=0, **changes):
    torch.manual_seed(seed)
    if name == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=40,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            initializer_range=0.6,
            eos_token_id=None,
            bos_token_id=None,
            **changes,
        )
        return transformers.GPT2LMHeadModel(config).eval()
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def own(model, prompt):
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)[
        0, len(prompt) :
    ].tolist()


KINDS = {
    "Llama": {"num_key_value_heads": 2},
    "GPT2": {},
    "Qwen2": {"num_key_value_heads": 2},
    "GPTNeoX": {},
    "Llama, eager": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_their_own_generate(kind):
    changes = {**KINDS[kind], **({"attn_implementation": "eager"} if "eager" in kind else {})}
    name = kind.partition(",")[0]
    model = made(name, **changes)
    wanted = [own(model, prompt) for prompt in PROMPTS]
    assert len({tuple(text) for text in wanted}) == len(wanted)
    assert generate(model, PROMPTS, max_new_tokens=NEW).tokens == wanted
    assert generate(model, PROMPTS[:1], max_new_tokens=NEW).tokens == wanted[:1]
    draft = made(name, **changes)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    found = generate(model, PROMPTS, max_new_tokens=NEW, draft=draft, lengths=(3,))
    assert found.tokens == wanted and 0 < found.acceptance_rate < 1
    assert generate(model, PROMPTS, max_new_tokens=NEW, draft="prompt-lookup").tokens == wanted


def test_the_end_of_a_text_comes_from_the_models_configuration():
    model = made("Llama")
    ends = own(model, PROMPTS[0])[4]
    model.generation_config.eos_token_id = [ends]
    assert generate(model, PROMPTS[0], max_new_tokens=NEW).tokens[0] == own(model, PROMPTS[0])
    model.generation_config.eos_token_id = torch.tensor([ends])
    assert generate(model, PROMPTS[0], max_new_tokens=NEW).tokens[0][-1] == ends
    model.generation_config.eos_token_id, model.config.eos_token_id = None, ends
    assert generate(model, PROMPTS[0], max_new_tokens=NEW).tokens[0] == own(model, PROMPTS[0]), "nothing ends it"
    assert eos_of(types.SimpleNamespace(config=types.SimpleNamespace(eos_token_id=torch.tensor(7))), None) == {7}


def uncached(model, prompt):
    """Greedy tokens, each by a forward over the whole text."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt):]


#: Every layer slides; every second one does.
SLIDING = {"Mistral": {"num_key_value_heads": 4}, "Gemma2": {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}}


@pytest.mark.parametrize("window", [6, 12])
@pytest.mark.parametrize("name", SLIDING)
def test_behind_a_sliding_window_tokens_are_those_without_a_cache(name, window):
    model, draft = (made(name, sliding_window=window, **SLIDING[name]) for _ in range(2))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    assert window_of(model) == window < context_of(model)
    wanted = [uncached(model, prompt) for prompt in PROMPTS]
    wide = made(name, sliding_window=64, **SLIDING[name])
    assert wanted != [uncached(wide, prompt) for prompt in PROMPTS], "the window matters"
    assert generate(model, PROMPTS, max_new_tokens=NEW).tokens == wanted
    assert generate(model, PROMPTS[0], max_new_tokens=NEW).tokens == wanted[:1]
    for one in (draft, "prompt-lookup"):
        assert generate(model, PROMPTS, max_new_tokens=NEW, draft=one, lengths=(3,)).tokens == wanted


def test_a_model_that_cannot_be_called_behind_its_window_is_refused_with_the_reason(monkeypatch):
    model = made("Gemma2", sliding_window=32, **SLIDING["Gemma2"])
    honest = model.forward

    def forward(input_ids, position_ids=None, attention_mask=None, past_key_values=None, **more):
        return honest(input_ids=input_ids, position_ids=position_ids, past_key_values=past_key_values,
                      attention_mask=None if attention_mask is None else attention_mask.contiguous(), **more)

    monkeypatch.setattr(model, "forward", forward)
    assert len(generate(model, PROMPTS[:1], max_new_tokens=10).tokens[0]) == 10
    with pytest.raises(UsageError, match="more than the 32 tokens of its sliding window"):
        generate(model, PROMPTS, max_new_tokens=30)


def test_a_window_of_a_model_with_a_cache_of_ours_ends_the_context():
    model = toys.Cached()
    model.config = types.SimpleNamespace(sliding_window=8)
    with pytest.raises(UsageError, match=r"takes 8 \(behind its sliding window"):
        generate(model, [[1, 2, 3]], max_new_tokens=NEW)


def test_stateful_models_are_refused():
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4)
    ).eval()
    with pytest.raises(UsageError, match="MambaForCausalLM keeps a state that cannot be rolled back"):
        generate(model, PROMPTS, max_new_tokens=NEW)


def test_layers_of_attention_alone_keep_no_state():
    """Granite 4 and its like: the class says that its models are stateful, the layers of this one say that they are not."""
    def model(*layers):
        made = types.SimpleNamespace(_is_stateful=True, config=types.SimpleNamespace(layer_types=list(layers)))
        return models._refuse_stateful(made)

    model("full_attention", "attention", "mlp", "moe")
    for kind in ("linear_attention", "mamba", "conv"):
        with pytest.raises(UsageError, match=f"cannot be rolled back: {kind}$"):
            model("full_attention", kind, "moe")


def test_a_state_that_begins_anew_with_each_call_is_none_where_the_whole_text_is_fed():
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4)).eval()
    assert generate(model, PROMPTS[1], max_new_tokens=NEW, adapter="recompute").tokens == [own(model, PROMPTS[1])]


def test_how_the_model_would_sample_is_said_where_nothing_is(recwarn):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    model.generation_config.do_sample, model.generation_config.temperature, model.generation_config.top_k = True, 0.6, 5
    generate(model, PROMPTS[:1], max_new_tokens=2)
    assert "decodes greedily: sampling=Sampling(temperature=0.6, top_k=5) is what it asks for" in str(recwarn.pop(UserWarning).message)
    generate(model, PROMPTS[:1], max_new_tokens=2, sampling=Sampling(temperature=0.0))
    assert not [one for one in recwarn if "samples" in str(one.message)]


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    with pytest.raises(UsageError, match="meta device, without weights"):
        generate(model, PROMPTS[:1], max_new_tokens=2)


def test_chunked_attention_is_refused_with_a_cache_and_taken_without():
    torch.manual_seed(0)
    more = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48}
    model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**{**SMALL, **more, "attention_chunk_size": 8})).eval()
    assert "chunked_attention" in model.config.layer_types
    for adapter in (None, "huggingface", lambda model, ids, cache: model(input_ids=ids)):
        with pytest.raises(UsageError, match="chunked_attention, which need a mask that is not made here") as refused:
            decoder(torch, model, adapter)
        assert 'adapter="recompute"' in refused.value.remedy
    assert generate(model, PROMPTS[1], max_new_tokens=NEW, adapter="recompute").tokens == [own(model, PROMPTS[1])]


def test_encoder_decoders_are_refused():
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(UsageError):
        generate(transformers.T5ForConditionalGeneration(config).eval(), PROMPTS, max_new_tokens=NEW)


def test_what_the_generation_configuration_asks_for_and_is_not_done_is_said(recwarn):
    model = made("GPT2")
    generate(model, PROMPTS[0], max_new_tokens=2)
    assert not [one for one in recwarn if "generation_config" in str(one.message)]
    model.generation_config.repetition_penalty = 1.3
    model.generation_config.temperature = 0.7           # the call's own sampling decides
    with pytest.warns(UserWarning, match="repetition_penalty 1.3, which is not done"):
        generate(model, PROMPTS[0], max_new_tokens=2)


@pytest.mark.parametrize("name, value, done", [
    ("min_new_tokens", 1, False), ("no_repeat_ngram_size", 1, False), ("remove_invalid_values", True, False),
    ("forced_eos_token_id", 0, False), ("forced_eos_token_id", 1, False), ("suppress_tokens", [0], False), ("num_beams", 2, False),
    ("repetition_penalty", True, False), ("typical_p", 0.5, False),
    ("repetition_penalty", 1.0, True), ("num_beams", 1, True), ("typical_p", 1.0, True), ("min_new_tokens", 0, True),
    ("no_repeat_ngram_size", 0, True), ("early_stopping", True, True), ("suppress_tokens", [], True), ("remove_invalid_values", False, True),
])
def test_a_setting_does_nothing_at_its_own_neutral_value(name, value, done):
    configuration = types.SimpleNamespace(to_dict=lambda: {name: value})
    assert not_done(types.SimpleNamespace(generation_config=configuration)) == ([] if done else [f"{name} {value}"])


def test_padding_without_a_mask_is_not_taken_for_text_without_a_word(recwarn):
    """Their own generate leaves it out, by its number."""
    model, rows = made("Llama", pad_token_id=39), [[39, 39, 3, 4], [9, 8, 9, 8]]
    mask = [[0, 0, 1, 1], [1, 1, 1, 1]]
    ids = torch.tensor(rows)
    theirs = model.generate(ids, max_new_tokens=4, do_sample=False)[:, 4:].tolist()
    assert generate(model, {"input_ids": ids, "attention_mask": mask}, max_new_tokens=4).tokens == theirs
    assert generate(model, ids, max_new_tokens=4, eos=39).tokens      # one that ends texts may begin one
    assert not [one for one in recwarn if "padding" in str(one.message)]
    for padded in (ids, ids.flip(1)):
        with pytest.warns(UserWarning, match="token 39, which is padding"):
            generate(model, padded, max_new_tokens=4)
