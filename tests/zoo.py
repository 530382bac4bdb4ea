"""A zoo of models: each a train step as a pure function, small and in float64.

A model is a function of the number of rows; it returns a step, its state and its batch.
Steps take `(params, optimiser state, ..., batch)` and return the next state and a loss.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

import yafsdp_fn as yf

Tree = dict[str, Any]
Model = tuple[Any, ...]  # the step, its state, and its batch

ZOO: dict[str, Callable[[int], Model]] = {}

WIDTH, HEADS, LENGTH, WORDS = 8, 2, 5, 11


def model(make: Callable[[int], Model]) -> Callable[[int], Model]:
    """Register a model under its function's name."""
    ZOO[make.__name__] = make
    return make


# --- parts that models share ----------------------------------------------------------


class Numbers:
    """Random numbers that depend on nothing but their order."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 0.5) -> Tensor:
        made = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return made * scale

    def below(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self.generator)


OPTIMISER = yf.optim.chain(
    yf.optim.clip_by_global_norm(1.0), yf.optim.adamw(1e-2, weight_decay=0.0)
)


def train(loss: Callable[..., Tensor], params: Tree, batch: Any) -> Model:
    """Adam, clipped, on a loss of `(params, batch)`."""

    def step(params: Tree, moments: Any, batch: Any) -> Any:
        grads, value = grad_and_value(loss)(params, batch)
        return *moved(params, moments, grads), {"loss": value}

    return step, params, OPTIMISER.init(params), batch


def train_with(loss: Callable[..., Any], params: Tree, extra: Any, batch: Any) -> Model:
    """The same on a loss of `(params, extra, batch)` that returns the next `extra`."""

    def step(params: Tree, moments: Any, extra: Any, batch: Any) -> Any:
        with_extra = grad_and_value(loss, has_aux=True)
        grads, (value, extra) = with_extra(params, extra, batch)
        return *moved(params, moments, grads), extra, {"loss": value}

    return step, params, OPTIMISER.init(params), extra, batch


def moved(params: Tree, moments: Any, grads: Tree) -> tuple[Tree, Any]:
    updates, moments = OPTIMISER.update(grads, moments, params)
    return yf.optim.apply_updates(params, updates), moments


def heads_of(x: Tensor, heads: int) -> Tensor:
    rows, length, width = x.shape
    return x.view(rows, length, heads, width // heads).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Heads `[rows, heads, length, width]` to `[rows, length, heads * width]`."""
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return mixed.transpose(1, 2).flatten(2)


def block_params(numbers: Numbers) -> Tree:
    """The weights of one transformer layer as GPT-2 has it."""
    return {
        "norm1": torch.ones(WIDTH).double(),
        "bias1": numbers.normal(WIDTH),
        "qkv": numbers.normal(3 * WIDTH, WIDTH),
        "out": numbers.normal(WIDTH, WIDTH),
        "norm2": torch.ones(WIDTH).double(),
        "bias2": numbers.normal(WIDTH),
        "up": numbers.normal(2 * WIDTH, WIDTH),
        "up_bias": numbers.normal(2 * WIDTH),
        "down": numbers.normal(WIDTH, 2 * WIDTH),
        "down_bias": numbers.normal(WIDTH),
    }


Drop = Callable[[Tensor, int], Tensor]


def block(p: Tree, x: Tensor, causal: bool, drop: Drop = lambda x, n: x) -> Tensor:
    """A transformer layer: attention and a GELU network, each behind a layer norm."""
    normed = F.layer_norm(x, (WIDTH,), p["norm1"], p["bias1"])
    q, k, v = (heads_of(t, HEADS) for t in F.linear(normed, p["qkv"]).chunk(3, -1))
    x = x + drop(F.linear(attention(q, k, v, causal), p["out"]), 0)
    normed = F.layer_norm(x, (WIDTH,), p["norm2"], p["bias2"])
    hidden = F.gelu(F.linear(normed, p["up"], p["up_bias"]), approximate="tanh")
    return x + drop(F.linear(hidden, p["down"], p["down_bias"]), 1)


def next_word_loss(logits: Tensor, words: Tensor) -> Tensor:
    """Cross-entropy of every word but the first; word 0 is padding."""
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), words[:, 1:].flatten(), ignore_index=0
    )


# --- language -------------------------------------------------------------------------


def rotated(x: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021)."""
    half = x.shape[-1] // 2
    rate = 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * rate
    a, b = x[..., :half], x[..., half:]
    turned = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos())
    return torch.cat(turned, -1)


def llama_layer(p: Tree, x: Tensor) -> Tensor:
    normed = F.rms_norm(x, (WIDTH,), p["norm1"])
    q = rotated(heads_of(normed @ p["q"].T, HEADS))
    k = rotated(heads_of(normed @ p["k"].T, 1)).expand_as(q)
    v = heads_of(normed @ p["v"].T, 1).expand_as(q)
    x = x + attention(q, k, v, causal=True) @ p["o"].T
    normed = F.rms_norm(x, (WIDTH,), p["norm2"])
    return x + (F.silu(normed @ p["gate"].T) * (normed @ p["up"].T)) @ p["down"].T


@model
def llama(rows: int) -> Model:
    """RMS norms, rotary positions, grouped heads, SwiGLU, a tied embedding."""
    numbers, half = Numbers(1), WIDTH // HEADS
    shapes = {"q": (WIDTH, WIDTH), "k": (half, WIDTH), "v": (half, WIDTH)}
    shapes |= {"o": (WIDTH, WIDTH), "gate": (12, WIDTH), "up": (12, WIDTH)}
    shapes |= {"down": (WIDTH, 12)}
    layers = [
        {k: numbers.normal(*shape) for k, shape in shapes.items()}
        | {"norm1": torch.ones(WIDTH).double(), "norm2": torch.ones(WIDTH).double()}
        for _ in range(2)
    ]
    params = {
        "words": numbers.normal(WORDS, WIDTH),
        "layers": layers,
        "norm": torch.ones(WIDTH).double(),
    }

    def loss(params: Tree, batch: Tensor) -> Tensor:
        x = F.embedding(batch, params["words"])
        for p in params["layers"]:
            x = llama_layer(p, x)
        logits = F.rms_norm(x, (WIDTH,), params["norm"]) @ params["words"].T
        return next_word_loss(logits, batch)

    return train(loss, params, numbers.below(WORDS, rows, LENGTH))


@model
def gpt2_with_dropout(rows: int) -> Model:
    """Learned positions, layer norms, GELU, and dropout from a key that moves on."""
    numbers = Numbers(2)
    params = {
        "words": numbers.normal(WORDS, WIDTH),
        "places": numbers.normal(LENGTH, WIDTH),
        "layers": [block_params(numbers) for _ in range(2)],
        "norm": torch.ones(WIDTH).double(),
        "bias": numbers.normal(WIDTH),
    }

    def loss(params: Tree, key: Tensor, batch: Tensor) -> Any:
        def drop(x: Tensor, place: int) -> Tensor:
            return yf.random.dropout(yf.random.fold_in(key, place), x, 0.2)

        x = drop(F.embedding(batch, params["words"]) + params["places"], 99)
        for n, p in enumerate(params["layers"]):
            x = block(p, x, True, lambda x, place, n=n: drop(x, 2 * n + place))
        x = F.layer_norm(x, (WIDTH,), params["norm"], params["bias"])
        logits = x @ params["words"].T
        return next_word_loss(logits, batch), yf.random.fold_in(key, 1)

    batch = numbers.below(WORDS, rows, LENGTH)
    return train_with(loss, params, yf.random.key(3), batch)


@model
def lstm(rows: int) -> Model:
    """A long short-term memory, unrolled, that predicts a number."""
    numbers = Numbers(3)
    params = {
        "in": numbers.normal(4 * WIDTH, 3),
        "again": numbers.normal(4 * WIDTH, WIDTH),
        "bias": numbers.normal(4 * WIDTH),
        "out": numbers.normal(1, WIDTH),
    }

    def loss(p: Tree, batch: Tree) -> Tensor:
        hidden = cell = batch["x"].new_zeros(batch["x"].shape[0], WIDTH)
        for x in batch["x"].unbind(1):
            gates = F.linear(x, p["in"], p["bias"]) + F.linear(hidden, p["again"])
            i, f, g, o = gates.chunk(4, -1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        return F.mse_loss((hidden @ p["out"].T).squeeze(-1), batch["y"])

    batch = {"x": numbers.normal(rows, LENGTH, 3), "y": numbers.normal(rows)}
    return train(loss, params, batch)


@model
def mixture_of_experts(rows: int) -> Model:
    """Two of four experts a row, and a loss that keeps their loads even."""
    numbers, experts = Numbers(4), 4
    params = {
        "route": numbers.normal(experts, WIDTH),
        "up": numbers.normal(experts, WIDTH, 12),
        "down": numbers.normal(experts, 12, WIDTH),
    }

    def loss(p: Tree, batch: Tensor) -> Tensor:
        shares = (batch @ p["route"].T).softmax(-1)
        top, chosen = shares.topk(2, -1)
        weights = torch.zeros_like(shares).scatter(-1, chosen, top / top.sum(-1, True))
        hidden = torch.einsum("nd,edh->enh", batch, p["up"]).relu()
        each = torch.einsum("enh,ehd->end", hidden, p["down"])
        mixed = torch.einsum("ne,end->nd", weights, each)
        loads = F.one_hot(chosen, experts).double().sum(1).mean(0)
        return (mixed - batch).square().mean() + (loads * shares.mean(0)).sum()

    return train(loss, params, numbers.normal(rows, WIDTH, scale=1.0))


# --- images ---------------------------------------------------------------------------


@model
def vision_transformer(rows: int) -> Model:
    """Patches by a convolution, a class token, two layers."""
    numbers = Numbers(5)
    params = {
        "patch": numbers.normal(WIDTH, 2, 3, 3),
        "patch_bias": numbers.normal(WIDTH),
        "token": numbers.normal(1, 1, WIDTH),
        "places": numbers.normal(1, 5, WIDTH),
        "layers": [block_params(numbers) for _ in range(2)],
        "head": numbers.normal(3, WIDTH),
    }

    def loss(p: Tree, batch: Tree) -> Tensor:
        x = F.conv2d(batch["x"], p["patch"], p["patch_bias"], stride=3)
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([p["token"].expand(x.shape[0], -1, -1), x], 1) + p["places"]
        for layer in p["layers"]:
            x = block(layer, x, causal=False)
        return F.cross_entropy(x[:, 0] @ p["head"].T, batch["y"], label_smoothing=0.1)

    batch = {"x": numbers.normal(rows, 2, 6, 6), "y": numbers.below(3, rows)}
    return train(loss, params, batch)


@model
def resnet_with_batch_norm(rows: int) -> Model:
    """Convolutions with a shortcut; running statistics of the whole batch."""
    numbers, channels = Numbers(6), 4
    params = {
        "stem": numbers.normal(channels, 2, 3, 3),
        "first": numbers.normal(channels, channels, 3, 3),
        "second": numbers.normal(channels, channels, 3, 3),
        "head": numbers.normal(3, channels),
        "scale": {n: torch.ones(channels).double() for n in "abc"},
        "shift": {n: numbers.normal(channels) for n in "abc"},
    }
    running = {n: torch.zeros(channels).double() for n in ("a", "b", "c")}
    running |= {f"{n}_var": torch.ones(channels).double() for n in "abc"}

    def loss(p: Tree, running: Tree, batch: Tree) -> Any:
        running = {k: v.clone() for k, v in running.items()}

        def normed(x: Tensor, n: str) -> Tensor:
            statistics = running[n], running[f"{n}_var"]
            return F.batch_norm(x, *statistics, p["scale"][n], p["shift"][n], True)

        x = normed(F.conv2d(batch["x"], p["stem"], padding=1), "a").relu()
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        inner = normed(F.conv2d(x, p["first"], padding=1), "b").relu()
        x = (x + normed(F.conv2d(inner, p["second"], padding=1), "c")).relu()
        pooled = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return F.cross_entropy(pooled @ p["head"].T, batch["y"]), running

    batch = {"x": numbers.normal(rows, 2, 6, 6), "y": numbers.below(3, rows)}
    return train_with(loss, params, running, batch)


@model
def diffusion_unet(rows: int) -> Model:
    """One step of denoising: noise from a key, times as waves, down and up again."""
    numbers, channels = Numbers(7), 4
    params = {
        "in": numbers.normal(channels, 2, 3, 3),
        "time": numbers.normal(channels, 6),
        "down": numbers.normal(channels, channels, 3, 3),
        "up": numbers.normal(channels, 2 * channels, 3, 3),
        "out": numbers.normal(2, channels, 1, 1),
        "scale": torch.ones(channels).double(),
        "shift": numbers.normal(channels),
    }

    def waves(time: Tensor) -> Tensor:
        angle = time[:, None] * torch.arange(1, 4, dtype=time.dtype) * math.pi
        return torch.cat([angle.sin(), angle.cos()], -1)

    def denoised(p: Tree, x: Tensor, time: Tensor) -> Tensor:
        x = (
            F.conv2d(x, p["in"], padding=1)
            + (waves(time) @ p["time"].T)[..., None, None]
        )
        low = F.silu(F.group_norm(x, 2, p["scale"], p["shift"]))
        low = F.conv2d(F.avg_pool2d(low, 2), p["down"], padding=1)
        high = F.interpolate(F.silu(low), scale_factor=2, mode="nearest")
        high = F.conv2d(torch.cat([x, high], 1), p["up"], padding=1)
        return F.conv2d(F.silu(high), p["out"])

    def loss(p: Tree, key: Tensor, batch: Tensor) -> Any:
        for_noise, for_time, after = yf.random.split(key, 3)
        noise = yf.random.normal(for_noise, batch.shape, dtype=batch.dtype)
        time = yf.random.uniform(for_time, (batch.shape[0],), dtype=batch.dtype)
        left = time.cos()[:, None, None, None]
        noisy = batch * left + noise * (1 - left.square()).sqrt()
        return F.mse_loss(denoised(p, noisy, time), noise), after

    batch = numbers.normal(rows, 2, 4, 4, scale=1.0)
    return train_with(loss, params, yf.random.key(4), batch)


# --- losses and graphs over the whole batch -------------------------------------------


@model
def contrastive_towers(rows: int) -> Model:
    """Two towers; every row is told from all the others (Radford et al., 2021)."""
    numbers = Numbers(8)
    params = {
        "left": numbers.normal(WIDTH, 6),
        "right": numbers.normal(WIDTH, 3),
        "temperature": torch.tensor(0.5).double(),
    }

    def loss(p: Tree, batch: Tree) -> Tensor:
        left = F.normalize((batch["left"] @ p["left"].T).tanh(), dim=-1)
        right = F.normalize((batch["right"] @ p["right"].T).tanh(), dim=-1)
        logits = left @ right.T * p["temperature"].exp()
        pairs = torch.arange(logits.shape[0])
        return F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)

    batch = {"left": numbers.normal(rows, 6), "right": numbers.normal(rows, 3)}
    return train(loss, params, batch)


@model
def graph_network(rows: int) -> Model:
    """Messages along edges are added up at nodes; both are split over the ranks."""
    numbers, edges = Numbers(9), 3 * rows
    params = {
        "in": numbers.normal(WIDTH, 3),
        "message": [numbers.normal(WIDTH, 2 * WIDTH) for _ in range(2)],
        "update": [numbers.normal(WIDTH, WIDTH) for _ in range(2)],
        "out": numbers.normal(3, WIDTH),
    }

    def loss(p: Tree, batch: Tree) -> Tensor:
        x = (batch["x"] @ p["in"].T).relu()
        source, target = batch["edges"].unbind(1)
        for message, update in zip(p["message"], p["update"], strict=True):
            pairs = torch.cat([x[source], x[target]], -1)
            added = torch.zeros_like(x).index_add(0, target, (pairs @ message.T).relu())
            x = x + (added @ update.T).tanh()
        return F.cross_entropy(x @ p["out"].T, batch["y"])

    batch = {
        "x": numbers.normal(rows, 3),
        "edges": numbers.below(rows, edges, 2),
        "y": numbers.below(3, rows),
    }
    return train(loss, params, batch)


@model
def private_gradients(rows: int) -> Model:
    """DP-SGD (Abadi et al., 2016): each row's gradient is clipped; noise from a key."""
    numbers = Numbers(10)
    params = {
        "first": numbers.normal(WIDTH, 4),
        "bias": numbers.normal(WIDTH),
        "second": numbers.normal(3, WIDTH),
    }

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        logits = (p["first"] @ x + p["bias"]).tanh() @ p["second"].T
        return F.cross_entropy(logits, y)

    def step(params: Tree, key: Tensor, batch: Tree) -> Any:
        each = vmap(grad(loss), (None, 0, 0))(params, batch["x"], batch["y"])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(
            dim=0
        )
        factors = (0.5 / norms).clamp(max=1.0)
        keys = dict(zip(params, yf.random.split(key, len(params)), strict=True))

        def private(name: str) -> Tensor:
            total = torch.einsum("n,n...->...", factors, each[name])
            noise = yf.random.normal(keys[name], total.shape, dtype=total.dtype)
            return (total + 0.1 * noise) / factors.shape[0]

        new = {k: p - 0.1 * private(k) for k, p in params.items()}
        return new, yf.random.fold_in(key, 1), {"norm": norms.mean()}

    batch = {"x": numbers.normal(rows, 4), "y": numbers.below(3, rows)}
    return step, params, yf.random.key(5), batch
