"""A second, small plugin that replaces the fixtures while the plugin ``aorta`` is disabled by ``-p no:aorta``.

A disabled plugin can't report anything itself: pytest would only fail the tests that use its fixtures, and list all
available fixtures.
"""

from __future__ import annotations

import pytest

MAIN_PLUGIN = "aorta"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the ini keys when the plugin is loaded, so that ``--strict-config`` accepts them."""
    if pluginmanager.is_blocked(MAIN_PLUGIN):
        from pytest_aorta.plan.options.table import OPTIONS  # only while the main plugin is disabled

        for option in OPTIONS:
            parser.addini(option.ini, "not used, since the plugin aorta is disabled", type="string", default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and the fixtures that report the disabled plugin, before tests are collected."""
    if config.pluginmanager.is_blocked(MAIN_PLUGIN):
        from pytest_aorta.plugin.markers import MARKERS  # only while the main plugin is disabled

        for text in MARKERS.values():
            config.addinivalue_line("markers", text)
        config.pluginmanager.register(DisabledFixtures(), "aorta-disabled-fixtures")


class DisabledFixtures:
    """The fixtures of the main plugin, each of which fails the test."""

    @pytest.fixture
    def distributed_world(self) -> None:
        """Fail the test: the plugin is disabled."""
        _fail("distributed_world")

    @pytest.fixture
    def workload(self) -> None:
        """Fail the test: the plugin is disabled."""
        _fail("workload")


def _fail(fixture: str) -> None:
    pytest.fail(f"{fixture}: the plugin aorta is disabled (-p no:aorta)", pytrace=False)
