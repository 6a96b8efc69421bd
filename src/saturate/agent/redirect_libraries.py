"""Interception for what does not open its files through Python: torch, SQLite, safetensors, pyarrow, tokenizers.

Each is given the path where `redirect` puts what the script reads and writes. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from saturate.agent.redirect import for_reading, for_writing
from saturate.agent.shadow import ORIGINAL


def callbacks() -> dict[str, Callable[[Any], None]]:
    """What to call right after a module of that name was imported. torch is not here: the agent calls `on_torch`."""
    return {"sqlite3": on_sqlite3, "safetensors": on_safetensors, "pyarrow": on_pyarrow, "tokenizers": on_tokenizers}


def on_torch(torch: Any) -> None:
    """torch writes and maps checkpoints in C++."""

    class PyTorchFileWriter(torch._C.PyTorchFileWriter):
        def __init__(self, target: Any, *arguments: Any, **keywords: Any):
            super().__init__(for_writing(target, copy=False), *arguments, **keywords)

    class PyTorchFileReader(torch._C.PyTorchFileReader):
        def __init__(self, source: Any, *arguments: Any, **keywords: Any):
            super().__init__(for_reading(source), *arguments, **keywords)

    torch._C.PyTorchFileWriter = PyTorchFileWriter
    torch._C.PyTorchFileReader = PyTorchFileReader
    _first_argument(torch.UntypedStorage, "from_file", for_mapping)
    _first_argument(torch, "from_file", for_mapping)
    _first_argument(torch.jit, "load", for_reading)
    save = torch.jit.RecursiveScriptModule.save

    def save_script(self: Any, f: Any, **keywords: Any) -> Any:
        return save(self, for_writing(f, copy=False), **keywords)

    torch.jit.RecursiveScriptModule.save = save_script


def for_mapping(path: Any, shared: bool = False, *_: Any, **__: Any) -> Any:
    return for_writing(path, copy=True) if shared else for_reading(path)


def _first_argument(owner: Any, name: str, place: Callable[..., Any]) -> None:
    """Replace `owner.name(path, ...)` by one that sees the redirected path."""
    original = getattr(owner, name)

    def redirected(path: Any, *arguments: Any, **keywords: Any) -> Any:
        where = place(path, *arguments, **keywords) if place is for_mapping else place(path)
        return original(where, *arguments, **keywords)

    setattr(owner, name, redirected if not isinstance(owner, type) else staticmethod(redirected))


def on_sqlite3(module: Any) -> None:
    connect = module.connect

    def redirected(database: Any, *arguments: Any, **keywords: Any) -> Any:
        return connect(_database(database, bool(keywords.get("uri"))), *arguments, **keywords)

    module.connect = module.dbapi2.connect = redirected


def _database(database: Any, uri: bool) -> Any:
    if not isinstance(database, (str, bytes, os.PathLike)):
        return database
    path = os.fsdecode(database)
    before, after, query = "", "", ""
    if uri and path.startswith("file:"):
        from urllib.parse import quote, unquote

        path, question, query = path[5:].partition("?")
        if "mode=memory" in query:
            return database
        path = unquote(path.removeprefix("//localhost").removeprefix("//") if path.startswith("//") else path)
        before, after = "file:", question + query
    if path in ("", ":memory:"):
        return database
    found = for_reading(path)
    if "immutable=1" in query or (os.path.exists(path) and not ORIGINAL["access"](found, os.W_OK)):
        return before + quote(os.fspath(found)) + after if before else found        # SQLite opens it for reading, too
    for suffix in ("-wal", "-journal"):     # part of the database: committed pages may be only there
        if os.path.exists(path + suffix):
            for_writing(path + suffix, copy=True)
    where = for_writing(path, copy=True)
    return before + quote(where) + after if before else where


def on_safetensors(module: Any) -> None:
    """Have its functions, which open files by themselves, write and read where files are redirected to."""
    serialize_file, safe_open = module.serialize_file, module.safe_open

    def write(tensors: Any, filename: Any, *arguments: Any, **keywords: Any) -> Any:
        return serialize_file(tensors, for_writing(filename, copy=False), *arguments, **keywords)

    def read(filename: Any, *arguments: Any, **keywords: Any) -> Any:
        return safe_open(for_reading(filename), *arguments, **keywords)

    module.serialize_file, module.safe_open = write, read


def on_pyarrow(module: Any) -> None:
    """Hugging Face's datasets write their files through Python, and map them by this."""
    memory_map = module.memory_map

    def mapped(path: Any, mode: str = "r") -> Any:
        return memory_map(for_reading(path) if mode == "r" else for_writing(path, copy=True), mode)

    module.memory_map = mapped


def on_tokenizers(module: Any) -> None:
    """Rust reads what was downloaded or made through Python, and writes a tokenizer into the folder of a checkpoint."""
    tokenizer, model = module.Tokenizer, module.models.Model
    from_file, train, save, save_model = tokenizer.from_file, tokenizer.train, tokenizer.save, model.save

    def trained(self: Any, files: Any, *arguments: Any, **keywords: Any) -> None:
        train(self, [for_reading(file) for file in files], *arguments, **keywords)

    def saved(self: Any, path: Any, *arguments: Any, **keywords: Any) -> None:
        save(self, for_writing(path, copy=False), *arguments, **keywords)

    def model_saved(self: Any, folder: Any, *arguments: Any, **keywords: Any) -> list[str]:
        """How many files there are, and what they are called, the kind of the model decides."""
        import shutil
        import tempfile

        with tempfile.TemporaryDirectory() as aside:
            written = save_model(self, for_reading(aside), *arguments, **keywords)
            names = map(os.path.basename, written)
            return [shutil.move(os.path.join(aside, name), os.path.join(folder, name)) for name in names]

    tokenizer.from_file = staticmethod(lambda path: from_file(for_reading(path)))
    tokenizer.train, tokenizer.save, model.save = trained, saved, model_saved
