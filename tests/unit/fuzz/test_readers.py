"""Every reader of files and messages of other processes, on damaged and random content."""

from __future__ import annotations

import pytest

from tests.unit.fuzz.readers import READERS, Reader, run


# Event files of a few hundred kilobytes have a long repr.
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("cases", [100, pytest.param(5000, marks=pytest.mark.extended)])
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name.replace(" ", "-"))
def test_damaged_content_gives_an_error_of_ours_within_its_limits(reader: Reader, cases: int, tmp_path):
    assert run(reader, cases, tmp_path, raises=True).cases >= cases / 2
