"""The fixture ``distributed_world``. Fixtures return handles, so every failed launch is raised in the test body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import pytest

from pytest_aorta.common.errors import DevicesUnavailable
from pytest_aorta.common.files import slug
from pytest_aorta.plan.options import Options
from pytest_aorta.plan.world import resolve_world
from pytest_aorta.session.record import TestRecord
from pytest_aorta.session.session import Session
from pytest_aorta.session.spec import TestSpec
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.metrics import METRICS, MetricKind


def make_world(
    request: pytest.FixtureRequest, session: Session, spec: TestSpec, record: TestRecord
) -> Iterator[DistributedWorld]:
    """Yield the world of a test and release its lease at the end; skip or fail the test if devices are missing."""
    options = session.options
    base = options.results_dir or request.getfixturevalue("tmp_path_factory").getbasetemp() / "aorta"
    timed = request.node.get_closest_marker("overlap") or any(
        METRICS[name].kind is MetricKind.TIMING for name in spec.tolerances
    )
    # Outside of the try: a driver that does not answer is an error, not a reason to skip the test.
    devices = session.devices
    try:
        world = resolve_world(spec.world, options, devices)
    except DevicesUnavailable as error:
        _refuse(record, str(error), options)
    with session.leased(world, spec, record, base / slug(record.nodeid), timed=bool(timed)) as leased:
        yield leased


def _refuse(record: TestRecord, reason: str, options: Options) -> NoReturn:
    record.lacked_devices = reason
    if options.require_gpus:
        pytest.fail(f"{reason}; a skip is an error under --aorta-require-gpus", pytrace=False)
    pytest.skip(reason)
