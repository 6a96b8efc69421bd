"""The manifest of an artifact: what is stored, from what it was made, what it scored, and the digest of every file.

Plain data throughout: shapes, numbers and JSON values. Nothing in it names code to be called.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from saturate.records.inference import Best

SCHEMA = 2

#: Versions that are read. In the first a manifest had no digest, so damage to the manifest itself could go unnoticed.
READ = (1, 2)

#: What a manifest says that it is: a folder of somebody else's may hold a manifest.json, too.
KIND = "saturate-artifact"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str  # relative to the folder, with forward slashes
    size_bytes: int
    sha256: str  # hexadecimal


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in the file of examples: raw little-endian bytes, row by row."""

    shape: list[int]
    dtype: str  # "float32", "int64", "bfloat16"
    offset: int  # bytes from the start of the file


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One batch with what the stored program answered when it was made. `inputs` and `outputs` are descriptions of
    `saturate.inference.structure`, which refer to the tensors by their place."""

    inputs: Any
    input_leaves: list[Leaf]
    outputs: Any
    output_leaves: list[Leaf]


class MadeOn(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the libraries. Numbers and scores hold there."""

    device: str  # "cpu" or "cuda"
    device_index: int | None = None  # of the GPU, as the process counted that made it
    device_name: str = ""  # of the GPU
    capability: tuple[int, int] | None = None
    architecture: str = ""  # "x86_64", "aarch64"
    cpu: str = ""
    cpu_flags: list[str] = []  # of those that matter, see records.inference.ModelFacts
    threads: int = 1
    system: str = ""  # "Linux"
    python: str = ""
    saturate: str = ""
    versions: dict[str, str] = {}  # torch, onnxruntime, torchao ...


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an artifact says of itself: what it holds, how it was made, and of which files it consists."""

    kind: Literal["saturate-artifact"] = KIND
    schema: int = SCHEMA
    created: str  # UTC, ISO 8601
    model: str  # class name
    candidate: str  # label: "bf16 + aot-inductor"
    numerics: str
    recipe: list[dict[str, Any]]  # [{"id", "options"}], in the order of application
    kept_layers: list[str] = []
    code: str = ""  # the same without saturate
    agreement_db: float | None = None  # of its outputs with the original model's
    scores: Best | None = None  # after it was loaded again, measured and scored; None: not yet
    made_on: MadeOn
    format: str  # of saturate.inference.formats
    program: list[str]  # its files
    settings: dict[str, Any] = {}  # what the format's `load` needs beside them
    examples: list[Example] = []
    no_examples: str = ""  # why there are none
    files: list[StoredFile]  # every file but the manifest itself
    digest: str = ""  # SHA-256, hexadecimal, of all other fields: of their compact JSON with sorted keys
