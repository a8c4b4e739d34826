"""Quality and speed of the weight hash: its sums beside plain sums of the same memory, as markdown tables.

Run: python -m benchmarks.hashing.weight_hash [--device cuda] [--threads N] [--mib N] [--rounds N] [--quality]

On a device, its bits are first compared with the CPU's. Bandwidths are measured in alternation; each ratio is of one
round, with its range over rounds.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from statistics import median

import torch

from pytest_aorta.worker.layout import Axis, Grid
from pytest_aorta.worker.weight_hash import tensor_sums

WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.int8}
DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]
NUM_TRIALS = 400


def whole(numel: int) -> Grid:
    """Return the grid of a tensor that is held in full."""
    return Grid.of(Axis(numel, range(numel)))


def seconds(call: Callable[[], object], device: str) -> float:
    """Return the seconds of one call, on CUDA between two events."""
    if device == "cpu":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def compare_bits(device: str) -> None:
    """Check that runs and blocks of all dtypes have the bits of the CPU on ``device``, and print their number.

    Raises:
        AssertionError: A sum differs.
    """
    runs = [(0, 0), (1, 2), (1023, 1), (70_000, 1000), (2**21 + 5, 2**33 + 17)]
    grids = [Grid.of(Axis(2**40, range(begin, begin + count))) for count, begin in runs]
    grids += [Grid.of(Axis(9000, range(7, 4007)), Axis(2048, range(3, 3 + width))) for width in (1, 64, 512)]
    grids += [Grid.of(Axis(900, torch.arange(0, 900, 3)), Axis(64, range(64)), Axis(300, range(100, 200)))]
    for grid, dtype in itertools.product(grids, DTYPES):
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (grid.numel * dtype.itemsize,), dtype=torch.uint8)
        found, expected = (tensor_sums(raw.to(place).view(dtype), grid).tolist() for place in (device, "cpu"))
        assert found == expected, f"{dtype} at {grid}: {found} on {device}, {expected} on the CPU"
    print(f"{len(grids) * len(DTYPES)} blocks of {len(DTYPES)} dtypes have the same bits on {device} and on the CPU\n")


def calls_of(tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the calls that are compared on one tensor."""
    grid, word = whole(tensor.numel()), WORDS[tensor.dtype]
    calls: dict[str, Callable[[], object]] = {"hash": lambda: tensor_sums(tensor, grid)}
    if tensor.dtype.itemsize > 1:
        calls["x.sum()"] = lambda: tensor.sum()
    calls[f"x.view({str(word)[6:]}).sum()"] = lambda: tensor.view(word).sum()
    calls["x.view(int).sum()"] = lambda: tensor.view(torch.int64).sum()
    return calls


def print_bandwidths(args: argparse.Namespace) -> None:
    """Print one row per dtype and call: GB/s, and the hash's bandwidth relative to the call's."""
    print("| dtype | call | GB/s | hash / call (range) |\n| --- | --- | --- | --- |")
    for dtype in WORDS:
        numel = args.mib * 2**20 // dtype.itemsize
        tensor = torch.randint(0, 255, (numel * dtype.itemsize,), dtype=torch.uint8, device=args.device).view(dtype)
        calls = calls_of(tensor)
        for call in calls.values():
            call()
        times = [{name: seconds(call, args.device) for name, call in calls.items()} for _ in range(args.rounds)]
        for name in calls:
            speed = median(args.mib * 2**20 / row[name] / 1e9 for row in times)
            ratios = sorted(row[name] / row["hash"] for row in times)
            spread = f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            print(f"| {str(dtype)[6:]} | `{name}` | {speed:.2f} | {spread} |")


def lanes_of(word: int, index: int) -> list[int]:
    """Return both lanes' sums, modulo 2**64, of one word at one index."""
    grid = Grid.of(Axis(2**62, range(index, index + 1)))
    return [value % 2**64 for value in tensor_sums(torch.tensor([word], dtype=torch.int32), grid).tolist()]


def print_avalanche() -> None:
    """Print how many of a lane's bits one flipped bit of the word or of the index flips."""
    generator = torch.Generator().manual_seed(0)
    print("| flipped | lane | share of bits flipped | least and most over flipped bits |\n| --- | --- | --- | --- |")
    for kind, width in (("word", 32), ("index", 40)):
        shares: list[list[float]] = [[], []]
        for bit in range(width):
            counts = [0, 0]
            for _ in range(NUM_TRIALS // 8):
                word = int(torch.randint(-(2**31), 2**31, (), generator=generator))
                index = int(torch.randint(0, 2**40, (), generator=generator))
                other = ((word & 0xFFFFFFFF) ^ 1 << bit, index) if kind == "word" else (word, index ^ 1 << bit)
                signed = other[0] - 2**32 if other[0] >= 2**31 else other[0]
                pair = zip(lanes_of(word, index), lanes_of(signed, other[1]), strict=True)
                counts = [count + (a ^ b).bit_count() for count, (a, b) in zip(counts, pair, strict=True)]
            for lane, count in enumerate(counts):
                shares[lane].append(count / (NUM_TRIALS // 8) / 64)
        for lane, share in enumerate(shares):
            print(f"| {kind} | {lane} | {sum(share) / width:.4f} | {min(share):.3f}, {max(share):.3f} |")


def changes(base: torch.Tensor, generator: torch.Generator) -> dict[str, Callable[[], torch.Tensor]]:
    """Return structured changes of an int32 matrix, each at a random position."""

    def pick(size: int) -> list[int]:
        return torch.randperm(size, generator=generator)[:2].tolist()

    def one_element() -> torch.Tensor:
        changed = base.clone()
        changed.view(-1)[pick(base.numel())[0]] ^= 1 << pick(32)[0]
        return changed

    def two_signs() -> torch.Tensor:
        changed = base.clone()
        changed.view(-1)[pick(base.numel())] ^= -(2**31)
        return changed

    def swapped(dim: int) -> torch.Tensor:
        order = torch.arange(base.shape[dim])
        first, second = pick(len(order))
        order[[first, second]] = order[[second, first]]
        return base.index_select(dim, order)

    def block() -> torch.Tensor:
        # A 2 x 2 exchange, whose differences cancel in any sum of row and column terms.
        changed, rows, columns = base.clone(), pick(base.shape[0]), pick(base.shape[1])
        for row, sign in zip(rows, (1, -1), strict=True):
            changed[row, columns] += sign * torch.tensor([1, -1], dtype=torch.int32)
        return changed

    return {
        "one bit of one element": one_element,
        "two signs": two_signs,
        "two rows swapped": lambda: swapped(0),
        "two columns swapped": lambda: swapped(1),
        "+1 -1 / -1 +1 on a 2 x 2 block": block,
    }


def print_collisions() -> None:
    """Print collisions among trials of changes, of whole lanes and of 16 of their bits, as a check."""
    generator = torch.Generator().manual_seed(1)
    print("| change | base | distinct tensors | equal lane 0, 1 | pairs equal in 16 high bits, expected |")
    print("| --- | --- | --- | --- | --- |")
    constant = torch.full((256, 2048), 0x3F800000, dtype=torch.int32)
    ramp = torch.arange(constant.numel(), dtype=torch.int32).view_as(constant)
    for base_name, base in (("constant", constant), ("ramp", ramp)):
        for name, change in changes(base, generator).items():
            tensors = {tensor.numpy().tobytes(): tensor for tensor in (change() for _ in range(NUM_TRIALS))}
            sums = [tensor_sums(tensor, whole(base.numel())).tolist() for tensor in tensors.values()]
            lanes = list(zip(*sums, strict=True))
            high = [value >> 48 for value in lanes[0]]
            near = sum(a == b for a, b in itertools.combinations(high, 2))
            expected = len(high) * (len(high) - 1) / 2 / 2**16
            equal = ", ".join(str(len(lane) - len(set(lane))) for lane in lanes)
            print(f"| {name} | {base_name} | {len(tensors)} | {equal} | {near}, {expected:.1f} |")


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--mib", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quality", action="store_true")
    args = parser.parse_args()
    args.mib = args.mib or (1024 if args.device == "cuda" else 64)
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.device}, {args.threads} threads, {args.mib} MiB, {args.rounds} rounds\n")
    if args.device != "cpu":
        compare_bits(args.device)
    print_bandwidths(args)
    if args.quality:
        print()
        print_avalanche()
        print()
        print_collisions()


if __name__ == "__main__":
    main()
