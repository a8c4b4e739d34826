"""``aorta selftest`` on a test whose launches are faked, some with the fault and some without."""

import pytest

from pytest_aorta.cli.main import main
from pytest_aorta.cli.selftest import SIGNS
from pytest_aorta.common import variables
from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.plants import Plant, Planted
from tests.integration.conftest import FAKE_LAUNCHER

# Faults that the toy shows, as the ranks of a launch would; {slips} are planted, and nothing shows.
TOY_PLANTS = """
import json, os, pytest
from pytest_aorta.plan.plants import Planted

SHOWN = {{
    "slow rank": {{"slowdown": {slowdown}}},
    "bit of a gradient": {{"weight_hash": "f" * 16}},
    "NaN": {{"raises": 1, "message": "loss of rank 1 is nan"}},
    "hang": {{"raises": 1, "message": "hang in collective"}},
}}
SLIPS = {slips}

@pytest.fixture(autouse=True)
def plants(request):
    planted = Planted.read(os.environ)
    if planted and planted.plant in (*SHOWN, *SLIPS):
        planted.mark.touch()
    shown = SHOWN.get(planted.plant, {{}}) if planted else {{}}
    request.config.rootpath.joinpath("fault.json").write_text(json.dumps(shown))
"""


def table(text):
    """Return each fault with the word of its row."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    words = ("yes", "NO", "not covered")
    return {
        str(plant): next(word for word in words for line in lines if line.startswith(f"{plant} {word}"))
        for plant in Plant
    }


def test_every_fault_is_found_slips_or_is_not_covered(gpu, monkeypatch, capsys):
    monkeypatch.chdir(gpu.path)
    gpu.pytester.makeconftest(FAKE_LAUNCHER + TOY_PLANTS.format(slips=["gradient lost"], slowdown=100))
    assert main(["selftest", "test_toy.py"]) == 1
    printed = capsys.readouterr().out
    assert "or name weight_hash or final_loss in a tolerance marker" in printed
    assert table(printed) == {
        "slow rank": "yes",
        "communication in line": "not covered",  # the toy measures no overlap
        "bit of a gradient": "yes",
        "gradient lost": "NO",
        "NaN": "yes",
        "gradients summed over ranks": "not covered",
        "learning rate times ranks": "not covered",
        "same samples on all ranks": "not covered",
        "hang": "NO",  # the launch fails by an error of a rank
        "exit code": "not covered",  # no rank has left a mark
        "memory": "not covered",
    }
    assert "11 faults planted in 1 test: 3 found, 2 not found, 6 not covered" in printed
    assert "recording one for this command alone" in printed
    assert "1 of 11: slow rank: yes\n" in printed
    assert gpu.baseline_files() == []


def test_what_hides_a_fault_is_said(gpu, monkeypatch, capsys):
    monkeypatch.chdir(gpu.path)
    monkeypatch.setattr("pytest_aorta.cli.selftest.SIGNS", {Plant.SLOW_RANK: SIGNS[Plant.SLOW_RANK]})
    gpu.pytester.makeconftest(FAKE_LAUNCHER + TOY_PLANTS.format(slips=[], slowdown=[1.1, 0.9, 1.3, 0.8]))
    assert main(["selftest", "test_toy.py"]) == 1
    assert "      step_time_p50: further launches could not decide" in capsys.readouterr().out


def test_unchanged_code_that_fails_and_runs_without_a_launch_are_errors(gpu, monkeypatch, capsys):
    monkeypatch.chdir(gpu.path)
    gpu.plant(raises=0)
    assert main(["selftest", "test_toy.py"]) == 1
    assert "unchanged code failed" in capsys.readouterr().err
    for words in (["test_absent.py"], ["--", "--update-baselines"]):
        assert main(["selftest", *words]) == 2
        assert "pytest ended with exit code 4:" in capsys.readouterr().err
    gpu.write("test_other.py", "def test_other(): pass")
    assert main(["selftest", "test_other.py"]) == 1
    assert "no test of this run of pytest has launched" in capsys.readouterr().err


def test_variable_that_the_command_did_not_set_is_refused():
    with pytest.raises(SpecError, match=f"{variables.PLANT}.*unset it"):
        Planted.read({variables.PLANT: "slow"})
