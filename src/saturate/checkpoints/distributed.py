"""`torch.distributed.checkpoint.save` in the background: torch's own writer, on a copy, with collectives of its own.

The copy is made before `save` returns. The collectives of the save run on a gloo group that only saves use: on a
shared one they would mix with those of the training, and hang. A checkpoint goes this way where nothing speaks against
it that all ranks see alike: a local path, and no planner, group or unusual writer of the script's own; and where every rank could
copy its state, which they tell each other on a second group.
"""

from __future__ import annotations

import copy
import errno
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saturate import notices, ranks
from saturate.checkpoints import succession
from saturate.checkpoints.durable import sync_folder
from saturate.checkpoints.host_memory import available_bytes
from saturate.checkpoints.writer import Writer

#: What a rank says of a save before it begins; the worst counts.
_FINE, _PLAINLY, _FAILED = 0, 1, 2


class Later:
    """What `save` returns: torch's Metadata, as soon as somebody looks into it."""

    def __init__(self, wait: Callable[[], None], found: list[Any]):
        self._wait = wait
        self._found = found

    def __getattr__(self, name: str) -> Any:
        self._wait()
        if not self._found:
            raise OSError(errno.EIO, "the checkpoint was not written, so it has no metadata")
        return getattr(self._found[0], name)


class Shards:
    """Replaces `torch.distributed.checkpoint.save` for this rank."""

    def __init__(self, torch: Any, writer: Writer, saved: Callable[[], None]):
        self.torch = torch
        self.writer = writer
        self.saved = saved
        self._group: Any = None         # for the saves, which a thread makes
        self._agreement: Any = None     # for what ranks agree on before
        self._world: Any = None         # whose ranks these are

    def save(self, original: Any) -> Any:
        @functools.wraps(original)
        def save(state_dict: Any, *args: Any, checkpoint_id: Any = None, **kwargs: Any) -> Any:
            like = kwargs.get("storage_writer")
            place = getattr(like, "path", None) if checkpoint_id is None else checkpoint_id
            local = isinstance(place, (str, os.PathLike)) and "://" not in str(place)
            if self.writer.closed or self.writer.foreign or args or not local or not _usual(kwargs):
                self.writer.flush()
                return original(state_dict, *args, checkpoint_id=checkpoint_id, **kwargs)
            if like is not None and checkpoint_id is not None:
                like.reset(checkpoint_id)           # as torch does with it
            folder = Path(os.path.realpath(place))
            self.writer.wait_for([number for number, job in list(self.writer.pending.items()) if job.path == str(folder)])
            return self._later(original, state_dict, folder, like, kwargs.get("planner"))

        return save

    def _later(self, original: Any, state_dict: Any, folder: Path, like: Any, planner: Any) -> Any:
        from torch.distributed.checkpoint import CheckpointException

        began = time.perf_counter()
        group = self._private_group()
        state = self._copy_everywhere(state_dict)
        if state is None:
            self.writer.flush()
            return original(state_dict, checkpoint_id=folder, storage_writer=like, planner=planner)
        planner = copy.copy(planner)        # the script's own would hold our copy until its next save
        way = self.writer.costs.way()
        found: list[Any] = []
        writer = succession.successor(folder, like)

        def write() -> None:
            options = {"process_group": group} if group is not None else {}
            try:
                found.append(original(state, checkpoint_id=folder, storage_writer=writer, planner=planner, **options))
            except (Exception, CheckpointException) as error:  # noqa: BLE001 - whatever it is; torch's is no Exception
                succession.give_up(folder, writer)
                raise _of_disk(error) from None
            sync_folder(folder.parent)
            succession.tidy(folder, writer, found[0])
            state.clear()

        size = sum(map(_bytes, _tensors(state, self.torch)))
        number = self.writer.perform(str(folder), size, write)      # nothing else may fail here: the other ranks do it by now
        if way == "sync":
            self.writer.wait_for([number])
            self.writer.raise_failure()
        self.writer.count(way, size, time.perf_counter() - began)
        self.saved()
        return Later(lambda: self.writer.wait_for([number]), found)

    def _private_group(self) -> Any:
        distributed = self.torch.distributed
        if not distributed.is_initialized():
            self._group = self._agreement = self._world = None
        elif self._world is not distributed.group.WORLD:        # a script may end a group, and make another
            self._group, self._agreement = (distributed.new_group(backend="gloo") for _ in range(2))
            self._world = distributed.group.WORLD
        return self._group

    def _copy_everywhere(self, state_dict: Any) -> dict[str, Any] | None:
        """The copy, once every rank has its own; None where one could not make it: then none saves in the background. Raises OSError on
        every rank where an earlier save of one has failed: a rank alone would leave the others in the collectives of this one."""
        state, outcome = None, _FINE
        problem = OSError(errno.EIO, "a checkpoint that another rank saved before was not written")
        try:
            failed = self.writer.prepare()
            if failed is not None:
                outcome, problem = _FAILED, failed
            else:
                state = self._copy(state_dict)
        except Exception as error:  # noqa: BLE001 - objects say in any way that they cannot be copied
            notices.tell(f"saturate: a distributed checkpoint is saved plainly: {type(error).__name__}: {error}\n")
            outcome = _PLAINLY
        if self._agreement is not None:
            worst = self.torch.tensor(outcome, device="cpu")
            self.torch.distributed.all_reduce(worst, self.torch.distributed.ReduceOp.MAX, group=self._agreement)
            outcome = int(worst)
        if outcome == _FAILED:
            self.writer.flush()             # a save that failed on all ranks is known to some of them earlier
            raise self.writer.take_failure() or problem
        return None if outcome == _PLAINLY else state

    def _copy(self, state_dict: Any) -> dict[str, Any]:
        """Every tensor in host memory of its own, every other object copied."""
        from torch.distributed._state_dict_utils import _offload_state_dict_to_cpu
        from torch.distributed.checkpoint.stateful import Stateful

        state = {key: value.state_dict() if isinstance(value, Stateful) else value
                 for key, value in state_dict.items()}
        given = _tensors(state, self.torch)
        size, available = sum(map(_bytes, given)), available_bytes()
        if available is not None and size * ranks.here() > available // 2:
            raise MemoryError(f"{size:,} bytes of each rank here, and {available:,} are free")
        if any(tensor.device.type != "cpu" for tensor in given):
            state = _offload_state_dict_to_cpu(state, type_check=False)
        with self.torch.no_grad():      # what a graph holds does not copy itself
            known = {id(tensor) for tensor in given}
            copies = {id(tensor): tensor for tensor in _tensors(state, self.torch) if id(tensor) not in known}      # copied by now
            copies |= {id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad)
                       for tensor in _tensors(state, self.torch) if not tensor.is_leaf}
            return copy.deepcopy(state, copies)


def _usual(options: dict[str, Any]) -> bool:
    """Whether these arguments of `save` say no more than its defaults do: torch's own plain writer and planner, no group."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    # Of those that are False, it is the default of `no_dist` alone: with `use_collectives=False` each rank writes a checkpoint of its own.
    options = {name: value for name, value in options.items() if value is not None and not (name == "no_dist" and value is False)}
    writer, planner = options.pop("storage_writer", None), options.pop("planner", None)
    return not options and (writer is None or succession.follows(writer)) and (planner is None or _is_plain(planner, DefaultSavePlanner))


def _is_plain(planner: Any, plain: type) -> bool:
    """Whether it plans each save anew: one that keeps its plan keeps the names of the shards, which the checkpoint before has."""
    return type(planner) is plain and not getattr(planner, "_enable_plan_caching", False)


def _of_disk(error: BaseException) -> BaseException:
    """What the disk said, if it did: torch raises one exception for all ranks, and its file format another one before."""
    waiting = [failure for failure, _ in getattr(error, "failures", {}).values()]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, OSError) and one.errno:
            return one
        waiting += filter(None, (one.__cause__, one.__context__))
    return error


def _bytes(tensor: Any) -> int:
    """Of what this rank has of it."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


def _tensors(value: Any, torch: Any) -> list[Any]:
    """Every tensor in nested mappings and sequences."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item, torch)]
