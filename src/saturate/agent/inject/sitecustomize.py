"""Runs at the start of every Python process below `saturate`, before the user's code.

It removes its own folder from `sys.path`, runs the user's own `sitecustomize` if there is one, and leaves one import
hook behind that wakes the agent when torch is imported. A process that never imports torch pays about a millisecond.
"""

import os
import sys


def _chain():
    """Run the `sitecustomize` that Python would have run without us; None when there is none."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return None
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)
    return module


def _wake(plan_text):
    """Load the `saturate` package from where the plan says, without touching `sys.path`, and start the agent."""
    import json
    from importlib.util import module_from_spec, spec_from_file_location

    if not plan_text.startswith("{"):       # a file's path: plans of trials are long
        with open(plan_text, encoding="utf-8") as file:
            plan_text = file.read()
    plan = json.loads(plan_text)
    if "saturate" not in sys.modules:
        root = plan["package"]
        spec = spec_from_file_location("saturate", os.path.join(root, "__init__.py"), submodule_search_locations=[root])
        module = module_from_spec(spec)
        sys.modules["saturate"] = module
        spec.loader.exec_module(module)
    from saturate.agent import bootstrap

    bootstrap.start(plan)


def _start():
    if getattr(sys, "_saturate_awake", False):  # an environment copied twice, or `site` run again by hand
        return
    sys._saturate_awake = True
    plan_text = os.environ.get("SATURATE_PLAN")
    if not plan_text:
        return
    if sys.version_info < (3, 11):  # noqa: UP036 - the workload's Python may be older than saturate's own
        version = ".".join(map(str, sys.version_info[:2]))
        sys.stderr.write(f"saturate: needs Python >= 3.11 in the workload, found {version}; nothing was changed\n")
        return
    try:
        _wake(plan_text)
    except Exception as error:  # noqa: BLE001 - a guest fails open: the user's program must run whatever happens here
        sys.stderr.write(f"saturate: the agent could not start ({type(error).__name__}: {error}); nothing was changed\n")


_user = _chain()
_start()
if _user is None:
    # Exactly what Python sees where no sitecustomize exists; `site` swallows it by name.
    raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")
