"""Prints the differences of two checkpoints: tensor -> largest difference over the first tensor's largest value."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def tensors(folder: str) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole.pt"
        dcp_to_torch_save(folder, whole)
        loaded: dict[str, torch.Tensor] = torch.load(whole)
        return loaded


def main(first: str, second: str) -> None:
    ones, others = tensors(first), tensors(second)
    assert ones.keys() == others.keys()
    apart = {name: (one - others[name]).abs().max() / one.abs().max() for name, one in ones.items()}
    print(json.dumps({name: value.item() for name, value in apart.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
