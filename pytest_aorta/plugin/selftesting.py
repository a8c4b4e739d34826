"""A plugin for the runs of pytest that ``aorta selftest`` starts: it leaves the records of the tests in a file.

It is loaded by name (``-p pytest_aorta.plugin.selftesting``), so other runs of pytest do not have its option.
"""

from pathlib import Path

import pytest

from pytest_aorta.common.files import write_json
from pytest_aorta.plugin.hooks import RUN

OPTION = "--aorta-selftest"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option that names the file, when the plugin is loaded."""
    parser.addoption(OPTION, type=Path, metavar="FILE", required=True, help="file for the records of all tests")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the records; workers of xdist have sent theirs to this process."""
    config = session.config
    if not hasattr(config, "workerinput"):
        records = [record.to_text() for record in (*config.stash[RUN].records, *config.stash[RUN].lost)]
        write_json(config.getoption(OPTION), records)
