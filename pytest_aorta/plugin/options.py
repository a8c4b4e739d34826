"""Declaration of the options to pytest: flags and ini keys."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.options import OPTIONS, Option, Options, make_options

# Older versions of pytest have no numbers as ini keys, and give their text.
_HAS_NUMBERS = pytest.version_tuple >= (8, 4)


def add_options(parser: pytest.Parser) -> None:
    """Declare every option to pytest."""
    group = parser.getgroup("aorta", "distributed training workloads (pytest-aorta)")
    for option in OPTIONS:
        if not option.ini_only:
            # None means that the command line does not give the option; the ini file then decides.
            group.addoption(option.flag, default=None, **option.argparse_keywords())
        if option.ini is not None:
            text = option.help if option.ini_only else f"ini twin of {option.flag}"
            kind: Any = option.ini if _HAS_NUMBERS or option.ini not in ("int", "float") else "string"
            parser.addini(option.key, f"{text} (default: {option.shown_default})", kind, default=None)


def read_options(config: pytest.Config, **others: Any) -> Options:
    """Read every option; the command line wins over the ini file. ``others`` are no options.

    Raises:
        SpecError: A value is not allowed, two options contradict each other, or a flag has no effect without another.
    """
    values = {option.name: _value(config, option) for option in OPTIONS}
    # The ini key aorta_launches applies to every recording; only a flag expects an effect on this run.
    how = {"--aorta-record": values["record"], "--aorta-launches": config.getoption("aorta_launches")}
    if not values["update_baselines"] and (given := [flag for flag, value in how.items() if value is not None]):
        raise SpecError(f"{given[0]} changes how baselines are recorded; give --update-baselines too")
    given_values = {name: value for name, value in values.items() if value is not None}
    return make_options(given_values, config.rootpath, repeated=_repeated(config), **others)


def _value(config: pytest.Config, option: Option) -> Any:
    """Return the value that the command line or the ini file gives; None if neither gives one."""
    if not option.ini_only and (given := config.getoption(option.key)) is not None:
        return given
    if option.ini is None:
        return None
    try:
        given = config.getini(option.key)
    except (TypeError, ValueError) as error:  # pytest's word for a value that is not of the key's type
        raise SpecError(f"ini key {option.key}: {error}") from None
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
