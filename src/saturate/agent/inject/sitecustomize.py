"""Runs at the start of every Python process below `saturate`, before the user's code.

It removes its own folder from `sys.path`, runs the user's own `sitecustomize` if there is one, and leaves one import
hook behind that wakes the agent when torch is imported. A process that never imports torch pays about a millisecond and
is left alone: nothing is loaded that the interpreter has not loaded by itself, so that a module of the user's that is
called like one of the standard library, or `saturate`, is found as ever.
"""

import atexit
import os
import sys

# `atexit` is part of the interpreter. Not `importlib.machinery` and `importlib.util`: those load `functools`, `types` and others.
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import PathFinder, spec_from_file_location
from posix import getpid

_HERE = os.path.dirname(__file__)


def _chain():
    """Run the `sitecustomize` that Python would have run without us; None when there is none."""
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return None
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)
    return module


class _Guest:
    """The agent, which is loaded when the first import happens that it acts on."""

    def __init__(self, plan_text):
        self.plan_text = plan_text
        self.plan = {}
        self.callbacks = None
        self.why_not = ""               # the reason why the agent stays out, once it does

    def imported(self, name, module):
        try:
            if self.callbacks is None:
                self.callbacks = {}         # tried once
                self.callbacks = self.load()
            callback = self.callbacks.pop(name, None)
            if callback is not None:
                callback(module)
                return
        except Exception as error:  # a guest fails open: the user's program must run whatever happens here
            interrupted = _from_signal_handler(error)
            self.stays_out(f"the agent could not start ({type(error).__name__}: {error})", leaves=not interrupted)
            if interrupted:             # a time limit, say: the program's to catch
                raise
        if name == "torch" and self.why_not:
            self.leave_word()

    def load(self):
        """Start the agent: what it has to do after which import. {} where it cannot live here."""
        import json

        self.plan = json.loads(self.plan_text)
        if sys.version_info < (3, 11):  # noqa: UP036 - the workload's Python may be older than saturate's own
            version = ".".join(map(str, sys.version_info[:2]))
            self.stays_out(f"needs Python >= 3.11 in the workload, found {version}")
            return {}
        namesake = _namesake()
        if namesake is not None:
            self.stays_out(f"this program has a module of that name itself, {namesake}, and both cannot be loaded")
            return {}
        if "saturate" not in sys.modules:
            root = self.plan["package"]
            spec = spec_from_file_location("saturate", os.path.join(root, "__init__.py"), submodule_search_locations=[root])
            module = sys.modules["saturate"] = module_from_spec(spec)
            spec.loader.exec_module(module)
        from saturate.agent import bootstrap
        from saturate.techniques import _interrupts  # noqa: F401 - for `imported`

        return bootstrap.start(self.plan)

    def ends(self):
        """Called after everything that the script wants to be called at its end."""
        if self.plan.get("diverged"):
            from saturate.agent import watchdog

            watchdog.leave()

    def leave_word(self):
        """For the controller of a trial, which would wait for a step in vain. What imports no torch does not train."""
        if self.plan.get("mode") == "run" or "ended" not in self.plan:
            return
        try:
            import json

            with open(f"{self.plan['ended']}-stayed-out-{getpid()}.json", "w", encoding="utf-8") as file:
                json.dump({"why": self.why_not}, file)
        except Exception:  # noqa: BLE001, S110 - a full disk, or a `json` of the user's: the log says why as well
            pass

    def stays_out(self, why, leaves=True):
        self.why_not = why
        _tell(f"{why}; nothing was changed")
        if leaves and self.plan.get("strict"):
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except Exception:  # noqa: BLE001, S110 - as in `_tell`
                    pass
            os._exit(3)         # the environment does not allow what was asked; an exception could be caught


def _tell(text):
    """As `saturate.notices.tell`, which may not be loaded yet."""
    for stream in (sys.stderr, sys.__stderr__):
        try:
            if stream is sys.__stderr__:
                stream.flush()
                os.write(stream.fileno(), f"saturate: {text}\n".encode(stream.encoding, "backslashreplace"))     # paths may be no text
            else:
                stream.write(f"saturate: {text}\n")
        except Exception as error:      # closed, full, nothing, or another thing altogether: nothing may come of it
            if _from_signal_handler(error):
                raise
        else:
            return


def _from_signal_handler(error):
    """Whether the program's handler of a signal raised it, as far as can be told before the agent is loaded."""
    interrupts = sys.modules.get("saturate.techniques._interrupts")
    return interrupts is not None and interrupts.from_signal_handler(error)


def _namesake():
    """The file of a module `saturate` that the program imports, or would, and that is not this package; else None."""
    module = sys.modules.get("saturate")
    if module is None:
        spec = PathFinder.find_spec("saturate", sys.path)
        origin = spec.origin if spec is not None else None
        if origin is None:              # none, or a folder without __init__.py, which gives way to any package
            return None
    else:
        origin = getattr(module, "__file__", None) or repr(module)
    ours = os.path.join(os.path.dirname(origin), "agent", "inject", "sitecustomize.py")
    return None if os.path.exists(ours) else origin


def _start():
    if getattr(sys, "_saturate_awake", False):  # an environment copied twice, or `site` run again by hand
        return
    sys._saturate_awake = True
    plan_text = os.environ.get("SATURATE_PLAN")
    if not plan_text:
        return
    try:
        if not plan_text.startswith("{"):       # a file's path: plans of trials are long
            with open(plan_text, encoding="utf-8") as file:
                plan_text = file.read()
        guest = _Guest(plan_text)
        atexit.register(guest.ends)             # the first to be registered is the last to be called
        _watch(guest)
    except Exception as error:  # noqa: BLE001 - as above
        _tell(f"the agent could not start ({type(error).__name__}: {error}); nothing was changed")


def _watch(guest):
    """Wait for the imports that the plan names. None: what the agent does begins with the process."""
    names = guest.plan_text.split('"', 4)[3].split()        # its first value: `json` may be the user's, see above
    if not names:
        guest.imported("", None)
        names = list(guest.callbacks) or ["torch"]
    spec = spec_from_file_location("saturate.importwatch", os.path.join(os.path.dirname(os.path.dirname(_HERE)), "importwatch.py"))
    module = module_from_spec(spec)         # not in sys.modules: there it would bring the package
    spec.loader.exec_module(module)
    watch = module.ImportWatch({})
    for name in names:
        if name in sys.modules:             # the user's `sitecustomize` was first
            guest.imported(name, sys.modules[name])
        else:
            watch.callbacks[name] = _telling(guest, name)
    sys.meta_path.insert(0, watch)


def _telling(guest, name):
    return lambda module: guest.imported(name, module)


try:
    _user = _chain()
finally:                                    # where the user's own fails, Python says so and goes on
    _start()
if _user is None:
    # Exactly what Python sees where no sitecustomize exists; `site` swallows it by name.
    raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")
