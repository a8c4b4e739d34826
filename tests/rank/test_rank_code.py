"""Checks of rank code, each in a process that has torch: the pytest process never imports torch.

``pytest tests/rank/check_timing.py`` runs a file's checks directly.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rank.process import CheckProcess, checks_of


@pytest.fixture(scope="session")
def rank_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckProcess]:
    process = CheckProcess(tmp_path_factory.mktemp("rank") / "log")
    yield process
    process.close()


@pytest.mark.parametrize("check", checks_of("check_*.py"))
def test_rank_code(check, rank_process):
    rank_process.check(check)
