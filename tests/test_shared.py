"""Messages through memory between processes of one host."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from support import assert_same

import yafsdp_fn as yf
from yafsdp_fn._arena import POOL
from yafsdp_fn._interpret import Runner

PROMPT_SECONDS = 30


def step(params: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    gradient = torch.func.grad(lambda w: (batch @ w.T).square().sum())(params)
    return params - 0.01 * gradient


def arguments(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(6 * width, dtype=torch.float64).view(6, width)
    return numbers / numbers.sum(), numbers.sin()[:5]


def run(width: int, steps: int) -> tuple[torch.Tensor, Runner]:
    """Steps on the ranks, compared with the plain one."""
    mesh = yf.make_mesh(fsdp=int(os.environ["WORLD_SIZE"]), device_type="cpu")
    sharded, (params, batch) = yf.shard(step), arguments(width)
    placed = yf.distribute(params, mesh)
    for _ in range(steps):
        placed, params = sharded(placed, batch), step(params, batch)
    assert_same(yf.full(placed), params)
    (compiled,) = sharded._cache.values()
    return yf.full(placed), compiled.executor


def both_ways() -> bool:
    found = []
    for shared in ("1", "0"):
        os.environ["YAFSDP_FN_SHARED_MEMORY"] = shared
        result, runner = run(4, 3)
        assert runner.near is not None
        assert all((near is not None) == (shared == "1") for near in runner.near)
        found.append(result)
    return bool(torch.equal(*found))


def test_memory_and_connections_give_the_same_bits() -> None:
    assert yf.launch(both_ways, nprocs=3) == [True] * 3


def grown() -> list[int]:
    """Bytes of the arena after a small program, a large one, and the small again."""
    sizes = []
    for width in (4, 4000, 4):
        run(width, 2)
        sizes.append(max(block.numel() for block in POOL.blocks.values()))
    return sizes


def test_an_arena_that_grows_is_mapped_anew_by_the_others() -> None:
    small, large, again = yf.launch(grown, nprocs=2)[0]
    assert small < large == again


def dies() -> None:
    sharded, (params, batch) = yf.shard(step), arguments(4)
    mesh = yf.make_mesh(fsdp=2, device_type="cpu")
    placed = yf.distribute(params, mesh)
    placed = sharded(placed, batch)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"rank 1 \(process \d+\) has ended"):
        sharded(placed, batch)


def test_the_others_learn_that_a_rank_has_died() -> None:
    start = time.monotonic()
    with pytest.raises(yf.LaunchError, match="rank 1 of 2 was killed by SIGKILL"):
        yf.launch(dies, nprocs=2)
    assert time.monotonic() - start < PROMPT_SECONDS
