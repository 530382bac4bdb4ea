"""Choosing how to compute one operator on one mesh axis: what moves least.

The ways are those that the operator's factors admit: split one factor that an operand
is split on already, keep pending sums pending where the operator is linear in them, or
compute everything whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ._layout import SUM, WHOLE, Pending, Placement, Placements, Split
from ._placed import Value
from ._sharding import Dims, Piece, Sharding

_BATCH_COST = 1e6  # a byte of batch against a byte of state: batch never moves


@dataclass
class Choice:
    """What one axis asks of the operands, and what it makes of the results."""

    needs: list[Placement]
    results: list[Placement]


def choose(
    rule: Sharding | None, operands: Sequence[Value], results: int, axis: int
) -> Choice:
    """The cheapest of all ways to compute an operator on one axis.

    Args:
        rule: The operator's factors; None for one that must be computed whole.
        operands: Its operands; pending ones only if the operator is linear in them.
        results: How many results it has.
        axis: The mesh axis.
    """
    chosen = _whole(len(operands), results)
    if rule is None:
        return chosen
    if any(pends(v, axis) for v in operands):
        return next(linear_choices(rule, operands, axis))
    for piece in rule.pieces():
        choice = _cheapest(rule, operands, piece, axis)
        for n in piece[0]:
            chosen.needs[n] = choice.needs[n]
        for n in piece[1]:
            chosen.results[n] = choice.results[n]
    return chosen


def pends(value: Value, axis: int) -> bool:
    """Whether a value is a pending reduction over an axis."""
    return not value.is_free and isinstance(value.placements[axis], Pending)


def linear_choices(
    rule: Sharding, operands: Sequence[Value], axis: int
) -> Iterator[Choice]:
    """Ways to keep pending sums pending."""
    pending = {n for n, v in enumerate(operands) if pends(v, axis)}
    others = [v for n, v in enumerate(operands) if n not in pending]
    sums = all(operands[n].placements[axis] == SUM for n in pending)
    whole = all(
        v.is_free or v.placements[axis] == WHOLE or (is_product(rule) and not v.batch)
        for v in others
    )
    if sums and whole and _is_small(rule, operands):
        for group in rule.linear:
            if pending <= group:
                needs: list[Placement] = [WHOLE] * len(operands)
                for n in group:
                    needs[n] = SUM
                yield Choice(needs, [SUM] * len(rule.outputs))


def needs_of_result(rule: Sharding, target: Placements) -> list[Placements] | None:
    """How the operands lie when the first result lies as `target`, or None."""
    columns = [_needs_on_axis(rule, placement) for placement in target]
    rows = [column for column in columns if column is not None]
    if len(rows) < len(columns):
        return None
    return [tuple(row[n] for row in rows) for n in range(len(rule.inputs))]


def _needs_on_axis(rule: Sharding, placement: Placement) -> list[Placement] | None:
    if placement == WHOLE:
        return [WHOLE] * len(rule.inputs)
    dims = rule.outputs[0]
    if dims is None or not isinstance(placement, Split):
        return None
    cut = rule.factor_of(dims, placement)
    if cut is None or cut[0] in rule.whole:
        return None
    choice = _split_choice(rule, *cut, (0,))
    return None if choice is None else choice.needs


# --- the ways -------------------------------------------------------------------------


def _whole(operands: int, results: int) -> Choice:
    return Choice([WHOLE] * operands, [WHOLE] * results)


def _cheapest(
    rule: Sharding, operands: Sequence[Value], piece: Piece, axis: int
) -> Choice:
    """Of the splits that some operand has, and none, the one that moves least."""
    choices = [*_split_choices(rule, operands, piece, axis)]
    choices.append(_whole(len(rule.inputs), len(rule.outputs)))
    return min(
        choices,
        key=lambda c: sum(_cost(operands[n], c.needs[n], axis) for n in piece[0]),
    )


def _cost(value: Value, need: Placement, axis: int) -> float:
    have = value.placements[axis]
    if value.is_free or have in (need, WHOLE):
        return 0.0
    return value.meta.nbytes * (_BATCH_COST if value.batch else 1.0)


def _split_choices(
    rule: Sharding, operands: Sequence[Value], piece: Piece, axis: int
) -> Iterator[Choice]:
    for n in piece[0]:
        split = operands[n].placements[axis]
        if operands[n].is_free or not isinstance(split, Split):
            continue
        cut = rule.factor_of(rule.inputs[n], split)
        if cut is not None and cut[0] not in rule.whole:
            choice = _split_choice(rule, *cut, piece[1])
            if choice is not None:
                yield choice


def _split_choice(
    rule: Sharding, factor: str, chunk: int, touched: Sequence[int]
) -> Choice | None:
    """Operands, and the results in `touched`, when a factor is split."""
    choice = _whole(len(rule.inputs), len(rule.outputs))
    for n, dims in enumerate(rule.inputs):
        if rule.has(dims, factor):
            need: Placement | None = rule.split_of(dims, factor, chunk)
        else:
            need = SUM if n in rule.addend and factor in rule.reduce else WHOLE
        if need is None:
            return None
        choice.needs[n] = need
    for n in touched:
        result = _split_result(rule, rule.outputs[n], factor, chunk)
        if result is None:
            return None
        choice.results[n] = result
    return choice


def _split_result(
    rule: Sharding, dims: Dims | None, factor: str, chunk: int
) -> Placement | None:
    if dims is None:
        return WHOLE
    if rule.has(dims, factor):
        return rule.split_of(dims, factor, chunk)
    return Pending(rule.reduce[factor]) if factor in rule.reduce else None


def is_product(rule: Sharding) -> bool:
    """Whether an operator sums products of two operands."""
    return len(rule.inputs) == 2 and bool(rule.reduce)


def _is_small(rule: Sharding, operands: Sequence[Value]) -> bool:
    """Whether a pending result is no larger than the pending operands.

    A product must be much smaller, together with the factor that is gathered for it: as
    the gradients of two thin factors are against that of their product.
    """
    pending = sum(v.meta.numel for v in operands if v.is_pending)
    result = sum(rule.numel(dims) for dims in rule.outputs if dims is not None)
    if not is_product(rule):
        return result <= max(pending, 1)
    others = sum(v.meta.numel for v in operands if not v.is_pending)
    return 2 * result <= pending and result + others <= pending
