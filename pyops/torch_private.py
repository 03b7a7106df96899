"""Every private name of torch that pyops uses, behind a name that says what it is for.

Checked against torch 2.11.0 and 2.13.0. A new version of torch may take any of them away: this is
the file to read then, and tests/test_torch_private.py says which still do what they are used for.
Private names that need no wrapper, `torch._foreach_*` for one, are listed there with their reasons.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    "NO_TORCH_FUNCTION",
    "TorchDispatchMode",
    "after_backward",
    "all_op_names",
    "another_connection",
    "assert_async",
    "backend_name",
    "call_instead",
    "constant_in_graphs",
    "default_store",
    "disable_dynamo",
    "finished_work",
    "forward_pre_hooks",
    "graph_task_id",
    "group_store",
    "group_timeout",
    "has_backend",
    "has_dispatch_kernel",
    "has_global_hooks",
    "has_hooks",
    "in_autograd_node",
    "in_backward",
    "int8_matmul",
    "is_called_plainly",
    "is_traceable_wrapper_subclass",
    "local_shape_and_offset",
    "local_tensor",
    "parse_to",
    "post_accumulate_grad_hooks",
    "preserve_version_counter",
    "set_group_timeout",
    "set_timeout",
    "storage_address",
    "storage_use_count",
    "symmetric_empty_tensor",
    "symmetric_remote",
    "symmetric_rendezvous",
    "tensor_hooks",
    "unscale_and_check_finite",
    "with_functions",
    "without_torch_function",
]

F = TypeVar("F", bound=Callable[..., Any])


# Autograd's engine.


def graph_task_id() -> int:
    """A number of the backward pass that this thread runs; -1 outside of one. FSDP2 asks it too."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Whether this thread runs a backward pass: a forward then is a recomputation."""
    return graph_task_id() != -1


def in_autograd_node() -> bool:
    """Whether this thread is within a node of the graph: a backward pass that ends there was begun
    by a node of another one."""
    return torch._C._current_autograd_node() is not None


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once, when the backward pass that runs now is over, on the thread that began
    it. Only within a backward pass. DistributedDataParallel and FSDP2 end their passes in this
    way."""
    Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def preserve_version_counter(tensors: Sequence[Tensor]) -> Any:
    """A context: within, writing to the tensors does not count as a change that makes the graph's
    saved values invalid."""
    return _unsafe_preserve_version_counter(tuple(tensors))


def tensor_hooks(tensor: Tensor) -> dict[int, Callable[..., Any]] | None:
    """The hooks of `register_hook`, themselves: what is taken out is not called. None: it never had
    any."""
    hooks: dict[int, Callable[..., Any]] | None = tensor._backward_hooks
    return hooks


def post_accumulate_grad_hooks(tensor: Tensor) -> dict[int, Callable[..., Any]] | None:
    """The hooks of `register_post_accumulate_grad_hook`, as `tensor_hooks` gives the others."""
    hooks: dict[int, Callable[..., Any]] | None = tensor._post_accumulate_grad_hooks
    return hooks


def has_hooks(module: nn.Module) -> bool:
    """Whether forward or backward hooks, or pre-hooks, are registered on this module itself."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def has_global_hooks() -> bool:
    """Whether hooks are registered that torch calls for every module."""
    return bool(nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call of the module is a call of its class's forward: it has no hooks, is not
    compiled, and nothing stands in the place of either."""
    plain = module._compiled_call_impl is None and "forward" not in module.__dict__
    return plain and not has_hooks(module)


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """What was given to `register_forward_pre_hook`, in the order of the calls."""
    return list(module._forward_pre_hooks.values())


def call_instead(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """From now on `module(...)` is `call(...)`. Returns what it was before: the module's forward
    with its hooks, compiled where `module.compile()` was called. `Module.compile` takes the same
    place, and copies of the module are without it."""
    before: Callable[..., Any] = module._compiled_call_impl or module._call_impl  # type: ignore[assignment]
    module._compiled_call_impl = call  # type: ignore[assignment]
    return before


def with_functions(function: F, **others: Callable[..., Any]) -> F:
    """A copy of a function of torch's, written in Python, that calls these instead of the functions
    of its file that have their names.

    Args:
        function: Such as torch.nn.functional.multi_head_attention_forward.
        others: By name.

    Raises:
        AttributeError: It calls no function of such a name.
    """
    found: Any = inspect.unwrap(function)
    if missing := sorted(set(others) - set(found.__code__.co_names)):
        raise AttributeError(f"{found.__qualname__} of this torch calls no {', '.join(missing)}")
    copied = FunctionType(
        found.__code__,
        {**found.__globals__, **others},
        found.__name__,
        found.__defaults__,
        found.__closure__,
    )
    copied.__kwdefaults__ = found.__kwdefaults__
    return copied  # type: ignore[return-value]


# Subclasses of tensors, and memory.

# A context: within, operations on tensor subclasses do not call their __torch_function__. The class
# itself, for torch.compile recognizes it by identity.
without_torch_function = torch._C.DisableTorchFunctionSubclass

# What a subclass sets as its __torch_function__ to have none: operations go on to its
# __torch_dispatch__.
NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl


def local_tensor(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, the memory itself: `to_local()` gives a view with a graph."""
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def local_shape_and_offset(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part of a DTensor, and the indices where it begins."""
    # Imported here: torch.distributed.tensor takes long to load, and few processes have a DTensor.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tuple(tensor.shape), tensor.device_mesh, tensor.placements
    )
    return tuple(shape), tuple(offset)


def storage_address(tensor: Tensor) -> int:
    """The address of the storage object: one for all tensors over one storage, also for storages of
    no bytes, whose data pointers are all 0."""
    return int(tensor.untyped_storage()._cdata)


def storage_use_count(tensor: Tensor) -> int:
    """How many tensors and Python objects hold the storage, those of this call included."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]


def parse_to(
    *arguments: Any, **options: Any
) -> tuple[torch.device | None, torch.dtype | None, bool, torch.memory_format | None]:
    """What the arguments of `nn.Module.to` mean: device, dtype, non_blocking, memory format."""
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*arguments, **options)
    return device, dtype, non_blocking, memory_format


# Ops, and torch.compile.


def disable_dynamo(function: F) -> F:
    """A decorator: torch.compile neither traces the function nor compiles what it calls. As
    torch.compiler.disable, but torch._dynamo is imported only when the function is called."""
    decorated: F = torch._disable_dynamo(function)  # type: ignore[assignment]
    return decorated


def constant_in_graphs(function: F) -> F:
    """A decorator: torch.compile takes what the function gives while it traces as a constant. As
    torch.compiler.assume_constant_result, which imports torch._dynamo: a second of each process."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def assert_async(condition: Tensor, message: str) -> None:
    """Fail on the device, without waiting for it here, where `condition` (bool, one element) is
    false."""
    torch._assert_async(condition, message)


def unscale_and_check_finite(
    gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor
) -> None:
    """Multiply the gradients, in place, by `inverse_scale`, and set `found_inf` to 1 where a number
    is not finite: the kernel of GradScaler."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found_inf, inverse_scale)


def has_dispatch_kernel(op: str, key: str) -> bool:
    """Whether the dispatcher has a kernel of `op` ("pyops::adam_") for `key` ("CPU")."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, key))


def all_op_names() -> list[str]:
    """The names of all ops that are registered, with their overloads: "aten::add.Tensor"."""
    return list(torch._C._dispatch_get_all_op_names())


# Process groups.


def group_store(group: dist.ProcessGroup) -> Any:
    """The store through which the ranks of a group found each other, with keys of its own."""
    return dist.distributed_c10d._get_process_group_store(group)


def default_store() -> Any:
    """The store of all ranks, that of init_process_group."""
    return dist.distributed_c10d._get_default_store()


def another_connection(store: dist.Store) -> dist.Store:
    """The same store over a connection of its own, where it has connections."""
    found: dist.Store = store.clone()  # type: ignore[attr-defined]
    return found


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """ "gloo", "nccl", ...: what carries tensors of this device in the group."""
    return str(group._get_backend(device).name()).lower()


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> datetime.timedelta | None:
    """The timeout of the group's collectives on this device; None where its backend tells none."""
    options = getattr(group._get_backend(device), "options", None)
    timeout: datetime.timedelta | None = None if options is None else options._timeout
    return timeout


def set_timeout(options: Any, timeout: datetime.timedelta) -> None:
    """Set the timeout in the options of a backend, such as ProcessGroupNCCL.Options()."""
    options._timeout = timeout


def set_group_timeout(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    """Set the timeout of collectives of a group that exists."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def finished_work(result: Any) -> Any:
    """What a collective of a process group in Python returns, when it is done."""
    future: Any = torch.futures.Future()
    future.set_result(result)
    make: Any = torch._C._distributed_c10d._create_work_from_future  # type: ignore[attr-defined]
    return make(future)


def has_backend(name: str) -> bool:
    """Whether torch.distributed knows a backend that was registered under this name."""
    return name.upper() in dist.Backend._plugins


def int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    """int32 [N, M], the exact product of int8 codes [N, K] and [K, M]. On CUDA it needs more than
    16 rows, and K and M that are multiples of 8."""
    return torch._int_mm(a, b)


def symmetric_empty_tensor(numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that other ranks can map, once all have met in `symmetric_rendezvous`."""
    from torch.distributed import _symmetric_memory

    found: Tensor = _symmetric_memory.empty(numel, dtype=dtype, device=device)
    return found


def symmetric_rendezvous(tensor: Tensor, group: dist.ProcessGroup) -> Any:
    """Map the tensors of all ranks into each other's memory. Collective. The handle has
    `multicast_ptr`, 0 where the switch can't add."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(tensor, group.group_name)


def symmetric_remote(handle: Any, rank: int, like: Tensor) -> Tensor:
    """The tensor of a rank that stands where `like` stands here."""
    if hasattr(handle, "get_remote_tensor"):  # has the place of the tensor in its block
        found: Tensor = handle.get_remote_tensor(rank, tuple(like.shape), like.dtype)
        return found
    older: Tensor = handle.get_buffer(rank, tuple(like.shape), like.dtype)
    return older
