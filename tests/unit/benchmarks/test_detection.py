"""Tests of the benchmark of verdicts on recorded launches."""

import numpy as np

from benchmarks.verdict.detection import slow_ranks


def test_only_the_slow_rank_is_named_in_recorded_launches(capsys):
    slow_ranks(np.random.default_rng(1), 10)
    rows = [line for line in capsys.readouterr().out.splitlines() if " rank1 |" in line]
    assert rows
    assert all("ranks [1]" in row for row in rows)
