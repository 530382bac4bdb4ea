"""What the tests share: meshes in this process, and the comparison of two trees."""

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch.distributed.device_mesh import DeviceMesh

import yafsdp_fn as yf

WORLDS = (1, 2, 3, 4)
MESHES = ((2, 2), (4, 1), (1, 4), (1, 1))


def mesh_of(world: int | tuple[int, int]) -> DeviceMesh:
    """An emulated mesh: ranks on `fsdp`, or `(replicate, fsdp)`."""
    if isinstance(world, int):
        return yf.make_mesh(fsdp=world, emulate=True)
    return yf.make_mesh(replicate=world[0], fsdp=world[1], emulate=True)


def assert_same(found: Any, wanted: Any, rtol: float | None = None) -> None:
    """Two trees agree: structure, shapes, dtypes, strides, and values to `rtol`.

    Integers and Booleans agree exactly; floats to 1e-9 in float64, 1e-5 in float32,
    relative to the largest value of the leaf.
    """
    found = yf.full(found)
    paths, wants, spec = optree.tree_flatten_with_path(wanted)
    assert optree.tree_structure(found) == spec, (optree.tree_structure(found), spec)
    for path, have, want in zip(paths, optree.tree_leaves(found), wants, strict=True):
        _assert_leaf(path, have, want, rtol)


def _assert_leaf(path: Any, have: Any, want: Any, rtol: float | None) -> None:
    if not isinstance(want, torch.Tensor):
        assert type(have) is type(want), (path, have, want)
        assert have == want, (path, have, want)
        return
    assert have.shape == want.shape, (path, have.shape, want.shape)
    assert have.dtype == want.dtype, (path, have.dtype, want.dtype)
    if 0 not in want.stride() and want.numel():
        assert _strides(have) == _strides(want), (path, have.stride(), want.stride())
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        assert torch.equal(have, want), (path, have, want)
        return
    tolerance = rtol or _TOLERANCE[want.dtype.to_real()]
    finite = want.nan_to_num(0, 0, 0).abs()
    scale = finite.max().item() if want.numel() else 0.0
    torch.testing.assert_close(
        have,
        want,
        rtol=tolerance,
        atol=tolerance * scale + 1e-300,
        equal_nan=True,
        msg=lambda text: f"{path}: {text}",
    )


def _strides(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions in which they mean something."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for length, stride in pairs if length > 1]


_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
}


def agree(
    step: Callable[..., Any],
    *args: Any,
    world: int | tuple[int, int] = 4,
    steps: int = 3,
    rtol: float | None = None,
    **options: Any,
) -> yf.ShardedFunction[..., Any]:
    """Run a step plain and sharded; feed results back where they fit; compare each.

    Returns:
        The sharded step, for further questions.
    """
    mesh = mesh_of(world)
    sharded = yf.shard(step, mesh=mesh, **options)
    plain, placed = list(args), [_placed(a, mesh) for a in args[:-1]] + [args[-1]]
    for _ in range(steps):
        wanted = step(*plain)
        found = sharded(*placed)
        assert_same(found, wanted, rtol)
        yf.check(sharded.lower(*placed).plan)
        plain, placed = _fed(plain, wanted), _fed(placed, found)
    return sharded


def _placed(tree: Any, mesh: DeviceMesh) -> Any:
    return yf.distribute(tree, mesh)


def _fed(args: Sequence[Any], results: Any) -> list[Any]:
    """The next arguments: results in the positions whose structure they have."""
    results = results if type(results) is tuple else (results,)
    return [
        result if _like(arg, result) else arg
        for arg, result in zip(args, [*results, *[object()] * len(args)], strict=False)
    ]


def _like(arg: Any, result: Any) -> bool:
    if optree.tree_structure(arg) != optree.tree_structure(result):
        return False
    pairs = zip(optree.tree_leaves(arg), optree.tree_leaves(result), strict=True)
    return all(
        not isinstance(a, torch.Tensor)
        or (isinstance(r, torch.Tensor) and a.shape == r.shape and a.dtype == r.dtype)
        for a, r in pairs
    )
