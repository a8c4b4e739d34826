"""Rules on combinations of config keys, as tables; and those of the folders of checkpoints."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

# The keys that contradict each other, whether they do, and why, with what to do.
Rule: TypeAlias = tuple[str, Callable[[Any], object], str]


def check_rules(rules: Iterable[Rule], given: Mapping[str, Any]) -> None:
    """Raise ValueError for the first of ``rules`` that ``given`` breaks, with its keys, their values and the reason."""
    for keys, is_broken, reason in rules:
        if is_broken(SimpleNamespace(**given)):
            raise ValueError(f"{' and '.join(f'{key} is {_shown(given[key])}' for key in keys.split())}: {reason}")


def is_relative(folder: str | None) -> bool:
    """Return whether ``folder`` depends on the folder that a rank runs in."""
    return folder is not None and not Path(folder).is_absolute()


def _is_taken(folder: str | None) -> bool:
    return folder is not None and Path(folder).exists() and (not Path(folder).is_dir() or any(Path(folder).iterdir()))


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value)


ABSOLUTE = "ranks may run in any folder; give an absolute path"
# torch writes .metadata last, by a rename, when every rank has written its part: a torn checkpoint lacks this file.
CHECKPOINT_RULES: tuple[Rule, ...] = (
    ("save_checkpoint", lambda c: is_relative(c.save_checkpoint), ABSOLUTE),
    ("load_checkpoint", lambda c: is_relative(c.load_checkpoint), ABSOLUTE),
    ("save_checkpoint", lambda c: _is_taken(c.save_checkpoint), "it exists already; use a new or an empty folder"),
    ("load_checkpoint", lambda c: c.load_checkpoint is not None and not Path(c.load_checkpoint, ".metadata").is_file(),
     "it holds no complete checkpoint, since the file .metadata is missing"),
)  # fmt: skip
