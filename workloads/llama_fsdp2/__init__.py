"""Pre-training steps of a Llama-3 shaped model under eager FSDP2."""

from .workload import LlamaFsdp2Workload as LlamaFsdp2Workload
