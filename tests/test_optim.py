"""Optimisers against torch.optim, on random trees, and the promises they all make."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from yafsdp_fn import optim
from yafsdp_fn._errors import YafsdpError

fast = settings(max_examples=20, deadline=None)


# --- random trees ----------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


def random_like(leaf: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
    return values.to(leaf.dtype)


def random_tree(tree: Any, seed: int) -> Any:
    """Fresh values in the structure, shapes and dtypes of a tree."""
    leaves, spec = optree.tree_flatten(tree)
    fresh = [random_like(leaf, seed + index) for index, leaf in enumerate(leaves)]
    return optree.tree_unflatten(spec, fresh)


shapes = st.sampled_from([(), (1,), (0,), (5,), (2, 3), (3, 0), (2, 1, 4)])


def trees(*dtypes: torch.dtype) -> st.SearchStrategy[Any]:
    """Nested containers of tensors, `None` among them."""
    leaf = st.builds(
        lambda s, d: torch.zeros(s, dtype=d), shapes, st.sampled_from(dtypes)
    )
    tree = st.recursive(
        leaf | st.none(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=6,
    )
    return st.builds(random_tree, tree, st.integers(0, 2**16))


# --- comparing -------------------------------------------------------------------

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.complex128: 1e-12,
}


def assert_close(actual: Any, expected: Any) -> None:
    """Same structure, shapes and dtypes; values as near as the dtype allows."""
    ours, spec = optree.tree_flatten(actual)
    theirs, wanted = optree.tree_flatten(expected)
    assert spec == wanted
    for left, right in zip(ours, theirs, strict=True):
        tolerance = TOLERANCE.get(right.dtype, 0)
        torch.testing.assert_close(
            left, right, rtol=tolerance, atol=tolerance, equal_nan=True
        )


def copied(tree: Any) -> Any:
    return optree.tree_map(torch.clone, tree)


def assert_same_bits(actual: Any, expected: Any) -> None:
    for left, right in zip(
        optree.tree_leaves(actual), optree.tree_leaves(expected), strict=True
    ):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    "other",
    [
        [torch.ones(2), torch.tensor([1.0, 2.1])],
        [torch.ones(2), torch.tensor([1.0, math.nan])],
        [torch.ones(2), torch.tensor([1.0, 2.0], dtype=torch.float64)],
        [torch.ones(2), torch.tensor([[1.0, 2.0]])],
        (torch.ones(2), torch.tensor([1.0, 2.0])),
        [torch.ones(2)],
        [torch.ones(2), None],
    ],
)
def test_assert_close_fails_on_what_differs(other: Any) -> None:
    reference = [torch.ones(2), torch.tensor([1.0, 2.0])]
    assert_close(reference, copied(reference))
    with pytest.raises(AssertionError):
        assert_close(other, reference)


def test_assert_same_bits_fails_on_one_bit() -> None:
    reference = [torch.ones(2)]
    assert_same_bits(reference, copied(reference))
    with pytest.raises(AssertionError):
        assert_same_bits([torch.nextafter(torch.ones(2), torch.zeros(2))], reference)


# --- the suite that every optimiser gets -----------------------------------------


class Case(NamedTuple):
    """An optimiser and the class of torch.optim that it must agree with."""

    ours: Callable[..., optim.GradientTransformation]
    theirs: Callable[..., torch.optim.Optimizer]


def adamw_case(fused: bool, **kwargs: float) -> Case:
    renamed = {k: v for k, v in kwargs.items() if k not in ("b1", "b2")}
    betas = (kwargs.get("b1", 0.9), kwargs.get("b2", 0.999))
    return Case(
        lambda lr=0.1: optim.adamw(lr, fused=fused, **kwargs),
        lambda ps: torch.optim.AdamW(ps, lr=0.1, betas=betas, **renamed),
    )


def sgd_case(**kwargs: Any) -> Case:
    return Case(
        lambda lr=0.1: optim.sgd(lr, **kwargs),
        lambda ps: torch.optim.SGD(ps, lr=0.1, **kwargs),
    )


CASES = {
    "adamw": adamw_case(True),
    "adamw-tuned": adamw_case(True, b1=0.5, b2=0.8, eps=1e-3, weight_decay=0.3),
    "adamw-plain": adamw_case(False),
    "adamw-plain-tuned": adamw_case(False, b1=0.0, b2=0.8, eps=1e-3, weight_decay=0),
    "sgd": sgd_case(),
    "sgd-decay": sgd_case(weight_decay=0.3),
    "sgd-momentum": sgd_case(momentum=0.9, weight_decay=0.1),
    "sgd-nesterov": sgd_case(momentum=0.9, nesterov=True, weight_decay=0.1),
}
every_optimiser = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def run(
    optimiser: optim.GradientTransformation, params: Any, gradients: list[Any]
) -> tuple[Any, Any]:
    """Parameters and state after one update per tree of gradients."""
    state = optimiser.init(params)
    for grads in gradients:
        updates, state = optimiser.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def run_torch(case: Case, params: Any, gradients: list[Any]) -> Any:
    """The same, by the class of torch.optim."""
    leaves, spec = optree.tree_flatten(params)
    leaves = [torch.nn.Parameter(leaf.detach().clone()) for leaf in leaves]
    if leaves:
        optimiser = case.theirs(leaves)
        for grads in gradients:
            for leaf, grad in zip(leaves, optree.tree_leaves(grads), strict=True):
                leaf.grad = grad.clone()
            optimiser.step()
    return optree.tree_unflatten(spec, [leaf.detach() for leaf in leaves])


def some_params() -> dict[str, Any]:
    shapes = {"weight": torch.zeros(4, 3), "bias": (torch.zeros(3), torch.zeros(()))}
    return random_tree(shapes, seed=0)


def some_gradients(params: Any, count: int = 3) -> list[Any]:
    return [random_tree(params, seed=1_000 * step) for step in range(1, count + 1)]


@every_optimiser
@fast
@given(params=trees(torch.float32, torch.float64))
def test_agrees_with_torch(case: Case, params: Any) -> None:
    gradients = some_gradients(params, 4)
    ours, _ = run(case.ours(), params, gradients)
    assert_close(ours, run_torch(case, params, gradients))


@every_optimiser
@fast
@given(params=trees(torch.bfloat16, torch.float32))
def test_agrees_with_torch_in_low_precision(case: Case, params: Any) -> None:
    gradients = some_gradients(params)
    ours, _ = run(case.ours(), params, gradients)
    assert_close(ours, run_torch(case, params, gradients))


@every_optimiser
def test_agrees_with_torch_on_complex_leaves(case: Case) -> None:
    params = [torch.zeros(3, 2, dtype=torch.complex128), torch.zeros(2)]
    params = [random_like(p.real, 1).to(p.dtype) * (1 + 2j) for p in params[:1]]
    # A lazily conjugated gradient, as autograd makes them.
    gradients = [[(params[0] * (step - 0.5j)).conj()] for step in range(3)]
    ours, _ = run(case.ours(), params, gradients)
    assert_close(ours, run_torch(case, params, gradients))


@every_optimiser
@fast
@given(params=trees(torch.float32, torch.bfloat16))
def test_changes_no_argument(case: Case, params: Any) -> None:
    optimiser = case.ours()
    grads = random_tree(params, seed=7)
    state = optimiser.update(grads, optimiser.init(params), params)[1]
    arguments = (grads, state, params)
    before = copied(arguments)
    first = optimiser.update(*arguments)
    assert_same_bits(arguments, before)
    assert_same_bits(first, optimiser.update(*arguments))


@every_optimiser
@fast
@given(params=trees(torch.float32, torch.bfloat16))
def test_updates_and_state_keep_structure(case: Case, params: Any) -> None:
    optimiser = case.ours()
    state = optimiser.init(params)
    updates, after = optimiser.update(random_tree(params, 3), state, params)

    def kinds(tree: Any) -> Any:
        return optree.tree_map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    assert kinds(updates) == kinds(params)
    assert kinds(after) == kinds(state)
    assert after.count == 1
    assert state.count == 0


@every_optimiser
def test_layouts_are_kept_and_never_mixed_up(case: Case) -> None:
    straight = torch.randn(3, 4, 2, 5, dtype=torch.float64)
    turned = straight.transpose(0, 1).contiguous().transpose(0, 1)
    filters = straight.contiguous(memory_format=torch.channels_last)
    strided = straight.repeat_interleave(2, 3)[..., ::2]
    layouts = [straight, turned, filters, strided]
    gradients = [torch.randn_like(straight) for _ in range(2)]
    (expected,) = run_torch(case, [straight], [[grad] for grad in gradients])
    for grad_layout in layouts:
        grads = [
            [grad_layout.clone().copy_(grad) for _ in layouts] for grad in gradients
        ]
        params, state = run(case.ours(), layouts, grads)
        for param, layout in zip(params, layouts[:3], strict=False):
            assert param.stride() == layout.stride()
        assert_close(params, [expected] * len(layouts))
        fresh = case.ours().init(layouts)
        for after, before in zip(*map(optree.tree_leaves, (state, fresh)), strict=True):
            assert after.stride() == before.stride()


@every_optimiser
def test_moves_only_what_has_a_gradient(case: Case) -> None:
    quantised = torch.ones(2).to(torch.float8_e4m3fn)
    fixed = {"count": torch.tensor(3), "mask": torch.tensor([True]), "q": quantised}
    params = {"moved": torch.ones(2), "frozen": torch.ones(2), **fixed}
    grads = {**dict.fromkeys(params), "moved": torch.ones(2)}
    optimiser = case.ours()
    updates, state = optimiser.update(grads, optimiser.init(params), params)
    assert [name for name, update in updates.items() if update is not None] == ["moved"]
    after = optim.apply_updates(params, updates)
    assert all(after[name] is params[name] for name in ("frozen", *fixed))
    leaves = optree.tree_leaves(state)
    assert all(leaf.dtype in (torch.float32, torch.int64) for leaf in leaves)


@every_optimiser
def test_traces_under_functionalize_with_fake_tensors(case: Case) -> None:
    params = some_params()
    optimiser = case.ours(lr=optim.warmup_cosine(0.1, 2, 10))
    arguments = (random_tree(params, 1), optimiser.init(params), params)
    leaves, spec = optree.tree_flatten(arguments)

    def flat(*leaves: Tensor) -> list[Tensor]:
        return optree.tree_leaves(
            optimiser.update(*optree.tree_unflatten(spec, leaves))
        )

    graph = make_fx(torch.func.functionalize(flat), tracing_mode="fake")(*leaves)
    assert_close(graph(*leaves), flat(*leaves))
    operators = [
        node.target.overloadpacket.__name__
        for node in graph.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    ]
    assert operators
    for name in operators:
        assert not name.startswith(("_foreach", "_local_scalar"))
        assert not name.endswith("_")


@every_optimiser
def test_runs_on_fake_tensors(case: Case) -> None:
    with FakeTensorMode():
        params = some_shapes()
        updates, _ = run(case.ours(), params, [params])
        assert updates["weight"].shape == (4, 3)


def some_shapes() -> dict[str, Tensor]:
    return {"weight": torch.empty(4, 3), "bias": torch.empty(3)}


class Live:
    """A number of which nothing is known but that it multiplies tensors."""

    def __init__(self, value: float) -> None:
        self._value = value

    def __mul__(self, other: Tensor) -> Tensor:
        assert isinstance(other, Tensor)
        return other * self._value

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("the number was read")

    __float__ = __bool__ = __int__ = __eq__ = __lt__ = __le__ = __gt__ = _refuse
    __hash__ = __format__ = __repr__ = _refuse


@every_optimiser
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_form_of_a_learning_rate_agrees(case: Case, dtype: torch.dtype) -> None:
    params = optree.tree_map(lambda leaf: leaf.to(dtype), some_params())
    gradients = some_gradients(params)
    expected = run(case.ours(0.1), params, gradients)
    for rate in (
        torch.tensor(0.1, dtype=torch.float64),
        Live(0.1),
        lambda count: 0.1,
        lambda count: torch.tensor(0.1, dtype=torch.float64),
    ):
        assert_close(run(case.ours(rate), params, gradients), expected)


@every_optimiser
def test_a_schedule_sees_the_count_from_zero(case: Case) -> None:
    seen: list[Tensor] = []

    def schedule(count: Tensor) -> Tensor:
        seen.append(count)
        return torch.tensor(0.1)

    params = some_params()
    run(case.ours(schedule), params, some_gradients(params))
    assert_same_bits(seen, list(torch.arange(3)))


@every_optimiser
def test_gradients_of_another_dtype_are_cast(case: Case) -> None:
    params = [torch.ones(3, dtype=torch.bfloat16)]
    grads = [torch.full((3,), 0.3)]
    cast = [grads[0].bfloat16()]
    assert_same_bits(
        run(case.ours(), params, [grads]), run(case.ours(), params, [cast])
    )


@every_optimiser
def test_trees_that_do_not_match_are_refused_with_their_path(case: Case) -> None:
    params = some_params()
    optimiser = case.ours()
    state = optimiser.init(params)
    short = {"weight": torch.ones(4, 3), "bias": (torch.ones(3),)}
    with pytest.raises(YafsdpError, match=r"grads\['bias'\](?s:.*)Write None"):
        optimiser.update(short, state, params)
    wrong = {"weight": torch.ones(3, 4), "bias": (None, None)}
    with pytest.raises(YafsdpError, match=r"grads\['weight'\] is a .*\(3, 4\).*Write"):
        optimiser.update(wrong, state, params)
    imaginary = {"weight": torch.ones(4, 3) * 1j, "bias": (None, None)}
    with pytest.raises(YafsdpError, match=r"grads\['weight'\] is a complex"):
        optimiser.update(imaginary, state, params)
    deeper = {"weight": [torch.ones(4, 3)], "bias": (None, None)}
    with pytest.raises(YafsdpError, match=r"grads\['weight'\] is a list"):
        optimiser.update(deeper, state, params)
    if len(state) > 1 and state[1] is not None:
        foreign = state._replace(**{state._fields[1]: {**state[1], "weight": None}})
        with pytest.raises(YafsdpError, match=r"\['weight'\] is None.*init"):
            optimiser.update(random_tree(params, 1), foreign, params)


@every_optimiser
@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf, "0.1", None, torch.ones(2)])
def test_a_learning_rate_out_of_range_is_refused(case: Case, rate: Any) -> None:
    with pytest.raises(YafsdpError, match=r"learning_rate.*Write learning_rate=3e-4"):
        case.ours(rate)


@pytest.fixture
def two_ranks() -> Iterator[dist.device_mesh.DeviceMesh]:
    """Rank 0 of two, of which the other is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@every_optimiser
def test_state_of_shards_is_sharded(case: Case, two_ranks: Any) -> None:
    whole = some_params()["weight"]
    params = {"weight": distribute_tensor(whole, two_ranks, [Shard(0)])}
    state = case.ours().init(params)
    assert type(state.count) is Tensor
    for leaf in optree.tree_leaves(tuple(state)[1:]):
        assert isinstance(leaf, DTensor)
        assert leaf.placements == (Shard(0),)


# --- AdamW -----------------------------------------------------------------------


def test_adamw_is_one_operator_per_dtype() -> None:
    params = [torch.zeros(2), torch.zeros(3, 4), torch.zeros(5, dtype=torch.float64)]
    optimiser = optim.adamw(0.1)

    def update(*params: Tensor) -> Any:
        grads = list(params)
        return optimiser.update(grads, optimiser.init(grads), grads)[0]

    graph = make_fx(update, tracing_mode="fake")(*params).graph
    targets = [node.target for node in graph.nodes]
    assert targets.count(torch.ops.aten._fused_adamw.default) == 2
    assert torch.ops.aten.lerp.Scalar not in targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_adamw_formula_is_what_the_operator_computes(dtype: torch.dtype) -> None:
    params = optree.tree_map(lambda leaf: leaf.to(dtype), some_params())
    gradients = some_gradients(params, 6)
    fused = run(optim.adamw(0.1), params, gradients)
    assert_close(run(optim.adamw(0.1, fused=False), params, gradients), fused)


def moved_by(rate: Tensor, grad: Tensor, optimiser: Any) -> Tensor:
    start = torch.linspace(1, 2, 3, dtype=torch.float64)
    return run(optimiser(rate), start, [grad, grad * grad])[0]


@pytest.mark.parametrize(
    "optimiser",
    [
        lambda lr: optim.adamw(lr, eps=0.1, fused=False),
        lambda lr: optim.sgd(lr, 0.9, True, 0.1),
        lambda lr: optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(lr)),
    ],
)
def test_derivatives_pass_through(optimiser: Any) -> None:
    rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    grad = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda r, g: moved_by(r, g, optimiser), (rate, grad)
    )

    def objective(grad: Tensor) -> Tensor:
        return moved_by(rate.detach(), grad, optimiser).sum()

    for point in (grad.detach(), torch.zeros(3, dtype=torch.float64)):
        assert torch.func.grad(objective)(point).isfinite().all()


def test_plain_adamw_runs_under_vmap() -> None:
    optimiser = optim.adamw(0.1, fused=False)
    params, grads = torch.randn(2, 5, 3)

    def step(param: Tensor, grad: Tensor) -> Tensor:
        return run(optimiser, param, [grad])[0]

    expected = torch.stack([step(*pair) for pair in zip(params, grads, strict=True)])
    assert_close(torch.func.vmap(step)(params, grads), expected)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"b1": 1.0}, r"b1=1\.0 is outside \[0, 1\)\. Write b1=0\.9"),
        ({"b2": -0.1}, r"b2=-0\.1 is outside"),
        ({"eps": -1.0}, r"eps=-1\.0 is outside"),
        ({"weight_decay": math.nan}, r"weight_decay=nan is outside"),
        ({"weight_decay": torch.tensor(0.1)}, r"weight_decay is a Tensor, but must be"),
    ],
)
def test_adamw_refuses_numbers_out_of_range(kwargs: Any, message: str) -> None:
    with pytest.raises(YafsdpError, match=message):
        optim.adamw(0.1, **kwargs)


def test_updates_that_need_parameters_say_so() -> None:
    for optimiser in (optim.adamw(0.1), optim.sgd(0.1, weight_decay=0.1)):
        state = optimiser.init(torch.ones(2))
        with pytest.raises(YafsdpError, match=r"Write update\(grads, state, params\)"):
            optimiser.update(torch.ones(2), state)


# --- SGD -------------------------------------------------------------------------


def test_sgd_without_decay_needs_no_parameters() -> None:
    grads = some_params()
    optimiser = optim.sgd(0.1, momentum=0.9)
    state = optimiser.init(grads)
    assert_same_bits(
        optimiser.update(grads, state), optimiser.update(grads, state, grads)
    )


def test_sgd_refuses_what_makes_no_sense() -> None:
    with pytest.raises(YafsdpError, match=r"nesterov.*Write momentum=0\.9"):
        optim.sgd(0.1, nesterov=True)
    with pytest.raises(YafsdpError, match=r"momentum=1\.5 is outside"):
        optim.sgd(0.1, momentum=1.5)


# --- clipping --------------------------------------------------------------------

orders = pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 0.5, math.inf])


def clipped_by_torch(grads: Any, max_norm: float, p: float) -> tuple[Any, Tensor]:
    leaves, spec = optree.tree_flatten(grads)
    parameters = [torch.nn.Parameter(torch.zeros_like(leaf)) for leaf in leaves]
    for parameter, grad in zip(parameters, leaves, strict=True):
        parameter.grad = grad.clone()
    full = [each for each in parameters if each.numel()]
    norm = torch.nn.utils.clip_grad_norm_(full, max_norm, p)
    return optree.tree_unflatten(spec, [each.grad for each in parameters]), norm


@orders
@fast
@given(grads=trees(torch.float32), max_norm=st.sampled_from([1e-3, 1.0, 50.0]))
def test_clip_agrees_with_torch(p: float, grads: Any, max_norm: float) -> None:
    expected, norm = clipped_by_torch(grads, max_norm, p)
    before = copied(grads)
    assert_close(optim.global_norm(grads, p), norm)
    for limit in (max_norm, torch.tensor(max_norm), Live(max_norm)):
        clip = optim.clip_by_global_norm(limit, p)
        assert_close(clip.update(grads, clip.init(grads))[0], expected)
    assert_same_bits(grads, before)


@orders
def test_clip_keeps_dtypes_and_sums_in_float32(p: float) -> None:
    # 4097 has no bfloat16.
    low = torch.ones(4097, dtype=torch.bfloat16)
    norm = optim.global_norm([low, low[0]], p)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.item(), 4098 ** (1 / p), rtol=1e-6, atol=0)
    grads = {"low": low, "point": low[0], "z": torch.tensor([1j])}
    grads = {**grads, "count": torch.tensor(3)}
    clipped, _ = optim.clip_by_global_norm(0.5, p).update(grads, ())
    assert clipped["count"] is None
    for name in ("low", "point", "z"):
        assert clipped[name].dtype == grads[name].dtype


@orders
def test_norm_of_complex_leaves_is_that_of_magnitudes(p: float) -> None:
    leaf = torch.tensor([3 + 4j, 1 - 1j], dtype=torch.complex128)
    expected = torch.linalg.vector_norm(leaf.abs(), p)
    assert_close(optim.global_norm([leaf], p), expected)


@orders
def test_norm_passes_nan_on_and_is_zero_of_nothing(p: float) -> None:
    assert optim.global_norm([torch.tensor([1.0, math.nan]), torch.ones(2)], p).isnan()
    for nothing in ([], [torch.zeros(0)], [None], [torch.zeros(2)]):
        assert optim.global_norm(nothing, p) == 0


@orders
def test_norm_takes_one_root_of_one_sum(p: float) -> None:
    grads = [torch.ones(2), torch.ones(3, 2), torch.ones(())]
    graph = make_fx(lambda *g: optim.global_norm(list(g), p))(*grads).graph
    names = [str(node.target).split(".")[1] for node in graph.nodes if node.args[1:]]
    allowed = {"pow", "sum", "add", "eq", "where", "amax", "maximum", "reciprocal"}
    assert set(names) <= allowed
    assert "sqrt" not in names


@pytest.mark.parametrize("p", [0.0, -1.0, math.nan, "2"])
def test_orders_that_are_no_norm_are_refused(p: Any) -> None:
    with pytest.raises(YafsdpError, match=r"p.*Write p=2\.0"):
        optim.global_norm([torch.ones(2)], p)
    with pytest.raises(YafsdpError, match=r"p.*Write p=2\.0"):
        optim.clip_by_global_norm(1.0, p)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan, [1.0]])
def test_limits_that_clip_nothing_right_are_refused(max_norm: Any) -> None:
    with pytest.raises(YafsdpError, match=r"max_norm.*Write max_norm=1\.0"):
        optim.clip_by_global_norm(max_norm)


# --- combining -------------------------------------------------------------------


def test_chain_is_one_after_another() -> None:
    params = some_params()
    gradients = some_gradients(params)
    clip, descend = optim.clip_by_global_norm(0.5), optim.sgd(0.1, momentum=0.9)
    chained, state = run(optim.chain(clip, descend), params, gradients)
    clipped = [clip.update(grads, ())[0] for grads in gradients]
    assert_same_bits((chained, state[1]), run(descend, params, clipped))
    assert state[0] == ()


def test_an_empty_chain_changes_nothing() -> None:
    grads = some_params()
    assert optim.chain().update(grads, ()) == (grads, ())


def test_chain_refuses_strangers() -> None:
    with pytest.raises(YafsdpError, match=r"argument 1 of chain is a float.*Write"):
        optim.chain(optim.scale(1.0), 0.1)  # type: ignore[arg-type]
    with pytest.raises(YafsdpError, match=r"not that of a chain of 1.*Write"):
        optim.chain(optim.scale(1.0)).update([], ((), ()))


@pytest.mark.parametrize("factor", [-2.0, torch.tensor(-2.0), Live(-2.0), -2])
def test_scale_multiplies_in_each_dtype(factor: Any) -> None:
    grads = [torch.ones(2, dtype=torch.bfloat16), torch.tensor(1.0), None]
    expected = [torch.full((2,), -2, dtype=torch.bfloat16), torch.tensor(-2.0), None]
    assert_close(optim.scale(factor).update(grads, ())[0], expected)


@fast
@given(params=trees(torch.float32, torch.bfloat16, torch.int64))
def test_apply_updates_adds_in_the_parameters_dtype(params: Any) -> None:
    updates = optree.tree_map(lambda leaf: random_like(leaf, 5).double(), params)
    before = copied(params)
    expected = optree.tree_map(lambda p, u: (p + u).to(p.dtype), params, updates)
    assert_close(optim.apply_updates(params, updates), expected)
    nothing = optree.tree_map(lambda leaf: None, params)
    assert_same_bits(optim.apply_updates(params, nothing), params)
    assert_same_bits(params, before)


def test_apply_updates_refuses_another_structure() -> None:
    params = {"weight": torch.ones(2), "bias": torch.ones(2)}
    with pytest.raises(YafsdpError, match=r"updates must have(?s:.*)missing key"):
        optim.apply_updates(params, {"weight": torch.ones(2)})


# --- schedules -------------------------------------------------------------------


def warmed(step: int, peak: float, warmup: int, total: int, end: float) -> list[float]:
    """The two schedules in plain Python: cosine, linear."""
    if step < warmup:
        return [peak * step / warmup] * 2
    progress = min(1.0, (step - warmup) / (total - warmup))
    shares = ((1 + math.cos(math.pi * progress)) / 2, 1 - progress)
    return [end + (peak - end) * share for share in shares]


@settings(max_examples=50, deadline=None)
@given(
    step=st.integers(0, 3_000),
    peak=st.floats(0, 10),
    warmup=st.integers(0, 1_000),
    after=st.integers(1, 1_000),
    end=st.floats(0, 10),
)
def test_schedules_follow_the_hand_formula(
    step: int, peak: float, warmup: int, after: int, end: float
) -> None:
    arguments = (peak, warmup, warmup + after, end)
    expected = warmed(step, *arguments)
    live = (Live(peak), warmup, warmup + after, torch.tensor(end))
    for numbers in (arguments, live):
        for build, value in zip(
            (optim.warmup_cosine, optim.warmup_linear), expected, strict=True
        ):
            for form in (step, torch.tensor(step)):
                rate = build(*numbers)(form)
                assert rate.shape == ()
                assert rate.dtype == torch.float32
                assert rate.item() == pytest.approx(value, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("value", [0.25, torch.tensor(0.25).double(), Live(0.25)])
def test_constant_is_constant(value: Any) -> None:
    for step in (0, torch.tensor(9)):
        assert_close(optim.constant(value)(step), torch.tensor(0.25))


@pytest.mark.parametrize("build", [optim.warmup_cosine, optim.warmup_linear])
def test_schedules_refuse_impossible_steps(build: Any) -> None:
    with pytest.raises(YafsdpError, match=r"warmup_steps=5 must .*Write warmup_steps="):
        build(0.1, 5, 5)
    with pytest.raises(YafsdpError, match=r"warmup_steps=-1"):
        build(0.1, -1, 5)
    with pytest.raises(YafsdpError, match=r"must be ints"):
        build(0.1, 0.5, 5)
    with pytest.raises(YafsdpError, match=r"peak=-0\.1 is outside"):
        build(-0.1, 1, 5)
