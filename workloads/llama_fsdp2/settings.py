"""The config of ``llama_fsdp2`` as typed values."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..common.rules import Rule
from ..config import LlamaSettings
from ..distributed import fsdp2


@dataclass(frozen=True)
class LlamaFsdp2Settings(LlamaSettings):
    """The keys of ``llama_fsdp2``."""

    reshard_after_forward: bool
    all_gather: str
    forward_prefetch: int
    backward_prefetch: int
    reduce_every_micro_batch: bool
    compile_blocks: bool

    @property
    def reduces_every_micro_batch(self) -> bool:
        """Return the value of ``reduce_every_micro_batch``."""
        return self.reduce_every_micro_batch

    @property
    def fuses_blocks(self) -> bool:
        """Return whether inductor compiles blocks."""
        return self.compile_blocks

    @property
    def uses_symmetric_memory(self) -> bool:
        """Return whether ranks map memory of each other's GPUs."""
        return super().uses_symmetric_memory or self.all_gather != fsdp2.DEFAULT

    def prepare_environment(self) -> None:
        """Set the variables that libraries read when the process group is made."""
        super().prepare_environment()
        if self.all_gather == fsdp2.COPY_ENGINE:
            fsdp2.use_copy_engines()

    def rules(self, device: str, ranks: int) -> Iterator[Rule]:
        """Yield the combinations of keys that a launch of ``ranks`` on ``device`` refuses."""
        yield from super().rules(device, ranks)
        degrees = self.degrees
        yield (
            "pipeline_parallel_schedule reshard_after_forward reduce_every_micro_batch compile_blocks",
            (
                self.is_zero_bubble
                and (self.reshard_after_forward or self.reduce_every_micro_batch or self.compile_blocks)
            ),
            "torch divides each backward pass in autograd, with parameters that stay gathered; set all three to false",
        )
        yield (
            "async_tensor_parallel compile_blocks",
            self.async_tensor_parallel and not self.compile_blocks,
            "inductor divides products and their collectives; set compile_blocks",
        )
        yield (
            "async_tensor_parallel all_gather",
            self.async_tensor_parallel and self.all_gather != "default",
            "a process has one backend of symmetric memory, and the two need different ones; use one of the two",
        )
        yield (
            "expert_parallel_degree all_gather",
            degrees.expert_parallel_degree > 1 and self.all_gather != "default",
            "experts are gathered over ranks of their own, which have no symmetric memory; use default",
        )
        yield (
            "all_gather device",
            self.all_gather != "default" and device != "cuda",
            "symmetric memory is that of CUDA devices",
        )
