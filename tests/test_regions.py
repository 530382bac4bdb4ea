"""Compiled regions: the same results and transfers, and code that layers share."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import agree, assert_same, mesh_of
from torch.func import grad_and_value

import yafsdp_fn as yf
from yafsdp_fn import _regions
from yafsdp_fn._graph import Ref, map_leaves
from yafsdp_fn._layout import WHOLE, Meta
from yafsdp_fn._program import Compute, Local, Start, Wait
from yafsdp_fn._regions import Region, regions
from yafsdp_fn._torch import missing_compiler, storage_id

aten = torch.ops.aten
Tree = Any
needs_compiler = pytest.mark.skipif(
    missing_compiler("cpu") is not None, reason="there is no C++ compiler"
)
INDUCTOR = pytest.param("inductor", marks=needs_compiler)

# --- steps ----------------------------------------------------------------------------


def layers_of(count: int, width: int = 8) -> list[Tree]:
    generator = torch.Generator().manual_seed(count)
    shapes = {"gain": (width,), "up": (16, width), "down": (width, 16)}
    return [
        {
            name: torch.randn(shape, generator=generator, dtype=torch.float64) / 4
            for name, shape in shapes.items()
        }
        for _ in range(count)
    ]


def network(params: Sequence[Tree], x: torch.Tensor) -> torch.Tensor:
    for layer in params:
        normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        x = x + F.silu((normal * layer["gain"]) @ layer["up"].T) @ layer["down"].T
    return x.square().mean()


def descent(params: list[Tree], batch: torch.Tensor) -> Any:
    grads, loss = grad_and_value(network)(params, batch)
    rows = zip(params, grads, strict=True)
    return [{k: p[k] - 0.1 * g[k] for k in p} for p, g in rows], loss


def one_layer(params: list[Tree], batch: torch.Tensor) -> Any:
    return descent(params, batch)


ADAMW = yf.optim.chain(
    yf.optim.clip_by_global_norm(0.5), yf.optim.adamw(0.01, fused=False)
)


def adamw(params: list[Tree], state: Tree, batch: torch.Tensor) -> Any:
    grads, loss = grad_and_value(network)(params, batch)
    updates, state = ADAMW.update(grads, state, params)
    return yf.optim.apply_updates(params, updates), state, loss


def statistics(state: Tree, batch: torch.Tensor) -> Any:
    """Whole values beside parts of different lengths, of which some are empty."""
    mean = 0.9 * state["mean"] + 0.1 * (batch * batch).exp().mean(0)
    scale = (state["scale"].exp() + 1).tanh()
    state = {"mean": mean, "scale": scale, "w": state["w"] * 2 + scale}
    return state, (batch.sigmoid() * mean).amax(1), batch.exp().log() * batch


def many_kinds(w: Tree, batch: torch.Tensor) -> Any:
    """Functions in the place of operators, several results, complex values, indices."""

    def loss_fn(w: Tree) -> torch.Tensor:
        x = F.layer_norm(batch @ w["a"], (8,), w["b"], w["b"])
        heads = x.view(-1, 2, 2, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        first, second = (y + y.exp()).chunk(2, -1)
        spectrum = torch.fft.rfft(torch.cat([second, first * 2], -1)).abs()
        y = F.embedding(torch.arange(6) % 4, w["a"][:, :3]).sum() * spectrum.sin()
        return (y - y.amax(-1, keepdim=True)).square().mean()

    grads, loss = grad_and_value(loss_fn)(w)
    return {k: w[k] - 0.1 * grads[k].cos() for k in w}, loss


def arguments_of(step: Callable[..., Any]) -> tuple[Any, ...]:
    rows = torch.linspace(-1, 1, 5 * 8, dtype=torch.float64).view(5, 8)
    if step is descent:
        return layers_of(2), rows
    if step is one_layer:
        return layers_of(1), rows[:4]
    if step is adamw:
        params = layers_of(1)
        return params, ADAMW.init(params), rows
    if step is statistics:
        return {"mean": rows[0], "scale": rows.sum(), "w": rows[:, :3] * 1}, rows
    return {"a": rows[:4] + 1, "b": rows[1]}, rows.view(5, 2, 4)


STEPS = [descent, adamw, statistics, many_kinds]


def lowered(
    step: Callable[..., Any], *args: Any, world: Any = 2, **options: Any
) -> yf.Lowered:
    mesh = mesh_of(world)
    sharded = yf.shard(step, mesh=mesh, schedule=yf.Schedule(**options))
    *state, batch = args
    return sharded.lower(*yf.distribute(tuple(state), mesh), batch)


def inside(plan: yf.Program) -> list[Region]:
    ops = (i.op for i in plan.instructions if isinstance(i, Compute))
    return [op for op in ops if isinstance(op, Region)]


# --- results --------------------------------------------------------------------------


CASES = [
    ("eager", adamw, 2),
    ("eager", statistics, (2, 2)),
    ("aot_eager", descent, 3),
    ("aot_eager", statistics, 8),
    ("aot_eager", many_kinds, (2, 2)),
]


@pytest.mark.parametrize(
    ("backend", "step", "world"),
    CASES,
    ids=lambda each: getattr(each, "__name__", None),
)
def test_results_are_those_of_the_step(backend: str, step: Any, world: Any) -> None:
    schedule = yf.Schedule(compile=backend)
    agree(step, *arguments_of(step), world=world, schedule=schedule, steps=2)


@needs_compiler
@pytest.mark.parametrize(
    ("step", "world"),
    [(one_layer, 2), (statistics, 3)],
    ids=["one layer", "statistics"],
)
def test_inductor_computes_the_same(step: Any, world: int) -> None:
    """Equal values are the same bits on ranks whose other operands differ in length."""
    schedule = yf.Schedule(compile=True)
    agree(step, *arguments_of(step), world=world, schedule=schedule, steps=2)


@pytest.mark.parametrize("world", [1, 3, (2, 2)], ids=str)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_transfers_are_where_they_were(step: Any, world: Any) -> None:
    args = arguments_of(step)
    found = [lowered(step, *args, world=world, compile=c) for c in (False, "eager")]
    plain, compiled = (
        [
            (type(i), i.transfer)
            for i in each.plan.instructions
            if isinstance(i, Start | Wait)
        ]
        for each in found
    )
    assert compiled == plain
    assert inside(found[1].plan)
    assert not inside(found[0].plan)
    assert found[0].cost_analysis() == found[1].cost_analysis()


def test_donated_memory_is_written() -> None:
    params, batch = layers_of(2), torch.ones(4, 8)
    schedule = yf.Schedule(compile="aot_eager")
    agree(descent, params, batch, donate_argnums=0, schedule=schedule)


def test_gradients_from_outside() -> None:
    mesh, schedule = mesh_of(2), yf.Schedule(compile="aot_eager")
    w, batch = torch.ones(8, 3), torch.linspace(-1, 1, 40).view(5, 8)

    def loss_fn(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return ((batch @ w).tanh() * 2).square().mean()

    loss = yf.shard(loss_fn, mesh=mesh, batch_argnums=1, schedule=schedule)
    found, _ = grad_and_value(loss)(yf.distribute(w, mesh), batch)
    assert_same(found, grad_and_value(loss_fn)(w, batch)[0])


# --- sharing --------------------------------------------------------------------------


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """The backends that were called, one for every compilation."""
    called: list[str] = []

    def compiled(function: Any, backend: str) -> Any:
        called.append(backend)
        return function

    with mock.patch.object(_regions, "_compiled", compiled):
        yield called


def test_layers_share_what_is_compiled(compilations: list[str]) -> None:
    counts = []
    for count in (4, 8):
        compilations.clear()
        params, batch = layers_of(count), torch.ones(4, 8)
        step = yf.shard(descent, schedule=yf.Schedule(compile="eager"))
        placed = yf.distribute(params, mesh_of(2))
        plan = step.lower(placed, batch).plan
        step(step(placed, batch)[0], batch)
        counts.append(len(compilations))
        assert len(inside(plan)) > 2 * count
    assert counts[0] == counts[1]


def test_ranks_of_equal_parts_share_what_is_compiled(compilations: list[str]) -> None:
    counts = []
    for rows in (9, 10, 8):  # on four ranks: 3, 3, 3, 0; 3, 3, 3, 1; 2, 2, 2, 2
        compilations.clear()
        agree(descent, layers_of(1), torch.ones(rows, 8), schedule=_EAGER, steps=1)
        counts.append(len(compilations))
    assert counts[0] == counts[2] < counts[1]


_EAGER = yf.Schedule(compile="eager")


def test_the_listing_tells_regions_apart() -> None:
    batch = torch.ones(4, 8)
    first = lowered(descent, layers_of(4), batch, compile="eager")
    text = first.plan.as_text()
    again = lowered(descent, layers_of(4), batch, compile="eager").plan.as_text()
    assert "6 operators (1 region)" in first.as_text()
    shown = [line for line in text.splitlines() if "region[" in line]
    assert text == again
    assert "operators, " in shown[0]
    assert "# test_regions.py:" in shown[0]

    sums = [lowered(adding(n), layers_of(1), batch, compile="eager") for n in (2, 3)]
    one, two = (inside(each.plan)[0].code.digest for each in sums)
    assert one != two


def adding(number: float) -> Callable[..., Any]:
    def step(params: list[Tree], batch: torch.Tensor) -> Any:
        return [{k: p[k].exp() + number for k in p} for p in params], batch.sum()

    return step


# --- what a region is -----------------------------------------------------------------

X = torch.arange(12.0).view(3, 4)


def joined(
    steps: Sequence[tuple[Any, tuple[Any, ...], int]],
    kept: Sequence[int],
    backend: str = "eager",
) -> list[Any]:
    """Regions of operators `(op, args, result)`; `%0` is `X`."""
    found = {0: X}
    made = []
    for op, args, number in steps:
        found[number] = op(
            *map_leaves(lambda a: found[a.id] if isinstance(a, Ref) else a, args)
        )
        made.append(Compute(op, args, {}, (Ref(number),), "user.py:1"))
    values = {n: Local(Meta.of(t), (WHOLE,)) for n, t in found.items()}
    return regions(made, values, (1,), [Ref(n) for n in kept], backend)


DOUBLE = (aten.mul.Tensor, (Ref(0), 2), 1)
MORE = (aten.add.Tensor, (Ref(1), 1), 2)


def test_only_what_is_read_comes_out() -> None:
    (made,) = joined([DOUBLE, MORE], [2])
    assert made.outputs == (Ref(2),)
    assert made.args == (Ref(0),)
    assert [each.op for each in made.op.instructions] == [DOUBLE[0], MORE[0]]
    assert torch.equal(made.op(X)[0], X * 2 + 1)


@pytest.mark.parametrize(
    "steps",
    [
        [DOUBLE],
        [DOUBLE, (aten.t.default, (Ref(1),), 2)],
        [DOUBLE, (aten.index_put.default, (Ref(1), [torch.tensor([0])], X[:1]), 2)],
        [DOUBLE, (aten.fft_fft.default, (Ref(1),), 2)],
        [DOUBLE, (aten.bernoulli.p, (Ref(1), 0.5), 2)],
        [(aten.bernoulli.p, (Ref(0), 0.5), 1), MORE],
    ],
    ids=["one", "a view", "adds at indices", "complex", "random", "random first"],
)
def test_left_alone(steps: Any) -> None:
    made = joined(steps, [2] if len(steps) > 1 else [1])
    assert [each.op for each in made] == [op for op, _, _ in steps]


def test_views_stay_outside() -> None:
    steps = [
        (aten.t.default, (Ref(0),), 3),
        DOUBLE,
        (aten.t.default, (Ref(1),), 4),
        (aten.unsqueeze.default, (Ref(4), 0), 5),
        (aten.mul.Tensor, (Ref(4), Ref(3)), 6),
        (aten.select.int, (Ref(6), 0, 0), 7),
    ]
    before, region, *after = joined(steps, [3, 5, 6])
    assert before.outputs == (Ref(3),)
    assert region.args == (Ref(0), Ref(3))
    assert region.outputs == (Ref(1), Ref(6))
    assert [each.outputs[0] for each in after] == [Ref(4), Ref(5)]
    assert torch.equal(region.op(X, X.t())[1], 2 * X.t() * X.t())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
@pytest.mark.parametrize(
    "last",
    [
        (aten.mul.Tensor, (Ref(0), 2), 3),
        (aten.clone.default, (Ref(0),), 3),
        (aten.cat.default, ([Ref(1), Ref(0)],), 3),
        (aten.add.Tensor, (Ref(2), 0), 3),
        (aten.full.default, ([3, 4], 2.0), 3),
    ],
    ids=["the same", "a clone", "a part", "nothing added", "a constant"],
)
def test_results_share_no_memory(last: Any, backend: str) -> None:
    (made,) = joined([DOUBLE, MORE, last], [1, 2, 3], backend)
    held = [X]
    for _ in range(2):
        results = made.op(X)
        held += results
        assert torch.equal(results[0], X * 2)
        assert torch.equal(results[1], X * 2 + 1)
    assert len({storage_id(tensor) for tensor in held}) == 7


def test_shared_results_are_cloned() -> None:
    """What a backend may do: an operand, and a tensor and a part of it."""

    def sharing(function: Any, backend: str) -> Any:
        def call(x: torch.Tensor) -> Any:
            both = torch.stack([x * 2, x * 2 + 1])
            return both[0], both[1], x

        return call

    last = (aten.mul.Tensor, (Ref(0), 1), 3)
    (made,) = joined([DOUBLE, MORE, last], [1, 2, 3])
    with mock.patch.object(_regions, "_compiled", sharing):
        results = made.op(X)
    assert len({storage_id(tensor) for tensor in (X, *results)}) == 4
    for result, wanted in zip(results, (X * 2, X * 2 + 1, X), strict=True):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
def test_dimensions_lie_in_the_order_that_is_wanted(backend: str) -> None:
    """Also where an operand lies otherwise than while the step was traced."""
    steps = [DOUBLE, MORE]
    (made,) = joined(steps, [1, 2], backend)
    turned = X.t().contiguous().t()
    assert turned.stride() != X.stride()
    for result in made.op(turned):
        assert result.stride() == X.stride()


def test_whole_values_are_left_alone_where_parts_differ() -> None:
    """Code for other lengths may round otherwise, and whole values have to agree."""
    state, batch = arguments_of(statistics)
    even = {"mean": state["mean"], "scale": state["scale"], "w": state["w"][:4]}
    together = lowered(statistics, even, batch[:4], compile="eager").plan
    apart = lowered(statistics, state, batch, compile="eager").plan
    assert aten.tanh.default in compiled_on_whole_values(together)
    assert not compiled_on_whole_values(apart)
    assert inside(apart)


def compiled_on_whole_values(plan: yf.Program) -> set[Any]:
    compiled = [each for region in inside(plan) for each in region.instructions]
    whole = {number for number, v in plan.values.items() if WHOLE in v.placements}
    return {
        each.op for each in compiled if whole.intersection(r.id for r in each.writes)
    }


def test_a_long_run_is_cut() -> None:
    steps = [(aten.add.Tensor, (Ref(n), 1), n + 1) for n in range(600)]
    made = joined(steps, [600])
    assert [len(each.op.instructions) for each in made] == [256, 256, 88]
    assert all(len(each.outputs) == 1 for each in made)
    assert made[0].op.code is made[1].op.code


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["inducter", 1, None])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(yf.ArgumentError, match=r"compile=.*write True for Inductor"):
        yf.Schedule(compile=value)


def test_a_compiler_is_needed() -> None:
    params, batch = layers_of(1), torch.ones(4, 8)
    with (
        mock.patch.object(_regions, "missing_compiler", return_value="a C++ compiler"),
        pytest.raises(yf.ArgumentError, match=r"needs a C\+\+ compiler.*Install it"),
    ):
        lowered(descent, params, batch, compile=True)


def test_no_compiler_is_found() -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        found = missing_compiler("cpu")
    assert found is not None
    assert "C++" in found


def test_what_does_not_compile_is_executed() -> None:
    def failing(function: Any, backend: str) -> Any:
        def call(*tensors: Any) -> Any:
            raise NotImplementedError(f"{backend}\n fails")

        return call

    (made,) = joined([DOUBLE, MORE], [2])
    with (
        mock.patch.object(_regions, "_compiled", failing),
        pytest.warns(RuntimeWarning, match=r"2 operators.*Error: eager fails"),
    ):
        found = made.op(X)
    assert torch.equal(found[0], X * 2 + 1)
    assert torch.equal(made.op(X)[0], X * 2 + 1)  # without another warning


# --- processes ------------------------------------------------------------------------


def three_steps(backend: str) -> Any:
    dist.init_process_group("gloo")
    step = yf.shard(one_layer, schedule=yf.Schedule(compile=backend))
    mesh = yf.make_mesh(fsdp=2, device_type="cpu")
    params, batch = arguments_of(one_layer)
    params = yf.distribute(params, mesh)
    for _ in range(3):
        params, _ = step(params, batch)
    return yf.full(params)


@functools.cache
def plainly() -> Any:
    params, batch = arguments_of(one_layer)
    for _ in range(3):
        params, _ = descent(params, batch)
    return params


def test_processes() -> None:
    backend = "aot_eager" if missing_compiler("cpu") else "inductor"
    for found in yf.launch(three_steps, backend, nprocs=2):
        assert_same(found, plainly())
