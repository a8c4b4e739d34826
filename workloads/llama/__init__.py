"""What the Llama workloads share: the model, its data, planted faults and the training loop."""

from __future__ import annotations

from .model import Llama, LlamaConfig
from .training import LlamaWorkload

__all__ = ["Llama", "LlamaConfig", "LlamaWorkload"]
