"""What the tests share: meshes in this process, and the library's own comparison."""

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

import yafsdp_fn as yf
from yafsdp_fn.testing import assert_agrees
from yafsdp_fn.testing._compare import Tolerance, first_difference

EXAMPLES = Path(__file__).parents[1] / "examples"
WORLDS = (1, 2, 3, 4)
MESHES = ((2, 2), (4, 1), (1, 4), (1, 1))


def mesh_of(world: int | tuple[int, int]) -> DeviceMesh:
    """An emulated mesh: ranks on `fsdp`, or `(replicate, fsdp)`."""
    if isinstance(world, int):
        return yf.make_mesh(fsdp=world, emulate=True)
    return yf.make_mesh(replicate=world[0], fsdp=world[1], emulate=True)


@functools.cache
def example(name: str) -> Any:
    """A file of `examples/` as a module; nothing runs at its import."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def llama() -> Any:
    """The Llama, of which other examples import."""
    return example("train_llama")


def assert_same(found: Any, wanted: Any, rtol: float | None = None) -> None:
    """Two trees agree, the strides of all leaves included."""
    difference = first_difference(yf.full(found), wanted, Tolerance(rtol))
    assert difference is None, str(difference)


def agree(
    step: Callable[..., Any],
    *args: Any,
    world: int | tuple[int, int] = 4,
    **options: Any,
) -> yf.ShardedFunction[..., Any]:
    """`assert_agrees` on an emulated mesh."""
    return assert_agrees(step, *args, mesh=mesh_of(world), **options)
