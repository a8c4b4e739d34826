"""Former module names of the worker, which workloads of older commits import in A/B launches."""

from __future__ import annotations

import importlib

import pytest

from pytest_aorta import worker
from pytest_aorta.worker.former_names import FORMER_NAMES

# The public names that each module defined; workloads imported those of the first two modules from there.
IMPORTED = {
    "stream_spans": ["Handle", "StreamSpans", "Transfer"],
    "weight_hash": ["LocalShard", "WeightHash", "hash_local", "hash_optimizer", "hash_parameters", "hash_shards"],
    "timer": ["StepTimer"],
    "delay": ["Delay"],
    "measuring": ["measure"],
}


def test_every_former_name_is_checked():
    assert set(IMPORTED) == set(FORMER_NAMES)


@pytest.mark.parametrize("module", IMPORTED)
def test_public_names_are_found_where_they_were(module):
    former = importlib.import_module(f"pytest_aorta.worker.{module}")
    for name in IMPORTED[module]:
        assert getattr(former, name) is getattr(worker, name)
