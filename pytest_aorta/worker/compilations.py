"""What torch.compile compiles in the measured steps, which should compile nothing."""

from collections import Counter

from pytest_aorta.result.trace.profiled_steps import Cost, Costs
from pytest_aorta.worker.lines import is_locating, shown
from pytest_aorta.worker.torch_private import dynamo_utils

# Compiled frames when the measured steps began; None before, or where nothing was compiled until then.
_compiled_before: int | None = None


def begin_measured_steps() -> None:
    """Remember what torch.compile has compiled so far; the steps from here on should compile nothing."""
    global _compiled_before
    _compiled_before = _counters()[0]


def with_compilations(costs: Costs) -> Costs:
    """Return costs with the compilations since :func:`begin_measured_steps`, and all graph breaks."""
    compiled, breaks = _counters()
    number = compiled - (_compiled_before or 0)
    places = {Cost.RECOMPILATIONS: {str(Cost.RECOMPILATIONS): _compiled(number)}} if is_locating() and number else {}
    return costs.replace(recompilations=number, graph_breaks=breaks, places=costs.places | places)


def _compiled(number: int) -> dict[str, int]:
    """Return the functions of dynamo's last compilations and what had changed, with their numbers."""
    metrics = dynamo_utils().get_compilation_metrics()[-number:]
    found = Counter(
        f"{one.co_name} at {shown(one.co_filename or '')}:{one.co_firstlineno}"
        # Such as "0/0: tensor 'x' size mismatch at index 0. expected 2, actual 3".
        + "".join(f", {why}" for why in [(one.recompile_reason or "").partition(": ")[2].partition(". ")[0]] if why)
        for one in metrics
    )
    return {text[:200]: calls for text, calls in found.items()}


def _counters() -> tuple[int, int]:
    """Return the frames that dynamo compiled and its graph breaks; dynamo is not imported for this."""
    counters = getattr(dynamo_utils(), "counters", {})
    frames, breaks = counters.get("frames", {}), counters.get("graph_break", {})
    return int(frames.get("total", 0)), sum(breaks.values())
