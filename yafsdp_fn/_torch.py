"""Every use of torch API that is not public, each with what would replace it.

Nothing else in the library imports from a torch module whose name begins with an
underscore, or reads an attribute of a torch object that does.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

# Public replacement: none; fake tensors are the documented, unexported way to trace.
from torch._decomp import get_decompositions as get_decompositions
from torch._functorch import eager_transforms
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException as DynamicOutputShapeException,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed._local_tensor import LocalTensor as LocalTensor
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# Public replacement: DTensor.from_local, which cannot take a stride together with a
# LocalTensor, and checks shapes with collectives.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Public replacement: none; the extension point is documented under this name.
from torch.utils._pytree import tree_leaves


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` answer true, as model code expects."""
    before = torch.compiler._is_compiling_flag  # public replacement: none
    torch.compiler._is_compiling_flag = True
    # A shape that does not fit raises; torch would print it as well.
    printing = logging.getLogger("torch._subclasses.fake_tensor")
    level = printing.level
    printing.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
        printing.setLevel(level)


@contextlib.contextmanager
def unfolded_linearize() -> Iterator[None]:
    """Let `torch.func.linearize` compute its jvp where it is called.

    It traces and folds a graph of its own, whose constants would be fake tensors here.
    Public replacement: none.
    """
    module: Any = eager_transforms
    before = module.lazy_dynamo_disallow
    module.lazy_dynamo_disallow = _unfolded
    try:
        yield
    finally:
        module.lazy_dynamo_disallow = before


def _unfolded(transform: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself in the place of its graph, which is left unfolded."""
    if transform is make_fx:
        return lambda fn: lambda _: lambda *tangents: tree_leaves(fn(tangents))
    return lambda graph: graph


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a value while a step is traced."""
    return isinstance(tensor, FunctionalTensor | FakeTensor) or (
        is_functorch_wrapped(tensor)
    )


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a `torch.func` transform from outside has wrapped the tensor."""
    functorch = torch._C._functorch  # public replacement: none
    return functorch.is_functorch_wrapped_tensor(tensor)


def unwrap_if_dead(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the wrapper of a transform that has ended."""
    return torch._C._functorch.unwrap_if_dead(tensor)  # public replacement: none


def forward_mode() -> Any:
    """Let tangents flow, as they do not by themselves in a custom function's jvp.

    Public replacement: none.
    """
    return torch.autograd.forward_ad._set_fwd_grad_enabled(True)


def schema(op: Any) -> Any:
    """An ATen operator's schema. Public replacement: none."""
    return op._schema


def is_composite(op: Any) -> bool:
    """Whether an operator is only other operators. Public replacement: none."""
    has_kernel: Any = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key")  # noqa: B009
    return op._can_decompose() and not has_kernel(op.name(), "CPU")


class TracerMode(TorchDispatchMode):
    """A mode below functionalisation and above fake tensors, as torch's own tracer.

    Public replacement: none; a mode without a key stands above functionalisation.
    """

    tracer = SimpleNamespace(tensor_tracker={})  # looked at by functionalisation

    def __init__(self) -> None:
        super().__init__()
        # torch looks for it in the instance when the mode ends: not there, torch would
        # end a mode of the user's instead.
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY


class _Functionalisation(FunctionalTensorMode):
    """torch's, but for a check of values that a trace cannot make."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._linalg_check_errors.default:
            return None
        return super().__torch_dispatch__(func, types, args, kwargs)


def functional_call(
    fn: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], int | None]:
    """Call a function so that what it edits becomes new values.

    Returns:
        What it returns, and the position of an argument that it edits, if any. Public
        replacement: `torch.func.functionalize`, which passes on whole what torch
        composes of edits, and has no rule for custom autograd functions.
    """
    with _Functionalisation():
        wrapped = [FunctionalTensor.to_functional(tensor) for tensor in tensors]
        out = fn(list(wrapped))
        made = [
            t.from_functional() if isinstance(t, FunctionalTensor) else t for t in out
        ]
    has_edit: Any = getattr(torch, "_functionalize_has_data_mutation")  # noqa: B009
    edited = [has_edit(tensor.elem) for tensor in wrapped]
    return made, edited.index(True) if any(edited) else None


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


def rendezvous(**options: Any) -> tuple[Any, int, int]:
    """The store of torchrun's variables, this rank and the number of ranks.

    Public replacement: itself, once it is annotated.
    """
    return next(iter(getattr(dist, "rendezvous")("env://", **options)))  # noqa: B009


def default_store() -> Any:
    """The store of the default process group. Public replacement: none."""
    return getattr(dist.distributed_c10d, "_get_default_store")()  # noqa: B009


def group_timeout(group: dist.ProcessGroup) -> float:
    """Seconds that a group waits for a collective. Public replacement: none."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    backend: Any = group._get_backend(torch.device(device))
    timeout: float = backend.options._timeout.total_seconds()
    return timeout


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


def without_memory(leaf: Any) -> Any:
    """A tensor of the same kind, shape and placement that holds no memory."""
    if isinstance(leaf, DTensor):
        local = torch.empty((0,), dtype=leaf.dtype, device="meta")
        shape, stride = leaf.shape, leaf.stride()
        return make_dtensor(local, leaf.device_mesh, leaf.placements, shape, stride)
    if isinstance(leaf, torch.Tensor):
        shape, stride = leaf.shape, leaf.stride()
        return torch.empty_strided(shape, stride, dtype=leaf.dtype, device="meta")
    return leaf


def local_part(tensor: DTensor) -> torch.Tensor:
    """A DTensor's shard. Public replacement: `to_local()`, slower under autograd."""
    return tensor._local_tensor


def set_local_part(tensor: DTensor, local: torch.Tensor) -> None:
    """Put another shard into a DTensor. Public replacement: none."""
    tensor._local_tensor = local


def per_rank(local: LocalTensor) -> dict[int, torch.Tensor]:
    """The shards of all emulated ranks."""
    return local._local_tensors


# --- operators ------------------------------------------------------------------------

# A product with a transposed matrix. Public replacement: none; the public switch
# torch.backends.mkldnn.matmul.fp32_precision permits less precision.
onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def is_operator(op: Any) -> bool:
    """Whether `op` is an operator, no function in its place.

    Public replacement: none.
    """
    return isinstance(op, torch._ops.OpOverload)


def makes_one_tensor(op: Any) -> bool:
    """Whether an operator returns a tensor, no list or tuple of them.

    Public replacement: none.
    """
    found = [str(r.type) for r in op._schema.returns] if is_operator(op) else []
    return found == ["Tensor"]


def out_overload(op: Any) -> tuple[Any, str] | None:
    """The overload of an operator that writes into a given tensor, and its name.

    None if torch only generates it from the one that allocates, and so copies. Public
    replacement: none.
    """
    if not is_operator(op):
        return None
    wanted = _inputs(op._schema)
    for name in op.overloadpacket.overloads():
        found = getattr(op.overloadpacket, name)
        outs = [a.name for a in found._schema.arguments if a.is_out]
        generated = torch.Tag.generated in found.tags
        if len(outs) == 1 and not generated and _inputs(found._schema) == wanted:
            return found, outs[0]
    return None


def _inputs(schema: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]


# --- compilers ------------------------------------------------------------------------


def missing_compiler(device_type: str) -> str | None:
    """What Inductor needs for a type of device and does not find.

    Public replacement: none; torch finds out when it compiles.
    """
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception:  # of several types, by platform
            return "a C++ compiler, such as g++ or clang++"
    elif device_type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton and a GPU that it supports"
    return None


# --- checkpoints ----------------------------------------------------------------------


def save_state_dict(writer: Any, planner: Any, group: Any) -> None:
    """Write what a planner plans; no group: this process alone.

    Public replacement: `torch.distributed.checkpoint.save`, which warns in a process
    that is alone.
    """
    _save_state_dict({}, writer, group, no_dist=group is None, planner=planner)


def load_state_dict(reader: Any, planner: Any, group: Any) -> None:
    """Read what a planner plans. Public replacement: `load`, as for `save`."""
    _load_state_dict({}, reader, group, no_dist=group is None, planner=planner)
