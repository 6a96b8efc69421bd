"""Samples as bytes: what comes back is what went in, and bytes that are no sample never do more than raise."""

from __future__ import annotations

import random
import struct

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")
try:
    from PIL import Image
except ImportError:     # the images among these tests are left out then
    Image = None

from saturate.data import cache_codec  # noqa: E402 - after the imports that decide whether to run at all
from saturate.data.cache_codec import Damaged, Unstorable, decode, encode  # noqa: E402


def back(value):
    return decode(bytearray(b"".join(encode(value))))


needs_images = pytest.mark.skipif(Image is None, reason="needs Pillow")


def image(mode="RGB", size=(5, 3)):
    made = Image.new(mode, size)
    made.putdata([(index * 7) % 250 if len(made.getbands()) == 1 else tuple([(index * 7) % 250] * len(made.getbands()))
                  for index in range(size[0] * size[1])])
    made.info = {"dpi": (72, 72), "exif": b"x", "odd": object()}
    return made


@pytest.mark.parametrize("value", [
    None, True, False, 0, -1, 255, -(1 << 200), 1 << 64, 0.0, -0.0, float("inf"), 1e-310, "", "a\udc80\u20ac", b"", b"\0x",
    (), [], {}, (1, [2.0, {"a": None, 3: (b"c",)}]), {"order": 1, "kept": 2},
])
def test_plain_values_come_back(value):
    again = back(value)
    assert repr(again) == repr(value) and type(again) is type(value)


def test_nan_comes_back_with_its_bits():
    assert struct.pack("<d", back(float("nan"))) == struct.pack("<d", float("nan"))


@pytest.mark.parametrize("dtype", sorted(cache_codec._TENSOR_DTYPES))
def test_every_dtype_of_tensors(dtype):
    kind = getattr(torch, dtype)
    value = torch.randint(0, 2, (2, 3)).to(kind)
    again = back(value)
    assert again.dtype is kind and again.stride() == value.stride() and torch.equal(again, value)


@pytest.mark.parametrize("view", [
    lambda t: t, lambda t: t.permute(2, 0, 1), lambda t: t[1], lambda t: t[:, ::2], lambda t: t[1:1], lambda t: t[0, 0, 0],
    lambda t: t[:1].expand(3, -1, -1), lambda t: t.permute(2, 0, 1)[None], lambda t: t.transpose(0, 1)[1:],
], ids=["plain", "permuted", "row", "holes", "empty", "scalar", "expanded", "batch", "offset"])
def test_strides_come_back_so_that_a_batch_is_laid_out_alike(view):
    value = view(torch.arange(4 * 6 * 3, dtype=torch.float32).reshape(4, 6, 3))
    again = back(value)
    assert again.stride() == value.stride() and torch.equal(again, value)
    assert torch.stack([again, again]).stride() == torch.stack([value, value]).stride()
    assert again.data_ptr() != value.data_ptr() or not value.numel()


@pytest.mark.parametrize("value", [
    numpy.arange(6).reshape(2, 3), numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)), numpy.zeros((0, 3), "f2"),
    numpy.array(3), numpy.array(["ab", "c"]), numpy.array(["2026-01-01"], "M8[D]"), numpy.arange(4) > 2,
], ids=["C", "F", "empty", "scalar", "text", "dates", "bools"])
def test_arrays(value):
    again = back(value)
    assert again.dtype == value.dtype and again.strides == value.strides and numpy.array_equal(again, value)
    assert again.flags.writeable and again.flags.owndata


@pytest.mark.parametrize("view", [
    lambda a: a.transpose(2, 0, 1), lambda a: a[..., :1].transpose(2, 0, 1), lambda a: a[:, ::2], lambda a: a[:, ::-1].transpose(2, 0, 1),
    lambda a: a[:1, :, :1].transpose(1, 2, 0), lambda a: numpy.broadcast_to(a[:1], (3, 6, 3)), lambda a: a.transpose(2, 0, 1)[None],
], ids=["permuted", "one channel", "holes", "mirrored", "sparse", "expanded", "batch"])
def test_the_axes_of_an_array_come_back_in_the_order_in_which_they_lie(view):
    value = view(numpy.arange(4 * 6 * 3, dtype="f4").reshape(4, 6, 3))
    again = back(value)
    assert numpy.array_equal(again, value) and again.flags.writeable
    assert numpy.stack([again, again]).strides == numpy.stack([value, value]).strides
    assert again.strides == value.strides or min(value.strides) < 0
    column = value.reshape(-1)[:1].repeat(1000).reshape(100, 10)[:, 0]        # a few entries of many
    assert numpy.array_equal(back(column), column)


@pytest.mark.parametrize("make", [lambda fill: torch.full((4, 6), fill), lambda fill: numpy.full((4, 6), fill)], ids=["tensor", "array"])
def test_what_lies_in_the_holes_of_a_view_is_no_part_of_it(make):
    def padded(fill):
        whole = make(fill)
        whole[:, :5] = 1.0
        return whole[:, :5]

    assert encode(padded(0.5)) == encode(padded(0.25)) and back(padded(0.5)).tolist() == padded(0.5).tolist()


@pytest.mark.parametrize("value", [numpy.float32(1.5), numpy.int64(-3), numpy.bool_(True), numpy.uint8(7)])
def test_numpy_scalars(value):
    assert type(back(value)) is type(value) and back(value) == value


@needs_images
@pytest.mark.parametrize("mode", sorted(cache_codec._IMAGE_MODES))
def test_images(mode):
    value = image(mode)
    again = back(value)
    assert type(again) is Image.Image and (again.mode, again.size, again.tobytes()) == (mode, (5, 3), value.tobytes())
    assert again.info == {"dpi": (72, 72), "exif": b"x"}        # what has no bytes is left out
    again.putpixel((0, 0), again.getpixel((1, 1)))


class Own(dict):
    pass


def named():
    value = torch.zeros(2)
    value.label = "as some code marks them"
    return value


@pytest.mark.parametrize("value", [
    object(), {1, 2}, Own(), named(), {(1, 2): 3}, torch.zeros(2, requires_grad=True), torch.nn.Parameter(torch.zeros(2)),
    torch.eye(3).to_sparse(), torch.zeros(1, device="meta"), torch.zeros(100, 100)[:, 0], numpy.array([object()]),
    numpy.zeros(2, "i4,f4"), numpy.ma.zeros(3), *([Image.new("P", (2, 2))] if Image else []), torch.randn(2, dtype=torch.complex64).conj(), 1j,
], ids=lambda value: type(value).__name__)
def test_what_cannot_come_back_alike_is_refused_with_words(value):
    with pytest.raises(Unstorable, match=r"[a-z]{3,} .*"):
        encode((1, value))


def test_a_container_that_holds_itself_is_refused():
    value: list = []
    value.append(value)
    with pytest.raises(Unstorable, match="nested"):
        encode(value)


def test_any_bytes_are_a_value_or_damaged():
    """Never another exception, nor memory for what a length field claims."""
    chance = random.Random(0)
    good = b"".join(encode({"image": torch.rand(3, 4), "array": numpy.arange(5), "pil": image() if Image else None, "text": "x", "n": (1, None)}))
    for _ in range(4000):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)):]
        try:
            decode(data)
        except Damaged:
            continue
    with pytest.raises(Damaged):
        decode(bytearray(b"X"))
    with pytest.raises(Damaged):
        decode(bytearray(good + b"N"))
