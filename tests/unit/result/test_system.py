"""Facts of the host that can move times."""

import platform

import pytest

from pytest_aorta.result import system
from pytest_aorta.result.sensors import PlatformFacts
from tests.unit.builders import make_result


@pytest.fixture
def facts(tmp_path, monkeypatch):
    """Facts of a made-up host, whose packages and files a test can change."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("_PODMAN", "_GOVERNOR"):
        monkeypatch.setattr(system, name, tmp_path / name)
    for name in system._IMAGE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return lambda: system.system_facts.__wrapped__()


def test_facts_that_the_host_has_are_told_and_change_with_it(facts, tmp_path, monkeypatch):
    first = facts()
    assert first["kernel"] == platform.release()
    assert not {"governor", "image"} & first.keys()
    (tmp_path / "_GOVERNOR").write_text("powersave\n")
    (tmp_path / "_PODMAN").write_text('engine="podman-5"\nimageid="abc"\n')
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    second = facts()
    assert (second["governor"], second["image"]) == ("powersave", "abc")
    assert {name for name in first if first[name] != second[name]} == {"packages"}
    (tmp_path / "_PODMAN").unlink()
    monkeypatch.setenv("APPTAINER_CONTAINER", "/home/someone/torch.sif")
    assert facts()["image"] == "torch.sif"


def test_facts_of_host_and_devices_describe_a_launch():
    about = PlatformFacts("NVML", about={"driver": "570.86.15"})
    result = make_result([[10.0] * 4], system={"kernel": "6.8"}, platform_facts=about)
    assert result.facts.description.system == {"kernel": "6.8", "driver": "570.86.15"}
