from concurrent.futures import ThreadPoolExecutor

from pytest_aorta.session.baselines import write_new_baselines
from pytest_aorta.session.record import Comparison, TestRecord
from pytest_aorta.verdict.baseline import LOCK_FILE, Baseline, locked_baselines, read_baseline, write_baseline
from pytest_aorta.verdict.learning import NewLaunches
from tests.unit.builders import launches_near, make_baseline, make_options, stored

NODE = make_baseline().test


def baseline_of(p50: float, seed: int, count: int = 5, **changes) -> Baseline:
    return make_baseline(launches=stored(*launches_near(p50, count, seed=seed)), **changes)


def write(folder, *new: NewLaunches) -> tuple[list[str], bool]:
    comparisons = tuple(Comparison(one.baseline.case, platform=one.baseline.platform, new=one) for one in new)
    record = TestRecord(NODE, comparisons=comparisons)
    return write_new_baselines([record], {NODE}, make_options(baselines_dir=folder))


def stored_in(folder) -> Baseline:
    baseline = read_baseline(folder, make_baseline().platform, make_baseline().case)
    assert baseline is not None
    return baseline


def facts(baseline: Baseline) -> list:
    return [launch.facts for launch in baseline.launches]


def test_session_that_writes_later_keeps_the_revision_that_another_session_wrote(tmp_path):
    write_baseline(tmp_path, baseline_of(10.0, 0))
    ours, theirs = (NewLaunches(baseline_of(p50, seed), fresh=True) for p50, seed in [(20.0, 1), (30.0, 2)])
    for session in (ours, theirs):
        session.merged(tmp_path)  # both tests end before either session does
    for session in (ours, theirs):
        assert write(tmp_path, session)[1]
    assert [launch.revision for launch in stored_in(tmp_path).launches] == [1] * 5 + [2] * 5 + [3] * 5
    assert facts(stored_in(tmp_path))[5:] == [one for new in (ours, theirs) for one in facts(new.baseline.condensed())]


def test_launches_that_no_longer_fit_what_another_session_wrote_are_refused(tmp_path):
    write_baseline(tmp_path, baseline_of(10.0, 0))
    assert write(tmp_path, NewLaunches(baseline_of(20.0, 1), fresh=True))[1]
    lines, good = write(tmp_path, NewLaunches(baseline_of(10.0, 2)))
    assert not good
    assert lines[0].startswith(f"ERROR {make_baseline().case}: not added to the stored baseline")
    assert len(stored_in(tmp_path).launches) == 10


def test_sessions_that_write_at_once_drop_nothing(tmp_path):
    sessions = [NewLaunches(baseline_of(10.0 * number, number), fresh=True) for number in range(1, 9)]
    with ThreadPoolExecutor(len(sessions)) as pool:
        assert all(good for _, good in pool.map(lambda session: write(tmp_path, session), sessions))
    assert stored_in(tmp_path).revision == len(sessions)
    assert len(stored_in(tmp_path).launches) == 5 * len(sessions)


def test_key_that_is_newer_than_the_baseline_has_its_default_at_the_write_too(tmp_path):
    write_baseline(tmp_path, baseline_of(10.0, 0))
    newer = make_baseline().config | {"compile": False}
    assert write(tmp_path, NewLaunches(baseline_of(10.0, 1, config=newer), defaults={"compile": False}))[1]
    assert stored_in(tmp_path).revision == 1


def test_lock_leaves_no_file(tmp_path):
    with locked_baselines(tmp_path / "new"):
        assert [path.name for path in (tmp_path / "new").iterdir()] == [LOCK_FILE]
    assert list((tmp_path / "new").iterdir()) == []


def test_folder_that_cannot_be_locked_fails_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    lines, good = write(tmp_path / "file", NewLaunches(baseline_of(10.0, 0)))
    assert not good
    assert lines == [f"ERROR {tmp_path / 'file'}: can't be locked: File exists"]
