"""bench/inference.py, bench/inference_search.py and bench/candidate_start.py: they run, and judge what they say."""

from __future__ import annotations

import types

import pytest

torch = pytest.importorskip("torch", reason="torch")
pytest.importorskip("onnxruntime", reason="the extra saturate[inference]")


LINES = {
    "candidate_start": r"^perceptron  fresh / forked start \d+\.\d{3} \[\d+\.\d{3}, \d+\.\d{3}\]  \(",
    "inference": r"^    over eager float32 \d+\.\d{3} \[\d+\.\d{3}, \d+\.\d{3}\] \(target 6\.5\)$",
    "inference_search": r"^resnet50   search / exhaustive optimum \d+\.\d{3} \[\d+\.\d{3}, \d+\.\d{3}\]  in \d+% of its time$",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LINES))
def test_smoke(name, smoke):
    smoke(name, LINES[name], timeout_s=900.0)


def test_the_models_are_those_that_everybody_means(bench):
    """By their number of parameters, as published (BERT without segments, and with a head of 16 classes)."""
    models = bench("_inference_models")
    with torch.device("meta"):
        counts = [sum(parameter.numel() for parameter in kind().parameters()) for kind in (models.ResNet, models.Bert, models.ViT)]
    assert counts == [25_557_032, 109_482_240 - 2 * 768 + 16 * 769, 86_567_656]


def test_small_models_answer_and_are_the_same_in_every_process(bench):
    models = bench("_inference_models")
    for name in models.NAMES:
        subject, again = models.build(name, small=True), models.build(name, small=True)
        first, second = subject.model(*subject.held_out[0]), again.model(*again.held_out[0])
        assert first.shape[0] == 1 and torch.isfinite(first).all() and torch.equal(first, second)
        assert len({subject.model(*batch).argmax().item() for batch in subject.held_out}) > 1, "top-1 tells nothing apart"
    with pytest.raises(ValueError, match="alexnet"):
        models.build("alexnet")


def test_everything_is_every_set_that_goes_together(bench):
    search = bench("inference_search")
    from saturate.inference import plan
    from saturate.inference.candidates import Part
    from saturate.inference.techniques import onnx_int8_dynamic, onnx_runtime
    from saturate.techniques._api import Technique, Touch

    free = types.SimpleNamespace(TECHNIQUE=Technique("free", "free", "exact", "session", (Touch("something"),)))
    parts = [Part(onnx_runtime, onnx_runtime.Options()), Part(onnx_runtime, onnx_runtime.Options(spin=False))]
    switch = Part(free, onnx_runtime.Options())
    number = Part(onnx_int8_dynamic, onnx_int8_dynamic.Options())
    found = [candidate.label() for candidate in search.everything(plan.Pool([switch], parts, [number]))]
    assert sorted(found) == sorted(["free", "onnx-runtime", "onnx-runtime spin=False", "onnx-int8-dynamic", "free + onnx-runtime",
                                    "free + onnx-runtime spin=False", "free + onnx-int8-dynamic"])


@pytest.mark.parametrize("eager, lossless, by_hand, met", [
    (6.6, 3.3, (0.97, 0.94, 1.01), True),       # a loss within the noise is none
    (6.4, 3.3, (1.0, 1.0, 1.0), False),
    (6.6, 3.1, (1.0, 1.0, 1.0), False),
    (6.6, 3.3, (0.95, 0.92, 0.98), False),
])
def test_what_meets_the_targets(bench, tmp_path, eager, lossless, by_hand, met):
    contest = bench("inference").Contest("resnet50", True, tmp_path)
    ratios = {"eager": (eager, 0.0, 9.0), "lossless": (lossless, 0.0, 9.0), "by hand": by_hand}
    assert contest.met(ratios) is met


@pytest.mark.parametrize("name, operations", [("resnet50", 8.2e9), ("bert-base", 12 * 128 * (24 * 768 + 4 * 128) * 768), ("vit-b16", 35.1e9)])
def test_the_operations_of_a_model_are_as_published(bench, name, operations):
    """Twice the multiplications that the papers and torchvision count: 4.09, 17.6 thousand millions. BERT: 12 layers of 24 * 768**2
    operations for each token, and 4 * 128 * 768 of attention over the 128 tokens of the benchmark."""
    assert bench("inference").products_of(name, False) == pytest.approx(operations, rel=0.02)


def test_within_reach_counts_the_products_of_the_model_only(bench, tmp_path, monkeypatch):
    """A CPU that multiplies bytes at ten times the rate at which eager does everything; and one that has no instruction for them, where
    torch takes a minute for one product."""
    inference, peers = bench("inference"), bench("_inference_peers")
    contest = inference.Contest("resnet50", True, tmp_path)
    rate = peers.PRODUCT / 10                           # of bytes, per second: one large product takes 10 s
    eager_s = inference.products_of("resnet50", True) / (rate / 10)
    monkeypatch.setattr(contest, "race", lambda a, b: {("eager", "int8-products"): (eager_s / 10,) * 3}[a, b])
    monkeypatch.setattr(inference, "has_vnni", lambda: True)
    assert contest.within_reach() == pytest.approx((10.0, 10.0, 10.0))
    monkeypatch.setattr(inference, "has_vnni", lambda: False)
    assert contest.within_reach() is None and "no VNNI" in inference.reach({"within_reach": None})


def test_a_product_of_bytes_answers_as_peers_do(bench, tmp_path):
    if not bench("inference").has_vnni():
        pytest.skip("torch takes a minute for one such product on a CPU without VNNI")
    peer = bench("_inference_peers").Peer("int8-products", "resnet50", True, 1, tmp_path / "log")
    try:
        assert all(time > 0 for time in peer.block(2))
    finally:
        peer.close()


def test_a_peer_that_fails_says_why(bench, tmp_path):
    peers = bench("_inference_peers")
    with pytest.raises(peers.Failed, match="no-such-peer"):
        peers.Peer("no-such-peer", "resnet50", True, 1, tmp_path / "log")


def test_a_peer_times_its_calls_while_it_is_not_frozen(bench, tmp_path):
    peers = bench("_inference_peers")
    peer = peers.Peer("eager", "bert-base", True, 1, tmp_path / "log")
    try:
        peer.freeze()
        peer.thaw()
        times = peer.block(3)
        assert len(times) == 3 and all(time > 0 for time in times) and peer.agreement == 1.0
    finally:
        peer.close()
