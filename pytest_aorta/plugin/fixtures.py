"""The two fixtures. They hand out handles: whatever fails, fails inside the test that asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import pytest

from pytest_aorta.common.errors import DevicesUnavailable
from pytest_aorta.common.files import slug
from pytest_aorta.plan.options import Options
from pytest_aorta.plan.world import resolve_world
from pytest_aorta.session.record import TestRecord
from pytest_aorta.session.runner import WorkloadRunner
from pytest_aorta.session.session import Session
from pytest_aorta.session.spec import TestSpec
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.metrics import METRICS

SPEC = pytest.StashKey[TestSpec]()
RECORD = pytest.StashKey[TestRecord]()


def make_world(request: pytest.FixtureRequest, session: Session) -> Iterator[DistributedWorld]:
    """The ``distributed_world`` fixture; skips or fails where devices are lacking, and gives its lease back."""
    spec, record = test_state(request.node)
    options = session.options
    base = options.results_dir or request.getfixturevalue("tmp_path_factory").getbasetemp() / "aorta"
    timed = request.node.get_closest_marker("overlap") or any(
        METRICS[name].kind == "timing" for name in spec.tolerances
    )
    # A driver that can't be asked is an error, and no lack of devices.
    devices = session.devices
    try:
        world = resolve_world(spec.world, options, devices)
    except DevicesUnavailable as error:
        _lacking(record, str(error), options)
    with session.leased(world, spec, record, base / slug(record.nodeid), timed=bool(timed)) as leased:
        yield leased


def make_runner(request: pytest.FixtureRequest, session: Session, world: DistributedWorld) -> WorkloadRunner:
    """The ``workload`` fixture."""
    spec, record = test_state(request.node)
    return WorkloadRunner(world, session.options, spec, record)


def test_state(item: pytest.Item) -> tuple[TestSpec, TestRecord]:
    """A test's checked markers, put there at collection, and its record, put there when it starts."""
    return item.stash[SPEC], item.stash[RECORD]


test_state.__test__ = False  # type: ignore[attr-defined]


def _lacking(record: TestRecord, reason: str, options: Options) -> NoReturn:
    record.lacked_devices = reason
    if options.require_gpus:
        pytest.fail(f"{reason}; a skip is an error under --aorta-require-gpus", pytrace=False)
    pytest.skip(reason)
