"""What a reader is told of a step: its schedule, its memory, and what it costs."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support import mesh_of
from torch.distributed.device_mesh import DeviceMesh
from torch.func import grad_and_value
from torch.utils.flop_counter import FlopCounterMode

import yafsdp_fn as yf
from yafsdp_fn._program import Compute, Program, Start, Transfer, Wait
from yafsdp_fn.testing import RandomStep, meshes, steps

Tree = dict[str, torch.Tensor]
ROWS, INPUTS, HIDDEN, OUTPUTS = 12, 8, 16, 4


def step(params: Tree, batch: torch.Tensor) -> Any:
    """A network of two layers, and a step of gradient descent."""

    def loss(params: Tree) -> torch.Tensor:
        return ((batch @ params["up"]).tanh() @ params["down"]).square().mean()

    grads, value = grad_and_value(loss)(params)
    return {
        name: p - grads[name] * grads[name].abs() for name, p in params.items()
    }, value


PARAMS = {"up": torch.ones(INPUTS, HIDDEN), "down": torch.ones(HIDDEN, OUTPUTS)}
BATCH = torch.ones(ROWS, INPUTS)


def lowered(world: Any = 2) -> yf.Lowered:
    return yf.shard(step, mesh=mesh_of(world)).lower(PARAMS, BATCH)


# --- the listing ----------------------------------------------------------------------

KIND = "(?P<kind>gather|reduce-scatter|all-reduce) (?P<number>[0-9]+): (?P<what>.+)"
START = re.compile(
    rf"start     {KIND}, (?P<size>[0-9.]+ (bytes|kB|MB)) over (?P<axis>[a-z]+)"
    "(, at (?P<places>[0-9]+[0-9., …]*?))?(?P<unplanned>, unplanned)?, "
    "under (nothing|(?P<under>[0-9]+) operators? of .+)"
)
WAIT = re.compile(f"wait      {KIND}")
RUN = re.compile("compute   .*, (?P<count>[0-9]+) operators?( on .+)?")


def size_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"bytes": 1, "kB": 1e3, "MB": 1e6}[unit]


def assert_starts(line: str, number: int, transfer: Transfer, plan: Program) -> None:
    found = START.fullmatch(line)
    assert found, line
    kind = transfer.kind.replace("all_gather", "gather").replace("_", "-")
    assert (found["kind"], int(found["number"])) == (kind, number)
    assert found["axis"] == plan.axes[transfer.axis]
    assert bool(found["unplanned"]) == (not transfer.planned)
    moved = sum(plan.values[ref.id].meta.nbytes for ref in transfer.sources)
    assert size_of(found["size"]) == pytest.approx(moved, rel=0.05)
    whole = transfer.targets if kind == "gather" else transfer.sources
    owners = [plan.owner[ref.id] for ref in whole]
    places = [plan.buffers[n] for n in owners if n in plan.buffers]
    ends = {number for place in places for number in (place.offset, place.end)}
    shown = [int(number) for number in re.findall("[0-9]+", found["places"] or "")]
    assert shown == sorted(shown)
    assert {*shown} <= ends
    assert shown[:1] == sorted(ends)[:1]
    assert not any(transfer.labels) or next(filter(None, transfer.labels)) in line
    position = plan.instructions.index(Start(transfer))
    between = plan.instructions[position : plan.instructions.index(Wait(transfer))]
    assert int(found["under"] or 0) == sum(isinstance(i, Compute) for i in between)


@settings(max_examples=settings().max_examples // 10)
@given(step=steps(most=6), mesh=meshes())
def test_a_collective_is_a_line_with_all_that_is_known_of_it(
    step: RandomStep, mesh: DeviceMesh
) -> None:
    stage = yf.shard(step.fn, mesh=mesh).lower(*step.args)
    plan, (head, *lines) = stage.plan, stage.as_text().splitlines()
    assert head.startswith(f"schedule on mesh {plan.mesh}, arena of ")
    assert size_of(head.split("arena of ")[1]) == pytest.approx(plan.arena, rel=0.05)
    starts = [line for line in lines if line.startswith("start")]
    transfers = list(plan.transfers())
    for number, (line, transfer) in enumerate(zip(starts, transfers, strict=True)):
        assert_starts(line, number, transfer, plan)
    waits = [WAIT.fullmatch(line) for line in lines if line.startswith("wait")]
    waited = [i.transfer for i in plan.instructions if isinstance(i, Wait)]
    assert [int(w["number"]) for w in waits if w] == [*map(transfers.index, waited)]
    runs = [RUN.fullmatch(line) for line in lines if line.startswith("compute")]
    operators = sum(isinstance(i, Compute) for i in plan.instructions)
    assert sum(int(run["count"]) for run in runs if run) == operators
    once = [f"once      {len(plan.constants)} operators on constants"]
    rest = [
        line for line in lines if line.split()[0] not in ("start", "wait", "compute")
    ]
    assert rest == (once if plan.constants else [])


GLANCE = """\
start     gather 0: params['up'], 512 bytes over fsdp, at …, under nothing
start     gather 1: params['down'], 256 bytes over fsdp, at …, under … operators of …
wait      gather 0: params['up']
compute   …, … operators on params['up']
wait      gather 1: params['down']
compute   …, … operators on params['down']
start     reduce-scatter 2: f32[16,4], 256 bytes over fsdp, at …, under … operators of …
"""


def test_a_small_step_is_read_at_a_glance() -> None:
    text = re.sub(r"\d+\.\.\d+", "…", lowered().as_text())
    text = re.sub(r"test_listing\.py:[\d,…]*[\d…]", "…", text)
    text = re.sub(r"\d+ operators", "… operators", text)
    assert GLANCE in text, text


@pytest.mark.parametrize("world", [1, 3, (2, 2)], ids=str)
def test_the_text_is_the_same_each_time(world: Any) -> None:
    first, second = lowered(world), lowered(world)
    assert first.as_text() == second.as_text() == first.compile().as_text()
    assert first.plan.as_text() == second.plan.as_text()
    assert first.cost_analysis() == second.cost_analysis()
    assert first.memory_analysis() == second.compile().memory_analysis()


# --- what it costs --------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 5, (2, 2)], ids=str)
def test_operations_are_those_of_the_products_of_a_rank(world: Any) -> None:
    ranks = world if isinstance(world, int) else 4
    rows = -(-ROWS // ranks)
    up, down = rows * INPUTS * HIDDEN, rows * HIDDEN * OUTPUTS
    # Forward, and backward towards weights and, but for the batch, operands.
    assert lowered(world).cost_analysis()["flops"] == 2 * (2 * up + 3 * down)


def test_operations_are_those_that_torch_counts() -> None:
    sharded = yf.shard(step, mesh=mesh_of(1))
    with FlopCounterMode(display=False):
        sharded(PARAMS, BATCH)
    with FlopCounterMode(display=False) as counter:
        sharded(PARAMS, BATCH)
    expected = sharded.lower(PARAMS, BATCH).cost_analysis()["flops"]
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize("world", [2, 3, (2, 2)], ids=str)
def test_collectives_are_counted(world: Any) -> None:
    stage = lowered(world)
    found = stage.cost_analysis()
    weights = 4 * (INPUTS * HIDDEN + HIDDEN * OUTPUTS)
    replicas = isinstance(world, tuple)
    reductions = {2: 4 + 1 + 1, 1: 2 + 1}[1 + replicas]
    assert found["all_gathers"] == 2
    assert found["gathered_bytes"] == weights
    assert found["reductions"] == reductions
    assert found["reduced_bytes"] == weights * (1 + replicas) + 4 * (1 + replicas)
    assert found["unplanned_collectives"] == 0
    assert found["collectives"] == sum(1 for _ in stage.plan.transfers())
    assert found["collectives"] <= found["all_gathers"] + found["reductions"]


def test_one_rank_communicates_nothing() -> None:
    found = lowered(1).cost_analysis()
    assert found.pop("flops")
    assert set(found.values()) == {0}


# --- what it holds --------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, (2, 2)], ids=str)
def test_memory_is_shards_and_arena_and_what_is_beside(world: Any) -> None:
    stage = lowered(world)
    found = stage.memory_analysis()
    names = ("peak", "shard", "constant", "arena", "output")
    kinds = ("gathered", "gradient", "activation", "temporary")
    assert set(found) == {f"{name}_bytes" for name in (*names, *kinds)}
    ranks = world if isinstance(world, int) else world[1]
    parts = 4 * (-(-INPUTS // ranks) * HIDDEN + -(-HIDDEN // ranks) * OUTPUTS)
    batch = -(-ROWS // (world if isinstance(world, int) else 4)) * INPUTS * 4
    made = [ref for each in stage.plan.constants for ref in each.writes]
    owners = {stage.plan.owner[ref.id] for ref in made}
    first = (0,) * len(stage.plan.sizes)
    constants = sum(stage.plan.values[n].nbytes(first) for n in owners)
    assert found["shard_bytes"] == parts + batch
    assert found["constant_bytes"] == constants
    assert found["output_bytes"] == parts + 4
    assert found["arena_bytes"] == stage.plan.arena
    there = ("shard", "constant", "arena")
    beside = found["peak_bytes"] - sum(found[f"{name}_bytes"] for name in there)
    assert found["output_bytes"] <= beside <= found["output_bytes"] + parts + 64
    inside = sum(found[f"{kind}_bytes"] for kind in kinds[:3])
    assert inside <= found["arena_bytes"]


def test_a_donated_result_needs_no_memory_beside() -> None:
    donating = yf.shard(step, mesh=mesh_of(2), donate_argnums=0)
    params = yf.distribute(PARAMS, mesh_of(2))
    found = donating.lower(params, BATCH).memory_analysis()
    kept = lowered(2).memory_analysis()
    assert found["shard_bytes"] == kept["shard_bytes"]
    assert kept["peak_bytes"] - found["peak_bytes"] == kept["output_bytes"] - 4
