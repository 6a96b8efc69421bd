"""What a log and an exit code say of how a command ended."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
import types

import pytest

from saturate.trial import gate, outcome


@pytest.mark.parametrize("code, kind", [(255, "exited"), (129, "killed_by_signal"), (143, "killed_by_signal"), (200, "exited"), (128, "exited")])
def test_an_exit_code_that_is_no_signal(code, kind) -> None:
    ended = outcome.classify({"ended": "exit", "code": code}, "no data there\n", 0, False, None)
    assert ended.kind == kind and "signal 1" not in ended.reason


@pytest.mark.parametrize("code", [97, 1])
def test_a_cage_was_refused_where_the_exit_code_says_so_too(code) -> None:
    """A command may print anything, or read it to somebody."""
    log = "saturate: could not start: isolation: CageRefused: mount overlay on /work\n"
    assert (outcome.classify({"ended": "exit", "code": code}, log, 0, False, None).kind == "cage_refused") is (code == 97)


_FULL = "OSError: [Errno 28] No space left on device\n"
_RAISED = "Traceback (most recent call last):\n  File \"t.py\", line 2, in <module>\n    work()\n"


@pytest.mark.parametrize("log, kind", [
    (f"warning: File too large, skipped a.png\n{_RAISED}ValueError: other numbers\n", "crashed"),
    (f"{_RAISED}{_FULL}going on\n{_RAISED}KeyError: 'label'\n", "crashed"),
    (f"{_RAISED}{_FULL}\nDuring handling of the above exception, another exception occurred:\n\n{_RAISED}ValueError: what\n", "disk_full"),
    (f"{_RAISED}RuntimeError: Caught OSError in DataLoader worker process 0.\nOriginal {_RAISED}{_FULL}", "disk_full"),
    (f"{_RAISED}ValueError: logged\nterminate called after throwing an instance of 'std::bad_alloc'\n", "out_of_memory_host"),
    (f"what():  std::bad_alloc\n{_RAISED}torch.distributed.elastic.ChildFailedError: t.py FAILED\n", "out_of_memory_host"),
    (f"[rank0]: {_FULL}[rank1]: Traceback (most recent call last):\n[rank1]: RuntimeError: peer lost\n", "disk_full"),
    ("File too large\n", "disk_full"),
])
def test_what_was_survived_is_not_the_cause(log, kind) -> None:
    assert outcome.classify({"ended": "exit", "code": 1}, log, 0, False, None).kind == kind


TORCHRUN = """\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]:     raise ValueError("no such file of mine")
[rank1]: ValueError: no such file of mine
[rank0]:   File "train.py", line 9, in <module>
[rank0]: RuntimeError: Connection closed by peer
Traceback (most recent call last):
  File "run.py", line 7, in <module>
    run()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
============================================================
train.py FAILED
============================================================
"""

ACCELERATE = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    raise ValueError("no such file of mine")
ValueError: no such file of mine
 10%|#         | 1/10
Traceback (most recent call last):
  File "launch.py", line 9, in <module>
subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.
"""


@pytest.mark.parametrize("log", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_a_launcher_does_not_hide_why_its_process_failed(log: str) -> None:
    ended = outcome.classify({"ended": "exit", "code": 1}, log, 0, False, None)
    assert (ended.kind, ended.reason) == ("crashed", "ValueError: no such file of mine")


ATEXIT = f"{_RAISED}ValueError: heads\nclosing the logger\n"
MAKE = f"{_RAISED}ValueError: heads\nmake: *** [Makefile:2: train] Error 1\n"
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "t.py", line 1, in <module>
  | ExceptionGroup: heads (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: inner
    +------------------------------------
USDT: profiler_stop
"""


@pytest.mark.parametrize("log, said", [(ATEXIT, "ValueError: heads"), (MAKE, "ValueError: heads"), (GROUP, "ExceptionGroup: heads (1 sub-exception)")],
                         ids=["atexit", "make", "group"])
def test_what_is_printed_after_an_exception_is_not_why_it_ended(log, said) -> None:
    ended = outcome.classify({"ended": "exit", "code": 2}, log, 0, False, None)
    assert (ended.kind, ended.reason) == ("crashed", said)


FAKE = """\
Traceback (most recent call last):
  File "site-packages/torch/_dynamo/exc.py", line 723, in unimplemented
    raise Unsupported(
torch._dynamo.exc.TorchRuntimeError: RuntimeError when making fake tensor call
  Explanation: Dynamo failed to run FX node with fake tensors: call_function <built-in function getitem>(*(FakeTensor(..., size=(16, 1)), \
FakeTensor(..., size=(16, 1), dtype=torch.uint8)), **{}): got RuntimeError('tensors used as indices must be long, int, byte or bool tensors')
  Hint: Your code may result in an error when running in eager.

  Developer debug context:\x20

 For more details about this graph break, please visit: https://meta-pytorch.github.io/compile-graph-break-site/gb/gb4315.html

from user code:
   File "/home/me/train.py", line 20, in forward
    return self.net(x)
           ^^^^^^^^^^^
  File "/home/me/my nets.py", line 74, in forward
    y = img[mask]
        ^^^^^^^^^

Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace
"""
LONG = "Detected data-dependent jump. " + "Dynamo does not support tracing dynamic control flow. " * 9
BREAK = f"""{_RAISED}torch._dynamo.exc.Unsupported: Data-dependent jump
  Explanation: {LONG}
  Hint: Use `torch.cond` to express dynamic control flow.
"""
BACKEND = f"""{_RAISED}torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:
RuntimeError: no compiler

Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace
"""


@pytest.mark.parametrize("log, said", [
    (FAKE, "torch._dynamo.exc.TorchRuntimeError: RuntimeError when making fake tensor call: RuntimeError('tensors used as indices must be long, "
           "int, byte or bool tensors') (/home/me/my nets.py:74)"),
    ("".join(f"[rank1]: {line}\n[rank0]: KeyError: 'not of this rank'\n" for line in FAKE.splitlines()),
     "torch._dynamo.exc.TorchRuntimeError: RuntimeError when making fake tensor call: RuntimeError('tensors used as indices must be long, "
     "int, byte or bool tensors') (/home/me/my nets.py:74)"),
    (BREAK, f"torch._dynamo.exc.Unsupported: Data-dependent jump: {LONG[:197]}..."),
    (BACKEND, "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised: RuntimeError: no compiler"),
    (f"{_RAISED}torch._inductor.exc.InductorError: CppCompileError: C++ compile error\n\nCommand:\ng++ a.cpp\n",
     "torch._inductor.exc.InductorError: CppCompileError: C++ compile error"),
    (f"{_RAISED}torch._dynamo.exc.Unsupported: first\n{FAKE.partition('Hint')[0]}", "torch._dynamo.exc.TorchRuntimeError: RuntimeError when making fake "
     "tensor call: RuntimeError('tensors used as indices must be long, int, byte or bool tensors')"),
    (f"{_RAISED}ValueError: other:\n  Explanation: none of a compiler's\n", "ValueError: other:"),
], ids=["fake", "ranks", "break", "backend", "inductor", "the last", "others"])
def test_a_compiler_says_why_below_its_first_line(log, said) -> None:
    """Seen: `RuntimeError when making fake tensor call` was all that was said of a mask of uint8."""
    assert outcome.exception_line(log) == said and len(said) < 600 and "\n" not in said


def test_who_asks_for_input_gets_the_remedy_whatever_is_printed_afterwards() -> None:
    ended = outcome.classify({"ended": "exit", "code": 1}, f"{_RAISED}EOFError: EOF when reading a line\nbye\n", 0, False, None)
    assert "< FILE" in ended.remedy


@pytest.mark.parametrize("log", [
    f"{_RAISED}OSError: [Errno 25] Inappropriate ioctl for device\nbye\n", f"{_RAISED}_curses.error: setupterm: could not find terminal\n",
    "stty: 'standard input': Inappropriate ioctl for device\n",
    f"stty: 'standard input': Inappropriate ioctl for device\n{_RAISED}ValueError: not enough values to unpack (expected 2, got 0)\n",
])
def test_a_command_that_needs_a_terminal_is_told_that_there_is_none(log) -> None:
    """Seen: it was told to work without saturate first, which it does."""
    assert "have no terminal" in outcome.classify({"ended": "exit", "code": 1}, log, 0, False, None).remedy


def test_a_time_limit_of_the_commands_own_is_named() -> None:
    ended = outcome.classify({"ended": "exit", "code": 124}, "epoch 3\n", 0, True, None)
    assert ended.kind == "exited" and "`timeout`" in ended.reason and "take `timeout` out" in ended.remedy
    ended = outcome.classify({"ended": "signal", "signal": 14}, "epoch 3\n", 0, True, None)
    assert ended.kind == "killed_by_signal" and "signal.alarm" in ended.remedy


@pytest.mark.parametrize("kills, kind", [(0, "killed_by_signal"), (1, "out_of_memory_host"), (None, "out_of_memory_host")])
@pytest.mark.parametrize("end", [{"ended": "signal", "signal": 9}, {"ended": "exit", "code": 137}])
def test_sigkill_is_want_of_memory_where_the_kernel_counts_one_or_does_not_say(end, kills, kind) -> None:
    """Seen: `timeout -s KILL 60 python train.py` was told to lower its batch size."""
    ended = outcome.classify({**end, "out_of_memory": kills}, "epoch 3\n", 0, True, None)
    assert ended.kind == kind and ("`timeout -s KILL`" in ended.remedy) is (kills == 0)


WORKER = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "
#: As torch prints it where the signal comes while a batch is waited for.
LOST = f"""{_RAISED}{WORKER}

The above exception was the direct cause of the following exception:

{_RAISED}RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly
"""


@pytest.mark.parametrize("kills, kind", [(0, "killed_by_signal"), (1, "out_of_memory_host"), (None, "out_of_memory_host")])
@pytest.mark.parametrize("log", [LOST, f"{_RAISED}{WORKER}\n", f"[rank1]: {_RAISED}[rank1]: {WORKER}\n"])
def test_so_is_that_of_a_worker(log, kills, kind) -> None:
    """It was called a crash, with nothing of memory and no remedy."""
    ended = outcome.classify({"ended": "exit", "code": 1, "out_of_memory": kills}, log, 0, True, None)
    assert ended.kind == kind and "DataLoader worker (pid 7) is killed by signal: Killed, " in ended.reason
    assert ("`timeout -s KILL`" if kills == 0 else "number of loader workers") in ended.remedy


def test_a_worker_whose_loss_the_script_survived_is_no_reason() -> None:
    ended = outcome.classify({"ended": "exit", "code": 1, "out_of_memory": 1}, f"{LOST}epoch 2\n{_RAISED}ValueError: no data\n", 0, True, None)
    assert (ended.kind, ended.reason) == ("crashed", "ValueError: no data")


@pytest.mark.parametrize("said", [
    "RuntimeError: unable to allocate shared memory(shm) for file </torch_25494_2589082127_0>: No space left on device (28)",
    "RuntimeError: unable to open shared memory object </torch_7_1_0> in read-write mode: No space left on device (28)",
    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.",
])
def test_a_full_dev_shm_is_not_a_full_disk(said: str) -> None:
    """The remedy is another one."""
    ended = outcome.classify({"ended": "exit", "code": 1}, f"Traceback (most recent call last):\n{said}\n", 0, False, None)
    assert ended.kind == "shared_memory_full" and "/dev/shm" in ended.remedy


@pytest.mark.parametrize("said", [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.",
    "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 2.00 GiB.",
    "RuntimeError: CUDA driver error: out of memory",
    "RuntimeError: CUDA error: out of memory",
    "RuntimeError: HIP error: out of memory",
    "RuntimeError: Triton Error [CUDA]: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "RuntimeError: cuFFT error: CUFFT_ALLOC_FAILED",
])
def test_a_full_device_is_named_whichever_library_met_it(said: str) -> None:
    ended = outcome.classify({"ended": "exit", "code": 1}, f"{_RAISED}{said}\n", 0, False, None)
    assert (ended.kind, ended.reason) == ("out_of_memory_device", said) and "batch size" in ended.remedy


UNINITIALIZED = "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
NO_ENGINE = "RuntimeError: GET was unable to find an engine to execute this computation"
ASSERTED = "../aten/src/ATen/native/cuda/Loss.cu:245: nll_loss: block: [0,0,0], thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed.\n"


@pytest.mark.parametrize("said", [UNINITIALIZED, NO_ENGINE])
def test_what_mostly_means_a_full_device_says_that_it_may_mean_something_else(said: str) -> None:
    ended = outcome.classify({"ended": "exit", "code": 1}, f"{_RAISED}{said}\n", 0, False, None)
    assert ended.kind == "out_of_memory_device" and ended.reason.startswith(said) and "as well" in ended.reason
    # A label out of range: the next library that is asked for anything fails, and no batch is small enough.
    ended = outcome.classify({"ended": "exit", "code": 1}, f"{ASSERTED}{_RAISED}{said}\n", 0, False, None)
    assert (ended.kind, ended.reason) == ("crashed", said)


def test_a_kernel_that_needs_too_much_shared_memory_is_not_a_batch_that_is_too_large() -> None:
    said = "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 262144, Hardware limit: 232448."
    ended = outcome.classify({"ended": "exit", "code": 1}, f"{_RAISED}{said}\n", 0, False, None)
    assert (ended.kind, ended.reason) == ("crashed", said)


@pytest.mark.parametrize("log, steps, kind, names", [
    (f"INFO - 8 images\nERROR - {_RAISED}ValueError: 16 channels in 32 groups\n\n", 0, "never_trained", "ValueError: 16 channels in 32 groups"),
    (f"{_RAISED}RuntimeError: Error(s) in loading:\n\tMissing key(s)\n", 3, "too_short", "RuntimeError: Error(s) in loading:"),
    (f"{_RAISED}torch._dynamo.exc.Unsupported: a mask\nadvice\n", 3, "too_short", "torch._dynamo.exc.Unsupported: a mask"),
    (f"{_RAISED}ValueError: no display\nepoch 1\ndone\n", 3, "too_short", ""),
    ("epoch 1\n", 0, "never_trained", ""),
])
def test_an_exception_that_a_script_logs_and_ends_normally_after(log, steps, kind, names) -> None:
    """The DDPM that logs whatever ends its training and returns 0: nothing is wrong with how it calls PyTorch, or with its path."""
    ended = outcome.classify({"ended": "exit", "code": 0}, log, steps, steps > 0, None)
    assert ended.kind == kind
    assert ("exit code 0" in ended.remedy) is bool(names) and ended.reason.endswith(names)
    assert ("printed is an exception" in ended.reason) is bool(names)


#: As torch words it, in what the agent tells of its own failure.
_CUDA_ERROR = _RAISED + """torch.AcceleratorError: CUDA error: {0}
Search for `{1}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Device-side assertions were explicitly omitted for this error check; the error probably arose while initializing the DSA handlers.

and while undoing: OSError(9, 'Bad file descriptor')"""


@pytest.mark.parametrize("kind, reason, memory", [
    ("out_of_memory_host", "killed with SIGKILL", True),
    ("failed_to_apply", "compile: OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", True),
    ("agent_failed", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", True),
    ("agent_failed", outcome.exception_line(_CUDA_ERROR.format("out of memory", "cudaErrorMemoryAllocation")), True),
    ("agent_failed", outcome.exception_line(_CUDA_ERROR.format("an illegal memory access was encountered", "cudaErrorIllegalAddress")), False),
    ("failed_to_apply", "compile: RuntimeError: no compiler", False),
    ("too_short", "the script ended after 3 training steps", False),
])
def test_memory_may_run_out_in_our_own_code(kind: str, reason: str, memory: bool) -> None:
    assert outcome.ran_out_of_memory(outcome.Outcome(kind, reason)) is memory


def test_what_came_while_this_process_was_stopped_has_come() -> None:
    """Ctrl-Z for longer than the workload may be silent: it stands at the gate, and does not hang."""
    server = gate.GateServer(f"saturate-test-stopped-{os.getpid()}", "token")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rank:
            rank.connect(f"\0saturate-test-stopped-{os.getpid()}")
            for message in ({"at": "hello", "token": "token", "rank": 0, "world_size": 1}, {"at": "gate"}):
                rank.sendall(json.dumps(message).encode() + b"\n")
            assert server.wait_gates(0.0, lambda: True) == [{"at": "gate"}]
            with pytest.raises(gate.GateTimeout):
                server.wait_gates(0.0, lambda: True)
    finally:
        server.close()


@pytest.mark.parametrize(("talks", "moves", "waits_s"), [(False, 0, 0.1), (True, 0, 0.4), (False, 8, 0.8), (True, 8, 1.2)])
def test_who_talks_is_waited_for_and_who_gets_on_without_an_end(talks: bool, moves: int, waits_s: float) -> None:
    """A silence of 0.1 s is a hang, 0.4 s of talk without progress, too."""
    server = gate.GateServer(f"saturate-test-moves-{os.getpid()}", "token")
    words, reached = itertools.count(), itertools.chain(range(1 + moves), itertools.repeat(moves))
    began = time.monotonic()
    try:
        with pytest.raises(gate.GateTimeout):
            server.wait_gates(0.1, lambda: True, lambda: next(words) if talks else None, 0.4, lambda: next(reached))
    finally:
        server.close()
    assert waits_s <= time.monotonic() - began < waits_s + 60.0


def test_who_always_has_another_message_does_not_postpone_the_timeout(monkeypatch) -> None:
    """None of them says that it stands at the gate."""
    monkeypatch.setattr(gate, "_LATE_S", 1.0)
    server = gate.GateServer(f"saturate-test-chatty-{os.getpid()}", "token")
    ended = threading.Event()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rank:
            rank.connect(f"\0saturate-test-chatty-{os.getpid()}")
            rank.sendall(json.dumps({"at": "hello", "token": "token", "rank": 0, "world_size": 1}).encode() + b"\n")

            def chat() -> None:
                with contextlib.suppress(OSError):
                    while not ended.is_set():
                        rank.sendall(b'{"at": "motif_changed"}\n' * 100)

            chatty = threading.Thread(target=chat)
            chatty.start()
            try:
                for wait in (lambda: server.wait_gates(0.1, lambda: True), lambda: server.ask({}, 0.1, lambda: True)):
                    with pytest.raises(gate.GateTimeout):
                        wait()
            finally:
                ended.set()
                rank.shutdown(socket.SHUT_RDWR)
                chatty.join()
    finally:
        server.close()


def test_an_agent_that_failed_is_told_of_by_the_first_line_of_its_exception() -> None:
    said = _CUDA_ERROR.format("out of memory", "cudaErrorMemoryAllocation")
    server = gate.GateServer(f"saturate-test-{os.getpid()}", "token")
    try:
        with pytest.raises(gate.AgentFailed) as failed:
            server._sort(types.SimpleNamespace(hello={"rank": 0}), {"at": "agent_failed", "error": said}, [])
    finally:
        server.close()
    assert str(failed.value) == "torch.AcceleratorError: CUDA error: out of memory"


@pytest.mark.parametrize(("below", "reason"), [
    ("Expected value to be within the support (Simplex()), but found:\ntensor([[0.1, 0.2]])\n",
     "ValueError: Error at site 'topics': Expected value to be within the support (Simplex()), but found:"),
    ("\nDuring handling of the above exception, another exception occurred:\n", "ValueError: Error at site 'topics':"),
    ("", "ValueError: Error at site 'topics':"),
])
def test_an_exception_whose_first_line_ends_with_a_colon_is_told_with_the_next(below: str, reason: str) -> None:
    """Seen: a technique that failed with "ValueError: Error while computing log_prob at site 'doc_topics':"."""
    assert outcome.exception_line(f"{_RAISED}ValueError: Error at site 'topics':\n{below}") == reason
