"""The published rules with which other tools compare two measurements, applied to the steps of launches."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import ks_2samp, mannwhitneyu


@dataclass(frozen=True)
class Peer:
    """A rule: ``flags(history, candidates)`` is True for slower; the history is one launch unless ``needs_history``."""

    flags: Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], bool]
    needs_history: bool = False


def _statistic(measure: Callable[[np.ndarray], float], allowed: float) -> Peer:
    return Peer(lambda history, candidates: bool(measure(candidates[0]) > measure(history[0]) * (1 + allowed)))


def _steady_median(steps: np.ndarray) -> float:
    return float(np.median(steps[len(steps) // 10 :]))


def _asv(history: Sequence[np.ndarray], candidates: Sequence[np.ndarray]) -> bool:
    # asv compare: a factor of 1.1 between medians, and Mann-Whitney at 0.002.
    slower = np.median(candidates[0]) > 1.1 * np.median(history[0])
    return bool(slower and mannwhitneyu(history[0], candidates[0]).pvalue < 0.002)


def _otava(history: Sequence[np.ndarray], candidates: Sequence[np.ndarray]) -> bool:
    from otava.analysis import compute_change_points

    series = [float(np.median(steps)) for steps in (*history, *candidates)]
    points, _ = compute_change_points(series, window_len=50, max_pvalue=0.001, min_magnitude=0.0)
    return any(
        point.index >= len(history) - 1 and point.stats.mean_after() > point.stats.mean_before() for point in points
    )


PEERS = {
    "pytest-benchmark min:5%": _statistic(lambda steps: float(steps.min()), 0.05),
    "pytest-benchmark mean:5%": _statistic(lambda steps: float(steps.mean()), 0.05),
    "pytest-benchmark median:5%": _statistic(lambda steps: float(np.median(steps)), 0.05),
    "Megatron, steady median 5%": _statistic(_steady_median, 0.05),
    # (reference, -0.05, 0.05) bounds both sides.
    "ReFrame, mean within 5%": Peer(
        lambda history, candidates: bool(abs(candidates[0].mean() / history[0].mean() - 1) > 0.05)
    ),
    "asv, factor 1.1 and p < 0.002": Peer(_asv),
    "Mann-Whitney p < 0.01": Peer(
        lambda history, candidates: bool(mannwhitneyu(candidates[0], history[0], alternative="greater").pvalue < 0.01)
    ),
    "Kolmogorov-Smirnov p < 0.01": Peer(
        lambda history, candidates: bool(ks_2samp(candidates[0], history[0], alternative="less").pvalue < 0.01)
    ),
}
if importlib.util.find_spec("otava"):
    PEERS["Otava, E-divisive, 3 launches"] = Peer(_otava, needs_history=True)
