"""device-prefetch on a real device: the same bytes arrive, ahead, whatever the streams do."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

from saturate.agent.context import Context  # noqa: E402
from saturate.data import device_copies  # noqa: E402
from saturate.techniques import device_prefetch  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Images(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((3, 256, 256), float(index)), index


def epoch():
    """Digests of what arrived, computed while later copies run and memory is used again."""
    torch.manual_seed(0)
    weights = torch.randn(2048, 2048, device="cuda")
    found = []
    for images, labels in DataLoader(Images(), batch_size=8, shuffle=True, num_workers=2, pin_memory=True):
        moved, classes = images.to("cuda"), labels.cuda(non_blocking=True)
        for _ in range(20):
            weights = (weights @ weights).clamp(-1, 1)      # keeps the stream busy behind the host
        found.append((moved.double().sum(), classes.sum(), moved.shape, moved.device))
        del moved, classes
    return [(total.item(), classes.item(), *rest) for total, classes, *rest in found]


def test_the_same_bytes_arrive_ahead():
    plain = epoch()
    context = Context(torch)
    device_prefetch.apply(context, device_prefetch.Options())
    try:
        for _ in range(5):
            assert epoch() == plain
        text = str(context.notes["device-prefetch"])
        assert int(text.split()[0]) > 0, text
    finally:
        context.undo()
    assert epoch() == plain


def test_what_the_script_writes_behind_its_move_comes_too_late():
    """The copy may still be under way: here the stream of copies has something else to do first."""
    device, batch = torch.device("cuda", torch.cuda.current_device()), torch.ones(1 << 26).pin_memory()
    copies = device_copies.Copies(torch, device_copies.Cuda(torch, torch.Tensor.to))
    copies._moved[0] = device
    copies.next_batch([], [torch.ones(1).pin_memory()])
    with torch.cuda.stream(copies._api._streams[device]):
        torch.cuda._sleep(400_000_000)
    copies.next_batch([], [batch])
    copies.next_batch([batch], None)
    taken = copies.take(batch, device)
    batch.fill_(-1)
    assert bool((taken == 1).all())
