"""The supervisor of one trial: a small process of its own that outlives nothing and lets nothing outlive it.

    python -I -S supervise.py SPEC.json     (started by `supervised`; the file is deleted once it is read)

It adopts every orphan of the trial (child subreaper), so daemons stay in the tree. Its standard input is a pipe from the controller: end of file
means that the controller is gone, by whatever signal, and the whole tree is killed. So does a byte: a fork of the controller may hold the pipe
open. The workload's output goes to a log whose middle is dropped when it grows, so a script that prints gigabytes fills no disk.

Standard library only. It writes one JSON line to its standard output when the workload has ended; in it, `left` is
how many processes of the tree still ran then, and `out_of_memory` how many processes of this machine the kernel killed for
want of memory meanwhile (null where it does not say). Where nothing could be started, the line says `why`.
"""

import ctypes
import json
import os
import select
import signal
import sys

PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_HEAD_BYTES = 512 * 1024
_TAIL_BYTES = 512 * 1024


class Log:
    """First and last half megabyte of a stream. On a full disk the log ends early; `problem` then says why."""

    def __init__(self, path):
        self.path = path
        self.file = open(path, "wb", buffering=0)  # noqa: SIM115 - lives as long as the process
        self.head_left = _HEAD_BYTES
        self.tail = b""
        self.dropped = 0
        self.problem = ""

    def write(self, data):
        if self.head_left:
            self._put(data[: self.head_left])
            rest = data[self.head_left:]
            self.head_left = max(0, self.head_left - len(data))
            data = rest
        if data:
            self._touch()
        self.tail += data
        if len(self.tail) > 2 * _TAIL_BYTES:
            self.dropped += len(self.tail) - _TAIL_BYTES
            self.tail = self.tail[-_TAIL_BYTES:]

    def close(self):
        if self.dropped:
            self._put(b"\n[saturate: %d bytes left out]\n" % self.dropped)
        self._put(self.tail)
        self.file.close()

    def _touch(self):
        """The file does not grow any more: its time tells the controller that something came."""
        try:
            os.utime(self.file.fileno())
        except OSError:
            pass        # as on a file system that went away: what is printed is kept all the same

    def _put(self, data):
        try:
            self.file.write(data)
        except OSError as error:    # it must not end the supervisor, or nobody would end the workload
            self.problem = os.strerror(error.errno)


def _run_workload(spec, output, asks, become=None):
    """In the child: enter the cage, then become the workload. Never returns. Where it cannot, `trial.starting` reads what failed."""
    stage = "output"
    try:
        os.setsid()
        os.dup2(output, 1)      # first: what fails below says so there
        os.dup2(output, 2)
        stage = "standard input"
        os.dup2(os.open(spec.get("stdin", os.devnull), os.O_RDONLY), 0)
        if spec.get("stdin_offset"):
            os.lseek(0, spec["stdin_offset"], os.SEEK_SET)
        stage = "working directory"
        os.chdir(spec["cwd"])
        if spec.get("cage"):
            stage = "isolation"
            from saturate.trial import cage

            cage.enter(cage.CagePlan.from_json(spec["cage"]))
            os.chdir(spec["cwd"])       # the same folder, under its overlay
        if asks is not None:
            asks()
        stage = "program"
        # Last, since a new namespace takes it back: should the supervisor be killed, the workload dies with it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if become is not None:
            become(spec)
        os.execvpe(spec["argv"][0], spec["argv"], spec["environment"])
    except BaseException as error:  # noqa: BLE001 - nothing above us can report it
        os.write(2, f"saturate: could not start: {stage}: {type(error).__name__}: {error}\n".encode(errors="backslashreplace"))
        if type(error).__name__ == "CageRefused":
            os._exit(97)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def kills_for_memory():
    """How many processes the kernel has killed for want of memory since the machine started, those below a limit of a container
    included; None where it does not say."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    except OSError:
        return None


def main(path, become=None):
    """`become`: what the workload's process does with the order, in place of executing a program; never returns."""
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    os.unlink(path)             # it holds the user's environment
    sys.path.insert(0, spec["import_root"])
    from saturate.trial import tree

    try:
        begun = _begin(spec, become)
    except OSError as error:        # no process more, no descriptor, no room for its log: nothing was started
        _say({"ended": "not_started", "why": f"{type(error).__name__}: {error}"})
        return
    workload, reader, wake_reader, log, older, attributes, killed_before = begun
    left = 0
    try:
        status = _watch(workload, reader, wake_reader, log, attributes)
        if status is None:          # it may have ended by itself just before it was to be ended
            status = _reap(workload)
        left = tree.running(os.getpid())
    finally:
        _kill(tree, older)
    _reap(workload)                 # all of them: in a container, nobody else may. How they were killed is no news
    os.set_blocking(reader, False)
    _drain(reader, log)
    log.close()
    report = {"ended": "killed"} if status is None else _describe(status)
    killed = kills_for_memory()
    report["out_of_memory"] = None if killed is None or killed_before is None else killed - killed_before
    _say({**report, "left": left, "log_problem": log.problem})


def _say(report):
    try:
        os.write(1, json.dumps(report).encode() + b"\n")
    except BrokenPipeError:
        pass                                        # nobody is left to read it


def _begin(spec, become=None):
    """Start the workload; all that is needed to watch it. Raises OSError before anything runs."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # Ctrl-C is the controller's to handle
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reader, writer = os.pipe()
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    plan = json.loads(spec["cage"]) if spec.get("cage") else {}
    private = plan.get("mode") == "overlay"         # it has a /dev/shm of its own
    older = None if private or not os.path.isdir("/dev/shm") else set(os.listdir("/dev/shm"))
    asks = attributes = None
    if plan.get("attributes"):
        from saturate.trial import cage, metadata

        made = cage.CagePlan.from_json(spec["cage"])
        asks, attributes = metadata.channel(lambda path: cage.may_change(made, path, older or set()))
    killed_before = kills_for_memory()
    log = Log(spec["log"])
    workload = os.fork()
    if workload == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.close(reader)
        _run_workload(spec, writer, asks, become)
    os.close(writer)
    if attributes:
        attributes.begin()
    return workload, reader, wake_reader, log, older, attributes, killed_before


def _kill(tree, older):
    """End the tree, and what it would have removed from /dev/shm had it not been killed: names that are not in `older`."""
    used = set()
    try:
        if older is not None:
            used = tree.shared_memory(tree.descendants(os.getpid()))
    finally:
        tree.kill(os.getpid())
    fresh = {path for path in used if path.split("/")[3] not in older and os.path.exists(path)}
    if fresh:
        others = tree.shared_memory(int(name) for name in os.listdir("/proc") if name.isdigit())
        for path in fresh - others:     # what somebody else uses as well is not the trial's alone
            try:
                os.unlink(path)
            except OSError:
                pass                    # it is gone meanwhile, or another user's


def _watch(workload, reader, wake_reader, log, attributes=None):
    """Collect output until the workload ends (its wait status), or the controller is gone or wants the end (None)."""
    sources = [0, reader, wake_reader]
    while True:
        ready, _, _ = select.select([*sources, attributes.source] if attributes else sources, [], [])
        if attributes and attributes.source in ready and not attributes.serve():
            attributes = None
        if 0 in ready:              # a byte, or the end of file: see above
            return None
        if reader in ready:
            data = os.read(reader, 1 << 16)
            if data:
                log.write(data)
            else:
                sources.remove(reader)
        if wake_reader in ready:
            os.read(wake_reader, 4096)
        status = _reap(workload)
        if status is not None:
            return status


def _reap(workload):
    """Collect every ended child; the workload's wait status once it has ended."""
    status = None
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == workload:
            status = code


def _drain(reader, log):
    while True:
        try:
            data = os.read(reader, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            return
        log.write(data)


def _describe(status):
    if os.WIFSIGNALED(status):
        return {"ended": "signal", "signal": os.WTERMSIG(status)}
    return {"ended": "exit", "code": os.WEXITSTATUS(status)}


if __name__ == "__main__":
    main(sys.argv[1])
