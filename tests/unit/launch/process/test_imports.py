from __future__ import annotations

import gc

import pytest

from pytest_aorta.launch.process.rank import without_collection


@pytest.fixture(autouse=True)
def collector():
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collector_is_off_during_imports_and_then_as_before(is_enabled):
    (gc.enable if is_enabled else gc.disable)()
    with without_collection():
        assert not gc.isenabled()
    assert gc.isenabled() == is_enabled


def test_import_that_fails_leaves_the_collector_on():
    gc.enable()
    with pytest.raises(ImportError), without_collection():
        raise ImportError
    assert gc.isenabled()
