"""A step becomes a graph at global shapes, or an error on the user's own line."""

import collections
import contextlib
import inspect
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import assert_same, mesh_of
from torch.distributed.tensor import Replicate, Shard
from torch.func import grad, grad_and_value, vmap

import yafsdp_fn as yf

Step = Callable[..., Any]
Tree = Any

PARAMS = {"w": torch.arange(20.0).view(5, 4) / 10, "b": torch.tensor([0.5, -1.0])}
BATCH = torch.arange(24.0).view(6, 4) / 24


def marked_line(fn: Step) -> str:
    """`file:line` of the line that is marked in the source of `fn`."""
    lines, first = inspect.getsourcelines(fn)
    (offset,) = [n for n, line in enumerate(lines) if "# <-" in line]
    return f"{inspect.getsourcefile(fn)}:{first + offset}"


def refusal(step: Step, error: type[Exception] = yf.TraceError) -> str:
    """The message of the error that tracing the step ends in."""
    with pytest.raises(error) as caught:
        yf.shard(step, mesh=mesh_of(2)).trace(PARAMS, BATCH)
    return str(caught.value)


# --- values that are read -------------------------------------------------------------


def reads_item(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"] * batch.sum().item()  # <-


def reads_if(params: Tree, batch: torch.Tensor) -> Any:
    loss = batch.mean()
    if loss > 0:  # <-
        return params
    return {"w": params["w"] * 2, "b": params["b"]}


def reads_while(params: Tree, batch: torch.Tensor) -> Any:
    norm = params["w"].norm()
    while norm > 1:  # <-
        norm = norm / 2
    return params["w"] * norm


def reads_float(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"] * math.sqrt(float(batch.sum()))  # <-


def reads_int(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"][: int(batch.sum())]  # <-


def reads_tolist(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"] * batch.tolist()[0][0]  # <-


def reads_numpy(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"] * float(batch.numpy().sum())  # <-


def reads_index(params: Tree, batch: torch.Tensor) -> Any:
    layers = [params["w"], params["w"] * 2]
    return layers[batch.sum().long()]  # <-


def reads_format(params: Tree, batch: torch.Tensor) -> Any:
    message = f"{batch.mean():.3f}"  # <-
    return params["w"] * len(message)


def reads_shape(params: Tree, batch: torch.Tensor) -> Any:
    return torch.zeros(batch.sum().int()) + params["w"].sum()  # <-


def reads_math(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"] * math.log(batch.sum())  # <-


def reads_assert(params: Tree, batch: torch.Tensor) -> Any:
    assert torch.isfinite(batch).all()  # <-
    return params["w"] * 2


def reads_allclose(params: Tree, batch: torch.Tensor) -> Any:
    if torch.equal(batch, batch * 1):  # <-
        return params["w"]
    return params["w"] * 2


def reads_under_grad(params: Tree, batch: torch.Tensor) -> Any:
    def loss_fn(p: Tree) -> torch.Tensor:
        scale = (batch @ p["w"].T).square().mean()
        return scale / scale.detach().item()  # <-

    return grad(loss_fn)(params)


def reads_under_two_grads(params: Tree, batch: torch.Tensor) -> Any:
    def inner(p: Tree) -> torch.Tensor:
        loss = (batch @ p["w"].T).square().mean()
        return loss if loss > 1 else 2 * loss  # <-

    def outer(p: Tree) -> torch.Tensor:
        return grad(inner)(p)["w"].square().sum()

    return grad_and_value(outer)(params)


READS = [value for name, value in list(globals().items()) if name.startswith("reads_")]


@pytest.mark.parametrize("step", READS)
def test_a_value_that_is_read_is_an_error_on_its_line(step: Step) -> None:
    message = refusal(step)
    assert message.startswith(f"{marked_line(step)}: the step reads the value of a")
    assert "torch.where" in message


def read_in_a_helper(x: torch.Tensor) -> float:
    return x.sum().item()  # <-


def test_the_line_is_the_innermost_of_the_users() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return params["w"] * read_in_a_helper(batch)

    def per_sample(params: Tree, batch: torch.Tensor) -> Any:
        def loss_fn(w: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
            return (w @ row).sum() * read_in_a_helper(batch)

        return vmap(grad(loss_fn), in_dims=(None, 0))(params["w"], batch)

    for fn in (step, per_sample):
        assert refusal(fn).startswith(f"{marked_line(read_in_a_helper)}: ")


# --- shapes that depend on values -----------------------------------------------------


def masks_rows(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"] * batch[batch > 0.5].mean()  # <-


def masks_by_select(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"] * torch.masked_select(batch, batch > 0.5).sum()  # <-


def finds_nonzero(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"] * batch.nonzero().sum()  # <-


def finds_unique(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"] * batch.unique().sum()  # <-


def masks_under_grad(params: Tree, batch: torch.Tensor) -> Any:
    def loss_fn(p: Tree) -> torch.Tensor:
        rows = batch @ p["w"].T
        return rows[batch[:, 0] > 0.5].mean()  # <-

    return grad(loss_fn)(params)


@pytest.mark.parametrize(
    "step",
    [masks_rows, masks_by_select, finds_nonzero, finds_unique, masks_under_grad],
)
def test_a_shape_that_depends_on_values_is_an_error(step: Step) -> None:
    message = refusal(step)
    assert message.startswith(f"{marked_line(step)}: the shape of the result")
    assert "torch.where(mask, x, 0)" in message


# --- random numbers -------------------------------------------------------------------


def draws_normal(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"] + torch.randn(5, 4)  # <-


def draws_like(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"] + torch.rand_like(params["w"])  # <-


def draws_integers(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"] + torch.randint(0, 5, (5, 4))  # <-


def draws_permutation(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"][torch.randperm(5)]  # <-


def draws_bernoulli(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"] * torch.bernoulli(torch.full((5, 4), 0.5))  # <-


def draws_choices(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"][torch.multinomial(batch.abs(), 2)[0]]  # <-


def draws_in_place(params: Tree, batch: torch.Tensor) -> Any:
    noise = torch.empty(5, 4)
    noise.normal_()  # <-
    return params["w"] + noise


def drops(params: Tree, batch: torch.Tensor) -> Any:
    return params["w"] * F.dropout(batch, 0.5).sum()  # <-


def drops_under_grad(params: Tree, batch: torch.Tensor) -> Any:
    def loss_fn(p: Tree) -> torch.Tensor:
        hidden = batch @ p["w"].T
        return F.dropout(hidden, 0.1, training=True).sum()  # <-

    return grad(loss_fn)(params)


def drops_attention(params: Tree, batch: torch.Tensor) -> Any:
    heads = batch.view(1, 1, 6, 4)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)  # <-
    return params["w"] * mixed.sum()


DRAWS = [
    value
    for name, value in list(globals().items())
    if name.startswith(("draws_", "drops"))
]


@pytest.mark.parametrize("step", DRAWS)
def test_an_impure_random_operator_is_an_error_on_its_line(step: Step) -> None:
    state = torch.get_rng_state()
    message = refusal(step)
    assert message.startswith(f"{marked_line(step)}: ")
    assert "draws random numbers from a global generator" in message
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_that_is_off_draws_nothing() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        heads = batch.view(1, 1, 6, 4)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.0)
        still = F.dropout(mixed, 0.5, training=False) + F.dropout(mixed, 0.0)
        return params["w"] * still.sum()

    found = yf.shard(step, mesh=mesh_of(2))(PARAMS, BATCH)
    assert_same(found, step(PARAMS, BATCH))


# --- edits ----------------------------------------------------------------------------


def edits_by_operator(params: Tree, batch: torch.Tensor) -> Any:
    x = params["w"]
    x += 1  # <-
    return params


def edits_by_method(params: Tree, batch: torch.Tensor) -> Any:
    params["w"].mul_(0.5)  # <-
    return params


def edits_an_element(params: Tree, batch: torch.Tensor) -> Any:
    params["w"][0] = 1.0  # <-
    return params


def edits_a_slice(params: Tree, batch: torch.Tensor) -> Any:
    rows = params["w"][1:3]
    rows.add_(1)  # <-
    return params


def edits_a_view(params: Tree, batch: torch.Tensor) -> Any:
    params["w"].t()[::2].unsqueeze(0).zero_()  # <-
    return params


def edits_a_closure(params: Tree, batch: torch.Tensor) -> Any:
    def loss_fn(p: Tree) -> torch.Tensor:
        params["w"].add_(1)  # <-
        return (batch @ p["w"].T).sum()

    return grad(loss_fn)(params)


def edits_by_out(params: Tree, batch: torch.Tensor) -> Any:
    torch.add(params["w"], 1, out=params["w"])  # <-
    return params


def edits_in_a_list(params: Tree, batch: torch.Tensor) -> Any:
    torch._foreach_add_([params["w"]], [params["w"] * 2])  # <-
    return params


def edits_under_no_grad(params: Tree, batch: torch.Tensor) -> Any:
    grads = grad(lambda p: (batch @ p["w"].T).sum())(params)
    with torch.no_grad():
        params["w"].sub_(0.1 * grads["w"])  # <-
    return params


EDITS = [value for name, value in list(globals().items()) if name.startswith("edits_")]


@pytest.mark.parametrize("step", EDITS)
def test_an_edited_argument_is_an_error_on_its_line(step: Step) -> None:
    before = PARAMS["w"].clone()
    message = refusal(step)
    assert message.startswith(f"{marked_line(step)}: the step edits params['w'] in ")
    assert "x = x + y" in message
    assert torch.equal(PARAMS["w"], before)


def test_an_edited_batch_is_named_by_its_path() -> None:
    def step(params: Tree, batch: Tree) -> Any:
        batch["x"].clamp_(min=0)  # <-
        return params["w"] * batch["x"].sum()

    with pytest.raises(yf.TraceError) as caught:
        yf.shard(step, mesh=mesh_of(2)).trace(PARAMS, {"x": BATCH})
    assert str(caught.value).startswith(
        f"{marked_line(step)}: the step edits batch['x']"
    )


def test_an_edited_captured_tensor_is_an_error_on_its_line() -> None:
    counter = torch.zeros(3)

    def counts(params: Tree, batch: torch.Tensor) -> Any:
        counter.add_(1)  # <-
        return params["w"] * counter.sum()

    def counts_under_grad(params: Tree, batch: torch.Tensor) -> Any:
        def loss_fn(p: Tree) -> torch.Tensor:
            counter.add_(1)  # <-
            return (batch @ p["w"].T).sum() * counter.sum()

        return grad(loss_fn)(params)

    for step in (counts, counts_under_grad):
        message = refusal(step)
        assert message.startswith(f"{marked_line(step)}: the step edits a captured")
    assert torch.equal(counter, torch.zeros(3))


def test_edits_of_what_the_step_made_are_its_own_business() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        total = params["w"].clone()
        total[1:3] += batch[:2]
        total.mul_(2)
        table = torch.zeros(6)
        table[2:4] = batch[:, 0].sum()
        return {"total": total, "table": table}

    found = yf.shard(step, mesh=mesh_of(3))(PARAMS, BATCH)
    assert_same(found, step(PARAMS, BATCH))


# --- what must trace ------------------------------------------------------------------


def test_one_hot_traces_and_has_torchs_result() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        classes = F.one_hot((batch[:, 0] * 5).long(), 5)
        return {"classes": classes, "picked": classes.to(torch.float32) @ params["w"]}

    found = yf.shard(step, mesh=mesh_of(4))(PARAMS, BATCH)
    assert_same(found, step(PARAMS, BATCH))


def test_one_hot_without_classes_reads_a_value() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return params["w"] * F.one_hot(batch.long()).sum()  # <-

    message = refusal(step)
    assert message.startswith(f"{marked_line(step)}: ")
    assert "one_hot(index, num_classes)" in message


def test_code_that_asks_for_compilation_hears_yes_only_while_traced() -> None:
    asked = []

    def step(params: Tree, batch: torch.Tensor) -> Any:
        asked.append(torch.compiler.is_compiling())
        # What Hugging Face models do: skip a check of values under compilation.
        if not torch.compiler.is_compiling() and bool((batch < 0).any()):
            raise ValueError
        return params["w"] * batch.sum()

    yf.shard(step, mesh=mesh_of(2)).trace(PARAMS, BATCH)
    assert asked == [True]
    assert not torch.compiler.is_compiling()


def test_a_step_that_fails_leaves_torch_as_it_was() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        raise KeyError("the user's own")

    assert "the user's own" in refusal(step, KeyError)
    assert not torch.compiler.is_compiling()
    sharded = yf.shard(lambda params, batch: params["w"] * 2, mesh=mesh_of(2))
    assert_same(sharded(PARAMS, BATCH), PARAMS["w"] * 2)


# --- shapes ---------------------------------------------------------------------------


def test_a_step_sees_global_shapes_and_ndim() -> None:
    seen = []

    def step(params: Tree, batch: torch.Tensor) -> Any:
        seen.append((params["w"].shape, params["b"].ndim, batch.shape[0], len(batch)))
        return params["w"] * batch.shape[0]

    sharded = yf.shard(step)
    placed = yf.distribute(PARAMS, mesh_of(4))
    assert_same(sharded(placed, BATCH), PARAMS["w"] * 6)
    assert seen == [((5, 4), 1, 6, 6)]


def test_a_parameter_of_a_terabyte_is_traced_and_planned_in_no_memory() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        def loss_fn(p: Tree) -> torch.Tensor:
            return (batch @ p["w"]).square().mean()

        grads, loss = grad_and_value(loss_fn)(params)
        return {"w": params["w"] - 0.1 * grads["w"]}, loss

    rows, columns = 2**19, 2**19
    weight = torch.ones(1).expand(rows, columns)  # one number in memory
    batch = torch.ones(1).expand(8, rows)
    lowered = yf.shard(step, mesh=mesh_of(8)).lower({"w": weight}, batch)

    yf.check(lowered.plan)
    assert lowered.cost_analysis()["gathered_bytes"] >= 2**40
    assert lowered.memory_analysis()["shard_bytes"] >= 2**37


def test_the_text_of_a_graph_has_paths_shapes_and_lines() -> None:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return batch @ params["w"].T  # <-

    text = yf.shard(step, mesh=mesh_of(2)).trace(PARAMS, BATCH).as_text()
    assert "f32[5,4] = params['w']" in text
    assert "f32[6,4] = batch" in text
    (product,) = [line for line in text.splitlines() if "aten.mm" in line]
    assert "f32[6,5]" in product
    assert product.endswith(marked_line(step))


# --- captured values are never stale --------------------------------------------------

RATE = 2.0
TABLE = torch.ones(4)
SETTINGS = types.SimpleNamespace(rate=2.0)


def test_a_captured_tensor_is_read_at_every_call_without_a_new_trace() -> None:
    scale = torch.tensor([2.0])

    @yf.shard(mesh=mesh_of(2))
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return params["w"] * scale * batch.sum()

    def check() -> None:
        assert_same(step(PARAMS, BATCH), step.__wrapped__(PARAMS, BATCH))

    check()
    scale.fill_(3.0)  # edited between calls
    check()
    scale = torch.tensor([5.0])  # rebound between calls
    check()
    assert (step.trace_count(), step.cache_size()) == (1, 1)
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])  # another shape
    check()
    assert step.trace_count() == 2


def test_a_captured_dtensor_is_read_at_every_call() -> None:
    mesh = mesh_of(2)
    held = yf.distribute({"scale": torch.full((4,), 2.0)}, mesh)

    @yf.shard
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return params["w"] * held["scale"]

    assert_same(step(PARAMS, BATCH), PARAMS["w"] * 2)
    held["scale"] = yf.distribute(torch.full((4,), 3.0), mesh)
    assert_same(step(PARAMS, BATCH), PARAMS["w"] * 3)
    assert step.trace_count() == 1


def test_captured_numbers_and_objects_are_traced_again_when_they_change() -> None:
    rate, config = 2.0, types.SimpleNamespace(rate=3.0)
    options, layers = {"rate": 4.0}, [5.0]

    @yf.shard(mesh=mesh_of(2))
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return params["w"] * rate * config.rate * options["rate"] * layers[0]

    def check(traces: int) -> None:
        assert_same(step(PARAMS, BATCH), step.__wrapped__(PARAMS, BATCH))
        assert step.trace_count() == traces

    check(1)
    check(1)
    rate = 7.0
    check(2)
    config.rate = 11.0
    check(3)
    options["rate"] = 13.0
    check(4)
    layers[0] = 17.0
    check(5)
    rate = 2.0  # another combination again
    check(6)


def test_globals_are_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    @yf.shard(mesh=mesh_of(2))
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return params["w"] * RATE * TABLE * SETTINGS.rate

    def check(traces: int) -> None:
        assert_same(step(PARAMS, BATCH), step.__wrapped__(PARAMS, BATCH))
        assert step.trace_count() == traces

    check(1)
    monkeypatch.setitem(globals(), "RATE", 3.0)
    check(2)
    monkeypatch.setitem(globals(), "TABLE", torch.full((4,), 5.0))
    check(2)
    monkeypatch.setattr(SETTINGS, "rate", 7.0)
    check(3)


class Model:
    """A callable object that holds what it computes with."""

    def __init__(self) -> None:
        self.weight = torch.ones(4)
        self.scale = 2.0

    def __call__(self, params: Tree, batch: torch.Tensor) -> Any:
        return params["w"] * self.weight * self.scale

    def method(self, params: Tree, batch: torch.Tensor) -> Any:
        return self(params, batch)


@pytest.mark.parametrize("choose", [lambda m: m, lambda m: m.method])
def test_attributes_of_an_object_are_captured(choose: Callable[[Model], Step]) -> None:
    model = Model()
    step = yf.shard(choose(model), mesh=mesh_of(2))
    for weight, scale, traces in ((1.0, 2.0, 1), (3.0, 2.0, 1), (3.0, 5.0, 2)):
        model.weight, model.scale = torch.full((4,), weight), scale
        assert_same(step(PARAMS, BATCH), PARAMS["w"] * weight * scale)
        assert step.trace_count() == traces


def test_what_a_called_function_captures_is_captured() -> None:
    scale, offset = torch.ones(4), 1.0

    def inner(x: torch.Tensor, shift: float = 0.5) -> torch.Tensor:
        return x * scale + offset + shift

    def loss_fn(p: Tree, batch: torch.Tensor) -> torch.Tensor:
        return inner(batch @ p["w"].T[:4, :4]).square().mean()

    @yf.shard(mesh=mesh_of(2))
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return grad(loss_fn)(params, batch)["w"]

    def check(traces: int) -> None:
        assert_same(step(PARAMS, BATCH), step.__wrapped__(PARAMS, BATCH))
        assert step.trace_count() == traces

    check(1)
    scale.mul_(2)
    check(1)
    offset = 3.0
    check(2)
    inner.__defaults__ = (0.25,)
    check(3)


def test_a_module_that_is_captured_is_read_at_every_call() -> None:
    linear = torch.nn.Linear(4, 3)

    @yf.shard(mesh=mesh_of(2))
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return linear(batch) * params["w"].sum()

    def check(traces: int) -> None:
        with torch.no_grad():
            assert_same(step(PARAMS, BATCH), step.__wrapped__(PARAMS, BATCH))
        assert step.trace_count() == traces

    check(1)
    with torch.no_grad():
        linear.weight.mul_(2)
    check(1)
    linear.bias = None
    check(2)


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Constants:
    """A class that is used as a table of settings."""

    rate = 2.0
    table: tuple[float, ...] = (1.0,)


class Layered:
    """Calls methods of its own, which read globals."""

    def step(self, params: Tree, batch: torch.Tensor) -> Any:
        return params["w"] * self.factor()

    def factor(self) -> float:
        return RATE

    @property
    def doubled(self) -> float:
        return 2 * RATE

    def by_property(self, params: Tree, batch: torch.Tensor) -> Any:
        return params["w"] * self.doubled


def never_stale(step: Step, *changes: Callable[[], None]) -> None:
    """The sharded step has the plain result before and after every change."""
    sharded = yf.shard(step, mesh=mesh_of(2))
    for change in (lambda: None, *changes):
        change()
        for _ in range(2):
            assert_same(sharded(PARAMS, BATCH), step(PARAMS, BATCH))


def test_nothing_is_traced_again_without_a_change() -> None:
    held = [Slotted(float(n)) for n in range(20)]  # many objects, short-lived views

    def step(params: Tree, batch: torch.Tensor) -> Any:
        return params["w"] * sum(item.scale for item in held)

    sharded = yf.shard(step, mesh=mesh_of(2))
    for _ in range(20):
        sharded(PARAMS, BATCH)
    assert sharded.trace_count() == 1
    for item in held:
        item.scale += 1
        assert_same(sharded(PARAMS, BATCH), step(PARAMS, BATCH))


def test_a_stale_value_is_found() -> None:
    values = iter(range(100))
    with pytest.raises(AssertionError):  # what an iterator yields cannot be captured
        never_stale(lambda params, batch: params["w"] * next(values))


def test_slots_are_captured() -> None:
    held = Slotted(2.0)
    never_stale(
        lambda params, batch: params["w"] * held.scale,
        lambda: setattr(held, "scale", 3.0),
    )


def test_attributes_of_a_class_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    never_stale(
        lambda params, batch: params["w"] * Constants.rate + Constants.table[0],
        lambda: monkeypatch.setattr(Constants, "rate", 3.0),
        lambda: monkeypatch.setattr(Constants, "table", (5.0,)),
    )


@pytest.mark.parametrize("step", [Layered().step, Layered().by_property])
def test_what_methods_read_is_captured(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_stale(step, lambda: monkeypatch.setitem(globals(), "RATE", 3.0))


def test_attributes_of_modules_inside_modules_are_captured() -> None:
    package = types.ModuleType("users_package")
    package.inner = types.ModuleType("users_package.inner")  # type: ignore[attr-defined]
    package.inner.rate = 2.0
    step = eval(  # a function whose globals hold the package
        "lambda params, batch: params['w'] * package.inner.rate",
        {"package": package, "__name__": __name__},
    )
    never_stale(step, lambda: setattr(package.inner, "rate", 3.0))


def test_the_structure_of_captured_values_is_captured() -> None:
    groups: Any = [[1.0], [2.0, 3.0]]

    def step(params: Tree, batch: torch.Tensor) -> Any:
        return params["w"] * sum(groups[0]) + len(groups[1])

    def regroup(value: Any) -> None:
        groups[:] = value

    never_stale(
        step,
        lambda: regroup([[1.0, 2.0], [3.0]]),
        lambda: regroup([(1.0,), (2.0, 3.0)]),
        lambda: regroup([{1.0: 2.0}, {3.0: 3.0}]),
        lambda: regroup([[], [1.0, 2.0, 3.0]]),
    )


def test_captured_containers_of_the_standard_library_are_captured() -> None:
    queue, table = collections.deque([2.0]), collections.OrderedDict(rate=3.0)
    names = {"double"}

    def step(params: Tree, batch: torch.Tensor) -> Any:
        scale = 2.0 if "double" in names else 1.0
        return params["w"] * queue[0] * table["rate"] * scale

    never_stale(
        step,
        lambda: queue.appendleft(5.0),
        lambda: table.update(rate=7.0),
        lambda: names.clear(),
    )


def test_a_captured_array_is_never_stale_or_refused() -> None:
    array = np.full(4, 2.0, dtype=np.float32)

    def step(params: Tree, batch: torch.Tensor) -> Any:
        return params["w"] * float(array[0])

    with contextlib.suppress(yf.YafsdpError):
        never_stale(step, lambda: array.fill(3.0))


def test_a_captured_tensor_may_change_its_placement() -> None:
    mesh = mesh_of(2)
    scale = torch.arange(20.0).view(5, 4)
    held: Any = scale

    def step(params: Tree, batch: torch.Tensor) -> Any:
        return params["w"] * held

    sharded = yf.shard(step, mesh=mesh)
    for placements in (None, (Shard(0),), (Shard(1),), (Replicate(),), None):
        held = yf.distribute(scale, mesh, placements) if placements else scale
        assert_same(sharded(PARAMS, BATCH), PARAMS["w"] * scale)


def test_a_tensor_made_of_numbers_is_a_constant() -> None:
    @yf.shard(mesh=mesh_of(2))
    def step(params: Tree, batch: torch.Tensor) -> Any:
        return params["w"] * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.tensor(0.5)

    for _ in range(2):
        assert_same(step(PARAMS, BATCH), step.__wrapped__(PARAMS, BATCH))
    assert step.trace_count() == 1
