"""Between which kinds of memory a copy goes, from its name. One table for all backends, since each has words of its own:

    CUPTI (CUDA)        Memcpy HtoD (Pageable -> Device), Memcpy DtoH (Device -> Pinned)
    roctracer (HIP)     CopyHostToDevice, Memcpy HtoD (Host -> Device), MEMORY_COPY_HOST_TO_DEVICE
    Nsight Systems      as CUPTI
    PTI (Intel)         Memcpy M2D (MEMORY(Unknown) -> DEVICE), Memcpy D2H (DEVICE -> HOST)

HIP does not say whether the host's memory is pageable. PTI does by its letters, whatever the words behind them: M is memory
that was allocated without its runtime, so pageable; H was allocated by it, so pinned.
"""

from __future__ import annotations

import re

FROM_HOST = re.compile(r"HtoD|\b[HM]2D\b|(Host|Pageable|Pinned) ?-> ?Device|Host_?To_?Device", re.IGNORECASE)
TO_HOST = re.compile(r"DtoH|\bD2[HM]\b|Device ?-> ?(Pageable|Pinned|Host)|Device_?To_?Host", re.IGNORECASE)

FROM_PAGEABLE = re.compile(r"\bM2D\b|Pageable ?-> ?Device")
FROM_PINNED = re.compile(r"\bH2D\b|Pinned ?-> ?Device")
TO_PAGEABLE = re.compile(r"\bD2M\b|DtoH.*Pageable|Device ?-> ?Pageable")
