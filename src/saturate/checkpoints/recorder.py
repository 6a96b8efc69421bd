"""Keep what a program writes to a file as chunks of a store, while it is being written."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

from saturate.checkpoints import deltas, manifests
from saturate.checkpoints.chunks import LONGEST_CHAIN, Entry, PackWriter, Store, digest_of
from saturate.checkpoints.manifests import Manifest, Segment, chunk_bytes
from saturate.errors import CheckpointDamaged

#: A delta must leave at most this share of what the chunk takes by itself: it costs a read of everything below it.
DELTA_PAYS = 0.9

#: Part of a segment's changed bytes on which codings are tried, at most so many.
_SAMPLE_SHARE, _MOST_SAMPLE_BYTES = 16, 1 << 15


@dataclass(frozen=True)
class Plan:
    """How the changed chunks of one segment are coded."""

    alone: deltas.Coding
    delta: deltas.Coding | None         # None: deltas do not pay here


def plan_of(changed: list[tuple[bytes, bytes | None]]) -> Plan:
    """Measure on a part of the changed chunks (bytes, bytes of the base or None) what pays."""
    total = sum(len(raw) for raw, _ in changed)
    budget = min(_MOST_SAMPLE_BYTES, max(1 << 12, total // _SAMPLE_SHARE))
    taken = changed[:: max(1, len(changed) // 4)][:4]
    length = budget // max(1, len(taken)) // 8 * 8
    windows = [(raw, base, max(0, (len(raw) - length) // 16 * 8)) for raw, base in taken]     # the middle, aligned
    alone, alone_share = deltas.choose([raw[at : at + length] for raw, _, at in windows])
    pairs = [deltas.xor(raw[at : at + length], base[at : at + length]) for raw, base, at in windows if base is not None]
    if not pairs:
        return Plan(alone, None)
    delta, delta_share = deltas.choose(pairs)
    return Plan(alone, delta if delta_share < DELTA_PAYS * alone_share else None)


class Recorder:
    """A binary stream to write one checkpoint to. Then `finish`, or `abandon`; hold the store's lock (shared) until
    then.

    Chunks that the store holds are not stored again. A changed chunk becomes a delta against the one in the same
    place of `previous` where that pays, unless it would be more than `chain` deltas away from a chunk that stands by
    itself.
    """

    def __init__(self, store: Store, previous: Manifest | None, chain: int):
        self.store = store
        self.chain = min(chain, LONGEST_CHAIN)
        self.pack = PackWriter(store)
        self.segments: list[Segment] = []
        self._glue = bytearray()
        self._gap = 0
        self._began = time.monotonic()
        self._previous: dict[int, deque[Segment]] = defaultdict(deque)
        self._previous_glue = previous.glue if previous else None
        self._after = previous.id if previous else ""
        for segment in previous.segments if previous else ():
            self._previous[segment.size].append(segment)

    # -- a stream --------------------------------------------------------------------------------------------------

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) < manifests.SEGMENT_BYTES:
            self._glue += view
            self._gap += len(view)
        else:
            before = self._previous[len(view)]
            self.segments.append(self._keep(self._gap, view, before.popleft() if before else None))
            self._gap = 0
        return len(view)

    def flush(self) -> None:
        """Nothing to do: `finish` makes everything durable."""

    def abandon(self) -> None:
        self.pack.abandon()

    def finish(self, path: str, number: int) -> Manifest:
        """Make the checkpoint durable: its pack, then its manifest."""
        glue = self._keep(0, memoryview(bytes(self._glue)), self._previous_glue)
        name = manifests.new_id(after=self._after)
        pack_bytes = self.pack.commit()
        fields = dict(
            id=name, saved=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), path=path, series=manifests.series_of(path),
            number=number, file_bytes=sum(s.size for s in self.segments) + glue.size,
            segments=tuple(self.segments), glue=glue, save_s=round(time.monotonic() - self._began, 4))
        new_bytes = pack_bytes + len(manifests.encoded(Manifest(new_bytes=pack_bytes, **fields)))
        manifest = Manifest(new_bytes=new_bytes, **fields)
        manifests.write(self.store, manifest)
        return manifest

    # -- chunks ----------------------------------------------------------------------------------------------------

    def _keep(self, gap: int, view: memoryview, before: Segment | None) -> Segment:
        """Store one segment; `before` is what stood in its place."""
        step = chunk_bytes(len(view))
        digests = [digest_of(view[start : start + step]) for start in range(0, len(view), step)]
        bases = self._chunks_of(before)
        if before is not None and chunk_bytes(before.size) != step:
            bases = []
        bases += [None] * (len(digests) - len(bases))
        new = [place for place, digest in enumerate(digests) if not self.pack.has(digest)]
        self._code([(digests[place], view[place * step : (place + 1) * step], bases[place]) for place in new])
        if len(digests) == 1:
            return Segment(gap, len(view), digests[0].hex())
        listed = b"".join(digests)
        address = digest_of(listed)
        if not self.pack.has(address):
            self.pack.add(address, listed, deltas.AS_IS, len(listed), None, 0)
        return Segment(gap, len(view), address.hex())

    def _chunks_of(self, before: Segment | None) -> list[bytes | None]:
        if before is None:
            return []
        try:
            return list(manifests.chunks_of(self.store, before))
        except CheckpointDamaged:
            return []           # the save at hand does not need it: without a base its chunks stand by themselves

    def _code(self, chunks: list[tuple[bytes, memoryview, bytes | None]]) -> None:
        """Store new chunks: (digest, bytes, digest of the base or None)."""
        if not chunks:
            return
        sample = chunks[:: max(1, len(chunks) // 4)][:4]
        plan = plan_of([(bytes(raw), self._base(raw, base)[0]) for _, raw, base in sample])
        for digest, view, base in chunks:
            if self.pack.has(digest):
                continue        # twice in this very segment
            raw = bytes(view)
            payload, coding, against, depth = self._coded(raw, base, plan)
            self.pack.add(digest, payload, coding, len(raw), against, depth)
            self.store.remember(digest, raw)

    def _coded(self, raw: bytes, base: bytes | None, plan: Plan) -> tuple[bytes, deltas.Coding, bytes | None, int]:
        if plan.delta is not None:
            below, entry = self._base(raw, base)
            if below is not None and entry is not None:
                payload = deltas.encode(deltas.xor(raw, below), plan.delta)
                if len(payload) < len(raw):
                    return payload, plan.delta, base, entry.depth + 1
        payload = deltas.encode(raw, plan.alone)
        if len(payload) < len(raw):
            return payload, plan.alone, None, 0
        return raw, deltas.AS_IS, None, 0

    def _base(self, raw: bytes | memoryview, base: bytes | None) -> tuple[bytes | None, Entry | None]:
        """Bytes and entry of a base that a delta may be made against."""
        entry = self.pack.entry(base) if base is not None else None
        if entry is None or entry.pack == self.pack.name or entry.raw_bytes != len(raw) or entry.depth >= self.chain:
            return None, None
        try:
            return self.store.read(base), entry
        except CheckpointDamaged:
            return None, None   # as in _chunks_of

