"""Files of traces, packed and unpacked, and files that are none."""

from __future__ import annotations

import gzip
import json

import pytest

from pytest_aorta.result.trace.kineto import TraceError, read_trace
from tests.unit.kineto_traces import boundary, trace


def test_trace_is_read_gzipped_or_not_and_anything_else_is_refused(tmp_path):
    document = trace(boundary(0))
    plain, packed, other = tmp_path / "plain.json", tmp_path / "packed.json.gz", tmp_path / "other.json"
    plain.write_text(json.dumps(document))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(plain) == read_trace(packed) == document
    for content, message in ([], "Expected `object`, got `array`"), (without_duration(), r"traceEvents\[1\].*lacks"):
        other.write_text(json.dumps(content))
        with pytest.raises(TraceError, match=message):
            read_trace(other)


def without_duration():
    document = trace(boundary(0), boundary(1))
    del document["traceEvents"][1]["dur"]
    return document
