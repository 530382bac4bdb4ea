"""How an operator's dimensions correspond: the factors of its operands and results.

Every dimension is a product of named factors, as in an einops pattern: `(b t) d`. A
factor that is split in all operands that have it is split in the results, or leaves
them pending where the operator sums over it. From this one description per operator
follow all placements it admits, on every mesh axis. The idea is Shardy's (the
partitioner of XLA), where a sharding rule maps dimensions to factors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ._layout import Meta, Split

Dim = tuple[str, ...]
Dims = tuple[Dim, ...]
Piece = tuple[tuple[int, ...], tuple[int, ...]]  # operands, results


@dataclass(frozen=True)
class Sharding:
    """The factors of one operator, and what may be done with them.

    Attributes:
        inputs: Of every operand, the factors of each dimension, major factor first.
        outputs: The same for every result; `None` for a result that is no tensor.
        sizes: The length of every factor.
        whole: Factors that must not be split.
        reduce: Factors over which the operator reduces, with "sum", "max" or "min".
        linear: Sets of operands; pending sums in one set give pending results.
        addend: Operands that are added to a sum over a split factor once, not per rank.
        shape_argument: Position of the argument that holds the first result's shape.
        bundle: Lists of operands and results that do not touch each other; each list is
            placed by itself. Empty for an operator that is one piece.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims | None, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    reduce: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    addend: frozenset[int] = frozenset()
    shape_argument: int | None = None
    bundle: tuple[Piece, ...] = ()

    def pieces(self) -> tuple[Piece, ...]:
        """Operands and results of every part that is placed by itself."""
        everything = (tuple(range(len(self.inputs))), tuple(range(len(self.outputs))))
        return self.bundle or (everything,)

    def factor_of(self, dims: Dims, split: Split) -> tuple[str, int] | None:
        """The factor that a split cuts, and the length of a rank's part of it."""
        factors = dims[split.dim]
        for position, factor in enumerate(factors):
            minor = math.prod(self.sizes[f] for f in factors[position + 1 :])
            if minor and split.chunk % minor == 0:
                return factor, split.chunk // minor
            if self.sizes[factor] != 1:
                return None
        return None

    def split_of(self, dims: Dims, factor: str, chunk: int) -> Split | None:
        """The split of `dims` that cuts a factor, or None if it cannot be said."""
        for dim, factors in enumerate(dims):
            if factor in factors:
                position = factors.index(factor)
                major = math.prod(self.sizes[f] for f in factors[:position])
                minor = math.prod(self.sizes[f] for f in factors[position + 1 :])
                return Split(dim, chunk * minor) if major == 1 and minor else None
        return None

    def numel(self, dims: Dims) -> int:
        """The number of elements of an operand or result."""
        return math.prod(self.sizes[factor] for dim in dims for factor in dim)

    def has(self, dims: Dims, factor: str) -> bool:
        """Whether a factor occurs in `dims`."""
        return any(factor in dim for dim in dims)


def sharding(
    inputs: Sequence[Sequence[str | Dim]],
    outputs: Sequence[Sequence[str | Dim] | None],
    metas: Sequence[Meta],
    results: Sequence[Meta | None],
    **options: object,
) -> Sharding | None:
    """A `Sharding` from lists of factor names, with lengths taken from the shapes.

    A trailing `!` marks a factor that stays whole. Returns None where the names do not
    fit the shapes, so that an unforeseen form of an operator is gathered, never wrong.
    """
    named = [*zip(inputs, metas, strict=True)]
    named += [
        (d, m) for d, m in zip(outputs, results, strict=True) if d is not None and m
    ]
    sizes: dict[str, int] = dict(options.pop("sizes", {}))  # type: ignore[call-overload]
    for dims, meta in named:
        if len(dims) != len(meta.shape) or not _fits(dims, meta.shape, sizes):
            return None
    spelled = {f for dims, _ in named for dim in dims for f in _factors(dim)}
    whole = {f for f in spelled if f.endswith("!")}
    return Sharding(
        tuple(map(_dims, inputs)),
        tuple(None if dims is None else _dims(dims) for dims in outputs),
        sizes,
        frozenset(whole),
        **options,  # type: ignore[arg-type]
    )


def _factors(dim: str | Dim) -> Dim:
    return (dim,) if isinstance(dim, str) else dim


def _dims(dims: Sequence[str | Dim]) -> Dims:
    return tuple(map(_factors, dims))


def _fits(
    dims: Sequence[str | Dim], shape: Sequence[int], sizes: dict[str, int]
) -> bool:
    """Check lengths against those known; learn those of simple dimensions."""
    for dim, length in zip(dims, shape, strict=True):
        factors = _factors(dim)
        if len(factors) == 1:
            sizes.setdefault(factors[0], length)
        if math.prod(sizes[f] for f in factors) != length:
            return False
    return True


def parse(pattern: str) -> tuple[list[list[str]], list[list[str]]]:
    """Split an einops-like pattern into operands and results.

    >>> parse("m k, k n -> m n")
    ([['m', 'k'], ['k', 'n']], [['m', 'n']])
    """
    left, right = pattern.split("->")
    return [s.split() for s in left.split(",")], [s.split() for s in right.split(",")]


def summed(inputs: Sequence[Dims], outputs: Sequence[Dims | None]) -> set[str]:
    """Factors that occur in an operand and are missing in a result."""
    kept = [{f for dim in dims for f in dim} for dims in outputs if dims is not None]
    spelled = {f for dims in inputs for dim in dims for f in dim}
    return {f for f in spelled if any(f not in factors for factors in kept)}


# --- reshapes -------------------------------------------------------------------------


def reshape_factors(
    source: Sequence[int], target: Sequence[int]
) -> tuple[list[Dim], list[Dim], dict[str, int]] | None:
    """Common factors of two shapes of the same number of elements.

    >>> reshape_factors((6, 4), (3, 8))[:2]
    ([('f0', 'f1'), ('f2',)], [('f0',), ('f1', 'f2')])

    Walks both shapes from the major end. Where the lengths left in two dimensions share
    a divisor, that is a factor of both; where they share none, the two shapes are cut
    differently until their products meet again, and those factors stay whole.
    """
    if 0 in source or 0 in target:
        return None
    walk = _Walk(list(source), list(target))
    while walk.step():
        pass
    return walk.dims[0], walk.dims[1], walk.sizes


class _Walk:
    """State of the walk over two shapes; side 0 is the source, side 1 the target."""

    def __init__(self, source: list[int], target: list[int]) -> None:
        self.left = (source, target)
        self.at = [0, 0]
        self.dims: tuple[list[Dim], list[Dim]] = (
            [()] * len(source),
            [()] * len(target),
        )
        self.fresh = [True, True]
        self.sizes: dict[str, int] = {}

    def step(self) -> bool:
        done = [self.at[side] >= len(self.left[side]) for side in (0, 1)]
        if all(done):
            return False
        for side in (0, 1):
            if not done[side] and self.left[side][self.at[side]] == 1:
                self._one(side, done)
                return True
        common = math.gcd(*(self.left[side][self.at[side]] for side in (0, 1)))
        if common > 1:
            self._share(common)
        else:
            self._tangle()
        return True

    def _one(self, side: int, done: list[bool]) -> None:
        """A dimension of length one, or one that has been used up."""
        if self.fresh[side]:
            other = 1 - side
            name = f"one{len(self.sizes)}" + "!" * done[other]
            self.sizes[name] = 1
            self._append(side, name)
            if not done[other]:
                self._append(other, name)
        self.at[side] += 1
        self.fresh[side] = True

    def _share(self, length: int) -> None:
        name = f"f{len(self.sizes)}"
        self.sizes[name] = length
        for side in (0, 1):
            self._append(side, name)
            self.left[side][self.at[side]] //= length
            self.fresh[side] = False

    def _tangle(self) -> None:
        """Take dimensions on both sides until the products agree."""
        products = [1, 1]
        self._take(0, products)
        while products[0] != products[1]:
            self._take(0 if products[0] < products[1] else 1, products)

    def _take(self, side: int, products: list[int]) -> None:
        length = self.left[side][self.at[side]]
        products[side] *= length
        name = f"w{len(self.sizes)}!"
        self.sizes[name] = length
        self._append(side, name)
        self.left[side][self.at[side]] = 1
        self.fresh[side] = False
        self.at[side] += 1
        self.fresh[side] = True

    def _append(self, side: int, name: str) -> None:
        at = self.at[side]
        self.dims[side][at] += (name,)
