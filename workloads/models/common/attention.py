"""Causal attention by one named kernel, which is chosen in setup() and not replaced by another during a run."""

import functools
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right

from ...common.torch_private import FakeTensorMode
from .flex import MIN_HEAD_DIM, flex_attention

aten = torch.ops.aten
AUTO, CUDNN, FLEX = "auto", "cudnn", "flex"
_TORCH_KERNELS = {
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
KERNELS = (*_TORCH_KERNELS, FLEX)
# The fastest first, on an H200. cuDNN has a kernel for the plain causal mask only; other masks would be stored whole.
_FASTEST = (CUDNN, "flash", "efficient", "math")
_FASTEST_DETERMINISTIC = (CUDNN, FLEX, "flash", "efficient", "math")
# The largest gradients of scores with which ``auto`` takes cuDNN in a deterministic run.
_MAX_SCORES_BYTES = 5 << 30


@dataclass(frozen=True)
class SDPA:
    """Causal attention within ``[batch, heads, seq_len, head_dim]``, in which the last query attends to all keys.

    Keys and values may have fewer heads than queries, and more positions. ``kernel`` is one of ``KERNELS``.
    """

    kernel: str

    def mask(self, num_queries: int, num_keys: int) -> CausalBias | None:
        """Return the mask for calls with these lengths; it is made beforehand, because a graph can't make it."""
        return None if self.kernel == FLEX or num_queries == num_keys else causal_lower_right(num_queries, num_keys)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: CausalBias | None = None
    ) -> torch.Tensor:
        """Return the output, of the shape of ``q``; ``mask`` is the result of :meth:`mask` for these lengths."""
        if self.kernel == FLEX:
            out: torch.Tensor = flex_attention(q, k, v)[0]
            return out
        if self.kernel == CUDNN and mask is None and torch.are_deterministic_algorithms_enabled():
            # The public function refuses cuDNN in this mode, whatever serves the operator.
            served: torch.Tensor = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, is_causal=True)[0]
            return served
        with sdpa_kernel(_TORCH_KERNELS[self.kernel]):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)


@dataclass(frozen=True)
class AttentionInputs:
    """The tensors that one rank's attention takes; ``num_keys`` has the length of each call's keys and values."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    num_queries: int
    num_keys: tuple[int, ...]
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def is_square(self) -> bool:
        """Return whether there are as many keys as queries, as without context parallelism."""
        return self.num_keys == (self.num_queries,)

    def make(self, num_keys: int) -> list[torch.Tensor]:
        """Return queries, keys and values of zeros that need gradients."""
        sizes = (self.num_heads, self.num_queries), (self.num_kv_heads, num_keys), (self.num_kv_heads, num_keys)
        empty = torch.zeros(0, dtype=self.dtype, device=self.device)
        return [empty.new_zeros((self.batch_size, *size, self.head_dim), requires_grad=True) for size in sizes]


def scores_bytes(batch_size: int, num_heads: int, num_positions: int) -> int:
    """Return the bytes that cuDNN's deterministic backward pass needs for a gradient of each score, in two bytes."""
    return 2 * batch_size * num_heads * num_positions**2


def choose_kernel(asked: str, inputs: AttentionInputs, *, deterministic: bool) -> str:
    """Return the kernel of ``KERNELS`` that is to run: the one asked for, or with ``auto`` the first that runs here.

    ``auto`` takes cuDNN's kernel or FlexAttention in a deterministic run on CUDA, where torch's other deterministic
    kernels are slow, and else torch's fastest. On CPU that is the flash kernel in both modes. Each candidate runs
    forward and backward once.

    Raises:
        ValueError: The kernel that is asked for can't run; the message says why and names the kernels that can.
    """
    candidates: Sequence[str] = (asked,)
    if asked == AUTO:
        fastest = _FASTEST_DETERMINISTIC if deterministic else _FASTEST
        stored = scores_bytes(inputs.batch_size, inputs.num_heads, inputs.num_queries) if deterministic else 0
        on_gpu = fastest if inputs.is_square and stored <= _MAX_SCORES_BYTES else fastest[1:]
        candidates = ("flash", "math") if inputs.device.type == "cpu" else on_gpu
    refusals = {}
    for kernel in candidates:
        if (refusal := _refusal(kernel, inputs)) is None:
            return kernel
        refusals[kernel] = refusal
    allowed = [kernel for kernel in KERNELS if kernel not in refusals and _refusal(kernel, inputs) is None]
    mode = "deterministic" if deterministic else "not deterministic"
    reasons = "; ".join(f"{kernel}: {reason}" for kernel, reason in refusals.items())
    raise ValueError(
        f"attention is {asked!r}, which can't run on {inputs.device.type} ({mode}, {inputs.dtype}): {reasons}. "
        f"Allowed here are {', '.join([AUTO, *allowed])}"
    )


def _refusal(kernel: str, inputs: AttentionInputs) -> str | None:
    """Return why ``kernel`` can't run forward and backward on such tensors, or None if it can."""
    if kernel == "math":  # accepts everything; a trial run would store all scores
        return None
    if kernel == FLEX and inputs.device.type == "cuda" and inputs.head_dim < MIN_HEAD_DIM:
        return f"heads have {inputs.head_dim} features, and FlexAttention takes at least {MIN_HEAD_DIM}"
    # On CPU, the shapes decide, and data of a large model takes minutes of a core. A mask has to have data.
    without_data = FakeTensorMode() if inputs.device.type == "cpu" and inputs.is_square else nullcontext()
    with warnings.catch_warnings(record=True) as seen, without_data:
        warnings.simplefilter("always")
        if kernel == CUDNN and torch.are_deterministic_algorithms_enabled() and not has_deterministic_cudnn():
            return "its backward pass is deterministic only with the package nvidia-cudnn-frontend, from 1.32 on"
        try:
            for num_keys in inputs.num_keys:
                attend = SDPA(kernel)
                q, k, v = inputs.make(num_keys)
                attend(q, k, v, attend.mask(inputs.num_queries, num_keys)).sum().backward()
        except Exception as error:  # noqa: BLE001 - a package's kernel has errors of its own
            # Torch warns about the reason, and also about each kernel that was not asked for.
            warned = [str(warning.message).splitlines()[0] for warning in seen]
            reasons = [reason for reason in warned if "disabled" not in reason and "not used because" not in reason]
            return "; ".join([(str(error) or repr(error)).splitlines()[0], *dict.fromkeys(reasons)])
    return None


@functools.cache
def has_deterministic_cudnn() -> bool:
    """Serve torch's cuDNN kernels by nvidia-cudnn-frontend, which has a deterministic backward pass, if installed."""
    try:
        from cudnn.torch import install
    except ImportError:
        return False
    install()
    return True
