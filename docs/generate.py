"""The generator of the tables that document the code: python docs/generate.py.

A table stands between two comments in a page of this folder, ``<!-- generated: NAME -->`` and ``<!-- end -->``, so
that the table is also in the repository. ``tests/unit/docs/test_docs.py`` fails if a table is not current.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pytest_aorta.plan.options import OPTIONS, Option
from pytest_aorta.plan.workloads import WorkloadSpec, read_workload
from pytest_aorta.plugin.markers import MARKERS
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.measurements import DERIVED, SCHEMA_VERSION, WorkloadResult
from pytest_aorta.result.trace.profiled_steps import CollectiveFacts, FamilyTime
from pytest_aorta.session import history
from pytest_aorta.session.history import HistoryEntry
from pytest_aorta.verdict import baseline
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.metrics import METRICS, Metric

DOCS = Path(__file__).parent
ROOT = DOCS.parent
# Layouts are declared beside the test that launches them.
sys.path.insert(0, str(ROOT))
from tests.distributed.layouts import COLLECTIVES, COLUMNS, LAYOUTS, REFERENCE, Layout  # noqa: E402

BLOCK = re.compile(r"(?P<begin><!-- generated: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def options() -> str:
    """Return the table of command line options: ini key, default, meaning."""
    shown = (option for option in OPTIONS if not option.ini_only)
    return table(("option", "ini", "default", "meaning"), ((_flag(option), *_row(option)) for option in shown))


def ini_keys() -> str:
    """Return the table of ini keys without a command line option."""
    shown = (option for option in OPTIONS if option.ini_only)
    return table(("ini", "default", "meaning"), map(_row, shown))


def _flag(option: Option) -> str:
    value = "" if option.is_switch else f"={option.metavar or '|'.join(option.choices)}"
    return f"`{option.flag}{value}`"


def _row(option: Option) -> tuple[str, ...]:
    meaning = re.sub(r"--[\w-]+(?==|$|[ :,])|python:PATH", r"`\g<0>`", option.help)
    return f"`{option.key}`" if option.ini else "", option.shown_default, meaning


def markers() -> str:
    """Return the table of markers and their arguments."""
    return table(("marker", "meaning"), ((f"`{marker.usage}`", marker.help) for marker in MARKERS.values()))


def metrics() -> str:
    """Return the table of compared metrics."""
    return table(("metric", "meaning", "unit", "better", "compared by default at"), map(_metric, METRICS.values()))


def _metric(metric: Metric) -> tuple[str, ...]:
    better = "equal" if metric.direction == "exact" else metric.direction
    default = "only where a marker names it" if metric.default is None else str(metric.default)
    from_steps = f", from {metric.min_steps} steps on" if metric.min_steps > 1 else ""
    return f"`{metric.name}`", metric.help, metric.unit, better, default + from_steps


def layouts() -> str:
    """Return the table of layouts, with what each backend of `llama_simple_fsdp` gives in them."""
    heads = ("layout", "ranks", f"`{REFERENCE}`", *(f"`{column}`" for column in COLUMNS))
    return table(heads, map(_layout, LAYOUTS))


def _layout(layout: Layout) -> tuple[str, ...]:
    return layout.name, str(layout.world_size), "reference", *(_cell(layout.difference(column)) for column in COLUMNS)


def _cell(difference: str | None) -> str:
    if difference is None:
        return "no test"
    return f"differs: {difference}" if difference else "equal"


def collectives() -> str:
    """Return the table of the collectives of a step, by process group, kind and number."""
    rows = ((layout.name, *(COLLECTIVES[layout.name].get(name, "") for name in WORKLOADS)) for layout in LAYOUTS)
    shown = ((name, eager, "the same" if traced == eager else traced) for name, eager, traced in rows)
    return table(("layout", *(f"`{name}`" for name in WORKLOADS)), shown)


WORKLOADS = (REFERENCE, "llama_simple_fsdp")


def config_keys() -> str:
    """Return the tables of config keys, one per built-in workload."""
    folders = sorted(path.parent for path in (ROOT / "workloads").glob("*/default.yaml"))
    specs = [read_workload(folder.name, folder, None) for folder in folders]
    sharing = [spec for spec in specs if spec.extends]
    shared = {spec.extends: spec.shared for spec in sharing}
    parts = [_workload(spec) for spec in specs]
    for file, keys in shared.items():
        names = " and ".join(f"`{spec.name}`" for spec in sharing if spec.extends == file)
        parts.append(f"## Keys of {names}\n\n{_keys(keys.properties, keys.presets)}")
    return "\n".join(parts)


def _workload(spec: WorkloadSpec) -> str:
    own = {key: schema for key, schema in spec.properties.items() if key not in spec.shared.properties}
    presets = {key: values for key, values in spec.presets.items() if key not in spec.shared.presets}
    text = f"## `{spec.name}`\n\n{_sentence(spec.description)} At least {_counted(spec.min_world_size)}."
    if spec.extends:
        text += " The keys of both Llama workloads are below."
    return f"{text}\n\n{_keys(own, presets)}"


def _keys(properties: Mapping[str, Any], presets: Mapping[str, Any]) -> str:
    text = table(
        ("key", "values", "default", "meaning"), [row for key in properties for row in _key(key, properties[key])]
    )
    for key, values in presets.items():
        text += f"\n`{key}` sets the defaults of other keys:\n\n"
        text += table((f"`{key}`", "defaults"), ((f"`{value}`", _pairs(keys)) for value, keys in values.items()))
    return text


def _key(key: str, schema: dict[str, Any]) -> list[tuple[str, ...]]:
    default = json.dumps(schema["default"]) if "default" in schema else "-"
    rows: list[tuple[str, ...]] = [(f"`{key}`", _values(schema), f"`{default}`", schema.get("description", ""))]
    for name, inner in schema.get("properties", {}).items():
        rows += _key(f"{key}.{name}", inner)
    return rows


def _values(schema: dict[str, Any], root: dict[str, Any] | None = None) -> str:
    """Return the allowed values in words; ``root`` is the whole schema, to which references point."""
    if "enum" in schema:
        return ", ".join("null" if value is None else f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema:
        return " or ".join(_values(part, root) for part in schema["anyOf"])
    if "$ref" in schema:
        target = functools.reduce(lambda part, name: part[name], schema["$ref"].split("/")[1:], root or {})
        is_described = schema["$ref"].startswith("#/$defs/") and "properties" in target
        return schema["$ref"].rpartition("/")[2].replace("_", " ") if is_described else _values(target, root)
    given = schema.get("type", "any")
    kinds = [given] if isinstance(given, str) else given
    limits = [f"{words} {schema[key]}" for key, words in _LIMITS.items() if key in schema]
    text = " or ".join(kinds) + (f", {' and '.join(limits)}" if limits else "")
    return f"{text} of {_values(schema['items'], root)}" if isinstance(schema.get("items"), dict) else text


_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


# The structs whose JSON Schemas are files of the package, and the versions of the schemas.
SCHEMAS: dict[str, tuple[type, int]] = {
    "baseline": (Baseline, baseline.SCHEMA_VERSION),
    "history": (HistoryEntry, history.SCHEMA_VERSION),
    "workload_result": (WorkloadResult, SCHEMA_VERSION),
}
_SCHEMA_FOLDER = ROOT / "pytest_aorta/common/schemas"


def current_schema(name: str) -> str:
    """Return the text of the schema file of a struct, whose descriptions are those of its attributes."""
    kind, version = SCHEMAS[name]
    schema = _schema_of(kind, f"{name}/{version}", kind.__doc__ or "")
    if kind is WorkloadResult:
        _add_derived(schema)
    for part in (schema, *schema["$defs"].values()):
        _describe(part)
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _schema_of(kind: Any, name: str, description: str) -> dict[str, Any]:
    """Return the JSON Schema 2020-12 of a struct, with the structs that it contains under ``$defs``."""
    _, definitions = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"https://pytest-aorta.invalid/{name}",
        **definitions.pop(kind.__name__),
        "description": description,
        "$defs": definitions,
    }


def _add_derived(schema: dict[str, Any]) -> None:
    """Add the properties of a result that its file contains too."""
    derived, definitions = msgspec.json.schema_components(DERIVED.values(), ref_template="#/$defs/{name}")
    for name, values in zip(DERIVED, derived, strict=True):
        # The docstring of the class describes those that are no methods.
        text = inspect.getdoc(inspect.getattr_static(WorkloadResult, name)) or ""
        said = text.partition("\n")[0].removeprefix("Return ").rstrip(".")
        schema["properties"][name] = values | {"description": _cell_text(said)}
    schema["required"] += DERIVED
    schema["additionalProperties"] = False
    schema["$defs"] |= definitions


def _describe(part: dict[str, Any]) -> None:
    """Give the properties of a struct the descriptions of its docstring, of which the schema keeps the summary."""
    text = inspect.cleandoc(part.get("description", ""))
    for name, said in _attributes(text).items():
        if name in part.get("properties", {}):
            part["properties"][name]["description"] = said
    if text:
        part["description"] = " ".join(text.partition("\n\n")[0].split())


def schemas() -> str:
    """Return the tables of the keys of stored files, from their JSON schemas."""
    names = sorted(path.name for path in _SCHEMA_FOLDER.glob("*.schema.json"))
    loaded = {name: json.loads((_SCHEMA_FOLDER / name).read_text(encoding="utf-8")) for name in names}
    # Schemas with definitions alone are those of files that only pytest-aorta reads.
    return "\n".join(_schema(name, schema) for name, schema in loaded.items() if "properties" in schema)


# A key without a description in the schema has the one of the attribute that is read from the key.
_CLASSES = {
    "launch": (LaunchFacts,),
    "launch.kernels": (FamilyTime,),
    "launch.collectives": (CollectiveFacts,),
}


def _schema(name: str, schema: dict[str, Any]) -> str:
    text = f"## {schema['title']}\n\n{_sentence(schema['description'])} `pytest_aorta/common/schemas/{name}`.\n\n"
    text += _properties(schema, schema["title"], schema)
    for part, inner in schema.get("$defs", {}).items():
        if "properties" in inner:
            text += f"\n### {schema['title']}: {part.replace('_', ' ')}\n\n{_properties(inner, part, schema)}"
    return text


def _properties(schema: dict[str, Any], part: str, root: dict[str, Any]) -> str:
    return table(("key", "values", "required", "meaning"), _rows(schema, part, root))


def _rows(schema: dict[str, Any], described: str, root: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, ...]]:
    """Yield a row for each key, followed by the keys of the object or objects in it."""
    said = {
        name: text
        for cls in _CLASSES.get(described, ())
        for name, text in _attributes(inspect.getdoc(cls) or "").items()
    }
    required = set(schema.get("required", ()))
    for key, inner in schema["properties"].items():
        name, meaning = f"{prefix}{key}", inner.get("description", said.get(key, ""))
        yield f"`{name}`", _values(inner, root), "yes" if key in required else "", meaning
        for brackets, part in (("", inner), ("[]", inner.get("items")), ("[name]", inner.get("additionalProperties"))):
            if isinstance(part, dict) and "properties" in part:
                yield from _rows(part, f"{described}.{key}", root, f"{name}{brackets}.")


def _attributes(docstring: str) -> dict[str, str]:
    """Return the section `Attributes:` of a docstring, by name."""
    text = docstring.partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n     +.*)*)", text, re.MULTILINE)
    words = [(names, _cell_text(" ".join(said.split()).rstrip("."))) for names, said in entries]
    return {name: said for names, said in words for name in names.split(", ")}


def _cell_text(text: str) -> str:
    """Return the text of an attribute for a table: Markdown with JSON's null, without a capital at the beginning."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    text = re.sub(r"\bNone\b", "null", text)
    return text if text[1:2].isupper() else text[0].lower() + text[1:]


def _pairs(keys: dict[str, Any]) -> str:
    return ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in keys.items())


def _sentence(text: str) -> str:
    text = text.rstrip(".")
    return f"{text[0].upper()}{text[1:]}."


def _counted(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


TABLES: dict[str, Callable[[], str]] = {
    "options": options,
    "ini-keys": ini_keys,
    "markers": markers,
    "metrics": metrics,
    "config-keys": config_keys,
    "layouts": layouts,
    "collectives": collectives,
    "schemas": schemas,
}


def current(page: str) -> str:
    """Return a page's text with every generated table replaced by the current one."""
    return BLOCK.sub(lambda found: f"{found['begin']}\n{TABLES[found['name']]()}\n{found['end']}", page)


def main() -> int:
    """Write every schema and every page that is not current, and return 0."""
    for name in SCHEMAS:
        (_SCHEMA_FOLDER / f"{name}.schema.json").write_text(current_schema(name), encoding="utf-8")
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (new := current(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
