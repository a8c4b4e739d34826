"""The private interfaces and the bytecode of torch that the rank side uses; torch has nothing public in their place.

Each of the following goes when its replacement is in the oldest supported version of torch:

- ``profiler_enabled``: with a public way to ask whether a profiler of this thread runs;
- ``disable_dynamo``: with a ``torch.compiler.disable`` that does not import the compiler at once;
- tensors without data, modes of dispatch, the leaves of arguments, the arguments by a schema: with public names;
- ``TracingContext``: with a public way to ask whether a graph is being compiled, from below autograd;
- autograd's node and sequence number: with ``torch.utils._debug_mode``, once it names modules in backward;
- ``foreach_norm``: with a public name, as that of ``torch.nn.utils.get_total_norm`` is, but with one norm a tensor;
- the code of a module's call and of an optimizer's step, and names of functions on the stack: with hooks that tell
  which module, or which step of an optimizer, runs;
- ``makes_state_alone``: with a checkpoint that creates an optimizer's state without a step;
- ``dcp_saver``: with a hook around the saving of a distributed checkpoint;
- the registry of process groups, and their rendezvous: with a group that frees its last collective without the GIL,
  and with a default group that may meet twice (``groups.py``);
- ``FakeStore``, and the replaced functions of ``simulation.py``: with a public process group that exchanges nothing;
- names of the modules and parameters that wrap a user's, and a module's buffers: with public names;
- the iterator of a ``DataLoader``, and the state of an autocast: with a hook for each batch, and public attributes;
- counters and metrics of dynamo: with a public way to count compilations;
- the functions of functional collectives' operators: with the tensor of a wait in torch's profiles;
- ``skip_code``: with a public way to keep the compiler from functions that the interpreter calls, as to trace lines;
- ``cuda_sleep``: with a kernel that spins in the public API of each kind of device.
"""

import sys
from collections.abc import Callable, Collection, Mapping
from traceback import walk_stack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _current_autograd_node as current_autograd_node
from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch._compile import _disable_dynamo as disable_dynamo
from torch._guards import TracingContext
from torch._library.utils import zip_schema
from torch._ops import OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import _functional_collectives as functional_collectives
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseDataLoaderIter

__all__ = [
    "CALL_MODULE",
    "CALL_MODULE_NAME",
    "RUN_BACKWARD_NAME",
    "SAVE_STATE_DICT",
    "STEP_OPTIMIZER",
    "WRAPPERS",
    "BaseDataLoaderIter",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "TracingContext",
    "autocast_of",
    "buffers_of",
    "c10d",
    "cuda_sleep",
    "current_autograd_node",
    "dcp_saver",
    "disable_current_modes",
    "disable_dynamo",
    "dynamo_utils",
    "fake_store",
    "foreach_norm",
    "functional_collectives",
    "functional_operators",
    "get_proxy_mode",
    "is_flat_parameter",
    "is_traceable_wrapper_subclass_type",
    "keep_from_compiler",
    "makes_state_alone",
    "profiler_enabled",
    "sampler_of",
    "sequence_number",
    "tree_leaves",
    "uncompiled",
    "wait_tensor",
    "zip_schema",
]

c10d: Any = dist.distributed_c10d
foreach_norm = torch._foreach_norm
cuda_sleep = torch.cuda._sleep
wait_tensor = torch.ops._c10d_functional.wait_tensor
# The code that calls a module, and the code that calls an optimizer's step between its hooks.
CALL_MODULE = nn.Module._call_impl.__code__
STEP_OPTIMIZER = Optimizer.profile_hook_step(len).__code__
# Functions of torch that are on the Python stack during a module's call and during a backward pass.
CALL_MODULE_NAME, RUN_BACKWARD_NAME = "_call_impl", "_engine_run_backward"
# The function by which distributed checkpoints are saved, also in the background.
SAVE_STATE_DICT = "_save_state_dict"
# Names of modules with which torch wraps others: torch.compile, activation checkpointing and FSDP1.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def makes_state_alone(optimizer: Optimizer) -> bool:
    """Return whether the step that begins is one of torch's checkpoints, which creates state and changes no weight."""
    checkpoints = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if optimizer.state or checkpoints is None:
        return False
    code = checkpoints._init_optim_state.__code__
    return any(frame.f_code is code for frame, _ in walk_stack(sys._getframe()))


def dcp_saver() -> Any:
    """Return the module that saves distributed checkpoints; None if nothing has imported it."""
    return sys.modules.get("torch.distributed.checkpoint.state_dict_saver")


def fake_store() -> Any:
    """Return a store of the process group ``fake``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def sequence_number() -> int:
    """Return the number of the last node that autograd made on this thread in forward."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


def dynamo_utils() -> Any:
    """Return the module with dynamo's counters; None if nothing has imported it, since the import takes seconds."""
    return sys.modules.get("torch._dynamo.utils")


def keep_from_compiler(*functions: Callable[..., object]) -> None:
    """Have frames of these functions run as they are, also where the compiler would trace them."""
    if (dynamo := sys.modules.get("torch._dynamo.eval_frame")) is not None:
        for function in functions:
            dynamo.skip_code(function.__code__)


def functional_operators() -> list[Any]:
    """Return the operators of functional collectives and of the wait for them, those of one overload too."""
    names = {str(name).partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    found = []
    for namespace, _, name in (one.partition("::") for one in names if one.startswith("_c10d_functional")):
        packet = getattr(getattr(torch.ops, namespace), name)
        found += [packet, *(getattr(packet, overload) for overload in packet.overloads())]
    return found


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` has compiled, or any other module itself."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def is_flat_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter of FSDP1, of several parameters joined."""
    return getattr(tensor, "_is_flat_param", False)


def autocast_of(entered: torch.autocast) -> str:
    """Return the type of an autocast, such as ``bfloat16``, or ``off``."""
    return str(entered.fast_dtype).removeprefix("torch.") if entered._enabled else "off"


def sampler_of(iterator: object) -> object:
    """Return what a loader's iterator draws indices from, which is the same in each epoch."""
    return getattr(iterator, "_index_sampler", iterator)


def buffers_of(module: nn.Module) -> tuple[Mapping[str, torch.Tensor | None], Collection[str]]:
    """Return a module's own mapping of buffers, without the module, and the names of those that are not persistent."""
    return module._buffers, getattr(module, "_non_persistent_buffers_set", ())
