"""The code that the Llama workloads share: model, data, planted faults and training loop."""

from __future__ import annotations

from .model.decoder import Llama, LlamaConfig
from .training import LlamaWorkload

__all__ = ["Llama", "LlamaConfig", "LlamaWorkload"]
