"""The zoo: every model trains as it does unsharded, and moves only what it must."""

from collections import Counter
from typing import Any

import optree
import pytest
import torch
from support import agree, mesh_of
from zoo import ZOO

import yafsdp_fn as yf
from yafsdp_fn._program import Adjust, Compute, Start, Transfer

pytestmark = pytest.mark.usefixtures("one_thread")

World = int | tuple[int, int]
SETTINGS: list[tuple[World, int]] = [(2, 8), (3, 7), ((2, 2), 7)]  # mesh, rows

# Operators that bring values of the whole batch together, and so gather it: how often
# they do on each axis of a mesh. Every other model has no such operator.
GATHERING = {
    # Both towers' rows meet in the logits, forward and backward; their transpose is
    # normalised along the rows of the batch.
    "contrastive_towers": {"aten.mm.default": 2, "aten._log_softmax.default": 1},
    # In each of two layers an edge looks up nodes of other ranks, and their gradients.
    "graph_network": {"aten.index.Tensor": 2, "aten.index_select.default": 2},
}


@pytest.mark.parametrize(("world", "rows"), SETTINGS, ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_model_trains_as_unsharded(name: str, world: World, rows: int) -> None:
    step, *state, batch = ZOO[name](rows)
    sharded = agree(step, *state, batch, world=world)
    placed = [yf.distribute(tree, mesh_of(world)) for tree in state]
    plan = sharded.lower(*placed, batch).plan
    axes = 1 if isinstance(world, int) else len(world)
    wanted = {op: axes * count for op, count in GATHERING.get(name, {}).items()}
    assert unplanned(plan) == wanted


def unplanned(plan: yf.Program) -> Counter[str]:
    """How many unplanned collectives each operator causes."""
    transfers = [t for t in plan.transfers() if not t.planned]
    return Counter(", ".join(sorted(readers(plan, t))) for t in transfers)


def readers(plan: yf.Program, transfer: Transfer) -> set[str]:
    """Operators that read what a collective gives, also after more moves."""
    values = {*transfer.targets}
    found = set()
    for instruction in plan.instructions:
        if not values & {*instruction.reads}:
            continue
        if isinstance(instruction, Compute):
            found.add(str(instruction.op))
        elif isinstance(instruction, Adjust):
            values.update(instruction.writes)
        elif isinstance(instruction, Start):
            values.update(instruction.transfer.targets)
    return found


@pytest.mark.parametrize("name", ZOO)
def test_a_step_moves_every_parameter(name: str) -> None:
    step, params, *rest = ZOO[name](8)
    moved = optree.tree_map(
        lambda p, q: not torch.equal(p, q), params, step(params, *rest)[0]
    )
    assert all(optree.tree_leaves(moved)), moved


def test_the_zoo_is_the_same_each_time() -> None:
    for make in ZOO.values():
        (_, *first), (_, *second) = make(8), make(8)
        pairs = zip(leaves(first), leaves(second), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def leaves(tree: Any) -> list[torch.Tensor]:
    return [x for x in optree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
