"""The table in docs/parallelism.md under NCCL: `llama_simple_fsdp` against `llama_fsdp2`, each axis and exchange once.

`test_layouts.py` shows all combinations on CPU ranks.
"""

import pytest

from pytest_aorta import WorkloadRunner

from . import small_llama
from .layouts import COLUMNS, LAYOUTS, REFERENCE

pytestmark = [pytest.mark.numerics, pytest.mark.launch_timeout(240)]

COLUMN = "aot_eager, transformer_block"
TRAINING = small_llama.TRAINING | {"steps": 5, "batch_size": 1, "deterministic": True}


# What NCCL and kernels of CUDA could do otherwise: each axis, and exchanges of experts that are repeated in backward.
ON_GPUS = {
    *("TP 2", "CP 2", "PP 2", "DeepSeek, EP 2, AC full"),
    *("HSDP 2x2", "FSDP 2, TP 2", "PP 2, CP 2", "DeepSeek, EP 2 with TP 2", "4 experts, HSDP 2 with EP 2"),
}


def rows():
    """Return the rows in worlds of as many GPUs as they have ranks."""
    for layout in LAYOUTS:
        if layout.name in ON_GPUS:
            world = pytest.mark.world(size=layout.world_size, device="cuda", warm=True)
            yield pytest.param(layout, id=layout.name, marks=world)


def test_rows_have_the_bits_of_fsdp2():
    chosen = [layout for layout in LAYOUTS if layout.name in ON_GPUS]
    assert len(chosen) == len(ON_GPUS)
    assert {layout.difference(COLUMN) for layout in chosen} == {""}


@pytest.mark.parametrize("layout", list(rows()))
def test_aot_eager_has_every_bit_of_fsdp2(workload: WorkloadRunner, layout):
    # Flex, which a launch compiles for seconds, is the kernel of latent attention.
    training = TRAINING | ({} if "size" in layout.config else {"attention": "flash"})
    eager = workload.run(REFERENCE, **training | layout.reference)
    traced = {"workload": "llama_simple_fsdp"} | training | dict(layout.config) | COLUMNS[COLUMN]
    workload.compare(traced, eager, steps=TRAINING["steps"], label=COLUMN)
