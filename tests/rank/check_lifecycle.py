"""The life of a rank, in this process and without a process group."""

from __future__ import annotations

import json

import pytest

from pytest_aorta.worker.lifecycle import run_rank

FORGETFUL = """
from pytest_aorta.worker import Workload

class Forgetful(Workload):
    def setup(self):
        pass

    def run(self):
        pass

    def cleanup(self):
        pass
"""


def test_run_without_a_result_names_the_class_and_what_it_has_to_return(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("AORTA_DEVICE", "cpu")
    own, folder = tmp_path / "forgetful", tmp_path / "ranks" / "0"
    own.mkdir()
    folder.mkdir(parents=True)
    (own / "__init__.py").write_text(FORGETFUL)
    workload = {"name": "forgetful", "class": "Forgetful", "module": None, "folder": str(own)}
    plan = {"script": None, "reference": None, "config": {}, "workload": workload}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(TypeError, match=r"^Forgetful\.run\(\) returned None; it has to return a RankResult$"):
        run_rank(tmp_path, folder)
    assert not (folder / "result.json").exists()
