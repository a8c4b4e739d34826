import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.cli.main import main
from pytest_aorta.common.errors import BaselineError
from pytest_aorta.result.facts import STEP_TIMES
from pytest_aorta.verdict.baseline import (
    MAX_BYTES,
    Baseline,
    baseline_path,
    orphans,
    read_baseline,
    read_baseline_file,
    write_baseline,
)
from pytest_aorta.verdict.metrics import own_metrics
from tests.unit.builders import baseline_of, each_of, make_baseline, make_facts, read_json, stored

ANY_TEXT = st.text(st.characters(exclude_categories=()), min_size=1)
NUMBER = st.floats(-1e100, 1e100)


ABSENT = object()
OTHER_VERSION = (
    "schema_version is {!r}, but this pytest-aorta reads version 6; delete the file and record the baseline again with "
    "--update-baselines"
)


def ascii_id(text: str) -> str:
    return ascii(text)[1:20]


def read_error(path) -> str:
    with pytest.raises(BaselineError) as caught:
        read_baseline_file(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def error_of_edited(folder, change) -> str:
    """Return the error of reading a good file after ``change`` has edited its document."""
    path = write_baseline(folder, make_baseline())
    document = read_json(path)
    change(document)
    path.write_text(json.dumps(document))
    return read_error(path)


def read_again(folder, baseline: Baseline) -> Baseline | None:
    write_baseline(folder, baseline)
    return read_baseline(folder, baseline.platform, baseline.case)


def test_committed_baselines_are_of_this_version_and_are_written_as_they_are(tmp_path):
    paths = sorted(Path("baselines").glob("*/*.json"))
    assert len(paths) >= 27
    for path in paths:
        assert write_baseline(tmp_path, read_baseline_file(path)).read_bytes() == path.read_bytes()


def test_committed_baselines_have_only_metrics_that_workloads_still_emit():
    text = "".join(path.read_text() for path in Path("workloads").rglob("*.py"))
    emitted = re.compile("|".join(re.sub(r"{\w+}", r"\\w+", name) for name in re.findall(r'"([a-z][\w{}]+)"', text)))
    for path in Path("baselines").glob("*/*.json"):
        stored = {name for launch in read_baseline_file(path).center_launches for name in own_metrics(launch)}
        assert [name for name in stored if not emitted.fullmatch(name)] == [], path


@given(p50=st.floats(1e-300, 1e12), loss=st.none() | NUMBER, metric=NUMBER, text=ANY_TEXT, case=ANY_TEXT)
def test_written_baseline_is_read_back_equal(tmp_path_factory, p50, loss, metric, text, case):
    facts = make_facts(final_loss=loss, metrics={"tokens_per_s": metric}, environment={"torch": text, "hip": None})
    facts = facts.replace(step_time_ms=facts.step_time_ms | {"p50": p50})
    launches = (*stored(make_facts(), center=False), *stored(facts, make_facts(), revision=2))
    baseline = make_baseline(case=case, launches=launches, config={"size": text, "fault": {}}, forced={"2": text})
    assert read_again(tmp_path_factory.getbasetemp() / "round-trip", baseline) == baseline


def test_file_of_the_version_before_names_the_command_that_rewrites_it(tmp_path, capsys):
    facts = make_facts(commit="c" * 40, critical_rank=1, late_steps="two", exposed_ms={"all_gather": 2.0})
    baseline = baseline_of(facts, facts).condensed()
    path = write_baseline(tmp_path, baseline)
    document = read_json(path) | {"schema_version": 5}
    del document["measured"]
    for launch in document["launches"]:
        flat = launch["facts"]
        flat |= flat.pop("provenance") | flat.pop("description")
        flat |= {"recorded_at": flat.pop("measured_at"), "step_time_sample_ms": [10.0] * 20}
    path.write_text(json.dumps(document))
    command = read_error(path).rpartition("aorta ")[2]
    assert main(command.split()) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert read_baseline_file(path) == baseline


@pytest.mark.parametrize("launches", [[], [{}], [{"facts": {}}], [1], 1])
def test_damaged_file_of_the_version_before_stays_as_it_is(tmp_path, launches, capsys):
    path = write_baseline(tmp_path, make_baseline())
    text = json.dumps(read_json(path) | {"schema_version": 5, "launches": launches})
    path.write_text(text)
    assert main(["baselines", "upgrade", "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"{path}: " in said
    assert "can't be upgraded" not in said or "delete the file and record the baseline again" in said
    assert path.read_text() == text


def test_file_has_one_sorted_fact_a_line(tmp_path):
    lines = write_baseline(tmp_path, baseline_of(*[make_facts()] * 2)).read_text().splitlines()
    assert len(lines) <= 60
    top = [line.split('"')[1] for line in lines if re.match('  "', line)]
    of_launch = [line.split('"')[1] for line in lines if re.match('        "', line)]
    assert top == sorted(top)
    assert of_launch[: len(of_launch) // 2] == sorted(set(of_launch))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("launches.0.facts.num_steps", "20", '$.launches[0].facts.num_steps: got "20"; Expected `int`'),
        ("launches.0.facts.num_steps", 0, "$.launches[0].facts.num_steps: got 0; Expected `int` >= 1"),
        ("launches.0.facts.step_time_ms", {"p50": -1.0}, "$.launches[0].facts.step_time_ms"),
        *(
            ("launches.0.facts.step_time_ms", dict.fromkeys({*STEP_TIMES, "p10"} - {name}, 1.0), f": {name} is missing")
            for name in ("p50", "p99", "tail5")
        ),
        *(
            ("launches.0.facts.costs", [{"ranks": ranks, "costs": {}}], f"got ranks {ranks}, allowed is each rank once")
            for ranks in ([1, 2], [0, 0], [0, 5])
        ),
        ("launches.0.facts.launcher", "MPI run", "^[a-z][a-z0-9_-]{0,39}$"),
        ("launches.0.facts.weight_hashes", {"3": "xyz"}, "^[0-9a-f]{16,64}$"),
        ("launches.0.facts.provenance.block", "here", 'provenance.block: got "here"; Expected `str` matching regex'),
        ("launches", [], "$.launches: Expected `array` of length >= 1"),
        ("launches", {}, "$.launches: Expected `array`"),
        ("config", [], "$.config: Expected `object`"),
        ("extra", 1, "unknown key 'extra'"),
        ("launches.0.facts.slowest_rank_p50_ms", 1.0, "unknown key 'slowest_rank_p50_ms'"),
        ("launches.0.revision", 0, "$.launches[0].revision: got 0; Expected `int` >= 1"),
        ("launches.0.center", 1, "$.launches[0].center: got 1; Expected `bool`"),
        ("forced", {"first": "why"}, "^[1-9][0-9]{0,5}$"),
        ("forced", {"1": ""}, "length >= 1"),
        *(
            (key, ABSENT, f"missing required field `{key}`")
            for key in ("case", "test", "platform", "workload", "config")
        ),
        ("launches", ABSENT, "missing required field `launches`"),
        *(
            ("launches.0.facts.provenance.measured_at", moment, f"measured_at: got '{moment}'")
            for moment in ("2026-13-01T00:00:00Z", "2026-02-30T00:00:00Z", "2026-01-01T24:61:00Z")
        ),
        *(("schema_version", version, OTHER_VERSION.format(version)) for version in (4, 7, "6", None)),
    ],
)
def test_wrong_value_is_named_with_its_place_and_what_is_allowed_or_to_do(tmp_path, path, value, message):
    def change(document):
        *parents, key = path.split(".")
        for parent in parents:
            document = document[int(parent)] if isinstance(document, list) else document[parent]
        document[key] = value
        if value is ABSENT:
            del document[key]

    assert message in error_of_edited(tmp_path, change)


def test_revisions_that_do_not_ascend_are_refused(tmp_path):
    def change(document):
        document["launches"] = [entry | {"revision": revision} for entry in document["launches"] for revision in (2, 1)]

    assert "$.launches: revisions are [2, 1], allowed is ascending order" in error_of_edited(tmp_path, change)


@pytest.mark.parametrize("center_flags", [(True, True), (False, False), (True, False)])
def test_center_launches_are_in_the_last_revision_alone(tmp_path, center_flags):
    def change(document):
        (entry,) = document["launches"]
        document["launches"] = [
            entry | {"revision": revision, "center": center} for revision, center in enumerate(center_flags, start=1)
        ]

    message = error_of_edited(tmp_path, change)
    assert "$.launches: center launches are allowed and required in the last revision only, 2" in message


def test_baseline_groups_its_launches_by_revision_and_center():
    old, extra, new = (make_facts(num_steps=steps) for steps in (1, 2, 3))
    launches = (*stored(old, center=False), *stored(new, revision=3), *stored(extra, revision=3, center=False))
    baseline = make_baseline(launches=launches)
    assert (baseline.revision, baseline.center_launches) == (3, (new,))
    assert baseline.revisions == [(old,), (new, extra)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty; restore the file, or delete it and record the baseline again"),
        ('{"case": "a', "not valid JSON"),
        ('{"case": "a', "; restore the file, or delete it and record the baseline again"),
        *((text, "schema_version is None") for text in ("[]", "1", "null", '"text"')),
        (" " * (MAX_BYTES + 1), "larger than the 4,194,304 bytes allowed"),
    ],
    ids=lambda text: text[:20].strip() or "blank",
)
def test_file_that_is_not_strict_json_is_refused(tmp_path, text, message):
    path = tmp_path / "baseline.json"
    path.write_text(text)
    assert message in read_error(path)


@pytest.mark.parametrize(
    ("platform", "case"), [("nvidia-h200-x2-nccl", "other case"), ("cpu-x2-gloo", make_baseline().case)]
)
def test_file_copied_to_another_case_or_platform_is_refused(tmp_path, platform, case):
    source, copy = write_baseline(tmp_path, make_baseline()), baseline_path(tmp_path, platform, case)
    copy.parent.mkdir(exist_ok=True)
    copy.write_bytes(source.read_bytes())
    with pytest.raises(BaselineError, match=f"{re.escape(str(copy))}.* name belongs to {case!r} of {platform!r}; "):
        read_baseline(tmp_path, platform, case)


NOT_WRITABLE = {
    "NaN": ({"final_loss": float("nan")}, ""),
    "infinity": ({"final_loss": float("inf")}, ""),
    "size": ({"environment": {"torch": "x" * MAX_BYTES}}, "larger than the 4,194,304 bytes allowed"),
}


@each_of("changes, problem", NOT_WRITABLE)
def test_baseline_that_could_not_be_read_again_is_not_written(tmp_path, changes, problem):
    with pytest.raises(BaselineError, match=f"not written: .*{problem}"):
        write_baseline(tmp_path, baseline_of(make_facts(**changes)))
    assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize("case", ["../../x", "/etc/passwd", "a\0b", "x" * 4096, "\ud800", "..", "\n"], ids=ascii_id)
def test_hostile_case_stays_in_its_folder_and_is_read_back(tmp_path, case):
    folder = tmp_path / "baselines"
    baseline = make_baseline(case=case)
    assert read_again(folder, baseline) == baseline
    assert [path.parent for path in tmp_path.rglob("*.json")] == [folder / baseline.platform]


def test_file_in_the_folders_place_is_named(tmp_path):
    (tmp_path / "baselines").write_text("")
    path = baseline_path(tmp_path / "baselines", make_baseline().platform, make_baseline().case)
    with pytest.raises(BaselineError, match=f"^{re.escape(str(path))}: not written: Not a directory$"):
        write_baseline(tmp_path / "baselines", make_baseline())


COLLECTED = {"tests/test_a.py::test_x", "tests/test_a.py::test_y"}


def found_orphans(root: Path, collected=COLLECTED, used=None) -> list[str]:
    """Return the orphans of a project that has the file of the tests."""
    (root / "tests").mkdir()
    (root / "tests/test_a.py").touch()
    return orphans(root / "baselines", collected, used or {}, {}, root)


@each_of("test", {"NUL": "a\0b::test", "5 kB": "x" * 5000 + "::test", "surrogate": "\ud800::test"})
def test_baseline_of_a_test_that_can_be_no_file_is_an_orphan(tmp_path, test):
    write_baseline(tmp_path / "baselines", make_baseline(test=test))
    assert len(found_orphans(tmp_path)) == 1


def test_baseline_under_a_name_that_is_not_its_cases_is_an_orphan(tmp_path):
    path = write_baseline(tmp_path / "baselines", make_baseline())
    path.rename(path.with_name("by-hand.json"))
    (line,) = found_orphans(tmp_path)
    assert line.endswith(
        "by-hand.json: the file name is not that of its case 'tests/test_a.py::test_x::fsdp'; delete or rename the file"
    )


def test_unreadable_baseline_is_reported_with_the_orphans(tmp_path):
    path = write_baseline(tmp_path, make_baseline())
    path.write_text("{")
    (line,) = orphans(tmp_path, set(), {}, {}, tmp_path)
    assert line.startswith(f"{path}: not valid JSON")


@pytest.mark.parametrize("is_compared", [True, False])
def test_baseline_that_its_test_no_longer_compares_is_an_orphan(tmp_path, is_compared):
    baseline = make_baseline()
    write_baseline(tmp_path / "baselines", baseline)
    used = {baseline.test: {baseline.case if is_compared else f"{baseline.test}::another"}}
    unused = f"unused: the test {baseline.test} does not compare this case; delete the file"
    assert [line[-len(unused) :] for line in found_orphans(tmp_path, {baseline.test}, used)] == [unused] * (
        not is_compared
    )
