"""Workloads by name, their declarations, and the commands that they run."""

import re
from pathlib import Path

import pytest

from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.workloads import (
    WorkloadSpec,
    find_workload,
    read_workload,
    resolve_config,
    workload_places,
)
from tests.unit.builders import each_of, run_python, write

GOOD = """
description: a toy
class: Toy
min_world_size: 2
config:
  size: {type: string, enum: [small, large], default: small, description: preset}
  steps: {type: integer, minimum: 1, default: 5, description: steps}
  scale: {type: number, default: 1.0, description: scale}
  layout: {type: object, default: {}, description: layout}
presets:
  size:
    small: {steps: 5}
    large: {steps: 50, scale: 8.0}
"""
OWN_ENVIRONMENT = "  environment: {type: object, default: {}, description: own}\n"


def declare(folder: Path, text: str) -> Path:
    return write(folder / "default.yaml", text).parent


def good_spec(tmp_path: Path) -> WorkloadSpec:
    return read_workload("toy", declare(tmp_path / "toy", GOOD), None)


def yaml_error(tmp_path: Path, text: str) -> str:
    folder = declare(tmp_path / "toy", text)
    with pytest.raises(SpecError) as caught:
        read_workload("toy", folder, None)
    assert str(folder / "default.yaml") in str(caught.value)
    return str(caught.value)


def config_error(tmp_path: Path, **given: object) -> str:
    spec = good_spec(tmp_path)
    with pytest.raises(SpecError) as caught:
        resolve_config(spec, given)
    assert str(spec.yaml) in str(caught.value)
    return str(caught.value)


def test_declaration_is_read(tmp_path):
    spec = good_spec(tmp_path)
    assert (spec.class_name, spec.min_world_size) == ("Toy", 2)
    defaults = {"size": "small", "steps": 5, "scale": 1.0, "layout": {}, "environment": {}}
    assert resolve_config(spec, {}) == defaults
    assert sorted(spec.properties) == ["environment", "layout", "scale", "size", "steps"]


SHARED = """
config:
  steps: {type: integer, minimum: 1, default: 5, description: steps}
  size: {type: string, enum: [small, large], default: small, description: preset}
presets:
  size:
    large: {steps: 50}
"""
EXTENDING = """
description: a toy
class: Toy
extends: shared.yaml
config:
  steps: {type: integer, minimum: 1, default: 7, description: own steps}
  scale: {type: number, default: 1.0, description: scale}
"""


def test_a_workload_has_the_keys_and_presets_of_the_file_that_it_extends(tmp_path):
    (tmp_path / "shared.yaml").write_text(SHARED)
    spec = read_workload("toy", declare(tmp_path / "toy", EXTENDING), None)
    assert resolve_config(spec, {}) == {"steps": 7, "size": "small", "scale": 1.0, "environment": {}}
    assert resolve_config(spec, {"size": "large"})["steps"] == 50


@pytest.mark.parametrize(
    ("name", "shared", "message"),
    [
        ("shared.yaml", None, r"shared\.yaml: can't be read: No such file"),
        ("../shared.yaml", SHARED, r'default\.yaml: \$\.extends: got "\.\./shared\.yaml"; Expected `str` matching'),
        ("shared.yaml", SHARED + "class: Toy", r"shared\.yaml: \$: unknown key 'class'"),
        ("shared.yaml", SHARED.replace("default: small, ", ""), r"shared\.yaml: config\.size: keys \['default'\]"),
        ("shared.yaml", SHARED.replace("{steps: 50}", "{speed: 2}"), r"presets name config keys \['speed'\]"),
    ],
)
def test_a_wrong_file_to_extend_is_named(tmp_path, name, shared, message):
    if shared is not None:
        (tmp_path / "shared.yaml").write_text(shared)
    folder = declare(tmp_path / "toy", EXTENDING.replace("shared.yaml", name))
    with pytest.raises(SpecError, match=message):
        read_workload("toy", folder, None)


def test_yaml_without_a_config_declares_a_workload_without_keys_of_its_own(tmp_path):
    spec = read_workload("toy", declare(tmp_path / "toy", "description: a toy\nclass: Toy\n"), None)
    assert resolve_config(spec, {}) == {"environment": {}}
    with pytest.raises(SpecError, match=r"has no config keys \['steps'\]; there are \['environment'\]"):
        resolve_config(spec, {"steps": 3})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("description: a toy", "", "missing required field `description`"),
        ("min_world_size: 2", "clas: x", "unknown key 'clas' (did you mean 'class'?); there are ['class', "),
        ("  scale:", "  steps:", "key 'steps' is given twice"),
        ("    small:", "    1:", "$.presets[...]: Expected `str`, got `int`"),
        (
            "steps: 50",
            "steps: many",
            "preset size=large config of workload 'toy': steps: 'many' is not of type",
        ),
        ("presets:", f"{OWN_ENVIRONMENT}presets:", "'environment' exists for every workload"),
        ("description: a toy", "description: ''", '$.description: got ""; Expected `str` of length >= 1'),
        ("{steps: 5}", "{step: 5}", "presets name config keys ['step'] (did you mean 'steps'?)"),
        ("presets:\n  size:", "presets:\n  sizes:", "presets name config keys ['sizes'] (did you mean 'size'?)"),
        ("class: Toy", "class: 2toy", '$.class: got "2toy"; Expected `str` matching'),
        ("min_world_size: 2", "min_world_size: 0", "$.min_world_size: got 0; Expected `int` >= 1"),
        ("min_world_size: 2", "preload: [os]", '$.preload[0]: got "os"; Expected `str` matching'),
        ("  scale:", "  Scale:", "$.config: Expected `str` matching"),
        ("type: number, default: 1.0", "type: number", "config.scale: keys ['default'] are required"),
        ("{type: number, default: 1.0, description: scale}", "1.0", "$.config[...]: Expected `object`, got `float`"),
        ("default: 5", "default: many", "steps: 'many' is not of type 'integer'"),
        ("default: 5", "default: 0", "steps: 0 is less than the minimum of 1"),
        ("default: 1.0", "default: .nan", "config of workload 'toy': scale"),
    ],
)
def test_wrong_yaml_value_is_named_with_what_is_allowed(tmp_path, old, new, message):
    assert old in GOOD
    assert message in yaml_error(tmp_path, GOOD.replace(old, new, 1))


@pytest.mark.parametrize(
    ("fragment", "problem"),
    [
        ("type: int", "$.type: 'int' is not valid"),
        ("type: array, items: {type: int}", "$.items.type: 'int' is not valid"),
        ("type: integer, minimum: low", "$.minimum: 'low' is not of type 'number'"),
    ],
)
def test_wrong_value_in_the_schema_of_a_config_key_is_named_with_what_is_allowed(tmp_path, fragment, problem):
    message = yaml_error(tmp_path, GOOD.replace("type: integer, minimum: 1", fragment))
    assert f"config.steps is not a JSON Schema: {problem}" in message


@pytest.mark.parametrize("given", [{}, {"steps": 7}])
def test_preset_replaces_defaults_and_no_explicit_value(tmp_path, given):
    config = resolve_config(good_spec(tmp_path), {"size": "large"} | given)
    assert (config["steps"], config["scale"]) == (given.get("steps", 50), 8.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zzz": 5}, "['zzz']; there are"),
        ({"scale": float("inf")}, "scale: got inf"),
        ({"layout": {"path": Path("x")}}, "layout: got "),
        ({"environment": {"NCCL_NTHREADS": 1}}, "environment.NCCL_NTHREADS: 1 is not of type 'string'"),
        ({"steps": True}, "steps: True is not of type 'integer'"),
        ({"size": "huge"}, "size: 'huge' is not one of ['small', 'large']"),
    ],
)
def test_wrong_config_value_is_named_with_what_is_allowed(tmp_path, given, message):
    assert message in config_error(tmp_path, **given)


def test_config_is_what_a_baseline_will_hold(tmp_path):
    assert resolve_config(good_spec(tmp_path), {"layout": {"mesh": (2, 2)}})["layout"] == {"mesh": [2, 2]}


def test_own_workload_is_found_beside_the_installed_ones(tmp_path):
    declare(tmp_path / "workloads" / "toy", GOOD)
    (tmp_path / "workloads" / "notes").mkdir()
    assert "notes" not in workload_places([tmp_path / "workloads"])
    assert {"toy", "fsdp"} <= set(workload_places([tmp_path / "workloads"]))
    assert find_workload("toy", [tmp_path / "workloads"]).module is None


def test_own_workload_named_like_an_installed_one_is_a_clash(tmp_path):
    own = declare(tmp_path / "workloads" / "fsdp", GOOD)
    with pytest.raises(SpecError) as caught:
        find_workload("fsdp", [tmp_path / "workloads"])
    assert "workload 'fsdp' is defined twice, in " in str(caught.value)
    assert str(own) in str(caught.value)


def test_installed_workloads_folder_given_as_own_is_no_clash():
    installed = find_workload("fsdp", []).folder
    assert find_workload("fsdp", [installed.parent]).module == "aorta_workloads.fsdp"


ENTRY_POINTS = """
from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.workloads import find_workload
try:
    find_workload("other", [])
except SpecError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "value", ["no_such_module_at_all", "json.decoder", "other:Toy", "..", "namespace_only.inner", "json:A.B"]
)
def test_entry_point_that_is_no_package_is_named(tmp_path, value):
    (tmp_path / "namespace_only" / "inner").mkdir(parents=True)
    distribution(tmp_path, value)
    done = python(tmp_path, ENTRY_POINTS)
    assert done.startswith("entry point aorta.workloads: other = ")
    assert done.endswith("is not a package with a folder, nor a class (module:Class)")


NAMES = {
    "of another distribution alone": ("train", "named.inner:Toy", {"train", "other:train"}, "train"),
    "like one of this package": ("fsdp", "named.inner:Toy", {"fsdp", "other:fsdp"}, "other:fsdp"),
    "in a module": ("train", "named.module:Toy", {"train", "other:train"}, "other:train"),
    "with an extra": ("train", "single:Toy [gpu]", {"train", "other:train"}, "train"),
    "in a module without a package": ("train", "single:Toy", {"train", "other:train"}, "train"),
}


@each_of("name, value, known, asked", NAMES)
def test_class_of_another_distribution_is_found_by_its_qualified_name(tmp_path, name, value, known, asked):
    for file in ("named/__init__.py", "named/inner/__init__.py", "named/module.py", "single.py"):
        write(tmp_path / file, "raise SystemExit('imported')\n")
    distribution(tmp_path, value, name)
    code = (
        "from pytest_aorta.plan.workloads import find_workload, resolve_config, workload_places\n"
        f"spec = find_workload({asked!r}, [])\n"
        f"assert {known!r} <= set(workload_places([])), workload_places([])\n"
        "assert find_workload('fsdp', []).module == 'aorta_workloads.fsdp'\n"
        "assert resolve_config(spec, {'steps': 3, 'any': [1]}) == {'steps': 3, 'any': [1], 'environment': {}}\n"
        "print(spec.module, spec.class_name, spec.folder.is_dir())\n"
    )
    assert python(tmp_path, code) == f"{value.removesuffix(' [gpu]')} Toy True"


def test_name_that_two_other_distributions_have_is_qualified(tmp_path):
    (tmp_path / "single.py").touch()
    distribution(tmp_path, "single:Toy")
    distribution(tmp_path, "single:Toy", dist="third")
    done = python(tmp_path, ENTRY_POINTS)
    assert "workload 'other' is defined twice, in " in done
    assert sorted(re.findall(r"\w+:other", done)) == ["other:other", "third:other"]


def test_finding_installed_workloads_runs_none_of_their_code(tmp_path):
    package = declare(tmp_path / "noisy" / "inner", GOOD)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("raise SystemExit('imported')\n")
    distribution(tmp_path, "noisy.inner")
    code = (
        "import sys\n"
        "from pytest_aorta.plan.workloads import find_workload\n"
        "print(find_workload('other', []).module, find_workload('fsdp', []).module)\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('noisy', 'aorta_workloads', 'torch')])\n"
    )
    assert python(tmp_path, code) == "noisy.inner aorta_workloads.fsdp\n[]"


def distribution(folder: Path, value: str, name: str = "other", dist: str = "other") -> None:
    info = folder / f"{dist}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[aorta.workloads]\n{name} = {value}\n")


def python(folder: Path, code: str) -> str:
    done = run_python("-c", f"import sys\nsys.path.insert(0, {str(folder)!r})\n{code}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "name", ["RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "PATH", "AORTA_DEVICE", "TORCH_NCCL_DUMP_ON_TIMEOUT", ""]
)
def test_variable_that_is_not_a_configs_is_refused_with_those_that_are(tmp_path, name):
    message = config_error(tmp_path, environment={name: "1", "NCCL_DEBUG": "INFO"})
    assert f"environment: got ['{name}'], allowed is ['CUBLAS_*'," in message


def test_unknown_key_of_an_object_is_refused_with_those_it_has(tmp_path):
    layout = "{type: object, additionalProperties: false, properties: {rows: {type: integer}}, default: {}, "
    folder = declare(tmp_path / "toy", GOOD.replace("{type: object, default: {}, ", layout))
    message = r"layout: .*'row' was unexpected\); there are \['rows'\]"
    with pytest.raises(SpecError, match=message):
        resolve_config(read_workload("toy", folder, None), {"layout": {"row": 1}})
