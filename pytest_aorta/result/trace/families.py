"""Groups kernels into families by their names, so that launches and versions of libraries can be compared. Pure.

Two kernels of one family differ in template arguments, tile sizes, architecture, alignment, pipeline stages, or a
suffix that a compiler generated. A generic kernel of ATen or CUTLASS gets its work as a template argument; its family
keeps the name of that argument in brackets, e.g. ``vectorized_elementwise_kernel[CUDAFunctor_add]``.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import fsum

from pytest_aorta.result.trace.profiled_steps import Collective, FamilyTime

MAX_FAMILIES = 64
# The sum of the shortest families if there are more than MAX_FAMILIES.
OTHER = "other"
MAX_NAME = 96
# Names are longer only if they have very long template arguments. They are cut before they are parsed.
_MAX_PARSED = 8192
_UNNAMED = "unnamed"

# Kernels of collectives by their names alone, for kernels that torch does not record as parts of a collective.
_COMMUNICATION = re.compile(
    r"""
    ^(_Z\d+)?nccl([A-Z]\w*)?Kernel                               # NCCL and RCCL
    | \bmscclKernel_ | \bmscclpp::                              # MSCCL and MSCCL++ in RCCL
    | \b(multimem|one_shot|two_shot)_\w*(reduce|gather)\w*      # symmetric memory, in torch and in Triton
    | \bc10d::(symmetric_memory|\w+_extension)::                # symmetric memory of torch, NCCL, NVSHMEM, rocSHMEM
    | ^(void\ )?(nvshmem|rocshmem)\w+                            # NVSHMEM and rocSHMEM
    | ^(void\ )?(barrier|sync|broadcast|fcollect|alltoall|reduce|rdxn|signal|put|get)\w*_on_stream_kernel
    | \bcross_device_reduce_\dstage                             # custom all-reduces of vLLM, SGLang and AITER
    | \b(one|two)[sS]hot\w*[aA]ll_?[rR]educe                     # custom all-reduces of torch and TensorRT-LLM
    | \bdeep_ep::int(er|ra)node(_ll)?::                          # DeepEP
    """,
    re.VERBOSE,
)
# A family whose name alone does not show that it communicates ends with the kind of the collective that it served.
_SERVED = re.compile(rf"\[({'|'.join(Collective)})\]$")
# Prefix of the families of gloo's work on CPU ranks.
GLOO = "gloo:"
# With the kind of the collective that a copy engine served.
_COPY = re.compile(r"^(Memcpy \w+|Memset)\b(\[\w+\])?")
_BRACKETED = re.compile(r"^([\w:]+)\[([\w:]+)\]$")
_ARCHITECTURES = {"volta", "turing", "ampere", "ada", "hopper", "blackwell"}
# Parts of a name between underscores that do not name the work.
_STRIPPED = re.compile(
    r"""
    \d[\dcde]*                       # numbers; Triton's specialization, as in 0d1d2de
    | [a-z]*\d+(x\d+)+[a-z]*         # tiles and clusters: 128x256, tilesize128x128x64, warpgroupsize1x1x1
    | \d+x                           # 5x, the generation of a template library
    | sm_?\d+[a-z]?                  # architecture
    | (n?stages?|pipe|pipeline)\d*   # pipeline stages
    | (align[a-d]?|ldg|vec)\d+       # alignment
    """,
    re.VERBOSE | re.IGNORECASE,
)
_HASH = re.compile(r"(?=.*\d)[0-9a-f]{8,}")
_DTYPES = re.compile(r"(b?f\d+)+")
_ARCHITECTURE_SUFFIX = re.compile(r"[sS][mM]\d{2,3}[a-z]?$")
# Schedules of a tile in the names of cuBLAS's nvjet kernels.
_NVJET_SCHEDULE = re.compile(r"[hv]|bz|coop[AB]?|\dcta")

_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|\{lambda\([^{}]*\)#\d+\}|<unnamed>::")
_GENERIC = re.compile(r"\w*elementwise\w*kernel\w*|reduce_kernel|multi_tensor_apply_kernel|Kernel2?|device_kernel")
_IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*\b(?!\s*::)")
# Template arguments that wrap or describe the work of a generic kernel.
_WRAPPERS = re.compile(
    r"""
    gpu_kernel_impl(_nocast)? | ReduceOp | func_wrapper_t | [AB]?(Unary|Binary)Functor | \w*Metadata | operator\w*
    | TensorIterator(Base)? | \w*OffsetCalculator | (Load|Store)With(out)?Cast | array | lambda | enable_sm\w+
    | void | bool | char | short | int | long | unsigned | signed | float | double | const | true | false | typename
    | u?int\d+_t | Half | BFloat16 | Float8\w* | complex | \w*bfloat16\w* | __half | half_t | ADAM_MODE | ul? | [A-Z]\w?
    """,
    re.VERBOSE,
)


@lru_cache(maxsize=65536)
def family_of(name: str) -> str:
    """Return the family of a kernel, copy or memset by its name; at most :data:`MAX_NAME` characters.

    The function is idempotent: the family of a family is the family itself.
    """
    name = name[:_MAX_PARSED]
    while True:
        family = _shortened(name)[:MAX_NAME]
        # Cutting a long name can leave a part that is stripped in turn.
        if len(family) >= len(name):
            return family
        name = family


def _shortened(name: str) -> str:
    if copy := _COPY.match(name):
        return copy[0]
    if bracketed := _BRACKETED.match(name):
        return _with_work(_stripped(bracketed[1]), _stripped(bracketed[2]))
    base, arguments = _split(_ANONYMOUS.sub("", name))
    qualifier, _, last = base.rpartition("::")
    family = _stripped(last)
    if family == "kernel" and qualifier:
        family = _stripped(f"{qualifier.rpartition('::')[2]}_{last}")
    if not _GENERIC.fullmatch(family):
        return family
    found = (word for word in _IDENTIFIER.findall(arguments) if not _WRAPPERS.fullmatch(word))
    return _with_work(family, _stripped(next(found, "")))


def _with_work(family: str, work: str) -> str:
    room = MAX_NAME - len(family) - 2
    return f"{family}[{work[:room]}]" if work != _UNNAMED and room > 0 else family


def _split(name: str) -> tuple[str, str]:
    """Return the qualified name of a demangled function, and its template arguments."""
    depth = 0
    base: list[str] = []
    arguments: list[str] = []
    for character in name:
        if character in "<(":
            if character == "(" and depth == 0 and "".join(base).strip():
                break
            depth += 1
        elif character in ">)":
            depth = max(0, depth - 1)
        elif depth == 0:
            base.append(character)
            continue
        arguments.append(character)
    # The return type precedes the name.
    words = "".join(base).split()
    return (words[-1] if words else ""), "".join(arguments)


def _stripped(name: str) -> str:
    """Return the parts of a name that name the work, joined by underscores."""
    parts = [part for part in re.split(r"_+|[^\w]+", name) if part]
    if parts and parts[0] == "Cijk":
        # Tensile's tile configuration reaches from the macro tile to the end.
        parts = parts[: next((i for i, part in enumerate(parts) if re.match(r"MT\d", part)), len(parts))]
    if parts and parts[0] == "nvjet":
        parts = [part for part in parts if not _NVJET_SCHEDULE.fullmatch(part)]
    kept = [_ARCHITECTURE_SUFFIX.sub("", part) for part in parts if not _is_stripped(part)]
    return "_".join(filter(None, kept)) or _UNNAMED


def _is_stripped(part: str) -> bool:
    is_hash = _HASH.fullmatch(part) and not _DTYPES.fullmatch(part)
    return bool(_STRIPPED.fullmatch(part) or part in _ARCHITECTURES or is_hash)


@lru_cache(maxsize=65536)
def communicates(name: str) -> bool:
    """Return True if the name of a kernel alone shows that it is one of a collective."""
    return bool(_COMMUNICATION.search(name))


def is_communication(family: str) -> bool:
    """Return True for a family of kernels of collectives, whose durations include waits for other ranks."""
    return family.startswith(GLOO) or communicates(family) or bool(_SERVED.search(family))


def serving(family: str, kind: Collective) -> str:
    """Return a family with the kind of the collective that it served; at most :data:`MAX_NAME` characters."""
    return f"{family[: MAX_NAME - len(kind) - 2]}[{kind}]"


def is_copy(family: str) -> bool:
    """Return True for a family of copies or memsets of the device's engines."""
    return bool(_COPY.match(family)) and not is_communication(family)


def is_compute(family: str) -> bool:
    """Return True for a family of kernels, or of operators on CPU ranks, that is neither communication nor copies."""
    return not is_communication(family) and not is_copy(family)


def family_times(durations_ns: Iterable[tuple[str, int]], num_steps: int) -> dict[str, FamilyTime]:
    """Return time and calls per step of each family, the longest first, from pairs of family and duration.

    The time is a sum of durations, so kernels that ran at once count in full. The result has at most
    :data:`MAX_FAMILIES` entries. If there are more families, the last entry, :data:`OTHER`, is the sum of the shortest.
    """
    each_ms = 1e6 * num_steps
    return _summed((family, FamilyTime(ns / each_ms, 1 / num_steps)) for family, ns in durations_ns)


def mean_over_ranks(ranks: Sequence[Mapping[str, FamilyTime]]) -> dict[str, FamilyTime]:
    """Return each family's mean over ranks, in the form of :func:`family_times`; a rank without the family counts 0."""
    return mean_over_steps([(rank, 1) for rank in ranks])


def mean_over_steps(parts: Sequence[tuple[Mapping[str, FamilyTime], int]]) -> dict[str, FamilyTime]:
    """Return each family's mean over all steps, from pairs of means and the number of their steps."""
    total = sum(num_steps for _, num_steps in parts)
    return _summed(
        (family, FamilyTime(time.ms * num_steps / total, time.calls * num_steps / total))
        for kernels, num_steps in parts
        for family, time in kernels.items()
    )


def _summed(times: Iterable[tuple[str, FamilyTime]]) -> dict[str, FamilyTime]:
    parts: dict[str, list[FamilyTime]] = defaultdict(list)
    for family, time in times:
        parts[family].append(time)
    # math.fsum makes the sum independent of the order of the kernels.
    found = {
        name: FamilyTime(fsum(one.ms for one in each), fsum(one.calls for one in each)) for name, each in parts.items()
    }
    order = sorted(found, key=lambda family: (family == OTHER, -found[family].ms, family))
    if len(order) <= MAX_FAMILIES:
        return {family: found[family] for family in order}
    kept, rest = order[: MAX_FAMILIES - 1], [found[family] for family in order[MAX_FAMILIES - 1 :]]
    return {family: found[family] for family in kept} | {
        OTHER: FamilyTime(fsum(time.ms for time in rest), fsum(time.calls for time in rest))
    }
