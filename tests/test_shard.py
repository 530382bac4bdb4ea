"""The transform: its cache, its trees, its results, its errors, and donation."""

import contextlib
import dataclasses
import functools
import gc
import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from support import assert_same, mesh_of
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import grad, grad_and_value, vmap

import yafsdp_fn as yf

Tree = Any
Step = Callable[..., Any]

W = torch.arange(20.0).view(5, 4) / 10
B = torch.tensor([0.5, -1.0, 2.0, 0.25])
X = torch.arange(24.0).view(6, 4) / 24


def loss_fn(params: Tree, x: torch.Tensor) -> torch.Tensor:
    return (x @ params["w"].T).square().mean() + (x * params["b"]).sum()


def train(params: Tree, batch: torch.Tensor) -> Any:
    grads, loss = grad_and_value(loss_fn)(params, batch)
    return {k: p - 0.1 * grads[k] for k, p in params.items()}, {"loss": loss}


def fresh() -> Tree:
    return {"w": W.clone(), "b": B.clone()}


# --- the cache ------------------------------------------------------------------------


def test_plain_goes_in_dtensors_come_out_and_go_in_without_a_second_trace() -> None:
    step = yf.shard(train, mesh=mesh_of(4))
    plain: Tree = fresh()
    params: Tree = fresh()
    for _ in range(4):
        plain, wanted = train(plain, X)
        params, found = step(params, X)
        assert_same(found, wanted)
        assert_same(params, plain)
        assert all(isinstance(leaf, DTensor) for leaf in params.values())
    assert (step.trace_count(), step.cache_size()) == (1, 1)


def test_distributed_and_plain_state_share_a_program() -> None:
    step = yf.shard(train)
    mesh = mesh_of(3)
    placed = yf.distribute(fresh(), mesh)
    step(placed, X)
    step({"w": W, "b": placed["b"]}, X)
    step(placed, yf.distribute(X, mesh))
    assert (step.trace_count(), step.cache_size()) == (1, 1)


@pytest.mark.parametrize(
    ("changed", "batch"),
    [
        ({"w": W[:3], "b": B}, X),  # shape
        ({"w": W.double(), "b": B.double()}, X.double()),  # dtype
        ({"w": W, "b": B, "c": None}, X),  # structure
        ({"w": W, "b": B, "c": 1}, X),  # static value
        ({"w": W.t().contiguous().t(), "b": B}, X),  # stride
        ({"w": W, "b": B}, X[:5]),  # shape of the batch
    ],
)
def test_another_kind_of_arguments_is_another_program(
    changed: Tree, batch: Any
) -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return batch @ params["w"].T + (batch * params["b"]).sum()

    sharded = yf.shard(step, mesh=mesh_of(2))
    for args in ((fresh(), X), (changed, batch)) * 2:
        assert_same(sharded(*args), step(*args))
    assert (sharded.trace_count(), sharded.cache_size()) == (2, 2)


def test_placements_and_meshes_are_part_of_the_key() -> None:
    step = yf.shard(train)
    wanted = train(fresh(), X)
    for count, (world, placements) in enumerate(
        [
            (2, (Shard(0),)),
            (2, (Shard(1),)),
            (2, (Replicate(),)),
            (4, (Shard(0),)),
            ((2, 2), (Replicate(), Shard(0))),
            ((2, 2), (Shard(0), Replicate())),
        ],
        start=1,
    ):
        mesh = mesh_of(world)
        own = lambda path, leaf, p=placements: p if leaf.dim() == 2 else None  # noqa: E731
        for _ in range(2):
            params, found = step(yf.distribute(fresh(), mesh, own), X)
            assert_same((params, found), wanted)
            assert params["w"].placements == placements
        assert step.trace_count() == step.cache_size() == count


def test_equal_meshes_are_one_mesh() -> None:
    step = yf.shard(train)
    for _ in range(3):
        step(yf.distribute(fresh(), mesh_of(2)), X)
    assert (step.trace_count(), step.cache_size()) == (1, 1)


def test_trace_and_lower_execute_nothing_and_keep_nothing() -> None:
    step = yf.shard(train, mesh=mesh_of(2))
    before = fresh()
    step.trace(before, X)
    step.lower(before, X)
    assert step.cache_size() == 0
    assert_same(before, fresh())


# --- trees ----------------------------------------------------------------------------


class Moments(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Model:
    weight: torch.Tensor
    layers: list[torch.Tensor]
    name: str


optree.register_pytree_node(
    Model,
    lambda m: ((m.weight, m.layers), m.name, ("weight", "layers")),
    lambda name, children: Model(*children, name),
    namespace="yafsdp_fn",
)


def test_trees_of_every_kind_keep_their_structure() -> None:
    def step(state: Tree, batch: torch.Tensor) -> Any:
        factor = batch.sum()
        moments = Moments(state["m"].first * factor, None)
        model = Model(
            state["model"].weight * factor,
            [layer + 1 for layer in state["model"].layers],
            state["model"].name,
        )
        rest = (state["rest"][0] * 2, (), state["rest"][2], {})
        return {"m": moments, "model": model, "rest": rest, "none": None}, factor

    state = {
        "rest": (B, (), "label", {}),
        "model": Model(W, [B, B * 2], "llama"),
        "m": Moments(W, None),
        "none": None,
    }
    sharded = yf.shard(step, mesh=mesh_of(3))
    plain, placed = state, state
    for _ in range(3):
        plain, wanted = step(plain, X)
        placed, found = sharded(placed, X)
        assert_same(found, wanted)
        assert type(placed["m"]) is Moments
        assert placed["m"].second is None
        assert placed["rest"][1:] == ((), "label", {})
        assert isinstance(placed["model"], Model)
        assert placed["model"].name == "llama"
        assert_same(placed["m"].first, plain["m"].first)
        assert_same(placed["model"].weight, plain["model"].weight)
        assert_same(placed["model"].layers, plain["model"].layers)
    assert sharded.trace_count() == 1


def test_an_aux_value_of_a_node_is_part_of_the_key() -> None:
    def step(model: Model, batch: torch.Tensor) -> Any:
        return model.weight * (2 if model.name == "two" else 3) * batch.sum()

    sharded = yf.shard(step, mesh=mesh_of(2))
    for name in ("two", "three", "two"):
        model = Model(W, [], name)
        assert_same(sharded(model, X), step(model, X))
    assert sharded.trace_count() == 2


def test_the_order_of_a_dict_does_not_matter() -> None:
    sharded = yf.shard(train, mesh=mesh_of(2))
    sharded({"w": W, "b": B}, X)
    found = sharded({"b": B, "w": W}, X)
    assert_same(found, train(fresh(), X))
    assert sharded.trace_count() == 1


def test_one_tensor_in_two_places() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return {"a": params["a"] * 2, "b": params["b"] * batch.sum()}

    sharded = yf.shard(step, mesh=mesh_of(2))
    shared = yf.distribute(W, mesh_of(2))
    found = sharded({"a": shared, "b": shared}, X)
    assert_same(found, step({"a": W, "b": W}, X))


# --- results --------------------------------------------------------------------------


def test_replicated_results_are_plain_and_sharded_ones_dtensors() -> None:
    def step(params: Tree, opt_state: Tree, batch: torch.Tensor) -> Any:
        rows = batch @ params["w"].T
        state = {"count": opt_state["count"] + 1, "m": opt_state["m"] * 0.9}
        return params, state, {"rows": rows, "loss": rows.mean(), "top": rows.max()}

    mesh = mesh_of(3)
    params = yf.distribute({"w": W, "frozen": W.t()}, mesh)
    state = {"count": torch.tensor(3), "m": W}
    kept, made, metrics = yf.shard(step)(params, state, X)
    assert_same((kept, made, metrics), step({"w": W, "frozen": W.t()}, state, X))
    assert kept["w"].placements == kept["frozen"].placements == (Shard(0),)
    assert made["m"].placements == (Shard(0),)
    assert metrics["rows"].placements == (Shard(0),)
    for plain in (made["count"], metrics["loss"], metrics["top"]):
        assert type(plain) is torch.Tensor


def test_a_result_lies_where_its_argument_lay() -> None:
    mesh = mesh_of((2, 2))
    placements = {
        "['rows']": (Replicate(), Shard(0)),
        "['columns']": (Replicate(), Shard(1)),
        "['both']": (Shard(1), Shard(0)),
        "['whole']": (Replicate(), Replicate()),
    }
    tree = {path[2:-2]: torch.arange(32.0).view(8, 4) for path in placements}
    seen = []

    def choose(path: str, leaf: torch.Tensor) -> Any:
        seen.append(path)
        return next(p for name, p in placements.items() if path.endswith(name))

    def step(params: Tree, batch: torch.Tensor) -> Any:
        return {k: p * batch.sum() for k, p in params.items()}

    params = yf.distribute(tree, mesh, choose)
    sharded = yf.shard(step)
    for _ in range(2):
        found = sharded(params, X)
        for path, wanted in placements.items():
            assert found[path[2:-2]].placements == wanted
    assert_same(found, step(tree, X))
    assert len(seen) == 4


def test_gradients_lie_as_their_parameters() -> None:
    grads = yf.shard(grad(loss_fn))(yf.distribute(fresh(), mesh_of(4)), X)
    assert_same(grads, grad(loss_fn)(fresh(), X))
    assert grads["w"].placements == grads["b"].placements == (Shard(0),)


def test_static_results_and_floats_come_out_as_they_are() -> None:
    def step(params: Tree, lr: float, batch: torch.Tensor) -> Any:
        return params * lr, {"lr": lr, "next": lr / 2, "n": 3, "on": True, "s": "a"}

    sharded = yf.shard(step, mesh=mesh_of(2))
    for lr in (0.5, 0.25):
        found = sharded(W, lr, X)
        assert_same(found, step(W, lr, X))
        assert type(found[1]["lr"]) is float
    assert sharded.trace_count() == 1


# --- stages ---------------------------------------------------------------------------


def test_the_stages_can_be_stopped_at_and_read() -> None:
    step = yf.shard(train)
    args = (yf.distribute(fresh(), mesh_of(4)), X)
    traced = step.trace(*args)
    lowered = step.lower(*args)
    compiled = lowered.compile()
    assert isinstance(traced, yf.Traced)
    assert isinstance(lowered, yf.Lowered)
    assert isinstance(compiled, yf.Compiled)
    assert "params['w']" in traced.as_text()
    assert lowered.as_text() == compiled.as_text() == traced.lower().as_text()
    assert lowered.as_text().startswith("schedule on mesh fsdp=4")
    assert lowered.plan.as_text().startswith("program on mesh fsdp=4")
    assert compiled.plan is lowered.plan
    assert lowered.memory_analysis() == compiled.memory_analysis()
    assert lowered.cost_analysis() == compiled.cost_analysis()
    yf.check(compiled.plan)
    assert_same(compiled(*args), train(fresh(), X))


def test_analyses_count_the_bytes_of_the_first_rank() -> None:
    lowered = yf.shard(train, mesh=mesh_of(4)).lower(fresh(), X)
    # Of five rows and four numbers on four ranks the first holds two rows, one number;
    # of six rows of the batch two.
    shards = 4 * (2 * 4 + 1 + 2 * 4)
    memory = lowered.memory_analysis()
    assert memory["shard_bytes"] == shards
    assert memory["output_bytes"] == 4 * (2 * 4 + 1 + 1)
    assert memory["peak_bytes"] >= shards + W.nbytes
    cost = lowered.cost_analysis()
    assert cost["gathered_bytes"] >= W.nbytes + B.nbytes
    assert cost["unplanned_collectives"] == 0
    assert cost["reductions"] == 3  # two gradients and the loss


def test_a_compiled_program_refuses_other_arguments() -> None:
    compiled = yf.shard(train, mesh=mesh_of(2)).lower(fresh(), X).compile()
    for args in (
        ({"w": W}, X),
        ({"w": W[:3], "b": B}, X),
        ({"w": W.double(), "b": B}, X),
        (fresh(), X[:5]),
    ):
        with pytest.raises(yf.ArgumentError):
            compiled(*args)


def test_a_compiled_program_is_right_or_refused_when_a_value_has_changed() -> None:
    rate, scale = 2.0, torch.ones(4)

    def step(params: Tree, lr: float, batch: torch.Tensor) -> Any:
        return params["w"] * rate * scale * math.sqrt(lr)

    compiled = yf.shard(step, mesh=mesh_of(2)).lower(fresh(), 4.0, X).compile()
    assert_same(compiled(fresh(), 4.0, X), step(fresh(), 4.0, X))
    scale.fill_(3.0)
    assert_same(compiled(fresh(), 4.0, X), step(fresh(), 4.0, X))
    with contextlib.suppress(yf.ArgumentError):  # a float that was read
        assert_same(compiled(fresh(), 9.0, X), step(fresh(), 9.0, X))
    rate = 5.0
    with contextlib.suppress(yf.ArgumentError):  # a number that was captured
        assert_same(compiled(fresh(), 4.0, X), step(fresh(), 4.0, X))


def test_a_sharded_function_looks_like_the_function() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        """Doubles."""
        return params * 2

    sharded = yf.shard(step)
    assert sharded.__wrapped__ is step
    assert (sharded.__name__, sharded.__doc__) == ("step", "Doubles.")
    assert inspect.signature(sharded) == inspect.signature(step)
    assert "step" in repr(sharded)
    assert isinstance(sharded, yf.ShardedFunction)


# --- composition ----------------------------------------------------------------------


def test_a_sharded_function_may_be_sharded() -> None:
    twice = yf.shard(yf.shard(train, mesh=mesh_of(2)))
    assert_same(twice(fresh(), X), train(fresh(), X))
    with pytest.raises(yf.ArgumentError):
        yf.shard(train)(fresh(), X)
    moved = yf.shard(yf.shard(train), mesh=mesh_of(2))
    assert_same(moved(fresh(), X), train(fresh(), X))


def test_a_sharded_function_inside_another_is_inlined() -> None:
    sharded_loss = yf.shard(loss_fn)

    def step(params: Tree, batch: torch.Tensor) -> Any:
        grads, loss = grad_and_value(sharded_loss)(params, batch)
        return {k: p - 0.1 * grads[k] for k, p in params.items()}, {"loss": loss}

    outer = yf.shard(step)
    params = yf.distribute(fresh(), mesh_of(3))
    assert_same(outer(params, X), train(fresh(), X))
    assert sharded_loss.trace_count() == 0
    assert_same(sharded_loss(params, X), loss_fn(fresh(), X))


def test_what_an_inlined_function_captures_is_never_stale() -> None:
    scale, rate = torch.ones(4), 1.0
    inner = yf.shard(lambda params, batch: params * batch.sum() * rate * scale)
    outer = yf.shard(lambda params, batch: inner(params, batch) + 1, mesh=mesh_of(2))
    assert_same(outer(W, X), W * X.sum() + 1)
    scale.fill_(2.0)
    assert_same(outer(W, X), W * X.sum() * 2 + 1)
    rate = 3.0
    assert_same(outer(W, X), W * X.sum() * 6 + 1)


def test_what_an_inlined_function_has_cached_is_no_captured_value() -> None:
    inner = yf.shard(lambda params, batch: params * batch.sum(), mesh=mesh_of(2))
    outer = yf.shard(lambda params, batch: inner(params, batch) + 1, mesh=mesh_of(2))
    for rows in (4, 5, 6):
        inner(W, X[:rows])
        assert_same(outer(W, X), W * X.sum() + 1)
    assert outer.trace_count() == 1


def test_vmap_over_a_sharded_function_says_what_to_write() -> None:
    sharded = yf.shard(loss_fn, mesh=mesh_of(2))
    with pytest.raises(yf.YafsdpError, match=r"yf.shard\(vmap\(f"):
        vmap(sharded, (None, 0))(fresh(), X.unsqueeze(1))


# --- drift ----------------------------------------------------------------------------


def test_state_that_changes_dtype_is_told_with_its_path() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return {"w": params["w"].double(), "b": params["b"]}, batch.sum()

    with pytest.warns(yf.RetraceWarning, match=r"params\['w'\].*float32.*float64"):
        yf.shard(step, mesh=mesh_of(2))(fresh(), X)


def test_state_that_changes_shape_is_told_with_its_path() -> None:
    def step(params: Tree, opt_state: Tree, batch: torch.Tensor) -> Any:
        grown = torch.cat([opt_state["m"][0], params["w"]])
        return params, {"m": (grown,)}, batch.sum()

    with pytest.warns(yf.RetraceWarning, match=r"opt_state\['m'\]\[0\].*\[5, 4\].*10"):
        yf.shard(step, mesh=mesh_of(2))(fresh(), {"m": (W,)}, X)


def test_a_counter_that_is_an_int_is_told() -> None:
    def step(state: Tree, batch: torch.Tensor) -> Any:
        return {"w": state["w"] * 2, "step": state["step"] + 1}

    with pytest.warns(yf.RetraceWarning, match=r"state\['step'\].*0-dim tensor"):
        yf.shard(step, mesh=mesh_of(2))({"w": W, "step": 0}, X)


def test_state_with_another_structure_is_told_with_its_path() -> None:
    def step(state: Tree, batch: torch.Tensor) -> Any:
        return {"w": state["w"] * 2, "new": state["w"]}, batch.sum()

    with pytest.warns(yf.RetraceWarning, match=r"state\['new'\].*nothing"):
        yf.shard(step, mesh=mesh_of(2))({"w": W}, X)


def test_a_warning_points_at_the_users_call() -> None:
    def step(state: Tree, batch: torch.Tensor) -> Any:
        return {"w": state["w"].double()}

    with pytest.warns(yf.RetraceWarning) as caught:
        yf.shard(step, mesh=mesh_of(2))({"w": W}, X)
    assert caught[0].filename == __file__


def test_steady_state_and_other_results_are_not_told_of() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return {"logits": batch @ params["w"].T, "norm": params["w"].norm()}

    sharded = yf.shard(step, mesh=mesh_of(2))  # warnings are errors here
    assert_same(sharded(fresh(), X), step(fresh(), X))


# --- bad input ------------------------------------------------------------------------


def test_no_mesh_and_plain_arguments_is_refused() -> None:
    with pytest.raises(
        yf.ArgumentError, match=r"no mesh.*yf\.distribute\(params, mesh"
    ):
        yf.shard(train)(fresh(), X)


def test_arguments_on_two_meshes_are_refused_with_their_paths() -> None:
    params = {
        "b": yf.distribute(B, mesh_of(2)),
        "w": yf.distribute(W, mesh_of(4)),
    }
    with pytest.raises(yf.ArgumentError, match=r"params\['b'\].*params\['w'\]"):
        yf.shard(train)(params, X)
    with pytest.raises(yf.ArgumentError, match="was sharded for"):
        yf.shard(train, mesh=mesh_of(3))(yf.distribute(fresh(), mesh_of(2)), X)


def test_a_captured_tensor_on_another_mesh_is_refused() -> None:
    held = yf.distribute(W, mesh_of(4))
    step = yf.shard(lambda params, batch: params * held)
    with pytest.raises(yf.ArgumentError, match="captured"):
        step(yf.distribute(W, mesh_of(2)), X)


def test_a_batch_without_a_leading_dimension_is_refused_with_its_path() -> None:
    def step(params: Tree, batch: Tree) -> Any:
        return params["w"] * batch["x"].sum() * batch["scale"]

    sharded = yf.shard(step, mesh=mesh_of(2))
    with pytest.raises(
        yf.ArgumentError, match=r"batch\['scale'\] has no leading dimension"
    ):
        sharded(fresh(), {"x": X, "scale": torch.tensor(2.0)})


@pytest.mark.parametrize("bad", [object(), {1, 2}, lambda x: x, 1j])
def test_a_result_that_is_no_tensor_or_static_value_is_refused(bad: Any) -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return params, {"metrics": [bad]}

    with pytest.raises(yf.ArgumentError) as caught:
        yf.shard(step, mesh=mesh_of(2))(fresh(), X)
    message = str(caught.value)
    assert message.startswith("output[1]['metrics'][0] is a ")
    assert type(bad).__qualname__ in message


@pytest.mark.parametrize("result", [None, (), {}, 3, {"loss": 1.0}])
def test_a_step_that_returns_no_tensor_is_refused(result: Any) -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return result

    with pytest.raises(
        yf.ArgumentError, match=r"step returns no tensor.*return params"
    ):
        yf.shard(step, mesh=mesh_of(2))(fresh(), X)


def test_a_failed_call_leaves_nothing_behind() -> None:
    broken = True

    def step(params: Tree, batch: torch.Tensor) -> Any:
        return params["w"] * (batch.sum().item() if broken else 2.0)

    sharded = yf.shard(step, mesh=mesh_of(2))
    with pytest.raises(yf.TraceError):
        sharded(fresh(), X)
    assert sharded.cache_size() == 0
    broken = False
    assert_same(sharded(fresh(), X), W * 2)


def test_tensors_that_require_grad_are_values() -> None:
    params = {k: v.clone().requires_grad_() for k, v in fresh().items()}
    found = yf.shard(train, mesh=mesh_of(2))(params, X)
    assert_same(found, train(fresh(), X))


# --- inputs stay as they were ---------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4, (2, 2)])
def test_without_donation_inputs_are_untouched_bitwise(world: Any) -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        made = {k: p * 2 for k, p in params.items()}
        return made, params, {"batch": batch * 1}

    mesh = mesh_of(world)
    plain, placed, batch = fresh(), yf.distribute(fresh(), mesh), X.clone()
    sharded = yf.shard(step, mesh=mesh)
    for params in (plain, placed):
        for _ in range(2):
            sharded(params, batch)
        for key, leaf in yf.full(params).items():
            assert torch.equal(leaf, fresh()[key])
    assert torch.equal(batch, X)


# --- donation -------------------------------------------------------------------------


def shards(leaf: Any) -> dict[int, int]:
    """The address of the memory of every emulated rank's shard that has any."""
    local = leaf.to_local()._local_tensors
    return {rank: shard.data_ptr() for rank, shard in local.items() if shard.numel()}


def test_donated_shards_are_written_in_place_and_give_the_same_result() -> None:
    mesh = mesh_of(4)
    donating = yf.shard(train, donate_argnums=0)
    plain, params = fresh(), yf.distribute(fresh(), mesh)
    before = {k: shards(v) for k, v in params.items()}
    for _ in range(3):
        plain, wanted = train(plain, X)
        params, found = donating(params, X)
        assert_same((params, found), (plain, wanted))
    assert {k: shards(v) for k, v in params.items()} == before
    assert donating.trace_count() == 1


def test_a_donated_tree_cannot_be_used_again() -> None:
    mesh = mesh_of(2)
    donating = yf.shard(train, donate_argnums=0)
    params = yf.distribute(fresh(), mesh)
    donating(params, X)
    uses: list[Callable[[], Any]] = [
        lambda: donating(params, X),
        lambda: yf.shard(train)(params, X),
        lambda: yf.full(params),
        lambda: params["w"] + 1,
        lambda: params["w"].to_local().sum(),
    ]
    for use in uses:
        with pytest.raises(yf.DonatedError, match=r"was donated as params.*to train"):
            use()


def test_a_captured_tensor_that_was_donated_is_refused() -> None:
    params = yf.distribute(fresh(), mesh_of(2))
    held = params["w"]
    reads = yf.shard(lambda x, batch: x * held)
    assert_same(reads(params["b"], X), B * W)
    yf.shard(train, donate_argnums=0)(params, X)
    with pytest.raises(yf.DonatedError):
        reads(yf.distribute(B, mesh_of(2)), X)


def test_plain_arguments_are_never_written() -> None:
    donating = yf.shard(train, mesh=mesh_of(2), donate_argnums=0)
    params = fresh()
    made = donating(params, X)
    assert_same(made, train(fresh(), X))
    assert torch.equal(params["w"], W)


def donated_agrees(step: Step, *trees: Tree, donate: Any = 0) -> Any:
    """Run a step with and without donation; both give the plain result, three times."""
    mesh = mesh_of(3)
    donating = yf.shard(step, donate_argnums=donate)
    plain = list(trees)
    placed = [yf.distribute(tree, mesh) for tree in trees]
    for _ in range(3):
        wanted, found = step(*plain, X), donating(*placed, X)
        assert_same(found, wanted)
        plain = list(wanted[: len(trees)])
        placed = list(found[: len(trees)])
    assert donating.trace_count() == 1
    return found


def test_two_donated_leaves_may_be_swapped() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return ({"a": params["b"], "b": params["a"]},)

    donated_agrees(step, {"a": W, "b": W + 100})


def test_donated_leaves_may_rotate_and_be_computed_with() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        a, b, c = params["a"], params["b"], params["c"]
        return ({"a": b + a, "b": c, "c": a * batch.sum()},)

    donated_agrees(step, {"a": W, "b": W + 100, "c": W - 50})


def test_the_old_parameters_may_be_returned_beside_the_new() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return {"w": params["w"] * 2}, {"old": params["w"], "view": params["w"][:, 1:]}

    donated_agrees(step, {"w": W})


def test_donated_leaves_may_pass_through() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return {"frozen": params["frozen"], "w": params["w"] + params["frozen"]}, 1

    donated_agrees(step, {"frozen": W, "w": W + 1})


def test_one_result_may_take_the_place_of_two_donated_leaves() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        made = params["a"] + params["b"]
        return {"a": made, "b": made}, made

    donated_agrees(step, {"a": W, "b": W + 1})


def test_two_donated_arguments_may_change_places() -> None:
    def step(first: Tree, second: Tree, batch: torch.Tensor) -> Any:
        return second, first, {"sum": first["w"] + second["w"]}

    donated_agrees(step, {"w": W}, {"w": W * 10}, donate=(0, 1))


def test_a_donated_leaf_may_be_flipped() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return {"w": params["w"].flip(1), "t": params["t"].t().contiguous()}, params[
            "w"
        ].t()

    donated_agrees(step, {"w": W, "t": torch.arange(16.0).view(4, 4)})


def test_results_of_one_call_do_not_share_memory() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return {"w": params["w"] * 2}, params["w"] * 2

    mesh = mesh_of(2)
    keeping, donating = yf.shard(step), yf.shard(step, donate_argnums=0)
    first, second = keeping(yf.distribute({"w": W}, mesh), X)
    donating(first, X)
    assert_same(second, W * 2)


def test_a_kept_result_survives_the_donation_of_its_twin() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        made = params["w"] * 2
        return {"w": made}, {"kept": made, "same": params["w"]}

    mesh = mesh_of(2)
    params = yf.distribute({"w": W}, mesh)
    made, kept = yf.shard(step)(params, X)
    yf.shard(step, donate_argnums=0)(made, X)
    yf.shard(step, donate_argnums=0)(params, X)
    # Right, or refused; never the numbers of the later calls.
    for key, wanted in (("kept", W * 2), ("same", W)):
        with contextlib.suppress(yf.DonatedError):
            assert_same(kept[key], wanted)


def test_one_dtensor_donated_in_two_places_is_refused_or_right() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return {"a": params["a"] + 1, "b": params["b"] + 2}

    shared = yf.distribute(W, mesh_of(2))
    donating = yf.shard(step, donate_argnums=0)
    try:
        found = donating({"a": shared, "b": shared}, X)
    except yf.ArgumentError:
        return
    assert_same(found, {"a": W + 1, "b": W + 2})


def test_donation_that_has_no_place_to_go_is_still_donation() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return (batch @ params["w"].T).sum()

    params = yf.distribute({"w": W}, mesh_of(2))
    donating = yf.shard(step, donate_argnums=0)
    assert_same(donating(params, X), step({"w": W}, X))
    with pytest.raises(yf.DonatedError):
        donating(params, X)


def test_a_call_that_fails_donates_nothing() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return {"w": params["w"] * math.sqrt(batch.sum())}

    params = yf.distribute({"w": W}, mesh_of(2))
    with pytest.raises(yf.TraceError):
        yf.shard(step, donate_argnums=0)(params, X)
    assert_same(params, {"w": W})


def test_a_program_keeps_no_argument_alive() -> None:
    mesh = mesh_of(2)
    sharded = yf.shard(lambda params, batch: {"w": params["w"] * batch.sum()})
    params, batch = yf.distribute({"w": W}, mesh), X.clone()
    kept = [weakref.ref(params["w"]), weakref.ref(batch)]
    sharded(params, batch)
    lowered = sharded.lower(params, batch)
    del params, batch
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    assert lowered.cost_analysis()["all_gathers"] == 0


def test_a_partial_without_a_name_is_a_step_too() -> None:
    step = functools.partial(
        lambda scale, params, batch: params * scale * batch.sum(), 2
    )
    with pytest.raises(yf.ArgumentError, match="no mesh"):
        yf.shard(step)(W, X)
    assert_same(yf.shard(step, mesh=mesh_of(2))(W, X), step(W, X))
    loss = functools.partial(lambda scale, p, batch: (p * scale).sum() * batch.sum(), 2)
    assert_same(grad(yf.shard(loss, mesh=mesh_of(2)))(W, X), grad(loss)(W, X))
