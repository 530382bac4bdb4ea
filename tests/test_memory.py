"""Memory: places that never collide, results that last, and inputs written over."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import agree, assert_same, mesh_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.func import grad_and_value

import yafsdp_fn as yf
from yafsdp_fn._arena import POOL
from yafsdp_fn._graph import Ref
from yafsdp_fn._held import held_bytes, live_bytes, peak
from yafsdp_fn._memory import KINDS, _offsets
from yafsdp_fn._program import Buffer, Free, Program, Start, Wait
from yafsdp_fn._torch import local_part, per_rank, storage_id
from yafsdp_fn.testing import RandomStep, meshes, steps

aten = torch.ops.aten
Spans = Mapping[int, tuple[int, int, int]]  # begin, end, bytes

# --- offsets --------------------------------------------------------------------------


def together(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def live_at_most(spans: Spans) -> int:
    loads = (
        sum(size for begin, end, size in spans.values() if begin <= time <= end)
        for time, _, _ in spans.values()
    )
    return max(loads, default=0)


def reach(spans: Spans) -> int:
    """Bytes that the spans need where they are put, apart from each other."""
    offsets = _offsets(spans)
    assert offsets.keys() == spans.keys()
    for one, other in itertools.combinations(spans, 2):
        if together(spans[one], spans[other]) and spans[one][2] and spans[other][2]:
            first, second = sorted((one, other), key=offsets.__getitem__)
            assert offsets[first] + spans[first][2] <= offsets[second]
    return max((offsets[n] + spans[n][2] for n in spans), default=0)


@st.composite
def spans(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> Spans:
    rows = st.tuples(st.integers(0, 60), st.integers(0, 40), sizes)
    drawn = draw(st.lists(rows, max_size=40))
    return {n: (begin, begin + more, s) for n, (begin, more, s) in enumerate(drawn)}


SIZES = st.one_of(st.integers(0, 100), st.sampled_from([1, 3, 16, 100]))


@given(spans=spans(SIZES))
def test_spans_that_live_together_lie_apart_in_little_more_than_they_need(
    spans: Spans,
) -> None:
    assert reach(spans) <= 1.6 * live_at_most(spans)


@given(spans=spans(st.just(7)))
def test_spans_of_one_size_need_no_more_than_what_lives(spans: Spans) -> None:
    assert reach(spans) == live_at_most(spans)


@given(sizes=st.lists(st.integers(1, 99), max_size=20))
def test_nested_spans_need_no_more_than_what_lives(sizes: list[int]) -> None:
    spans = {n: (n, 100 - n, size) for n, size in enumerate(sizes)}
    assert reach(spans) == sum(sizes)


# --- programs of any step -------------------------------------------------------------

fewer = settings(max_examples=settings().max_examples // 10)
small_steps = steps(most=6)


def planned(step: RandomStep, mesh: DeviceMesh) -> Program:
    donating = yf.shard(step.fn, mesh=mesh, donate_argnums=(0, 1))
    *state, batch = step.args
    return donating.lower(*yf.distribute(state, mesh), batch).plan


def begun(instruction: Any) -> Iterator[int]:
    """The values whose memory is in use from an instruction on."""
    if isinstance(instruction, Start):
        transfer = instruction.transfer
        yield from (ref.id for ref in (*transfer.targets, *transfer.scratch))
    elif not isinstance(instruction, Wait):
        yield from (ref.id for ref in instruction.writes)


def lives(program: Program) -> dict[int, tuple[int, int]]:
    """For every place in the arena its first instruction and the last to touch it."""
    found: dict[int, tuple[int, int]] = {}
    for position, instruction in enumerate(program.instructions):
        touched = {*begun(instruction)}
        if isinstance(instruction, Wait):
            touched = {ref.id for ref in instruction.transfer.held}
        touched |= {ref.id for ref in instruction.reads}
        for number in {program.owner.get(n, n) for n in touched}:
            if number in program.buffers:
                first, _ = found.get(number, (position, position))
                found[number] = (first, position)
    return found


def moved_onto_others(program: Program) -> Iterator[Program]:
    """Programs in which a value lies where another one, still wanted, lies too."""
    alive, buffers = lives(program), program.buffers
    for new, old in itertools.permutations(alive, 2):
        (begin, _), (first, last) = alive[new], alive[old]
        ends = begin == last  # it may be overwritten by what begins, in its place
        shift = 64 if ends else 0
        if first < begin <= last and min(buffers[n].nbytes for n in (new, old)) > shift:
            yield _moved(program, new, buffers[old].offset + shift)


def moved_onto_other_forms(program: Program) -> Iterator[Program]:
    """Programs in which a result overwrites an operand of another shape or dtype."""
    alive = lives(program)
    for new, old in itertools.permutations(alive, 2):
        ends = alive[new][0] == alive[old][1]
        sizes = [program.buffers[n].nbytes for n in (new, old)]
        views = [n for n, owner in program.owner.items() if owner == old]
        alike = any(_alike(program, new, n) for n in (old, *views))
        if ends and min(sizes) and not alike:
            yield _moved(program, new, program.buffers[old].offset)


def _moved(program: Program, number: int, offset: int) -> Program:
    buffer = replace(program.buffers[number], offset=offset)
    return replace(program, buffers={**program.buffers, number: buffer})


def _alike(program: Program, one: int, other: int) -> bool:
    a, b = program.values[one], program.values[other]
    return (a.meta.shape, a.meta.dtype, a.placements) == (
        (b.meta.shape, b.meta.dtype, b.placements)
    )


@pytest.mark.parametrize(
    "mutants",
    [moved_onto_others, moved_onto_other_forms],
    ids=["alive", "of another form"],
)
@fewer
@given(step=small_steps, mesh=meshes(), seed=st.integers(0, 50))
def test_a_value_on_top_of_another_is_found(
    mutants: Any, step: RandomStep, mesh: DeviceMesh, seed: int
) -> None:
    program = planned(step, mesh)
    yf.check(program)
    for mutant in itertools.islice(mutants(program), seed, None, 51):
        with pytest.raises(yf.ProgramError, match="overwrites"):
            yf.check(mutant)


@fewer
@given(step=small_steps, mesh=meshes())
def test_what_a_rank_holds_is_what_is_alive(step: RandomStep, mesh: DeviceMesh) -> None:
    program = planned(step, mesh)
    for coordinate in (None, (0,) * len(program.sizes)):
        assert peak(program, coordinate) == peak(program)
    first = (0,) * len(program.sizes)
    held = held_bytes(program, first)
    assert live_bytes(program, first) == [sum(each.values()) for each in held]
    for kinds, wanted in zip(held, alive_bytes(program, first), strict=True):
        assert kinds.keys() <= {*KINDS, "shards", "fresh", "outputs"}
        assert min(kinds.values()) >= 0
        assert sum(kinds.values()) == wanted
    arena = max(sum(each.get(kind, 0) for kind in KINDS) for each in held)
    assert arena <= program.arena
    assert max(sum(each.values()) for each in held) <= peak(program)


def alive_bytes(program: Program, coordinate: tuple[int, ...]) -> Iterator[int]:
    """Bytes of values until no view of them is left, after each instruction."""
    owner = program.owner
    given = [ref.id for ref in program.inputs]
    given += [ref.id for each in program.constants for ref in each.writes]
    kept = {owner[number] for number in given}
    fixed = kept | {*program.donated}
    always = sum(program.values[n].nbytes(coordinate) for n in kept)
    alive: set[int] = set()
    for instruction in program.instructions:
        alive |= {*begun(instruction)}
        if isinstance(instruction, Free):
            alive -= {ref.id for ref in instruction.values}
        owners = {owner[number] for number in alive} - fixed
        inside = [program.buffers[n] for n in owners if n in program.buffers]
        beside = [n for n in owners if n not in program.buffers]
        fresh = sum(program.values[n].nbytes(coordinate) for n in beside)
        yield always + fresh + covered(inside)


def covered(buffers: list[Buffer]) -> int:
    """Bytes that lie in at least one of the buffers."""
    total = reached = 0
    for buffer in sorted(buffers, key=lambda each: each.offset):
        total += max(0, buffer.end - max(reached, buffer.offset))
        reached = max(reached, buffer.end)
    return total


# --- results --------------------------------------------------------------------------


def shards(tree: Any) -> list[torch.Tensor]:
    """The tensors of all ranks."""
    found: list[torch.Tensor] = []
    for leaf in optree.tree_leaves(tree):
        if isinstance(leaf, DTensor):
            found += per_rank(local_part(leaf)).values()
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return found


@fewer
@given(step=small_steps, mesh=meshes())
def test_results_are_no_part_of_the_arena(step: RandomStep, mesh: DeviceMesh) -> None:
    assert_lasting(step.fn, *step.args, mesh=mesh)


def assert_lasting(step: Any, *args: Any, mesh: DeviceMesh) -> None:
    sharded = yf.shard(step, mesh=mesh)
    results = sharded(*args)
    blocks = {storage_id(block) for block in POOL.blocks.values()}
    assert not blocks & {storage_id(tensor) for tensor in shards(results)}
    before = [tensor.clone() for tensor in shards(results)]
    for block in POOL.blocks.values():
        block.fill_(255)
    sharded(*args)
    for tensor, wanted in zip(shards(results), before, strict=True):
        assert torch.equal(tensor.nan_to_num(), wanted.nan_to_num())


def adamw(params: torch.Tensor, grads: torch.Tensor, **options: Any) -> Any:
    """torch's own operator; it hands back gradients as well."""
    zeros = torch.zeros_like(params)
    return aten._fused_adamw(
        *([each] for each in (params, grads, zeros, zeros + 1)),
        [],
        [torch.ones(())],
        **{"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-3},
        **{"amsgrad": False, "maximize": False},
        **options,
    )


RESULTS = {
    "a gradient": lambda p, g, x: g,
    "a view of a gradient": lambda p, g, x: g.mT,
    "a part of a gradient": lambda p, g, x: g[:, 1:3],
    "a gathered leaf": lambda p, g, x: x @ (p * 2),
    "twice the same": lambda p, g, x: (g, g, g.view(-1)),
    "an activation": lambda p, g, x: (x @ p).tanh(),
    "the gradients of an optimiser": lambda p, g, x: adamw(p, g)[1][0],
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("world", [1, 3], ids=str)
def test_results_last(name: str, world: int) -> None:
    def step(params: torch.Tensor, batch: torch.Tensor) -> Any:
        def loss(params: torch.Tensor) -> torch.Tensor:
            return (batch @ params).square().mean()

        grads, _ = grad_and_value(loss)(params)
        return RESULTS[name](params, grads, batch)

    args = torch.arange(48.0).view(6, 8).sin(), torch.arange(30.0).view(5, 6).cos()
    agree(step, *args, world=world, steps=1)
    assert_lasting(step, *args, mesh=mesh_of(world))


# --- donation -------------------------------------------------------------------------

Tree = dict[str, torch.Tensor]


def filled(*shape: int) -> torch.Tensor:
    return torch.linspace(0.1, 1, torch.Size(shape).numel()).view(shape)


def steps_in_place() -> dict[str, Any]:
    adam = yf.optim.adamw(0.1)

    def gradient(params: Tree, batch: torch.Tensor) -> Tree:
        return torch.func.grad(lambda p: (batch @ p["w"]).square().mean())(params)

    def descent(params: Tree, batch: torch.Tensor) -> Tree:
        return {"w": params["w"] - 0.1 * gradient(params, batch)["w"]}

    def momentum(params: Tree, batch: torch.Tensor) -> Tree:
        return {"w": params["w"] * 0.9 + gradient(params, batch)["w"]}

    def fused(params: Tree, batch: torch.Tensor) -> Tree:
        grads, state = gradient(params, batch), adam.init(params)
        updates, _ = adam.update(grads, state, params)
        return yf.optim.apply_updates(params, updates)

    return {"descent": descent, "momentum": momentum, "fused": fused}


@pytest.mark.parametrize("name", steps_in_place())
@pytest.mark.parametrize("world", [1, 3, (2, 2)], ids=str)
def test_a_donated_leaf_becomes_the_result(name: str, world: Any) -> None:
    step = steps_in_place()[name]
    mesh, batch = mesh_of(world), filled(7, 5)
    donating = yf.shard(step, mesh=mesh, donate_argnums=0)
    params = yf.distribute({"w": filled(5, 4)}, mesh)
    assert len(donating.lower(params, batch).plan.donated) == 1
    wanted = {"w": filled(5, 4)}
    for _ in range(3):
        places = [shard.data_ptr() for shard in shards(params)]
        params = donating(params, batch)
        assert [shard.data_ptr() for shard in shards(params)] == places
        wanted = step(wanted, batch)
        assert_same(params, wanted)


def read_later() -> dict[str, Any]:
    def in_the_loss(p: Tree, batch: torch.Tensor) -> Any:
        new = p["w"] * batch.sum()
        return {"w": new}, (new * p["w"]).sum()

    def in_a_view(p: Tree, batch: torch.Tensor) -> Any:
        turned = p["w"].mT
        new = p["w"] * batch.sum()
        return {"w": new}, (turned @ new).sum()

    def in_a_gather(p: Tree, batch: torch.Tensor) -> Any:
        new = p["w"] + batch.sum()
        return {"w": new}, batch @ p["w"], new.sum()

    def in_a_result(p: Tree, batch: torch.Tensor) -> Any:
        return {"w": p["w"] + batch.sum()}, p["w"][1:]

    def by_another(p: Tree, batch: torch.Tensor) -> Any:
        total = batch.sum()
        return {"w": p["v"] + total, "v": p["w"] - total}

    found = (in_the_loss, in_a_view, in_a_gather, in_a_result, by_another)
    return {step.__name__: step for step in found}


@pytest.mark.parametrize("name", read_later())
@pytest.mark.parametrize("world", [1, 3], ids=str)
def test_a_donated_leaf_that_is_read_later_is_not_written_over(
    name: str, world: int
) -> None:
    step = read_later()[name]
    params = {"w": filled(5, 4)} | ({"v": filled(5, 4)} if name == "by_another" else {})
    args = params, filled(7, 5)
    sharded = agree(step, *args, world=world, donate_argnums=0)
    plan = sharded.lower(yf.distribute(args[0], mesh_of(world)), args[1]).plan
    assert len(plan.donated) == (name == "by_another")
    code = plan.instructions
    for output, place in plan.donated.items():
        written = next(n for n, i in enumerate(code) if Ref(output) in i.writes)
        for later in code[written + 1 :]:
            reads = later.transfer.held if isinstance(later, Wait) else later.reads
            assert place not in {plan.owner[ref.id] for ref in reads}


@fewer
@given(step=small_steps, mesh=meshes())
def test_donation_changes_no_result(step: RandomStep, mesh: DeviceMesh) -> None:
    yf.testing.assert_agrees(
        step.fn, *step.args, mesh=mesh, steps=2, donate_argnums=(0, 1)
    )
