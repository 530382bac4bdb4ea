"""remat: the values and gradients of the function, with its inputs as all it saves."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import agree, assert_same, llama, mesh_of
from test_cases import normal
from torch.func import (
    functional_call,
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
from yafsdp_fn._groups import layer_of
from yafsdp_fn._program import Compute

Fn = Callable[..., Any]
W, X = normal(4, 5), normal(6, 4)
WORLDS = (2, 3, (2, 2))


def assert_bits(found: Any, wanted: Any) -> None:
    """Two trees are the same bit for bit; a helper that must be able to fail."""
    found, wanted = yf.full(found), yf.full(wanted)
    assert optree.tree_structure(found) == optree.tree_structure(wanted)
    for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True):
        assert type(a) is type(b), (a, b)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (a, b)


def test_the_last_bit_is_compared() -> None:
    with pytest.raises(AssertionError):
        assert_bits({"w": W}, {"w": W + 1e-15})


# --- torch.func -----------------------------------------------------------------------


def block(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(x @ w) @ w.T)


def loss(fn: Fn, x: torch.Tensor) -> Fn:
    return lambda w: fn(w, x).pow(3).sum()


def direction(fn: Fn, w: torch.Tensor) -> Any:
    return jvp(fn, (w,), (torch.ones_like(w),))


def linearized(fn: Fn, w: torch.Tensor, x: torch.Tensor) -> Any:
    out, along = linearize(lambda w: fn(w, x), w)
    return out, along(torch.ones_like(w))


# Each takes the function, the weight and the rows.
FIRST: dict[str, Fn] = {
    "call": lambda f, w, x: f(w, x),
    "grad": lambda f, w, x: grad(loss(f, x))(w),
    "grad of rows": lambda f, w, x: grad(lambda x: f(w, x).pow(3).sum())(x),
    "grad_and_value": lambda f, w, x: grad_and_value(loss(f, x))(w),
    "vjp": lambda f, w, x: vjp(f, w, x)[1](torch.ones_like(x)),
    "jvp": lambda f, w, x: direction(lambda w: f(w, x), w),
    "vmap": lambda f, w, x: vmap(f, (None, 0))(w, x),
    "vmap of grad": lambda f, w, x: vmap(lambda r: grad(loss(f, r))(w))(x),
    "jacrev": lambda f, w, x: jacrev(f)(w, x),
    "jacfwd": lambda f, w, x: jacfwd(f)(w, x),
}
NESTED: dict[str, Fn] = {
    "hessian": lambda f, w, x: hessian(loss(f, x))(w),
    "grad of grad": lambda f, w, x: grad(lambda w: grad(loss(f, x))(w).norm())(w),
    "jvp of grad": lambda f, w, x: direction(grad(loss(f, x)), w),
    "grad of jvp": lambda f, w, x: grad(lambda w: direction(loss(f, x), w)[1])(w),
    "jvp of jvp": lambda f, w, x: direction(lambda w: direction(loss(f, x), w), w),
    "jacrev of jacrev": lambda f, w, x: jacrev(jacrev(loss(f, x)))(w),
    "jacrev of jacfwd": lambda f, w, x: jacrev(jacfwd(loss(f, x)))(w),
    "jacfwd of jacfwd": lambda f, w, x: jacfwd(jacfwd(loss(f, x)))(w),
    "grad of vmap": lambda f, w, x: grad(
        lambda w: vmap(lambda r: grad(loss(f, r))(w))(x).norm()
    )(w),
    "jvp of vmap": lambda f, w, x: direction(
        lambda w: vmap(lambda r: direction(loss(f, r), w))(x), w
    ),
}
ALL = FIRST | NESTED


@pytest.mark.parametrize("name", FIRST)
def test_a_transform_gives_the_bits_of_the_function(name: str) -> None:
    assert_bits(FIRST[name](yf.remat(block), W, X), FIRST[name](block, W, X))


@pytest.mark.parametrize("name", NESTED)
def test_nested_transforms_agree(name: str) -> None:
    # A sum of three terms may be added in another order.
    assert_same(NESTED[name](yf.remat(block), W, X), NESTED[name](block, W, X))


@pytest.mark.filterwarnings(
    "ignore:Attempted to insert a get_attr Node",  # torch's own, for any function
    "ignore:.torch.jit.script. is deprecated",
)
def test_linearize_gives_the_bits_of_the_function() -> None:
    assert_bits(linearized(yf.remat(block), W, X), linearized(block, W, X))


@pytest.mark.parametrize(
    ("name", "world"),
    [(n, w) for n in FIRST for w in WORLDS] + [(n, 3) for n in NESTED],
    ids=str,
)
def test_a_sharded_transform_agrees(name: str, world: Any) -> None:
    def step(fn: Fn) -> Fn:
        return lambda params, batch: ALL[name](fn, params["w"], batch)

    args = ({"w": W}, X)
    found = yf.shard(step(yf.remat(block)), mesh=mesh_of(world))(*args)
    wanted = yf.shard(step(block), mesh=mesh_of(world))(*args)
    (assert_bits if name in FIRST else assert_same)(found, yf.full(wanted))
    assert_same(found, step(block)(*args))


def test_functional_call_of_a_module() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh()).double()
    params = {k: v.detach() for k, v in module.named_parameters()}
    call = functools.partial(functional_call, module)

    def step(fn: Fn) -> Fn:
        return lambda params, batch: grad_and_value(lambda p: fn(p, batch).sum())(
            params
        )

    assert_bits(step(yf.remat(call))(params, X), step(call)(params, X))
    agree(step(yf.remat(call)), params, X, world=3)


def test_autograd_differentiates_it_as_well() -> None:
    found, wanted = (W.clone().requires_grad_() for _ in range(2))
    yf.remat(block)(found, X).sum().backward()
    block(wanted, X).sum().backward()
    assert_bits(found.grad, wanted.grad)


# --- any nesting ----------------------------------------------------------------------


def residual(layer: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(F.layer_norm(x, (4,)) @ layer["up"]) @ layer["down"]


Nest = Any  # the number of layers in a row, or a list of what one remat holds
NESTS = st.recursive(
    st.integers(1, 2),
    lambda inner: st.lists(inner, min_size=1, max_size=3),
    max_leaves=3,
)


def built(nest: Nest) -> tuple[Fn, int]:
    """A chain of layers, every list in `nest` below a remat; and how many layers."""
    if isinstance(nest, int):
        return lambda ls, x: functools.reduce(lambda x, p: residual(p, x), ls, x), nest
    parts = [built(part) for part in nest]

    def chain(layers: Any, x: torch.Tensor) -> torch.Tensor:
        rest = list(layers)
        for fn, count in parts:
            x, rest = fn(rest[:count], x), rest[count:]
        return x

    return yf.remat(chain), sum(count for _, count in parts)


@settings(max_examples=8)
@given(nest=NESTS, world=st.sampled_from([None, *WORLDS]))
def test_any_nesting_gives_the_bits_of_no_remat(nest: Nest, world: Any) -> None:
    (fn, count), plain = built(nest), built(0)[0]
    layers = [{"up": normal(4, 3) + n, "down": normal(3, 4)} for n in range(count)]

    def step(fn: Fn) -> Fn:
        return grad_and_value(lambda layers, batch: fn(layers, batch).pow(2).sum())

    shard = functools.partial(yf.shard, mesh=mesh_of(world)) if world else lambda f: f
    assert_bits(shard(step(fn))(layers, X), shard(step(plain))(layers, X))


# --- what the function may be, take and return ----------------------------------------


def closes_over_tensors(remat: Fn) -> Fn:
    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        scale = w.sum()
        held = {"list": [w, 2 * w]}

        def inner(x: torch.Tensor) -> torch.Tensor:
            return x @ held["list"][1] * scale

        return remat(lambda x: torch.sin(inner(x)) + X.sum())(batch)

    return step


def closes_over_loop_variables(remat: Fn) -> Fn:
    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        x = batch @ w
        for number in range(3):
            shift = w.sum() * number
            x = remat(lambda x: torch.sin(x * (number + 1) + shift))(x)  # noqa: B023
        return x

    return step


def rebinds_functions(remat: Fn) -> Fn:
    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        x = batch @ w
        for number in range(1, 3):
            inner = lambda x: torch.sin(number * x)  # noqa: B023, E731
            x = remat(lambda x: inner(x))(x)  # noqa: B023
        inner = torch.zeros_like
        return x

    return step


def holds_functions_in_containers(remat: Fn) -> Fn:
    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        x = batch @ w
        for number in range(1, 3):
            inner = [lambda x: torch.sin(number * x)]  # noqa: B023
            x = remat(lambda x: inner[0](x))(x)  # noqa: B023
        return x

    return step


def passes_functions_to_partials(remat: Fn) -> Fn:
    def twice(fn: Fn, x: torch.Tensor) -> torch.Tensor:
        return fn(fn(x))

    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        x = batch @ w
        for number in range(1, 3):
            sin = lambda x: torch.sin(number * x)  # noqa: B023, E731
            x = remat(functools.partial(twice, sin))(x)
        return x

    return step


def is_a_partial(remat: Fn) -> Fn:
    def scaled(w: torch.Tensor, x: torch.Tensor, *, power: int) -> torch.Tensor:
        return (x @ w).pow(power)

    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return remat(functools.partial(scaled, w, power=3))(batch)

    return step


class Block:
    """An object with a tensor, whose method is made remat."""

    def __init__(self, w: torch.Tensor) -> None:
        self.w = w

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ self.w)


def is_a_method(remat: Fn) -> Fn:
    return lambda w, batch: remat(Block(w).__call__)(batch) + remat(Block(w))(batch)


def takes_trees_and_values(remat: Fn) -> Fn:
    def inner(tree: Any, flag: bool, name: str, *, power: int, rest: Any) -> Any:
        assert (flag, name, rest["none"]) == (True, "sin", None)
        out = getattr(torch, name)(rest["x"] @ tree["w"][0]).pow(power)
        return {"out": out * rest["scale"], "pair": (out.sum(), None, 3)}

    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        rest = {"x": batch, "none": None, "scale": 0.5}
        found = remat(inner)({"w": (w,)}, True, "sin", power=2, rest=rest)
        assert found["pair"][1:] == (None, 3)
        return found["out"] + found["pair"][0]

    return step


def looks_up_integers(remat: Fn) -> Fn:
    def inner(w: torch.Tensor, index: torch.Tensor, mask: torch.Tensor) -> Any:
        rows = F.embedding(index, w).sin() * mask[:, None]
        return rows, index + 1, rows.argmax(1), mask

    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        index = torch.arange(batch.shape[0]) % 4
        rows, index, largest, mask = remat(inner)(w, index, batch[:, 0] > 0)
        return rows * index[:, None] + (largest * mask)[:, None]

    return step


def leaves_outputs_unused(remat: Fn) -> Fn:
    def inner(w: torch.Tensor, x: torch.Tensor) -> Any:
        hidden = x @ w
        return hidden.cos(), hidden.sin(), hidden.sum(), x

    return lambda w, batch: remat(inner)(w, batch)[1]


def returns_what_it_takes(remat: Fn) -> Fn:
    def inner(w: torch.Tensor, x: torch.Tensor) -> Any:
        hidden = x @ w
        return w, hidden, hidden, hidden.T

    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        same, first, second, turned = remat(inner)(w, batch)
        return first.sin() * second + turned.T * same.sum()

    return step


def takes_one_tensor_twice(remat: Fn) -> Fn:
    return lambda w, batch: remat(lambda a, b: (batch @ a).sin() * b.sum() * w.sum())(
        w, w
    )


KINDS = [
    closes_over_tensors,
    closes_over_loop_variables,
    rebinds_functions,
    holds_functions_in_containers,
    passes_functions_to_partials,
    is_a_partial,
    is_a_method,
    takes_trees_and_values,
    looks_up_integers,
    leaves_outputs_unused,
    returns_what_it_takes,
    takes_one_tensor_twice,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_kind_of_function_has_its_gradient(kind: Fn) -> None:
    def step(remat: Fn) -> Fn:
        fn = kind(remat)
        return grad_and_value(lambda w, batch: fn(w, batch).square().sum())

    found, wanted = step(yf.remat)(W, X), step(lambda fn: fn)(W, X)
    # A tensor that is used three times may have its gradients added in another order.
    assert_same(found, wanted)
    for world in (3, (2, 2)):
        assert_same(yf.shard(step(yf.remat), mesh=mesh_of(world))(W, X), wanted)


def test_a_function_that_returns_no_tensor_is_refused() -> None:
    with pytest.raises(yf.ArgumentError, match="returns no tensor"):
        yf.remat(lambda x: 3)(X)


# --- what is saved --------------------------------------------------------------------


def deep(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    for number in range(4):
        x = torch.tanh(yf.name_value(x @ w, f"h{number}")) @ w.T
    return x.sum()


def matmuls(fn: Fn) -> int:
    graph = yf.shard(grad_and_value(fn), mesh=mesh_of(2)).trace(W, X).graph
    return sum(node.op is torch.ops.aten.mm.default for node in graph.nodes)


def saved_shapes(fn: Fn) -> list[tuple[int, ...]]:
    """What autograd keeps of a call for its backward."""
    saved: list[tuple[int, ...]] = []
    keep = lambda t: saved.append(tuple(t.shape)) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        fn(W.clone().requires_grad_(), X)
    return saved


def test_inputs_are_all_that_is_saved() -> None:
    assert saved_shapes(yf.remat(deep)) == [(4, 5), (6, 4)]
    assert len(saved_shapes(deep)) > 10


def test_named_values_are_saved_as_well() -> None:
    shapes = saved_shapes(yf.remat(deep, save=["h1", "h3"]))
    assert shapes == [(4, 5), (6, 4), (6, 5), (6, 5)]
    assert saved_shapes(yf.remat(deep, save="h1")) == [(4, 5), (6, 4), (6, 5)]


def test_what_leads_to_a_named_value_is_not_computed_again() -> None:
    names = ["h0", "h1", "h2", "h3"]
    plain, whole = matmuls(deep), matmuls(yf.remat(deep))
    counts = [matmuls(yf.remat(deep, save=names[:n])) for n in range(5)]
    # Without names seven of the eight products are made again, the last is not needed.
    assert (counts[0], whole) == (plain + 7, plain + 7)
    assert counts == sorted(counts, reverse=True)
    assert counts[4] == plain + 3


@pytest.mark.parametrize("save", ["h0", ["h1", "h2"], ["h0", "h1", "h2", "h3"], "none"])
@pytest.mark.parametrize("name", ["grad_and_value", "jvp", "jacrev", "vmap of grad"])
def test_named_values_change_no_bit(save: Any, name: str) -> None:
    fn = yf.remat(deep, save=save)
    step = lambda f: lambda w, batch: FIRST[name](f, w, batch)  # noqa: E731
    assert_bits(step(fn)(W, X), step(deep)(W, X))
    found, wanted = (yf.shard(step(f), mesh=mesh_of(3))(W, X) for f in (fn, deep))
    assert_bits(found, wanted)


@pytest.mark.parametrize("name", NESTED)
def test_named_values_agree_below_nested_transforms(name: str) -> None:
    fn = yf.remat(deep, save=["h1", "h2"])
    assert_same(NESTED[name](fn, W, X), NESTED[name](deep, W, X))


def test_a_name_has_no_meaning_outside_of_remat() -> None:
    assert yf.name_value(X, "h") is X
    assert_bits(grad(deep)(W, X), grad(lambda w, x: deep(w, x))(W, X))


# --- the schedule ---------------------------------------------------------------------

LAYERS, RANKS, ROWS, CONTEXT, WIDTH = 12, 2, 4, 32, 16


def llama_config(layers: int) -> Any:
    return llama().Config(
        layers=layers, width=WIDTH, heads=4, kv_heads=2, context=CONTEXT, batch=ROWS
    )


def llama_gradient(layers: int, remat: Fn) -> Fn:
    model, config = llama(), llama_config(layers)

    @remat
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        x = x + model.attention(p, model.rms_norm(x, p["attention_norm"]), config)
        return x + model.swiglu(p, model.rms_norm(x, p["mlp_norm"]))

    def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
        x = F.embedding(batch, params["embedding"])
        for p in params["layers"]:
            x = layer(p, x)
        logits = F.linear(model.rms_norm(x, params["norm"]), params["embedding"])
        return F.cross_entropy(logits.flatten(0, 1), batch.flatten())

    return grad_and_value(loss)


@functools.cache
def llama_lowered(layers: int, remat: bool) -> yf.Lowered:
    params = llama().init_params(llama_config(layers))
    batch = torch.arange(ROWS * CONTEXT).view(ROWS, CONTEXT)
    step = llama_gradient(layers, yf.remat if remat else lambda fn: fn)
    return yf.shard(step, mesh=mesh_of(RANKS)).lower(params, batch)


def test_a_llama_has_the_bits_of_no_remat() -> None:
    params = llama().init_params(llama_config(2))
    batch = torch.arange(5 * CONTEXT).view(5, CONTEXT)
    steps = [llama_gradient(2, remat) for remat in (yf.remat, lambda fn: fn)]
    assert_bits(*(step(params, batch) for step in steps))
    assert_bits(*(yf.shard(s, mesh=mesh_of(3))(params, batch) for s in steps))


def positions(plan: yf.Program, op: Any) -> list[int]:
    found = enumerate(plan.instructions)
    return [n for n, i in found if isinstance(i, Compute) and i.op is op]


def test_a_layer_is_computed_again_right_before_its_backward() -> None:
    plan = llama_lowered(LAYERS, True).plan
    forward = positions(plan, torch.ops.aten.silu.default)
    backward = positions(plan, torch.ops.aten.silu_backward.default)
    again = forward[LAYERS:]
    assert (len(again), len(backward)) == (LAYERS, LAYERS)
    alternating = [n for pair in zip(again, backward, strict=True) for n in pair]
    assert alternating == sorted(alternating)
    assert forward[LAYERS - 1] < again[0]


def test_weights_are_gathered_twice_and_nothing_is_unplanned() -> None:
    lowered = llama_lowered(LAYERS, True)
    yf.check(lowered.plan)
    assert lowered.cost_analysis()["unplanned_collectives"] == 0
    gathers = [t for t in lowered.plan.transfers() if t.kind == "all_gather"]
    assert max(Counter(label for t in gathers for label in t.labels).values()) == 2
    groups = [{layer_of(label) for label in t.labels} for t in gathers]
    single = [min(group) for group in groups if len(group) == 1]
    layers = [int(group.split("[")[2][:-1]) for group in single if "layers" in group]
    kept = 2 * LAYERS - len(layers)  # from the forward pass to the backward pass
    assert layers == [*range(LAYERS), *range(LAYERS)[::-1][kept:]]


def test_the_peak_is_one_layers_activations_and_the_inputs_of_all() -> None:
    peaks = {
        (n, remat): llama_lowered(n, remat).memory_analysis()["peak_bytes"]
        for n in (1, LAYERS)
        for remat in (False, True)
    }
    shards = {
        n: llama_lowered(n, True).memory_analysis()["shard_bytes"] for n in (1, LAYERS)
    }
    each = shards[LAYERS] - shards[1]  # parameters of eleven layers
    inputs = (LAYERS - 1) * ROWS * CONTEXT * WIDTH * 4 // RANKS
    # Two layers' gradients are in flight beside two layers, and what is received.
    flying = 4 * each * RANKS // (LAYERS - 1)
    assert peaks[LAYERS, True] <= peaks[1, True] + 2 * each + inputs + flying
    assert peaks[LAYERS, False] > 3 * peaks[LAYERS, True]


def test_only_the_inputs_of_layers_live_from_forward_to_backward() -> None:
    plan = llama_lowered(LAYERS, True).plan
    written: dict[int, int] = {}
    freed: dict[int, int] = {}
    owner = plan.owner
    for n, instruction in enumerate(plan.instructions):
        written |= {r.id: n for r in instruction.writes}
        freed |= {r.id: n for r in getattr(instruction, "values", ())}
    forward = positions(plan, torch.ops.aten.silu.default)
    last, again = forward[LAYERS - 1], forward[LAYERS]
    kept = {
        owner[v] for v, n in written.items() if n < last and freed.get(v, n) > again
    }
    gathered = {r.id for t in plan.transfers() for r in t.targets}
    shapes = [plan.values[v].meta.shape for v in kept - gathered]
    assert shapes == [(ROWS, CONTEXT, WIDTH)] * LAYERS
