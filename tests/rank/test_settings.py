"""The typed settings of every workload against its default.yaml."""

import warnings
from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest
import torch
from aorta_workloads.common.settings import read_settings
from aorta_workloads.copy_compute.workload import CopyComputeSettings
from aorta_workloads.ddp_overlap.workload import DdpOverlapSettings
from aorta_workloads.fsdp.settings import Settings as FsdpSettings
from aorta_workloads.llama_fsdp2.settings import LlamaFsdp2Settings
from aorta_workloads.ranking.settings import RankingSettings

from pytest_aorta.plan.workloads import find_workload
from tests.rank.settings import default_config, make_settings

with warnings.catch_warnings():
    # Inductor's own imports warn.
    warnings.simplefilter("ignore", DeprecationWarning)
    from aorta_workloads.llama_simple_fsdp.settings import LlamaSimpleFsdpSettings

SETTINGS = {
    "copy_compute": CopyComputeSettings,
    "ddp_overlap": DdpOverlapSettings,
    "fsdp": FsdpSettings,
    "llama_fsdp2": LlamaFsdp2Settings,
    "llama_simple_fsdp": LlamaSimpleFsdpSettings,
    "ranking": RankingSettings,
}
each_workload = pytest.mark.parametrize(("workload", "settings_type"), SETTINGS.items(), ids=SETTINGS)
# The launch, not the config, sets these two fields.
OF_THE_LAUNCH = {"rank", "world_size"}


def config_keys(settings_type, config):
    """Return the keys of ``config`` that a type of settings reads, with those that a field groups."""
    kinds = get_type_hints(settings_type)
    grouped = [name for name, kind in kinds.items() if is_dataclass(kind) and name not in config]
    return (set(kinds) - set(grouped)).union(*(config_keys(kinds[name], config) for name in grouped))


@each_workload
def test_settings_have_exactly_the_keys_that_the_yaml_declares(workload, settings_type):
    config = default_config(workload)
    assert config_keys(settings_type, config) - OF_THE_LAUNCH == set(config)


@each_workload
def test_blocks_have_exactly_the_keys_and_defaults_that_the_yaml_declares(workload, settings_type):
    declared = find_workload(workload, ()).properties
    for name, block_type in get_type_hints(settings_type).items():
        if is_dataclass(block_type) and name in declared:
            block = block_type()
            declared_keys = declared[name]["properties"]
            assert {field.name: getattr(block, field.name) for field in fields(block)} == {
                key: schema["default"] for key, schema in declared_keys.items()
            }


def test_dtypes_and_lists_become_typed_values():
    changes = {"param_dtype": "bfloat16", "hash_tensors": ["weights"], "fault": {"kind": "slowdown", "delay_ms": 2}}
    settings = make_settings(LlamaFsdp2Settings, "llama_fsdp2", **changes)
    assert settings.param_dtype == torch.bfloat16
    assert settings.hashing.hash_tensors == ("weights",)
    assert (settings.fault.kind, settings.fault.delay_ms, settings.fault.every) == ("slowdown", 2, 1)
    assert settings.degrees.tensor_parallel_degree == 1


def test_a_key_that_is_absent_is_an_error():
    config = default_config("ranking")
    del config["lr"]
    with pytest.raises(KeyError, match="lr"):
        read_settings(RankingSettings, config)
