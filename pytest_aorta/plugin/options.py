"""Declaration of pytest's command line options and their ini twins."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_aorta.plan.options import OPTIONS, Option, Options, make_options, parse_option


def add_options(parser: pytest.Parser) -> None:
    """Declare every option and its ini twin."""
    group = parser.getgroup("aorta", "distributed training workloads (pytest-aorta)")
    for option in OPTIONS:
        flags = [flag for flag in (option.alias, option.flag) if flag]
        if option.is_switch:
            group.addoption(*flags, dest=option.ini, action="store_const", const="true", default=None, help=option.help)
        else:
            group.addoption(*flags, dest=option.ini, default=None, metavar=option.metavar, help=option.help)
        parser.addini(option.ini, f"ini twin of {option.flag}: {option.help}", type="string", default=option.default)


def read_options(config: pytest.Config) -> Options:
    """Parse and check every option; the command line wins over the ini file.

    Raises:
        SpecError: a value is not allowed, or two options contradict each other.
    """
    return make_options({option.name: _value(config, option) for option in OPTIONS}, config.rootpath)


def _value(config: pytest.Config, option: Option) -> Any:
    given, source = config.getoption(option.ini), option.flag
    if given is None:
        given, source = config.getini(option.ini), f"ini option {option.ini}"
    return None if given is None else parse_option(option, given, source)
