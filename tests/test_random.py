"""Random numbers of a key: a published generator, the same wherever they lie."""

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import MESHES, WORLDS, agree, mesh_of
from torch.func import grad, grad_and_value, vmap

import yafsdp_fn as yf
from yafsdp_fn import random
from yafsdp_fn.random._draws import DIGITS
from yafsdp_fn.random._normal import _log, _open_unit
from yafsdp_fn.random._philox import philox, two_words, words

KEY = random.key(2024)

# --- the generator --------------------------------------------------------------------

# The lines "philox4x32 10" of Random123's kat_vectors: counter, key, result.
KNOWN = (
    "00000000 00000000 00000000 00000000 00000000 00000000 "
    "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff "
    "408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 "
    "d16cfe09 94fdcceb 5001e420 24126ea1",
)


def reference(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10 as the paper writes it, in Python's unbounded integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        left, right = divmod(0xD2511F53 * a, 2**32), divmod(0xCD9E8D57 * c, 2**32)
        a, b, c, d = right[0] ^ b ^ k, right[1], left[0] ^ d ^ m, left[1]
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def drawn(counter: list[int], key: list[int]) -> list[int]:
    tensors = [torch.tensor(c) for c in counter]
    return [w.item() for w in philox(tensors, torch.tensor(key))]


@pytest.mark.parametrize("line", KNOWN)
def test_known_answers(line: str) -> None:
    numbers = [int(word, 16) for word in line.split()]
    counter, key, wanted = numbers[:4], numbers[4:6], numbers[6:]
    assert reference(counter, key) == wanted
    assert drawn(counter, key) == wanted


def test_agrees_with_python_integers() -> None:
    generator = torch.Generator().manual_seed(0)
    for row in torch.randint(2**32, (50, 6), generator=generator).tolist():
        assert drawn(row[:4], row[4:]) == reference(row[:4], row[4:])


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 8), (3, 5), (2, 3, 6), (0, 4)])
def test_words_are_those_of_the_index(shape: tuple[int, ...]) -> None:
    """Row-major; four neighbours of the last dimension share a counter."""
    found = random.bits(KEY, shape)
    assert found.shape == shape
    assert found.is_contiguous()
    if len(shape) < 2:
        wanted = [
            reference([n, 0, 0, 0], KEY.tolist())[0] for n in range(found.numel())
        ]
    else:
        quads = -(-shape[-1] // 4)
        wanted = [
            reference([row * quads + n // 4, 0, 0, 0], KEY.tolist())[n % 4]
            for row in range(math.prod(shape[:-1]))
            for n in range(shape[-1])
        ]
    assert found.flatten().tolist() == wanted


def test_counters_beyond_a_word_are_distinct() -> None:
    """No tensor here has more than 2**32 elements, but an index into one may be had."""
    index = torch.tensor([5, 2**32 + 5, 3 * 2**40 + 5])
    low, high = two_words(index, (2**20, 2**30))
    found = philox((low, high, 0, 0), KEY)[0].tolist()
    wanted = [[5, 0, 0, 0], [5, 1, 0, 0], [5, 3 * 2**8, 0, 0]]
    assert found == [reference(c, KEY.tolist())[0] for c in wanted]
    assert two_words(index, (2**32 - 1,))[1] == 0


def test_lanes_and_purposes_are_apart() -> None:
    keys = random.split(KEY, 4)
    folded = torch.stack([random.fold_in(KEY, n) for n in range(4)])
    bits = random.bits(KEY, (4,))
    lane = words(KEY, (4,), lane=1)
    everything = torch.cat([keys.flatten(), folded.flatten(), bits, lane]).tolist()
    assert len(set(everything)) == len(everything)


# --- keys -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "wanted"),
    [
        (0, [0, 0]),
        (2**32 + 3, [3, 1]),
        (-1, [2**32 - 1, 2**32 - 1]),
        (-(2**63), [0, 2**31]),
        (2**64 - 2, [2**32 - 2, 2**32 - 1]),
    ],
)
def test_key_holds_the_seed(seed: int, wanted: list[int]) -> None:
    made = random.key(seed)
    assert made.dtype == torch.int64
    assert made.tolist() == wanted


def test_split_gives_distinct_keys_whatever_their_number() -> None:
    keys = random.split(KEY, 1000)
    assert keys.shape == (1000, 2)
    assert len({tuple(k) for k in keys.tolist()}) == 1000
    assert torch.equal(random.split(KEY), keys[:2])
    assert random.split(KEY, 0).shape == (0, 2)


@pytest.mark.parametrize("number", [0, 7, -7, 2**40, 2**63 - 1, -(2**63)])
def test_fold_in_takes_numbers_and_tensors_alike(number: int) -> None:
    wanted = random.fold_in(KEY, torch.tensor(number))
    assert torch.equal(random.fold_in(KEY, number), wanted)
    assert not torch.equal(random.fold_in(KEY, number ^ 1), wanted)
    assert not torch.equal(random.fold_in(KEY, number ^ 2**40), wanted)


def test_fold_in_takes_every_integer_dtype() -> None:
    wanted = random.fold_in(KEY, 9)
    for dtype in (torch.int32, torch.uint8, torch.int16):
        assert torch.equal(random.fold_in(KEY, torch.tensor(9, dtype=dtype)), wanted)


# --- distributions: fixed keys, so that a test passes always or never -----------------

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def assert_uniform(counts: torch.Tensor) -> None:
    """Chi-square: counts of equally likely cells, within five standard deviations."""
    expected = counts.double().mean()
    cells = counts.numel() - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(statistic - cells) < 5 * math.sqrt(2 * cells), (statistic, cells)


def assert_distributed(
    values: torch.Tensor, cdf: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Kolmogorov and Smirnov's distance, at a level of one in a million."""
    values = values.double().flatten().sort().values
    ranks = torch.arange(len(values) + 1) / len(values)
    expected = cdf(values)
    distance = torch.maximum(ranks[1:] - expected, expected - ranks[:-1]).max().item()
    assert distance < 2.7 / math.sqrt(len(values)), distance


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item()


def test_the_statistics_find_what_is_wrong() -> None:
    with pytest.raises(AssertionError):
        assert_uniform(torch.tensor([1000, 1200, 900]))
    with pytest.raises(AssertionError):
        assert_distributed(torch.linspace(0, 0.98, 100_000), lambda x: x)


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_is_uniform(shift: int) -> None:
    for lane in (0, 1):
        byte = (words(KEY, (500, 200), lane) >> shift) & 255
        assert_uniform(torch.bincount(byte.flatten(), minlength=256))


def test_pairs_of_neighbours_are_uniform() -> None:
    nibbles = random.bits(KEY, (400, 256)) >> 28
    for a, b in ((nibbles[:, :-1], nibbles[:, 1:]), (nibbles[:-1], nibbles[1:])):
        assert_uniform(torch.bincount((a * 16 + b).flatten(), minlength=256))


def test_neighbouring_keys_and_counters_do_not_correlate() -> None:
    seeds = torch.stack([random.key(n) for n in range(300)])
    families = [seeds, random.split(KEY, 300), random.split(random.key(0), 300)]
    for keys in families:
        values = vmap(lambda k: random.uniform(k, (300,)))(keys)
        pairs = [(values[1:], values[:-1]), (values[:, 1:], values[:, :-1])]
        for a, b in pairs:
            assert abs(correlation(a.flatten(), b.flatten())) < 5 / math.sqrt(a.numel())


def test_a_bit_of_the_key_flips_half_of_the_bits() -> None:
    first = random.bits(random.key(0), (1000,))
    for flipped in (1, 2**31, 2**32, 2**63):
        changed = first ^ random.bits(random.key(flipped), (1000,))
        share = sum(int(n).bit_count() for n in changed) / 32_000
        assert abs(share - 0.5) < 0.014


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform(dtype: torch.dtype) -> None:
    values = random.uniform(KEY, (400, 250), dtype=dtype)
    assert values.dtype == dtype
    assert values.min() >= 0
    assert values.max() < 1
    step = 2.0 ** -DIGITS[dtype]
    if step < 1e-3:  # bfloat16 has too few values to look continuous
        assert_distributed(values.double() + step / 2, lambda x: x)
    assert torch.equal((values.double() / step).frac(), torch.zeros(400, 250).double())
    assert abs(values.double().mean().item() - 0.5 + step / 2) < 5 / math.sqrt(12e5)


def test_uniform_in_a_range() -> None:
    unit = random.uniform(KEY, (1000,))
    assert torch.equal(random.uniform(KEY, (1000,), -3, 5), -3 + 8 * unit)
    low = torch.arange(4.0)[:, None]
    rows = random.uniform(KEY, (4, 100), low, low + 1)
    assert torch.equal(rows.floor(), low.expand(4, 100))
    slope = grad(lambda high: random.uniform(KEY, (1000,), 0.0, high).sum())
    torch.testing.assert_close(slope(torch.tensor(2.0)), unit.sum())


@pytest.mark.parametrize("dtype", DTYPES)
def test_moments_of_normal(dtype: torch.dtype) -> None:
    values = random.normal(KEY, (500, 400), dtype).double()
    deviations = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}  # mean, variance
    for power, (mean, variance) in deviations.items():
        found = (values**power).mean().item()
        # A step of bfloat16 rounds moments by some thousandths.
        slack = 0.004 * mean if dtype == torch.bfloat16 else 0
        assert abs(found - mean) < 5 * math.sqrt(variance / values.numel()) + slack


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_normal_is_the_quantile_of_a_uniform_number(dtype: torch.dtype) -> None:
    unit = _open_unit(KEY, (500, 400), dtype)
    wanted = torch.special.ndtri(unit.double())
    found = random.normal(KEY, (500, 400), dtype)
    precision = 1e-14 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(found.double(), wanted, rtol=precision, atol=precision)
    assert_distributed(found, torch.special.ndtr)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ends_of_the_unit_interval(dtype: torch.dtype, monkeypatch: Any) -> None:
    """The least and the largest number that can be drawn are finite and opposite."""
    top = 2 ** (DIGITS[dtype] - 1) - 1
    ends = torch.tensor([0, top])
    monkeypatch.setattr("yafsdp_fn.random._normal.integers", lambda *_: ends)
    low, high = random.normal(KEY, (2,), dtype).tolist()
    assert high == pytest.approx(-low, rel=1e-6)
    assert 5 < high < 9
    assert random.categorical(KEY, torch.zeros(2, dtype=dtype)) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logarithm(dtype: torch.dtype) -> None:
    tiny = torch.logspace(-300 if dtype == torch.float64 else -37, 3, 4001, dtype=dtype)
    near = 1 + torch.linspace(-0.5, 0.5, 4001, dtype=dtype)
    for x in (tiny, near):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(_log(x), x.log(), rtol=4 * eps, atol=0)


@pytest.mark.parametrize("p", [0.0, 1e-4, 0.3, 0.5, 1.0])
def test_bernoulli(p: float) -> None:
    found = random.bernoulli(KEY, p, (400, 500))
    assert found.dtype == torch.bool
    spread = math.sqrt(p * (1 - p) / found.numel())
    assert abs(found.double().mean().item() - p) <= 5 * spread
    assert torch.equal(
        random.bernoulli(KEY, torch.tensor(p).double(), (400, 500)), found
    )


def test_bernoulli_takes_the_shape_of_its_probability() -> None:
    p = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert random.bernoulli(KEY, p).tolist() == [False, True, False, True]
    assert random.bernoulli(KEY).shape == ()


@pytest.mark.parametrize("length", [0, 1, 2, 7, 5000])
def test_permutation_holds_every_number_once(length: int) -> None:
    order = random.permutation(KEY, length)
    assert torch.equal(order.sort().values, torch.arange(length))


def test_every_permutation_is_as_likely() -> None:
    keys = random.split(KEY, 6000)
    orders = vmap(lambda k: random.permutation(k, 4))(keys)
    counts = Counter(map(tuple, orders.tolist()))
    assert len(counts) == 24
    assert_uniform(torch.tensor(list(counts.values())))


def test_permutation_of_rows() -> None:
    rows = torch.arange(12.0).reshape(6, 2)
    order = random.permutation(KEY, 6)
    assert torch.equal(random.permutation(KEY, rows), rows[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_categorical(dtype: torch.dtype) -> None:
    p = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125])
    logits = p.log().to(dtype)
    found = random.categorical(KEY, logits.expand(80_000, 5))
    counts = torch.bincount(found, minlength=5)
    assert counts[1] == 0
    spread = (p * (1 - p) / 80_000).sqrt()
    assert (
        abs(counts / 80_000 - p) <= 5 * spread + 2 * p * torch.finfo(dtype).eps
    ).all()


def test_categorical_along_a_dimension() -> None:
    logits = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])[..., None].expand(
        2, 2, 3
    )
    assert random.categorical(KEY, logits, 0).tolist() == [[0] * 3, [1] * 3]
    assert random.categorical(KEY, logits, 1).tolist() == [[0] * 3, [1] * 3]


# --- dropout --------------------------------------------------------------------------


def test_dropout_scales_what_it_keeps() -> None:
    x = 1 + random.uniform(random.key(1), (300, 400))
    found = random.dropout(KEY, x, 0.2)
    kept = found != 0
    assert abs(kept.double().mean().item() - 0.8) < 5 * math.sqrt(0.16 / x.numel())
    assert torch.equal(found, torch.where(kept, x * 1.25, 0.0))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
def test_dropout_keeps_the_dtype(dtype: torch.dtype) -> None:
    x = torch.ones(3, 4, dtype=dtype)
    for rate in (0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)):
        found = random.dropout(KEY, x, rate)
        assert found.dtype == dtype
        assert torch.equal(found, random.dropout(KEY, x, 0.5))


def test_dropout_of_nothing_is_exact() -> None:
    x = random.normal(KEY, (5, 7))
    for rate in (0, 0.0, torch.tensor(0.0)):
        assert torch.equal(random.dropout(KEY, x, rate), x)


def test_dropped_infinities_leave_zeros() -> None:
    x = torch.full((1000,), math.inf)
    slope = grad(lambda y: random.dropout(KEY, y, 0.5).nan_to_num(0, 0).sum())
    assert set(random.dropout(KEY, x, 0.5).tolist()) == {0.0, math.inf}
    assert not slope(x).isnan().any()


# --- pure -----------------------------------------------------------------------------

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bits": lambda key: random.bits(key, (3, 6)),
    "uniform": lambda key: random.uniform(key, (5,), -1, 1),
    "uniform64": lambda key: random.uniform(key, (2, 8), dtype=torch.float64),
    "normal": lambda key: random.normal(key, (2, 8)),
    "normal64": lambda key: random.normal(key, (2, 3), torch.float64),
    "bernoulli": lambda key: random.bernoulli(key, 0.3, (4, 4)),
    "permutation": lambda key: random.permutation(key, 6),
    "categorical": lambda key: random.categorical(key, torch.zeros(4, 3)),
    "dropout": lambda key: random.dropout(key, torch.ones(4, 4), 0.5),
    "split": lambda key: random.split(key, 3),
    "fold_in": lambda key: random.fold_in(key, 3),
    "scalar": lambda key: random.normal(key),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_vmap_over_keys_is_a_loop(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    keys = random.split(KEY, 5)
    assert torch.equal(vmap(draw)(keys), torch.stack([draw(k) for k in keys]))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_no_global_state(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    before, first = torch.get_rng_state(), draw(KEY)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        assert torch.equal(draw(KEY), first)
    assert torch.equal(KEY, random.key(2024))


@pytest.mark.parametrize("draw", [random.normal, random.uniform])
def test_a_part_has_the_bits_of_the_whole(draw: Callable[..., torch.Tensor]) -> None:
    """What is made of an element does not depend on how many are made beside it."""
    whole = draw(KEY, (999, 8))
    for rows in (1, 10, 33):
        assert torch.equal(whole[:rows], draw(KEY, (rows, 8)))


def test_the_same_mask_under_grad() -> None:
    x = random.normal(random.key(3), (6, 8))
    wanted = random.dropout(KEY, torch.ones(6, 8), 0.25)
    found = grad(lambda y: random.dropout(KEY, y, 0.25).sum())(x)
    assert torch.equal(found, wanted)
    per_row = vmap(grad(lambda y, k: random.dropout(k, y, 0.25).sum()))
    keys = random.split(KEY, 6)
    rows = [random.dropout(k, torch.ones(8), 0.25) for k in keys]
    assert torch.equal(per_row(x, keys), torch.stack(rows))


@pytest.mark.parametrize("world", [None, 2])
def test_the_same_mask_under_remat(world: int | None) -> None:
    """The recomputed mask is that of the forward pass, or the gradient would differ."""

    def step(
        wrap: Callable[..., Any],
        w: torch.Tensor,
        key: torch.Tensor,
        batch: torch.Tensor,
    ) -> Any:
        layer = wrap(lambda w, x, k: random.dropout(k, (x @ w).tanh(), 0.5))
        return grad(lambda w: layer(w, batch, key).square().sum())(w)

    def run(wrap: Callable[..., Any]) -> torch.Tensor:
        fn = functools.partial(step, wrap)
        if world is None:
            return fn(*args)
        mesh = mesh_of(world)
        placed = yf.distribute(args[0], mesh)
        return yf.full(yf.shard(fn, mesh=mesh)(placed, *args[1:]))

    w, batch = (random.normal(random.key(n), (6, 6)) for n in (1, 2))
    args = w, KEY, batch
    assert torch.equal(run(yf.remat), run(lambda fn: fn))


# --- on a mesh ------------------------------------------------------------------------


def masks(params: torch.Tensor, key: torch.Tensor, batch: torch.Tensor) -> Any:
    """What is drawn in a step, and the key of the next one."""
    ones = torch.ones_like(batch)
    drawn = {
        "mask": random.dropout(key, ones, 0.25),
        "words": random.bits(key, batch.shape),
        "noise": random.normal(random.fold_in(key, 1), batch.shape),
        "rows": random.normal(random.fold_in(key, 2), batch.shape[:1]),
        "order": random.permutation(random.fold_in(key, 3), len(batch)),
        "classes": random.categorical(random.fold_in(key, 4), torch.zeros_like(batch)),
        "weights": params * 0 + random.normal(key, params.shape, params.dtype),
        "each": vmap(lambda k, x: random.dropout(k, x, 0.5))(
            random.split(key, len(batch)), ones
        ),
    }
    noisy = (batch * drawn["mask"] + drawn["noise"]).reshape(len(batch), -1)
    return (
        params * 0.9,
        random.split(key)[0],
        {**drawn, "used": noisy.sum(1) + drawn["rows"]},
    )


@pytest.mark.parametrize(
    ("world", "shape"),
    [(w, (8, 3, 12)) for w in (*WORLDS, MESHES[0])] + [(4, (10, 6)), (3, (7,))],
)
def test_the_same_bits_on_every_mesh(world: Any, shape: tuple[int, ...]) -> None:
    """Two calls, the second with the key that the first one handed on."""
    mesh, batch = mesh_of(world), random.normal(random.key(9), shape)
    params, key = torch.ones(5, 4), KEY
    sharded = yf.shard(masks, mesh=mesh)
    placed = yf.distribute(params, mesh)
    for _ in range(2):
        _, after, found = sharded(placed, key, batch)
        _, key, wanted = masks(params, key, batch)
        assert torch.equal(yf.full(after), key)
        torch.testing.assert_close(yf.full(found["used"]), wanted.pop("used"))
        for name, value in wanted.items():
            assert torch.equal(yf.full(found[name]), value), name


Step = Callable[[Any, torch.Tensor, torch.Tensor], Any]


def train(params: Any, key: torch.Tensor, batch: torch.Tensor) -> Any:
    """Dropout on activations split with the batch, and noise on every row."""

    def loss(params: Any) -> torch.Tensor:
        first, second, third = random.split(key, 3)
        hidden = random.dropout(first, batch @ params["in"], 0.25)
        hidden = hidden + random.normal(second, hidden.shape, hidden.dtype)
        odd = random.dropout(third, hidden @ params["out"], 0.5)
        return odd.square().mean()

    grads, value = grad_and_value(loss)(params)
    stepped = {name: params[name] - 0.1 * grads[name] for name in params}
    return stepped, random.fold_in(key, 1), value


PARAMS = {
    "in": random.normal(random.key(1), (8, 12), torch.float64),
    "out": random.normal(random.key(2), (12, 7), torch.float64),
}
BATCH = random.normal(random.key(3), (8, 6, 8), torch.float64)


@pytest.mark.parametrize("world", [1, 3, MESHES[0]])
def test_training_with_dropout_agrees(world: Any) -> None:
    agree(train, PARAMS, KEY, BATCH, world=world, steps=1)


def held_whole(lowered: Any, rows: int) -> list[str]:
    """Values made in a step that span the batch on one rank alone."""
    plan = lowered.plan
    made = {ref.id for instruction in plan.instructions for ref in instruction.writes}
    return [
        str(value.meta)
        for number, value in plan.values.items()
        if number in made
        and len(value.meta.shape) > 1
        and value.meta.shape[0] == rows
        and value.meta.numel > 4 * rows
        and value.nbytes((0,) * len(plan.sizes)) == value.meta.nbytes
    ]


@pytest.mark.parametrize("world", [2, 3, (2, 2)])
def test_a_rank_makes_its_part_of_the_bits_alone(world: Any) -> None:
    mesh = mesh_of(world)
    batch = torch.cat([BATCH, BATCH])
    placed = yf.distribute(PARAMS, mesh)
    lowered = yf.shard(train, mesh=mesh).lower(placed, KEY, batch)
    assert held_whole(lowered, 16) == []
    alone = yf.shard(train, mesh=mesh_of(1)).lower(PARAMS, KEY, batch)
    assert len(held_whole(alone, 16)) > 100  # the question can be answered otherwise


def test_noise_on_sharded_state_is_made_in_shards() -> None:
    """Nothing is gathered, and nothing of the full shape is made."""

    def step(params: torch.Tensor, key: torch.Tensor, batch: torch.Tensor) -> Any:
        return params + random.normal(key, params.shape), batch.sum()

    mesh, params = mesh_of(4), torch.zeros(16, 24)
    lowered = yf.shard(step, mesh=mesh).lower(
        yf.distribute(params, mesh), KEY, torch.ones(4)
    )
    assert lowered.cost_analysis()["all_gathers"] == 0
    assert held_whole(lowered, 16) == []


def test_long_chains_of_noise_are_placed() -> None:
    """What waits for its placement may stand on more operators than Python recurses."""

    def step(params: torch.Tensor, key: torch.Tensor, batch: torch.Tensor) -> Any:
        noise = random.normal(key, (8, 8))
        for _ in range(500):
            noise = 0.99 * noise
        return params + noise, (batch @ (params + noise)).sum()

    params = torch.ones(8, 8)
    agree(step, params, KEY, torch.ones(4, 8), world=2, steps=1)


def test_a_live_rate_is_no_new_program() -> None:
    def step(
        params: torch.Tensor, key: torch.Tensor, rate: float, batch: torch.Tensor
    ) -> Any:
        mask = random.dropout(key, torch.ones_like(batch), rate)
        return params, {"mask": mask, "kept": random.bernoulli(key, rate, (8, 4))}

    mesh = mesh_of(2)
    sharded = yf.shard(step, mesh=mesh)
    batch, placed = torch.ones(8, 6), yf.distribute(torch.ones(4), mesh)
    for rate in (0.1, 0.5, 0.0):
        _, wanted = step(placed, KEY, rate, batch)
        _, found = sharded(placed, KEY, rate, batch)
        for name in wanted:
            assert torch.equal(yf.full(found[name]), wanted[name])
    texts = {sharded.lower(placed, KEY, r, batch).as_text() for r in (0.1, 0.5)}
    assert len(texts) == 1


def test_rows_of_different_ranks_differ() -> None:
    mesh = mesh_of(4)
    sharded = yf.shard(masks, mesh=mesh)
    _, _, found = sharded(yf.distribute(torch.ones(4), mesh), KEY, torch.ones(8, 40))
    for name in ("mask", "noise", "words", "each"):
        rows = {tuple(row) for row in yf.full(found[name]).tolist()}
        assert len(rows) == 8, name


# --- errors ---------------------------------------------------------------------------

ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "rate of 1": (lambda: random.dropout(KEY, torch.ones(2), 1.0), r"outside \[0, 1\)"),
    "negative rate": (lambda: random.dropout(KEY, torch.ones(2), -0.1), "rate=-0.1"),
    "rate NaN": (lambda: random.dropout(KEY, torch.ones(2), math.nan), "rate=nan"),
    "rate text": (lambda: random.dropout(KEY, torch.ones(2), "0.1"), "rate is a str"),
    "integers": (lambda: random.dropout(KEY, torch.ones(2).long(), 0.1), "x.float()"),
    "p above 1": (lambda: random.bernoulli(KEY, 1.1), r"p=1.1 is outside \[0, 1\]"),
    "seed as key": (lambda: random.normal(7, (2,)), r"yf.random.key\(seed\)"),
    "many keys": (lambda: random.bits(random.split(KEY)), "torch.func.vmap"),
    "float seed": (lambda: random.key(0.5), "Python int"),
    "huge seed": (lambda: random.key(2**64), r"outside \[-2\*\*63, 2\*\*64\)"),
    "huge data": (lambda: random.fold_in(KEY, 2**63), r"2\*\*63\)"),
    "float data": (lambda: random.fold_in(KEY, torch.tensor(1.0)), "integer tensor"),
    "many numbers": (lambda: random.fold_in(KEY, torch.ones(2).long()), "vmap"),
    "num": (lambda: random.split(KEY, -1), "num=-1"),
    "shape": (lambda: random.bits(KEY, (2, -1)), "shape="),
    "dtype": (lambda: random.uniform(KEY, (2,), dtype=torch.int64), "dtype="),
    "logits": (lambda: random.categorical(KEY, torch.ones(2).long()), "dtype="),
    "negative length": (lambda: random.permutation(KEY, -1), "length"),
    "no rows": (lambda: random.permutation(KEY, torch.tensor(1)), "rows"),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_to_write(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(yf.ArgumentError, match=message):
        call()
