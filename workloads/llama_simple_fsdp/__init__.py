"""Pre-training steps of a Llama-3 shaped model under compiler-based FSDP."""

from .workload import LlamaSimpleFsdpWorkload as LlamaSimpleFsdpWorkload
