"""The Llama of the examples: what its step communicates, and that it is right."""

import functools
from collections import Counter
from typing import Any

import optree
import pytest
import torch
from support import assert_same, llama, mesh_of
from torch.func import grad_and_value

import yafsdp_fn as yf
from yafsdp_fn._groups import layer_of
from yafsdp_fn._program import Transfer

Case = tuple[Any, bool, int]
CASES: list[Case] = [  # mesh, tied embedding, rows of the batch
    (2, True, 8),
    (3, False, 10),
    (4, True, 10),
    (4, False, 8),
    ((2, 2), True, 8),
    ((2, 2), False, 10),
]


def config(tied: bool, rows: int) -> Any:
    return llama().Config(
        layers=2, width=16, heads=4, kv_heads=2, context=6, batch=rows, tied=tied
    )


def double(tree: Any) -> Any:
    return optree.tree_map(
        lambda x: x.double() if torch.is_floating_point(x) else x, tree
    )


def tokens(rows: int, context: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    window = torch.randint(0, 256, (rows, context + 1), generator=generator)
    # A row without a single valid byte, and rows with different numbers of them.
    mask = (
        torch.rand(rows, context, generator=generator)
        > torch.linspace(0, 1, rows)[:, None]
    )
    return {"tokens": window[:, :-1], "targets": window[:, 1:], "mask": mask}


@functools.cache
def lowered(case: Case) -> tuple[Any, Any, yf.Lowered]:
    """The plain step, its plain arguments, and the step's plan on the mesh."""
    world, tied, rows = case
    settings = config(tied, rows)
    optimiser = llama().make_optimiser(settings)
    step = llama().make_functions(settings, optimiser).train_step
    params = double(llama().init_params(settings))
    args = (params, optimiser.init(params), tokens(rows, settings.context))
    placed = yf.distribute(args[:2], mesh_of(world))
    return step.__wrapped__, args, step.lower(*placed, args[2])


def shapes(plan: yf.Program, transfers: list[Transfer]) -> Counter[tuple[int, ...]]:
    """How many values of each global shape are moved."""
    moved = (plan.values[ref.id].meta.shape for t in transfers for ref in t.targets)
    return Counter(moved)


def split(plan: yf.Program) -> tuple[list[Transfer], list[Transfer], list[Transfer]]:
    """All-gathers, reduce-scatters and all-reduces."""
    every = list(plan.transfers())
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    found = tuple([t for t in every if t.kind == kind] for kind in kinds)
    assert sum(map(len, found)) == len(every)
    return found  # type: ignore[return-value]


# --- what is communicated -------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_parameter_is_gathered_once_or_twice(case: Case) -> None:
    _, (params, *_), stage = lowered(case)
    gathers = split(stage.plan)[0]
    paths, _, _ = optree.tree_flatten_with_path(params)
    counts = Counter(label for t in gathers for label in t.labels)
    assert set(counts.values()) <= {1, 2}
    assert len(counts) == len(paths)
    sizes = Counter(tuple(leaf.shape) for leaf in optree.tree_leaves(params))
    for shape, found in shapes(stage.plan, gathers).items():
        assert sizes[shape] <= found <= 2 * sizes[shape]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_gradient_is_scattered_exactly_once(case: Case) -> None:
    world, _, _ = case
    _, (params, *_), stage = lowered(case)
    _, scatters, reductions = split(stage.plan)
    sizes = Counter(tuple(leaf.shape) for leaf in optree.tree_leaves(params))
    assert shapes(stage.plan, scatters) == sizes
    state_axis = stage.plan.axes.index("fsdp")
    assert {t.axis for t in scatters} == {state_axis}
    # Between replicas one all-reduce of each gradient's shard; within none.
    outer = [t for t in reductions if stage.plan.axes[t.axis] == "replicate"]
    expected = sizes if isinstance(world, tuple) else Counter()
    assert +Counter({s: n for s, n in shapes(stage.plan, outer).items() if s}) == (
        expected
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_else_is_scalars_and_nothing_is_unplanned(case: Case) -> None:
    stage = lowered(case)[2]
    plan = stage.plan
    yf.check(plan)
    assert stage.cost_analysis()["unplanned_collectives"] == 0
    inner = [t for t in split(plan)[2] if plan.axes[t.axis] == "fsdp"]
    assert set(shapes(plan, inner)) == {()}
    dtypes = Counter(plan.values[r.id].meta.dtype for t in inner for r in t.targets)
    # The square of the clip norm, and the loss; the number of valid bytes, which the
    # loss divides by and the metrics report.
    assert dtypes[torch.float64] == 2
    assert 1 <= dtypes[torch.int64] <= 2
    assert len(dtypes) == 2


def test_the_norm_of_all_gradients_is_one_scalar() -> None:
    settings = config(True, 8)
    params = llama().init_params(settings)
    clip = yf.optim.clip_by_global_norm(1.0)

    def step(params: Any, batch: Any) -> Any:
        scale = batch["scale"].sum()
        grads = optree.tree_map(lambda p: p * scale, params)
        return clip.update(grads, clip.init(params), params)[0]

    plan = yf.shard(step, mesh=mesh_of(4)).lower(params, {"scale": torch.ones(8)}).plan
    gathers, scatters, reductions = split(plan)
    assert (gathers, scatters) == ([], [])
    assert list(shapes(plan, reductions).elements()) == [(), ()]


def test_layers_are_gathered_in_order_and_again_in_reverse() -> None:
    plan = lowered((4, True, 10))[2].plan
    groups = [{layer_of(label) for label in t.labels} for t in split(plan)[0]]
    order = [g.pop() for g in groups if len(g) == 1 and "['layers']" in min(g)]
    layers = list(dict.fromkeys(order))
    # The last layers are still there when the backward pass begins.
    assert order == [*layers, *layers[::-1][len(layers) * 2 - len(order) :]]


# --- precision ------------------------------------------------------------------------


def test_weights_that_are_computed_with_in_bfloat16_are_gathered_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rotary = llama().rotary  # its angles are float32
    monkeypatch.setattr(llama(), "rotary", lambda x: rotary(x).to(x.dtype))
    settings = config(True, 8)
    batch = tokens(8, settings.context)
    params = llama().init_params(settings)

    def step_in(dtype: torch.dtype) -> yf.ShardedFunction[..., Any]:
        def loss_fn(params: Any, batch: Any) -> torch.Tensor:
            low = optree.tree_map(lambda p: p.to(dtype), params)
            logits = llama().forward(low, batch["tokens"], settings)
            return logits.float().square().mean()

        def step(params: Any, batch: Any) -> Any:
            grads, loss = grad_and_value(loss_fn)(params, batch)
            return optree.tree_map(lambda p, g: p - 0.1 * g, params, grads), loss

        return yf.shard(step, mesh=mesh_of(4))

    low, high = (
        step_in(dtype).lower(params, batch) for dtype in (torch.bfloat16, torch.float32)
    )
    gathers, scatters, _ = split(low.plan)
    values = low.plan.values
    gathered = {values[r.id].meta.dtype for t in gathers for r in t.sources}
    assert gathered == {torch.bfloat16}
    costs = low.cost_analysis(), high.cost_analysis()
    assert costs[0]["all_gathers"] == costs[1]["all_gathers"]
    assert costs[0]["gathered_bytes"] * 2 == costs[1]["gathered_bytes"]
    assert costs[0]["unplanned_collectives"] == 0
    sizes = Counter(tuple(leaf.shape) for leaf in optree.tree_leaves(params))
    assert shapes(low.plan, scatters) == sizes


# --- and it is right ------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_are_those_of_one_device(case: Case) -> None:
    step, args, stage = lowered(case)
    compiled = stage.compile()
    params, opt_state, batch = args
    placed = yf.distribute((params, opt_state), mesh_of(case[0]))
    for _ in range(3):
        params, opt_state, wanted = step(params, opt_state, batch)
        *placed, found = compiled(*placed, batch)
        assert_same(found, wanted)
        assert_same(placed[0], params)
        assert_same(placed[1], opt_state)


def test_evaluation_and_prediction_are_those_of_one_device() -> None:
    settings = config(True, 5)
    functions = llama().make_functions(settings, llama().make_optimiser(settings))
    params, batch = double(llama().init_params(settings)), tokens(5, settings.context)
    placed = yf.distribute(params, mesh_of(3))
    for fn in (functions.evaluate, functions.predict):
        assert_same(fn(placed, batch), fn.__wrapped__(params, batch))
