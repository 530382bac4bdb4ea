"""Steps that sharded training gets wrong elsewhere; each equals the unsharded step.

Every case is a pure step on global arrays with a batch that is split on dimension 0 and
parameters sharded on dimension 0, run for three steps at 1, 2, 3 and 4 ranks and on
meshes of replicas.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import MESHES, WORLDS, agree, assert_same, mesh_of
from torch.func import (
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)

import yafsdp_fn as yf

Case = tuple[Any, ...]  # the step, its state, and its batch
Tree = dict[str, torch.Tensor]

CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Register a case under its function's name."""
    CASES[make.__name__] = make
    return make


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Values that depend on the shape alone."""
    seed = sum((d + 2) * 31**n for n, d in enumerate(shape))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=generator)


def labels(rows: int, classes: int = 5) -> torch.Tensor:
    return (torch.arange(rows) * 7 + 3) % classes


def gradient_step(loss: Callable[[Tree, Any], torch.Tensor]) -> Callable[..., Any]:
    """Plain gradient descent on a loss, which is returned as a metric."""

    def step(params: Tree, batch: Any) -> Any:
        grads, value = grad_and_value(loss)(params, batch)
        return {k: params[k] - 0.1 * grads[k] for k in params}, {"loss": value}

    return step


def adamw_step(loss: Callable[[Tree, Any], torch.Tensor], params: Tree) -> Case:
    """AdamW on a loss, and its state."""
    optimiser = yf.optim.adamw(1e-2, weight_decay=0.1)

    def step(params: Tree, state: Any, batch: Any) -> Any:
        grads, value = grad_and_value(loss)(params, batch)
        updates, state = optimiser.update(grads, state, params)
        return yf.optim.apply_updates(params, updates), state, value

    return step, params, optimiser.init(params)


# --- values of the whole batch --------------------------------------------------------


def classify(params: Tree, batch: Any, **options: Any) -> torch.Tensor:
    logits = batch["x"] @ params["w"].T
    return F.cross_entropy(logits, batch["y"], **options)


def with_ignored(rows: int, ignored: list[int]) -> Tree:
    target = labels(rows)
    target[ignored] = -100
    return {"x": normal(rows, 4), "y": target}


@case
def rows_ignored() -> Case:
    return gradient_step(classify), {"w": normal(5, 4)}, with_ignored(8, [0, 3, 4])


@case
def all_rows_of_a_rank_ignored() -> Case:
    return gradient_step(classify), {"w": normal(5, 4)}, with_ignored(8, [0, 1])


@case
def mask_mean() -> Case:
    def loss(params: Tree, batch: Tree) -> torch.Tensor:
        rows = (batch["x"] @ params["w"].T).square().sum(-1)
        return (rows * batch["m"]).sum() / batch["m"].sum()

    mask = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 1], dtype=torch.float64)
    return gradient_step(loss), {"w": normal(5, 4)}, {"x": normal(8, 4), "m": mask}


@case
def class_weights() -> Case:
    weight = torch.arange(1.0, 6.0, dtype=torch.float64)
    step = gradient_step(lambda p, b: classify(p, b, weight=weight))
    return step, {"w": normal(5, 4)}, with_ignored(8, [2])


@case
def label_smoothing() -> Case:
    step = gradient_step(lambda p, b: classify(p, b, label_smoothing=0.1))
    return step, {"w": normal(5, 4)}, with_ignored(8, [])


@case
def micro_batches() -> Case:
    """Seven valid rows and one: gradients are summed, nothing is divided twice."""

    def loss(params: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ params["w"].T, y, reduction="sum") / 8

    def step(params: Tree, batch: Tree) -> Any:
        grads = torch.zeros_like(params["w"])
        for rows in (slice(0, 8), slice(8, 16)):
            grads = grads + grad(loss)(params, batch["x"][rows], batch["y"][rows])["w"]
        return {"w": params["w"] - 0.1 * grads}, {"grads": grads}

    return step, {"w": normal(5, 4)}, with_ignored(16, [1, *range(8, 15)])


def clipped(p: float) -> Case:
    optimiser = yf.optim.chain(yf.optim.clip_by_global_norm(0.01, p), yf.optim.sgd(0.1))

    def loss(params: Tree, batch: torch.Tensor) -> torch.Tensor:
        return ((batch @ params["w"].T + 1).sum(1) * params["b"].sum()).square().mean()

    def step(params: Tree, batch: torch.Tensor) -> Any:
        grads = grad(loss)(params, batch)
        updates, _ = optimiser.update(grads, optimiser.init(params), params)
        return yf.optim.apply_updates(params, updates), yf.optim.global_norm(grads, p)

    return step, {"w": normal(5, 4), "b": normal(3)}, normal(8, 4)


for _p in (1.0, 2.0, 3.0, math.inf):
    CASES[f"clip_by_norm_{_p}"] = lambda p=_p: clipped(p)


@case
def clip_by_torchs_norms() -> Case:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        grads = grad(lambda q: (batch @ q["w"].T + q["b"]).square().mean())(params)
        norms = [torch.linalg.vector_norm(g) for g in grads.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        scale = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        return {k: params[k] - 0.1 * scale * g for k, g in grads.items()}, norm

    return step, {"w": normal(5, 4), "b": normal(5)}, normal(8, 4)


@case
def metrics_of_every_kind() -> Case:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        floats = {
            "mean": batch.mean(),
            "max": batch.max(),
            "min": batch.min(),
            "amax": batch.amax(0),
            "std": batch.std(),
            "var": batch.var(0),
            "norm": batch.norm(),
            "prod": batch.prod(),
            "median": batch.median(),
            "quantile": torch.quantile(batch, 0.3),
            "logsumexp": batch.logsumexp(0),
            "sorted": batch.sort(0)[0],
            "top": batch.topk(2, 0)[0],
            "cumsum": batch.cumsum(0),
        }
        exact = {
            "count": (batch > 0).sum(),
            "nonzero": torch.count_nonzero(batch),
            "argmax": batch.sum(1).argmax(),
            "any": (batch > 2).any(),
            "all": (batch > -9).all(),
        }
        return {"w": params["w"] * 0.9}, floats, exact

    return step, {"w": normal(5, 4)}, normal(8, 4)


@case
def contrastive_over_the_batch() -> Case:
    def loss(params: Tree, batch: Tree) -> torch.Tensor:
        first, second = (batch[k] @ params["w"].T for k in "ab")
        return F.cross_entropy(first @ second.T, torch.arange(8))

    return (
        gradient_step(loss),
        {"w": normal(5, 4)},
        {"a": normal(8, 4), "b": normal(8, 4)},
    )


@case
def batch_norm_in_training() -> Case:
    def step(params: Tree, state: Tree, batch: torch.Tensor) -> Any:
        def loss(p: Tree) -> Any:
            mean, var = state["mean"].clone(), state["var"].clone()
            hidden = batch @ p["w"].T
            hidden = F.batch_norm(hidden, mean, var, p["g"], p["b"], training=True)
            count = state["count"] + 1
            return hidden.pow(3).mean(), {"mean": mean, "var": var, "count": count}

        grads, (value, state) = grad_and_value(loss, has_aux=True)(params)
        return {k: params[k] - 0.1 * g for k, g in grads.items()}, state, value

    params = {"w": normal(5, 4), "g": normal(5), "b": normal(5)}
    state = {
        "mean": torch.zeros(5, dtype=torch.float64),
        "var": torch.ones(5, dtype=torch.float64),
        "count": torch.tensor(0),
    }
    return step, params, state, normal(8, 4)


@case
def per_sample_gradients() -> Case:
    def loss(params: Tree, x: torch.Tensor) -> torch.Tensor:
        return (params["w"] @ x).tanh().square().sum()

    def step(params: Tree, batch: torch.Tensor) -> Any:
        grads = vmap(grad(loss), (None, 0))(params, batch)["w"]
        norms = grads.flatten(1).norm(dim=1).clamp(min=0.1)
        return {"w": params["w"] - (grads / norms[:, None, None]).mean(0)}

    return step, {"w": normal(5, 4)}, normal(8, 4)


# --- leaves ---------------------------------------------------------------------------


def tied_loss(params: Tree, batch: torch.Tensor) -> torch.Tensor:
    hidden = F.embedding(batch, params["e"]).mean(1)
    return F.cross_entropy(hidden @ params["e"].T, batch[:, 0])


@case
def tied_embedding() -> Case:
    return gradient_step(tied_loss), {"e": normal(7, 4)}, labels(24, 7).view(8, 3)


@case
def rows_that_ranks_do_not_divide() -> Case:
    def loss(p: Tree, batch: torch.Tensor) -> torch.Tensor:
        hidden = (batch @ p["a"].T).sum(1) * p["b"].sum()
        return (hidden + p["c"].sum() * p["d"].square().sum()).square().mean()

    params = {"a": normal(5, 4), "b": normal(3), "c": normal(1, 6), "d": normal(7)}
    return *adamw_step(loss, params), normal(8, 4)


@case
def odd_leaves() -> Case:
    """Unused under decay, 0-dim, transposed, channels_last, empty."""

    def loss(p: Tree, batch: torch.Tensor) -> torch.Tensor:
        scaled = ((batch @ p["w"].T) * p["temperature"]).square().mean()
        return scaled + p["transposed"].square().sum() + p["filter"].pow(3).sum()

    params = {
        "w": normal(5, 4),
        "unused": normal(3, 3),
        "temperature": normal(),
        "transposed": normal(4, 5).T,
        "filter": normal(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        "empty": normal(0, 3),
    }
    return *adamw_step(loss, params), normal(8, 4)


@case
def rules_by_shape() -> Case:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        grads = grad(lambda p: (batch @ p["w"].T + p["b"]).square().mean())(params)
        decay = {k: 0.1 * v.ndim * v.shape[0] for k, v in params.items()}
        return {k: v - 0.1 * grads[k] - decay[k] * v for k, v in params.items()}

    return step, {"w": normal(5, 4), "b": normal(5)}, normal(8, 4)


@case
def buffers() -> Case:
    def step(params: Tree, state: Tree, batch: torch.Tensor) -> Any:
        state = {
            "mean": state["mean"] * 0.9 + 0.1 * batch.float().mean(0),
            "count": state["count"] + 1,
            "mask": state["mask"] ^ (batch[0] > 0),
        }
        return params, state, batch.sum()

    state = {
        "mean": torch.zeros(4),
        "count": torch.arange(5),
        "mask": torch.zeros(4, dtype=torch.bool),
    }
    return step, {"w": normal(5, 4)}, state, normal(8, 4)


@case
def frozen_base_with_factors() -> Case:
    def step(base: Tree, factors: Tree, batch: torch.Tensor) -> Any:
        def loss(f: Tree) -> torch.Tensor:
            adapted = batch @ base["w"].T + (batch @ f["b"].T) @ f["a"].T
            return adapted.square().mean()

        grads = grad(loss)(factors)
        return base, {k: factors[k] - 0.1 * g for k, g in grads.items()}

    return (
        step,
        {"w": normal(5, 4)},
        {"a": normal(5, 2), "b": normal(2, 4)},
        normal(8, 4),
    )


@case
def bfloat16_compute() -> Case:
    def loss(params: Tree, batch: torch.Tensor) -> torch.Tensor:
        low = batch.bfloat16() @ params["w"].bfloat16().T
        return low.float().square().mean()

    single = torch.float32
    return (
        gradient_step(loss),
        {"w": normal(5, 4, dtype=single)},
        normal(8, 4, dtype=single),
    )


# --- constants, operators, shapes -----------------------------------------------------

CAPTURED = normal(4)


@case
def constants_and_closures() -> Case:
    def loss(params: Tree, batch: torch.Tensor) -> torch.Tensor:
        float64 = {"dtype": torch.float64}
        hidden = (batch @ params["w"].T) @ torch.ones(5, 5, **float64).tril()
        hidden = hidden + torch.arange(5) + torch.eye(8, 5, **float64)
        return (hidden + CAPTURED.sum() + torch.tensor(2.0)).square().mean()

    return gradient_step(loss), {"w": normal(5, 4)}, normal(8, 4)


@case
def operators_without_a_rule() -> Case:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        q, _ = torch.linalg.qr(params["w"])
        order = torch.sort(params["w"][:, 0])[0]
        metrics = {
            "cummax": batch.cummax(0)[0],
            "place": torch.searchsorted(order, batch[:, 0].contiguous()),
            "inverse": torch.linalg.inv(params["w"].T @ params["w"]),
        }
        return {"w": 0.5 * params["w"] + q}, metrics

    return step, {"w": normal(5, 4)}, normal(8, 4)


@case
def statistics_of_uneven_leaves() -> Case:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        metrics = {
            "mean": params["a"].mean(),
            "mean of one row": params["b"].mean(),
            "inverse": 1 / (params["a"].norm() + 0.1),
            "extreme": params["a"].sum(0).abs().max(),
            "amax": params["b"].amax(0),
        }
        new = {k: v - 0.1 * v.mean() / (v.norm() + 0.1) for k, v in params.items()}
        return new, metrics

    return step, {"a": normal(3, 4), "b": normal(1, 4)}, normal(8, 4)


@case
def views_across_the_split() -> Case:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        metrics = {
            "refactored": params["w"].view(16, 6),
            "row": params["w"][2],
            "heads": batch.view(8, 2, 2),
            "sliced": batch[1:7:2],
            "joined": torch.cat([batch, 2 * batch]),
            "stacked": torch.stack([batch, batch]),
            "gathered": batch.gather(0, torch.zeros(3, 4, dtype=torch.int64)),
            "top": batch.topk(3, 0),
            "flipped": batch.flip(0),
            "rolled": batch.roll(1, 0),
            "picked": batch[torch.tensor([3, 1, 1])],
            "chunk": batch.chunk(3)[1],
            "flat": batch.reshape(-1),
            "transposed": batch.T,
            "unbound": batch.unbind(0)[3],
            "padded": F.pad(batch, (0, 0, 1, 1)),
            "repeated": batch.repeat(2, 2),
            "interleaved": batch.repeat_interleave(2, 0),
            "expanded": batch[:1].expand(5, 4),
        }
        return {"w": params["w"] * 0.9}, metrics

    return step, {"w": normal(12, 8)}, normal(8, 4)


def attend(params: Tree, batch: torch.Tensor) -> torch.Tensor:
    rows, length, _ = batch.shape
    q, k, v = (
        (batch @ params[n]).view(rows, length, 2, 4).transpose(1, 2) for n in "qkv"
    )
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    masked = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    mixed = (causal + 2 * masked).transpose(1, 2).reshape(rows * length, 8)
    normed = F.layer_norm(mixed @ params["o"], (8,), params["g"], params["b"])
    return normed.pow(3).mean() + F.rms_norm(mixed, (8,), params["g"]).pow(3).mean()


def attention_of(rows: int) -> Case:
    params = {n: normal(8, 8) + i for i, n in enumerate("qkvo")}
    params |= {"g": normal(8), "b": normal(8) + 1}
    return gradient_step(attend), params, normal(rows, 5, 8)


for _rows in (1, 6, 9, 10):
    CASES[f"attention_over_{_rows}_rows"] = lambda rows=_rows: attention_of(rows)


@case
def convolutions() -> Case:
    def loss(params: Tree, batch: torch.Tensor) -> torch.Tensor:
        hidden = F.conv2d(batch, params["w"], params["b"], padding=1)
        pooled = F.max_pool2d(F.group_norm(hidden, 3).relu(), 2)
        return pooled.square().mean()

    return (
        gradient_step(loss),
        {"w": normal(3, 2, 3, 3), "b": normal(3)},
        normal(8, 2, 4, 4),
    )


@case
def lookups_by_index() -> Case:
    def loss(params: Tree, batch: Tree) -> torch.Tensor:
        logits = (batch["x"] @ params["w"].T).log_softmax(-1)
        picked = logits[torch.arange(8), batch["y"]].mean()
        summed = torch.zeros(5, 5, dtype=torch.float64)
        summed = summed.index_add(0, batch["y"], logits)
        return summed.square().mean() - picked + params["w"][batch["y"]].square().mean()

    return gradient_step(loss), {"w": normal(5, 4)}, {"x": normal(8, 4), "y": labels(8)}


@case
def complex_numbers() -> Case:
    def loss(params: Tree, batch: torch.Tensor) -> torch.Tensor:
        hidden = batch @ params["w"].T
        return torch.view_as_complex(torch.stack([hidden, 2 * hidden], -1)).abs().mean()

    return gradient_step(loss), {"w": normal(5, 4)}, normal(8, 4)


# --- torch.func -----------------------------------------------------------------------


@case
def higher_derivatives() -> Case:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        def loss(w: torch.Tensor) -> torch.Tensor:
            return (batch @ w).pow(4).mean()

        w, ones = params["w"], torch.ones_like(params["w"])
        _, pull = vjp(lambda x: (batch @ x).sin(), w)
        metrics = {
            "hessian": hessian(loss)(w),
            "product": jvp(grad(loss), (w,), (ones,))[1],
            "reverse": jacrev(lambda x: (batch @ x).sin())(w),
            "forward": jacfwd(lambda x: (batch @ x).sin())(w),
            "pulled": pull(batch[:, 0].contiguous())[0],
        }
        return {"w": 0.9 * w}, metrics

    return step, {"w": normal(4)}, normal(8, 4)


@case
def gradient_penalty() -> Case:
    def loss(params: Tree, batch: torch.Tensor) -> torch.Tensor:
        slopes = vmap(grad(lambda x: (params["w"] @ x).tanh().sum()))(batch)
        return (slopes.norm(dim=1) - 1).square().mean()

    return gradient_step(loss), {"w": normal(5, 4)}, normal(8, 4)


@case
def gradient_through_a_step() -> Case:
    def inner(params: Tree, batch: torch.Tensor) -> torch.Tensor:
        return (batch @ params["w"].T).tanh().square().mean()

    def outer(params: Tree, batch: torch.Tensor) -> torch.Tensor:
        grads = grad(inner)(params, batch)
        return inner({k: params[k] - 0.1 * grads[k] for k in params}, batch)

    return gradient_step(outer), {"w": normal(5, 4)}, normal(8, 4)


@case
def newton_schulz() -> Case:
    """The iteration sees the whole matrix, not a shard of it."""

    def step(params: Tree, batch: torch.Tensor) -> Any:
        x = grad(lambda w: (batch @ w.T).square().mean())(params["w"])
        x = x / x.norm()
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ (x.T @ x)
        return {"w": params["w"] - 0.1 * x}

    return step, {"w": normal(6, 4)}, normal(8, 4)


# --- batches --------------------------------------------------------------------------

for _rows in (1, 3, 9, 10):
    CASES[f"batch_of_{_rows}"] = lambda rows=_rows: (
        gradient_step(classify),
        {"w": normal(5, 4)},
        with_ignored(rows, []),
    )


@pytest.mark.parametrize("world", [*WORLDS, *MESHES], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_sharded_equals_unsharded(name: str, world: Any) -> None:
    # A rank's part of a bfloat16 gradient is rounded before it is summed in float32.
    rtol = 4e-3 if name == "bfloat16_compute" else None
    agree(*CASES[name](), world=world, rtol=rtol)


@pytest.mark.filterwarnings(
    "ignore:Attempted to insert a get_attr"
)  # torch's own graph
@pytest.mark.parametrize("world", [1, 3, (2, 2)], ids=str)
def test_linearize_inside_a_step(world: Any) -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        value, push = linearize(lambda w: (batch @ w.T).sin().sum(0), params["w"])
        tangent = push(torch.ones_like(params["w"]))
        return {"w": params["w"] - 0.1 * push(params["w"])[:, None]}, value, tangent

    agree(step, {"w": normal(5, 4)}, normal(8, 4), world=world)


# --- what the program of a case must look like ----------------------------------------


def lowered(made: Case, world: Any) -> yf.Lowered:
    step, *state, batch = made
    mesh = mesh_of(world)
    return yf.shard(step).lower(*(yf.distribute(s, mesh) for s in state), batch)


def moved(lower: yf.Lowered) -> list[tuple[str, Any]]:
    """Kind and value of everything that a program communicates."""
    values = lower.plan.values
    transfers = list(lower.plan.transfers())
    return [(t.kind, values[r.id].meta) for t in transfers for r in t.sources]


def test_a_tied_weight_is_reduced_once() -> None:
    kinds = [t.kind for t in lowered(tied_embedding(), 4).plan.transfers()]
    assert kinds.count("reduce_scatter") == 1


def test_a_frozen_leaf_is_gathered_and_never_reduced() -> None:
    shapes = [(k, m.shape) for k, m in moved(lowered(frozen_base_with_factors(), 4))]
    assert ("all_gather", (5, 4)) in shapes
    assert ("reduce_scatter", (5, 4)) not in shapes
    assert sorted(s for k, s in shapes if k == "reduce_scatter") == [(2, 4), (5, 2)]


def test_the_gradient_of_a_product_of_thin_factors_is_not_reduced() -> None:
    def step(base: Tree, factors: Tree, batch: torch.Tensor) -> Any:
        def loss(f: Tree) -> torch.Tensor:
            return (batch @ (base["w"] + f["a"] @ f["b"]).T).square().mean()

        grads = grad(loss)(factors)
        return base, {k: factors[k] - 0.1 * g for k, g in grads.items()}

    factors = {"a": normal(16, 2), "b": normal(2, 12)}
    case = step, {"w": normal(16, 12)}, factors, normal(8, 12)
    agree(*case, world=3)
    reduced = [m.shape for k, m in moved(lowered(case, 4)) if k == "reduce_scatter"]
    assert sorted(reduced) == [(2, 12), (16, 2)]


def test_bfloat16_is_gathered_and_float32_is_reduced() -> None:
    dtypes = {(k, m.dtype) for k, m in moved(lowered(bfloat16_compute(), 4))}
    assert ("all_gather", torch.bfloat16) in dtypes
    assert ("all_gather", torch.float32) not in dtypes
    assert ("reduce_scatter", torch.float32) in dtypes
    assert ("reduce_scatter", torch.bfloat16) not in dtypes


def test_a_hundred_small_updates_are_not_lost() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Tree:
        grads = grad(lambda p: (batch * p["w"].bfloat16()).float().sum())(params)
        return {"w": params["w"] - 1e-4 * grads["w"]}

    sharded = yf.shard(step)
    params = yf.distribute({"w": torch.ones(8)}, mesh_of(4))
    for _ in range(100):
        params = sharded(params, torch.ones(1, 8, dtype=torch.bfloat16))
    assert_same(params, {"w": torch.full((8,), 0.99)})
    assert sharded.trace_count() == 1


def test_replicas_reduce_each_gradient_once_more() -> None:
    plan = lowered(rules_by_shape(), (2, 2)).plan
    inner = [t for t in plan.transfers() if t.kind == "reduce_scatter"]
    outer = [t for t in plan.transfers() if t.kind == "all_reduce" and t.axis == 0]
    assert {t.axis for t in inner} == {1}
    gradients = [ref for t in inner for ref in t.targets]
    again = [ref for t in outer for ref in t.sources if plan.values[ref.id].meta.shape]
    assert len(gradients) == 2
    assert sorted(again, key=str) == sorted(gradients, key=str)


def test_optimiser_state_is_placed_as_its_parameter_and_stable() -> None:
    step, params, state, batch = rows_that_ranks_do_not_divide()
    sharded, mesh = yf.shard(step), mesh_of(4)
    placed, moments = yf.distribute(params, mesh), yf.distribute(state, mesh)
    for _ in range(3):
        placed, moments, _ = sharded(placed, moments, batch)
        assert moments.first_moment["a"].placements == placed["a"].placements
    assert sharded.trace_count() == 1


def test_an_uneven_batch_moves_nothing_unplanned() -> None:
    for rows in (1, 9, 10):
        cost = lowered(attention_of(rows), 4).cost_analysis()
        assert cost["unplanned_collectives"] == 0, rows


def summed_over_parts() -> Case:
    def loss(params: Tree, batch: torch.Tensor) -> torch.Tensor:
        return (batch @ params["w"].T + params["b"]).tanh().square().sum()

    pull = yf.accumulate(grad_and_value(loss), 2)

    def step(params: Tree, batch: torch.Tensor) -> Any:
        grads, value = pull(params, batch)
        return {k: params[k] - 0.01 * g for k, g in grads.items()}, value

    return step, {"w": normal(5, 4), "b": normal(5)}, normal(8, 4)


@pytest.mark.parametrize("world", [2, 4, (2, 2)], ids=str)
def test_gradients_of_parts_may_be_reduced_each(world: Any) -> None:
    counts = {}
    for reduce in ("once", "each"):
        sharded = agree(
            *summed_over_parts(), world=world, schedule=yf.Schedule(reduce=reduce)
        )
        params = yf.distribute({"w": normal(5, 4), "b": normal(5)}, mesh_of(world))
        transfers = sharded.lower(params, normal(8, 4)).plan.transfers()
        scatters = (t for t in transfers if t.kind == "reduce_scatter")
        counts[reduce] = sum(len(t.sources) for t in scatters)
    assert counts == {"once": 2, "each": 4}


def test_gradients_may_travel_in_another_dtype() -> None:
    step, params, batch = summed_over_parts()
    params = {k: v.float() for k, v in params.items()}
    schedule = yf.Schedule(reduce_dtype=torch.bfloat16)
    sharded = agree(step, params, batch.float(), rtol=1e-2, schedule=schedule)
    lower = sharded.lower(yf.distribute(params, mesh_of(4)), batch.float())
    dtypes = {(k, m.dtype) for k, m in moved(lower)}
    assert ("reduce_scatter", torch.bfloat16) in dtypes
    assert ("reduce_scatter", torch.float32) not in dtypes
