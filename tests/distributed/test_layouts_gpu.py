"""The table in docs/parallelism.md under NCCL: `llama_simple_fsdp` against `llama_fsdp2`, in each layout."""

import pytest

from . import small_llama
from .layouts import COLUMNS, LAYOUTS, REFERENCE

pytestmark = [pytest.mark.numerics, pytest.mark.launch_timeout(240)]

COLUMN = "aot_eager, transformer_block"
TRAINING = small_llama.TRAINING | {"steps": 5, "batch_size": 1, "deterministic": True}


def rows():
    """Return each row that is not refused, in a world of as many GPUs as the row has ranks."""
    for layout in LAYOUTS:
        if layout.difference(COLUMN) == "":
            world = pytest.mark.world(size=layout.world_size, device="cuda", warm=True)
            yield pytest.param(layout, id=layout.name, marks=world)


@pytest.mark.parametrize("layout", list(rows()))
def test_aot_eager_has_every_bit_of_fsdp2(workload, layout):
    eager = workload.run(REFERENCE, **TRAINING | layout.reference)
    assert eager.environment["attention"] == "flex"
    traced = {"workload": "llama_simple_fsdp"} | TRAINING | dict(layout.config) | COLUMNS[COLUMN]
    workload.compare(traced, eager, steps=TRAINING["steps"], label=COLUMN)
