"""Typed settings of workloads for checks: the declared defaults with some keys changed."""

from functools import cache

from aorta_workloads.common.settings import read_settings

from pytest_aorta.plan.workloads import find_workload, resolve_config

_spec = cache(find_workload)


def default_config(workload, **changes):
    """Return the config that a launch of ``workload`` would get."""
    config = resolve_config(_spec(workload, ()), changes)
    # The guard sets these variables; workloads never read the key.
    del config["environment"]
    return config


def make_settings(settings_type, workload, **changes):
    """Return that config as typed values."""
    return read_settings(settings_type, default_config(workload, **changes))
