"""Hypothesis strategies of damaged documents: valid documents with a few random changes, and random bytes."""

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

# Values that often break readers, in addition to those that hypothesis draws by itself.
HOSTILE = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        3,
        2**31,
        2**63,
        2**64,
        2**1000,
        -(2**63),
        10**400,
        0.0,
        -0.0,
        0.5,
        1e308,
        -1e308,
        5e-324,
        float("nan"),
        float("inf"),
        "",
        " ",
        "\0",
        "a\0b",
        "\ud800",
        "\udcff",
        "\x1b[2J",
        "\n",
        "../../x",
        "/dev/zero",
        "cuda",
        "cpu",
        "tpu",
        "{steps}",
        "{run_dir}",
        "x" * 5000,
        "9" * 5000,
        "1e999",
        "nan",
        [],
        {},
        [[]],
        [{}],
        {"": None},
        {"a": {"b": {"c": 1}}},
        [0],
        [""],
        [None, 1, "a"],
        {"0": 0},
        {"step": 1},
        [1.0, 2.0],
        [[1.0], [2.0, 3.0]],
    ]
)
# Values are copied, since a later change of the same document may reach into a list that was drawn before.
JUNK = HOSTILE.map(copy.deepcopy) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a document, outermost first."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_of(inner, (*path, key))


def damaged(*documents: Any) -> st.SearchStrategy[Any]:
    """Return documents that differ from one of ``documents`` in one to three places."""

    @st.composite
    def strategy(draw: st.DrawFn) -> Any:
        document = copy.deepcopy(draw(st.sampled_from(documents)))
        for _ in range(draw(st.integers(1, 3))):
            path = draw(st.sampled_from(list(paths_of(document))))
            document = _changed(draw, document, path)
        return document

    return strategy()


def _changed(draw: st.DrawFn, document: Any, path: tuple[Any, ...]) -> Any:
    if not path:
        # The whole document is replaced only now and then, since every reader refuses that at once.
        return draw(JUNK) if draw(st.integers(0, 9)) == 0 else document
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    match draw(st.sampled_from(["replace", "delete", "insert", "repeat"])):
        case "replace":
            parent[path[-1]] = draw(JUNK)
        case "delete":
            del parent[path[-1]]
        case "insert" if isinstance(parent, dict):
            parent[draw(st.text(max_size=8))] = draw(JUNK)
        case "repeat" if isinstance(parent, list):
            parent.append(copy.deepcopy(parent[path[-1]]))
    return document


def damaged_json(*documents: Any) -> st.SearchStrategy[bytes]:
    """Return JSON files: of damaged documents, of valid documents with damaged bytes, and of random bytes."""
    texts = damaged(*documents).map(lambda document: json.dumps(document).encode())
    return texts | damaged_bytes(*(json.dumps(document).encode() for document in documents))


def damaged_bytes(*files: bytes) -> st.SearchStrategy[bytes]:
    """Return files that are cut short, changed in a few bytes, or random."""

    @st.composite
    def strategy(draw: st.DrawFn) -> bytes:
        data = bytearray(draw(st.sampled_from(files)))
        if draw(st.booleans()):
            del data[draw(st.integers(0, len(data))) :]
        for _ in range(draw(st.integers(0, 3))):
            position = draw(st.integers(0, len(data)))
            data[position : position + draw(st.integers(0, 4))] = draw(st.binary(max_size=6))
        return bytes(data)

    nested = st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"[" * 900 + b"]" * 900, b"- " * 3000, b"{" * 2000])
    return strategy() | st.binary(max_size=200) | nested
