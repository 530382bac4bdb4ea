"""assert_agrees names what does not agree, and strategies draw what they say."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from support import MESHES, assert_same, mesh_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import grad_and_value

import yafsdp_fn as yf
from yafsdp_fn import _rules, testing
from yafsdp_fn._rule_kinds import pointwise
from yafsdp_fn._world import EmulatedWorld
from yafsdp_fn.testing import _agree, _strategies, assert_agrees

Tree = Any
MESH = mesh_of(4)
W = torch.arange(10.0, dtype=torch.float64).reshape(5, 2)
X = torch.arange(1.0, 31.0, dtype=torch.float64).reshape(6, 5) / 30


def train(params: Tree, state: Tree, batch: torch.Tensor) -> Any:
    def loss_fn(params: Tree) -> torch.Tensor:
        return (batch @ params["w"]).square().mean()

    grads, loss = grad_and_value(loss_fn)(params)
    momentum = 0.9 * state["m"] + grads["w"]
    state = {"m": momentum, "count": state["count"] + 1}
    return {"w": params["w"] - 0.1 * momentum}, state, {"loss": loss}


def arguments() -> tuple[Tree, Tree, torch.Tensor]:
    state = {"m": torch.zeros_like(W), "count": torch.tensor(0)}
    return {"w": W}, state, X


def is_wrong() -> bool:
    """Whether the step is traced, which a pure function does not ask."""
    return torch.compiler.is_compiling()


@contextmanager
def says(*parts: str) -> Iterator[None]:
    with pytest.raises(AssertionError) as caught:
        yield
    text = " ".join(str(caught.value).split())
    for part in parts:
        assert part in text, text


# --- it passes ------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 3, 4, *MESHES])
def test_a_good_step_agrees(world: Any) -> None:
    sharded = assert_agrees(train, *arguments(), mesh=mesh_of(world))
    assert isinstance(sharded, yf.ShardedFunction)
    assert (sharded.cache_size(), sharded.trace_count()) == (1, 1)


def test_every_call_goes_on_from_its_own_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    original = _agree._message

    def recording(found: Any, wanted: Any, *rest: Any) -> str | None:
        seen.append(wanted)
        return original(found, wanted, *rest)

    monkeypatch.setattr(_agree, "_message", recording)
    assert_agrees(train, *arguments(), mesh=MESH, steps=4)
    assert [state["count"].item() for _, state, _ in seen] == [1, 2, 3, 4]
    assert len({metrics["loss"].item() for *_, metrics in seen}) == 4


def test_results_follow_the_state_wherever_they_stand() -> None:
    def step(params: Tree, count: torch.Tensor, batch: torch.Tensor) -> Any:
        return batch.sum() * count, {"w": params["w"] * 2}, count + 1

    runs = _agree._Runs(
        yf.shard(step, mesh=MESH),
        {"params": {"w": W}, "count": torch.tensor(0), "batch": X},
        MESH,
        None,
    )
    found, wanted = runs.results()
    runs.go_on(found, wanted)
    assert runs.plain["params"] is wanted[1]
    assert runs.placed["count"] is found[2]
    assert runs.plain["batch"] is X
    assert_agrees(step, {"w": W}, torch.tensor(0), X, mesh=MESH)


def test_options_of_shard_are_passed_on() -> None:
    def step(x: torch.Tensor, params: Tree, power: int) -> Any:
        return (x @ params["w"]) ** power, {"w": params["w"] + 1}

    options: dict[str, Any] = {"batch_argnums": 0, "static_argnames": "power"}
    options["schedule"] = yf.Schedule(reduce="each")
    sharded = assert_agrees(step, X, {"w": W}, 2, mesh=MESH, **options)
    again = assert_agrees(
        yf.shard(step, mesh=mesh_of(2), **options), X, {"w": W}, 2, mesh=MESH
    )
    assert again._signature == sharded._signature
    assert again._schedule == sharded._schedule == options["schedule"]


def test_a_sharded_step_is_compared_with_its_function() -> None:
    def wrong(params: Tree, state: Tree, batch: torch.Tensor) -> Any:
        return train(params, state, batch * 2 if is_wrong() else batch)

    assert_agrees(yf.shard(train), *arguments(), mesh=MESH)
    with says("output[0]['w']"):
        assert_agrees(yf.shard(wrong), *arguments(), mesh=MESH)


@pytest.mark.parametrize("donated", [(0, 1), (0, 1, 2), (1,)])
def test_donated_arguments_stay_the_callers(donated: tuple[int, ...]) -> None:
    args = arguments()
    assert_agrees(train, *args, mesh=MESH, donate_argnums=donated)
    assert_same(args, arguments())
    assert_agrees(train, *args, mesh=MESH)


def test_donated_state_that_is_not_returned() -> None:
    def step(params: Tree, scale: torch.Tensor, batch: torch.Tensor) -> Any:
        return {"w": params["w"] * scale.sum() + batch.sum()}

    scale = torch.ones(3, dtype=torch.float64) / 4
    assert_agrees(step, {"w": W}, scale, X, mesh=MESH, donate_argnums=(0, 1))


def test_any_number_of_arguments() -> None:
    def step(*trees: torch.Tensor, batch: float = 0.5) -> Any:
        return tuple(tree * batch for tree in trees)

    assert_agrees(step, W, W + 1, mesh=MESH)


def test_state_lies_where_it_is_told_to() -> None:
    placed: list[Any] = []

    def choose(path: str, leaf: torch.Tensor) -> list[Any]:
        placed.append(path)
        return [Shard(1) if leaf.dim() == 2 else Replicate()]

    sharded = assert_agrees(train, *arguments(), mesh=MESH, placements=choose)
    (compiled,) = sharded._cache.values()
    first, *_ = compiled.plan.inputs
    assert "2/4" in compiled.plan.name(first)
    assert len(placed) == 3


def test_programs_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[yf.Program] = []
    monkeypatch.setattr(_agree, "check", checked.append)
    assert_agrees(train, *arguments(), mesh=MESH, steps=2)
    assert [type(program) for program in checked] == [yf.Program] * 2


# --- it fails -------------------------------------------------------------------------


def test_a_difference_is_named() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        scale = torch.tensor([1.0, 3.0 if is_wrong() else 1.0])
        return {"v": params["v"], "w": params["w"] * scale}, batch.sum()

    params = {"v": W, "w": W}
    with says(
        "call 1 of 3 on the mesh fsdp=4: output[0]['w'] at [0, 1] is 3.0, should be "
        "1.0 (5 of 10 elements; by up to 18, allowed is 9e-09",
        "It was made by %",
        "f64[5/4,2] aten.mul.Tensor(%",
        f"# {__file__.rpartition('/')[2]}:",
    ):
        assert_agrees(step, params, X, mesh=MESH)


def test_a_difference_of_a_later_call() -> None:
    def step(params: torch.Tensor, count: torch.Tensor, batch: torch.Tensor) -> Any:
        late = (count > 0) & is_wrong()
        return params + batch.sum() * late, count + 1

    with says("call 2 of 3 on the mesh replicate=2, fsdp=2: output[0] at [0, 0] is "):
        assert_agrees(step, W, torch.tensor(0), X, mesh=mesh_of((2, 2)))
    assert_agrees(step, W, torch.tensor(0), X, mesh=MESH, steps=1)


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(params: torch.Tensor, batch: torch.Tensor) -> Any:
        return params.cumsum(0)

    assert_agrees(step, W, X, mesh=MESH)
    monkeypatch.setitem(_rules.RULES, torch.ops.aten.cumsum.default, pointwise)
    with says("output at [2, 0] is 4.0, should be 6.0", "aten.cumsum.default(%"):
        assert_agrees(step, W, X, mesh=MESH)


def test_moves_since_the_operator_are_shown() -> None:
    def step(params: torch.Tensor, batch: torch.Tensor) -> Any:
        return params, (batch * (2 if is_wrong() else 1)).sum()

    with says("output[1] is ", "aten.sum", "reduce_start", "reduce_wait"):
        assert_agrees(step, W, X, mesh=MESH)


def test_an_argument_that_is_handed_back_is_named() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return params if is_wrong() else {"w": params["w"] + 1}

    with says("output['w'] at [0, 0] is 0.0, should be 1.0", "input params['w']"):
        assert_agrees(step, {"w": W}, X, mesh=MESH)


WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "dtype": (lambda w: w.float(), "is of torch.float32, should be of torch.float64"),
    "shape": (lambda w: w[:4] * 1, "has the shape (4, 2), should have (5, 2)"),
    "strides": (lambda w: w.mT.contiguous().mT, "has the strides (1, 5), should have"),
    "structure": (lambda w: [w], "should be a PyTreeSpec("),
    "static": (lambda w: 3, "is the int 3, should be a tensor of shape (5, 2)"),
    "NaN": (lambda w: w * float("nan"), "is nan, should be 0.0 (10 of 10 elements"),
}


@pytest.mark.filterwarnings("ignore::yafsdp_fn.RetraceWarning")
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_value_differs_too(name: str) -> None:
    change, text = WRONG[name]

    def step(params: torch.Tensor, batch: torch.Tensor) -> Any:
        made = change(params) if is_wrong() else params * 1
        return made, batch.sum()

    with says("output", text):
        assert_agrees(step, W, X, mesh=MESH)


def test_integers_agree_exactly() -> None:
    def step(params: torch.Tensor, batch: torch.Tensor) -> Any:
        return params, (batch.sum() * 0).long() + 2**60 + is_wrong()

    with says(f"output[1] is {2**60 + 1}, should be {2**60} (1 of 1 elements)"):
        assert_agrees(step, W, X, mesh=MESH, rtol=1.0)


def test_tolerances() -> None:
    def step(params: torch.Tensor, batch: torch.Tensor) -> Any:
        return params * (1.001 if is_wrong() else 1.0)

    for allowed in ({"rtol": 0.01}, {"atol": 0.1}):
        assert_agrees(step, W, X, mesh=MESH, steps=1, **allowed)
    for allowed in ({}, {"rtol": 1e-4}, {"atol": 1e-4}, {"rtol": 0.0, "atol": 1e-4}):
        with says("output at "):
            assert_agrees(step, W, X, mesh=MESH, **allowed)


@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)],
)
def test_tolerances_of_dtypes(dtype: torch.dtype, error: float) -> None:
    def step(params: torch.Tensor, batch: torch.Tensor) -> Any:
        return params + (error if is_wrong() else 0.0)

    with says("output at [0, 0]"):
        assert_agrees(step, W.to(dtype) / 9, X, mesh=MESH)


def test_ranks_that_drift_apart_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = EmulatedWorld.leaf

    def drifting(self: Any, part: Any, *rest: Any) -> Any:
        if part[0].dtype == torch.int64:
            part = [tensor + (rank == 2) for rank, tensor in enumerate(part)]
        return original(self, part, *rest)

    monkeypatch.setattr(EmulatedWorld, "leaf", drifting)
    with says("output[1]['count'] is 3, should be 1", "on rank 2, as on the first"):
        assert_agrees(train, *arguments(), mesh=MESH)


# --- it refuses -----------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "a DTensor": (
        lambda: assert_agrees(
            lambda w, batch: w, {"w": yf.distribute(W, MESH)}, X, mesh=MESH
        ),
        r"w\['w'\] is a DTensor. .*: pass yf.full\(tree\)",
    ),
    "no state": (
        lambda: assert_agrees(lambda batch: batch * 2, X, mesh=MESH),
        "no tensor of state among the arguments: batch is the batch.*batch_argnums",
    ),
    "state without tensors": (
        lambda: assert_agrees(lambda lr, x: x * lr, 0.5, X, mesh=MESH),
        "no tensor of state among the arguments: x is the batch",
    ),
    "no mesh": (
        lambda: assert_agrees(lambda w, batch: w, W, X, mesh=4),  # type: ignore[arg-type]
        "mesh=4 is no mesh. Write mesh=yf.make_mesh",
    ),
    "no call": (
        lambda: assert_agrees(lambda w, batch: w, W, X, mesh=MESH, steps=0),
        "steps=0: the number of calls",
    ),
    "no function": (
        lambda: assert_agrees(3, W, X, mesh=MESH),  # type: ignore[arg-type]
        "shard takes a function",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_use(name: str) -> None:
    call, text = BAD[name]
    with pytest.raises(yf.ArgumentError, match=text):
        call()


def test_an_impure_step_is_refused_before_it_can_edit_its_arguments() -> None:
    def step(params: torch.Tensor, batch: torch.Tensor) -> Any:
        return params.add_(1)

    params = W.clone()
    with pytest.raises(yf.TraceError):
        assert_agrees(step, params, X, mesh=MESH)
    assert torch.equal(params, W)


# --- processes ------------------------------------------------------------------------


def agree_in_processes() -> list[str]:
    mesh = yf.make_mesh(fsdp=2)
    sharded = assert_agrees(train, *arguments(), mesh=mesh, donate_argnums=0)
    own = torch.tensor(float(torch.distributed.get_rank()), dtype=torch.float64)
    rows = torch.tensor([1.0, 0.0], dtype=torch.float64)  # those of rank 1 are no help

    def step(params: torch.Tensor, batch: torch.Tensor) -> Any:
        return params, (batch * (own + 1)).sum()  # a value of this rank alone

    try:
        assert_agrees(step, W, rows, mesh=mesh)
    except AssertionError as error:
        return [str(sharded.trace_count()), str(error)]
    return ["no error"]


def test_a_difference_on_one_rank_is_raised_on_all() -> None:
    first, second = yf.launch(agree_in_processes, nprocs=2)
    assert first == second
    traces, text = first
    assert traces == "1"
    assert text.startswith(
        "on rank 1, call 1 of 3 on the mesh fsdp=2: output[1] is 1.0"
    )
    assert "should be 2.0" in text


# --- strategies -----------------------------------------------------------------------


def drawn(strategy: Any, count: int = 300) -> list[Any]:
    """Some examples of a strategy."""
    found: list[Any] = []

    @settings(max_examples=count, database=None)
    @given(example=strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found


def test_shapes() -> None:
    shapes = drawn(testing.shapes(most_dims=3, longest=5))
    assert {len(shape) for shape in shapes} == {0, 1, 2, 3}
    assert {length for shape in shapes for length in shape} == set(range(6))


def test_tensors() -> None:
    tensors = drawn(testing.tensors())
    assert {x.dtype for x in tensors} == set(_strategies.DTYPES)
    assert any(not x.is_contiguous() for x in tensors)
    assert any(x.numel() == 0 for x in tensors)
    assert any(x.is_floating_point() and x.isnan().any() for x in tensors)


def test_tensors_as_asked_for() -> None:
    shapes = testing.shapes(most_dims=1)
    for x in drawn(testing.tensors(shapes, [torch.float16], special=False), 50):
        assert x.dtype == torch.float16
        assert x.dim() <= 1
        assert x.isfinite().all()


def test_trees() -> None:
    kinds, leaves = set(), set()
    for tree in drawn(testing.trees(), 500):
        kinds.add(type(tree))
        leaves |= {type(x) for x in optree.tree_leaves(tree, namespace="yafsdp_fn")}
    nodes = {list, tuple, dict, _strategies.Pair, _strategies.Layer, type(None)}
    assert nodes <= kinds
    assert leaves == {torch.Tensor, int, float, str}


def test_trees_of_given_leaves() -> None:
    for tree in drawn(testing.trees(testing.tensors(), most_leaves=3), 50):
        leaves = optree.tree_leaves(tree, namespace="yafsdp_fn")
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)


def test_meshes() -> None:
    meshes = drawn(testing.meshes(most_ranks=6))
    names = {mesh.mesh_dim_names for mesh in meshes}
    assert names == {("fsdp",), ("replicate", "fsdp")}
    assert {mesh.size() for mesh in meshes} == {1, 2, 3, 4, 5, 6}
    assert all(isinstance(yf.distribute(W, mesh), DTensor) for mesh in meshes[:9])


def test_steps() -> None:
    steps = drawn(testing.steps(), 20)
    assert len({step.source for step in steps}) > 10
    for step in steps:
        assert isinstance(step, testing.RandomStep)
        assert step.source in repr(step)
        again = testing.RandomStep.from_source(step.source)
        assert_same(again.args, step.args)
        assert_same(again.fn(*again.args), step.fn(*step.args))


@settings(max_examples=5)
@given(step=testing.steps(), mesh=testing.meshes())
def test_a_wrong_step_does_not_pass(step: testing.RandomStep, mesh: DeviceMesh) -> None:
    def wrong(params: Tree, opt_state: Tree, batch: Tree) -> Any:
        new, state, metrics = step.fn(params, opt_state, batch)
        return new, state, {**metrics, "norm": metrics["norm"] + 0.1 * is_wrong()}

    with says("output[2]['norm'] is "):
        assert_agrees(wrong, *step.args, mesh=mesh)


# --- the table of contents ------------------------------------------------------------

WITHOUT_HYPOTHESIS = """
import sys
sys.modules["hypothesis"] = None  # as if it were not installed
import torch, yafsdp_fn as yf, yafsdp_fn.testing
mesh = yf.make_mesh(fsdp=2, emulate=True)
def step(params, batch):
    return params + batch.sum()
yf.testing.assert_agrees(step, torch.ones(3), torch.ones(4), mesh=mesh)
for name in ("shapes", "tensors", "trees", "meshes", "steps", "RandomStep"):
    try:
        getattr(yf.testing, name)
    except ModuleNotFoundError as error:
        assert "pip install 'yafsdp_fn[test]'" in str(error)
    else:
        raise AssertionError(name)
print("done")
"""


def test_it_works_without_hypothesis() -> None:
    command = [sys.executable, "-c", WITHOUT_HYPOTHESIS]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "done", found.stderr


def test_all_names_are_there() -> None:
    names = [name for name in dir(testing) if name in testing._LAZY]
    assert len(names) == 6
    assert all(getattr(testing, name).__doc__ for name in names)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = testing.nothing
