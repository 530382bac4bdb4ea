"""Times a train step of a Llama, sharded by yafsdp_fn and by torch's own systems.

    python examples/benchmark.py                                  # 2 processes, gloo
    torchrun --nproc-per-node 2 examples/benchmark.py             # the same
    python examples/benchmark.py --systems ours                   # resident memory too
    python examples/benchmark.py --batch 1 --context 128 --dtype bfloat16

Every system computes with the pure functions of `train_llama.py`, from the same initial
values, on the same batches, in one thread a rank. They take turns, so that what else
the machine does falls on all of them. It is an error if their losses differ.
"""

import functools
import math
import os
import resource
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_llama as llama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import grad_and_value
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from train_llama import Batch, Hidden, Logits, Tokens, Tree, option

import yafsdp_fn as yf

WARM_UP = 2  # steps of each system that are not timed: tracing, first allocations
COMPARED = 5  # first steps whose losses must agree
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # relative, of a loss
LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 3e-4, 0.1, 1.0

Step = Callable[[Batch], Tensor]  # takes a global batch; gives this rank's mean loss


@dataclass(frozen=True)
class Config:
    """Every field is an option. Has all that `train_llama.py` reads of its own."""

    ranks: int = option(2, "ranks that share parameters and batch")
    batch: int = option(4, "sequences in a rank's part of the batch")
    context: int = option(256, "tokens in a sequence")
    rounds: int = option(5, "turns of each system")
    steps: int = option(2, "optimiser steps in a turn")
    vocabulary: int = option(8192, "number of different tokens")
    layers: int = option(6, "transformer layers")
    width: int = option(512, "size of the residual stream")
    heads: int = option(8, "query heads")
    kv_heads: int = option(8, "key and value heads; divides --heads")
    dtype: str = option("float32", "of the computation; or bfloat16")
    systems: str = option("ours,keep,fully_shard,ddp", "which to run, in this order")
    stock: bool = option(False, "leave torch's choice of float32 matrix product alone")
    seed: int = option(0, "seed of parameters and batches")

    tied: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dtype not in TOLERANCE:
            raise ValueError(f"--dtype {self.dtype}: write {' or '.join(TOLERANCE)}")
        if unknown := [n for n in self.systems.split(",") if n not in SYSTEMS]:
            raise ValueError(f"--systems: {unknown} are none of {', '.join(SYSTEMS)}")

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Llama's 8/3 of the width, rounded up to a multiple of 32."""
        return -(-8 * self.width // (3 * 32)) * 32

    @property
    def compute(self) -> Any:
        return getattr(torch, self.dtype)


def make_batches(config: Config, ranks: int, count: int) -> list[Batch]:
    """Global batches of random tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(config.seed)
    shape = (count, ranks * config.batch, config.context + 1)
    windows = torch.randint(config.vocabulary, shape, generator=generator)
    tokens, targets = windows[..., :-1].contiguous(), windows[..., 1:].contiguous()
    return [{"tokens": tokens[i], "targets": targets[i]} for i in range(count)]


def mean_loss(logits: Logits, targets: Tokens) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# -- Ours: a pure function ---------------------------------------------------------


class Ours:
    """A sharded function, and the state that it has made."""

    def __init__(self, config: Config, mesh: DeviceMesh, **knobs: Any) -> None:
        optimiser = yf.optim.chain(
            yf.optim.clip_by_global_norm(CLIP_NORM),
            yf.optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        )
        self.train_step = make_step(config, optimiser, yf.Schedule(**knobs))
        self.params = yf.distribute(llama.init_params(config), mesh)
        self.opt_state = optimiser.init(self.params)

    def __call__(self, batch: Batch) -> Tensor:
        found = self.train_step(self.params, self.opt_state, batch)
        self.params, self.opt_state, loss = found
        return loss


def make_step(config: Config, optimiser: Any, schedule: yf.Schedule) -> Any:
    def loss_fn(params: Tree, batch: Batch) -> Tensor:
        params = optree.tree_map(lambda p: p.to(config.compute), params)
        return mean_loss(
            llama.forward(params, batch["tokens"], config), batch["targets"]
        )

    @yf.shard(donate_argnums=(0, 1), schedule=schedule)
    def train_step(params: Tree, opt_state: Tree, batch: Batch) -> Any:
        grads, loss = grad_and_value(loss_fn)(params, batch)
        updates, opt_state = optimiser.update(grads, opt_state, params)
        return yf.optim.apply_updates(params, updates), opt_state, loss

    return train_step


@dataclass
class Part:
    """What a part of a step takes if it is done alone."""

    label: str
    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # seconds of a processor's work


def parts_alone(config: Config, mesh: DeviceMesh) -> list[Part]:
    """Our program's compute and its communication, each alone, in turns.

    However they are scheduled, a step takes no less than the longer of the two. Where
    the ranks share the processors with the network, it takes no less than the work of
    both.
    """
    ours = Ours(config, mesh)
    batch = make_batches(config, mesh.size(), 1)[0]
    compiled = ours.train_step.lower(ours.params, ours.opt_state, batch).compile()
    parts = [
        (Part("compute alone"), compiled.compute),
        (Part("communication alone"), compiled.communicate),
    ]
    for _, run in parts:
        run(ours.params, ours.opt_state, batch)  # binds the program, maps its memory
    for _ in range(config.rounds):
        for part, run in parts:
            dist.barrier()
            started, busy = time.perf_counter(), processors_busy()
            run(ours.params, ours.opt_state, batch)
            dist.barrier()
            part.seconds.append(time.perf_counter() - started)
            part.busy.append(processors_busy() - busy)
    return [part for part, _ in parts]


def processors_busy() -> float:
    """Seconds that a processor of this machine has worked so far, on average.

    For whomever: the kernel's part of the network counts. NaN where nobody says.
    """
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    except OSError:
        return math.nan
    user, nice, system, _idle, _waiting, *interrupts = map(int, fields)
    ticks = user + nice + system + sum(interrupts)
    return ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


# -- The peers: the same functions, in modules -------------------------------------


class Layer(nn.Module):
    """A layer's tensors as parameters, around the pure function of them."""

    def __init__(self, layer: Tree, config: Config) -> None:
        super().__init__()
        self.config = config
        for name, tensor in layer.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, x: Hidden) -> Hidden:
        named = self.named_parameters(recurse=False)
        layer = {name: p.to(self.config.compute) for name, p in named}
        return llama.transformer_layer(layer, x, self.config)


class Llama(nn.Module):
    """`train_llama.forward`, with a module for each layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        params = llama.init_params(config)
        self.dtype = config.compute
        self.layers = nn.ModuleList(Layer(layer, config) for layer in params["layers"])
        self.embedding = nn.Parameter(params["embedding"])
        self.norm = nn.Parameter(params["norm"])
        self.unembedding = nn.Parameter(params["unembedding"])

    def forward(self, tokens: Tokens) -> Logits:
        x = F.embedding(tokens, self.embedding.to(self.dtype))
        for layer in self.layers:
            x = layer(x)
        x = llama.rms_norm(x, self.norm.to(self.dtype))
        return F.linear(x, self.unembedding.to(self.dtype))


def fully_sharded(config: Config, mesh: DeviceMesh) -> Step:
    low = config.compute != torch.float32
    policy = MixedPrecisionPolicy(config.compute if low else None, torch.float32)
    model = Llama(config)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return module_step(model, mesh)


def data_parallel(config: Config, mesh: DeviceMesh) -> Step:
    return module_step(DistributedDataParallel(Llama(config)), mesh)


def module_step(model: nn.Module, mesh: DeviceMesh) -> Step:
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step(batch: Batch) -> Tensor:
        mine = {k: v.chunk(mesh.size())[mesh.get_rank()] for k, v in batch.items()}
        loss = mean_loss(model(mine["tokens"]), mine["targets"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimiser.step()
        optimiser.zero_grad()
        return loss.detach()

    return step


# -- Memory ------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """The peak of the bytes of all storages that operators have seen and that live.

    Counted after each operator, for fully_shard resizes storages. Not seen: what an
    operator allocates for itself, and the buffers inside of gloo.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls operators on shards, and they come here
        result = func(*args, **(kwargs or {}))
        for leaf in optree.tree_leaves([args, kwargs, result]):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self.storages.add(leaf.untyped_storage())
        self.peak = max(self.peak, sum(s.nbytes() for s in self.storages))
        return result


def peak_resident() -> float:
    """The most bytes that were ever resident in this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10


# -- Measuring ---------------------------------------------------------------------


SYSTEMS: dict[str, tuple[str, Callable[[Config, DeviceMesh], Step]]] = {
    "ours": ("ours", Ours),
    "keep": ("ours, keeping all", functools.partial(Ours, gather_memory=math.inf)),
    "fully_shard": ("fully_shard", fully_sharded),
    "ddp": ("DDP", data_parallel),
}
RATIOS = (("fully_shard", "ours"), ("DDP", "ours, keeping all"))


@dataclass
class System:
    """A system, and what has been measured of it on this rank."""

    label: str
    step: Step
    losses: list[float] = field(default_factory=list)  # of every step
    seconds: list[float] = field(default_factory=list)  # a step, of every round
    live_bytes: float = math.nan
    resident_bytes: float = math.nan

    def advance(self, batches: Sequence[Batch], count: int) -> None:
        for _ in range(count):
            self.losses.append(float(self.step(batches[len(self.losses)])))


def measure(config: Config, mesh: DeviceMesh) -> list[System]:
    total = WARM_UP + config.rounds * config.steps + 2
    batches = make_batches(config, mesh.size(), total)
    baseline = peak_resident()
    chosen = [SYSTEMS[name] for name in config.systems.split(",")]
    systems = []
    for label, build in chosen:  # memory first: ours is shared by all its programs
        systems.append(System(label, build(config, mesh)))
        systems[-1].advance(batches, WARM_UP)
        count_live_bytes(systems[-1], batches)
    for _ in range(config.rounds):
        for system in systems:
            take_turn(system, batches, config.steps)
    if len(systems) == 1:  # else nobody can say whose memory it is
        systems[0].resident_bytes = peak_resident() - baseline
    return systems


def take_turn(system: System, batches: Sequence[Batch], steps: int) -> None:
    dist.barrier()
    started = time.perf_counter()
    system.advance(batches, steps)
    dist.barrier()
    system.seconds.append((time.perf_counter() - started) / steps)


def count_live_bytes(system: System, batches: Sequence[Batch]) -> None:
    with LiveBytes() as live:
        system.advance(batches, 1)  # finds the buffers that a step uses late
        live.peak = 0
        system.advance(batches, 1)
    system.live_bytes = live.peak


def over_ranks(values: Sequence[float], how: Any) -> list[float]:
    reduced = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(reduced, how)
    return reduced.tolist()


def check_losses(systems: Sequence[System], tolerance: float) -> None:
    """Compare sums over ranks in the first steps with those of the first system."""
    sums = [over_ranks(s.losses[:COMPARED], dist.ReduceOp.SUM) for s in systems]
    for system, losses in zip(systems, sums, strict=True):
        for step, (found, wanted) in enumerate(zip(losses, sums[0], strict=True)):
            # Said this way round, a NaN fails as well.
            if not abs(found - wanted) <= tolerance * abs(wanted):
                ranks = dist.get_world_size()
                raise RuntimeError(
                    f"step {step}: the loss of {system.label} is {found / ranks:.7g}, "
                    f"that of {systems[0].label} {wanted / ranks:.7g}"
                )


# -- Output ------------------------------------------------------------------------


def ratio(above: System, below: System) -> float:
    """The median over rounds: what disturbs a round disturbs both systems."""
    return median(a / b for a, b in zip(above.seconds, below.seconds, strict=True))


def table(systems: Sequence[System]) -> str:
    title = f"ratio to {systems[0].label}"
    width = len(title) + 2
    lines = [f"{'':18}  s/step{title:>{width}}  peak live MB  peak RSS growth MB"]
    for system in systems:
        memory = (system.live_bytes / 1e6, system.resident_bytes / 1e6)
        live, resident = over_ranks(memory, dist.ReduceOp.MAX)
        grown = "" if math.isnan(resident) else f"{resident:.0f}"
        lines.append(
            f"{system.label:18}{median(system.seconds):8.3f}"
            f"{ratio(system, systems[0]):{width}.2f}{live:14.0f}{grown:>20}"
        )
    found = {system.label: system for system in systems}
    for above, below in RATIOS:
        if above in found and below in found:
            value = ratio(found[above], found[below])
            lines.append(f"{f'{above} / {below}':{26 + width - 5}}{value:5.2f}")
    return "\n".join(lines)


def bounds(ours: System, parts: Sequence[Part]) -> str:
    lines = [f"{'':21}seconds  processors busy"]
    for part in parts:
        seconds, busy = median(part.seconds), median(part.busy)
        lines.append(f"{part.label:21}{seconds:7.3f}{busy:17.3f}")
    longer = max(median(part.seconds) for part in parts)
    work = sum(median(part.busy) for part in parts)
    step = median(ours.seconds)
    lines.append(f"ours / the longer of them {step / longer:11.2f}")
    lines.append(f"ours / the processors' work {step / max(longer, work):9.2f}")
    return "\n".join(lines)


def describe(config: Config, ranks: int) -> str:
    count = sum(leaf.numel() for leaf in optree.tree_leaves(llama.init_params(config)))
    return (
        f"{count / 1e6:.1f} M parameters, {ranks} ranks, "
        f"{config.batch}×{config.context} tokens a rank, {config.dtype}"
    )


def benchmark(config: Config) -> None:
    """One rank's work."""
    torch.set_num_threads(1)
    if not config.stock:
        # Faster float32 products on some processors; on those that multiply bfloat16,
        # less precise ones. For all systems, since it is sharding that is compared.
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    ranks = int(os.environ.get("WORLD_SIZE", config.ranks))
    mesh = yf.make_mesh(fsdp=ranks, device_type="cpu")
    systems = measure(config, mesh)
    check_losses(systems, TOLERANCE[config.dtype])
    lines = [describe(config, ranks), table(systems)]
    if "ours" in config.systems.split(","):
        ours = next(system for system in systems if system.label == "ours")
        lines.append(bounds(ours, parts_alone(config, mesh)))
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)


def main() -> None:
    config = llama.parse_arguments(Config, str(__doc__).splitlines()[0])
    if "RANK" in os.environ:  # torchrun has started the ranks
        benchmark(config)
    else:
        yf.launch(benchmark, config, nprocs=config.ranks)


if __name__ == "__main__":
    main()
