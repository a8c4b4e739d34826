from __future__ import annotations

import traceback

from pytest_aorta.common.errors import AortaError, LaunchError


class OwnError(AortaError):
    """An error class as another module than errors.py declares it."""


def test_traceback_shows_the_message_without_the_path_of_a_module():
    assert traceback.format_exception_only(LaunchError("boom")) == ["LaunchError: boom\n"]
    assert traceback.format_exception_only(OwnError("boom")) == ["OwnError: boom\n"]
