"""Names of an Nsight Systems export, in the vocabulary that Kineto uses, so that later stages know one of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np

from saturate.trace._sqlite import Database
from saturate.trace.columns import Column, Signature

UNNAMED = "(name not recorded)"

#: CUPTI's numbers as nsys exports them, for exports without the tables ENUM_CUDA_MEMCPY_OPER and ENUM_CUDA_MEM_KIND.
COPY_OPERATIONS = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH",
                   10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}
UNIFIED_OPERATIONS = {11, 12, 13}       # migrations of managed memory
MEMORY_KINDS = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static",
                6: "Managed Static"}

#: "cudaLaunchKernel_v7000", "cudaMemcpyAsync_ptsz_v7000": the CUDA version in which a runtime function took its form.
#: Driver functions keep their suffix: "cuMemcpyHtoDAsync_v2" is the name.
_VERSION = re.compile(r"(_ptsz|_ptds)?_v\d{4,6}$")

#: Template arguments as nsys demangles them, "(int)4", and the suffixes with which others write the same, "4", "2ul".
_TYPED = re.compile(r"\((int|long|unsigned int|unsigned long|bool)\)(-?\d+)")
_SUFFIXES = {"int": "", "long": "l", "unsigned int": "u", "unsigned long": "ul"}

#: What torch.autograd.profiler.emit_nvtx appends: "aten::mm, seq = 4, op_id = 9, sizes = [[2, 3], [3, 4]]".
_TORCH = re.compile(r", (seq|op_id|sizes|input_op_ids) = ")
#: Where the sizes begin and how they end: two patterns, as one would look for the end again from each beginning.
_SIZES, _END = ", sizes = [", re.compile(r"\](?:, input_op_ids = |$)")
_QUALIFIED = re.compile(r"\w+::")


class Names:
    """Interned texts: `all[index]`."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._index: dict[str, int] = {}

    def intern(self, text: str) -> int:
        index = self._index.get(text)
        if index is None:
            index = self._index[text] = len(self.all)
            self.all.append(text)
        return index


class Strings:
    """Ids of the table StringIds -> interned names, looked up once each."""

    def __init__(self, database: Database, names: Names, clean: Callable[[str], str] = str):
        self._database = database
        self._names = names
        self._clean = clean
        self._known: dict[int, int] = {}

    def translate(self, ids: Column) -> Column:
        unique, inverse = np.unique(ids, return_inverse=True)
        return np.array([self._name(number) for number in unique.tolist()], np.int32)[inverse]

    def _name(self, number: int) -> int:
        if number not in self._known:
            text = self._database.string(number)
            self._known[number] = self._names.intern(UNNAMED if text is None else self._clean(text))
        return self._known[number]


def call_name(text: str) -> str:
    """A runtime function without the version that nsys appends.

    >>> call_name("cudaLaunchKernel_v7000"), call_name("cuMemcpyHtoDAsync_v2")
    ('cudaLaunchKernel', 'cuMemcpyHtoDAsync_v2')
    """
    return _VERSION.sub("", text)


def kernel_name(text: str) -> str:
    """A kernel as Kineto spells it.

    >>> kernel_name("void <unnamed>::fill<(int)4, (bool)1, (unsigned long)2>(float *)")
    'void (anonymous namespace)::fill<4, true, 2ul>(float *)'
    """
    def plain(found: re.Match[str]) -> str:
        kind, value = found.groups()
        return ("false" if value == "0" else "true") if kind == "bool" else value + _SUFFIXES[kind]

    return _TYPED.sub(plain, text).replace("<unnamed>::", "(anonymous namespace)::")


class CopyNames:
    """Names of copies and memsets: "Memcpy HtoD (Pageable -> Device)", "Memset (Device)"."""

    def __init__(self, database: Database, names: Names):
        self._names = names
        self._kinds = MEMORY_KINDS | _labels(database, "ENUM_CUDA_MEM_KIND")

    def copies(self, operation: Column, source: Column, target: Column) -> Column:
        triples, inverse = np.unique(np.stack([operation, source, target]), axis=1, return_inverse=True)
        named = [self._names.intern(self.copy(*triple)) for triple in triples.T.tolist()]
        return np.array(named, np.int32)[inverse.reshape(-1)]

    def copy(self, operation: int, source: int, target: int) -> str:
        name = COPY_OPERATIONS.get(operation, "(kind not recorded)")
        if operation in UNIFIED_OPERATIONS:
            return f"Memcpy {name} (Managed -> Managed)"
        return f"Memcpy {name} ({self._kinds.get(source, 'Unknown')} -> {self._kinds.get(target, 'Unknown')})"

    def memsets(self, kind: Column) -> Column:
        unique, inverse = np.unique(kind, return_inverse=True)
        named = [self._names.intern(f"Memset ({self._kinds.get(number, 'Unknown')})") for number in unique.tolist()]
        return np.array(named, np.int32)[inverse]


def _labels(database: Database, table: str) -> dict[int, str]:
    return {row["id"]: row["label"] for row in database.all(table, ["id", "label"])
            if isinstance(row["id"], int) and isinstance(row["label"], str)}


class Labels:
    """NVTX texts -> (interned name, index of the signature, whether it is an operator).

    PyTorch's own ranges carry what differs from call to call; without it they would be as many names as calls.
    """

    def __init__(self, names: Names):
        self._names = names
        self.signatures: list[Signature] = []
        self._known: dict[str, int] = {}

    def read(self, text: str) -> tuple[int, int, bool]:
        mark = _TORCH.search(text)
        if mark is None:
            return self._names.intern(text), -1, _QUALIFIED.match(text) is not None
        name = text[:mark.start()]
        # A user's record_function has no sequence number; an operator of a library has a namespace.
        operator = _QUALIFIED.match(name) is not None or mark[1] == "seq"
        begin = text.find(_SIZES, mark.start())
        end = _END.search(text, begin) if begin >= 0 else None
        sizes = text[begin + len(_SIZES) - 1:end.start() + 1] if end else ""
        return self._names.intern(name), self._signature(sizes) if sizes else -1, operator

    def _signature(self, sizes: str) -> int:
        if sizes not in self._known:
            self._known[sizes] = self._parse(sizes)
        return self._known[sizes]

    def _parse(self, sizes: str) -> int:
        try:
            dims = json.loads(sizes)
        except (ValueError, RecursionError):    # torch shortens long lists of tensors with "..."
            return -1
        self.signatures.append(Signature(dims=_tuples(dims), types=("",) * len(dims)))
        return len(self.signatures) - 1


def _tuples(value: object) -> tuple[object, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(_tuples(item) if isinstance(item, list) else item for item in value)
