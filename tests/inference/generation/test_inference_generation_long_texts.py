"""Texts that are longer than what a model is tried on before the first token: what computes otherwise there is refused."""

from __future__ import annotations

import types

import pytest

torch = pytest.importorskip("torch", reason="generation needs torch")

from saturate.errors import UsageError  # noqa: E402
from saturate.inference.generation import generate  # noqa: E402
from saturate.inference.generation.lengths import Turns, refuse, turns_of  # noqa: E402
from saturate.inference.generation.models import context_of  # noqa: E402

LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
            "original_max_position_embeddings": 32}
SHORT, LONG = [5, 9, 7, 3, 4], [(7 * place) % 37 + 2 for place in range(40)]


def scaled_anew():
    """Positions of texts of more than 32 tokens have another scale."""
    transformers = pytest.importorskip("transformers", reason="the models under test are its")
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=128, original_max_position_embeddings=32, rope_parameters=dict(LONGROPE), initializer_range=0.6,
        pad_token_id=0, bos_token_id=None, eos_token_id=None)
    return transformers.Phi3ForCausalLM(config).eval()


def local():
    """Every second layer sees see only 36 slots of its cache."""
    transformers = pytest.importorskip("transformers", reason="the models under test are its")
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        vocab_size=40, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, attention_types=[[["global", "local"], 1]],
        window_size=36, max_position_embeddings=128, initializer_range=0.6, bos_token_id=None, eos_token_id=None)
    return transformers.GPTNeoForCausalLM(config).eval()


def uncached(model, prompt, new):
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt):]


def test_a_text_that_grows_beyond_the_scale_of_its_positions_is_refused():
    model = scaled_anew()
    for prompts, more in (([SHORT], {}), ([SHORT, LONG], {}), ([SHORT, LONG], {"adapter": "recompute"})):
        with pytest.raises(UsageError, match="more than 32 tokens anew") as caught:
            generate(model, prompts, max_new_tokens=40, **more)
        assert "recompute" in caught.value.remedy
    assert generate(model, [SHORT, SHORT[1:]], max_new_tokens=20).tokens == [uncached(model, row, 20) for row in (SHORT, SHORT[1:])]
    assert generate(model, [LONG, LONG[2:]], max_new_tokens=20).tokens == [uncached(model, row, 20) for row in (LONG, LONG[2:])]
    assert generate(model, [SHORT], max_new_tokens=40, adapter="recompute").tokens == [uncached(model, SHORT, 40)]


def test_rows_behind_a_window_that_layers_count_themselves_are_refused():
    model = local()
    with pytest.raises(UsageError, match="see only 36 slots") as caught:
        generate(model, [SHORT, SHORT[1:]], max_new_tokens=40)
    assert "batch_size=1" in caught.value.remedy
    wanted = [uncached(model, row, 40) for row in (SHORT, SHORT[1:])]
    assert generate(model, [SHORT, SHORT[1:]], max_new_tokens=40, batch_size=1).tokens == wanted
    assert generate(model, [SHORT, SHORT[1:]], max_new_tokens=40, adapter="recompute").tokens == wanted
    assert generate(model, [SHORT, SHORT[1:]], max_new_tokens=20).tokens == [row[:20] for row in wanted]


def test_what_a_configuration_says_of_such_lengths():
    config = types.SimpleNamespace
    assert turns_of(None) == turns_of(config()) == Turns()
    assert turns_of(config(rope_parameters=LONGROPE)) == Turns(rescaled=32)
    assert turns_of(config(rope_parameters={"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}})) == Turns(rescaled=32)
    assert turns_of(config(rope_scaling={"type": "longrope"}, original_max_position_embeddings=64)) == Turns(rescaled=64)
    assert turns_of(config(rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 32})) == Turns()
    assert turns_of(config(attention_layers=["global", "local"], window_size=256)) == Turns(own_window=256)
    assert turns_of(config(attention_layers=["global"], window_size=256)) == Turns()
    assert turns_of(config(keep_window_size=2048)) == Turns(own_window=2048)


def test_the_slots_of_a_compiled_program_count():
    turns = Turns(own_window=100)
    refuse("it", turns, [5], 90, cached=True, slots=64)
    refuse("it", turns, [5], 500, cached=True)
    with pytest.raises(UsageError, match="see only 100 slots"):
        refuse("it", turns, [5], 90, cached=True, slots=128)


def test_a_model_whose_code_does_not_take_the_mask_is_refused_with_what_it_said():
    transformers = pytest.importorskip("transformers", reason="the models under test are its")
    torch.manual_seed(0)
    config = transformers.FalconConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, initializer_range=0.6,
                                       bos_token_id=None, eos_token_id=None)
    model = transformers.FalconForCausalLM(config).eval()
    with pytest.raises(UsageError, match="cannot be called with a static cache") as caught:
        generate(model, [SHORT], max_new_tokens=4)
    assert "ValueError" in caught.value.cause and "recompute" in caught.value.remedy
    assert generate(model, [SHORT], max_new_tokens=4, adapter="recompute").tokens == [uncached(model, SHORT, 4)]


def test_a_number_below_one_says_nothing_about_the_longest_text():
    assert context_of(types.SimpleNamespace(config=types.SimpleNamespace(max_position_embeddings=-1))) is None
