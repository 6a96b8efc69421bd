"""Micro-steps of transformers' Trainer that run as one: the same updates, what stays the script's own, and what is left alone."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from saturate.agent.context import Context  # noqa: E402
from saturate.records.facts import Evidence, Facts, OptimizerFacts, TrainerFacts  # noqa: E402
from saturate.techniques import _hf_trainer, merged_micro_batches, micro_batch  # noqa: E402
from saturate.techniques._api import NotApplied  # noqa: E402
from saturate.techniques._merged_batch import NotMergeable, merge, samples, weights  # noqa: E402

ID = merged_micro_batches.TECHNIQUE.id


class Rows(torch.utils.data.Dataset):
    def __init__(self, count=42, tokens=50, longest=12, shortest=12, labels=True):
        self.labels = labels
        drawn = torch.Generator().manual_seed(0)
        lengths = torch.randint(shortest, longest + 1, (count,), generator=drawn)
        self.rows = [torch.randint(1, tokens, (int(length),), generator=drawn) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], **({"labels": self.rows[index]} if self.labels else {})}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([Rows(42)[index] for index in range(42)])


def gpt(**more):
    settings = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0,
                "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**settings, **more}))


class Outcome(SimpleNamespace):
    """`updates`: the losses that came to the backward passes, by update."""

    @property
    def counts(self):
        return [len(losses) for losses in self.updates]

    @property
    def sums(self):
        return [math.fsum(losses) for losses in self.updates]


@contextlib.contextmanager
def watched(act) -> Iterator[list[list[float]]]:
    """The losses of each update; `act` is called as the first one ends, from within the optimizer's step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    updates: list[list[float]] = [[]]
    original = torch.autograd.backward

    def backward(tensors, *args, **kwargs):
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:      # others are parts of a backward pass
            updates[-1].append(float(tensors.detach()))
        return original(tensors, *args, **kwargs)

    def stepped(*_):
        if len(updates) == 1:
            act()
        updates.append([])

    hook, torch.autograd.backward = register_optimizer_step_post_hook(stepped), backward
    try:
        yield updates
    finally:
        torch.autograd.backward = original
        hook.remove()
        updates.pop()


def train(folder, factor=0, model=gpt, trainer=transformers.Trainer, data=None, resume=False, more=None, **arguments):
    """Six updates of eight samples, unless `arguments` say otherwise; techniques act from the second on."""
    given = {"max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 1e-3, "seed": 0,
             "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, **arguments}
    transformers.set_seed(0)
    made = trainer(model=model(), train_dataset=Rows() if data is None else data,
                   args=transformers.TrainingArguments(str(folder), **given), **(more or {}))
    context, refused = Context(torch), []

    def act():
        try:
            if factor:
                merged_micro_batches.apply(context.of(ID), merged_micro_batches.Options(factor))
        except NotApplied as reason:
            refused.append(str(reason))

    with watched(act) as updates:
        made.train(resume_from_checkpoint=resume or None)
    notes = dict(context.notes)
    context.undo()
    assert not {"training_step", "get_batch_samples"} & vars(made).keys()
    logged = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return Outcome(updates=updates, weights=[p.detach().clone() for p in made.model.parameters()], notes=notes, logged=logged, trainer=made,
                   refused="".join(refused), proof=merged_micro_batches.active(Evidence(notes=notes), merged_micro_batches.Options(factor or 2)))


def same(ours, theirs):
    assert ours.sums == pytest.approx(theirs.sums, rel=1e-5)
    for one, other in zip(ours.weights, theirs.weights):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    assert ours.logged == pytest.approx(theirs.logged, rel=1e-4)


@pytest.mark.parametrize("factor", [2, 4])
def test_the_same_training_in_fewer_backward_passes(tmp_path, factor):
    """An epoch has 21 batches: its last update has one, and a step of the next one follows."""
    plain, merged = train(tmp_path), train(tmp_path, factor)
    assert plain.counts == [4, 4, 4, 4, 4, 1]
    assert merged.counts == [4, *[4 // factor] * 4, 1]
    same(merged, plain)
    assert merged.proof.active and f"{factor} micro-steps as one" in merged.proof.evidence
    assert merged.trainer.state.train_batch_size == 2 and merged.trainer.args.gradient_accumulation_steps == 4
    assert merged.trainer.state.total_flos == plain.trainer.state.total_flos


def test_lengths_are_padded_as_the_collator_does(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(50)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0")
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    given = {"data": Rows(shortest=3, labels=False), "more": {"data_collator": collator, "processing_class": tokenizer}}
    plain, merged = train(tmp_path, **given), train(tmp_path, 4, **given)
    assert merged.counts == [4, 1, 1, 1, 1, 1]
    same(merged, plain)

    own = {**given, "more": {"data_collator": lambda rows: collator(rows)}}
    left = train(tmp_path, 4, **own)
    assert left.counts == [4, 4, 4, 4, 4, 1] and "how it is padded is not known" in left.proof.evidence


@pytest.mark.parametrize("given", [
    {"data": Stream()},
    {"data": Rows(shortest=3), "train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 1},
    {"dataloader_drop_last": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
], ids=["iterable", "by length", "drop last"])
def test_whatever_draws_the_samples(tmp_path, given):
    plain, merged = train(tmp_path, **given), train(tmp_path, 2, **given)
    same(merged, plain)
    if "train_sampling_strategy" not in given:
        assert merged.counts[1] == plain.counts[1] // 2


class Means(transformers.Trainer):
    """A mean of each micro-batch, which the Trainer divides by how many there are."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = inputs["input_ids"]
        losses = torch.nn.functional.cross_entropy(model(rows).logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none")
        return self.mean(losses, rows[:, 1:])

    def mean(self, losses, targets):
        return losses.mean()


class OfSomeTokens(Means):
    """A micro-batch of few tokens that count weighs as much as one of many."""

    def mean(self, losses, targets):
        return (losses * (targets < 25)).sum() / (targets < 25).sum()


class WithinBatch(Means):
    """Each sample is to be nearer to itself than to the others of its batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        left, right = (torch.nn.functional.normalize(part.mean(1), dim=1) for part in model(inputs["input_ids"]).logits.chunk(2, dim=1))
        return torch.nn.functional.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))


class AddsUp(Means):
    """As the Trainer does with what models return that take `num_items_in_batch` and do not divide by it."""

    loss_is_scaled_for_ga = True


class DividesItself(Means):
    """As was usual once: it divides by the accumulation, and says so."""

    loss_is_scaled_for_ga = True

    def mean(self, losses, targets):
        return losses.mean() / self.args.gradient_accumulation_steps


@pytest.mark.parametrize("trainer", [Means, AddsUp, DividesItself])
def test_means_that_weigh_alike_are_merged_and_the_rest_runs_as_it_is(tmp_path, trainer):
    given = {"trainer": trainer, "data": Rows(41), "max_steps": 7}
    plain, merged = train(tmp_path, **given), train(tmp_path, 2, **given)
    assert plain.counts == [4, 4, 4, 4, 4, 1, 4] and merged.counts == [4, 2, 2, 2, 2, 1, 2]
    same(merged, plain)
    ragged = {**given, "data": Rows(39), "max_steps": 5}
    plain, merged = train(tmp_path, **ragged), train(tmp_path, 4, **ragged)
    assert plain.counts == [4] * 5 and merged.counts == [4, 1, 1, 1, 4], "the last batch of an epoch has one sample"
    same(merged, plain)


@pytest.mark.parametrize("trainer", [OfSomeTokens, WithinBatch])
def test_what_is_no_sum_over_samples_runs_as_the_script_wrote_it(tmp_path, capfd, trainer):
    plain, left = train(tmp_path, trainer=trainer), train(tmp_path, 4, trainer=trainer)
    assert left.updates == plain.updates, "bit for bit"
    assert all(torch.equal(one, other) for one, other in zip(left.weights, plain.weights))
    assert not left.proof.active and "do not weigh the same" in left.proof.evidence
    assert "micro-steps run as the script wrote them" in capfd.readouterr().err


class Embedded(torch.nn.Module):
    """A model of the script's own. `kind`: what of a forward is more than a function of each sample."""

    def __init__(self, kind=""):
        super().__init__()
        self.kind, self.calls = kind, 0
        self.table, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)
        self.norm = torch.nn.BatchNorm1d(8) if kind == "norm" else torch.nn.Identity()
        self.register_buffer("seen", torch.zeros(()))
        self.drop = torch.nn.Dropout(0.5 if kind == "drop" else 0.0)

    def forward(self, input_ids, labels=None):
        if self.kind == "counts":
            self.calls += 1
        if self.kind == "buffer":
            self.seen += 1
        states = self.norm(self.table(input_ids).transpose(1, 2)).transpose(1, 2)
        if self.kind == "couples":
            states = states + states.mean(0, keepdim=True)
        logits = self.head(self.drop(states))
        return {"loss": torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


@pytest.mark.parametrize(("kind", "words"), [
    ("norm", "normalizes over the batch"), ("counts", "its forward changes calls"), ("buffer", "its forward changes seen"),
    ("couples", "samples depend on each other")])
def test_models_that_look_at_the_batch(tmp_path, kind, words):
    plain, left = train(tmp_path, model=lambda: Embedded(kind)), train(tmp_path, 4, model=lambda: Embedded(kind))
    assert left.counts == plain.counts and words in left.refused + left.proof.evidence
    assert left.sums == pytest.approx(plain.sums)
    assert float(left.trainer.model.seen) == float(plain.trainer.model.seen), "what is run to compare leaves nothing behind"


class Classes(Rows):
    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": int(self.rows[index][0]) % 2}


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0))


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5))


@pytest.mark.parametrize("given", [
    {"model": bert, "data": Classes()}, {"bf16": True}, {"gradient_checkpointing": True}, {"label_smoothing_factor": 0.1},
    {"neftune_noise_alpha": 5.0}, {"gradient_accumulation_steps": 32},
    {"eval_strategy": "steps", "eval_steps": 1, "more": {"eval_dataset": Rows()}},      # leaves the model in evaluation mode
], ids=["classes", "bf16", "checkpointing", "smoothing", "neftune", "longer than an epoch", "evaluation"])
def test_what_else_a_trainer_does(tmp_path, given):
    plain, merged = train(tmp_path, **given), train(tmp_path, 4, **given)
    assert merged.counts[1] == -(-plain.counts[1] // 4)
    assert merged.sums == pytest.approx(plain.sums, rel=1e-3 if "bf16" in given else 1e-5)


class Rare(torch.utils.data.IterableDataset):
    """All samples are of one class, but for one in the fifth update."""

    def __init__(self):
        self.rows = [{"input_ids": row["input_ids"], "labels": int(number == 33)} for number, row in enumerate(map(Rows(48).__getitem__, range(48)))]

    def __iter__(self):
        return iter(self.rows)


class ByClass(Means):
    weights = (1.0, 50.0)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(inputs["input_ids"]).logits
        logits.register_hook(lambda gradient: None)
        return torch.nn.functional.cross_entropy(logits, inputs["labels"], weight=torch.tensor(self.weights))


class ByEqualWeights(ByClass):
    weights = (2.0, 2.0)


def test_a_mean_that_weighs_classes_is_left_alone_though_none_of_the_batches_that_are_compared_shows_it(tmp_path):
    given = {"model": bert, "data": Rare()}
    plain, left = (train(tmp_path, factor, trainer=ByClass, **given) for factor in (0, 4))
    assert left.updates == plain.updates and "weights of its samples" in left.proof.evidence
    assert all(torch.equal(one, other) for one, other in zip(left.weights, plain.weights))
    merged = train(tmp_path, 4, trainer=ByEqualWeights, **given)
    assert merged.counts == [4, 1, 1, 1, 1, 1]
    same(merged, train(tmp_path, trainer=ByEqualWeights, **given))


def test_experts_that_balance_their_load_over_a_batch(tmp_path):
    left = train(tmp_path, 4, model=mixtral)
    assert left.counts == [4, 4, 4, 4, 4, 1] and "samples depend on each other" in left.proof.evidence


def test_a_model_of_the_scripts_own(tmp_path):
    """Its labels are for each token, and it knows nothing of what counts in the whole update."""
    plain, merged = train(tmp_path, model=Embedded), train(tmp_path, 4, model=Embedded)
    assert merged.counts == [4, 1, 1, 1, 1, 1]
    same(merged, plain)
    dropping = train(tmp_path, 4, model=lambda: Embedded("drop"))
    assert dropping.counts == [4, 1, 1, 1, 1, 1], "dropout is set aside while both ways are compared"


class Counting(transformers.Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class Each(transformers.TrainerCallback):
    def on_substep_end(self, *args, **kwargs):
        pass


@pytest.mark.parametrize(("given", "words"), [
    ({"trainer": Counting}, "Counting has a training_step of its own"),
    ({"more": {"callbacks": [Each()]}}, "Each acts on each micro-step"),
    ({"gradient_accumulation_steps": 3}, "no multiple of 2"),
])
def test_what_is_refused(tmp_path, given, words):
    left = train(tmp_path, 2, max_steps=2, **given)
    assert words in left.refused and left.counts == train(tmp_path, max_steps=2, **given).counts


def test_what_fails_in_us_does_not_end_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(merged_micro_batches, "weights", lambda *given: 1 / 0)
    plain, left = train(tmp_path), train(tmp_path, 4)
    assert left.updates == plain.updates and left.proof.evidence == "ZeroDivisionError: division by zero"


def test_what_the_script_drops_is_gone(tmp_path):
    """Although nothing was taken back."""
    context = Context(torch)
    made = transformers.Trainer(model=gpt(), train_dataset=Rows(), args=transformers.TrainingArguments(
        str(tmp_path), max_steps=3, gradient_accumulation_steps=2, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True))
    with watched(lambda: merged_micro_batches.apply(context.of(ID), merged_micro_batches.Options())) as updates:
        made.train()
    assert list(map(len, updates)) == [2, 1, 1]
    left = weakref.ref(made), weakref.ref(made.model)
    del made
    gc.collect()
    assert [one() for one in left] == [None, None]
    context.undo()


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    """In the middle of an epoch, with the samples that come next."""
    steady = {"lr_scheduler_type": "constant"}
    whole = train(tmp_path, 4, **steady)
    train(tmp_path, 4, max_steps=3, save_strategy="steps", save_steps=3, **steady)
    saved = json.loads((tmp_path / "checkpoint-3/trainer_state.json").read_text())
    arguments = torch.load(tmp_path / "checkpoint-3/training_args.bin", weights_only=False)
    assert saved["train_batch_size"] == 2
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (2, 4)
    rest = train(tmp_path, 4, resume=True, **steady)
    assert rest.counts == [4, 1, 1] and rest.sums == pytest.approx(whole.sums[3:], rel=1e-4)
    for one, other in zip(rest.weights, whole.weights):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


# -- batches ---------------------------------------------------------------------------------------------------------


def of(*rows, **more):
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.ones(len(rows), len(rows[0]), dtype=torch.int64), **more}


PADDINGS = {"input_ids": 9, "attention_mask": 0, "labels": -100}


def test_batches_of_several_lengths():
    merged, padded = merge([of([1, 2]), of([3, 4, 5])], PADDINGS, False, torch)
    assert padded and merged["input_ids"].tolist() == [[1, 2, 9], [3, 4, 5]] and merged["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    merged, padded = merge([of([1, 2]), of([3, 4, 5])], PADDINGS, True, torch)
    assert merged["input_ids"].tolist() == [[9, 1, 2], [3, 4, 5]]
    merged, padded = merge([of([1, 2], names=["a"], flag=True), of([3, 4], names=["b"], flag=True)], {}, False, torch)
    assert not padded and merged["names"] == ["a", "b"] and merged["flag"] is True


@pytest.mark.parametrize(("batches", "words"), [
    (([1],), "no mapping"), ((of([1]), of([1], more=None)), "other entries"),
    ((of([1, 2]), of([1, 2, 3], labels=torch.ones(1, 3))), "other entries"),
    ((of([1, 2], scale=torch.ones(())),), "one entry for each sample"), ((of([1], most=3), of([2], most=4)), "most is a int"),
    ((of([1], places=torch.ones(1, 2)), of([2], places=torch.ones(1, 3))), "how it is padded is not known"),
    ((of([1], image=torch.ones(1, 2, 3)), of([2], image=torch.ones(1, 2, 4))), "another shape or kind"),
    ((of([1], weight=torch.ones(1)), of([2], weight=torch.ones(1).double())), "another shape or kind"),
    (({"input_ids": torch.ones(1, 2)}, {"input_ids": torch.ones(1, 3)}), "how it is padded is not known"),
])
def test_batches_that_stay_as_they_are(batches, words):
    with pytest.raises(NotMergeable, match=words):
        merge(batches, PADDINGS, False, torch)


def test_what_a_mean_is_the_mean_of():
    assert samples(of([1], [2]), torch) == 2
    labels = torch.tensor([[-100, 3, -100], [4, 5, 6]])
    assert weights({"labels": labels}, ("labels",), torch) == (2, 4, 3)
    for one, counted in ((0, 2), (-100, 1)):        # one for each sample, or none
        assert weights({"labels": torch.tensor([1, one])}, ("labels",), torch) == (2, counted)


# -- decisions -------------------------------------------------------------------------------------------------------


FACTS = Facts(micro_steps=8, trainer=TrainerFacts("Trainer", 8), optimizers=(OptimizerFacts(kind="AdamW"),))


@pytest.mark.parametrize(("facts", "words"), [
    ({"micro_steps": 1}, "one micro-step"), ({"trainer": None}, "from outside"), ({"trainer": TrainerFacts("Trainer", 1)}, "no micro-steps"),
    ({"trainer": TrainerFacts("Trainer", 8, "it has BatchNorm")}, "it has BatchNorm"), ({}, "Trainer accumulates 8 micro-steps")])
def test_for_whom_it_is(facts, words):
    found = merged_micro_batches.eligible(dataclasses.replace(FACTS, **facts))
    assert bool(found) is (not facts) and words in found.reason


@pytest.mark.parametrize(("count", "factors"), [(8, [8, 2]), (2, [2]), (9, [9, 3]), (7, [7]), (6, [6, 2])])
def test_all_or_the_fewest(count, factors):
    facts = dataclasses.replace(FACTS, trainer=TrainerFacts("Trainer", count))
    assert [options.factor for options in merged_micro_batches.variants(facts)] == factors


def test_the_other_direction_points_here():
    assert "made by merged-micro-batches" in micro_batch.eligible(dataclasses.replace(FACTS, modules=(wrappable(),))).reason
    for trainer in (None, TrainerFacts("Trainer", 8, "it has BatchNorm")):
        plain = dataclasses.replace(FACTS, trainer=trainer, modules=(wrappable(),))
        assert "not made from outside of its loop" in micro_batch.eligible(plain).reason


def wrappable():
    from saturate.records.facts import ModuleFacts

    return ModuleFacts(kind="Net")


def test_a_trainer_that_is_not_known(monkeypatch):
    monkeypatch.setattr(_hf_trainer, "running", lambda: SimpleNamespace(current_gradient_accumulation_steps=1, get_batch_samples=1,
                                                                        args=SimpleNamespace(gradient_accumulation_steps=4)))
    assert "replaced on the Trainer" in _hf_trainer.facts(torch).never_merged
    monkeypatch.setattr(_hf_trainer, "_of_loop", lambda trainer: "")
    assert "none that is known here (AttributeError" in _hf_trainer.facts(torch).never_merged


def test_outside_of_a_trainer():
    assert _hf_trainer.running() is None and _hf_trainer.facts(torch) is None
    with pytest.raises(NotApplied, match="no Trainer"):
        merged_micro_batches.apply(Context(torch), merged_micro_batches.Options())
    with pytest.raises(ValueError, match="factor is 1"):
        merged_micro_batches.Options(1)
