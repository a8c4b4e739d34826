"""The entry point: options, markers and fixtures. The first test that uses a fixture loads everything else.

pytest loads this module in every run of an environment that has pytest-aorta installed. Therefore packages that only
tests with a launch need are imported inside functions.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_aorta.common import renamed
from pytest_aorta.common.errors import AortaError, SpecError
from pytest_aorta.plan.options import OPTIONS, Option, Options, make_options
from pytest_aorta.plugin import newhooks
from pytest_aorta.plugin.markers import MARKERS, can_launch
from pytest_aorta.plugin.run import Run

if TYPE_CHECKING:
    from pytest_aorta.launch.launchers import RankLauncher
    from pytest_aorta.plan.options import LauncherKind
    from pytest_aorta.plugin.fixtures import LaunchingTests
    from pytest_aorta.session.runner import WorkloadRunner
    from pytest_aorta.session.world import DistributedWorld

# Options of pytest that only show something. They work on a machine that lacks GPUs and profilers, too.
_SHOWING = ("collectonly", "showfixtures", "show_fixtures_per_test", "markers", "help", "cacheshow", "setupplan")
# Options of pytest with which no test is called, so that the run has no results.
_WITHOUT_RESULTS = (*_SHOWING, "setuponly")
# Older versions of pytest have no numbers as ini keys, and give their text.
_HAS_NUMBERS = pytest.version_tuple >= (8, 4)

RUN = pytest.StashKey[Run]()
TESTS = pytest.StashKey["LaunchingTests"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare flags and ini keys, when the plugin is loaded."""
    group = parser.getgroup("aorta", "distributed training workloads (pytest-aorta)")
    for option in OPTIONS:
        if not option.ini_only:
            # None means that the command line does not give the option; the ini file then decides.
            group.addoption(option.flag, default=None, **option.argparse_keywords())
        if option.ini is not None:
            text = option.help if option.ini_only else f"ini twin of {option.flag}"
            kind: Any = option.ini if _HAS_NUMBERS or option.ini not in ("int", "float") else "string"
            parser.addini(option.key, f"{text} (default: {option.shown_default})", kind, default=None)
    for flag in renamed.OPTIONS:
        group.addoption(flag, action="store_true", help=argparse.SUPPRESS)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks that other plugins can implement."""
    pluginmanager.add_hookspecs(newhooks)


def pytest_configure(config: pytest.Config) -> None:
    """Check options and register markers, once the command line and the ini file are parsed."""
    for marker in MARKERS.values():
        config.addinivalue_line("markers", f"{marker.usage}: {marker.help}.")
    for flag, instead in renamed.OPTIONS.items():
        if config.getoption(flag):
            config.issue_config_time_warning(DeprecationWarning(f"{flag}: {instead}"), stacklevel=2)
    try:
        options = _read_options(config)
        config.stash[RUN] = Run(config, options)
        if options.report is not None:
            from pytest_aorta.report.write import require_packages  # only for a run with a report

            require_packages()
        if options.ab is not None and not _is_given(config, _SHOWING):
            from pytest_aorta.plan.reference import check_reference  # only for a run with a reference

            check_reference(options.ab, options.rootdir)
    except AortaError as error:
        raise pytest.UsageError(str(error)) from None


def _read_options(config: pytest.Config) -> Options:
    """Read every option; the command line wins over the ini file.

    Raises:
        SpecError: A value is not allowed, two options contradict each other, or a flag has no effect without another.
    """
    values = {option.name: _value(config, option) for option in OPTIONS}
    # The ini key aorta_launches applies to every recording; only a flag expects an effect on this run.
    how = {"--aorta-record": values["record"], "--aorta-launches": config.getoption("aorta_launches")}
    if not values["update_baselines"] and (flags := [flag for flag, value in how.items() if value is not None]):
        raise SpecError(f"{flags[0]} changes how baselines are recorded; give --update-baselines too")
    # A worker of xdist receives the command line from the controller.
    words = getattr(config, "workerinput", {}).get("aorta_command")
    command = tuple(words or ("pytest", *map(os.fspath, config.invocation_params.args)))
    given = {name: value for name, value in values.items() if value is not None}
    others = {"started_in": config.invocation_params.dir, "command": command, "repeated": _repeated(config)}
    return make_options(given, config.rootpath, **others)


# What pytest's types of ini keys allow, in words.
_INI_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def _value(config: pytest.Config, option: Option) -> Any:
    """Return the value that the command line or the ini file gives; None if neither gives one."""
    if not option.ini_only and (given := config.getoption(option.key)) is not None:
        return given
    if option.ini is None:
        return None
    try:
        given = config.getini(option.key)
    # pytest's words for a value that is not of the key's type, the last from pytest 9.2 on.
    except (TypeError, ValueError, pytest.UsageError) as error:
        allowed = f", allowed is {_INI_TYPES[option.ini]}" if option.ini in _INI_TYPES else ""
        raise SpecError(f"ini key {option.key}: {error}{allowed}") from None
    return given if given is None else option.read(given)


def _repeated(config: pytest.Config) -> tuple[str, ...]:
    """Return the words of a command line that runs a single test with this run's options for launches and verdicts."""
    matter = [option for option in OPTIONS if not option.writes]
    # A marker expression in the ini file's addopts could deselect the test.
    is_given = any(str(word).startswith("-m") for word in config.invocation_params.args)
    words = ["-m", config.option.markexpr] if is_given else []
    words += ["-c", config.option.inifilename] if config.option.inifilename else []
    flags = ((option, config.getoption(option.key)) for option in matter if not option.ini_only)
    words += [option.word(value) for option, value in flags if value is not None]
    keys = {option.key for option in matter}
    for text in config.getoption("override_ini") or ():
        words += ["-o", text] if text.partition("=")[0] in keys else []
    return tuple(words)


def _is_given(config: pytest.Config, names: Iterable[str]) -> bool:
    return any(config.getoption(name, False) for name in names)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the command line to a worker of xdist, when the controller starts the worker."""
    node.workerinput["aorta_command"] = node.config.stash[RUN].options.command


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Register the hooks of a run that writes a result even if none of its tests can launch.

    A controller of xdist does not collect tests, and errors of collection come before the tests are known.
    """
    config, options = session.config, session.config.stash[RUN].options
    writes = options.report or options.markdown or options.update_baselines or options.baselines.is_dir()
    if writes or config.getoption("dist", "no") != "no" or config.option.continue_on_collection_errors:
        _use(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Register the hooks of a run whose tests can launch, after collection, before xdist changes node ids."""
    if _is_given(config, _SHOWING):
        return
    if any(map(can_launch, items)):
        _use(config)
    if TESTS in config.stash:
        config.stash[TESTS].collect(items)


def _use(config: pytest.Config) -> LaunchingTests:
    """Register the hooks of tests that launch, and those of the process that writes the results, on first use."""
    if TESTS in config.stash:
        return config.stash[TESTS]
    from pytest_aorta.plugin.fixtures import LaunchingTests
    from pytest_aorta.plugin.run import Controller

    run, plugins = config.stash[RUN], config.pluginmanager
    tests = config.stash[TESTS] = LaunchingTests(run)
    plugins.register(tests, "aorta-tests")
    if not _is_given(config, _WITHOUT_RESULTS) and not hasattr(config, "workerinput"):
        plugins.register(Controller(run), "aorta-controller")
    return tests


@pytest.hookimpl(trylast=True)
def pytest_aorta_make_launcher(kind: LauncherKind) -> RankLauncher:
    """Make the launcher of this package, unless another plugin makes one."""
    from pytest_aorta.launch.launchers import make_launcher  # only for a test that launches

    return make_launcher(kind)


@pytest.fixture
def distributed_world(request: pytest.FixtureRequest) -> Iterator[DistributedWorld]:
    """The ranks that the test may start, as its ``world`` marker asks; skips the test if devices are missing."""
    __tracebackhide__ = True
    yield from _use(request.config).world(request)


@pytest.fixture
def workload(distributed_world: DistributedWorld) -> WorkloadRunner:
    """Runs workloads on ``distributed_world`` and compares their results."""
    from pytest_aorta.session.runner import WorkloadRunner  # only for a test that launches

    return WorkloadRunner(distributed_world.launcher)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Release the resources of the run, before pytest ends."""
    if RUN in config.stash:
        config.stash[RUN].close()
