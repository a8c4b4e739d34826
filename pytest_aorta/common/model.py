"""The typed model of JSON files: a file is decoded into frozen structs, and its JSON Schema is generated from them."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeAlias, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec.structs import fields

from pytest_aorta.common.errors import ResultError
from pytest_aorta.common.files import UnreadableFile, decoded, parse_json, raised_as, read_bytes, write_text
from pytest_aorta.common.text import brief, did_you_mean

T = TypeVar("T")
M = TypeVar("M", bound="Model")

# Values that several files hold.
Name: TypeAlias = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]{0,63}$")]
Platform: TypeAlias = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9+-]*$")]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Milliseconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]
NotNegative: TypeAlias = Annotated[float, Meta(ge=0)]
# A number whose sums and squares have a float.
Finite: TypeAlias = Annotated[float, Meta(ge=-1e100, le=1e100)]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
UtcTime: TypeAlias = Annotated[str, Meta(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")]
Block: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{12}$")]
Commit: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{40,64}$")]
Step: TypeAlias = Annotated[str, Meta(pattern="^[0-9]{1,12}$")]
WeightHash: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{16,64}$")]
TensorHash: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
# A fact of the environment that numbers depend on.
Fact: TypeAlias = str | int | float | bool | None

# Where a value is wrong. msgspec shows every key of a dictionary as "[...]", and a wrong key as "`key` in" it.
_PLACE = re.compile(r" - at (?P<is_key>`key` in )?`\$?(?P<path>[^`]*)`")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of all structs that files hold. Unknown keys are refused, and nothing is edited after it was made."""

    def replace(self: M, **changes: Any) -> M:
        """Return a copy with other values of some fields."""
        return msgspec.structs.replace(self, **changes)


def decode(content: bytes | str, kind: type[T], name: str, *, by_hand: bool = True) -> T:
    """Return the value of type ``kind`` that strict JSON describes; ``name`` is the source that an error names.

    Files that people edit or git merges may repeat a key, which is refused; pass ``by_hand=False`` for files that only
    programs write.

    Raises:
        UnreadableFile: The content is not strict JSON (NaN is refused), or does not fit ``kind``. The message names the
            source, the key, what was given and what is allowed.
    """
    if not by_hand:  # msgspec keeps the last of two equal keys
        # Texts with bytes that are not UTF-8, such as names of files, have lone surrogates, which msgspec can't decode.
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(content, type=kind)
    return convert(parse_json(decoded(content, name), name), kind, name)


def read_model(path: Path, kind: type[T], *, max_bytes: int, follow_links: bool = True, by_hand: bool = True) -> T:
    """Return the value of type ``kind`` in a JSON file of at most ``max_bytes`` bytes.

    Raises:
        UnreadableFile: As in :func:`~pytest_aorta.common.files.read_bytes` and :func:`decode`.
    """
    content = read_bytes(path, max_bytes=max_bytes, follow_links=follow_links)
    return decode(content, kind, str(path), by_hand=by_hand)


def read_rank_file(path: Path, kind: type[T], *, max_bytes: int) -> T | None:
    """Return the value of type ``kind`` that a rank wrote into a file; None if the rank left no such file.

    Raises:
        ResultError: The file is unreadable, too large or torn.
    """
    if not path.exists():
        return None
    with raised_as(ResultError, "result invalid: ", after="; run the workload again"):
        return read_model(path, kind, max_bytes=max_bytes, follow_links=False, by_hand=False)


def convert(value: Any, kind: type[T], name: str) -> T:
    """Return plain values, such as those of a YAML file, as type ``kind``; a text becomes a path where one is expected.

    Raises:
        UnreadableFile: The values do not fit ``kind``. The message is that of :func:`decode`.
    """
    try:
        return msgspec.convert(value, kind, dec_hook=_from_text)
    except msgspec.ValidationError as error:
        raise UnreadableFile(f"{name}: {_worded(str(error), value, kind)}") from None
    except UnicodeEncodeError as error:  # half of a surrogate pair, which json.loads accepts
        raise UnreadableFile(f"{name}: contains text that is not Unicode: {error}") from None


def to_builtins(value: Any) -> Any:
    """Return a struct as plain JSON values: objects, lists, texts, numbers, booleans and null; a path is its text."""
    return msgspec.to_builtins(value, enc_hook=str)


def to_json(value: Any) -> str:
    """Return a struct as one line of JSON; what JSON has no number for, such as a change from 0, becomes null."""
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except UnicodeEncodeError:  # a lone surrogate, of a name that is not UTF-8
        return json.dumps(to_builtins(value))


def to_text(value: Any) -> str:
    """Return a struct as JSON that keeps infinite numbers, for :func:`from_text`."""
    return json.dumps(msgspec.to_builtins(value))


def from_text(text: str, kind: type[T]) -> T:
    """Return the value that :func:`to_text` wrote."""
    return msgspec.convert(json.loads(text), kind)


def write_json_rows(path: Path, document: Mapping[str, Any], *, durable: bool = True) -> None:
    """Write ``document`` as :func:`~pytest_aorta.common.files.write_json` does, but with one line per key.

    This takes a hundredth of the time. Numbers have to be finite: the caller has checked them.
    """
    rows = [f"{json.dumps(key)}: {to_json(document[key])}" for key in sorted(document)]
    write_text(path, "{\n" + ",\n".join(rows) + "\n}\n", durable=durable)


def _from_text(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")


def _worded(message: str, document: Any, kind: Any) -> str:
    """Return msgspec's message with the place first, the given value, and for an unknown key those that are known."""
    allowed = _PLACE.sub("", message)
    place = _PLACE.search(message)
    path, given, kinds = "$", document, list(_parts(kind))
    for name, index in _STEP.findall(place["path"] if place else ""):
        if index == "...":  # an entry of a dictionary, of which msgspec does not say which
            return f"{path}[...]: {allowed}"
        key = name or int(index)
        inner: Iterable[Any] = (part for one in kinds for part in get_args(one))
        if name:
            inner = (one.type for struct in _structs(kinds) for one in fields(struct) if one.encode_name == name)
        kinds = [part for one in inner for part in _parts(one)]
        path += f".{name}" if name else f"[{json.dumps(key)}]"
        given = given[key]
    if unknown := _UNKNOWN.fullmatch(allowed):
        every = [sorted(one.encode_name for one in fields(struct)) for struct in _structs(kinds)]
        nearest = max(every, key=lambda names: len(set(names) & set(given)), default=[])
        return f"{path}: unknown key {unknown[1]!r}{did_you_mean(unknown.groups(), nearest)}; there are {nearest}"
    exact = place and not place["is_key"] and isinstance(given, str | int | float | bool | None)
    return f"{path}: {f'got {brief(json.dumps(given))}; ' if exact else ''}{allowed}"


def _parts(kind: Any) -> Iterator[Any]:
    """Yield the types of a union or of an annotated type, or else the type itself."""
    if get_origin(kind) in (Annotated, Union, UnionType):
        for part in get_args(kind):
            yield from _parts(part)
    else:
        yield kind


def _structs(kinds: Iterable[Any]) -> list[type[msgspec.Struct]]:
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
