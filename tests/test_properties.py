"""What holds for every step, tree, mesh and transfer; and that checks can fail."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same, mesh_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import yafsdp_fn as yf
from yafsdp_fn._collectives import exchange, pack, unpack
from yafsdp_fn._layout import Split, even_chunk, interval
from yafsdp_fn._program import (
    Compute,
    Free,
    Instruction,
    Program,
    Start,
    Transfer,
    Wait,
)
from yafsdp_fn.testing import RandomStep, assert_agrees, meshes, steps, trees
from yafsdp_fn.testing._strategies import DTYPES, tensor

# --- steps ----------------------------------------------------------------------------

# A step costs as much as fifty trees: it is traced, placed, planned and run twice.
fewer = settings(max_examples=settings().max_examples // 2)


@fewer
@given(step=steps(), mesh=meshes())
def test_sharded_is_unsharded(step: RandomStep, mesh: DeviceMesh) -> None:
    sharded = assert_agrees(step.fn, *step.args, mesh=mesh, steps=2)
    assert (sharded.cache_size(), sharded.trace_count()) == (1, 1)


@fewer
@given(step=steps(), mesh=meshes(), seed=st.integers(0, 2**16))
def test_any_placement_of_state(step: RandomStep, mesh: DeviceMesh, seed: int) -> None:
    numbers = itertools.count(seed)

    def placements(path: str, leaf: torch.Tensor) -> list[Any]:
        choices = [Shard(d) for d in range(leaf.dim())] + [Replicate()]
        chosen = choices[next(numbers) % len(choices)]
        return [Replicate()] * (mesh.ndim - 1) + [chosen]

    assert_agrees(step.fn, *step.args, mesh=mesh, steps=2, placements=placements)


@fewer
@given(step=steps(), mesh=meshes())
def test_plain_and_distributed_share_a_program(
    step: RandomStep, mesh: DeviceMesh
) -> None:
    sharded = yf.shard(step.fn, mesh=mesh)
    *state, batch = step.args
    wanted = step.fn(*step.args)
    assert_same(sharded(*step.args), wanted)
    assert_same(sharded(*yf.distribute(state, mesh), batch), wanted)
    assert (sharded.cache_size(), sharded.trace_count()) == (1, 1)


# --- trees ----------------------------------------------------------------------------


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def assert_bitwise(found: Any, wanted: Any) -> None:
    """Two trees agree in structure, dtype, shape, stride and in every bit."""
    haves, have_spec = optree.tree_flatten(found, namespace="yafsdp_fn")
    wants, want_spec = optree.tree_flatten(wanted, namespace="yafsdp_fn")
    assert have_spec == want_spec
    for have, want in zip(haves, wants, strict=True):
        assert type(have) is type(want)
        if not isinstance(want, torch.Tensor):
            assert have == want
            continue
        assert (have.dtype, have.shape) == (want.dtype, want.shape)
        if 0 not in want.stride():  # else it is empty, and they mean nothing
            assert have.stride() == want.stride()
        assert torch.equal(bits(have), bits(want))


@given(tree=trees(), mesh=meshes())
def test_trees_round_trip(tree: Any, mesh: DeviceMesh) -> None:
    assert_bitwise(yf.full(yf.distribute(tree, mesh)), tree)


@given(tree=trees(), mesh=meshes(), seed=st.integers(0, 9))
def test_trees_round_trip_in_given_placements(
    tree: Any, mesh: DeviceMesh, seed: int
) -> None:
    def placements(path: str, leaf: torch.Tensor) -> list[Any] | None:
        last = Shard(1) if leaf.dim() > 1 and seed % 2 else Replicate()
        return None if seed == 9 else [Replicate()] * (mesh.ndim - 1) + [last]

    assert_bitwise(yf.full(yf.distribute(tree, mesh, placements)), tree)


# --- transfers ------------------------------------------------------------------------


class Cut(NamedTuple):
    """A value of some shape whose dimension `dim` is cut into parts of `chunk`."""

    shape: tuple[int, ...]
    dim: int
    chunk: int
    ranks: int

    def lengths(self) -> list[int]:
        placed = (Split(self.dim, self.chunk),)
        bounds = (
            interval(self.shape[self.dim], self.dim, placed, (rank,))
            for rank in range(self.ranks)
        )
        return [stop - start for start, stop in bounds]

    def transfer(self, kind: str) -> Transfer:
        return Transfer(kind, 0, (), (), ((self.dim, self.chunk),))


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    ranks = draw(st.integers(1, 4))
    chunk = even_chunk(shape[dim], ranks) + draw(st.integers(0, 2))
    return Cut(shape, dim, chunk, ranks)


def whole_numbers(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Floats whose sums and products are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, tuple(shape), generator=generator).double()


@given(cut=cuts())
def test_all_gather_and_reduce_scatter_are_adjoint(cut: Cut) -> None:
    lengths = cut.lengths()
    whole = whole_numbers(cut.shape, 0)
    x = list(whole.split(lengths, cut.dim))
    y = [whole_numbers(cut.shape, rank + 1) for rank in range(cut.ranks)]
    size = [cut.shape[cut.dim]] * cut.ranks
    gathered = exchange(cut.transfer("all_gather"), 0, x, size)
    scattered = exchange(cut.transfer("reduce_scatter"), 0, y, lengths)
    assert all(torch.equal(value, whole) for value in gathered)
    assert inner(gathered, y) == inner(x, scattered)


def inner(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """The inner product of what all ranks hold."""
    return sum(float((a * b).sum()) for a, b in zip(left, right, strict=True))


@given(cut=cuts(), dtype=st.sampled_from(DTYPES))
def test_pack_and_unpack_round_trip(cut: Cut, dtype: torch.dtype) -> None:
    value = tensor(cut.shape, dtype)
    rows = cut.shape[cut.dim]
    packed = pack(value, cut.dim, rows + cut.chunk)
    assert packed.is_contiguous()
    assert not bits(packed[rows:]).any()
    found = unpack(packed, cut.dim, rows)
    assert found.shape == value.shape
    assert torch.equal(bits(found), bits(value))


@given(cut=cuts(), op=st.sampled_from(["sum", "max", "min"]))
def test_all_reduce_is_the_same_everywhere(cut: Cut, op: str) -> None:
    parts = [whole_numbers(cut.shape, rank) for rank in range(cut.ranks)]
    stacked = torch.stack(parts)
    wanted = {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin}[op](0)
    transfer = Transfer("all_reduce", 0, (), (), op=op)
    assert all(torch.equal(v, wanted) for v in exchange(transfer, 0, parts, []))


# --- the comparison can fail ----------------------------------------------------------

ONES = torch.ones(3, dtype=torch.float64)
NAN = torch.tensor([float("nan"), 1.0, 1.0], dtype=torch.float64)
DIFFERENT = {
    "value": (ONES, ONES + 1e-8),
    "value in float32": (ONES.float(), ONES.float() + 1e-4),
    "value in bfloat16": (ONES.bfloat16(), ONES.bfloat16() * 1.1),
    "complex value": (ONES + 0j, ONES + 1e-8j),
    "one small value": (ONES, torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)),
    "dtype": (ONES, ONES.float()),
    "dtype of integers": (torch.arange(3), torch.arange(3, dtype=torch.int32)),
    "shape": (ONES, ONES[:, None]),
    "length": (ONES, ONES[:2]),
    "integer": (torch.arange(3), torch.arange(3) + torch.tensor([0, 0, 1])),
    "large integer": (torch.tensor([2**60]), torch.tensor([2**60 + 1])),
    "truth value": (torch.tensor([True, False]), torch.tensor([True, True])),
    "NaN": (ONES, NAN),
    "infinity": (ONES, ONES / 0),
    "sign of infinity": (ONES / 0, -ONES / 0),
    "stride": (torch.ones(2, 3), torch.ones(3, 2).mT),
    "Python number": (1, 2),
    "type of a Python number": (1, 1.0),
    "structure": ([ONES], (ONES,)),
    "keys": ({"a": ONES}, {"b": ONES}),
    "missing leaf": ([ONES, ONES], [ONES]),
    "None": ([ONES], [None]),
}


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("swapped", [False, True])
def test_comparison_fails_on(name: str, swapped: bool) -> None:
    found, wanted = reversed(DIFFERENT[name]) if swapped else DIFFERENT[name]
    assert_same([found], [found])
    with pytest.raises(AssertionError):
        assert_same([found], [wanted])


def test_comparison_reads_every_shard() -> None:
    right, wrong = torch.ones(5, 2), torch.ones(5, 2)
    wrong[4, 1] = 2
    with pytest.raises(AssertionError):
        assert_same(yf.distribute(wrong, mesh_of(4)), right)


def test_comparison_allows_the_order_of_sums() -> None:
    assert_same({"a": NAN, "b": ONES + 1e-12}, {"a": NAN.clone(), "b": ONES})


# --- the specification can fail -------------------------------------------------------


def real_program() -> Program:
    """The program of a step that gathers, reduces and scatters."""

    def step(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> torch.Tensor:
            return (batch @ p["v"].T @ p["w"].T).square().mean()

        grads, value = torch.func.grad_and_value(loss)(params)
        return {k: p - 0.1 * grads[k] for k, p in params.items()}, value

    params = {"v": torch.ones(6, 2), "w": torch.ones(5, 6)}
    lowered = yf.shard(step, mesh=mesh_of(2)).lower(params, torch.ones(8, 2))
    return lowered.plan


Mutants = Iterator[list[Instruction]]


def positions(program: Program, kind: type) -> list[int]:
    return [n for n, i in enumerate(program.instructions) if isinstance(i, kind)]


def without(program: Program, kind: type) -> Mutants:
    for n in positions(program, kind):
        yield [*program.instructions[:n], *program.instructions[n + 1 :]]


def repeated(program: Program, kind: type) -> Mutants:
    for n in positions(program, kind):
        yield [*program.instructions[: n + 1], *program.instructions[n:]]


def read_before_wait(program: Program) -> Mutants:
    """Every wait moved behind the first instruction that reads one of its targets."""
    code = program.instructions
    for n in positions(program, Wait):
        targets = set(code[n].writes)
        readers = (m for m in range(n, len(code)) if targets & set(code[m].reads))
        for m in itertools.islice(readers, 1):
            yield [*code[:n], *code[n + 1 : m + 1], code[n], *code[m + 1 :]]


def read_after_free(program: Program) -> Mutants:
    """Every operand released before the instruction that reads it."""
    code = program.instructions
    for n in positions(program, Compute):
        for ref in code[n].reads:
            yield [*code[:n], Free((ref,)), *code[n:]]


def free_in_flight(program: Program) -> Mutants:
    """Every source of a transfer released before its wait."""
    code = program.instructions
    for n in positions(program, Start):
        yield [*code[: n + 1], Free(code[n].reads), *code[n + 1 :]]


def free_result(program: Program) -> Mutants:
    """Every result released at the end."""
    for ref in program.outputs:
        if ref is not None:
            yield [*program.instructions, Free((ref,))]


MUTATIONS: dict[str, Callable[[Program], Mutants]] = {
    "a wait dropped": lambda p: without(p, Wait),
    "a start dropped": lambda p: without(p, Start),
    "a compute dropped": lambda p: without(p, Compute),
    "started twice": lambda p: repeated(p, Start),
    "waited twice": lambda p: repeated(p, Wait),
    "written twice": lambda p: repeated(p, Compute),
    "freed twice": lambda p: repeated(p, Free),
    "read before its wait": read_before_wait,
    "read after its release": read_after_free,
    "source released in flight": free_in_flight,
    "result released": free_result,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_specification_fails_on(name: str) -> None:
    program = real_program()
    yf.check(program)
    mutants = list(MUTATIONS[name](program))
    assert mutants
    for instructions in mutants:
        with pytest.raises(yf.ProgramError):
            yf.check(replace(program, instructions=tuple(instructions)))


def test_specification_fails_on_memory() -> None:
    mesh = mesh_of(2)
    step = yf.shard(lambda params, batch: params * batch.sum(), mesh=mesh)
    lowered = step.lower(torch.ones(6, 2), torch.ones(8, 2))
    peak = lowered.memory_analysis()["peak_bytes"]
    yf.check(lowered.plan, budget=peak)
    with pytest.raises(yf.ProgramError, match="budget"):
        yf.check(lowered.plan, budget=peak - 1)
