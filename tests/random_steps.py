"""Random pure train steps, for hypothesis: each is a program that prints as its source.

A step is drawn as a list of recipes, an operator's name and a few small numbers each.
A recipe takes its operands from the values that exist when its turn comes, and is left
out where none fits; so any part of the list is a step too, and failures shrink well.
While it is written a step is executed line by line, which keeps it well conditioned:
values are bounded, what is compared or sorted is kept apart, and nothing is divided by
almost zero.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

import yafsdp_fn as yf

Recipe = tuple[str, tuple[int, ...]]

# --- inputs ---------------------------------------------------------------------------


def rand(*shape: int, seed: int) -> Tensor:
    """Normal numbers, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def ints(high: int, *shape: int, seed: int) -> Tensor:
    """Integers below `high`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=generator)


def bools(*shape: int, seed: int) -> Tensor:
    """Truth values; the first is true."""
    mask = ints(2, *shape, seed=seed).bool()
    return mask | (torch.arange(mask.numel()).view(mask.shape) == 0)


_NAMES: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "math": math,
    "yf": yf,
    "rand": rand,
    "ints": ints,
    "bools": bools,
    "grad": grad,
    "grad_and_value": grad_and_value,
    "vmap": vmap,
}


@dataclass(frozen=True, repr=False)
class RandomStep:
    """A step with its arguments.

    Attributes:
        source: The program of the step; executed on its own it defines everything.
        fn: `step(params, opt_state, batch)`.
        args: Parameters, optimiser state and batch, plain tensors of global shape.
    """

    source: str
    fn: Callable[..., Any]
    args: tuple[Any, Any, Any]

    def __repr__(self) -> str:
        return f"\n{self.source}"


def from_source(source: str) -> RandomStep:
    """Execute a program that defines `step`, `params`, `opt_state` and `batch`."""
    names = {**_NAMES, "__name__": "random_step"}
    exec(compile(source, "<random step>", "exec"), names)
    return RandomStep(
        source, names["step"], (names["params"], names["opt_state"], names["batch"])
    )


# --- writing a program ----------------------------------------------------------------


class SkipError(Exception):
    """A recipe finds no operands, or its result is not fit for a comparison."""


_LARGEST = 700  # elements of a value
_BOUND = 4.0  # magnitude above which a value is passed through tanh
_APART = 1e-5  # least distance of values that are compared with each other


@dataclass
class Writer:
    """The values of a step so far, and the lines that made them."""

    values: dict[str, Tensor] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    # --- choices ---

    def choose(self, count: int) -> int:
        """The next number of the recipe, below `count`; 0 where the numbers end."""
        return self.numbers.pop(0) % count if self.numbers else 0

    def among(self, options: Sequence[Any]) -> Any:
        if not options:
            raise SkipError
        return options[self.choose(len(options))]

    def pick(self, test: Callable[[Tensor], bool]) -> str:
        """The name of a value that passes a test; the latest one comes first."""
        return self.among([n for n in reversed(self.values) if test(self.values[n])])

    def real(self, test: Callable[[Tensor], bool] = lambda x: True) -> str:
        return self.pick(lambda x: x.dtype == torch.float64 and test(x))

    def array(self, rank: int = 1) -> str:
        """A real value with at least `rank` dimensions."""
        return self.real(lambda x: x.dim() >= rank)

    def indices(self, below: int, test: Callable[[Tensor], bool]) -> str:
        """Integers that index a dimension of length `below`."""
        return self.pick(
            lambda x: (
                x.dtype == torch.int64
                and x.numel() > 0
                and int(x.min()) >= 0
                and int(x.max()) < below
                and test(x)
            )
        )

    def mask(self, shape: torch.Size) -> str:
        """Truth values that can be broadcast to a shape."""
        return self.pick(lambda x: x.dtype == torch.bool and broadcasts(x.shape, shape))

    def dim(self, name: str) -> int:
        """A dimension of a value, counted from either end."""
        rank = self.values[name].dim()
        chosen = self.choose(2 * rank)
        return chosen if chosen < rank else chosen - 2 * rank

    def dims(self, name: str) -> list[int]:
        """Some dimensions of a value, at least one."""
        rank = self.values[name].dim()
        some = [
            list(c)
            for count in range(1, rank + 1)
            for c in itertools.combinations(range(rank), count)
        ]
        return self.among(some)

    # --- conditions ---

    def apart(self, name: str, dims: Sequence[int]) -> None:
        """Require that no two values along `dims` are nearly the same."""
        value = self.values[name]
        front = value.movedim(list(dims), list(range(len(dims))))
        flat, _ = front.flatten(0, len(dims) - 1).sort(0)
        if flat.shape[0] > 1 and flat.diff(dim=0).min() < _APART:
            raise SkipError

    def away(self, name: str, *points: float) -> None:
        """Require that no value is nearly one of the points."""
        if any((self.values[name] - p).abs().min() < _APART for p in points):
            raise SkipError

    # --- lines ---

    def evaluate(self, expression: str) -> Tensor:
        return eval(expression, {**_NAMES, **self.values})

    def add(self, name: str, expression: str) -> None:
        """Write a line, if its value is fit for the rest of the step."""
        try:
            value = self.evaluate(expression)
        except (RuntimeError, IndexError, ValueError):  # its shapes do not fit
            raise SkipError from None
        if value.numel() == 0 or value.numel() > _LARGEST or value.dim() > 4:
            raise SkipError
        if value.dtype == torch.float64:
            largest = value.abs().max().item()
            if not 1e-3 < largest < 1e6:
                raise SkipError
            if largest > _BOUND:
                expression = f"({expression}).tanh()"
        self.values[name] = self.evaluate(expression)
        shape = list(self.values[name].shape)
        self.lines.append(f"{name} = {expression}  # {shape}")

    def follow(self, recipes: Sequence[Recipe], table: Any, prefix: str) -> list[str]:
        """Write a line for every recipe that fits; the names of what they made."""
        names = []
        for number, (kind, numbers) in enumerate(recipes):
            self.numbers = list(numbers)
            name = f"{prefix}{number}"
            try:
                self.add(name, table[kind](self))
            except SkipError:
                continue
            names.append(name)
        return names


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a shape can be broadcast to another one."""
    try:
        return torch.broadcast_shapes(shape, target) == torch.Size(target)
    except RuntimeError:
        return False


def _meets(shape: Sequence[int], other: Sequence[int]) -> bool:
    try:
        return math.prod(torch.broadcast_shapes(shape, other)) <= _LARGEST
    except RuntimeError:
        return False


# --- operators: elementwise -----------------------------------------------------------

OPERATORS: dict[str, Callable[[Writer], str]] = {}


def operator(write: Callable[[Writer], str]) -> Callable[[Writer], str]:
    OPERATORS[write.__name__] = write
    return write


@operator
def smooth(w: Writer) -> str:
    forms = (
        "{x}.tanh()",
        "{x} * 0.7",
        "{x} + 0.3",
        "{x} * {x}",
        "-{x}",
        "(0.3 * {x}).exp()",
        "{x}.sin()",
        "{x}.sigmoid()",
        "F.gelu({x})",
        "F.silu({x})",
        "F.softplus({x})",
        "({x} * {x} + 0.5).sqrt()",
        "1 / ({x} * {x} + 1)",
        "({x} * {x}).log1p()",
        "{x} / 3 - 1",
        "2 - {x}",
        "{x}.clone()",
        "{x}.detach() * 0.5 + {x}",
        "torch.complex({x}, {x} * 0.5 + 1).abs()",
        "torch.view_as_real(torch.complex({x}, {x}.cos()))",
        "torch.zeros_like({x}) + {x}",
        "torch.ones_like({x}) * 0.1 - {x}",
    )
    return w.among(forms).format(x=w.real())


@operator
def kinked(w: Writer) -> str:
    forms = (
        ("{x}.relu()", (0.0,)),
        ("{x}.abs()", (0.0,)),
        ("{x}.clamp(-0.3, 0.4)", (-0.3, 0.4)),
        ("torch.where({x} > 0.1, {x}, {x} * {x})", (0.1,)),
        ("{x}.sign() + {x}", (0.0,)),
        ("F.leaky_relu({x}, 0.2)", (0.0,)),
        ("{x}.masked_fill({x} < 0, 0.5)", (0.0,)),
        ("{x} > 0.2", (0.2,)),
        ("(3 * {x}).floor().long() % 3", tuple(n / 3 for n in range(-12, 13))),
        ("({x} > 0).to(torch.float64)", (0.0,)),
        ("({x} < 0.5).long()", (0.5,)),
    )
    form, points = w.among(forms)
    x = w.real()
    w.away(x, *points)
    return form.format(x=x)


@operator
def binary(w: Writer) -> str:
    x = w.real()
    shape = w.values[x].shape
    y = w.real(lambda t: _meets(t.shape, shape))
    forms = (
        "{x} + {y}",
        "{x} * {y}",
        "{x} - {y}",
        "{x} / ({y} * {y} + 0.5)",
        "torch.lerp({x}, {y}, 0.3)",
        "torch.addcmul({x}, {y}, {x}, value=0.5)",
        "torch.atan2({x}, {y} * {y} + 0.5)",
        "torch.add({x}, {y}, alpha=0.5)",
        "torch.hypot({x} + 5, {y})",
    )
    return w.among(forms).format(x=x, y=y)


@operator
def masked(w: Writer) -> str:
    x = w.real()
    m = w.mask(w.values[x].shape)
    forms = (
        "torch.where({m}, {x}, 0.0)",
        "{x} * {m}",
        "{x}.masked_fill({m}, -0.5)",
        "torch.where({m}, {x}.sin(), {x})",
        "torch.where({m}, {x}, -9.0).softmax({d})",
    )
    return w.among(forms).format(m=m, x=x, d=w.dim(x) if w.values[x].dim() else 0)


@operator
def integral(w: Writer) -> str:
    """Operators on integers and truth values."""
    x = w.pick(lambda t: not t.dtype.is_floating_point and t.dim() > 0)
    d = w.dim(x)
    forms = (
        "{x}.sum()",
        "{x}.sum({d})",
        "{x}.cumsum({d})",
        "{x}.long().amax({d})",
        "{x}.long() * 2 + 1",
        "({x} == 0).any({d})",
        "({x} == 0).all()",
        "{x}.flip({d})",
        "{x}.to(torch.float64)",
        "{x}.float().sum().double()",
        "torch.count_nonzero({x})",
        "~({x} == 0)",
        "{x}.long().reshape(-1)",
    )
    return w.among(forms).format(x=x, d=d)


# --- operators: reductions and scans --------------------------------------------------


@operator
def reduce(w: Writer) -> str:
    x = w.array()
    forms = (
        "{x}.sum({d}, keepdim={k})",
        "{x}.mean({d}, keepdim={k})",
        "{x}.logsumexp({d}, keepdim={k})",
        "{x}.var({d}, correction=0, keepdim={k})",
        "({x} + 3).norm(dim={d}, keepdim={k})",
        "torch.linalg.vector_norm({x} + 9, 3, dim={d}, keepdim={k})",
        "torch.linalg.vector_norm({x} + 9, 1, dim={d}, keepdim={k})",
    )
    form = w.among(forms)
    return form.format(x=x, d=w.dims(x), k=bool(w.choose(2)))


@operator
def extreme(w: Writer) -> str:
    x = w.array()
    d, k = w.dims(x), bool(w.choose(2))
    w.apart(x, d)
    forms = ("{x}.amax({d}, {k})", "{x}.amin({d}, {k})")
    alone = (
        "{x}.max({d}, {k})[0]",
        "{x}.argmax({d}, {k})",
        "{x}.min({d}, {k})[1]",
        "{x}.median({d}, {k})[0]",
        "{x}.kthvalue(1, {d}, {k})[0]",
        "{x}.argsort({d})",
        "{x}.sort({d}, descending={k})[0]",
        "{x}.topk(1, {d})[0]",
        "{x}.topk(({x}.shape[{d}] + 1) // 2, {d}).indices",
        "{x}.cummax({d})[0]",
    )
    form = w.among(forms + alone if len(d) == 1 else forms)
    return form.format(x=x, d=d if form in forms else d[0], k=k)


@operator
def everything(w: Writer) -> str:
    """Reduces a value to a number."""
    x = w.array()
    forms = (
        "{x}.sum()",
        "{x}.mean()",
        "({x} * {x}).mean()",
        "{x}.norm()",
        "{x}.flatten().logsumexp(0)",
        "({x} * 0.1 + 1).prod()",
        "torch.trace({x}.flatten(0, -1)[:, None] * {x}.flatten())",
    )
    return w.among(forms).format(x=x)


@operator
def along(w: Writer) -> str:
    x = w.array()
    forms = (
        "{x}.softmax({d})",
        "{x}.log_softmax({d})",
        "{x}.cumsum({d})",
        "({x} * 0.1 + 1).cumprod({d})",
        "{x}.logcumsumexp({d})",
        "{x}.flip({d})",
        "{x}.roll(1, {d})",
        "F.normalize({x} + 3, dim={d})",
        "{x} - {x}.mean({d}, keepdim=True)",
        "torch.diff({x}, dim={d}, prepend={x}.narrow({d}, 0, 1) * 0.5)",
        "F.glu(torch.cat([{x}, {x} * 0.5], {d}), {d})",
        "torch.stack([{x}, {x}.sin()], {d}).sum({d})",
    )
    return w.among(forms).format(x=x, d=w.dim(x))


# --- operators: products and layers ---------------------------------------------------


@operator
def matmul(w: Writer) -> str:
    x = w.array()
    inner = w.values[x].shape[-1]
    y = w.real(lambda t: t.dim() >= 1 and inner in t.shape[-2:])
    shape = w.values[y].shape
    right = y if len(shape) == 1 or shape[-2] == inner else f"{y}.mT"
    if right == y and len(shape) == 1 and shape[0] != inner:
        raise SkipError
    batch = w.values[x].shape[:-2], shape[:-2]
    if not _meets(*batch):
        raise SkipError
    return f"{x} @ {right} * 0.5"


@operator
def einsum(w: Writer) -> str:
    x = w.real(lambda t: t.dim() == 2)
    columns = w.values[x].shape[1]
    y = w.real(lambda t: t.dim() == 2 and t.shape[1] == columns)
    forms = ("bi,kj->bk", "bi,ki->bk", "bi,ki->bki", "bi,ki->i", "bi,ki->k")
    return f"torch.einsum({w.among(forms)!r}, {x}, {y}) * 0.3"


@operator
def layer(w: Writer) -> str:
    x = w.array(2)
    last = w.values[x].shape[-1]
    g = w.real(lambda t: t.shape == (last,))
    forms = (
        "F.layer_norm({x}, ({n},), {g}, eps=0.1)",
        "F.layer_norm({x}, ({n},), {g}, {g}, eps=0.1)",
        "F.rms_norm({x}, ({n},), {g}, eps=0.1)",
        "F.layer_norm({x}, {x}.shape[1:], eps=0.1) * {g}",
        "F.group_norm({x}[..., None], 1, eps=0.1)[..., 0] + {g}",
        "F.linear({x}, {x}.reshape(-1, {n})[:1], {g}[:1])",
        "F.batch_norm({x}.reshape(-1, {n}), None, None, {g}, {g}, True, eps=0.1)",
        "torch.addmm({g}, {x}.reshape(-1, {n}), torch.eye({n}, dtype=torch.float64))",
    )
    return w.among(forms).format(x=x, n=last, g=g)


@operator
def attention(w: Writer) -> str:
    x = w.array(2)
    forms = (
        "F.scaled_dot_product_attention({x}[None], {x}[None], {x}[None])[0]",
        "F.scaled_dot_product_attention({x}[:, None], {x}[:, None], {x}[:, None])",
        "({x} @ {x}.mT).softmax(-1) @ {x}",
        "F.cosine_similarity({x}[None] + 3, {x}[:, None], -1)",
        "torch.cdist({x} + 3, {x}.detach() - 3)",
        "({x}[:, None] * {x}[None]).sum(-1)",
        "vmap(lambda r: r.tanh() * r.sum())({x})",
        "vmap(grad(lambda r: (r.sin() * r).sum()))({x})",
        "F.conv1d({x}[None].flatten(0, -3), {x}[..., :1].flatten(0, -2)[:1, None]"
        ".expand({x}.shape[-2], {x}.shape[-2], 1))",
        "F.avg_pool1d({x}.flatten(0, -3) if {x}.dim() > 3 else {x}, 1)",
    )
    return w.among(forms).format(x=x)


# --- operators: views -----------------------------------------------------------------


@operator
def reshape(w: Writer) -> str:
    """Merges some neighbours of a value's dimensions and splits others."""
    x = w.array()
    left = w.values[x].numel()
    shape = []
    while left > 1 and len(shape) < 3:
        length = w.among([n for n in range(1, left + 1) if left % n == 0])
        shape.append(length)
        left //= length
    return f"{x}.reshape({', '.join(map(str, [*shape, left]))})"


@operator
def view(w: Writer) -> str:
    x = w.array()
    rank = w.values[x].dim()
    forms = (
        "{x}.permute({p})",
        "{x}.unsqueeze({d})",
        "{x}.squeeze()",
        "{x}.movedim({d}, 0)",
        "{x}.flatten()",
        "{x}.flatten(0, 1)" if rank > 1 else "{x}.view(-1, 1)",
        "{x}[None].expand(2, *{x}.shape)",
        "{x}.mT" if rank > 1 else "{x}[:, None]",
        "{x}.contiguous()",
    )
    order = w.among(list(itertools.permutations(range(rank))))
    return w.among(forms).format(x=x, p=order, d=w.dim(x))


@operator
def part(w: Writer) -> str:
    x = w.array()
    d = w.dim(x)
    length = w.values[x].shape[d]
    start = w.choose(length)
    forms = (
        "{x}.narrow({d}, {s}, {rest})",
        "{x}.select({d}, {s})",
        "{x}[::2]",
        "{x}[-1]",
        "{x}[..., {neg}:]",
        "{x}.split({some}, {d})[0]",
        "{x}.chunk(2, {d})[-1]",
        "{x}.unbind({d})[{s}]",
        "{x}.tensor_split(3, {d})[0]",
        "{x}.diagonal()" if w.values[x].dim() > 1 else "{x}.diag()",
        "{x}.tril()" if w.values[x].dim() > 1 else "{x}.diag_embed()",
        "{x}.triu(1) + 0.1" if w.values[x].dim() > 1 else "torch.outer({x}, {x})",
    )
    some, neg = start + 1, -w.values[x].shape[-1] // 2
    return w.among(forms).format(
        x=x, d=d, s=start, rest=length - start, some=some, neg=neg
    )


@operator
def join(w: Writer) -> str:
    x = w.array()
    shape = w.values[x].shape
    d = w.dim(x)
    y = w.real(lambda t: t.shape == shape)
    forms = (
        "torch.cat([{x}, {y}], {d})",
        "torch.stack([{x}, {y}], {d})",
        "torch.cat([{x}, {y} * 2, {x}.narrow({d}, 0, 1)], {d})",
        "{x}.repeat_interleave(2, {d})",
        "{x}.repeat(2, {ones})",
        "{x}.tile(2)",
        "F.pad({x}, (1, 2))",
        "F.pad({x}, ({pad}1, 0), value=0.5)",
        "torch.slice_scatter({x}, {y}.narrow({d}, 0, 1), {d}, 0, 1)",
        "torch.select_scatter({x}, {y}.select({d}, 0), {d}, -1)",
    )
    ones = ", ".join("1" for _ in shape)
    return w.among(forms).format(
        x=x, y=y, d=d, ones=ones, pad="0, 0, " * (len(shape) - 1)
    )


# --- operators: lookups ---------------------------------------------------------------


@operator
def lookup(w: Writer) -> str:
    x = w.array()
    d = w.dim(x)
    i = w.indices(w.values[x].shape[0], lambda t: 0 < t.dim() < 3)
    forms = (
        "{x}[{i}]",
        "{x}.index_select(0, {i}.flatten())",
        "F.embedding({i}, {x}.reshape({x}.shape[0], -1))",
        "F.one_hot({i}, {n}).double().flatten(0, -2) @ {x}.reshape({n}, -1)",
        "torch.zeros_like({x}).index_add(0, {i}.flatten(), {x}[{i}.flatten()]) + 0.1",
        "{x}.index_put(({i}.flatten(),), {x}[:1] * 0.5, accumulate=True)",
        "torch.take_along_dim({x}, {i}.flatten().view(-1, {ones}), 0)",
    )
    ones = ", ".join(["1"] * (w.values[x].dim() - 1)) or "1"
    if w.values[x].dim() == 1 and ones:
        ones = ""
    form = w.among(forms)
    return form.format(x=x, d=d, i=i, n=w.values[x].shape[0], ones=ones)


@operator
def gather(w: Writer) -> str:
    x = w.array()
    shape, d = w.values[x].shape, w.dim(x)
    rest = [n for e, n in enumerate(shape) if e != d % len(shape)]
    i = w.indices(
        shape[d],
        lambda t: (
            t.dim() == len(shape)
            and [n for e, n in enumerate(t.shape) if e != d % len(shape)] == rest
        ),
    )
    forms = (
        "{x}.gather({d}, {i})",
        "{x}.scatter_add({d}, {i}, {x}.gather({d}, {i}))",
        "{x}.scatter({d}, {i}[..., :1] * 0, 0.5)",
    )
    return w.among(forms).format(x=x, d=d, i=i)


@operator
def fixed(w: Writer) -> str:
    """A value combined with a constant that the step makes."""
    x = w.array()
    rows, columns = w.values[x].shape[0], w.values[x].shape[-1]
    forms = (
        "{x} + torch.arange({n}) / 4",
        "{x} + torch.arange({n}, dtype=torch.float64).flip(0) / 5",
        "{x} @ torch.ones({n}, {n}, dtype=torch.float64).tril()",
        "{x} @ torch.eye({n}, 3, dtype=torch.float64)",
        "{x} * torch.linspace(0.1, 1, {n}, dtype=torch.float64)",
        "{x} + torch.tensor(0.25)",
        "{x}[torch.arange({r}).flip(0)]",
        "torch.where(torch.arange({n}) % 2 == 0, {x}, {x}.cos())",
        "{x} + torch.full(({n},), 0.2)",
        "torch.arange({r} * {n}).view({r}, {n}) / 30 + {x}.mean()",
        "torch.arange({r})",
        "torch.arange({r}) % 2 == 0",
        "{x} + math.pi / 4",
    )
    return w.among(forms).format(x=x, n=columns, r=rows)


# --- losses ---------------------------------------------------------------------------

LOSSES: dict[str, Callable[[Writer], str]] = {}


def loss(write: Callable[[Writer], str]) -> Callable[[Writer], str]:
    LOSSES[write.__name__] = write
    return write


@loss
def plain(w: Writer) -> str:
    forms = (
        "({x} * {x}).mean()",
        "{x}.sum() * 0.1",
        "{x}.flatten().logsumexp(0)",
        "{x}.mean() * ({x} * {x}).mean()",
        "({x} * {x}).sum() / {x}.numel() + {x}.mean(0).pow(2).sum()",
        "(({x} - {x}.mean(0)) ** 2).mean()",
        "{x}.sigmoid().log().mean()",
        "F.mse_loss({x}, {x}.detach() * 0.5)",
        "F.smooth_l1_loss({x}, torch.full_like({x}, 9.0))",
        "({x} * {x}).mean(0).sqrt().sum()",
        "1 / (({x} * {x}).mean() + 0.5)",
        "{x}.var(0, correction=0).sum()",
    )
    return w.among(forms).format(x=w.array())


@loss
def weighted(w: Writer) -> str:
    x = w.array()
    m = w.mask(w.values[x].shape)
    forms = (
        "({x} * {m}).sum() / {m}.sum().clamp(min=1)",
        "torch.where({m}, {x} * {x}, 0).sum() / ({m}.sum() + 1)",
        "torch.where({m}, {x}, -5).flatten().logsumexp(0)",
    )
    return w.among(forms).format(x=x, m=m)


@loss
def peak(w: Writer) -> str:
    x = w.array()
    w.apart(x, range(w.values[x].dim()))
    return w.among(("{x}.max()", "{x}.amax(0).sum()", "-{x}.amin()")).format(x=x)


@loss
def pairwise(w: Writer) -> str:
    x = w.real(lambda t: t.dim() == 2)
    forms = (
        "F.cross_entropy({x} @ {x}.T, torch.arange(len({x})))",
        "({x} @ {x}.T).tril(-1).pow(2).mean()",
        "({x}[:, None] - {x}[None] + 0.1).pow(2).sum(-1).add(1).sqrt().mean()",
        "(F.normalize({x} + 2, dim=1) @ F.normalize({x} - 2, dim=1).T).exp().mean()",
    )
    return w.among(forms).format(x=x)


@loss
def classes(w: Writer) -> str:
    x = w.real(lambda t: t.dim() == 2 and t.shape[1] > 1)
    rows, columns = w.values[x].shape
    y = w.indices(columns, lambda t: t.shape == (rows,))
    forms = (
        "F.cross_entropy({x}, {y})",
        "F.cross_entropy({x}, {y}, ignore_index=0, reduction='sum')",
        "F.cross_entropy({x}, {y}, label_smoothing=0.1)",
        "F.cross_entropy({x}, {y}, weight=torch.arange({n}).double() + 1)",
        "-({x}.log_softmax(1).gather(1, {y}[:, None])).mean()",
        "F.nll_loss({x}.log_softmax(1), {y})",
        "F.binary_cross_entropy_with_logits({x}, F.one_hot({y}, {n}).double())",
    )
    return w.among(forms).format(x=x, y=y, n=columns)


# --- updates --------------------------------------------------------------------------

UPDATES = {
    "sgd": "{k: p - 0.1 * g[k] for k, p in params.items()}",
    "rate": "{k: p - opt_state['rate'] * g[k] for k, p in params.items()}",
    "normed": "{k: p - 0.1 * g[k] / (g[k].norm() + 0.1) for k, p in params.items()}",
    "rows": "{k: p - 0.1 * g[k] / (g[k].pow(2).mean(-1, True) + 0.1).sqrt()"
    " if p.dim() else p for k, p in params.items()}",
    "centred": "{k: p - 0.1 * (g[k] - g[k].mean(0)) if p.dim() and p.numel() else p"
    " for k, p in params.items()}",
    "by shape": "{k: p - 0.1 * (p.dim() + 1) * g[k] if len(p.shape) == 2 else p * 0.99"
    " for k, p in params.items()}",
    "matrix": "{k: p - 0.1 * (g[k] @ g[k].mT @ g[k]) if p.dim() == 2 else p - g[k] / 9"
    " for k, p in params.items()}",
    "bounded": "{k: (p - 0.1 * g[k]).clamp(-3, 3) for k, p in params.items()}",
    "clipped": "{k: p - 0.1 * g[k] * (1 / (norm + 0.1)).clamp(max=1.0)"
    " for k, p in params.items()}",
}
OPTIMISERS = (
    "yf.optim.sgd(0.1)",
    "yf.optim.sgd(0.1, momentum=0.9)",
    "yf.optim.adamw(0.01, eps=0.1)",
    "yf.optim.adamw(0.01, eps=0.1, weight_decay=0.1, fused=False)",
    "yf.optim.chain(yf.optim.clip_by_global_norm(0.5), yf.optim.sgd(0.1, 0.9, True))",
    "yf.optim.chain(yf.optim.clip_by_global_norm(0.1), yf.optim.adamw(0.01, eps=0.1))",
    "yf.optim.chain(yf.optim.clip_by_global_norm(0.1, 1.0), yf.optim.sgd(0.1))",
)
NORM = "sum((v * v).sum() for v in g.values()).add(1e-3).sqrt()"

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
    return from_source(source + "\n" + _rest(draft))


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
        w.values[name] = eval(text, _NAMES)
    for n, dims in enumerate(draft.captured):
        text = _leaf("x", _lengths(draft, dims), next(numbers), draft.sizes)
        lines.append(f"c{n} = {text}")
        w.values[f"c{n}"] = eval(text, _NAMES)
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
    """Steps of up to `most` operators between the inputs and the loss."""
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
