"""Rules on combinations of config keys; and those of the folders of checkpoints."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

# The keys that may contradict each other, whether they do (any true value), and why, with what to do.
Rule: TypeAlias = tuple[str, object, str]


def check_rules(rules: Iterable[Rule], given: Mapping[str, Any]) -> None:
    """Raise ValueError for the first of ``rules`` that is broken, with its keys, their values and the reason."""
    for keys, is_broken, reason in rules:
        if is_broken:
            raise ValueError(f"{' and '.join(f'{key} is {_shown(given[key])}' for key in keys.split())}: {reason}")


def checkpoint_rules(save_checkpoint: str | None, load_checkpoint: str | None) -> Iterator[Rule]:
    """Yield the rules on the folders of checkpoints."""
    yield absolute("save_checkpoint", save_checkpoint)
    yield absolute("load_checkpoint", load_checkpoint)
    yield "save_checkpoint", _is_taken(save_checkpoint), "it exists already; use a new or an empty folder"
    # torch writes .metadata last, by a rename, when every rank has written its part: a torn checkpoint lacks this file.
    is_torn = load_checkpoint is not None and not Path(load_checkpoint, ".metadata").is_file()
    yield "load_checkpoint", is_torn, "it holds no complete checkpoint, since the file .metadata is missing"


def absolute(key: str, folder: str | None) -> Rule:
    """Return the rule that the folder that ``key`` names does not depend on the folder that a rank runs in."""
    is_relative = folder is not None and not Path(folder).is_absolute()
    return key, is_relative, "ranks may run in any folder; give an absolute path"


def _is_taken(folder: str | None) -> bool:
    return folder is not None and Path(folder).exists() and (not Path(folder).is_dir() or any(Path(folder).iterdir()))


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value)
