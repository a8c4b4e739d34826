"""Activation checkpointing by available memory: an estimate of a step's peak, and the choice that fits a budget."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

from pytest_aorta.worker import without_data

from ..common.gradients import own_shard
from ..config import LlamaSettings, MemorySettings
from ..models import build_model
from ..models.common.attention import CUDNN, scores_bytes
from ..models.common.decoder import Block, Decoder
from ..models.common.moe import Experts
from .activation_checkpoint import LADDER, checkpointed, choices, describe
from .context import own_positions
from .expert import dispatch_tokens
from .parallel_dims import ParallelMesh
from .parallelize import parallelize

_FLOAT32 = torch.float32.itemsize
# cuBLAS allocates a workspace of 32 MiB for each stream that runs matrix products; two streams are assumed.
_MATMUL_WORKSPACE = 64 << 20


@dataclass(frozen=True)
class Gathering:
    """The way in which a workload compiles blocks and gathers their parameters.

    Attributes:
        is_compiled: whether blocks are compiled.
        num_ahead: number of units whose parameters are gathered while another unit runs.
        blocks_per_unit: largest number of blocks whose parameters are gathered together, as one unit.
        kept_by: kinds of checkpointing under which a block keeps its gathered parameters until its backward pass.
        accumulates_unsharded: whether micro-batches add up unsharded gradients, which only the last micro-batch
            reduces.
    """

    is_compiled: bool
    num_ahead: int = 1
    blocks_per_unit: int = 1
    kept_by: frozenset[str] = field(default_factory=frozenset)
    accumulates_unsharded: bool = False


@dataclass(frozen=True)
class Activations:
    """The bytes of one part of the model for one micro-batch.

    Attributes:
        kept: bytes that exist between the part's forward and its backward pass, its output included.
        working: largest number of further bytes while the part's forward or backward pass runs. They include the
            gradients of the part's input, of its output and of its unsharded parameters.
    """

    kept: int = 0
    working: int = 0


@dataclass(frozen=True)
class Unit:
    """The bytes of parameters: this rank's shards in float32, and gathered in the dtypes of compute and of reductions.

    Gradients have the same sizes.
    """

    shards: int = 0
    gathered: int = 0
    reduced: int = 0


@dataclass(frozen=True)
class StepMemory:
    """The parts of one rank's training step, in bytes.

    Attributes:
        embedding, block, head: the parameters of the embedding, of one block, and of the last norm with the output.
        blocks: the numbers of this rank's blocks.
        inputs: the activations that the first of these blocks reads.
        by_kind: the activations of one block under each kind of checkpointing.
        loss: the activations of the last norm, the output and the loss.
        in_flight: gathered parameters and unreduced gradients of blocks, besides those that blocks keep.
        kept_by: the kinds under which a block keeps its gathered parameters.
        num_in_flight: number of micro-batches whose activations exist at once.
        keeps_gradients: whether sharded gradients of earlier micro-batches exist.
        always: further memory that exists in the whole step.
    """

    embedding: Unit
    block: Unit
    head: Unit
    blocks: range
    inputs: int
    by_kind: Mapping[str, Activations]
    loss: Activations
    in_flight: int = 0
    kept_by: frozenset[str] = frozenset()
    num_in_flight: int = 1
    keeps_gradients: bool = False
    always: int = 0

    @property
    def shards(self) -> int:
        """Return the bytes of all parameters that this rank stores."""
        return self.embedding.shards + len(self.blocks) * self.block.shards + self.head.shards

    @property
    def persistent(self) -> int:
        """Return the bytes of parameters, AdamW's two moments, and all else that exists in the whole step."""
        return (4 if self.keeps_gradients else 3) * self.shards + self.always

    def peak(self, kinds: Sequence[str]) -> int:
        """Return the most bytes that exist at once if this rank's blocks have these kinds of checkpointing.

        The peak is the largest of four moments: the loss, each block's backward pass, the embedding's backward pass,
        and the optimizer's step. Backward frees the activations of one block after another and makes gradients.
        """
        kept = [self.by_kind[kind].kept + (self.block.gathered if kind in self.kept_by else 0) for kind in kinds]
        before = self.persistent + self.inputs + (self.num_in_flight - 1) * (self.inputs + sum(kept))
        moments = [before + sum(kept) + self.in_flight + 2 * self.head.gathered + self.loss.kept + self.loss.working]
        made = self.head.shards
        for number in reversed(range(len(kinds))):
            working = self.by_kind[kinds[number]].working + self.in_flight
            moments.append(before + sum(kept[: number + 1]) + working + self._new(made))
            made += self.block.shards
        moments.append(before + 2 * self.embedding.gathered + 2 * self.embedding.reduced + self._new(made))
        moments.append(self.persistent + self._new(self.shards))
        return max(moments)

    def _new(self, gradients: int) -> int:
        """Return the bytes of new gradients; 0 if they are added to earlier gradients."""
        return 0 if self.keeps_gradients else gradients


def estimate(settings: LlamaSettings, mesh: ParallelMesh, device: torch.device, gathering: Gathering) -> StepMemory:
    """Return the parts of this rank's step in bytes, without allocating memory on ``device``."""
    with torch.device("meta"):
        model = build_model(settings.model)
    parallelize(model, mesh, settings)
    if mesh.experts is not None:
        # The number of rows that a rank receives depends on data; on average it is the number that the rank sends.
        dispatch_tokens(model, mesh.experts, evenly=True)
    blocks = list(model.layers.children())
    embedding, block, head = (
        _unit(modules, mesh, settings) for modules in ([model.tok_embeddings], blocks[:1], [model.norm, model.output])
    )
    first, is_accumulated = int(next(iter(model.layers._modules))), settings.gradient_accumulation > 1
    positions = len(own_positions(settings.seq_len, mesh.degrees.context_parallel, mesh.context_rank))
    tokens = settings.batch_size * positions
    inputs = tokens // mesh.degrees.tensor_parallel * settings.model.dim * settings.param_dtype.itemsize
    # Where blocks keep gathered parameters, no further unit counts: FSDP2 copies parameters out of the buffer of an
    # all-gather, and frees the buffer before the next all-gather.
    num_units = 1 if len(gathering.kept_by) == len(LADDER) else 1 + gathering.num_ahead
    always = (settings.warmup + settings.steps) * settings.gradient_accumulation * tokens * 2 * torch.int64.itemsize
    num_in_flight = 1
    if mesh.pipeline is not None:
        # Under 1F1B, the first stage has the most micro-batches that wait for backward.
        num_in_flight = min(settings.gradient_accumulation, mesh.pipeline.size() - mesh.pipeline.get_local_rank())
        # Torch's buffers for activations and gradients from other stages, of all micro-batches.
        always += 2 * settings.gradient_accumulation * inputs
    if device.type == "cuda":
        # Attention's backward pass adds up the gradients of the queries in float32.
        num_heads = settings.model.n_heads // mesh.degrees.tensor_parallel
        always += _MATMUL_WORKSPACE + tokens * num_heads * settings.model.key_dim * _FLOAT32
        if settings.deterministic and settings.model.attention == CUDNN:
            always += scores_bytes(settings.batch_size, num_heads, positions)
    if is_accumulated and gathering.accumulates_unsharded:
        always += embedding.reduced + len(blocks) * block.reduced + head.reduced
    return StepMemory(
        embedding=embedding,
        block=block,
        head=head,
        blocks=range(first, first + len(blocks)),
        inputs=inputs,
        by_kind=_by_kind(model, settings, (positions, mesh.degrees.tensor_parallel), device, gathering.is_compiled),
        loss=_loss(model, settings, tokens, inputs),
        in_flight=gathering.blocks_per_unit * (num_units * block.gathered + block.reduced),
        kept_by=gathering.kept_by,
        num_in_flight=num_in_flight,
        keeps_gradients=is_accumulated and not gathering.accumulates_unsharded,
        always=always,
    )


def _unit(modules: Iterable[nn.Module], mesh: ParallelMesh, settings: LlamaSettings) -> Unit:
    shards = numel = 0
    for owner in (owner for module in modules for owner in module.modules()):
        axes = mesh.expert_axes if isinstance(owner, Experts) else mesh.dense_axes
        for parameter in owner.parameters(recurse=False):
            own = own_shard(parameter).numel()
            numel += own
            shards += -(-own // axes.shards.size()) * _FLOAT32
    return Unit(shards, numel * settings.param_dtype.itemsize, numel * settings.reduce_dtype.itemsize)


def _by_kind(
    model: Decoder, settings: LlamaSettings, lengths: tuple[int, int], device: torch.device, is_compiled: bool
) -> dict[str, Activations]:
    """Run a block of ``model`` forward and backward under each kind of checkpointing, on tensors without data.

    ``lengths`` are the positions of a sequence that this rank computes, and the ranks that split them between modules.
    """
    block, (positions, num_parts) = next(iter(model.layers.children())), lengths
    assert isinstance(block, Block)
    block.to(settings.param_dtype)
    measured: dict[str, Activations] = {}
    with without_data() as memory:
        block.to_empty(device=device)
        freqs_cis = settings.model.freqs_cis(torch.empty(positions, dtype=torch.int64, device=device))
        sizes = settings.batch_size, positions // num_parts, settings.model.dim
        x = torch.empty(sizes, dtype=settings.param_dtype, device=device, requires_grad=True)
        for kind in LADDER:
            block.checkpoint = checkpointed(kind)
            before = memory.peak = memory.current
            out = block(x, freqs_cis)
            kept = memory.current - before
            torch.autograd.grad(out, [x, *block.parameters()], torch.empty_like(out), allow_unused=True)
            measured[kind] = Activations(kept, memory.peak - before - kept)
            del out
    if is_compiled:
        # A compiler keeps less than an eager block: it recomputes what it can fuse, such as most of what elementwise
        # recomputes. Of the blocks that were measured, each kept at most a third of that.
        none, less = measured["none"], measured["elementwise"]
        measured["none"] = Activations(less.kept + (none.kept - less.kept) // 3, none.working)
        if not settings.model.num_experts:
            # The last product is added to the block's output in one kernel, so a compiled block keeps only the sum.
            for kind in ("elementwise", "selective"):
                measured[kind] = replace(measured[kind], kept=measured[kind].kept - x.nbytes)
    return measured


def _loss(model: Decoder, settings: LlamaSettings, tokens: int, inputs: int) -> Activations:
    """Return the activations of the last norm, the output and the loss; zero in a stage without them."""
    if isinstance(model.output, nn.Identity):
        return Activations()
    num_rows, dim = own_shard(model.output.weight).shape
    itemsize, norm = settings.param_dtype.itemsize, 4 * inputs
    if settings.loss_chunks:
        # Unfused operations on a chunk's logits make four float32 tensors of their size.
        copies = 0 if settings.compile_loss else 4 * _FLOAT32
        logits = -(-tokens // settings.loss_chunks) * num_rows * (2 * itemsize + copies)
        return Activations(norm + num_rows * dim * itemsize, logits + num_rows * dim * _FLOAT32)
    logits = tokens * settings.model.vocab_size
    size = logits * (itemsize if settings.compile_loss else _FLOAT32)
    # The outputs of a traced model outlive the loss in their own dtype.
    held = logits * itemsize if settings.holds_logits else 0
    return Activations(norm + size, held + (size if settings.compile_loss else 2 * size))


@dataclass(frozen=True)
class Decision:
    """The activation checkpointing of each block, its estimated peak, the largest of all ranks, and least budget."""

    kinds: tuple[str, ...]
    estimate: int
    budget: int

    def __str__(self) -> str:
        """Return the decision as a sentence."""
        return (
            f"activation_checkpointing: auto chose {describe(self.kinds)}; estimated {_gib(self.estimate)} of "
            f"{_gib(self.budget)} allowed"
        )


def own_budget(settings: MemorySettings, device: torch.device) -> int:
    """Return the bytes that the config allows this rank, at most those that other processes leave of its device.

    Raises:
        ValueError: CPU ranks share the memory of their host, and ``memory_budget_bytes`` is None.
    """
    allowed = settings.memory_budget_bytes
    if device.type == "cpu":
        if allowed is None:
            raise ValueError(
                "activation_checkpointing is auto and memory_budget_bytes is null: CPU ranks have no device whose "
                "memory memory_fraction could be a fraction of; give memory_budget_bytes"
            )
        return allowed
    free, total = torch.accelerator.get_memory_info(device)
    wanted = int(settings.memory_fraction * total) if allowed is None else allowed
    return min(wanted, free + torch.accelerator.memory_reserved(device))


def decide(step: StepMemory, num_blocks: int, budget: int, device: torch.device) -> Decision:
    """Return the least recomputation that fits the smallest budget of all ranks; collective over the world.

    Args:
        step: the memory of this rank's step.
        num_blocks: number of blocks of the whole model, which the stages of a pipeline divide among them.
        budget: the bytes that this rank is allowed.
        device: the device that collectives run on.

    Raises:
        ValueError: Even recomputing every block needs more than the budget.
    """
    candidates = choices(num_blocks)
    peaks = [step.peak([kinds[block] for block in step.blocks]) for kinds in candidates]
    most = torch.tensor([-budget, *peaks], dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    negative, *peaks = most.tolist()
    for kinds, peak in zip(candidates, peaks, strict=True):
        if peak <= -negative:
            return Decision(kinds, peak, -negative)
    raise ValueError(
        f"activation_checkpointing is auto, and even full recomputation of all {num_blocks} blocks needs an estimated "
        f"{_gib(peaks[-1])} on one rank, of {_gib(-negative)} allowed. On this rank, parameters, gradients and "
        f"optimizer state take {_gib(step.persistent)} of it. Use more ranks, a smaller batch_size or seq_len, "
        f"loss_chunks, or a larger memory_fraction or memory_budget_bytes"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.4g} GiB" if size >= 2**30 // 10 else f"{size / 2**20:.4g} MiB"
