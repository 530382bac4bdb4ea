# ruff: noqa: F722  (jaxtyping's shapes are strings that name dimensions)
"""Aligns the byte-level Llama of `train_llama.py` with DPO: code that parses, or not.

    python examples/align_dpo.py                                 # 2 processes, gloo
    torchrun --nproc-per-node 2 examples/align_dpo.py            # the same
    python examples/align_dpo.py --ranks 4 --emulate --check 3   # 4 ranks, 1 process
    python examples/align_dpo.py --model FOLDER                  # what is aligned

FOLDER is a checkpoint of `train_llama.py --save FOLDER`, of a model of the same sizes.
Without it a base is pretrained first, for a short time.

Direct preference optimisation (Rafailov and others, arXiv:2305.18290) of low-rank
factors (Hu and others, arXiv:2106.09685) beside the frozen matrices of the base. The
base is also the reference model, so there is no second copy of it. It lies in shards,
is gathered for a step, and never reduced: it has neither gradients nor optimiser state.
"""

import ast
import dataclasses
import itertools
import os
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
import train_llama as llama
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.func import grad_and_value
from train_llama import Batch, Progress, Tree, check_step, forward, option

import yafsdp_fn as yf

ADAPTED = ("query", "key", "value", "attention_out", "gate", "up", "down")
ALPHA = 16.0  # the factors' product counts ALPHA / rank, so that ranks learn alike
LONGEST = 3  # bytes that a damage drops or repeats, at most
TRIES = 100  # damages of a function before it is given up

Margins = Float[Tensor, " pairs"]


@dataclasses.dataclass(frozen=True)
class Config(llama.Sizes):
    """Sizes of the model and of its alignment; every field is an option."""

    steps: int = option(120, "optimiser steps of the alignment")
    batch: int = option(8, "pairs in the global batch")
    context: int = option(128, "bytes in a sequence")
    model: str = option("", "folder of the base; empty: pretrain one")
    pretrain_steps: int = option(150, "optimiser steps of a base without --model")
    output: str = option("", "folder to save the factors to; empty: do not")
    lora_rank: int = option(8, "rank of the factors beside each matrix")
    beta: float = option(0.3, "how much a change of log-probability is worth")
    learning_rate: float = option(1e-3, "peak of the learning rate")
    check: int = option(0, "steps to compare, in float64, with the unsharded step")
    held_out: int = option(128, "pairs to measure the margin on")
    seed: int = option(0, "seed of parameters, pairs and batches")

    def __post_init__(self) -> None:
        least = {"lora_rank": 1, "batch": 1, "steps": 2, "pretrain_steps": 2}
        for name, count in least.items():
            if getattr(self, name) < count:
                flag = "--" + name.replace("_", "-")
                found = getattr(self, name)
                raise ValueError(f"{flag} {found}: write {count} or more")

    @property
    def base(self) -> llama.Config:
        """Of the model, and of its pretraining."""
        names = {field.name for field in dataclasses.fields(llama.Config)}
        own = {"steps", "batch", "learning_rate", "check"}  # mean the alignment here
        shared = {k: v for k, v in vars(self).items() if k in names - own}
        return llama.Config(steps=self.pretrain_steps, **shared)


# -- Pairs: a function of the standard library, and the same one damaged -----------


class Pair(NamedTuple):
    """Two ways to go on: after `prompt` one parses, the other does not."""

    prompt: bytes
    chosen: bytes
    rejected: bytes


def parsed(source: bytes) -> ast.Module | None:
    with warnings.catch_warnings():
        # An escape that Python does not know is a warning, and parses.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except SyntaxError:
            return None


def beginnings(text: bytes, limit: int) -> Iterator[tuple[bytes, bytes]]:
    """First lines of the top-level functions, and what follows up to the limit."""
    for file in text.split(bytes([llama.SEPARATOR])):
        lines = file.splitlines(keepends=True)
        for node in getattr(parsed(file), "body", ()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                chosen = body_within(lines, node, limit)
                if chosen:
                    yield lines[node.lineno - 1], chosen


def body_within(
    lines: Sequence[bytes], function: ast.FunctionDef | ast.AsyncFunctionDef, limit: int
) -> bytes:
    """As many whole statements as there is room for; empty if they say nothing."""
    best, first = b"", function.lineno
    for statement in function.body:
        body = b"".join(lines[first : statement.end_lineno])
        whole = lines[first - 1] + body
        described = isinstance(statement, ast.Expr)
        described &= isinstance(getattr(statement, "value", None), ast.Constant)
        # A docstring alone has no syntax to learn.
        if len(whole) <= limit and not described and body and parsed(whole):
            best = body
    return best


def miss(text: bytes, start: int, count: int, draw: random.Random) -> bytes:
    """Some bytes are missing or there twice, equally often: length says little."""
    end, times = start + count, draw.choice((0, 2))
    return text[:start] + text[start:end] * times + text[end:]


def unbalance(text: bytes, draw: random.Random) -> bytes:
    places = [found.start() for found in re.finditer(rb"[()\[\]{}:]", text)]
    return miss(text, draw.choice(places), 1, draw) if places else text


def indent_wrongly(text: bytes, draw: random.Random) -> bytes:
    places = [found.start() for found in re.finditer(rb"^ ", text, re.MULTILINE)]
    return miss(text, draw.choice(places), 1, draw) if places else text


def lose_bytes(text: bytes, draw: random.Random) -> bytes:
    start, count = draw.randrange(len(text)), draw.randint(1, LONGEST)
    return miss(text, start, count, draw)


def swap_lines(text: bytes, draw: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    if len(lines) > 1:
        n = draw.randrange(len(lines) - 1)
        lines[n : n + 2] = reversed(lines[n : n + 2])
    return b"".join(lines)


DAMAGES = (unbalance, indent_wrongly, lose_bytes, swap_lines)


def damaged(prompt: bytes, chosen: bytes, draw: random.Random) -> bytes:
    """What does not parse after the prompt; empty if no damage does it."""
    for _ in range(TRIES):
        rejected = draw.choice(DAMAGES)(chosen, draw)
        if not parsed(prompt + rejected):
            return rejected
    return b""


def make_pairs(text: bytes, config: Config) -> tuple[list[Pair], list[Pair]]:
    """What to align with, and what to hold out: every function is in one of them.

    The base may have read all of them; neither kind has it read damaged.
    """
    draw = random.Random(config.seed)
    limit = config.context + 1 - LONGEST  # a window has one byte more than the context
    distinct = list(dict.fromkeys(beginnings(text, limit)))
    draw.shuffle(distinct)
    pairs = [Pair(*both, damaged(*both, draw)) for both in distinct]
    pairs = [pair for pair in pairs if pair.rejected]
    most = len(pairs) - config.batch
    if not 0 < config.held_out <= most:
        raise ValueError(
            f"--held-out {config.held_out}: {len(pairs)} functions fit into --context "
            f"{config.context}, and a batch takes {config.batch}. Write --held-out "
            f"between 1 and {most}, or a larger --context."
        )
    return pairs[config.held_out :], pairs[: config.held_out]


def describe_pairs(training: Sequence[Pair], held_out: Sequence[Pair]) -> str:
    longer = [len(p.rejected) - len(p.chosen) for p in (*training, *held_out)]
    above, below = (sum(sign * n > 0 for n in longer) for sign in (1, -1))
    return (
        f"{len(training)} pairs to align with, {len(held_out)} held out; what is "
        f"rejected is longer in {above}, shorter in {below}, as long in "
        f"{len(longer) - above - below}"
    )


# -- Batches -----------------------------------------------------------------------


def encode(pairs: Sequence[Pair], config: Config) -> Batch:
    """Windows `[pair, chosen or rejected, byte]`; the mask has the bytes to judge."""
    both = [[p.prompt + each for each in (p.chosen, p.rejected)] for p in pairs]
    size = config.context + 1
    window = torch.tensor([[list(s.ljust(size, b"\0")) for s in row] for row in both])
    ends = torch.tensor([[len(sequence) for sequence in row] for row in both])
    begins = torch.tensor([len(pair.prompt) for pair in pairs])
    place = torch.arange(1, size)  # of what is to be predicted
    return {
        "tokens": window[..., :-1].contiguous(),
        "targets": window[..., 1:].contiguous(),
        "mask": (place >= begins[:, None, None]) & (place < ends[..., None]),
    }


def training_batches(pairs: Sequence[Pair], config: Config) -> Iterator[Batch]:
    """Global batches, the same on every rank: `shard` splits them."""
    draw = random.Random(config.seed)
    while True:
        yield encode(draw.sample(pairs, config.batch), config)


def held_out_batches(pairs: Sequence[Pair], config: Config) -> Iterator[Batch]:
    for start in range(0, len(pairs), config.batch):
        yield encode(pairs[start : start + config.batch], config)


# -- The policy: the base, and low-rank factors beside its matrices ----------------


class LowRank(NamedTuple):
    """A frozen matrix with factors beside it, where `forward` expects a matrix.

    `F.linear` hands itself over to it. The product of the factors is never made, so
    their gradients are the only ones: that of the sum would be as large as the matrix.
    """

    frozen: Float[Tensor, "out in"]
    a: Float[Tensor, "rank in"]
    b: Float[Tensor, "out rank"]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not F.linear:
            return NotImplemented
        return args[1].linear(args[0])

    def linear(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        low = F.linear(F.linear(x, self.a), self.b)
        return F.linear(x, self.frozen) + low * (ALPHA / self.a.shape[0])


def init_lora(base: Tree, config: Config) -> Tree:
    """Factors whose product is zero: the policy begins as the base."""
    generator = torch.Generator().manual_seed(config.seed + 1)  # not the base's numbers

    def factors(matrix: Float[Tensor, "out in"]) -> Tree:
        rows, columns = matrix.shape
        a = torch.randn(config.lora_rank, columns, generator=generator)
        return {"a": a / columns**0.5, "b": torch.zeros(rows, config.lora_rank)}

    def beside(layer: Tree) -> Tree:
        return {name: factors(layer[name]) for name in ADAPTED}

    return {"layers": [beside(layer) for layer in base["layers"]]}


def adapt(base: Tree, lora: Tree) -> Tree:
    """Parameters of the policy."""

    def beside(layer: Tree, factors: Tree) -> Tree:
        pairs = {n: LowRank(layer[n], **both) for n, both in factors.items()}
        return {**layer, **pairs}

    layers = zip(base["layers"], lora["layers"], strict=True)
    return {**base, "layers": [beside(*each) for each in layers]}


# -- The sharded functions ---------------------------------------------------------


Stepped = tuple[Tree, Tree, dict[str, Tensor]]  # factors, state, metrics


class Functions(NamedTuple):
    step: Callable[[Tree, Tree, Tree, Batch], Stepped]
    margins: Callable[[Tree, Tree, Batch], Margins]


def log_probabilities(
    params: Tree, batch: Batch, config: Config
) -> Float[Tensor, "pairs 2"]:
    """Of the chosen and the rejected bytes of each pair, after its prompt."""
    tokens = rearrange(batch["tokens"], "p s c -> (p s) c")
    logits = forward(params, tokens, config.base)
    nll = F.cross_entropy(
        rearrange(logits, "b c v -> (b c) v"),
        rearrange(batch["targets"], "p s c -> (p s c)"),
        reduction="none",
    )
    nll = rearrange(nll, "(p s c) -> p s c", s=2, c=config.context)
    return -(nll * batch["mask"]).sum(-1)


def make_functions(config: Config, optimiser: Any) -> Functions:
    """All that touches parameters: pure, and silent about sharding."""

    def margins_of(base: Tree, lora: Tree, batch: Batch) -> Margins:
        """By how much the policy, unlike the base, prefers what was chosen."""
        policy = log_probabilities(adapt(base, lora), batch, config)
        gained = policy - log_probabilities(base, batch, config)
        return config.beta * (gained[:, 0] - gained[:, 1])

    def loss_fn(lora: Tree, base: Tree, batch: Batch) -> Float[Tensor, ""]:
        return -F.logsigmoid(margins_of(base, lora, batch)).mean()

    @yf.shard
    def step(base: Tree, lora: Tree, opt_state: Tree, batch: Batch) -> Stepped:
        grads, loss = grad_and_value(loss_fn)(lora, base, batch)
        updates, opt_state = optimiser.update(grads, opt_state, lora)
        lora = yf.optim.apply_updates(lora, updates)
        return lora, opt_state, {"loss": loss}

    return Functions(step, yf.shard(margins_of))


# -- The base ----------------------------------------------------------------------


def prepare_base(config: Config, mesh: DeviceMesh, shown: bool) -> Tree:
    """The parameters of a checkpoint, without the state that they were trained with."""
    if not config.model:
        return pretrain(config, mesh, shown)
    like = yf.distribute(llama.init_params(config.base), mesh)
    found = yf.checkpoint.load(config.model, like={"params": like}, partial=True)
    return found["params"]


def pretrain(config: Config, mesh: DeviceMesh, shown: bool) -> Tree:
    """A base of our own: what `train_llama.py` does, for fewer steps."""
    progress = Progress(config.base, shown)
    steps = config.pretrain_steps
    progress.print(f"no --model: a base is pretrained first, for {steps} steps")
    optimiser = llama.make_optimiser(config.base)
    train_step = llama.make_functions(config.base, optimiser).train_step
    params = yf.distribute(llama.init_params(config.base), mesh)
    opt_state = optimiser.init(params)
    batches = llama.training_batches(llama.read_corpus()[0], config.base)
    for step, batch in enumerate(itertools.islice(batches, steps)):
        params, opt_state, metrics = train_step(params, opt_state, batch)
        progress.update(step, metrics["loss"])
    progress.bar.close()
    return params


def check_unchanged(base: Tree, before: Tree) -> str:
    """Bit by bit, for floats that are equal may differ: 0.0 and -0.0."""

    def bits(leaf: Tensor) -> Tensor:
        return leaf.contiguous().view(torch.uint8)

    now, then = optree.tree_leaves(yf.full(base)), optree.tree_leaves(before)
    names = [accessor.codify("base") for accessor in optree.tree_accessors(before)]
    rows = zip(names, now, then, strict=True)
    if changed := [name for name, a, b in rows if not torch.equal(bits(a), bits(b))]:
        raise RuntimeError(f"the frozen base has changed: {', '.join(changed)}")
    return f"base: all {len(names)} leaves are bit for bit what they were"


# -- Alignment ---------------------------------------------------------------------


class Aligned(NamedTuple):
    """Where an alignment stands."""

    base: Tree
    lora: Tree
    opt_state: Tree


def align(config: Config) -> None:
    """One rank's work; with `--emulate`, that of all ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", config.ranks))
    processes = 1 if config.emulate else ranks
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    mesh = yf.make_mesh(fsdp=ranks, emulate=config.emulate, device_type="cpu")
    shown = os.environ.get("RANK", "0") == "0"
    # A pair is two sequences.
    progress = Progress(dataclasses.replace(config, batch=2 * config.batch), shown)

    text = bytes(torch.cat(llama.read_corpus()).numpy())
    training, held_out = make_pairs(text, config)
    progress.print(describe_pairs(training, held_out))
    base = prepare_base(config, mesh, shown)
    before = optree.tree_map(torch.clone, yf.full(base))
    optimiser = llama.make_optimiser(config)
    functions = make_functions(config, optimiser)
    for line in check_steps(functions, optimiser, before, training, mesh, config):
        progress.print(line)

    lora = yf.distribute(init_lora(before, config), mesh)
    found = Aligned(base, lora, optimiser.init(lora))
    progress.print(f"before: {measure(functions, found, held_out, config)}")
    found = optimise(functions, found, training, config, progress)
    progress.print(f"after: {measure(functions, found, held_out, config)}")
    batch = next(training_batches(training, config))
    progress.print(describe_step(functions.step.lower(*found, batch), found))
    progress.print(check_unchanged(base, before))
    if config.output:
        yf.checkpoint.save(config.output, {"lora": found.lora})
        progress.print(f"saved the factors in {config.output}")


def optimise(
    functions: Functions,
    start: Aligned,
    pairs: Sequence[Pair],
    config: Config,
    progress: Progress,
) -> Aligned:
    base, lora, opt_state = start
    batches = itertools.islice(training_batches(pairs, config), config.steps)
    for step, batch in enumerate(batches):
        lora, opt_state, metrics = functions.step(base, lora, opt_state, batch)
        progress.update(step, metrics["loss"])
    progress.bar.close()
    return Aligned(base, lora, opt_state)


def measure(
    functions: Functions, found: Aligned, pairs: Sequence[Pair], config: Config
) -> str:
    """Margins of pairs that were held out; one of zero is no preference."""
    batches = held_out_batches(pairs, config)
    base, lora, _ = found
    parts = [yf.full(functions.margins(base, lora, batch)) for batch in batches]
    margins = torch.cat(parts)
    accuracy = f"{(margins > 0).float().mean():.1%} of {len(margins)} pairs held out"
    return f"mean margin {margins.mean():.3f}, above 0 in {accuracy}"


def check_steps(
    functions: Functions,
    optimiser: Any,
    base: Tree,
    pairs: Sequence[Pair],
    mesh: DeviceMesh,
    config: Config,
) -> Iterator[str]:
    """Compares the first steps with those on one device, beside the alignment.

    In float64: Adam divides the first gradients by their size, and gradients that are
    nothing but rounding errors as well.
    """
    trees = (base, init_lora(base, config))
    plain_base, lora = optree.tree_map(Tensor.double, trees)
    plain = (lora, optimiser.init(lora))
    placed_base, *placed = yf.distribute((plain_base, *plain), mesh)
    batches = itertools.islice(training_batches(pairs, config), config.check)
    for batch in batches:
        # The function under the decorator, on one device and the whole batch.
        found = functions.step(placed_base, *placed, batch)
        wanted = functions.step.__wrapped__(plain_base, *plain, batch)
        yield check_step(found, wanted)
        (*placed, _), (*plain, _) = found, wanted


def describe_step(lowered: Any, found: Aligned) -> str:
    counts = [sum(x.numel() for x in optree.tree_leaves(tree)) for tree in found]
    return (
        f"{llama.describe_step(lowered)}\n{describe_reductions(lowered, found.lora)}\n"
        "elements: base {:,}, factors {:,}, optimiser state {:,}".format(*counts)
    )


def describe_reductions(lowered: Any, lora: Tree) -> str:
    """Counts what the plan of a step reduces; raises if anything is of the base."""
    found: Counter[tuple[int, ...]] = Counter()
    labels: list[str] = []
    for transfer in lowered.plan.transfers():
        if transfer.kind != "all_gather":
            values = (lowered.plan.values[ref.id] for ref in transfer.sources)
            found.update(tuple(value.meta.shape) for value in values)
            labels += transfer.labels
    scalars = found.pop((), 0)
    factors = Counter(tuple(leaf.shape) for leaf in optree.tree_leaves(lora))
    named = [label for label in labels if label.startswith("base")]
    if found != factors or named:
        raise RuntimeError(
            f"the step reduces more than the factors: {found - factors}, {named}, or "
            f"not all of them: {factors - found}"
        )
    return (
        f"  reduced are {found.total()} LoRA factors and {scalars} scalars; "
        "of the base nothing"
    )


if __name__ == "__main__":
    llama.start(align, Config, str(__doc__))
