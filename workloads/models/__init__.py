"""Models by their config: Llama 3, and DeepSeek-V3 if attention is latent."""

from .common.decoder import Decoder
from .config import ModelConfig
from .deepseek_v3.model import LatentAttention
from .llama3.model import GroupedQueryAttention

__all__ = ["Decoder", "ModelConfig", "build_model"]


def build_model(config: ModelConfig) -> Decoder:
    """Return the model of ``config`` with uninitialized parameters, on the current default device."""
    return Decoder(config, LatentAttention if config.latent.kv_lora_rank else GroupedQueryAttention)
