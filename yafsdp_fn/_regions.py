"""regions: the operators between two transfers, compiled as one.

A run of operators that no transfer interrupts becomes a region: one function that
Inductor, or another backend of `torch.compile`, makes of them. What starts and ends a
transfer stays where it is, so the schedule does not change; layers that do the same
share what is compiled.
"""

import hashlib
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from types import FunctionType
from typing import Any, NamedTuple

import torch

from ._errors import ArgumentError
from ._graph import Ref, filled, map_leaves, results
from ._kernels import updates
from ._layout import Split, Whole
from ._lines import warn
from ._local_ops import LOCAL_OPS, local_attention, local_attention_backward
from ._program import Compute, Extent, Instruction, Local
from ._shapes import in_order, is_view
from ._torch import is_operator, makes_one_tensor, missing_compiler, storage_id

aten = torch.ops.aten
Values = Mapping[int, Local]
Form = tuple[Any, ...]  # of operands: shapes, strides, dtypes; lengths as they are

_LEAST = 2  # operators that are no views
_MOST = 256  # what a backend does with more takes more than its share of time

# --- runs of operators ----------------------------------------------------------------


def regions(
    instructions: Sequence[Instruction],
    values: Values,
    sizes: Sequence[int],
    kept: Collection[Ref],
    backend: str,
) -> list[Instruction]:
    """Join operators that no transfer separates.

    Args:
        instructions: The instructions of a program, without releases.
        values: What is known of their values.
        sizes: Ranks along each mesh axis.
        kept: The values that are wanted after the last instruction.
        backend: The backend of `torch.compile`.

    Returns:
        Instructions that make the same values, as far as they are read or kept; all
        but operators are the same, in the same order.

    Raises:
        ArgumentError: Inductor finds no compiler.
    """
    if backend == "inductor":
        _require_compiler(values)
    joiner, needed = _Joiner(values, backend), set(kept)
    found: list[Sequence[Instruction]] = []
    for run in reversed(_runs(instructions, values, sizes)):
        joined = joiner.join(run.operators, needed) if run.fits else run.operators
        needed.update(ref for each in joined for ref in each.reads)
        found.append(joined)
    return list(itertools.chain.from_iterable(reversed(found)))


def _require_compiler(values: Values) -> None:
    kinds = {value.meta.device.type for value in values.values()}
    missing = next(filter(None, map(missing_compiler, sorted(kinds))), None)
    if missing:
        raise ArgumentError(
            f"Schedule(compile=True) needs {missing}, which torch does not find. "
            "Install it, or leave compile off."
        )


class _Run(NamedTuple):
    """Consecutive instructions, all or none of which may be joined."""

    fits: bool
    operators: Any  # of a run that fits; else any instructions


def _runs(
    instructions: Sequence[Instruction], values: Values, sizes: Sequence[int]
) -> list[_Run]:
    found: list[_Run] = []
    for fits, group in itertools.groupby(instructions, lambda i: _fits(i, values)):
        run = list(group)
        found += _cut(run, values, sizes) if fits else [_Run(False, run)]
    return found


def _cut(
    run: Sequence[Instruction], values: Values, sizes: Sequence[int]
) -> Iterator[_Run]:
    """Operators that a backend can take, without those that have to be left alone."""
    axes = _uneven(run, values, sizes)
    for equal, part in itertools.groupby(run, lambda i: _equal(i, values, axes)):
        rest = list(part)
        for n in range(0, len(rest), _MOST):
            yield _Run(not equal, rest[n : n + _MOST])


# --- which operators ------------------------------------------------------------------


def _fits(instruction: Instruction, values: Values) -> bool:
    """Whether a backend can take an instruction, and makes of it what it should."""
    if not isinstance(instruction, Compute) or not instruction.writes:
        return False
    op, touched = instruction.op, (*instruction.reads, *instruction.writes)
    return (
        (is_operator(op) or op in _LOCAL)
        and op not in _ADD_AT_INDICES
        and not updates(op)
        and _REFUSED.isdisjoint(getattr(op, "tags", ()))
        and not any(values[ref.id].meta.dtype.is_complex for ref in touched)
    )


_REFUSED = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
}
# Functions in the place of operators whose kernels gain from others around them. Not
# oneDNN's product: Inductor takes it with constant weights only.
_LOCAL = {
    local_attention,
    local_attention_backward,
    LOCAL_OPS[aten.amax.default],
    LOCAL_OPS[aten.amin.default],
    LOCAL_OPS[aten.native_layer_norm_backward.default],
    LOCAL_OPS[aten._fused_rms_norm_backward.default],
}
# Inductor lets threads add as they come: other bits in every run, and on every rank.
_ADD_AT_INDICES = {
    aten.embedding_dense_backward.default,
    aten.index_add.default,
    aten.index_put.default,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
}


def _uneven(
    run: Sequence[Instruction], values: Values, sizes: Sequence[int]
) -> set[int]:
    """Mesh axes along which ranks hold parts of different lengths."""
    touched = {ref.id for each in run for ref in (*each.reads, *each.writes)}
    found: set[int] = set()
    for value in (values[number] for number in touched):
        lengths, odd = list(value.meta.shape), set[int]()
        cut = [(a, p) for a, p in enumerate(value.placements) if isinstance(p, Split)]
        for axis, split in cut:
            if split.chunk * sizes[axis] != lengths[split.dim]:
                odd.add(split.dim)
            lengths[split.dim] = split.chunk
        found |= {axis for axis, split in cut if split.dim in odd}
    return found


def _equal(instruction: Instruction, values: Values, axes: Collection[int]) -> bool:
    """Whether ranks that hold other lengths have to make the same bits.

    The code for one length may round otherwise than the code for another.
    """
    if not isinstance(instruction, Compute) or _is_exact(instruction.op):
        return False
    made = [values[ref.id].placements for ref in instruction.writes]
    return any(isinstance(each[axis], Whole) for each in made for axis in axes)


def _is_exact(op: Any) -> bool:
    return is_view(op) or op in (aten.clone.default, aten._to_copy.default)


# --- a run becomes a region -----------------------------------------------------------


@dataclass(frozen=True)
class _Joiner:
    values: Values
    backend: str
    known: dict[Any, "Code"] = field(default_factory=dict)

    def join(self, run: Sequence[Compute], needed: Collection[Ref]) -> list[Compute]:
        """A run as one instruction, if it has enough operators.

        Views that are needed outside stay there: one of what the region makes would
        share memory with another result, so it follows the region; one of what the
        region reads precedes it.
        """
        before, after, outputs = _around(run, needed)
        outside = set(map(id, before))
        inside = _leading_to(outputs, [c for c in run if id(c) not in outside])
        if sum(not is_view(each.op) for each in inside) < _LEAST:
            return list(run)
        return [*before, self.region(inside, outputs), *after]

    def region(self, inside: Sequence[Compute], outputs: Sequence[Ref]) -> Compute:
        operands, steps, made = _numbered(inside, outputs)
        key = (made, *((s.op, repr(s.args), repr(s.kwargs), s.outputs) for s in steps))
        if key not in self.known:
            self.known[key] = Code(steps, made, self.backend)
        strides = tuple(self.values[ref.id].meta.stride for ref in outputs)
        op = Region(tuple(inside), strides, self.known[key])
        replay = all(each.replay for each in inside)
        return Compute(op, operands, {}, tuple(outputs), inside[0].line, replay)


def _around(
    run: Sequence[Compute], needed: Collection[Ref]
) -> tuple[list[Compute], list[Compute], list[Ref]]:
    """The views of a run that are needed outside, and what else is."""
    wanted, views = set(needed), set[int]()
    for position in reversed(range(len(run))):
        each = run[position]
        if is_view(each.op) and not wanted.isdisjoint(each.writes):
            views.add(position)
            wanted.update(each.reads)
    inner = [r for each in run if not is_view(each.op) for r in each.writes]
    made = set(inner)  # and views of it
    before: list[Compute] = []
    after: list[Compute] = []
    for position, each in enumerate(run):
        if is_view(each.op) and not made.isdisjoint(each.reads):
            made.update(each.writes)
        if position in views:
            (before if made.isdisjoint(each.reads) else after).append(each)
    return before, after, [ref for ref in inner if ref in wanted]


def _leading_to(outputs: Collection[Ref], run: Sequence[Compute]) -> list[Compute]:
    """The operators of a run that some results need."""
    wanted = set(outputs)
    found: list[Compute] = []
    for each in reversed(run):
        if not wanted.isdisjoint(each.writes):
            found.insert(0, each)
            wanted.update(each.reads)
    return found


def _numbered(
    inside: Sequence[Compute], outputs: Sequence[Ref]
) -> tuple[tuple[Any, ...], tuple[Compute, ...], tuple[Ref, ...]]:
    """A region's operands, and its operators on values numbered from the operands on.

    Lengths of a rank's parts are operands too.
    """
    written = {ref for each in inside for ref in each.writes}
    leaves = list[Any]()
    map_leaves(leaves.append, [(each.args, each.kwargs) for each in inside])
    read = [leaf for leaf in leaves if isinstance(leaf, Ref | Extent)]
    operands = tuple(dict.fromkeys(leaf for leaf in read if leaf not in written))
    number = {leaf: Ref(n) for n, leaf in enumerate(operands)}

    def renamed(leaf: Any) -> Any:
        if isinstance(leaf, Ref | Extent):
            return number.setdefault(leaf, Ref(len(number)))
        return leaf

    steps = []
    for each in inside:
        args, kwargs = map_leaves(renamed, (each.args, dict(each.kwargs)))
        made = tuple(None if ref is None else renamed(ref) for ref in each.outputs)
        steps.append(Compute(each.op, args, kwargs, made))
    return operands, tuple(steps), tuple(number[ref] for ref in outputs)


# --- what is executed -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Region:
    """Operators in the place of one, for one place of a program.

    Attributes:
        instructions: The operators.
        strides: Of every result, in the order of which it has to lie in memory.
        code: What is compiled, shared with all regions that do the same.
    """

    instructions: tuple[Compute, ...]
    strides: tuple[tuple[int, ...], ...] = field(repr=False)
    code: "Code" = field(repr=False)

    def __str__(self) -> str:
        """What ranks compare: how many operators, and a digest of which."""
        return f"region[{len(self.instructions)} operators, {self.code.digest}]"

    def __call__(self, *operands: Any) -> list[torch.Tensor]:
        taken = {storage_id(x) for x in operands if isinstance(x, torch.Tensor)}
        made = []
        rows = zip(self.code(operands), self.strides, strict=True)
        for tensor, stride in rows:
            tensor = in_order(tensor, stride)
            # A backend may return one tensor twice, or a part of another.
            made.append(tensor.clone() if storage_id(tensor) in taken else tensor)
            taken.add(storage_id(made[-1]))
        return made


class Code:
    """Operators as a function that is compiled once for each form of its operands."""

    def __init__(
        self, steps: tuple[Compute, ...], outputs: tuple[Ref, ...], backend: str
    ) -> None:
        self.steps, self.outputs, self.backend = steps, outputs, backend
        self.made: dict[Form, Callable[..., Any]] = {}
        text = [f"{_name(s.op)} {s.args} {s.kwargs} {s.outputs}" for s in steps]
        digest = hashlib.sha256("\n".join([*text, str(outputs)]).encode())
        self.digest = digest.hexdigest()[:8]

    def __call__(self, operands: Sequence[Any]) -> Sequence[torch.Tensor]:
        form = tuple(map(_form, operands))
        function = self.made.get(form)
        tensors = [x for x in operands if isinstance(x, torch.Tensor)]
        if function is None:
            return self._first(form, operands, tensors)
        return function(*tensors)

    def _first(
        self, form: Form, operands: Sequence[Any], tensors: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The first call with operands of a form."""
        plain = _function(self.steps, self.outputs, operands)
        # A rank without rows has nothing to compute fast.
        empty = any(tensor.numel() == 0 for tensor in tensors)
        self.made[form] = plain if empty else _compiled(plain, self.backend)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
                return self.made[form](*tensors)
        except Exception as error:
            if empty:
                raise
            self.made[form] = plain
            warn(
                f"{len(self.steps)} operators are executed as they are, because "
                f"{self.backend} does not compile them: {_short(error)}",
                RuntimeWarning,
            )
            return plain(*tensors)


def _form(operand: Any) -> Any:
    if isinstance(operand, torch.Tensor):
        return operand.shape, operand.stride(), operand.dtype
    return operand


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _name(op: Any) -> str:
    return op.__name__ if isinstance(op, FunctionType) else str(op)


def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, dynamic=False, fullgraph=True)


def _function(
    steps: Sequence[Compute], outputs: Sequence[Ref], operands: Sequence[Any]
) -> Callable[..., Any]:
    """Operators as a function of the tensors among its operands.

    Code of its own for every form: torch recompiles the same code only so often.
    """
    graph = torch.fx.Graph()
    values: dict[int, Any] = dict(enumerate(operands))
    for number, operand in values.items():
        if isinstance(operand, torch.Tensor):
            values[number] = graph.placeholder(f"x{number}")
    for step in steps:
        args, kwargs = filled((step.args, step.kwargs), values)
        out = graph.call_function(step.op, args, kwargs)
        one = makes_one_tensor(step.op)
        row = out if one else graph.call_function(results, (out,))
        for n, ref in enumerate(step.outputs):
            if ref is not None:
                values[ref.id] = out if one else graph.call_function(getitem, (row, n))
    graph.output([values[ref.id] for ref in outputs])
    return torch.fx.GraphModule(torch.nn.Module(), graph).forward
