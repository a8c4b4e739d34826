"""Rotary positions (RoFormer, arXiv 2104.09864): pairs of features are turned by angles that grow with the position."""

import torch


def precompute_freqs_cis(positions: torch.Tensor, width: int, theta: float) -> torch.Tensor:
    """Return cosines and sines of every pair's angle at ``positions`` ``[n]``, float32 ``[2, n, width / 2]``.

    The angle of pair ``i`` at ``position`` is ``position * theta ** (-2 * i / width)``.
    """
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angles = torch.outer(positions.float(), theta**-exponents)
    return torch.stack((angles.cos(), angles.sin()))


def apply_rope(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of adjacent features of ``[..., seq_len, heads, width]`` by its angle, in float32.

    ``freqs_cis`` are cosines and sines ``[2, seq_len, width / 2]``, or complex numbers ``[seq_len, width / 2]``.
    One product of complex numbers takes less memory traffic than four of real ones, but inductor fuses only the latter.
    """
    pairs = x.float().unflatten(-1, (-1, 2))
    if freqs_cis.is_complex():
        turned = torch.view_as_complex(pairs) * freqs_cis.unsqueeze(-2)
        return torch.view_as_real(turned).flatten(-2).type_as(x)
    even, odd = pairs.unbind(-1)
    cos, sin = freqs_cis.unsqueeze(-2)
    # Both halves are rounded before they are joined, so that the joined tensor is written once, in the dtype of x.
    turned_even, turned_odd = (even * cos - odd * sin).type_as(x), (even * sin + odd * cos).type_as(x)
    return torch.stack((turned_even, turned_odd), dim=-1).flatten(-2)
