"""A sharded function that torch.func or autograd differentiates from outside."""

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from support import assert_same, mesh_of
from test_cases import labels, normal
from torch.distributed.tensor import DTensor
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import yafsdp_fn as yf

Fn = Callable[..., Any]
Tree = dict[str, torch.Tensor]
MESHES = (1, 2, 3, 4, (2, 2))


def params() -> Tree:
    return {"w": normal(5, 4), "b": normal(5), "scale": normal()}


def batch(rows: int = 7) -> Tree:
    return {"x": normal(rows, 4), "y": labels(rows)}


def loss(params: Tree, batch: Tree) -> torch.Tensor:
    logits = torch.tanh(batch["x"] @ params["w"].T + params["b"]) * params["scale"]
    return F.cross_entropy(logits, batch["y"])


def with_extras(params: Tree, batch: Tree) -> Any:
    """A loss, and two other results, one of them without a gradient."""
    logits = batch["x"] @ params["w"].T
    right = (logits.argmax(1) == batch["y"]).sum()
    return loss(params, batch), {"right": right, "logits": logits}


def assert_placed_as(found: Tree, wanted: Tree) -> None:
    """Each gradient lies as what it belongs to: a DTensor, or a plain tensor."""
    for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True):
        assert isinstance(a, DTensor) == isinstance(b, DTensor)
        if isinstance(b, DTensor):
            assert (a.placements, a.device_mesh) == (b.placements, b.device_mesh)


# --- each way to differentiate --------------------------------------------------------


@pytest.mark.parametrize("world", MESHES, ids=str)
def test_grad_and_value(world: Any) -> None:
    sharded, placed = yf.shard(loss), yf.distribute(params(), mesh_of(world))
    for fn in (grad, grad_and_value):
        found = fn(sharded)(placed, batch())
        assert_same(found, fn(loss)(params(), batch()))
        assert_placed_as(found if fn is grad else found[0], placed)


@pytest.mark.parametrize("world", MESHES, ids=str)
def test_vjp_pulls_as_often_as_it_is_asked(world: Any) -> None:
    placed, x = yf.distribute(params(), mesh_of(world)), batch()["x"]

    def step(params: Tree, batch: torch.Tensor) -> Any:
        return (batch @ params["w"].T).sin(), params["b"] * batch.sum()

    out, pull = vjp(yf.shard(step), placed, x)
    wanted, plain_pull = vjp(step, params(), x)
    assert_same(out, wanted)
    for factor in (1.0, 2.0):
        found = pull(optree.tree_map(lambda t: t * factor, out))  # noqa: B023
        assert_same(found, plain_pull(optree.tree_map(lambda t: t * factor, wanted)))  # noqa: B023
        assert_placed_as(found[0], placed)
        assert not isinstance(found[1], DTensor)  # the batch came as a plain tensor


def leaves_that_require_grad(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.detach().requires_grad_(), tree)


@pytest.mark.parametrize("world", MESHES, ids=str)
def test_backward(world: Any) -> None:
    placed = leaves_that_require_grad(yf.distribute(params(), mesh_of(world)))
    plain = leaves_that_require_grad(params())
    for _ in range(2):  # gradients add up
        value = yf.shard(loss)(placed, batch())
        value.backward()
        loss(plain, batch()).backward()
    assert_same(value.detach(), loss(params(), batch()))
    grads = {k: p.grad for k, p in placed.items()}
    assert_same(grads, {k: p.grad for k, p in plain.items()})
    assert_placed_as(grads, placed)


@pytest.mark.parametrize("world", MESHES, ids=str)
def test_plain_arguments_have_plain_gradients(world: Any) -> None:
    sharded = yf.shard(loss, mesh=mesh_of(world))
    found = grad(sharded)(params(), batch())
    assert_same(found, grad(loss)(params(), batch()))
    assert_placed_as(found, params())
    mixed = params() | {"w": yf.distribute(normal(5, 4), mesh_of(world))}
    assert_placed_as(grad(sharded)(mixed, batch()), mixed)


@pytest.mark.parametrize("world", MESHES, ids=str)
def test_gradients_of_the_batch(world: Any) -> None:
    def rows(fn: Fn, params: Tree) -> Any:
        return grad(lambda x: fn(params, batch() | {"x": x}))(batch()["x"])

    placed = yf.distribute(params(), mesh_of(world))
    found = rows(yf.shard(loss), placed)
    assert_same(found, rows(loss, params()))
    assert not isinstance(found, DTensor)


def test_has_aux_and_results_without_a_gradient() -> None:
    placed = yf.distribute(params(), mesh_of(3))
    for fn in (grad, grad_and_value):
        found = fn(yf.shard(with_extras), has_aux=True)(placed, batch())
        assert_same(found, fn(with_extras, has_aux=True)(params(), batch()))
    value, extras = yf.shard(with_extras)(leaves_that_require_grad(placed), batch())
    assert value.requires_grad
    assert extras["logits"].requires_grad
    assert not extras["right"].requires_grad


def test_a_result_that_the_loss_does_not_use_changes_nothing() -> None:
    placed = yf.distribute(params(), mesh_of(2))

    def used(fn: Fn, which: Fn) -> Fn:
        return lambda params: which(fn(params, batch(8)))

    for which in (lambda out: out[0], lambda out: out[1]["logits"].square().sum()):
        found = grad(used(yf.shard(with_extras), which))(placed)
        assert_same(found, grad(used(with_extras, which))(params()))


def test_arguments_of_every_kind() -> None:
    def step(
        tree: Any, rate: float, name: str, batch: torch.Tensor, *, power: int = 2
    ) -> Any:
        logits = getattr(torch, name)(batch @ tree["w"][0].T) * rate
        return (logits.pow(power).sum(1) * tree["index"][: len(batch)]).sum()

    tree = {"w": (normal(5, 4),), "index": torch.arange(9), "none": None, "n": 2}
    args = (0.5, "sin", normal(7, 4))
    sharded = yf.shard(step, mesh=mesh_of(3))

    def of(fn: Fn) -> Any:
        return vjp(lambda w: fn(tree | {"w": w}, *args, power=3), tree["w"])

    (found, pull), (wanted, plain_pull) = of(sharded), of(step)
    assert_same(found, wanted)
    assert_same(pull(torch.ones_like(found)), plain_pull(torch.ones_like(wanted)))


def test_what_is_around_it_may_be_differentiated_as_well() -> None:
    def outer(fn: Fn) -> Fn:
        def total(params: Tree, batch: Tree) -> torch.Tensor:
            doubled = {k: 2 * p for k, p in params.items()}
            return fn(doubled, batch).square() + fn(params, batch)

        return total

    placed = yf.distribute(params(), mesh_of(3))
    found = grad_and_value(outer(yf.shard(loss)))(placed, batch())
    assert_same(found, grad_and_value(outer(loss))(params(), batch()))


def test_an_unused_parameter_has_a_gradient_of_zeros() -> None:
    placed = yf.distribute(params() | {"unused": normal(3, 2)}, mesh_of(2))
    found = grad(yf.shard(loss))(placed, batch())
    assert_same(found["unused"], torch.zeros(3, 2, dtype=torch.float64))
    assert_placed_as(found, placed)


# --- programs -------------------------------------------------------------------------


def test_nothing_is_traced_again() -> None:
    sharded, placed = yf.shard(loss), yf.distribute(params(), mesh_of(2))
    for _ in range(3):
        grads = grad(sharded)(placed, batch())
        placed = {k: p - 0.1 * grads[k] for k, p in placed.items()}
        leaves = leaves_that_require_grad(placed)
        sharded(leaves, batch()).backward()
    assert (sharded.trace_count(), sharded.gradient().trace_count()) == (1, 1)
    assert (sharded.cache_size(), sharded.gradient().cache_size()) == (1, 1)


def test_without_grad_mode_it_is_an_ordinary_call() -> None:
    sharded = yf.shard(loss)
    placed = leaves_that_require_grad(yf.distribute(params(), mesh_of(2)))
    with torch.no_grad():
        assert not sharded(placed, batch()).requires_grad
    assert sharded(placed, batch()).requires_grad


def test_gradients_are_scattered_once() -> None:
    placed = yf.distribute(params(), mesh_of(4))
    ones = [torch.ones((), dtype=torch.float64)]
    stage = yf.shard(loss).gradient().lower(ones, placed, batch(8))
    kinds = [t.kind for t in stage.plan.transfers() for _ in t.sources]
    assert kinds.count("reduce_scatter") == 2  # the scale is no vector
    assert stage.cost_analysis()["unplanned_collectives"] == 0


# --- what is refused ------------------------------------------------------------------

FORWARD: dict[str, Fn] = {
    "jvp": lambda f, p, b: jvp(lambda p: f(p, b), (p,), (p,)),
    "jacfwd": lambda f, p, b: jacfwd(lambda w: f(p | {"w": w}, b))(p["w"]),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_says_what_to_write(name: str) -> None:
    sharded = yf.shard(loss, mesh=mesh_of(2))
    with pytest.raises(
        yf.ArgumentError, match=r"Put it inside: yf.shard\((jvp|vmap)\(f"
    ):
        FORWARD[name](sharded, params(), batch())


@pytest.mark.parametrize("fn", [vmap, jacrev], ids=["vmap", "jacrev"])
def test_vmap_says_what_to_write(fn: Fn) -> None:
    sharded = yf.shard(lambda params, batch: batch @ params.T, mesh=mesh_of(2))
    w, x = normal(5, 4), normal(7, 4)
    with pytest.raises(yf.ArgumentError, match=r"Put it inside: yf.shard\(vmap\(f"):
        fn(lambda w: sharded(w, x))(w.expand(3, 5, 4) if fn is vmap else w)


def test_a_closure_over_what_is_differentiated_is_refused() -> None:
    mesh = mesh_of(2)

    def total(w: torch.Tensor) -> torch.Tensor:
        return yf.shard(lambda batch: (batch @ w.T).sum(), mesh=mesh)(normal(7, 4))

    with pytest.raises(yf.ArgumentError, match=r"closes over a tensor .* argument"):
        grad(total)(normal(5, 4))
    leaf = normal(5, 4).requires_grad_()
    with pytest.raises(yf.ArgumentError, match="closes over a tensor"):
        total(leaf * 2)


def test_a_closure_beside_a_differentiated_argument_is_refused() -> None:
    leaf = normal(5).requires_grad_()
    sharded = yf.shard(lambda w, batch: (batch @ w.T * leaf).sum(), mesh=mesh_of(2))
    with pytest.raises(yf.ArgumentError, match="closes over a tensor"):
        sharded(normal(5, 4).requires_grad_(), normal(7, 4))


@pytest.mark.parametrize("outer", [grad, hessian, jacfwd, jacrev])
def test_second_derivatives_are_put_inside(outer: Fn) -> None:
    rest, w, mesh = params(), normal(5, 4), mesh_of(3)

    def norm(fn: Fn) -> Fn:
        slope = grad(lambda w, batch: fn(rest | {"w": w}, batch))
        return lambda w, batch: slope(w, batch).norm()

    wanted = outer(norm(loss))(w, batch())
    for inner in (loss, yf.shard(loss)):
        assert_same(yf.shard(outer(norm(inner)), mesh=mesh)(w, batch()), wanted)


@pytest.mark.parametrize(
    "activation",
    [F.silu, F.mish, F.gelu, F.hardswish, F.softplus, F.elu, F.glu, F.logsigmoid],
    ids=lambda fn: fn.__name__,
)
def test_activations_are_differentiated_from_outside(activation: Fn) -> None:
    def loss(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return activation(batch @ w).square().sum()

    w, x, mesh = normal(5, 4), normal(7, 5), mesh_of(3)
    sharded = yf.shard(loss, mesh=mesh)
    assert_same(grad(sharded)(w, x), grad(loss)(w, x))
    (placed,) = leaves_that_require_grad({"w": yf.distribute(w, mesh)}).values()
    sharded(placed, x).backward()
    assert_same(yf.full(placed.grad), grad(loss)(w, x))


def test_the_gradient_of_a_gradient_from_outside_is_right() -> None:
    rest = params()

    def penalty(fn: Fn) -> Fn:
        def total(w: torch.Tensor) -> torch.Tensor:
            return grad(lambda w: fn(rest | {"w": w}, batch()))(w).square().sum()

        return total

    found = grad(penalty(yf.shard(loss, mesh=mesh_of(3))))(normal(5, 4))
    assert_same(found, grad(penalty(loss))(normal(5, 4)))


# --- real processes -------------------------------------------------------------------


def trained(emulate: bool) -> Any:
    """What the ways to differentiate give, and where three steps of SGD lead."""
    mesh = yf.make_mesh(fsdp=2, emulate=emulate)
    sharded = yf.shard(loss)
    placed = yf.distribute(params(), mesh)
    grads, value = grad_and_value(sharded)(placed, batch())
    leaves = leaves_that_require_grad(placed)
    optimiser = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimiser.zero_grad()
        sharded(leaves, batch()).backward()
        optimiser.step()
    stepped = {k: leaf.detach() for k, leaf in leaves.items()}
    return yf.full((grads, value, stepped))


def test_processes_have_the_bits_of_the_emulation() -> None:
    emulated = trained(True)
    for found in yf.launch(trained, False, nprocs=2):
        pairs = zip(
            optree.tree_leaves(found), optree.tree_leaves(emulated), strict=True
        )
        assert all(torch.equal(a, b) for a, b in pairs)
    plain = leaves_that_require_grad(params())
    optimiser = torch.optim.SGD(plain.values(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimiser.zero_grad()
        loss(plain, batch()).backward()
        optimiser.step()
    assert_same(emulated[2], {k: leaf.detach() for k, leaf in plain.items()})
