"""Every reader of files and messages of other processes, on damaged and random content."""

import resource
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.unit.fuzz.readers import READERS, Reader

# Limits of one case in seconds of CPU time, and of all cases of a reader together in bytes of memory.
MAX_CASE_S = 5.0
MAX_GROWTH_BYTES = 1 << 30


# Event files of a few hundred kilobytes have a long repr.
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("cases", [100, pytest.param(5000, marks=pytest.mark.extended)])
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name.replace(" ", "-"))
def test_damaged_content_gives_an_error_of_ours_within_its_limits(reader: Reader, cases: int, tmp_path):
    phases = [Phase.generate, Phase.shrink]

    @settings(max_examples=cases, database=None, deadline=None, phases=phases, suppress_health_check=list(HealthCheck))
    @given(reader.cases)
    def check(case: Any) -> None:
        checked.append(True)
        began_s = time.thread_time()
        try:
            reader.read(case, tmp_path)
        except reader.errors as error:
            if not str(error):
                raise AssertionError("an error without words") from error
        assert time.thread_time() - began_s < MAX_CASE_S

    checked: list[bool] = []
    before_bytes = peak_bytes()
    check()
    assert peak_bytes() - before_bytes < MAX_GROWTH_BYTES
    assert len(checked) >= cases / 2


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
