"""Random pure train steps, for hypothesis: each is a program that prints as its source.

A step is drawn as a list of recipes, an operator's name and a few small numbers each.
A recipe takes its operands from the values that exist when its turn comes, and is left
out where none fits; so any part of the list is a step too, and failures shrink well.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._hypothesis import strategies as st
from ._steps_losses import LOSSES, NORM, OPTIMISERS, UPDATES
from ._steps_operators import OPERATORS as ON_NUMBERS
from ._steps_shapes import OPERATORS as ON_SHAPES
from ._steps_writer import NAMES, Recipe, SkipError, Table, Writer

OPERATORS: Table = {**ON_NUMBERS, **ON_SHAPES}


@dataclass(frozen=True, repr=False)
class RandomStep:
    """A step with its arguments.

    Attributes:
        source: The program of the step; `RandomStep.from_source` executes it again.
        fn: `step(params, opt_state, batch)`.
        args: Parameters, optimiser state and batch, plain tensors of global shape.
    """

    source: str
    fn: Callable[..., Any]
    args: tuple[Any, Any, Any]

    def __repr__(self) -> str:
        return f"\n{self.source}"

    @classmethod
    def from_source(cls, source: str) -> "RandomStep":
        """Execute a program that defines `step`, `params`, `opt_state` and `batch`.

        So a step that failed, which hypothesis prints as its program, becomes a test
        case. A program may use `torch`, `F`, `math`, `yf`, `grad`, `grad_and_value`
        and `vmap`, and the seeded `rand(*shape, seed=)`, `ints(high, *shape, seed=)`
        and `bools(*shape, seed=)`.

        Example:
            >>> import yafsdp_fn as yf
            >>> case = yf.testing.RandomStep.from_source('''
            ... params, opt_state = {"p": rand(5, 2, seed=0)}, {"count": 0.0}
            ... batch = {"x": rand(6, 5, seed=1)}
            ... def step(params, opt_state, batch):
            ...     return params, opt_state, (batch["x"] @ params["p"]).sum()
            ... ''')
            >>> mesh = yf.make_mesh(fsdp=4, emulate=True)
            >>> yf.testing.assert_agrees(case.fn, *case.args, mesh=mesh).cache_size()
            1
        """
        names = {**NAMES, "__name__": "random_step"}
        exec(compile(source, "<random step>", "exec"), names)
        args = (names["params"], names["opt_state"], names["batch"])
        return cls(source, names["step"], args)


# --- a whole step ---------------------------------------------------------------------


@dataclass
class Draft:
    """What is drawn: sizes, leaves, recipes, and how to go on from the gradients."""

    sizes: tuple[int, int, int]  # rows of the batch, and two more lengths
    leaves: list[tuple[str, tuple[int, ...]]]
    rows: list[tuple[str, tuple[int, ...]]]
    captured: list[tuple[int, ...]]
    recipes: list[Recipe]
    losses: list[Recipe]
    update: str
    optimiser: str


def write_step(draft: Draft) -> RandomStep:
    """The program of a draft."""
    inputs, w = _write_inputs(draft)
    with contextlib.suppress(SkipError):
        w.add("h", "x0 @ p0 * 0.5")
    made = w.follow(draft.recipes, OPERATORS, "v")
    losses = w.follow(draft.losses, LOSSES, "l")
    losses = losses or [_fallback(w)]
    text = "\n".join(w.lines)
    params = [n for n in w.values if n.startswith("p")]
    used = [n for n in params if n in _words(text)]
    penalty = "".join(f" + 0.01 * ({n} * {n}).sum()" for n in used)
    body = [
        *(f"{n} = params['{n}']" for n in params),
        *(f"{n} = batch['{n}']" for n in w.values if n[0] in "xym"),
        *w.lines,
        f"return {' + '.join(losses)}{penalty}, {_metrics([*made, *losses])}",
    ]
    source = "\n".join([*inputs, "def step(params, opt_state, batch):"])
    source += "\n    def loss_fn(params):\n        " + "\n        ".join(body)
    return RandomStep.from_source(source + "\n" + _rest(draft))


def _fallback(w: Writer) -> str:
    w.add("l", "(p0 * p0).mean() + x0.sin().mean() + 2")
    return "l"


def _words(text: str) -> set[str]:
    return set("".join(c if c.isalnum() else " " for c in text).split())


def _metrics(names: list[str]) -> str:
    return "{" + ", ".join(f"'{n}': {n}" for n in names) + "}"


def _write_inputs(draft: Draft) -> tuple[list[str], Writer]:
    """Lines that make the arguments, and a writer that knows their values."""
    w, numbers = Writer(), itertools.count()
    groups: dict[str, list[str]] = {"params": [], "batch": []}
    lines = []
    kinds = [("params", f"p{n}", *leaf) for n, leaf in enumerate(draft.leaves)]
    kinds += [("batch", f"{k[0]}{n}", k, s) for n, (k, s) in enumerate(draft.rows)]
    for group, name, kind, dims in kinds:
        text = _leaf(kind, _lengths(draft, dims), next(numbers), draft.sizes)
        groups[group].append(f"'{name}': {text}")
        w.values[name] = eval(text, NAMES)
    for n, dims in enumerate(draft.captured):
        text = _leaf("x", _lengths(draft, dims), next(numbers), draft.sizes)
        lines.append(f"c{n} = {text}")
        w.values[f"c{n}"] = eval(text, NAMES)
    w.values = {n: v for n, v in w.values.items() if v.numel()}
    lines += [f"{g} = {{{', '.join(items)}}}" for g, items in groups.items()]
    return [*lines, *_state(draft)], w


def _lengths(draft: Draft, dims: Sequence[int]) -> list[int]:
    """Dimensions 0, 1 and 2 stand for the sizes; 3 and 4 for lengths one and none."""
    table = [*draft.sizes, 1, 0]
    return [table[d] for d in dims]


def _leaf(kind: str, shape: list[int], seed: int, sizes: Sequence[int]) -> str:
    s = ", ".join(map(str, [*shape, f"seed={seed}"]))
    if kind == "y":
        return f"ints({min(sizes)}, {s})"
    if kind == "m":
        return f"bools({s})"
    if kind == "transposed" and len(shape) > 1:
        return f"rand({s}).mT.contiguous().mT"
    return f"rand({s})"


def _state(draft: Draft) -> list[str]:
    state = "'mean': torch.zeros((), dtype=torch.float64), 'count': torch.tensor(0)"
    state += ", 'seen': torch.zeros(3, dtype=torch.bool), 'rate': 0.1"
    lines = []
    if draft.update == "optimiser":
        lines.append(f"optimiser = {draft.optimiser}")
        state += ", 'inner': optimiser.init(params)"
    return [*lines, f"opt_state = {{{state}}}"]


def _rest(draft: Draft) -> str:
    """From the loss to the results."""
    lines = [
        "g, (loss, metrics) = grad_and_value(loss_fn, has_aux=True)(params)",
        f"norm = {NORM}",
        "state = dict(opt_state)",
        "state['mean'] = state['mean'] * 0.9 + loss * 0.1",
        "state['count'] = state['count'] + 1",
        "state['seen'] = state['seen'] | (loss > 0)",
        "state['rate'] = state['rate'] * 0.9",
    ]
    if draft.update == "optimiser":
        lines += [
            "updates, state['inner'] = optimiser.update(g, state['inner'], params)",
            "new = yf.optim.apply_updates(params, updates)",
        ]
    else:
        lines.append(f"new = {UPDATES[draft.update]}")
    lines.append("return new, state, {**metrics, 'loss': loss, 'norm': norm}")
    return "\n".join(f"    {line}" for line in lines) + "\n"


# --- strategies -----------------------------------------------------------------------


def _joined(lists: Sequence[list[Recipe]]) -> list[Recipe]:
    """Several lists in one: hypothesis seldom draws a long one."""
    return [recipe for part in lists for recipe in part]


def _recipes(table: Any, least: int, most: int) -> st.SearchStrategy[list[Recipe]]:
    numbers = st.tuples(*[st.integers(0, 30)] * 6)
    return st.lists(
        st.tuples(st.sampled_from(list(table)), numbers), min_size=least, max_size=most
    )


_DIMS = st.lists(st.sampled_from([1, 2, 0, 3]), max_size=3).map(tuple)
_LEAVES = st.tuples(
    st.sampled_from(["param", "param", "transposed"]),
    st.sampled_from([(1, 2), (1,), (2, 1), (), (0, 1), (3, 2), (2, 0, 1), (4, 1)]),
)
_ROWS = st.tuples(
    st.sampled_from(["x", "x", "y", "m"]),
    st.sampled_from([(0, 1), (0,), (0, 2), (0, 2, 1), (0, 3)]),
)
_LENGTHS = st.tuples(
    st.sampled_from([8, 5, 3, 1, 4, 10, 6, 2]),
    st.sampled_from([4, 5, 3, 6, 2, 1, 7]),
    st.sampled_from([3, 4, 6, 2, 5, 8]),
)


@functools.cache
def steps(most: int = 12) -> st.SearchStrategy[RandomStep]:
    """Whole train steps `step(params, opt_state, batch)`, with their arguments.

    Batches and parameters that divide by no number of ranks, empty and transposed
    leaves, views, joins, lookups, masks and constants in all orders, losses that are no
    plain means, and updates that mix elements or come from `yf.optim`. All in float64,
    and well conditioned: two ways of summing agree to 1e-9.

    Args:
        most: About a third of the largest number of operators before the losses.

    Example:
        >>> from hypothesis import given, settings
        >>> import yafsdp_fn as yf
        >>> @settings(max_examples=3, database=None, deadline=None)
        ... @given(step=yf.testing.steps(), mesh=yf.testing.meshes())
        ... def test(step, mesh):
        ...     yf.testing.assert_agrees(step.fn, *step.args, mesh=mesh, steps=1)
        >>> test()
    """
    drafts = st.builds(
        Draft,
        sizes=_LENGTHS,
        leaves=st.lists(_LEAVES, min_size=1, max_size=4).map(
            lambda drawn: [("param", (1, 2)), *drawn]
        ),
        rows=st.lists(_ROWS, max_size=3).map(lambda drawn: [("x", (0, 1)), *drawn]),
        captured=st.lists(_DIMS, max_size=1),
        recipes=st.tuples(*[_recipes(OPERATORS, 0, most)] * 3).map(_joined),
        losses=_recipes(LOSSES, 1, 3),
        update=st.sampled_from([*UPDATES, *["optimiser"] * 4]),
        optimiser=st.sampled_from(OPTIMISERS),
    )
    return drafts.map(write_step)
