"""Every use of torch API that is not public, each with what would replace it.

Nothing else in the library imports from a torch module whose name begins with an
underscore, or reads an attribute of a torch object that does.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._functorch import TransformType

# Public replacement: none; fake tensors are the documented, unexported way to trace.
from torch._decomp import get_decompositions as get_decompositions
from torch._functorch.autograd_function import custom_function_call
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException as DynamicOutputShapeException,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed._local_tensor import LocalTensor as LocalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# Public replacement: DTensor.from_local, which cannot take a stride together with a
# LocalTensor, and checks shapes with collectives.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# Public replacement: none; the extension point is documented under this name.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` answer true, as model code expects."""
    before = torch.compiler._is_compiling_flag  # public replacement: none
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def custom_functions() -> Iterator[None]:
    """Let `functionalize` run the forward of a user's `torch.autograd.Function`.

    Gradients are taken above it, so the forward is all that arrives there. Public
    replacement: none; torch's own rule is not written yet and only raises.
    """
    table = custom_function_call.functorch_table
    before = table[TransformType.Functionalize]
    table[TransformType.Functionalize] = _run_forward
    try:
        yield
    finally:
        table[TransformType.Functionalize] = before


def _run_forward(_: Any, function: Any, *operands: Any) -> Any:
    return function.forward(*operands)


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a `torch.func` transform from outside has wrapped the tensor."""
    functorch = torch._C._functorch  # public replacement: none
    return functorch.is_functorch_wrapped_tensor(tensor)


def schema(op: Any) -> Any:
    """An ATen operator's schema. Public replacement: none."""
    return op._schema


def is_composite(op: Any) -> bool:
    """Whether an operator is made of other operators. Public replacement: none."""
    return op._can_decompose()


def without_edit(op: Any) -> Any:
    """The operator that returns what an in-place one writes, or None."""
    name = op.overloadpacket.__name__
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if not name.endswith("_") or packet is None:
        return None
    return getattr(packet, op._overloadname, None)  # public replacement: none


def written(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The tensors that an operator writes to. Public replacement: none."""
    names = [a.name for a in op._schema.arguments if a.is_write]
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False))
    values = [(given | dict(kwargs)).get(name) for name in names]
    listed = [v if isinstance(v, list | tuple) else [v] for v in values]
    return [t for row in listed for t in row if isinstance(t, torch.Tensor)]


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones too. Public replacement: none."""
    return tensor.untyped_storage()._cdata


def offline_mesh(
    device_type: str, sizes: Sequence[int], names: Sequence[str], cls: type[DeviceMesh]
) -> DeviceMesh:
    """A mesh without process groups. Public replacement: a fake process group."""
    ranks = torch.arange(int(torch.tensor(sizes).prod())).reshape(tuple(sizes))
    return cls(
        device_type,
        ranks,
        mesh_dim_names=tuple(names),
        _init_backend=False,
        _rank=0,
    )


# --- collectives ----------------------------------------------------------------------

# Exported at run time only. Public replacement: none that is typed.
HashStore: Any = dist.HashStore  # type: ignore[attr-defined]

# torch 2.13 renames these two and deprecates the old names, which 2.11 and 2.12 have.
all_gather_single = getattr(dist, "all_gather_single", None) or (
    dist.all_gather_into_tensor
)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or (
    dist.reduce_scatter_tensor
)

# --- DTensor and LocalTensor ----------------------------------------------------------


def make_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Any],
    shape: Sequence[int],
    stride: Sequence[int],
    cls: type[DTensor] = DTensor,
) -> DTensor:
    """A DTensor around a shard, without communication or checks."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return cls(local, spec, requires_grad=False)


def local_part(tensor: DTensor) -> torch.Tensor:
    """A DTensor's shard. Public replacement: `to_local()`, slower under autograd."""
    return tensor._local_tensor


def set_local_part(tensor: DTensor, local: torch.Tensor) -> None:
    """Put another shard into a DTensor. Public replacement: none."""
    tensor._local_tensor = local


def per_rank(local: LocalTensor) -> dict[int, torch.Tensor]:
    """The shards of all emulated ranks."""
    return local._local_tensors


Decompositions = dict[Any, Callable[..., Any]]
