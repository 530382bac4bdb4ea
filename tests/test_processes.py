"""Real processes: the bits of the emulation, and errors that reach every rank.

A launch costs seconds, so each one makes many checks and returns what it found.
"""

import datetime
import functools
import importlib.util
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import assert_same, mesh_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import grad, grad_and_value, vmap

import yafsdp_fn as yf

PROMPT_SECONDS = 30

Tree = Any
World = int | tuple[int, int]


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1, count, dtype=torch.float64).view(shape).to(dtype)


# --- steps: each makes its function and its arguments ---------------------------------


def a_step_with_adamw() -> Any:
    optimiser = yf.optim.chain(
        yf.optim.clip_by_global_norm(0.5), yf.optim.adamw(0.1, weight_decay=0.1)
    )

    def loss_fn(params: Tree, batch: Tree) -> torch.Tensor:
        logits = F.gelu(batch["x"] @ params["w"].T + params["b"]) @ params["out"]
        nll = F.cross_entropy(logits, batch["y"], reduction="none")
        return (nll * batch["mask"]).sum() / batch["mask"].sum()

    def step(params: Tree, opt_state: Tree, batch: Tree) -> Any:
        grads, loss = grad_and_value(loss_fn)(params, batch)
        updates, opt_state = optimiser.update(grads, opt_state, params)
        return yf.optim.apply_updates(params, updates), opt_state, {"loss": loss}

    params = {"w": filled(5, 4), "b": filled(5), "out": filled(5, 3)}
    batch = {
        "x": filled(7, 4),
        "y": torch.arange(7) % 3,
        "mask": torch.arange(7) > 2,
    }
    return step, (params, optimiser.init(params), batch)


def a_step_in_bfloat16() -> Any:
    def step(params: Tree, batch: torch.Tensor) -> Any:
        def loss_fn(params: Tree) -> torch.Tensor:
            low = {name: leaf.bfloat16() for name, leaf in params.items()}
            return (batch.bfloat16() @ low["w"].T).float().square().mean()

        grads, loss = grad_and_value(loss_fn)(params)
        return {"w": params["w"] - 0.1 * grads["w"]}, loss

    return step, ({"w": filled(6, 8)}, filled(9, 8))


def a_tied_embedding() -> Any:
    def loss_fn(params: Tree, batch: torch.Tensor) -> torch.Tensor:
        logits = F.embedding(batch, params["e"]) @ params["e"].T
        return F.cross_entropy(logits, (batch + 1) % 7)

    def step(params: Tree, batch: torch.Tensor) -> Any:
        grads, loss = grad_and_value(loss_fn)(params, batch)
        return {"e": params["e"] - 0.5 * grads["e"]}, loss

    return step, ({"e": filled(7, 4)}, torch.arange(10) % 7)


def statistics_of_the_batch() -> Any:
    def step(state: Tree, batch: torch.Tensor) -> Any:
        mean = batch.mean(0)
        state = {
            "mean": 0.9 * state["mean"] + 0.1 * mean,
            "count": state["count"] + batch.shape[0],
            "seen": state["seen"] | (batch > 0).any(0),
        }
        metrics = {
            "max": batch.max(),
            "argmax": batch.argmax(0),
            "sum": (batch > 0).sum(),
            "var": batch.var(0),
            "sorted": batch.sort(0).values,
        }
        return state, metrics

    state = {
        "mean": torch.zeros(4),
        "count": torch.tensor(0),
        "seen": torch.zeros(4, dtype=torch.bool),
    }
    return step, (state, filled(10, 4))


def gradients_of_single_samples() -> Any:
    def loss_fn(w: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return (w @ row).square().sum()

    def step(w: torch.Tensor, batch: torch.Tensor) -> Any:
        each = vmap(grad(loss_fn), in_dims=(None, 0))(w, batch)
        norms = each.flatten(1).norm(dim=1)
        return w - 0.1 * (each / norms.clamp(min=1)[:, None, None]).mean(0), norms

    return step, (filled(3, 4), filled(5, 4))


def pairs_across_the_batch() -> Any:
    def loss_fn(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        z = F.normalize(batch @ w, dim=-1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(batch)))

    def step(w: torch.Tensor, batch: torch.Tensor) -> Any:
        value, loss = grad_and_value(loss_fn)(w, batch)
        return w - value, loss

    return step, (filled(4, 6), filled(8, 4).square())


def leaves_of_every_dtype() -> Any:
    def step(state: Tree, batch: torch.Tensor) -> Any:
        total = batch.sum()
        return {
            "complex": state["complex"] * total,
            "int8": state["int8"] + 1,
            "empty": state["empty"] * total,
            "one": state["one"] + total,
            "turned": state["turned"] * 2,
        }

    state = {
        "complex": filled(5, 2, dtype=torch.complex64),
        "int8": torch.arange(5, dtype=torch.int8),
        "empty": torch.zeros(0, 3),
        "one": filled(1, 6),
        "turned": filled(4, 6).t(),
    }
    return step, (state, filled(3))


STEPS: list[Callable[[], Any]] = [
    a_step_with_adamw,
    a_step_in_bfloat16,
    a_tied_embedding,
    statistics_of_the_batch,
    gradients_of_single_samples,
    pairs_across_the_batch,
    leaves_of_every_dtype,
]


# --- what a rank does -----------------------------------------------------------------


def real_mesh(world: World) -> DeviceMesh:
    """The mesh of all processes; what waits for nothing ends in an error."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    if isinstance(world, int):
        return yf.make_mesh(fsdp=world, device_type="cpu")
    return yf.make_mesh(replicate=world[0], fsdp=world[1], device_type="cpu")


def assert_same_bits(real: Any, emulated: Any) -> None:
    """A tree on real ranks holds the bits of its emulation, shard by shard."""
    assert optree.tree_structure(real) == optree.tree_structure(emulated)
    for one, other in zip(
        optree.tree_leaves(real), optree.tree_leaves(emulated), strict=True
    ):
        assert type(one) is DTensor or not isinstance(one, DTensor)
        if isinstance(one, DTensor):
            assert one.placements == other.placements
            assert one.stride() == other.stride()
            one = one.to_local()
            other = other.to_local()._local_tensors[dist.get_rank()]
        if isinstance(one, torch.Tensor):
            assert one.stride() == other.stride() or one.numel() <= 1
            assert one.dtype == other.dtype
            assert torch.equal(one, other), (one - other).abs().max()
        else:
            assert one == other


def three_steps(make: Callable[[], Any], world: World, donate: bool) -> None:
    """Plain, emulated and real steps side by side, each fed with its own results."""
    step, (*state, batch) = make()
    count = len(state)
    options = {"donate_argnums": range(count) if donate else ()}
    meshes = real_mesh(world), mesh_of(world)
    steps = [yf.shard(step, **options) for _ in meshes]
    trees = [yf.distribute(tuple(state), mesh) for mesh in meshes]
    for _ in range(3):
        wanted = step(*state, batch)
        real, emulated = (
            fn(*tree, batch) for fn, tree in zip(steps, trees, strict=True)
        )
        assert_same_bits(real, emulated)
        rtol = 1e-2 if make is a_step_in_bfloat16 else None
        assert_same(real, wanted, rtol)
        assert_same(emulated, wanted, rtol)
        if type(wanted) is not tuple:
            wanted, real, emulated = (wanted,), (real,), (emulated,)
        state = list(wanted[:count])
        trees = [real[:count], emulated[:count]]
    assert [fn.trace_count() for fn in steps] == [1, 1]


def failure_of(check: Callable[[], None]) -> str:
    """The trace-back of a check that fails, else nothing."""
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


# --- checks of one world only ---


def check_nothing() -> None:
    pass


def check_llama() -> None:
    path = Path(__file__).parents[1] / "examples" / "train_llama.py"
    spec = importlib.util.spec_from_file_location("train_llama", path)
    assert spec is not None
    assert spec.loader is not None
    llama = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(llama)
    settings = llama.Config(layers=1, width=16, heads=4, kv_heads=2, context=6)
    optimiser = llama.make_optimiser(settings)
    params = llama.init_params(settings)
    window = (torch.arange(5 * 7).view(5, 7) * 37) % 256
    batch = {"tokens": window[:, :-1], "targets": window[:, 1:]}
    batch["mask"] = batch["tokens"] > 40
    meshes, losses = (real_mesh(2), mesh_of(2)), []
    results = []
    for mesh in meshes:
        step = llama.make_functions(settings, optimiser).train_step
        state = yf.distribute((params, optimiser.init(params)), mesh)
        for _ in range(3):
            *state, metrics = step(*state, batch)
            losses.append(metrics["loss"].item())
        results.append((tuple(state), metrics))
    assert_same_bits(*results)
    assert losses[:3] == losses[3:]
    assert losses[0] > losses[2]


def check_trees() -> None:
    mesh = real_mesh(3)
    rank = dist.get_rank()
    tree = {"w": filled(5, 4), "i": torch.arange(4), "t": filled(4, 6).t(), "n": None}
    placed = yf.distribute(tree, mesh)
    assert_same(placed, tree)
    assert placed["w"].to_local().shape == ((2, 4), (2, 4), (1, 4))[rank]
    moved = yf.distribute(tree["w"], mesh, (Shard(1),))
    assert_same(moved, tree["w"])
    assert_same(yf.distribute(tree["w"], mesh, (Replicate(),)), tree["w"])
    with pytest.raises(yf.ArgumentError, match="has 2 ranks, but 3 process"):
        yf.make_mesh(fsdp=2)
    step = yf.shard(lambda batch: (batch["x"] * 2, batch["x"].sum(0)), mesh=mesh)
    for counts in ((2, 2, 2), (3, 3, 1), (1, 5, 1), (0, 4, 0), (0, 0, 2)):
        whole = filled(sum(counts), 2)
        start = sum(counts[:rank])
        batch = yf.from_local({"x": whole[start : start + counts[rank]]}, mesh)
        assert_same(batch, {"x": whole})
        assert_same(step(batch), (whole * 2, whole.sum(0)))


# --- all of it in one launch ---


def report(world: World, near: bool, other: Callable[[], None]) -> dict[str, str]:
    """All steps on one world, with and without donation, and one more check.

    Messages go through memory if ranks are `near`, else through connections.
    """
    os.environ["YAFSDP_FN_SHARED_MEMORY"] = str(int(near))
    found = {"other": failure_of(other)}
    for make in STEPS:
        for donate in (False, True):
            check = functools.partial(three_steps, make, world, donate)
            found[f"{make.__name__} {donate}"] = failure_of(check)
    return found


@functools.cache
def reports(world: World, near: bool = True) -> list[dict[str, str]]:
    nprocs = world if isinstance(world, int) else world[0] * world[1]
    other = {2: check_llama, 3: check_trees}.get(nprocs, check_nothing)
    return yf.launch(report, world, near, other, nprocs=nprocs)


# --- the comparison sees what it should ---


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.ones(3), "n": 2},
        {"a": torch.ones(2).double(), "n": 2},
        {"a": torch.tensor([1.0, 1.0 + 2**-23]), "n": 2},
        {"a": torch.ones(2), "n": 3},
        {"b": torch.ones(2), "n": 2},
    ],
)
def test_other_bits_are_found(other: Tree) -> None:
    tree = {"a": torch.ones(2), "n": 2}
    assert_same_bits(tree, {"a": torch.ones(2), "n": 2})
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same_bits(tree, other)
    assert "AssertionError" in failure_of(lambda: assert_same_bits(tree, {"n": 2}))


# --- the emulation is right -----------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "near"), [(2, True), (3, True), ((2, 2), True), (3, False)], ids=str
)
@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_processes_have_the_bits_of_the_emulation(
    make: Callable[[], Any], donate: bool, world: World, near: bool
) -> None:
    for rank, found in enumerate(reports(world, near)):
        failure = found[f"{make.__name__} {donate}"]
        assert not failure, f"rank {rank}: {failure}"


@pytest.mark.parametrize("world", [2, 3], ids=["llama", "trees and local rows"])
def test_processes_pass_the_checks_of(world: int) -> None:
    for rank, found in enumerate(reports(world)):
        assert not found["other"], f"rank {rank}: {found['other']}"


# --- ranks that differ ----------------------------------------------------------------


def doubled(params: torch.Tensor, batch: torch.Tensor) -> Any:
    return params * 2, batch.sum()


def differs_in_the_shape_of_the_batch(rank: int, mesh: DeviceMesh) -> Any:
    yf.shard(doubled, mesh=mesh)(filled(4), filled(8 - rank))


def differs_in_the_shape_of_the_state(rank: int, mesh: DeviceMesh) -> Any:
    yf.shard(doubled, mesh=mesh)(filled(4 + rank, 2), filled(8))


def differs_in_dtype(rank: int, mesh: DeviceMesh) -> Any:
    params = filled(4, dtype=(torch.float32, torch.float64)[rank > 0])
    yf.shard(doubled, mesh=mesh)(params, filled(8))


def differs_in_structure(rank: int, mesh: DeviceMesh) -> Any:
    tree = {"a": filled(4), **({"b": filled(3)} if rank else {})}
    yf.shard(lambda params, batch: (params, batch.sum()), mesh=mesh)(tree, filled(8))


def differs_in_a_static_value(rank: int, mesh: DeviceMesh) -> Any:
    step = yf.shard(lambda params, power, batch: params**power, mesh=mesh)
    step(filled(4), 2 + rank, filled(8))


def differs_in_a_captured_number(rank: int, mesh: DeviceMesh) -> Any:
    scale = 2.0 + rank
    yf.shard(lambda params, batch: params * scale, mesh=mesh)(filled(4), filled(8))


def differs_in_a_constant(rank: int, mesh: DeviceMesh) -> Any:
    def step(params: torch.Tensor, batch: torch.Tensor) -> Any:
        return params * torch.tensor([1.0, 2.0 + rank])

    yf.shard(step, mesh=mesh)(filled(4, 2), filled(8))


def differs_in_a_branch(rank: int, mesh: DeviceMesh) -> Any:
    def step(params: torch.Tensor, batch: torch.Tensor) -> Any:
        return params * batch.sum() if rank else params + batch.sum()

    yf.shard(step, mesh=mesh)(filled(4), filled(8))


def differs_in_placements(rank: int, mesh: DeviceMesh) -> Any:
    params = yf.distribute(filled(4, 4), mesh, (Shard(int(rank > 0)),))
    yf.shard(doubled)(params, filled(8))


def differs_in_purity(rank: int, mesh: DeviceMesh) -> Any:
    def step(params: torch.Tensor, batch: torch.Tensor) -> Any:
        return params * (batch.sum().item() if rank == 1 else 2.0)

    yf.shard(step, mesh=mesh)(filled(4), filled(8))


def differs_in_an_error_of_the_user(rank: int, mesh: DeviceMesh) -> Any:
    def step(params: torch.Tensor, batch: torch.Tensor) -> Any:
        return params * {0: 1.0, 2: 1.0}[rank]

    yf.shard(step, mesh=mesh)(filled(4), filled(8))


def differs_in_a_batch_without_dimension(rank: int, mesh: DeviceMesh) -> Any:
    yf.shard(doubled, mesh=mesh)(filled(4), filled(8).sum() if rank == 1 else filled(8))


def differs_in_a_leaf_that_cannot_be_hashed(rank: int, mesh: DeviceMesh) -> Any:
    tree = {"w": filled(4), "x": bytearray(2) if rank == 1 else 3}
    step = yf.shard(lambda params, batch: params["w"] * 2, mesh=mesh)
    step(tree, filled(8))


DIFFERENCES = [f for name, f in list(globals().items()) if name.startswith("differs_")]
RAISED_ON_RANK_1 = {
    differs_in_purity: ("TraceError", "reads the value"),
    differs_in_an_error_of_the_user: ("KeyError", "1"),
    differs_in_a_leaf_that_cannot_be_hashed: ("ArgumentError", "bytearray"),
    differs_in_a_batch_without_dimension: ("ArgumentError", "leading dimension"),
}


def quarrel(name: str) -> tuple[str, str, str]:
    """What a rank raises where ranks differ, and whether it can go on after it."""
    mesh = real_mesh(3)
    try:
        globals()[name](dist.get_rank(), mesh)
        raised = ("nothing", "")
    except Exception as error:
        raised = (type(error).__name__, str(error))
    return *raised, failure_of(lambda: check_peace(mesh))


def check_peace(mesh: DeviceMesh) -> None:
    args = filled(4), filled(8)
    assert_same(yf.shard(doubled, mesh=mesh)(*args), doubled(*args))


def quarrels() -> dict[str, tuple[str, str, str]]:
    return {differs.__name__: quarrel(differs.__name__) for differs in DIFFERENCES}


@functools.cache
def all_quarrels() -> list[dict[str, tuple[str, str, str]]]:
    return yf.launch(quarrels, nprocs=3)


@pytest.mark.parametrize("differs", DIFFERENCES, ids=lambda fn: fn.__name__)
def test_every_rank_raises_what_differs(differs: Any) -> None:
    for rank, found in enumerate(all_quarrels()):
        kind, message, later = found[differs.__name__]
        expected = RAISED_ON_RANK_1.get(differs)
        if expected and rank == 1:
            assert kind == expected[0]
            assert expected[1] in message
        else:
            assert kind == "MismatchError", (rank, kind, message)
            assert "rank 0 has" in message
            assert "rank 1 has" in message
            assert not expected or expected[1] in message
        assert not later, f"rank {rank} cannot go on: {later}"


# --- a rank that fails ----------------------------------------------------------------


def fails_in_step_2() -> None:
    step, (params, opt_state, batch) = a_step_with_adamw()
    sharded = yf.shard(step)
    params, opt_state = yf.distribute((params, opt_state), real_mesh(2))
    for number in range(4):
        if number == 2 and dist.get_rank() == 1:
            raise ValueError("the data loader of rank 1")
        params, opt_state, _ = sharded(params, opt_state, batch)


def test_a_rank_that_fails_in_step_2_ends_all_with_its_error() -> None:
    start = time.monotonic()
    with pytest.raises(yf.YafsdpError) as caught:
        yf.launch(fails_in_step_2, nprocs=2)
    assert time.monotonic() - start < PROMPT_SECONDS
    cause = str(caught.value).partition("Failed later")[0]
    assert "rank 1 of 2 raised" in cause
    assert "ValueError: the data loader of rank 1" in cause


# --- torchrun -------------------------------------------------------------------------

SCRIPT = """
import os, torch, yafsdp_fn as yf
mesh = yf.make_mesh(fsdp=int(os.environ["WORLD_SIZE"]), device_type="cpu")
step = yf.shard(lambda params, batch: (params - batch.mean(0), batch.sum()))
params = yf.distribute(torch.ones(5), mesh)
for _ in range(3):
    params, total = step(params, torch.ones(6, 5))
with open(f"{__file__}.{os.environ['RANK']}", "w") as file:
    file.write(f"{yf.full(params).tolist()} {total.item()}")
"""


def test_torchruns_processes_end_well_without_a_word_about_it(tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*torchrun, str(script)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        found = Path(f"{script}.{rank}").read_text()
        assert found == "[-2.0, -2.0, -2.0, -2.0, -2.0] 30.0"
