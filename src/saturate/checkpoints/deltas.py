"""How one chunk of a checkpoint is coded: as it is, or its bytes regrouped and compressed, or only what differs from
the chunk that stood in the same place before.

Neighbouring numbers of a tensor share their sign and exponent, so the bytes of equal significance are put side by
side (*lanes*: every `width`-th byte), and only the lanes that shrink go through zlib; the low bytes of a mantissa are
noise, and compressing them costs time and gains nothing. A delta codes `chunk XOR base` in the same way: what did not
change is zero. Width and lanes are measured on the bytes themselves, so the dtype need not be known. Standard library
only: a checkpoint can be restored where there is no torch.

Sources: XOR against an earlier version, P. Ratanaworabhan, J. Ke and M. Burtscher, "Fast Lossless Compression of
Scientific Floating-Point Data" (DCC 2006); the byte shuffle is HDF5's filter of that name.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

#: Bytes of one number that may be told apart: float32, bfloat16, float64, text and the like. Of equals the first is
#: taken.
WIDTHS = (4, 2, 8, 1)

#: A lane is compressed only where that leaves less than this share of it.
LANE_PAYS = 0.92

#: A chunk is coded only where that leaves less than this share of it.
CODING_PAYS = 0.96

LEVEL = 1                   # higher levels of zlib: some percent smaller, several times slower


@dataclass(frozen=True)
class Coding:
    """`lanes` has one bit for each of the `width` lanes: 1 is compressed, 0 stored. Width 0 stores the bytes as they
    are.
    """

    width: int = 0
    lanes: int = 0

    def valid(self) -> bool:
        return self == Coding() or (self.width in WIDTHS and 0 <= self.lanes < 1 << self.width)


AS_IS = Coding()


def encode(data: bytes, coding: Coding) -> bytes:
    """The compressed lanes as one zlib stream, then the others."""
    if coding.width == 0:
        return data
    lanes = [data[lane :: coding.width] for lane in range(coding.width)]
    packed = b"".join(lane for place, lane in enumerate(lanes) if coding.lanes >> place & 1)
    stored = b"".join(lane for place, lane in enumerate(lanes) if not coding.lanes >> place & 1)
    return _compressed(packed, coding.width) + stored


def _compressed(data: bytes, width: int) -> bytes:
    """A zlib stream. In a lane of numbers there are runs and a skewed distribution, but no words to find again:
    looking for them (as by default) takes twice the time and hides the distribution.
    """
    stream = zlib.compressobj(LEVEL, strategy=zlib.Z_DEFAULT_STRATEGY if width == 1 else zlib.Z_RLE)
    return stream.compress(data) + stream.flush()


def decode(payload: bytes, coding: Coding, size: int) -> bytes:
    """The `size` bytes behind a payload. Raises ValueError when it is not one that `encode` made; never takes more
    memory than a few times `size`, whatever the payload says.
    """
    if coding.width == 0:
        if len(payload) != size:
            raise ValueError(f"{len(payload)} bytes where {size} were stored")
        return payload
    lengths = [len(range(lane, size, coding.width)) for lane in range(coding.width)]
    packed_size = sum(length for place, length in enumerate(lengths) if coding.lanes >> place & 1)
    stream = zlib.decompressobj()
    try:
        packed = stream.decompress(payload, packed_size + 1)     # one more, so that a longer stream shows
    except zlib.error as error:
        raise ValueError(f"not a zlib stream: {error}") from error
    if not stream.eof or len(packed) != packed_size or len(stream.unused_data) != size - packed_size:
        raise ValueError("the compressed part has another length")
    parts = {True: packed, False: stream.unused_data}
    places = {True: 0, False: 0}
    data = bytearray(size)
    for lane, length in enumerate(lengths):
        which = bool(coding.lanes >> lane & 1)
        data[lane :: coding.width] = parts[which][places[which] : places[which] + length]
        places[which] += length
    return bytes(data)


def xor(first: bytes, *others: bytes) -> bytes:
    """Bytewise exclusive or of strings of one length."""
    if any(len(other) != len(first) for other in others):
        raise ValueError(f"a delta of {len(first)} bytes against {', '.join(str(len(other)) for other in others)}")
    value = int.from_bytes(first, "little")
    for other in others:
        value ^= int.from_bytes(other, "little")
    return value.to_bytes(len(first), "little")


def choose(samples: Iterable[bytes]) -> tuple[Coding, float]:
    """The coding that makes the samples smallest, and the share of their bytes that it leaves (1.0 for `AS_IS`)."""
    taken = [sample for sample in samples if sample]
    total = sum(map(len, taken))
    best, best_bytes = AS_IS, CODING_PAYS * total
    for width in WIDTHS:
        lanes, left = 0, 0
        for lane in range(width):
            plain = b"".join(sample[lane::width] for sample in taken)
            coded = len(_compressed(plain, width))
            pays = coded < LANE_PAYS * len(plain)
            lanes |= pays << lane
            left += coded if pays else len(plain)
        if lanes and left < best_bytes:
            best, best_bytes = Coding(width, lanes), left
    return best, best_bytes / total if best is not AS_IS else 1.0
