"""AdamW's update of each block beside the forward pass of the blocks before it, on a stream of its own.

Run: python -m benchmarks.training.adamw_beside_forward, on one GPU with 40 GiB. Weights are those of 8 blocks of Llama
3 8B in bfloat16, with 8192 tokens; parameters, gradients and averages are in float32. The forward pass of a block waits
for the update of its parameters. The update is the workloads' compiled one, or a Triton kernel of a number of programs,
which leaves multiprocessors to matrix products.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from aorta_workloads.common.adamw import _kernel
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BLOCKS, TOKENS, DIM, HIDDEN, KV_DIM, HEAD_DIM = 8, 8192, 4096, 14336, 1024, 128
SHAPES = [(DIM, DIM), (KV_DIM, DIM), (KV_DIM, DIM), (DIM, DIM), (HIDDEN, DIM), (HIDDEN, DIM), (DIM, HIDDEN)]
SIZE = sum(rows * columns for rows, columns in SHAPES)
REPEATS = 12
Update = Callable[[list[torch.Tensor]], Any]


@triton.jit
def _adamw(parameter, gradient, average, square_average, size, BLOCK: tl.constexpr):
    for first in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        own = first + tl.arange(0, BLOCK)
        mask = own < size
        g = tl.load(gradient + own, mask)
        m = tl.load(average + own, mask)
        v = tl.load(square_average + own, mask) * 0.95 + g * g * 0.05
        m += (g - m) * 0.1
        p = tl.load(parameter + own, mask) * 0.9999 - 1e-4 * m / (tl.sqrt(v) + 1e-8)
        tl.store(parameter + own, p, mask)
        tl.store(average + own, m, mask)
        tl.store(square_average + own, v, mask)


def triton_update(num_programs: int) -> Update:
    """Return an update by a kernel of ``num_programs`` programs."""
    return lambda state: _adamw[(num_programs,)](*state, SIZE, BLOCK=4096, num_warps=8)


def compiled_update() -> Update:
    """Return the update of the workloads' compiled AdamW."""
    numbers = [torch.tensor(number) for number in (0.1, 0.95, 0.9999, 1e-4, 1.0, 1e-8)]
    factor = torch.ones((), device="cuda")
    return lambda state: _kernel()(*state, factor, *numbers)


def forward(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Return a block's output ``[tokens, dim]``, without norms and rotary embedding."""
    queries, keys, values = ((x @ weight.t()).view(1, TOKENS, -1, HEAD_DIM).transpose(1, 2) for weight in weights[:3])
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        heads = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    x = heads.transpose(1, 2).reshape(TOKENS, DIM) @ weights[3].t()
    return (F.silu(x @ weights[4].t()) * (x @ weights[5].t())) @ weights[6].t()


def median_ms(run: Callable[[], None]) -> float:
    """Return the median time of a run in milliseconds."""
    times: list[float] = []
    for _ in range(3 + REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


@torch.no_grad()
def main() -> None:
    """Print the times of both parts alone, one after the other, and beside each other."""
    states = [[torch.full((SIZE,), 0.01, device="cuda") for _ in range(4)] for _ in range(BLOCKS)]
    bfloat16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [[torch.randn(shape, **bfloat16) * 0.02 for shape in SHAPES] for _ in range(BLOCKS)]
    inputs = torch.randn(TOKENS, DIM, **bfloat16)

    def run(update: Update | None, side: torch.cuda.Stream | None, *, has_forward: bool = True) -> None:
        current, x = torch.cuda.current_stream(), inputs
        stream = side or current
        stream.wait_stream(current)
        updated: list[torch.cuda.Event] = []
        with torch.cuda.stream(stream):
            for state in states if update else ():
                update(state)
                updated.append(stream.record_event())
        for number in range(BLOCKS if has_forward else 0):
            if updated:
                current.wait_event(updated[number])
            x = forward(x, weights[number])
        current.wait_stream(stream)

    print(f"{torch.cuda.get_device_name()}\n| update | alone | after each other | low priority | high priority |")
    print(f"forward alone: {median_ms(lambda: run(None, None)):.1f} ms")
    streams = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-3)
    updates = {"compiled": compiled_update()} | {f"{n} programs": triton_update(n) for n in (16, 48, 66, 132)}
    for name, update in updates.items():
        alone = median_ms(lambda update=update: run(update, None, has_forward=False))
        times = [median_ms(lambda update=update, side=side: run(update, side)) for side in (None, *streams)]
        print(" | ".join(["", name, *(f"{ms:.1f} ms" for ms in (alone, *times)), ""]).strip())


if __name__ == "__main__":
    main()
