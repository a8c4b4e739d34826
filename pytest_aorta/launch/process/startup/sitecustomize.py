"""Python imports this module when it starts, in each program of a command that starts ranks by itself."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _run_hidden_module() -> None:
    """Run the module of this name that this one hides, such as that of the distribution."""
    own = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would take a millisecond
    others = [entry for entry in sys.path if os.path.abspath(entry) != own]  # noqa: PTH100
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


_run_hidden_module()
try:
    from pytest_aorta.launch.process.own_ranks import install
except ImportError as error:
    print(f"pytest-aorta: ranks of {sys.executable} are not recorded: {error}", file=sys.stderr)
else:
    install()
