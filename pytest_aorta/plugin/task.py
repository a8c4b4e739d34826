"""A plugin for the runs of pytest that ``aorta bisect`` and ``selftest`` start.

It carries out the run's :class:`~pytest_aorta.session.task.Task`, and leaves what the tests found in a file. It is
loaded by name (``-p pytest_aorta.plugin.task``), so other runs of pytest do not have its option.
"""

from pathlib import Path

import pytest

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.files import write_text
from pytest_aorta.common.model import decode, to_text
from pytest_aorta.launch.process.guard import die_with
from pytest_aorta.plugin.hooks import RUN
from pytest_aorta.session.search import Bisection
from pytest_aorta.session.task import Findings, Task

TASK = pytest.StashKey[Task]()
_OPTION = "--aorta-task"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option that describes the task, when the plugin is loaded."""
    parser.addoption(_OPTION, metavar="JSON", required=True, help="the task of a run that `aorta` starts")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Attach a search to the session's run, after the main plugin has set up that run."""
    config = session.config
    run = config.stash[RUN]
    task = config.stash[TASK] = decode(config.getoption(_OPTION), Task, _OPTION)
    if not hasattr(config, "workerinput"):
        run.log_fd = task.log_fd
        die_with(task.parent)
    if run.options.update_baselines and not task.records:
        raise pytest.UsageError("--update-baselines: this command writes no baselines of yours; leave the option out")
    if task.search is None:
        return
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("aorta bisect: -n can't be used in a search; give -n0 or leave it out")
    try:
        run.bisection = Bisection(task.search, config.rootpath, run.say)
    except AortaError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check that a search has a single test and give it the search's tolerances, after collection."""
    task = config.stash[TASK]
    if task.search is None:
        return
    if len(items) != 1:
        raise pytest.UsageError(f"NODE_ID: one test has to be selected, and these arguments select {len(items)}")
    if task.tolerances:
        # In front, since the closest marker takes precedence.
        items[0].add_marker(pytest.mark.tolerance(**task.tolerances), append=False)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was found; workers of xdist have sent their records to this process."""
    config = session.config
    if hasattr(config, "workerinput") or TASK not in config.stash:
        return
    run, task = config.stash[RUN], config.stash[TASK]
    records = (*run.records, *run.lost)
    found = Findings(records, run.bisection.finding) if run.bisection else Findings(records)
    write_text(Path(task.findings), to_text(found), durable=False)
