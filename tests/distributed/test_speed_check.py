"""``aorta doctor --check`` on two CPU ranks."""

import re

from pytest_aorta.cli.main import main
from pytest_aorta.session.history import speed_checks
from pytest_aorta.verdict.attribution import SPEED_CASE, SPEED_METRICS
from tests.unit.sample_history import make_entry, make_launch, write_history


def test_speed_of_the_machine_is_kept_and_compared_with_earlier_checks(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "300")
    usual = {"environment": {"device": "cpu"}}
    launches = [make_launch({"step_time_p50": 9.0, **dict.fromkeys(SPEED_METRICS, 1e-4)}, **usual) for _ in range(3)]
    kept = [
        make_entry(number, case=SPEED_CASE, test=SPEED_CASE, launches=tuple(launches), platform=platform)
        for number, platform in enumerate(("cpu-x2-gloo", "cpu-x4-gloo"))
    ]
    write_history(tmp_path / "kept", kept)
    assert main(["doctor", "--check", "--nproc=2", "--gpus=0", f"--history={tmp_path}/kept"]) == 1
    out = capfd.readouterr().out
    assert re.search(
        r"^PROBLEM  GEMM 0.0001 -> \S+ ms \(\+\d+%\) in the speed check; copy 0.0001 -> ", out, re.MULTILINE
    )
    assert re.search(r"^all-reduce +[01] +\S+ ms +1.000e-04 ms$", out, re.MULTILINE)
    found = speed_checks(tmp_path / "kept")
    assert len(found) == 6
    assert all(SPEED_METRICS.keys() <= one.metrics.keys() for one in found)
