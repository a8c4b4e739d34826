"""Declaration of the options to pytest: flags and their ini twins, and ini keys without a flag."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.options.run import Options, make_options
from pytest_aorta.plan.options.table import OPTIONS, RENAMED, Option, renamed_flags


class _Renamed(argparse.Action):
    """A flag of an earlier version; ``metavar`` names its replacement."""

    def __call__(self, _parser: Any, _namespace: Any, _values: Any, flag: str | None = None) -> NoReturn:
        raise argparse.ArgumentError(None, f"{flag} no longer exists; give {self.metavar}")


def add_options(parser: pytest.Parser) -> None:
    """Declare every option to pytest."""
    group = parser.getgroup("aorta", "distributed training workloads (pytest-aorta)")
    for option in OPTIONS:
        if not option.ini_only:
            # None means that the command line does not give the option; the ini file then decides.
            group.addoption(option.flag, default=None, **option.argparse_keywords())
        twin = option.help if option.ini_only else f"ini twin of {option.flag}"
        text = f"{twin} (default: {option.shown_default})"
        parser.addini(option.ini, text, type="string", default=option.default)
    for name, replacement in RENAMED.items():
        # Pytest gives the value of a registered key only.
        parser.addini(f"aorta_{name}", f"no longer exists; give {replacement.ini}", type="string", default=None)
    for flag, text in renamed_flags().items():
        group.addoption(flag, action=_Renamed, nargs="?", help=argparse.SUPPRESS, dest="_aorta", metavar=text)


def read_options(config: pytest.Config) -> Options:
    """Read every option; the command line wins over the ini file.

    Raises:
        SpecError: A value is not allowed, two options contradict each other, a flag has no effect without another, or
            the ini file has a key of an earlier version.
    """
    _refuse_renamed_keys(config)
    options = make_options({option.name: _value(config, option) for option in OPTIONS}, config.rootpath)
    # The ini key says how baselines are recorded in every later run; only the flag expects an effect on this one.
    if (launches := config.getoption("aorta_launches")) is not None and not options.update_baselines:
        raise SpecError(
            f"--aorta-launches={launches} sets the number of launches to record; give --update-baselines too, set the "
            f"ini key aorta_launches in place of the flag, or limit the launches of a comparison with "
            f"--aorta-max-launches"
        )
    return replace(options, repeated=_repeated(config))


def _repeated(config: pytest.Config) -> tuple[str, ...]:
    """Return the words of a command line that runs a single test with this run's options for launches and verdicts."""
    matter = [option for option in OPTIONS if not option.writes]
    # A marker expression in the ini file's addopts could deselect the test.
    words = ["-m", config.option.markexpr] if _is_given(config, "-m") else []
    words += ["-c", config.option.inifilename] if config.option.inifilename else []
    flags = ((option, config.getoption(option.ini)) for option in matter if not option.ini_only)
    words += [option.word(value) for option, value in flags if value is not None]
    keys = {option.ini for option in matter}
    for text in config.getoption("override_ini") or ():
        words += ["-o", text] if text.partition("=")[0] in keys else []
    return tuple(words)


def _is_given(config: pytest.Config, flag: str) -> bool:
    return any(str(word).startswith(flag) for word in config.invocation_params.args)


def _value(config: pytest.Config, option: Option) -> Any:
    if not option.ini_only and (given := config.getoption(option.ini)) is not None:
        return given
    # The ini file and -o give text; the default is already parsed.
    given = _ini_value(config, option.ini)
    return option.parse(given, f"ini key {option.ini}") if type(given) is str else given


def _ini_value(config: pytest.Config, key: str) -> Any:
    """Return the text of an ini key, or its default.

    Raises:
        SpecError: A TOML file, which pytest 9 reads with its types, has another value than a text.
    """
    try:
        return config.getini(key)
    except TypeError as error:
        value = str(error).rpartition(": ")[2].lower()
        raise SpecError(f'ini key {key}: {error}; write the value in quotes, as in {key} = "{value}"') from None


def _refuse_renamed_keys(config: pytest.Config) -> None:
    for name, replacement in RENAMED.items():
        if _ini_value(config, key := f"aorta_{name}") is not None:
            raise SpecError(f"ini key {key} no longer exists; give {replacement.ini}")
