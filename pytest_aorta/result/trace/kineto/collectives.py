"""The collectives that the events of a trace served. Pure."""

from __future__ import annotations

import re

from pytest_aorta.result.trace.kineto.events import Event
from pytest_aorta.result.trace.profiled_steps import Call, Collective

# Searched in the lower-case letters of a collective's or kernel's name, in this order.
_KINDS = {
    "reducescatter": Collective.REDUCE_SCATTER,
    "allgather": Collective.ALL_GATHER,
    "allreduce": Collective.ALL_REDUCE,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "send": Collective.SEND_RECV,
    "recv": Collective.SEND_RECV,
    # A gather of NVSHMEM, a custom all-reduce of vLLM, and the exchange of tokens of DeepEP.
    "fcollect": Collective.ALL_GATHER,
    "crossdevicereduce": Collective.ALL_REDUCE,
    "deepep": Collective.ALL_TO_ALL,
}
# Limits on what a call says of its group and size; the schema has the same limits.
_MAX_GROUP_TEXT = 160
_MAX_GROUP_SIZE = 10_000_000
_MAX_ELEMENTS = 1 << 56
# Bytes of an element by the name of its dtype in torch's records of collectives.
_ELEMENT_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Half": 2, "BFloat16": 2, "Short": 2, "Int": 4, "Float": 4, "Long": 8,
    "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
# Collectives on lists of tensors, by torch's names. The tensors may have unequal sizes, and torch records only the size
# of the rank's own.
_ON_LISTS = {"all_gather", "reduce_scatter"}


def collective_of(*names: str) -> Collective:
    """Return the kind of communication of the first name that reveals one, e.g. a kernel's name; else ``other``."""
    for name in names:
        letters = re.sub("[^a-z]", "", name.lower())
        if kind := next((kind for part, kind in _KINDS.items() if part in letters), None):
            return kind
    return Collective.OTHER


def kind_of(kernel: Event) -> Collective:
    """Return the collective that a kernel served: the requested one if torch recorded it, else by the kernel's name."""
    # RCCL's kernels have generic names, and an all-to-all consists of sends.
    return collective_of(str(kernel["args"].get("Collective name", "")), kernel["name"])


def call_of(kernel: Event) -> Call:
    """Return the call that a kernel served, as far as the trace has host events that show it."""
    args = kernel["args"]
    parts = [str(args[key]) for key in ("Process Group Name", "Process Group Ranks") if args.get(key) is not None]
    counts = [args[key] for key in ("In msg nelems", "Out msg nelems") if _is_count(args.get(key), 0)]
    dtype = str(args.get("dtype", ""))
    element_bytes = 1 if dtype.startswith("Float8") else _ELEMENT_BYTES.get(dtype)
    is_known = counts and element_bytes and args.get("Collective name") not in _ON_LISTS
    size = args.get("Group size")
    return Call(
        kind_of(kernel),
        " ".join(parts)[:_MAX_GROUP_TEXT],
        size if _is_count(size, 1) and size <= _MAX_GROUP_SIZE else None,
        max(counts) * element_bytes if is_known and element_bytes else None,
    )


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value < _MAX_ELEMENTS
