from concurrent.futures import ThreadPoolExecutor

import pytest

from pytest_aorta.common.errors import BaselineError
from pytest_aorta.result.series import digest
from pytest_aorta.session.baselines import write_new_baselines
from pytest_aorta.session.record import Comparison, TestRecord
from pytest_aorta.verdict.baseline import LOCK_FILE, Baseline, locked_baselines, read_baseline, write_baseline
from pytest_aorta.verdict.learning import NewBaseline
from tests.unit.builders import launches_near, make_baseline, make_options, stored
from tests.unit.verdict.compared import learn

NODE = make_baseline().test


def baseline_of(p50: float, seed: int, count: int = 5, **changes) -> Baseline:
    return make_baseline(launches=stored(*launches_near(p50, count, seed=seed)), **changes)


def recorded(folder, new: Baseline, *, fresh: bool = False) -> NewBaseline:
    """Return a baseline that a test has merged with the stored one."""
    old = read_baseline(folder, new.platform, new.case)
    return NewBaseline(learn(old, new, fresh=fresh), digest(old))


def write(folder, *new: NewBaseline) -> tuple[list[str], bool]:
    comparisons = tuple(Comparison(one.baseline.case, new=one) for one in new)
    record = TestRecord(NODE, comparisons=comparisons)
    return write_new_baselines([record], {NODE}, make_options(baselines=folder))


def stored_in(folder) -> Baseline:
    baseline = read_baseline(folder, make_baseline().platform, make_baseline().case)
    assert baseline is not None
    return baseline


def test_launches_are_merged_with_what_is_stored_when_their_test_ends(tmp_path):
    write_baseline(tmp_path, baseline_of(10.0, 0))
    for fresh in (False, True):
        assert write(tmp_path, recorded(tmp_path, baseline_of(10.0, 1), fresh=fresh))[1]
    assert [launch.revision for launch in stored_in(tmp_path).launches] == [1] * 10 + [2] * 5


def test_launches_that_do_not_fit_what_is_stored_are_refused_in_their_test(tmp_path):
    write_baseline(tmp_path, baseline_of(10.0, 0))
    with pytest.raises(BaselineError, match="not added to the stored baseline"):
        recorded(tmp_path, baseline_of(20.0, 1))


def test_of_sessions_that_record_at_once_one_writes_and_the_others_are_told(tmp_path):
    write_baseline(tmp_path, baseline_of(10.0, 0))
    sessions = [recorded(tmp_path, baseline_of(10.0 * number, number), fresh=True) for number in range(1, 9)]
    with ThreadPoolExecutor(len(sessions)) as pool:
        ends = list(pool.map(lambda session: write(tmp_path, session), sessions))
    assert sum(good for _, good in ends) == 1
    told = f"ERROR {make_baseline().case}: not recorded, because another run has changed the baseline meanwhile"
    assert sum(lines[0].startswith(told) for lines, _ in ends) == 7
    assert (stored_in(tmp_path).revision, len(stored_in(tmp_path).launches)) == (2, 10)


def test_lock_leaves_no_file(tmp_path):
    with locked_baselines(tmp_path / "new"):
        assert [path.name for path in (tmp_path / "new").iterdir()] == [LOCK_FILE]
    assert list((tmp_path / "new").iterdir()) == []


def test_folder_that_cannot_be_locked_fails_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    lines, good = write(tmp_path / "file", NewBaseline(baseline_of(10.0, 0), ""))
    assert not good
    assert f"{tmp_path / 'file'}: can't be locked: File exists" in lines[0]
