"""Is a .pt2 archive only data? Looked at before torch loads it, because torch's own loading trusts the file.

`torch.export.load` of torch 2.13 unpickles sample inputs, tensor subclasses, opaque objects and older layouts; resolves
operators by walking attributes from `torch` (`torch.os.system` is one); hands size expressions to sympy's `sympify`,
which evaluates them as Python; writes the graph's own names into a function, and guards into another, and executes
both; imports modules that a tree description names; and loads any machine code beside the program. What
`formats.exported` stored needs none of that, so an archive that holds it is refused, whatever its manifest says of it.

The same reader that torch uses lists and reads the records here, so both see the same archive.
"""

from __future__ import annotations

import ast
import json
import math
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: The records of an exported program: JSON and raw tensors.
_EXPORTED = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/(serialization_id|version)|\.format_version|\.storage_alignment"
    r"|models/model\.json|data/sample_inputs/model\.pt|data/weights/(model_weights_config\.json|weight_\d+)"
    r"|data/constants/(model_constants_config\.json|tensor_\d+)"
)

#: The records of an AOTInductor package: one program's shared library and what was compiled into it.
_COMPILED = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/(serialization_id|version)|\.format_version|\.storage_alignment"
    r"|data/aotinductor/model/[A-Za-z0-9_.]+\.(so|cpp|h|o|json|bin|cubin|spv|txt)"
)

#: Functions of sizes in a graph that are not operators of torch.
_SIZE_FUNCTIONS = re.compile(
    r"_operator\.(add|sub|mul|floordiv|truediv|mod|neg|pow|lt|le|gt|ge|eq|ne|and_|or_|not_|lshift|rshift|getitem|pos|abs)"
    r"|math\.(ceil|floor|trunc|sqrt|log2)|torch\.(sym_(max|min|float|int|ite|not|sqrt|sum)|_sym_sqrt)"
)
_OPERATOR = re.compile(r"torch\.ops\.(?!_)\w+\.\w+(\.\w+)?")

#: Operators that reach outside of their arguments.
_REACHES_OUT = ("aten.from_file", "aten.save", "aten._print", "prim.", "debugprims.", "profiler.", "c10d", "rpc", "script.",
                "image.", "video_reader.", "torchaudio.")         # libraries' own, which read and write files

_CALLS_IN_SIZES = frozenset(
    ("FloorDiv ModularIndexing Where PythonMod Mod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural "  # noqa: SIM905
     "FloatPow FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt RoundDecimal "
     "ToFloat Identity Max Min Abs Integer Rational Add Mul Pow Eq Ne Lt Le Gt Ge And Or Not Equality Unequality "
     "StrictLessThan LessThan StrictGreaterThan GreaterThan").split()
)
_POWERS = frozenset(("Pow", "PowByNatural", "FloatPow", "LShift"))

#: The product of all exponents of an expression; sizes are squared or cubed at most.
_MOST_RAISED = 64.0
_NODES_IN_SIZES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant,
    ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)

#: Everything else in a program is a word: a name that torch will write into Python source. Text that an operator takes
#: (an equation, a way of rounding) may be a little more.
_WORD = re.compile(r"[\w.+-]*")
_TEXT = re.compile(r"[\w .,:>+-]*")
_NO_TEXT = re.compile(r"[^\w .,:>+-]")
_TEXTS = ("as_string", "as_strings", "nn_module_stack")

#: Containers that a flat program's inputs and outputs are made of.
_TREES = (None, "builtins.tuple", "builtins.list", "builtins.dict")


class Unsafe(ValueError):
    """The archive is no archive, or holds what loading would execute; the message says what."""


class UnknownOperator(Unsafe):
    """It calls what has the name of an operator, and nothing that is imported here registers."""


def exported(torch: Any, path: Path) -> None:
    """Raise Unsafe unless `path` is an exported program that holds nothing but data."""
    reader, names = _records(torch, path, _EXPORTED)
    for name in ("models/model.json", "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"):
        if name not in names:
            raise Unsafe(f"it has no record {name}")
    if reader.get_record("data/sample_inputs/model.pt"):
        raise Unsafe("it holds pickled sample inputs")
    for kind in ("weights", "constants"):
        _check_tensors(_json(reader, f"data/{kind}/model_{kind}_config.json"), kind)
    program = _json(reader, "models/model.json")
    if program.get("guards_code"):
        raise Unsafe("it holds guards written as Python")
    for where, key, value in _entries(program):
        problem = _problem(torch, key, value)
        if problem:
            unknown = key in ("target", "as_operator") and _names_operator(torch, value)
            raise (UnknownOperator if unknown else Unsafe)(f"{where[:80]}: {problem[:200]}")


def compiled(torch: Any, path: Path) -> None:
    """Raise Unsafe unless `path` is a package of one compiled program and nothing beside it. What it holds is machine
    code, which no look at it can make safe."""
    _, names = _records(torch, path, _COMPILED)
    if not any(name.endswith(".so") for name in names):
        raise Unsafe("it holds no compiled program")


def plain(text: str) -> str:
    """A text without what none may hold in a program."""
    return _NO_TEXT.sub(" ", text)


def _records(torch: Any, path: Path, allowed: re.Pattern[str]) -> tuple[Any, list[str]]:
    _refuse_larger_inside(path)
    try:
        reader = torch._C.PyTorchFileReader(str(path))
        names = reader.get_all_records()
    except (RuntimeError, OSError) as error:
        raise Unsafe(f"it is no .pt2 archive: {str(error).splitlines()[0]}") from error
    strange = sorted(name for name in names if not allowed.fullmatch(name))
    if strange or len({name.lower() for name in names}) != len(names):
        raise Unsafe(f"it holds {strange[0]!r}, which is no part of such a program" if strange else "it names a record twice")
    return reader, names


def _refuse_larger_inside(path: Path) -> None:
    """torch stores its records as they are; a compressed one could be any number of times as large in memory as in the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise Unsafe(f"it is no .pt2 archive: {error}") from error
    packed = next((one.filename for one in records if one.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise Unsafe(f"its record {packed!r:.200} is compressed, which torch does to none")
    if sum(one.file_size for one in records) > path.stat().st_size:
        raise Unsafe("its records are larger than the file")


def _json(reader: Any, name: str) -> dict[str, Any]:
    try:
        found = json.loads(reader.get_record(name))
    except (ValueError, RecursionError, RuntimeError) as error:
        raise Unsafe(f"its record {name} is not readable: {error}") from error
    if not isinstance(found, dict):
        raise Unsafe(f"its record {name} is no object")
    return found


def _check_tensors(configuration: dict[str, Any], kind: str) -> None:
    prefix = {"weights": "weight_", "constants": "tensor_"}[kind]
    for name, payload in configuration.get("config", {}).items():
        if not _WORD.fullmatch(name):
            raise Unsafe(f"{name!r} is no name of a tensor")
        path = payload.get("path_name") if isinstance(payload, dict) else None
        if not isinstance(path, str) or not re.fullmatch(rf"{prefix}\d+", path):
            raise Unsafe(f"{kind} {name!r} is no plain tensor, and would be stored as a pickle")
        if payload.get("use_pickle"):
            raise Unsafe(f"{kind} {name!r} is stored as a pickle")


def _entries(program: Any) -> Iterator[tuple[str, str, Any]]:
    """(place, key, value) of every entry of every object, however deep. Iterative: depth is the file's choice."""
    pending = [("the program", program)]
    while pending:
        where, value = pending.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                for one in item if isinstance(item, list) else [item]:
                    yield where, key, one
                    pending.append((str(value.get("name") or where), one))
        elif isinstance(value, list):
            pending.extend((where, item) for item in value)


def _problem(torch: Any, key: str, value: Any) -> str | None:
    """What torch would do with this entry beyond reading it, or None."""
    if not _WORD.fullmatch(key):
        return f"{key!r} is no name"
    if key in ("target", "as_operator") and isinstance(value, str):
        return None if _is_operator(torch, value) else f"{value!r} is no operator of torch, or of a library that is imported here"
    if key == "expr_str":
        return None if isinstance(value, str) and is_size(value) else f"{value!r} is no expression of sizes"
    if key in ("in_spec", "out_spec") and value:
        return None if _is_tree(value) else f"{value!r} is no plain description of nested tensors"
    if key in ("as_custom_obj", "custom_obj_arg", "opaque_type") and value:
        return "it holds an object that is no tensor"
    if isinstance(value, str) and not (_TEXT if key in _TEXTS else _WORD).fullmatch(value):
        return f"{value!r} is no name"
    return None


def _names_operator(torch: Any, target: Any) -> bool:
    """Whether it is the name of one that may be called, wherever it comes from. torch.ops has some functions of its own among them."""
    if not isinstance(target, str) or not _OPERATOR.fullmatch(target) or target.removeprefix("torch.ops.").startswith(_REACHES_OUT):
        return False
    return isinstance(getattr(torch.ops, target.split(".")[2]), (torch._ops._OpNamespace, torch._ops._HigherOrderNamespace))


def _is_operator(torch: Any, target: str) -> bool:
    if _SIZE_FUNCTIONS.fullmatch(target):
        return True
    if not _names_operator(torch, target):
        return False
    found: Any = torch.ops
    for name in target.split(".")[2:]:
        found = getattr(found, name, None)
    return isinstance(found, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))


def is_size(text: str) -> bool:
    """Whether an expression only computes with numbers, names and the functions of sizes. torch writes them in sympy's
    own notation: Mul(Integer(2), Symbol('s0', integer=True))."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    names = set()           # of symbols: text, but nothing that could become code where torch prints it
    raised = 1.0            # sympy computes powers of numbers: 9**9**9 has a third of a billion digits
    for node in ast.walk(tree):
        raised *= _exponent(node)
        if not raised <= _MOST_RAISED:
            return False
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name):
                return False
            if node.func.id in ("Symbol", "Float"):
                names.update(map(id, (*node.args, *(word.value for word in node.keywords))))
            elif node.func.id not in _CALLS_IN_SIZES or node.keywords:
                return False
        if isinstance(node, ast.Constant) and not _is_plain(node.value, named=id(node) in names):
            return False
        if not isinstance(node, _NODES_IN_SIZES) or (isinstance(node, ast.Name) and "__" in node.id):
            return False
    return True


def _exponent(node: ast.AST) -> float:
    """To how many digits for one a power or a shift leads; 1 for what is neither, inf where that does not show."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.LShift)):
        by: ast.AST = node.right
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _POWERS:
        if len(node.args) != 2:
            return math.inf
        by = node.args[1]
    else:
        return 1.0
    while isinstance(by, ast.Call) and isinstance(by.func, ast.Name) and by.func.id in ("Integer", "Rational", "Float") and by.args:
        by = by.args[0]
    if isinstance(by, ast.UnaryOp):
        by = by.operand
    plain = isinstance(by, ast.Constant) and type(by.value) in (int, float)
    return max(1.0, abs(by.value)) if plain else math.inf


def _is_plain(value: Any, named: bool) -> bool:
    """A number; or, where it names a symbol, a word."""
    if isinstance(value, str):
        return named and "__" not in value and _WORD.fullmatch(value) is not None
    return type(value) in (bool, int, float)


def _is_tree(text: Any) -> bool:
    """A treespec of tuples, lists and dictionaries with plain keys: `[version, {"type", "context", "children_spec"}]`."""
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return False
    pending = [found[1]] if isinstance(found, list) and len(found) == 2 else [None]
    while pending:
        node = pending.pop()
        if not isinstance(node, dict) or set(node) != {"type", "context", "children_spec"} or node["type"] not in _TREES:
            return False
        if not isinstance(node["children_spec"], list) or (isinstance(node["context"], str) and "__" in node["context"]):
            return False
        pending.extend(node["children_spec"])
    return True
