"""A plugin for the pytest run that ``aorta bisect`` starts: the one selected test becomes a search for a commit.

It is loaded by name (``-p pytest_aorta.plugin.bisecting``), so other runs of pytest do not have its option.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.files import locked
from pytest_aorta.plugin.hooks import RUN
from pytest_aorta.session.search import Bisection, SearchLog

BISECTION = pytest.StashKey[Bisection]()
LOCK_FILE = "pytest.lock"
_OPTION = "--aorta-bisect"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option that names the log of the search, when the plugin is loaded."""
    parser.addoption(_OPTION, type=Path, metavar="FILE", required=True, help="log of the search, which is continued")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Read the log and attach the search to the session's run, after the main plugin has set up that run."""
    config = session.config
    run = config.stash[RUN]
    refused = {"-n": config.getoption("numprocesses", None), "--update-baselines": run.options.update_baselines}
    if given := [flag for flag, value in refused.items() if value]:
        raise pytest.UsageError(f"aorta bisect: {given[0]} can't be used in a search; give -n0 or leave it out")
    path: Path = config.getoption(_OPTION)
    held = ExitStack()
    try:
        # This process takes the lock too, because it outlives a killed `aorta bisect`.
        held.enter_context(locked(path.with_name(LOCK_FILE), limit_s=0.0))
        bisection = Bisection(SearchLog.read(path), config.rootpath)
    except TimeoutError:
        raise pytest.UsageError(f"aorta bisect: another process is at work on {path}") from None
    except (AortaError, OSError) as error:
        held.close()
        raise pytest.UsageError(str(error)) from None
    config.add_cleanup(held.close)
    config.stash[BISECTION] = bisection
    run.session.bisection = bisection


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check that a single test is selected and give it the tolerances of the search, after collection."""
    if len(items) != 1:
        raise pytest.UsageError(f"aorta bisect: one test has to be selected, and these arguments select {len(items)}")
    if tolerances := config.stash[BISECTION].log.request.tolerances:
        # In front, since the tolerances of the search take precedence over all others.
        items[0].add_marker(pytest.mark.tolerance(**tolerances), append=False)
