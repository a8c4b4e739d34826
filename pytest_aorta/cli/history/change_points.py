"""Change points of a series of values, found by Apache Otava."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_aorta.common.errors import UsageError

# The largest p-value of a change point in Otava's t-test, which is Otava's default.
MAX_P_VALUE = 0.001
# Otava looks for candidates at ten times this p-value. At its default, a step up and down again hides the step up.
_CANDIDATES_P_VALUE = 0.01


def change_points(values: Sequence[float]) -> list[int]:
    """Return the indices at which the values change.

    The method is Hunter's (Fleming et al., ICPE 2023): E-divisive means with Student's test.

    Raises:
        UsageError: Otava is not installed.
    """
    try:
        from otava.analysis import compute_change_points  # an extra, and slow to import
    except ImportError as error:
        raise _not_installed(error) from None
    points, _ = compute_change_points(list(values), max_pvalue=MAX_P_VALUE)
    return [int(point.index) for point in points]


def strict_change_points(values: Sequence[float], max_p_value: float) -> list[int]:
    """Return the indices at which the values change, by more candidates and a stricter test than Otava's default.

    Raises:
        UsageError: Otava is not installed.
    """
    import numpy as np  # other commands do without

    try:
        from otava.analysis import compute_change_points, merge  # an extra, and slow to import
    except ImportError as error:
        raise _not_installed(error) from None
    series = list(values)
    # Otava also computes relative changes, which overflow where a value is nearly 0; they are not used.
    with np.errstate(all="ignore"):
        _, candidates = compute_change_points(series, max_pvalue=_CANDIDATES_P_VALUE)
        points = merge(candidates, series, max_p_value, 0.0)
    return [int(point.index) for point in points]


def _not_installed(error: ImportError) -> UsageError:
    return UsageError(f"history needs Apache Otava ({error}); run pip install 'pytest-aorta[history]'")
