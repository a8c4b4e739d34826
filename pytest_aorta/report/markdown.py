"""Renders the Markdown summary of a session for GitHub's page of a job: failures first, bounded in size."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence

from pytest_aorta.session.record import TestRecord
from pytest_aorta.session.text import totals
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict

# GitHub drops the whole summary of a step above 1 MiB, and other programs may write to the same file.
MAX_BYTES = 512 << 10
_MAX_EVIDENCE = 8_000
_MAX_FAILURES = 20
_FAILING = (Outcome.REGRESSION, Outcome.MISSING)
_HEAD = ("test", "metric", "value", "baseline", "change [95%]", "tolerance", "launches", "verdict")
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~-])")


def markdown(records: Sequence[TestRecord], max_bytes: int = MAX_BYTES) -> str:
    """Return the summary of a session in at most ``max_bytes`` of UTF-8; parts that do not fit are counted."""
    failed = [record for record in records if record.outcome in ("failed", "error")]
    mark = "\N{CROSS MARK}" if failed else "\N{WHITE HEAVY CHECK MARK}"
    head = f"## {mark} pytest-aorta\n\n{escaped(totals(records))}\n"
    rows = [(record, row) for record in records for row in record.verdicts]
    notable = [pair for pair in rows if pair[1].outcome is not Outcome.PASS]
    notable.sort(key=lambda pair: (pair[1].outcome not in _FAILING, pair[1].outcome is not Outcome.INCONCLUSIVE))
    passed = [pair for pair in rows if pair[1].outcome is Outcome.PASS]
    parts = [
        *_table(notable),
        *(_failure(record) for record in failed[:_MAX_FAILURES]),
        *_folded(passed),
    ]
    return head + "".join(_fitting(parts, max_bytes - len(head.encode()) - 100))


def escaped(text: str) -> str:
    """Return text escaped for one cell of a table, so that Markdown and HTML show the text as is."""
    line = " ".join(text.split())
    return _SPECIAL.sub(r"\\\1", html.escape(line, quote=False))


def _table(rows: Sequence[tuple[TestRecord, Verdict]]) -> Iterator[str]:
    if rows:
        yield f"\n| {' | '.join(map(escaped, _HEAD))} |\n|{' --- |' * len(_HEAD)}\n"
    for record, row in rows:
        cells = [record.nodeid + record.attempt_label, *row.cells()]
        if row.reason:
            cells[-1] += f": {row.reason}"
        yield f"| {' | '.join(map(escaped, cells))} |\n"


def _failure(record: TestRecord) -> str:
    text = record.failure[:_MAX_EVIDENCE]
    title = html.escape(record.nodeid + record.attempt_label)
    return f"\n<details><summary>{title}</summary>\n\n<pre>{html.escape(text)}</pre>\n\n</details>\n"


def _folded(rows: Sequence[tuple[TestRecord, Verdict]]) -> Iterator[str]:
    if rows:
        # The table is one part, because a <details> element that is opened must be closed.
        table = "".join(_fitting(list(_table(rows)), MAX_BYTES // 4))
        yield f"\n<details><summary>{len(rows)} passed verdicts</summary>\n{table}\n</details>\n"


def _fitting(parts: Iterable[str], max_bytes: int) -> Iterator[str]:
    left, dropped = max_bytes, 0
    for part in parts:
        size = len(part.encode("utf-8", "replace"))
        if dropped or size > left:
            dropped += 1
        else:
            left -= size
            yield part
    if dropped:
        yield f"\n... and {dropped} more\n"
