"""The generator of the tables that document the code: python docs/generate.py.

A table stands between two comments in a page of this folder, ``<!-- generated: NAME -->`` and ``<!-- end -->``, so
that the table is also in the repository. ``tests/unit/docs/test_docs.py`` fails if a table is not current.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pytest_aorta.plan.options import OPTIONS, Option
from pytest_aorta.plan.workloads import WorkloadSpec, read_workload
from pytest_aorta.plugin.markers import MARKERS
from pytest_aorta.result.measurements import SCHEMA_VERSION, WorkloadResult
from pytest_aorta.session import history
from pytest_aorta.session.history import HistoryEntry
from pytest_aorta.verdict import baseline
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.metrics import METRICS, Metric

DOCS = Path(__file__).parent
ROOT = DOCS.parent
# Layouts are declared beside the test that launches them.
sys.path.insert(0, str(ROOT))
from docs.failures import failures  # noqa: E402
from tests.distributed.layouts import COLUMNS, LAYOUTS  # noqa: E402

BLOCK = re.compile(r"(?P<begin><!-- generated: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def options() -> str:
    """Return the table of command line options: default and meaning."""
    shown = (option for option in OPTIONS if not option.ini_only)
    return table(("option", "default", "meaning"), ((_flag(option), *_row(option)[1:]) for option in shown))


def ini_keys() -> str:
    """Return the table of ini keys without a command line option."""
    shown = (option for option in OPTIONS if option.ini_only)
    return table(("ini", "default", "meaning"), map(_row, shown))


def _flag(option: Option) -> str:
    value = "" if option.is_switch else f"={option.metavar or '|'.join(option.choices)}"
    return f"`{option.flag}{value}`"


def _row(option: Option) -> tuple[str, ...]:
    meaning = re.sub(r"--[\w-]+(?:=[^\s,:]+)?|[a-z]+:[A-Z=]{4,}", r"`\g<0>`", option.help)
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
    default += f"; {metric.on_cpu} on CPU ranks" if metric.on_cpu else ""
    from_steps = f", from {metric.min_steps} steps on" if metric.min_steps > 1 else ""
    return f"`{metric.name}`", metric.help, metric.unit, better, default + from_steps


def layouts() -> str:
    """Return the number of layouts, and the table of those in which a backend is equal to the reference."""
    found: dict[tuple[str, str], list[str]] = {}
    for column in COLUMNS:
        for layout in LAYOUTS:
            difference = layout.difference(column)
            if difference is not None:
                found.setdefault((column, f"differs: {difference}" if difference else "equal"), []).append(layout.name)
    text = f"{len(LAYOUTS)} layouts, which `tests/distributed/layouts.py` lists:\n\n"
    rows = ((f"`{column}`", outcome, _names(names)) for (column, outcome), names in found.items())
    return text + table(("backend", "bits", "layouts"), rows)


def _names(names: list[str]) -> str:
    """Return the names of layouts, or of those that are left out where these are fewer."""
    others = [layout.name for layout in LAYOUTS if layout.name not in names]
    if not others:
        return "all"
    return f"all but {'; '.join(others)}" if len(others) < len(names) else "; ".join(names)


def config_keys() -> str:
    """Return the tables of config keys: one per built-in workload, and one per pair that shares keys."""
    folders = sorted(path.parent for path in (ROOT / "workloads").glob("*/default.yaml"))
    specs = {folder.name: read_workload(folder.name, folder, None) for folder in folders}
    parts: dict[str, str] = {}
    for names in _PAIRS:
        first, second = (specs[name].properties for name in names)
        shared = {key: schema for key, schema in first.items() if second.get(key) == schema}
        of_both = specs[names[0]].shared.presets
        title = " and ".join(f"`{name}`" for name in names)
        parts[names[1]] = f"## Keys of both {title}\n\n{_keys(shared, of_both)}"
        for name in names:
            own = {key: schema for key, schema in specs[name].properties.items() if key not in shared}
            presets = {key: values for key, values in specs[name].presets.items() if key not in of_both}
            parts[name] = _workload(specs[name], own, presets) + ("\n" + parts[name] if name in parts else "")
    alone = {name: _workload(spec, spec.properties, spec.presets) for name, spec in specs.items() if name not in parts}
    return "\n".join((alone | parts)[name] for name in (*alone, *(name for names in _PAIRS for name in names)))


# Workloads of one model, most of whose keys are the same.
_PAIRS = (("llama_fsdp2", "llama_simple_fsdp"), ("ddp_overlap", "ranking"))


def _workload(spec: WorkloadSpec, own: Mapping[str, Any], presets: Mapping[str, Any]) -> str:
    text = f"## `{spec.name}`\n\n{_sentence(spec.description)} At least {_counted(spec.min_world_size)}."
    return f"{text}\n\n{_keys(own, presets)}"


def _keys(properties: Mapping[str, Any], presets: Mapping[str, Any]) -> str:
    # Every workload has the key `environment`.
    text = table(
        ("key and default", "meaning"),
        [row for key in properties if key != "environment" for row in _key(key, properties[key])],
    )
    for key, values in presets.items():
        text += f"\n`{key}` sets the defaults of other keys:\n\n"
        text += table((f"`{key}`", "defaults"), ((f"`{value}`", _pairs(keys)) for value, keys in values.items()))
    return text


def _key(key: str, schema: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the row of a key, or those of the keys in its object."""
    if "properties" in schema:
        return [row for name, inner in schema["properties"].items() for row in _key(f"{key}.{name}", inner)]
    default = schema.get("default")
    shown = default if default and isinstance(default, str) else json.dumps(default)
    values = _allowed(schema)
    return [(f"`{key}: {shown}`", schema.get("description", "") + (f" ({values})" if values else ""))]


def _allowed(schema: Mapping[str, Any]) -> str:
    """Return the values that the default of a key does not show."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    if "items" in schema:
        return _allowed(schema["items"])
    shown = {key: schema[key] for key in _SIGNS if schema.get(key) is not None and (key, schema[key]) != ("minimum", 0)}
    return ", ".join(f"{_SIGNS[key]} {limit}" for key, limit in shown.items())


_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


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


def _describe(part: dict[str, Any]) -> None:
    """Give the properties of a struct the descriptions of its docstring, of which the schema keeps the summary."""
    text = inspect.cleandoc(part.get("description", ""))
    for name, said in _attributes(text).items():
        if name in part.get("properties", {}):
            part["properties"][name]["description"] = said
    if text:
        part["description"] = " ".join(text.partition("\n\n")[0].split())


def schemas() -> str:
    """Return the tables of the keys of stored files that a reader needs, from their JSON schemas."""
    loaded = {name: json.loads(current_schema(name)) for name in SCHEMAS}
    return "\n".join(
        f"## {title}\n\n{_sentence(part['description'])}\n\n{_properties(part)}"
        for name, titles in _SHOWN.items()
        for title in titles
        for part in (loaded[name] if title == loaded[name]["title"] else loaded[name]["$defs"][title],)
    )


# The structs whose keys are listed, by file; the schema files describe those of the others.
_SHOWN = {
    "workload_result": ("WorkloadResult",),
    "baseline": ("Baseline", "StoredLaunch", "LaunchFacts"),
    "history": ("HistoryEntry", "Comparison", "Verdict"),
}


def _properties(schema: Mapping[str, Any]) -> str:
    return table(
        ("key", "meaning"), ((f"`{key}`", inner.get("description", "")) for key, inner in schema["properties"].items())
    )


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
    return f"`{', '.join(f'{key}: {value}' for key, value in keys.items())}`"


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
    "schemas": schemas,
    "failures": failures,
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
