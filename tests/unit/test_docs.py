"""The reference names everything a user can write."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_aorta.decision import Outcome
from pytest_aorta.markers import MARKERS
from pytest_aorta.metrics import METRICS
from pytest_aorta.options import OPTIONS

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "reference.md").read_text(encoding="utf-8")
NAMES = [name for option in OPTIONS for name in (option.flag, option.ini)] + list(METRICS)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_and_metric_is_in_the_reference(name):
    assert f"`{name}" in REFERENCE


@pytest.mark.parametrize("marker", MARKERS)
def test_every_marker_is_in_the_reference(marker):
    assert f"`{marker}" in REFERENCE


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_verdict_is_in_the_reference(outcome):
    assert f"| {outcome.value} |" in REFERENCE


@pytest.mark.parametrize("page", [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    targets = [part.split(")")[0] for part in page.read_text(encoding="utf-8").split("](")[1:]]
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []
