"""A plugin for the pytest run that ``aorta bisect`` starts: the one selected test becomes a search for a commit.

It is loaded by name (``-p pytest_aorta.plugin.bisecting``), so other runs of pytest do not have its option.
"""

from functools import partial
from pathlib import Path

import pytest

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.files import write_json
from pytest_aorta.common.model import decode, to_builtins
from pytest_aorta.plugin.hooks import RUN
from pytest_aorta.plugin.progress_line import say
from pytest_aorta.session.search import Bisection, SearchRequest

BISECTION = pytest.StashKey[Bisection]()
_OPTION = "--aorta-bisect"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option that describes the search, when the plugin is loaded."""
    parser.addoption(_OPTION, metavar="JSON", required=True, help="the request of aorta bisect")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Attach the search to the session's run, after the main plugin has set up that run."""
    config = session.config
    run = config.stash[RUN]
    refused = {"-n": config.getoption("numprocesses", None), "--update-baselines": run.options.update_baselines}
    if given := [flag for flag, value in refused.items() if value]:
        raise pytest.UsageError(f"aorta bisect: {given[0]} can't be used in a search; give -n0 or leave it out")
    try:
        request = decode(config.getoption(_OPTION), SearchRequest, _OPTION)
        run.session.bisection = config.stash[BISECTION] = Bisection(request, config.rootpath, partial(say, config))
    except AortaError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check that a single test is selected and give it the tolerances of the search, after collection."""
    if len(items) != 1:
        raise pytest.UsageError(f"aorta bisect: one test has to be selected, and these arguments select {len(items)}")
    if tolerances := config.stash[BISECTION].request.tolerances:
        # In front, since the tolerances of the search take precedence over all others.
        items[0].add_marker(pytest.mark.tolerance(**tolerances), append=False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was found into the file of the request, if there is one; the exit status is that of the test."""
    bisection = session.config.stash[BISECTION]
    if bisection.request.result:
        write_json(Path(bisection.request.result), to_builtins(bisection.finding))
