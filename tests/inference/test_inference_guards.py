"""Guards: what a score does not show."""

from __future__ import annotations

import types

import pytest

from saturate.inference import agreement, guards, variations
from saturate.inference.guards import examine, repeats

torch = pytest.importorskip("torch", reason="models need torch")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LOGITS = [[torch.randn(16, 10, generator=seeded(1))], [torch.randn(7, 10, generator=seeded(2))]]


def changed(batches, change):
    return [[change(leaf.clone()) for leaf in leaves] for leaves in batches]


def problem(candidate, numerics="precision", baseline=LOGITS, **more):
    return examine(torch, baseline, candidate, numerics=numerics, **more).problem


def test_the_same_outputs_pass_everything():
    found = examine(torch, LOGITS, changed(LOGITS, lambda x: x), numerics="exact")
    assert found.problem is None
    assert found.agreement_db == agreement.IDENTICAL_DB and found.flip_rate == 0
    assert {finding.guard for finding in found.findings} == {"structure", "finite", "agreement"}


@pytest.mark.parametrize("candidate, says", [
    (LOGITS[:1], "1 of 2 batches"),
    ([[*leaves, leaves[0]] for leaves in LOGITS], "2 tensors instead of 1"),
    (changed(LOGITS, lambda x: x[:, :9]), r"shape (16, 9)"),
    (changed(LOGITS, lambda x: x[:-1]), r"shape (15, 10)"),
    (changed(LOGITS, lambda x: x.long()), "int64"),
    (changed(LOGITS, lambda x: x.to(torch.complex64)), "complex64"),
    (changed(LOGITS, lambda x: x.index_fill(1, torch.tensor([3]), float("nan"))), "16 values"),
    (changed(LOGITS, lambda x: x.index_fill(0, torch.tensor([2]), float("inf"))), "not finite"),
])
def test_another_structure_or_broken_numbers_are_named(candidate, says):
    for numerics in ("precision", "reordering"):
        assert says in (problem(candidate, numerics) or "")


def test_a_half_precision_output_is_the_same_kind_of_number():
    assert problem(changed(LOGITS, lambda x: x.bfloat16())) is None


@pytest.mark.parametrize("fill", [float("-inf"), torch.finfo(torch.float32).min, -1e9])
def test_masked_entries_are_no_signal_and_no_damage(fill):
    """A mask of -inf, or of float32's least number (which float16 rounds to -inf), is the same on both sides."""
    masked = changed(LOGITS, lambda x: x.index_fill(1, torch.tensor([0, 4]), fill))
    half = changed(masked, lambda x: x.half().float())
    found = examine(torch, masked, half, numerics="precision")
    assert found.problem is None
    assert found.agreement_db is not None and 60 < found.agreement_db < 80      # that of float16, without the mask
    lost = changed(masked, lambda x: x.index_fill(1, torch.tensor([4]), 0.0))
    assert (examine(torch, masked, lost, numerics="precision").agreement_db or 0) < 10


def test_what_the_baseline_has_no_number_for_is_not_asked_of_a_candidate():
    nans = changed(LOGITS, lambda x: x.index_fill(1, torch.tensor([0]), float("nan")))
    assert examine(torch, nans, LOGITS, numerics="exact").problem is None      # where the baseline has none itself


@pytest.mark.parametrize("dtype, low, high", [(torch.bfloat16, 50, 62), (torch.float16, 66, 80)])
def test_agreement_is_that_of_the_format(dtype, low, high):
    found = examine(torch, LOGITS, changed(LOGITS, lambda x: x.to(dtype).float()), numerics="precision")
    assert found.problem is None and found.agreement_db is not None
    assert low < found.agreement_db < high


def test_the_worst_tensor_counts():
    pair = [[torch.randn(8, 4, generator=seeded()), 1000 * torch.randn(8, 300, generator=seeded())]]
    found = examine(torch, pair, [[pair[0][0] * 1.1, pair[0][1]]], numerics="precision")
    assert found.agreement_db == pytest.approx(20, abs=0.1)


def test_outputs_without_fractions_have_no_agreement():
    ids = [[torch.arange(12).reshape(3, 4), torch.tensor([True, False])]]
    found = examine(torch, ids, ids, numerics="exact")
    assert found.problem is None and found.agreement_db is None and found.flip_rate is None


def test_flips_of_class_scores():
    turned = [[leaf.clone() for leaf in leaves] for leaves in LOGITS]
    turned[0][0][:3] = -turned[0][0][:3]
    assert examine(torch, LOGITS, turned, numerics="precision").flip_rate == pytest.approx(3 / 23)
    tokens = [[torch.tensor(0.5), torch.randn(2, 5, 7, generator=seeded())]]
    other = [[tokens[0][0], tokens[0][1].flip(-1)]]
    assert (examine(torch, tokens, other, numerics="precision").flip_rate or 0) > 0.5
    assert examine(torch, [[torch.randn(4, 1)]], [[torch.randn(4, 1)]], numerics="precision").flip_rate is None


# -- lossless claims -----------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """Deep enough for float association to show."""

    def __init__(self, width: int = 64, layers: int = 6):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return x


def outputs(net, dtype=torch.float32):
    x = torch.randn(32, 64, generator=seeded(3), dtype=torch.float64)
    with torch.no_grad():
        return [[net.to(dtype)(x.to(dtype)).float() if dtype != torch.float64 else net.to(dtype)(x)]]


def test_another_order_of_sums_is_lossless_and_a_shorter_format_is_not():
    baseline, wide = outputs(Net()), outputs(Net(), torch.float64)
    assert problem(baseline, "reordering", [[leaf.float() for leaf in leaves] for leaves in wide]) is None
    for dtype in (torch.bfloat16, torch.float16):
        sold = outputs(Net(), dtype)
        assert "it calls itself reordering" in (problem(sold, "reordering", baseline) or "")
        assert problem(sold, "precision", baseline) is None
    assert "every bit" in (problem(changed(baseline, lambda x: x * (1 + 2**-22)), "exact", baseline) or "")


def test_what_counts_is_the_format_that_the_baseline_computes_in():
    baseline, other = outputs(Net(), torch.bfloat16), outputs(Net(), torch.float16)
    assert problem(other, "reordering", baseline) is not None
    assert problem(other, "reordering", baseline, precision="bfloat16") is None
    assert problem(outputs(Net()), "reordering", outputs(Net(), torch.float64), precision="float64") is not None


def test_one_wrong_corner_of_a_large_output_is_not_lossless():
    large = [[torch.randn(1, 3, 128, 128, generator=seeded())]]
    wrong = changed(large, lambda x: x)
    wrong[0][0][0, 0, 0, 0] += 1
    assert problem(wrong, "reordering", large) is not None


def test_a_baseline_that_repeats_only_roughly_is_the_measure():
    noisy = changed(LOGITS, lambda x: x + 1e-3 * torch.randn(x.shape, generator=seeded(5)))
    other = changed(LOGITS, lambda x: x + 1e-3 * torch.randn(x.shape, generator=seeded(6)))
    for numerics in ("exact", "reordering"):
        assert problem(noisy, numerics) is not None
        assert problem(noisy, numerics, again=other) is None
        worse = changed(LOGITS, lambda x: x + 1e-1 * torch.randn(x.shape, generator=seeded(7)))
        assert problem(worse, numerics, again=other) is not None


def test_a_model_that_enlarges_small_differences_may_differ_by_them():
    """Iterating a chaotic map loses the digits of every order of sums; bfloat16 loses all of them."""

    def model(x, dtype=torch.float32):
        y = torch.stack([x, 1 - x], -1).to(dtype)
        for _ in range(13):
            y = 3.9 * y * (1 - y)
        return y.float()

    batches = [(torch.rand(500, generator=seeded(8)) * 0.9 + 0.05,)]
    twin = [[model(*batch)] for batch in variations.perturbed(torch, batches)]
    baseline, wide, short = ([[model(*batch, dtype)] for batch in batches] for dtype in (torch.float32, torch.float64, torch.bfloat16))
    assert "85 dB" in (problem(wide, "reordering", baseline) or "")
    assert problem(wide, "reordering", baseline, twin=twin) is None
    assert problem(short, "reordering", baseline, twin=twin) is not None
    calm = [[leaf * (1 + 2**-23) for leaf in leaves] for leaves in LOGITS]
    assert problem(changed(LOGITS, lambda x: x * (1 + 1e-6)), "reordering", twin=calm) is None       # it never demands more


def test_perturbed_inputs_differ_by_one_rounding():
    x = torch.rand(100, 2, generator=seeded()) + 0.1
    (one, ids, flag), = variations.perturbed(torch, [(x, torch.arange(3), True)])
    assert ((one / x - 1).abs() <= 2.1 * 2**-23).all() and (one > x).any() and (one < x).any()
    assert torch.equal(ids, torch.arange(3)) and flag is True
    half, = variations.perturbed(torch, [(x.bfloat16(),)])
    assert half[0].dtype == torch.bfloat16 and not torch.equal(half[0], x.bfloat16())
    assert variations.perturbed(torch, [(torch.arange(3),)]) is None


def test_whole_numbers_of_a_lossless_candidate_may_differ_by_a_tie_only():
    ids = [[torch.arange(400).reshape(20, 20, 1)]]
    tie, many = changed(ids, lambda x: x), changed(ids, lambda x: x)
    tie[0][0][3, 3] += 1
    many[0][0][:4, 3] += 1
    assert problem(tie, "exact", ids) is not None
    assert problem(tie, "reordering", ids) is None
    assert "4 of 400" in (problem(many, "reordering", ids) or "")
    assert problem(many, "precision", ids) is None


@pytest.mark.parametrize("few", [1, 16, 99])
def test_of_few_whole_numbers_none_may_differ_unless_the_baseline_changes_one_itself(few):
    ids = [[torch.arange(few)]]
    other = changed(ids, lambda x: x.index_add(0, torch.tensor([few // 2]), torch.tensor([3])))
    assert f"1 of {few} whole numbers" in (problem(other, "reordering", ids) or "")
    assert problem(other, "reordering", ids, twin=other) is problem(other, "reordering", ids, again=other) is None
    assert problem(other, "reordering", ids, spare=1) is None


def test_the_baseline_s_own_changes_excuse_no_more_than_a_few():
    ids = [[torch.arange(400)]]
    other = changed(ids, lambda x: x.flip(0))
    assert "400 of 400" in (problem(other, "reordering", ids, twin=other) or "")


@pytest.mark.parametrize("wanted, got, tie", [
    (5011959035832, -267798784, False), (2**31, 2**31 - 1, True), (7, 31999, True), (-3, -4, True), (7, -4, False),
    (0, 2**31 - 1, False)])
def test_a_whole_number_that_no_tie_leads_to_is_wrong_however_many_there_are(wanted, got, tie):
    many = [[torch.full((10000,), wanted)]]
    other = changed(many, lambda x: x.index_fill(0, torch.tensor([4]), got))
    assert (problem(other, "reordering", many) is None) is tie


def test_outputs_that_are_all_zero_must_stay_zero():
    zero = [[torch.zeros(4, 4)]]
    assert problem([[torch.full((4, 4), 1e-9)]], "reordering", zero) is not None
    assert problem(zero, "reordering", zero) is None
    found = examine(torch, zero, [[torch.ones(4, 4)]], numerics="precision")
    assert found.agreement_db is not None and found.agreement_db < -100


# -- what masks may hide -------------------------------------------------------------------------------------------


def sure(batch: int = 64, classes: int = 100) -> torch.Tensor:
    """The probabilities of a classifier that is sure of itself: the median is some 1e-9, what matters is near 1."""
    return torch.softmax(8 * torch.randn(batch, classes, generator=seeded(11)), 1)


def tops(values, change):
    place = values.argmax(1, keepdim=True)
    return values.scatter(1, place, change(values.gather(1, place)))


@pytest.mark.parametrize("numerics", ["exact", "reordering"])
def test_what_is_far_larger_than_the_typical_entry_is_compared(numerics):
    one = [[sure()]]
    assert "it calls itself" in (problem([[tops(one[0][0], lambda top: 0.6 * top)]], numerics, one) or "")
    mixed = [[torch.randn(64, 5, generator=seeded()) * torch.tensor([1e-6, 1e-6, 1e-6, 1e-6, 1e3])]]
    assert problem([[mixed[0][0] * torch.tensor([1, 1, 1, 1, 1.5])]], numerics, mixed) is not None
    assert problem([[sure()]], numerics, one) is None


@pytest.mark.parametrize("numerics", ["exact", "reordering", "precision"])
def test_a_value_that_became_infinite_is_damage_however_large_it_was(numerics):
    one = [[sure()]]
    assert "not finite" in (problem([[tops(one[0][0], lambda top: top * float("inf"))]], numerics, one) or "")


@pytest.mark.parametrize("numerics", ["exact", "reordering"])
def test_a_mask_of_a_lossless_candidate_stays_a_number(numerics):
    """Only a shorter format may round it to infinity."""
    masked = changed(LOGITS, lambda x: x.index_fill(1, torch.tensor([0, 4]), torch.finfo(torch.float32).min))
    assert problem(masked, numerics, masked) is None
    assert "not finite" in (problem(changed(masked, lambda x: x.half().float()), numerics, masked) or "")


def test_a_mask_is_compared_too():
    masked = changed(LOGITS, lambda x: x.index_fill(1, torch.tensor([0, 4]), -1e9))
    where = masked[0][0] < -1e8
    for factor in (1 + 2**-8, 0.6, -1.0):
        assert problem([[torch.where(where, factor * masked[0][0], masked[0][0])], masked[1]], "reordering", masked) is not None
    short = examine(torch, masked, changed(masked, lambda x: x.bfloat16().float()), numerics="precision")
    assert short.agreement_db is not None and 48 < short.agreement_db < 62, "that of bfloat16"


def test_large_numbers_that_repeat_are_numbers():
    """Prices that are capped are no masks: rounding is allowed to them, errors are not."""
    prices = [[(1e5 * torch.rand(200, 1, generator=seeded())).clamp(max=50_000.0)]]
    assert problem(changed(prices, lambda x: x * (1 + 2**-22)), "reordering", prices) is None
    assert problem(changed(prices, lambda x: x * 1.001), "reordering", prices) is not None
    flat = [[torch.full((8, 2), 50_000.0)]]
    assert problem(changed(flat, lambda x: x * (1 + 2**-22)), "reordering", flat) is None
    assert problem(changed(flat, lambda x: x * 1.001), "reordering", flat) is not None


@pytest.mark.parametrize("candidate", [torch.zeros_like, lambda x: torch.randn(x.shape, generator=seeded(4))])
def test_where_the_inputs_rounding_changes_all_nothing_can_be_shown_to_be_lossless(candidate):
    """High-frequency features of coordinates, as in neural radiance fields."""

    def model(x):
        return torch.sin(x * 2**24)

    x = torch.rand(1024, 3, generator=seeded())
    (moved,), = variations.perturbed(torch, [(x,)])
    said = problem([[candidate(x)]], "reordering", [[model(x)]], again=[[model(x)]], twin=[[model(moved)]])
    assert "cannot be shown to be lossless" in (said or "")
    noisy = [[model(x) + torch.randn(x.shape, generator=seeded(9))]]
    assert problem([[candidate(x)]], "reordering", [[model(x)]], again=noisy) is not None


# -- determinism, lengths, other batch sizes -----------------------------------------------------------------------


def test_a_candidate_that_is_random_is_named():
    dropped = [changed(LOGITS, lambda x: torch.nn.functional.dropout(x, 0.1)) for _ in range(2)]
    assert not repeats(torch, *dropped).passed
    assert repeats(torch, LOGITS, changed(LOGITS, lambda x: x)).passed
    assert repeats(torch, LOGITS, changed(LOGITS, lambda x: x.bfloat16().float())).passed        # sums in another order
    ids = [[torch.randint(50, (4, 6), generator=seeded(seed))] for seed in range(2)]
    assert not repeats(torch, ids[:1], ids[1:]).passed
    assert not repeats(torch, [[ids[0][0]]], [[ids[0][0][:, :4]]]).passed


def test_generated_text_must_be_as_long_as_the_baselines():
    text = [[torch.arange(1, 81).reshape(4, 20)]]
    assert problem([[text[0][0][:, :19]]], baseline=text) is None
    assert "75%" in (problem([[text[0][0][:, :15]]], baseline=text) or "")
    assert "as long" in (problem([[torch.cat([text[0][0]] * 2, 1)]], baseline=text) or "")
    padded = text[0][0].clone()
    padded[:, 8:] = 0
    assert "45%" in (problem([[padded]], baseline=text, generates=True) or "")
    assert problem([[padded]], baseline=text) is None           # classes of pixels, as far as anybody knows
    assert problem([[text[0][0].clone()]], baseline=text, generates=True) is None


@pytest.mark.parametrize("numerics", ["exact", "reordering"])
def test_a_lossless_text_is_held_to_its_promise_whatever_its_length(numerics):
    text = torch.randint(50_000, (1, 100), generator=seeded())
    other = torch.randint(50_000, (1, 97), generator=seeded(1))
    assert "differ" in (problem([[other]], numerics, [[text]]) or ""), "three tokens less, and all others are others"
    assert "3 of 100 whole numbers" in (problem([[text[:, :97]]], numerics, [[text]]) or "")
    assert "3 of 100 whole numbers" in (problem([[text]], numerics, [[text[:, :97]]]) or "")
    assert "3 of 100 whole numbers" in (problem([[text[:, :97]]], numerics, [[text]], again=[[text.clone()]]) or "")
    assert problem([[text.clone()]], numerics, [[text]]) is None


def test_a_tie_at_the_end_of_a_text_is_a_tie():
    """One row that goes on for a token: the others are padded, by what they end with."""
    ended = torch.randint(1, 50_000, (8, 20), generator=seeded())
    longer = torch.cat([ended, ended[:, -1:]], 1)
    longer[0, -1] = 0
    assert problem([[longer]], "reordering", [[ended]], spare=1) is None and problem([[ended]], "reordering", [[longer]], spare=1) is None
    longer[1, -1] = 0
    assert "2 of 168 whole numbers" in (problem([[longer]], "reordering", [[ended]]) or "")
    assert "20 of 20 whole numbers" in (problem([[ended[:1]]], "reordering", [[ended[:1, :0]]], spare=1) or "")


def test_what_stands_beside_a_text_of_another_length_is_looked_at():
    text, score = torch.arange(1, 81).reshape(4, 20), torch.ones(4)
    assert "not finite" in (problem([[text[:, :19], score / 0]], baseline=[[text, score]]) or "")
    found = examine(torch, [[text, score]], [[text[:, :19], 1.01 * score]], numerics="precision")
    assert found.problem is None and found.agreement_db == pytest.approx(40, abs=0.1)


def found(*counts: int, seed: int = 3):
    """Answers of a detector to one image each: boxes, and their classes."""
    return [[torch.rand(count, 4, generator=seeded(seed + count)), torch.ones(count, dtype=torch.int64)] for count in counts]


IMAGES = [(torch.zeros(1, 3, 8, 8),)] * 4


def test_what_a_detector_finds_is_counted_where_its_inputs_have_one_shape():
    assert guards.counted(IMAGES, found(9, 40, 40, 31)) == {0, 1}
    assert guards.counted(IMAGES, found(9, 9, 9, 9)) == frozenset()
    # Longer inputs have longer answers, and so have texts of other lengths; neither is a matter of how much was found.
    assert guards.counted([(torch.zeros(1, size),) for size in (9, 12)], found(9, 12)) == frozenset()
    assert guards.counted(IMAGES[:2], [[torch.ones(2, 9).long()], [torch.ones(2, 12).long()]]) == frozenset()
    assert guards.counted(IMAGES[:2], [[torch.ones(9, 4)], [torch.ones(9, 5)]]) == frozenset()


@pytest.mark.parametrize(("counts", "numerics", "says"), [
    ((9, 40, 40, 31), "precision", None),
    ((10, 38, 41, 31), "precision", None),              # a box more, two boxes less: the check says whether that matters
    ((9, 40, 41, 31), "reordering", "has the shape (41, 4)"),
    ((0, 0, 0, 0), "precision", "hold 0 entries on the inputs, the baseline's 240"),
    ((30, 90, 90, 80), "precision", "hold 580 entries"),
])
def test_a_detector_may_find_one_more_or_less_with_other_numbers(counts, numerics, says):
    """Such candidates were rejected for the shape of their output before the check was asked."""
    own = found(9, 40, 40, 31)
    seen = examine(torch, own, found(*counts), numerics=numerics, counted=guards.counted(IMAGES, own))
    assert says is None and seen.problem is None or says in (seen.problem or "")


def test_what_cannot_be_compared_row_by_row_does_not_agree():
    own = found(9, 40, 40, 31)
    other = examine(torch, own, found(10, 41, 41, 32), numerics="precision", counted={0, 1})
    assert other.problem is None and other.agreement_db is None
    one = examine(torch, own, found(9, 41, 41, 32), numerics="precision", counted={0, 1})
    assert one.agreement_db == agreement.IDENTICAL_DB      # of the answers that have as many


def test_other_columns_are_another_structure_whatever_is_counted():
    other = [[boxes[:, :3], classes] for boxes, classes in found(9, 41)]
    assert "has the shape (9, 3)" in (examine(torch, found(9, 40), other, numerics="precision", counted={0, 1}).problem or "")


def test_sparse_answers_are_compared_as_dense_ones():
    scores, chosen = torch.eye(4), torch.eye(4).long()
    given = [[scores.to_sparse(), chosen.to_sparse()]]
    assert problem(given, baseline=given) is None and agreement.flip_rate(given, given) == 0
    other = [[scores.flip(1).to_sparse(), chosen.flip(1).to_sparse()]]
    assert "agrees with the baseline's" in (problem(other, baseline=given, numerics="reordering") or "")
    assert agreement.flip_rate(given, other) == 1


def test_other_batches_are_cut_from_the_first_one():
    x, y = torch.arange(14.0).reshape(7, 2), torch.arange(7)
    found = variations.other_batches([(x, y, torch.tensor(0.5)), (x,)])
    assert [batch[0].shape[0] for batch in found] == [1, 5]
    assert torch.equal(found[1][1], y[:5]) and found[0][2] == 0.5
    assert [batch[0].shape[0] for batch in variations.other_batches([(x[:2],)])] == [1]
    for none in ([], [(x[:1],)], [(x, y[:3])], [(x, "text")], [(torch.tensor(1.0),)], [(x, 7)], [(x, types.MappingProxyType({"y": y}))]):
        assert variations.other_batches(none) == []
    for of_samples in ([1, 2, 3, 4, 5, 6, 8], [x, 2], {"length": 5}, [True] * 7):
        assert variations.other_batches([(x, of_samples)]) == [], "one for each sample, perhaps"
    nested = variations.other_batches([(torch.tensor(0.5), {"x": x, "more": [y, None]}, True, 0.5, 3)])
    assert [batch[1]["x"].shape[0] for batch in nested] == [1, 5]
    assert torch.equal(nested[1][1]["more"][0], y[:5]) and nested[1][1]["more"][1] is None and nested[1][2:] == (True, 0.5, 3)


def test_fractions_inside_of_containers_are_moved_as_well():
    inputs = [({"x": torch.ones(3)}, None, [torch.arange(2)])]
    moved = variations.perturbed(torch, inputs)
    assert (moved[0][0]["x"] - 1).abs().max() == torch.finfo(torch.float32).eps and moved[0][1] is None
    assert torch.equal(moved[0][2][0], torch.arange(2)) and torch.equal(inputs[0][0]["x"], torch.ones(3))
    assert variations.perturbed(torch, [({"x": torch.arange(2)},)]) is None


def test_of_answers_of_another_length_those_that_are_no_numbers_are_seen():
    own, other = found(9, 40), found(10, 41)
    assert examine(torch, own, other, numerics="precision", counted={0, 1}).problem is None
    other[1][0][3] = float("nan")
    assert "4 values in tensor 0 of its output on batch 1 are not finite" in (examine(torch, own, other, numerics="precision", counted={0, 1}).problem or "")
