# ruff: noqa: F722  (jaxtyping's shapes are strings that name dimensions)
"""Trains a byte-level Llama on the source text of Python's standard library.

    python examples/train_llama.py                                 # 2 processes, gloo
    torchrun --nproc-per-node 2 examples/train_llama.py            # the same
    python examples/train_llama.py --ranks 4 --emulate --check 3   # 4 ranks, 1 process
    python examples/train_llama.py --save run                      # checkpoints
    python examples/train_llama.py --resume run --ranks 3          # goes on from there

The model and the train step below are written for one device and the whole batch.
Sharding is two lines of `train`: a mesh, and `yf.distribute`.
"""

import argparse
import dataclasses
import itertools
import os
import resource
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.func import grad_and_value
from tqdm import tqdm

import yafsdp_fn as yf

VOCABULARY = 256
SEPARATOR = 0  # stands between two files; no file of the library contains it
HELD_OUT = 0.02
NO_PROGRAM = {"site-packages", "test", "tests", "idle_test"}
PROMPTS = ("def ", "class ")
TEMPERATURE = 0.8
TOLERANCE = 1e-5  # of --check: the order of float32 sums, nothing more

Tree = Any  # dicts, lists and tuples of tensors
Text = UInt8[Tensor, " bytes"]
Tokens = Int64[Tensor, "batch context"]
Batch = dict[str, Tensor]
Hidden = Float[Tensor, "batch context width"]
Heads = Float[Tensor, "batch heads context head_size"]
Logits = Float[Tensor, "batch context vocabulary"]


def option(default: int | float | bool | str, help: str) -> Any:
    """A field of `Config` that is also an option of the command line."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model, and where it runs; every field is an option."""

    ranks: int = option(2, "ranks that share parameters and batch")
    emulate: bool = option(False, "keep all ranks in this process")
    layers: int = option(3, "transformer layers")
    width: int = option(256, "size of the residual stream")
    heads: int = option(4, "query heads")
    kv_heads: int = option(2, "key and value heads; divides --heads")
    tied: bool = option(True, "one matrix embeds bytes and predicts them")

    @property
    def vocabulary(self) -> int:
        return VOCABULARY

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Llama's 8/3 of the width, rounded up to a multiple of 64."""
        return -(-8 * self.width // (3 * 64)) * 64


@dataclasses.dataclass(frozen=True)
class Config(Sizes):
    """And those of its training."""

    steps: int = option(300, "optimiser steps")
    batch: int = option(8, "sequences in the global batch")
    context: int = option(128, "bytes in a sequence")
    learning_rate: float = option(1e-3, "peak of the learning rate")
    check: int = option(0, "steps to compare with the unsharded step")
    save: str = option("", "folder for checkpoints, written in the background")
    save_every: int = option(100, "steps from one checkpoint to the next")
    resume: str = option("", "folder with a checkpoint of --save, to go on from")
    stop: int = option(0, "step to stop before, as if interrupted; 0: none")
    sample: int = option(200, "bytes to generate for each prompt")
    seed: int = option(0, "seed of parameters, batches and sample")


# -- Model: a pytree of parameters and pure functions of it ------------------------


def init_params(config: Config) -> Tree:
    """Normal weights of variance 1 / fan-in; `[out, in]`, as in `F.linear`."""
    generator = torch.Generator().manual_seed(config.seed)

    def normal(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        weight = torch.randn(rows, columns, generator=generator)
        return weight * (scale / columns**0.5)

    params = {
        "embedding": normal(config.vocabulary, config.width),
        "layers": [init_layer(config, normal) for _ in range(config.layers)],
        "norm": torch.ones(config.width),
    }
    if not config.tied:
        params["unembedding"] = normal(config.vocabulary, config.width)
    return params


def init_layer(config: Config, normal: Callable[..., Tensor]) -> Tree:
    width, hidden = config.width, config.hidden
    kv_width = config.kv_heads * config.head_size
    # Each layer adds two terms to the residual stream: keep the sum's variance.
    residual = (2 * config.layers) ** -0.5
    return {
        "attention_norm": torch.ones(width),
        "query": normal(width, width),
        "key": normal(kv_width, width),
        "value": normal(kv_width, width),
        "attention_out": normal(width, width, residual),
        "mlp_norm": torch.ones(width),
        "gate": normal(hidden, width),
        "up": normal(hidden, width),
        "down": normal(width, hidden, residual),
    }


def rms_norm(x: Hidden, gain: Float[Tensor, " width"]) -> Hidden:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain


def rotary(x: Heads) -> Heads:
    """Turns each pair of features by an angle proportional to the position."""
    context, head_size = x.shape[-2:]
    frequency = 10_000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    angle = torch.outer(torch.arange(context), frequency)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
    return turned.to(x.dtype)  # the angles are float32, features may be bfloat16


def attention(layer: Tree, x: Hidden, config: Config) -> Hidden:
    def heads(weight: Tensor) -> Heads:
        size = config.head_size
        return rearrange(F.linear(x, weight), "b c (h d) -> b h c d", d=size)

    def share(x: Heads) -> Heads:
        return repeat(x, "b h c d -> b (h g) c d", g=config.heads // config.kv_heads)

    query, key = rotary(heads(layer["query"])), rotary(heads(layer["key"]))
    mixed = F.scaled_dot_product_attention(
        query, share(key), share(heads(layer["value"])), is_causal=True
    )
    return F.linear(rearrange(mixed, "b h c d -> b c (h d)"), layer["attention_out"])


def swiglu(layer: Tree, x: Hidden) -> Hidden:
    gated = F.silu(F.linear(x, layer["gate"])) * F.linear(x, layer["up"])
    return F.linear(gated, layer["down"])


def transformer_layer(layer: Tree, x: Hidden, config: Config) -> Hidden:
    x = x + attention(layer, rms_norm(x, layer["attention_norm"]), config)
    return x + swiglu(layer, rms_norm(x, layer["mlp_norm"]))


def forward(params: Tree, tokens: Tokens, config: Config) -> Logits:
    """What the model expects after each byte."""
    x = F.embedding(tokens, params["embedding"])
    for layer in params["layers"]:
        x = transformer_layer(layer, x, config)
    unembedding = params["embedding" if config.tied else "unembedding"]
    return F.linear(rms_norm(x, params["norm"]), unembedding)


# -- The sharded functions ---------------------------------------------------------


Stepped = tuple[Tree, Tree, dict[str, Tensor]]  # parameters, state, metrics
Predict = Callable[[Tree, Batch], Logits]


class Functions(NamedTuple):
    train_step: Callable[[Tree, Tree, Batch], Stepped]
    evaluate: Callable[[Tree, Batch], Float[Tensor, ""]]
    predict: Predict


def make_functions(config: Config, optimiser: Any) -> Functions:
    """All that touches parameters: pure, and silent about sharding."""

    def loss_fn(params: Tree, batch: Batch) -> Float[Tensor, ""]:
        logits = forward(params, batch["tokens"], config)
        nll = F.cross_entropy(
            rearrange(logits, "b c v -> (b c) v"),
            rearrange(batch["targets"], "b c -> (b c)"),
            reduction="none",
        )
        # Ranks see different numbers of valid bytes: no mean of means gives this.
        mask = rearrange(batch["mask"], "b c -> (b c)")
        return (nll * mask).sum() / mask.sum()

    @yf.shard
    def train_step(params: Tree, opt_state: Tree, batch: Batch) -> Stepped:
        grads, loss = grad_and_value(loss_fn)(params, batch)
        updates, opt_state = optimiser.update(grads, opt_state, params)
        params = yf.optim.apply_updates(params, updates)
        return params, opt_state, {"loss": loss, "valid": batch["mask"].sum()}

    @yf.shard
    def predict(params: Tree, batch: Batch) -> Logits:
        return forward(params, batch["tokens"], config)

    return Functions(train_step, yf.shard(loss_fn), predict)


def make_optimiser(config: Config) -> Any:
    warmup = max(1, config.steps // 10)
    rate = yf.optim.warmup_cosine(config.learning_rate, warmup, config.steps)
    return yf.optim.chain(
        yf.optim.clip_by_global_norm(1.0), yf.optim.adamw(rate, weight_decay=0.1)
    )


# -- Text --------------------------------------------------------------------------


def read_corpus() -> tuple[Text, Text]:
    """The standard library in one piece: what to train on, what to hold out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(root) for path in sorted(root.rglob("*.py"))]
    programs = [file for file in files if NO_PROGRAM.isdisjoint(file.parts)]
    joined = bytes([SEPARATOR]).join((root / file).read_bytes() for file in programs)
    text = torch.frombuffer(bytearray(joined), dtype=torch.uint8)
    held_out = int(len(text) * HELD_OUT)
    return text[:-held_out], text[-held_out:]


def windows(text: Text, starts: Int64[Tensor, " batch"], config: Config) -> Batch:
    """The sequences that begin at `starts`, and the byte that follows each byte."""
    window = text[starts[:, None] + torch.arange(config.context + 1)].long()
    tokens, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()
    # The first byte of a file follows from nothing before it.
    return {"tokens": tokens, "targets": targets, "mask": tokens != SEPARATOR}


def training_batches(text: Text, config: Config, first: int = 0) -> Iterator[Batch]:
    """Global batches, the same on every rank: `shard` splits them.

    A batch is a function of its step: where training is in the data, the step says.
    """
    key, last = yf.random.key(config.seed), len(text) - config.context
    for step in itertools.count(first):
        drawn = yf.random.fold_in(key, step)
        places = yf.random.uniform(
            drawn, (config.batch,), high=last, dtype=torch.float64
        )
        yield windows(text, places.long(), config)


def held_out_batches(text: Text, config: Config, count: int = 16) -> Iterator[Batch]:
    """`count` batches of windows spread evenly over the text."""
    last = len(text) - config.context - 1
    starts = torch.linspace(0, last, count * config.batch, dtype=torch.float64).long()
    for chunk in starts.split(config.batch):
        yield windows(text, chunk, config)


def sample(predict: Predict, params: Tree, config: Config) -> list[str]:
    """Continues each prompt, a byte at a time, from the sharded parameters.

    The window has a fixed size, so that `predict` is traced once. The text stands at
    its left end: attention is causal, what is right of the last byte is not seen.
    """
    generator = torch.Generator().manual_seed(config.seed)
    texts = [list(prompt.encode()) for prompt in PROMPTS]
    for _ in range(config.sample):
        recent = [text[-config.context :] for text in texts]
        padded = [text + [0] * (config.context - len(text)) for text in recent]
        logits = yf.full(predict(params, {"tokens": torch.tensor(padded)}))
        for text, seen, row in zip(texts, recent, logits, strict=True):
            chances = torch.softmax(row[len(seen) - 1] / TEMPERATURE, dim=-1)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return [bytes(text).decode(errors="replace") for text in texts]


# -- Training ----------------------------------------------------------------------


class Progress:
    """A bar in a terminal, else a line every twenty steps; on the first rank only."""

    def __init__(self, config: Config, shown: bool) -> None:
        self.shown, self.terminal = shown, shown and sys.stderr.isatty()
        self.bar = tqdm(total=config.steps, unit="step", disable=not self.terminal)
        self.tokens = config.batch * config.context
        self.first = -1

    def update(self, step: int, loss: Tensor) -> None:
        if self.first < 0:  # traced and planned: the clock starts after it
            self.first, self.started = step, time.perf_counter()
        line = self.describe(step, loss)
        self.bar.set_postfix_str(line, refresh=False)
        self.bar.update()
        if not self.terminal and step % 20 == 0:
            self.print(f"step {step:4}  {line}")

    def describe(self, step: int, loss: Tensor) -> str:
        done = step - self.first
        rate = done * self.tokens / (time.perf_counter() - self.started)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        peak = f"peak RSS of rank 0 {resident:,.0f} MiB"
        return f"loss {loss.item():.3f}  {rate:,.0f} tokens/s  {peak}"

    def print(self, text: str) -> None:
        if self.shown:
            tqdm.write(text)
            sys.stdout.flush()


def largest_difference(found: Tree, wanted: Tree) -> Float[Tensor, ""]:
    """Over all leaves: the largest |a - b| of a leaf, over its largest |b|."""

    def relative(a: Any, b: Any) -> Tensor:
        a, b = (torch.as_tensor(leaf, dtype=torch.float64) for leaf in (a, b))
        return (a - b).abs().max() / b.abs().max().clamp(min=1e-300)

    pairs = zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True)
    return torch.stack([relative(a, b) for a, b in pairs]).max()


def check_step(found: Tree, wanted: Tree, tolerance: float = TOLERANCE) -> str:
    difference = largest_difference(yf.full(found), wanted).item()
    # Said this way round, a NaN fails as well.
    if not difference <= tolerance:
        raise RuntimeError(
            f"the sharded step differs from the unsharded one by {difference:.1e} "
            f"relative, more than {tolerance:.0e}"
        )
    return f"check: differs from the unsharded step by {difference:.1e} relative"


class State(NamedTuple):
    """All that training goes on from: what a checkpoint holds."""

    params: Tree
    opt_state: Tree
    step: int = 0  # the next one, and the next batch


def resumed(config: Config, state: State) -> State:
    """What was saved last, on this mesh: it may have been saved on another one."""
    if not config.resume:
        return state
    return yf.checkpoint.load(config.resume, state)


def train(config: Config) -> list[float]:
    """One rank's work; with `--emulate`, that of all ranks. Returns all losses."""
    ranks = int(os.environ.get("WORLD_SIZE", config.ranks))
    processes = 1 if config.emulate else ranks
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    mesh = yf.make_mesh(fsdp=ranks, emulate=config.emulate, device_type="cpu")
    progress = Progress(config, shown=os.environ.get("RANK", "0") == "0")

    text, held_out = read_corpus()
    optimiser = make_optimiser(config)
    functions = make_functions(config, optimiser)
    params = yf.distribute(init_params(config), mesh)
    state = resumed(config, State(params, optimiser.init(params)))
    plain = yf.full(state) if config.check else None
    count = sum(leaf.numel() for leaf in optree.tree_leaves(params))
    progress.print(f"{count / 1e6:.2f} M parameters, {len(text) / 1e6:.1f} MB of text")
    if state.step:
        progress.print(f"resumed before step {state.step}")

    losses, saving = [], None
    steps = range(state.step, config.stop or config.steps)
    for step, batch in zip(steps, training_batches(text, config, state.step)):  # noqa: B905
        params, opt_state, metrics = functions.train_step(*state[:2], batch)
        state = State(params, opt_state, step + 1)
        if plain and step < steps.start + config.check:
            # The function under the decorator, on one device and the whole batch.
            *whole, expected = functions.train_step.__wrapped__(*plain[:2], batch)
            plain = State(*whole)
            progress.print(check_step((*state[:2], metrics), (*whole, expected)))
        if config.save and (state.step % config.save_every == 0 or step == steps[-1]):
            saving = yf.checkpoint.async_save(config.save, state)
        losses.append(metrics["loss"].item())
        progress.update(step, metrics["loss"])
    progress.bar.close()
    if saving:
        saving.result()
        progress.print(f"saved to {config.save} before step {state.step}")
    report(functions, state, held_out, progress, config)
    return losses


def report(
    functions: Functions,
    state: State,
    held_out: Text,
    progress: Progress,
    config: Config,
) -> None:
    """What the model has learnt, and what a step moves."""
    unseen = held_out_batches(held_out, config)
    losses = [functions.evaluate(state.params, batch) for batch in unseen]
    progress.print(f"held-out loss: {torch.stack(losses).mean():.3f} nats a byte")
    batch = next(held_out_batches(held_out, config))
    progress.print(describe_step(functions.train_step.lower(*state[:2], batch)))
    for generated in sample(functions.predict, state.params, config):
        progress.print(f"--- sample\n{generated}")


def describe_step(lowered: Any) -> str:
    """What the plan of a step says that a rank moves and keeps."""
    # Both say "gathered_bytes": in all, which is shown, and at the peak of memory.
    found = lowered.memory_analysis() | lowered.cost_analysis()
    megabytes = {k: f"{v / 1e6:.2f} MB" for k, v in found.items() if "bytes" in k}
    return """a step, planned for one rank:
  gathered {gathered_bytes} in {all_gathers} all-gathers
  reduced {reduced_bytes} in {reductions} reductions
  kept {shard_bytes} of shards, at most {peak_bytes} in use
  unplanned collectives: {unplanned_collectives}""".format(**found | megabytes)


# -- Command line ------------------------------------------------------------------


def parse_arguments(config_type: type[Any], description: str) -> Any:
    """An instance of a dataclass whose fields are made by `option`."""
    parser = argparse.ArgumentParser(description=description)
    for field in dataclasses.fields(config_type):
        flag = "--" + field.name.replace("_", "-")
        text = f"{field.metadata['help']} (default: {field.default})"
        kind: dict[str, Any] = {"type": field.type}
        if field.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(flag, default=field.default, help=text, **kind)
    return config_type(**vars(parser.parse_args()))


def start(train: Callable[[Any], Any], config_type: type[Any], text: str) -> None:
    """Train on as many ranks as the command line says; `text` describes the script."""
    config = parse_arguments(config_type, text.splitlines()[0])
    if config.emulate or "RANK" in os.environ:  # torchrun has started the ranks
        train(config)
    else:
        yf.launch(train, config, nprocs=config.ranks)


if __name__ == "__main__":
    start(train, Config, __doc__)
