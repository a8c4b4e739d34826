"""The norm of gradients that are DTensors of more than one mesh, as those of experts are not of the others' mesh."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


def by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each mesh, in the order in which the model names them."""
    meshes: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        meshes.setdefault(mesh, []).append(parameter)
    return list(meshes.values())


def total_norm(model: nn.Module) -> torch.Tensor:
    """The 2-norm of all gradients: of one mesh as a DTensor of it, of several as a plain tensor."""
    groups = [[p.grad for p in parameters if p.grad is not None] for parameters in by_mesh(model)]
    norms = [torch.nn.utils.get_total_norm(gradients) for gradients in groups]
    if len(norms) == 1:
        return norms[0]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([whole_norm(norm) for norm in norms]))
    return norm


def clip_gradients(model: nn.Module, max_norm: float, norm: torch.Tensor) -> None:
    """Scale all gradients so that their norm, which was ``norm``, is at most ``max_norm``."""
    for parameters in by_mesh(model):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, _on_mesh_of(parameters[0], norm))


def whole_norm(norm: torch.Tensor) -> torch.Tensor:
    """The norm over all ranks' shards, as a plain tensor."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _on_mesh_of(parameter: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """The norm as something that the parameter's gradient can be multiplied by."""
    if isinstance(norm, DTensor) or not isinstance(parameter, DTensor):
        return norm
    mesh = parameter.device_mesh
    return DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
