"""Change points of a series of values, found by Apache Otava."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_aorta.common.errors import UsageError

# The largest p-value of a change point in Otava's t-test by default, which is Otava's own default.
MAX_P_VALUE = 0.001


def change_points(values: Sequence[float], max_p_value: float = MAX_P_VALUE) -> list[int]:
    """Return the indices at which the values change.

    The method is Hunter's (Fleming et al., ICPE 2023): E-divisive means with Student's test.

    Raises:
        UsageError: Otava is not installed.
    """
    try:
        from otava.analysis import compute_change_points  # an extra, and slow to import
    except ImportError as error:
        raise UsageError(f"history needs Apache Otava ({error}); run pip install 'pytest-aorta[history]'") from None
    points, _ = compute_change_points(list(values), max_pvalue=max_p_value)
    return [int(point.index) for point in points]
