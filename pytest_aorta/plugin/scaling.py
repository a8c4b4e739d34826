"""A plugin for the pytest runs that ``aorta scale`` starts: the one selected test runs as a rank of a simulated world.

It is loaded by name (``-p pytest_aorta.plugin.scaling``), so other runs of pytest do not have its option.
"""

import pytest

_OPTION = "--aorta-scale"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option that names the size of the world and the rank, when the plugin is loaded."""
    parser.addoption(_OPTION, metavar="SIZE:RANK", required=True, help="number of ranks, and the rank to simulate")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check that a single test is selected and simulate its world, after collection."""
    if len(items) != 1:
        raise pytest.UsageError(f"aorta scale: one test has to be selected, and these arguments select {len(items)}")
    size, rank = map(int, config.getoption(_OPTION).split(":"))
    # In front, since the closest marker applies.
    items[0].add_marker(pytest.mark.world(size=size, simulated=(rank,)), append=False)
