"""Every cell of the table in docs/parallelism.md: `llama_simple_fsdp` against `llama_fsdp2`, in each layout."""

from __future__ import annotations

import pytest

from pytest_aorta.common.errors import ComparisonFailed

from .layouts import COLUMNS, LAYOUTS, REFERENCE, TRAINING

pytestmark = [pytest.mark.numerics, pytest.mark.launch_timeout(300)]


CI_COLUMN = "aot_eager, transformer_block"


def rows():
    """Return each row with the columns to launch: all of them every night, and in CI one column of a few rows."""
    for layout in LAYOUTS:
        world = pytest.mark.world(size=layout.world_size, device="cpu", warm=True)
        if layout.in_ci:
            yield pytest.param(layout, [CI_COLUMN], id=f"{layout.name}, {CI_COLUMN}", marks=world)
        declared = [column for column in COLUMNS if layout.difference(column) is not None]
        yield pytest.param(layout, declared, id=layout.name, marks=[world, pytest.mark.extended])


@pytest.mark.parametrize(("layout", "columns"), list(rows()))
def test_each_backend_does_what_the_table_says(workload, layout, columns):
    eager = workload.run(REFERENCE, **TRAINING | layout.reference)
    for column in columns:
        traced = {"workload": "llama_simple_fsdp"} | TRAINING | dict(layout.config) | COLUMNS[column]
        if layout.difference(column):
            with pytest.raises(ComparisonFailed, match="first difference: step 1, "):
                workload.compare(traced, eager, steps=TRAINING["steps"], label=column)
        else:
            workload.compare(traced, eager, steps=TRAINING["steps"], label=column)
