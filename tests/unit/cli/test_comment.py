"""``aorta comment``: which findings it refuses. tests/integration/test_ci_hostile_artifacts.py runs it in CI's jobs."""

import json
import os

import pytest

from pytest_aorta.cli.main import main
from pytest_aorta.common.model import to_builtins
from pytest_aorta.report.markdown import findings
from tests.unit.builders import make_record

COMMIT = "c0ffee00" * 5
FAILED = to_builtins(findings([make_record("a", outcome="failed", failure="why")], commit=COMMIT))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "empty"),
        ("[]", "got"),
        ("[" * 100_000, "not valid"),
        (FAILED | {"commit": None}, "they are of no known commit"),
        (FAILED | {"commit": "main"}, "commit: got"),
        (FAILED | {"passed": -1}, "passed: got -1"),
        (FAILED | {"passed": "1"}, "passed: got"),
        (FAILED | {"schema_version": 2}, "schema_version: got 2"),
        (FAILED | {"trusted": True}, "unknown key 'trusted'"),
        (FAILED | {"totals": "x" * 3_000}, "totals: got"),
        (FAILED | {"failures": FAILED["failures"] * 40, "tests": 40, "failed": 40}, "failures"),
        (os.mkdir, "directory"),
        (os.mkfifo, "not a regular file"),
    ],
)
def test_findings_that_can_not_be_used_are_a_comment_that_says_why(tmp_path, content, says):
    file = tmp_path / "aorta.findings.json"
    if callable(content):
        content(file)
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    output = tmp_path / "new" / "comment.md"
    assert main(["comment", str(file), f"--commit={COMMIT}", "--conclusion=success", "-o", str(output)]) == 0
    text = output.read_text(encoding="utf-8")
    assert text.startswith("## \N{CROSS MARK} pytest-aorta: the job ended with success, without usable findings\n\n")
    assert says in text.replace("\\", "").replace("&#8203;", "").replace("&lt;", "<")
