"""The fixture ``distributed_world``. Fixtures return handles, so every failed launch is raised in the test body."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NoReturn

import pytest

from pytest_aorta.common.errors import DevicesUnavailable, SpecError, hide_frames
from pytest_aorta.common.files import slug
from pytest_aorta.plan.options.run import Options
from pytest_aorta.plan.world import resolve_world
from pytest_aorta.plugin.read_markers import check_unchanged, read_spec
from pytest_aorta.session.record import TestRecord
from pytest_aorta.session.session import Session
from pytest_aorta.session.spec import TestSpec
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.metrics import METRICS, MetricKind


def make_spec(item: pytest.Item) -> TestSpec:
    """Return the markers that a test has when its world is made, with those that hooks and fixtures have added.

    Raises:
        SpecError: A marker is wrong.
    """
    __tracebackhide__ = True
    try:
        return read_spec(item)
    except SpecError as error:
        hide_frames(error)
        raise


def make_world(
    request: pytest.FixtureRequest, session: Session, spec: TestSpec, record: TestRecord
) -> Iterator[DistributedWorld]:
    """Yield the world of a test and release its lease at the end; skip or fail the test if devices are missing."""
    options = session.options
    base = options.results_dir or request.getfixturevalue("tmp_path_factory").getbasetemp() / "aorta"
    timed = spec.measures_overlap or any(METRICS[name].kind is MetricKind.TIMING for name in spec.tolerances)
    # Outside of the try: a driver that does not answer is an error, not a reason to skip the test.
    devices = session.devices
    try:
        world = resolve_world(spec.world, options, devices)
    except DevicesUnavailable as error:
        _refuse(record, options, str(error))
    record.platform = world.platform
    with session.leased(world, spec, record, base / slug(record.nodeid), timed=timed) as leased:
        leased.lack_devices = functools.partial(_refuse, record, options)
        leased.check_markers = functools.partial(check_unchanged, request.node, spec)
        yield leased


def _refuse(record: TestRecord, options: Options, reason: str) -> NoReturn:
    record.lacked_devices = reason
    if options.require_gpus:
        raise pytest.fail.Exception(f"--aorta-require-gpus: {reason}", pytrace=False) from None
    pytest.skip(reason)
