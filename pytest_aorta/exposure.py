"""Why communication is hidden less than before: which collective is now exposed, and where most. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pytest_aorta.facts import LaunchFacts

# Metrics that it explains.
EXPLAINED = ("overlap_ratio", "exposed_comm_ms")


def exposure(launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> str:
    """The collective whose exposed time grew most from ``others`` to ``launches``, and the worst rank.

    Of each collective the median over launches counts, and of ranks the one that is worst most often. Empty where no
    launch knows.
    """
    now, before = _medians(launches), _medians(others)
    if not now:
        return ""
    kind = max(now, key=lambda name: now[name] - before.get(name, 0.0))
    was = f", was {before.get(kind, 0.0):.3g}" if before else ""
    ranks = [launch.most_exposed_rank for launch in launches if launch.most_exposed_rank is not None]
    worst = f"; rank {max(ranks, key=ranks.count)} worst" if ranks else ""
    return f"{kind} exposed {now[kind]:.3g} ms a step{was}{worst}"


def _medians(launches: Sequence[LaunchFacts]) -> dict[str, float]:
    known = [launch.exposed_ms for launch in launches if launch.exposed_ms]
    kinds = {kind for exposed in known for kind in exposed}
    return {kind: median(exposed.get(kind, 0.0) for exposed in known) for kind in sorted(kinds)}
