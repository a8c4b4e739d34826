"""Pre-training steps of a Llama-3 shaped model under compiler-based FSDP."""

from __future__ import annotations

from .workload import LlamaSimpleFsdpWorkload

__all__ = ["LlamaSimpleFsdpWorkload"]
