"""Gradients as DTensors of several meshes, as those of experts lie on a mesh of their own, or as one message."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


def by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters of each mesh, in the order in which the model names them; plain ones form a group too."""
    meshes: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        meshes.setdefault(mesh, []).append(parameter)
    return list(meshes.values())


def total_norm(model: nn.Module) -> torch.Tensor:
    """Return the 2-norm of all gradients: a DTensor if all lie on one mesh, a plain tensor for several meshes."""
    groups = [[p.grad for p in parameters if p.grad is not None] for parameters in by_mesh(model)]
    norms = [torch.nn.utils.get_total_norm(gradients) for gradients in groups]
    if len(norms) == 1:
        return norms[0]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([whole_norm(norm) for norm in norms]))
    return norm


def clip_gradients(model: nn.Module, max_norm: float, norm: torch.Tensor) -> None:
    """Scale all gradients so that their norm, given as ``norm``, becomes at most ``max_norm``."""
    for parameters in by_mesh(model):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, _on_mesh_of(parameters[0], norm))


def clip_factor(max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    """Return the factor by which :func:`clip_gradients` scales gradients, as a plain tensor."""
    return (max_norm / (whole_norm(norm) + 1e-6)).clamp(max=1.0)


def fill_gradients(parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy the parts of ``flat``, one after another, into the gradients of ``parameters``."""
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(part.view_as(parameter))


def own_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_norm(norm: torch.Tensor) -> torch.Tensor:
    """Return the norm over all ranks' shards as a plain tensor."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _on_mesh_of(parameter: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Return ``norm`` as a tensor that the gradient of ``parameter`` can be multiplied by."""
    if isinstance(norm, DTensor) or not isinstance(parameter, DTensor):
        return norm
    mesh = parameter.device_mesh
    return DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
