"""A way to generate in a folder: it says the same after it was loaded, holds no pickle, and is refused by name where it
is damaged, foreign or not buildable."""

from __future__ import annotations

import contextlib
import errno
import json
import tempfile
import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="generation needs torch")

import generation_models as toys  # noqa: E402

import saturate  # noqa: E402
from saturate.errors import ArtifactDamaged, EnvironmentProblem, UsageError  # noqa: E402
from saturate.inference import artifact as stored_artifact  # noqa: E402
from saturate.inference import folders, lines  # noqa: E402
from saturate.inference.generation import LOOKUP, artifact, host, optimize, safetensors  # noqa: E402
from saturate.inference.generation.decode import Request  # noqa: E402
from saturate.inference.generation.recipe import MODEL, Given, Recipe  # noqa: E402
from saturate.inference.generation.sampling import GREEDY  # noqa: E402
from saturate.inference.generation.search import Ready  # noqa: E402
from saturate.records.generation import GenerationCandidate  # noqa: E402

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 1, 2, 3], [9, 8, 9, 8], [5, 5, 1]]
ROW = GenerationCandidate(id="a way", numerics="reordering", fate="kept", reason="")
QUOTING = Recipe(LOOKUP)


def stored(folder, model, draft=None, recipe=QUOTING):
    wanted = [toys.greedy(model, prompt, 12) for prompt in PROMPTS]
    artifact.store(torch, folder, Given(model, draft), recipe, Request(12, GREEDY, frozenset()), 1, ROW, list(zip(PROMPTS, wanted)))
    return wanted


@pytest.mark.parametrize("draft", [None, 5])
def test_it_says_the_same_after_it_was_loaded(tmp_path, draft):
    drafting = None if draft is None else toys.Cached(seed=draft)
    wanted = stored(tmp_path / "a", toys.Cached(seed=3), drafting, Recipe(LOOKUP if draft is None else MODEL))
    found = saturate.load(tmp_path / "a", model=toys.Cached(seed=8), draft=None if draft is None else toys.Cached(seed=9))
    assert [row.tolist() for row in found(PROMPTS)] == wanted
    assert found(PROMPTS[0], max_new_tokens=3)[0].tolist() == wanted[0][:3]
    assert found.verify().ok
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"manifest.json", "examples.bin", "reproduce.py", "model.safetensors", *(["draft.safetensors"] if draft else [])}


def test_models_of_a_gpu_are_put_there_when_they_are_loaded(tmp_path, monkeypatch):
    """A stand-in for the GPU: what is built, or given, is on the CPU."""
    moved = []
    monkeypatch.setattr(toys.Cached, "to", lambda self, device: moved.append(device) or self, raising=False)
    wanted = stored(tmp_path / "a", toys.Cached(seed=3), toys.Cached(seed=5), Recipe(MODEL))
    settings = stored_artifact.read(tmp_path / "a").settings
    assert settings["device"] == "cpu"
    for device, places in (("cpu", []), ("cuda", ["cuda", "cuda"])):
        found = artifact.program(torch, tmp_path / "a", {**settings, "device": device}, toys.Cached(seed=8), toys.Cached(seed=9))
        assert moved == places and found(PROMPTS[0])[0].tolist() == wanted[0]
    del settings["device"]          # as older artifacts have it
    artifact.program(torch, tmp_path / "a", settings, toys.Cached(), toys.Cached())
    assert len(moved) == 2


def test_without_a_model_of_that_class_it_says_what_it_needs(tmp_path):
    stored(tmp_path / "a", toys.Cached())
    with pytest.raises(UsageError, match="does not know how to build its model, a Cached"):
        saturate.load(tmp_path / "a")
    with pytest.raises(ArtifactDamaged, match="not those of its model"):
        saturate.load(tmp_path / "a", model=toys.Cached(width=32))


def test_other_artifacts_take_no_models(tmp_path):
    stored(tmp_path / "a", toys.Cached())
    manifest = {**json.loads((tmp_path / "a" / "manifest.json").read_text()), "format": "onnx"}
    (tmp_path / "a" / "manifest.json").write_text(json.dumps({**manifest, "digest": stored_artifact.digest(manifest)}))
    with pytest.raises(UsageError, match="takes no model"):
        saturate.load(tmp_path / "a", model=toys.Cached())


@pytest.mark.parametrize("change", [
    lambda data: data[:20], lambda data: b"\xff" * 8 + data[8:], lambda data: data[:8] + b"[" + data[9:], lambda data: b"\x80\x04N."])
def test_files_that_are_no_tensors_are_refused(tmp_path, change):
    path = tmp_path / "a"
    safetensors.write(torch, path, {"x": torch.arange(6.0).reshape(2, 3)})
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError):
        safetensors.read(torch, path)


def test_tensors_come_back_as_they_were(tmp_path):
    shared = torch.randn(3, 4)
    state = {"a": torch.tensor(True), "b": shared, "c": shared, "d": torch.randn(4, 2).bfloat16().t(), "e": torch.zeros(0, 2)}
    safetensors.write(torch, tmp_path / "x", state)
    found = safetensors.read(torch, tmp_path / "x")
    assert list(found) == ["a", "b", "d", "e", "c"] and all(torch.equal(found[name], state[name]) for name in state)
    assert found["c"] is found["b"], "tied weights are stored once"
    with pytest.raises(safetensors.Unstorable, match="y is a dict"):
        safetensors.write(torch, tmp_path / "y", {"y": {}})


def test_the_library_of_the_format_reads_them(tmp_path):
    theirs = pytest.importorskip("safetensors.torch", reason="the reference reader")
    state = toys.Cached().state_dict()
    safetensors.write(torch, tmp_path / "x", state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in theirs.load_file(tmp_path / "x").items())


@pytest.mark.parametrize("wrong", [{"class": "os", "configuration_class": "os"}, {"class": "pipeline", "configuration_class": "LlamaConfig"},
                                   {"class": "LlamaForCausalLM", "configuration_class": "AutoConfig"}])
def test_only_classes_of_transformers_are_built(tmp_path, wrong):
    pytest.importorskip("transformers", reason="the models under test are its")
    with pytest.raises(ArtifactDamaged, match="has no model"):
        artifact._built(torch, {"library": "transformers", "configuration": {}, **wrong}, {})


def test_a_configuration_names_no_code_and_no_place():
    """transformers would fetch an attention's kernels, or another model's backbone, from wherever they are named."""
    transformers = pytest.importorskip("transformers", reason="the models under test are its")
    with pytest.raises(ArtifactDamaged, match="no causal language model"):
        artifact._built(torch, {"library": "transformers", "class": "DetrModel", "configuration_class": "DetrConfig",
                                "configuration": {"backbone": "some/where"}}, {})
    plain = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11, "auto_map": {"AutoModel": "some/where--code.Model"}}
    state = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11)).state_dict()
    built = artifact._built(torch, {"library": "transformers", "class": "GPT2LMHeadModel", "configuration_class": "GPT2Config",
                                    "configuration": {**plain, "attn_implementation": "some/where@main",
                                                      "_attn_implementation": "some/where"}}, state)
    assert isinstance(built, transformers.GPT2LMHeadModel) and "/" not in str(built.config._attn_implementation)
    assert artifact.architecture(transformers.GPT2Model(built.config)) == {"class": "GPT2Model"}


#: Of a text model inside of another one.
GEMMA = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 8}


@pytest.mark.parametrize("inside", [
    {"model_type": "timm_wrapper", "architecture": "resnet18", "model_args": {"checkpoint_path": "artifact/evil.pth"}},
    {"model_type": "timm_wrapper", "architecture": "hf-hub:some/where"}, {"model_args": {"checkpoint_path": "evil.pth"}}, {"hidden_size": 8}, None])
def test_a_configuration_within_a_configuration_is_not_built(monkeypatch, inside):
    """timm would unpickle a checkpoint that it names, or fetch one, while a model is outlined."""
    transformers = pytest.importorskip("transformers", reason="the models under test are its")
    from transformers.models.timm_wrapper import modeling_timm_wrapper as wrapper

    asked = []
    monkeypatch.setattr(wrapper, "timm", SimpleNamespace(create_model=lambda *given, **more: asked.append((given, more))), raising=False)
    monkeypatch.setattr(wrapper, "requires_backends", lambda *given: None)
    build = transformers.AutoModel.from_config
    monkeypatch.setattr(transformers.AutoModel, "from_config", lambda config, **more: (asked.append(config), build(config, **more))[1])
    configuration = {"text_config": GEMMA, **({} if inside is None else {"vision_config": inside})}
    with pytest.raises(ArtifactDamaged, match="may load another part, by vision_config|by text_config") as refused:
        artifact._built(torch, {"library": "transformers", "class": "Gemma3ForConditionalGeneration", "configuration_class": "Gemma3Config",
                                "configuration": configuration}, {"weight": torch.zeros(1)})
    assert "model=" in refused.value.remedy and asked == []


@pytest.mark.parametrize("change", [
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "file": "some/where"}}, {"backbone": "resnet18"}, {"use_pretrained_backbone": True},
    {"checkpoint_path": "evil.pth"}, {"more": [{"architecture": "resnet18"}]}])
def test_a_word_that_may_have_something_loaded_is_refused_wherever_it_stands(change):
    transformers = pytest.importorskip("transformers", reason="the models under test are its")
    plain = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11}
    state = transformers.GPT2LMHeadModel(transformers.GPT2Config(**plain)).state_dict()
    known = {"library": "transformers", "class": "GPT2LMHeadModel", "configuration_class": "GPT2Config"}
    with pytest.raises(ArtifactDamaged, match="may load another part"):
        artifact._built(torch, {**known, "configuration": {**plain, **change}}, state)
    artifact._built(torch, {**known, "configuration": {**plain, "_name_or_path": "some/where", "pretraining_tp": 1, "backbone_hidden_size": 8}}, state)


def test_a_model_with_other_models_inside_needs_an_instance():
    """What would not be built again is not said to be."""
    transformers = pytest.importorskip("transformers", reason="the models under test are its")
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 16, "patch_size": 8}
    config = transformers.Gemma3Config(text_config=GEMMA, vision_config=vision, mm_tokens_per_image=4)
    known = artifact.architecture(transformers.Gemma3ForConditionalGeneration(config))
    assert known["class"] == "Gemma3ForConditionalGeneration" and "library" not in known
    assert artifact.architecture(transformers.LlamaForCausalLM(transformers.LlamaConfig(**GEMMA)))["library"] == "transformers"


@pytest.mark.parametrize(("change", "said"), [
    ({"num_hidden_layers": 10**9}, "1000000000 layers"), ({"vocab_size": 10**13}, "weight is (10000000000000, 32)"),
    ({"hidden_size": 2**40}, "is"), ({"num_hidden_layers": 1}, "layers.1"), ({"num_hidden_layers": "many"}, "num_hidden_layers"),
    ({"rope_parameters": {"rope_type": "no such"}}, "no such"),
])
def test_a_configuration_that_asks_for_too_much_is_refused_before_it_gets_it(tmp_path, change, said):
    transformers = pytest.importorskip("transformers", reason="the models under test are its")
    config = transformers.LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.LlamaForCausalLM(config)
    artifact.safetensors.write(torch, tmp_path / "model.safetensors", model.state_dict())
    known = artifact.architecture(model)
    artifact._filled(torch, tmp_path, "model", known, None)
    with pytest.raises(ArtifactDamaged) as raised:
        artifact._filled(torch, tmp_path, "model", {**known, "configuration": {**known["configuration"], **change}}, None)
    assert said in raised.value.cause


def test_a_table_larger_than_the_weights_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the models under test are its")
    model = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(hidden_size=8, num_layers=1, num_heads=2, vocab_size=11,
                                                                     attention_types=[[["global"], 1]], max_position_embeddings=4))
    state = {name: tensor for name, tensor in model.state_dict().items()}
    known = artifact.architecture(model)
    known["configuration"]["max_position_embeddings"] = 10**6
    state["transformer.wpe.weight"] = torch.zeros(1).expand(10**6, 8)
    with pytest.raises(ValueError, match="bytes beside its weights"):
        artifact._built(torch, known, state)


def test_a_model_of_transformers_builds_itself(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the models under test are its")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                      max_position_embeddings=64, initializer_range=0.6, eos_token_id=None, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.tensor([PROMPTS[0]])
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[0, 7:].tolist()
    artifact.store(torch, tmp_path / "a", Given(model), Recipe(LOOKUP), Request(12, GREEDY, frozenset()), 1, ROW, [(PROMPTS[0], wanted)])
    found = saturate.load(tmp_path / "a", verify=True)
    assert found(PROMPTS[0])[0].tolist() == wanted


def test_a_model_of_transformers_says_the_same_without_saturate(tmp_path):
    """By the lines of reproduce.py, in the loop of its library: with a draft, with the text's own, with neither; an end that only one of
    its configurations knows is none."""
    transformers = pytest.importorskip("transformers", reason="the models under test are its")
    pytest.importorskip("safetensors", reason="as transformers needs it")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                      max_position_embeddings=64, initializer_range=0.6, tie_word_embeddings=True)
    model, draft = (transformers.LlamaForCausalLM(config).eval().bfloat16() for _ in range(2))
    ends = frozenset(), frozenset({int(model(torch.tensor([PROMPTS[0]])).logits[0, -1].argmax())})
    for number, (recipe, eos) in enumerate([(Recipe(MODEL), ends[0]), (QUOTING, ends[0]), (Recipe(), ends[0]), (Recipe(), ends[1])]):
        folder = tmp_path / str(number)
        artifact.store(torch, folder, Given(model, draft), recipe, Request(12, GREEDY, eos), 1, ROW, [])
        names = {"torch": torch, "inputs": (torch.tensor([PROMPTS[0]]),)}
        manifest = stored_artifact.read(folder)
        exec(lines.of_artifact(folder, manifest), names)
        wanted = saturate.load(folder)(PROMPTS[0])
        assert [row.tolist() for row in names["answers"]] == [row.tolist() for row in wanted] and len(wanted[0]) == (1 if eos else 12)
        assert next(names["network"].parameters()).dtype == torch.bfloat16
        assert all(map(torch.equal, names["network"].buffers(), model.buffers())), "those that are not stored were cast as well"
        assert ("assistant_model" in (folder / "reproduce.py").read_text()) == (recipe.draft == MODEL)


def test_lines_without_saturate_say_that_they_do_not_quantize(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the models under test are its")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                                                   num_attention_heads=4)).eval()
    for weights in (None, "torchao-int8-weights"):
        folder = tmp_path / str(weights)
        artifact.store(torch, folder, Given(model, None), Recipe(weights=weights), Request(12, GREEDY, frozenset()), 1, ROW, [])
        assert ("in fewer bits" in lines.of_artifact(folder, stored_artifact.read(folder))) is (weights is not None)


def test_of_another_model_there_are_the_weights_for_the_users_own_loop(tmp_path):
    pytest.importorskip("safetensors", reason="the reader of the format")
    stored(tmp_path / "a", toys.Cached(seed=3))
    names = {"model": toys.Cached(seed=8)}
    exec(lines.of_artifact(tmp_path / "a", stored_artifact.read(tmp_path / "a")), names)
    assert all(torch.equal(tensor, toys.Cached(seed=3).state_dict()[name]) for name, tensor in names["model"].state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("all_narrow", [False, True])
def test_buffers_that_are_not_stored_keep_their_format(tmp_path, all_narrow):
    """As `from_pretrained` gives a model in bfloat16, and as `.to` does: frequencies of positions in float32, or all of it."""
    transformers = pytest.importorskip("transformers", reason="the models under test are its")
    config = transformers.LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, vocab_size=40,
                                      max_position_embeddings=512, eos_token_id=None, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).eval()
    for tensor in model.parameters():
        tensor.data = tensor.data.bfloat16()
    if all_narrow:
        model.to(torch.bfloat16)
    artifact.store(torch, tmp_path / "a", Given(model, None), QUOTING, Request(12, GREEDY, frozenset()), 1, ROW, [])
    ids = torch.arange(400).remainder(40)[None]
    for instance in (None, transformers.LlamaForCausalLM(config)):
        found = saturate.load(tmp_path / "a", model=instance)._call._given.model
        assert {name: one.dtype for name, one in found.named_buffers()} == {name: one.dtype for name, one in model.named_buffers()}
        assert all(one.dtype == torch.bfloat16 for one in found.parameters()) and found.lm_head.weight is found.model.embed_tokens.weight
        with torch.no_grad():
            assert torch.equal(found(ids).logits, model(ids).logits)
    if not all_narrow:
        with pytest.raises(ArtifactDamaged, match="not those of its model") as caught:
            saturate.load(tmp_path / "a", model=transformers.LlamaForCausalLM(config).to(torch.bfloat16))
        assert "what is lost does not come back" in caught.value.cause


def test_a_winner_is_saved_once_it_proved_itself_in_a_fresh_process(tmp_path):
    result = optimize(toys.Cached(), PROMPTS, max_new_tokens=8, time="1s", ways=())
    assert result.best == "plain"
    result.recipe = Recipe(LOOKUP)
    result.save(tmp_path / "a")
    found = saturate.load(tmp_path / "a", model=toys.Cached(seed=7))
    assert [row.tolist() for row in found(PROMPTS)] == [toys.greedy(toys.Cached(), prompt, 8) for prompt in PROMPTS]
    assert found.info.settings["loaded_again"]["speedup"] > 0


def test_an_artifact_that_says_something_else_is_not_accepted(tmp_path):
    """The fresh process answers with the tokens of other weights."""
    host = Ready("", Recipe(), ROW)
    host.ready = type("Prepared", (), {"tolerance": 0.0})
    host.prepare = lambda batch, request: type("Run", (), {"tokens": [[1, 2, 3] for _ in batch], "total_ns": 1})
    host.last_logits = lambda text: torch.arange(13.0)

    class Yard:
        slowest_s = 0.0

        def running(self, *arguments):
            return contextlib.nullcontext(host)

    with pytest.raises(ArtifactDamaged, match="says something else"):
        artifact.proved(Yard(), tmp_path, [[PROMPTS[0]]], [[[1, 2, 4]]], Request(3))


def test_what_takes_minutes_for_a_batch_can_be_saved(monkeypatch, tmp_path):
    """All that took more than a minute for a batch was ended for it behind ten minutes, and "does not load in a fresh process". The clock
    is moved by batches alone."""
    now, limits = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yard = host.Yard(torch, None, None, 600.0)

    class Way:
        ready = type("Prepared", (), {"tolerance": 0.0})
        last_logits = None

        def prepare(self, batch, request):
            now[0] += 90.0
            return type("Run", (), {"tokens": [[1, 2, 3] for _ in batch], "total_ns": 90 * 10**9, "new_tokens": 3})

        def generate(self, batch, request):
            limits.append(yard._batch_s())
            return self.prepare(batch, request)

    yard.running = lambda *arguments: contextlib.nullcontext(Way())
    artifact.proved(yard, tmp_path, [[PROMPTS[0]]] * 2, [[[1, 2, 3]]] * 2, Request(3))
    assert min(limits) > 90.0 and len(limits) == 6, "and no more rounds than needed are begun behind the end"


def fewer_layers(model):
    model.model.layers = model.model.layers[:1]


def other_positions(model):
    model.model.rotary_emb.inv_freq *= 0.5


@pytest.mark.parametrize(("change", "said"), [(fewer_layers, "does not load in a fresh process"), (other_positions, "says something else")])
def test_a_model_that_its_configuration_does_not_build_is_not_saved(tmp_path, change, said):
    """What came with the process, as it was changed, stood in for what is built of the folder: loading it gave other tokens, or failed."""
    transformers = pytest.importorskip("transformers", reason="the models under test are its")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                      max_position_embeddings=64, initializer_range=0.6, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config).eval()
    change(model)
    result = optimize(model, PROMPTS, max_new_tokens=12, time="1s", ways=(), isolate=False)
    with pytest.raises(ArtifactDamaged, match=said) as refused:
        result.save(tmp_path / "a")
    assert "changed by hand" in refused.value.remedy and not (tmp_path / "a").exists()


def test_where_temporary_files_find_no_room_that_place_is_named(tmp_path, monkeypatch):
    result = optimize(toys.Cached(), PROMPTS, max_new_tokens=4, time="1s", ways=(), isolate=False)

    def full(*given, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner, name in ((artifact.safetensors, "write"), (stored_artifact.examples, "write"), (folders, "_new")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(EnvironmentProblem) as raised:
                result.save(tmp_path / "a")
        assert "TMPDIR" in raised.value.remedy and "No space left" in raised.value.cause, (owner, raised.value.card())
        assert tempfile.gettempdir() in raised.value.remedy and not (tmp_path / "a").exists()


def test_a_prompt_that_does_not_fit_is_the_users_at_the_first_call_too(tmp_path):
    """A search's own word for it came out, once."""
    stored(tmp_path / "a", toys.Cached(seed=3))
    for prompts, said in ([[0] * 500], "500 tokens of prompt"), ([[99]], "prompt 0 holds token 99"):
        with pytest.raises(UsageError, match=said) as refused:
            saturate.load(tmp_path / "a", model=toys.Cached())(prompts)
        assert refused.value.remedy
