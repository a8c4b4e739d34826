"""Values that pytest and the ranks of a function exchange: JSON values, and tensors in the format of safetensors.

Nothing is pickled. torch is imported only to read a tensor, for a test that asks for one.
"""

import json
import sys
from functools import reduce
from importlib import import_module
from operator import getitem
from pathlib import Path
from typing import Any, TypeAlias

from pytest_aorta.common.errors import ResultError
from pytest_aorta.common.files import raised_as, read_bytes, write_bytes
from pytest_aorta.common.text import brief

MAX_VALUE_BYTES = 4 << 30
# The entry of the header for texts, of which one is the value without its tensors.
_TEXTS, _VALUE = "__metadata__", "value"
_LENGTH_BYTES = 8
# Names of dtypes: of safetensors, and of torch.
_DTYPES = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
}
_NAMES = {f"torch.{dtype}": name for name, dtype in _DTYPES.items()}
_Place: TypeAlias = tuple[str | int, ...]


def write_value(path: Path, value: object, name: str) -> None:
    """Write a value, whose tensors are named by their places in it; ``name`` is that of the value in an error.

    Raises:
        TypeError: A part is neither a JSON value nor a dense tensor.
        OSError: The file can't be written.
    """
    tensors: dict[_Place, Any] = {}
    header: dict[str, Any] = {_TEXTS: {_VALUE: json.dumps(_plain(value, name, (), tensors))}}
    data = bytearray()
    for place, tensor in tensors.items():
        flat = tensor.detach().cpu().reshape(-1).contiguous()
        begin, content = len(data), flat.view(import_module("torch").uint8).numpy().tobytes()
        data += content
        header[json.dumps(place)] = {
            "dtype": _NAMES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    write_bytes(path, len(text).to_bytes(_LENGTH_BYTES, "little") + text + data, durable=False)


def read_value(path: Path) -> Any:
    """Return the value that :func:`write_value` has written; tensors are on the CPU, and a tuple has become a list.

    Raises:
        ResultError: The file is unreadable, too large or damaged.
    """
    damages = (ValueError, TypeError, LookupError, RuntimeError)
    with raised_as(ResultError, "value invalid: "), raised_as(ResultError, f"value invalid: {path}: ", damages):
        content = memoryview(read_bytes(path, max_bytes=MAX_VALUE_BYTES))
        start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        header = json.loads(bytes(content[_LENGTH_BYTES:start]))
        found = [json.loads(header.pop(_TEXTS)[_VALUE])]
        for place, entry in header.items():
            keys, (begin, end) = [0, *json.loads(place)], entry["data_offsets"]
            holder: Any = reduce(getitem, keys[:-1], found)
            # A copy can be written to, and begins where each dtype can.
            data = bytearray(content[start + begin : start + end])
            holder[keys[-1]] = _tensor(data, _DTYPES[entry["dtype"]], entry["shape"])
    return found[0]


def _tensor(data: bytearray, dtype: str, shape: list[int]) -> Any:
    torch = import_module("torch")
    kind = getattr(torch, dtype)
    return torch.frombuffer(data, dtype=kind).reshape(shape) if data else torch.empty(shape, dtype=kind)


def _plain(value: Any, name: str, place: _Place, tensors: dict[_Place, Any]) -> Any:
    """Return a value with None in place of its tensors, which are added to ``tensors``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(part, name, (*place, number), tensors) for number, part in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(part, name, (*place, key), tensors) for key, part in value.items()}
    torch = sys.modules.get("torch")
    is_plain = torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)
    if is_plain and not value.is_sparse and str(value.dtype) in _NAMES:
        tensors[place] = value
        return None
    where = name + "".join(f"[{key!r}]" for key in place)
    kind = f"a tensor of {value.dtype}" if is_plain else f"of type {type(value).__name__}"
    raise TypeError(
        f"{where} is {brief(repr(value))}, {kind}; allowed are texts, numbers, None, lists, dictionaries with texts as "
        f"keys, and dense tensors of {', '.join(_DTYPES.values())}"
    )
