import pytest

from benchmarks.scripts.matrix import FAULTS, SCRIPTS, Cell, absent, table

FAILED = "E  ValueError: planted by a test\nrank 1 failed first, step 10"


@pytest.mark.parametrize(
    ("fault", "code", "output", "lacks"),
    [
        ("clean", 0, "aorta: 1 test OK, 6 metrics unchanged", []),
        ("clean", 0, "aorta: 1 test OK, 0 metrics unchanged", ["comparison"]),
        ("clean", 1, "6 metrics unchanged", ["pass"]),
        ("raise", 1, FAILED, []),
        ("raise", 1, FAILED.replace("rank 1", "rank 11"), ["rank"]),
        ("raise", 0, "", ["failure", "cause", "rank"]),
        ("last step", 1, "Regression: weight_hash; after step 30", []),
        ("lost", 1, "Regression: weight_hash; after step 16", ["step"]),
    ],
)
def test_cell_names_what_was_expected_and_did_not_come(fault, code, output, lacks):
    assert list(absent(SCRIPTS["ddp"], FAULTS[fault], code, output)) == lacks


def test_table_has_a_row_for_each_script_and_counts_the_cells():
    cells = [
        Cell("ddp", "clean", 20.4),
        Cell("gan", "raise", 3.0, ["rank", "step"]),
        Cell("loader", "init", 9.0, ["success"]),
    ]
    text = table(cells)
    assert "| script | init | clean | raise |" in text
    assert "| gan | - | - | no rank, no step, 3 s |" in text
    assert text.endswith("1 of 3 cells as expected")
