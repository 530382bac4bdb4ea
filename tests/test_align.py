"""DPO of the examples: its pairs, what it communicates, and that the base is frozen."""

import functools
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from support import assert_same, example, llama, mesh_of

import yafsdp_fn as yf

SIZES: dict[str, Any] = {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2}
SIZES |= {"batch": 5, "lora_rank": 3, "held_out": 10}


def dpo() -> Any:
    llama()  # which it imports
    return example("align_dpo")


def config(**options: Any) -> Any:
    return dpo().Config(**SIZES | options)


@functools.cache
def text() -> bytes:
    """A part of the standard library, with enough functions."""
    return bytes(llama().read_corpus()[0][:1_500_000].numpy())


@functools.cache
def pairs(seed: int = 0) -> Any:
    return dpo().make_pairs(text(), config(seed=seed))


def double(tree: Any) -> Any:
    return optree.tree_map(torch.Tensor.double, tree)


def start(settings: Any) -> tuple[Any, Any, Any, Any]:
    """The functions, the base, and factors with their state, plain and in float64."""
    optimiser = llama().make_optimiser(settings)
    base = double(llama().init_params(settings.base))
    lora = double(dpo().init_lora(base, settings))
    functions = dpo().make_functions(settings, optimiser)
    return functions, base, lora, optimiser.init(lora)


def batches(settings: Any, count: int) -> Any:
    return itertools.islice(dpo().training_batches(pairs()[0], settings), count)


# --- pairs ----------------------------------------------------------------------------


def test_what_is_chosen_parses_and_what_is_rejected_does_not() -> None:
    for pair in itertools.chain(*pairs()):
        assert dpo().parsed(pair.prompt + pair.chosen)
        assert not dpo().parsed(pair.prompt + pair.rejected)


def test_pairs_depend_on_the_seed_alone() -> None:
    assert dpo().make_pairs(text(), config()) == pairs()
    assert pairs(1) != pairs()


def test_no_function_is_held_out_and_learnt_from() -> None:
    training, held_out = ({pair[:2] for pair in part} for part in pairs())
    assert len(held_out) == 10
    assert len(training) == len(pairs()[0])
    assert not training & held_out


def test_length_says_little() -> None:
    both = [*itertools.chain(*pairs())]
    longer = [len(pair.rejected) - len(pair.chosen) for pair in both]
    assert max(map(abs, longer)) <= dpo().LONGEST
    share = sum(n > 0 for n in longer) / sum(n != 0 for n in longer)
    assert 0.35 < share < 0.65


def test_prompts_are_first_lines_and_docstrings_alone_are_left_out() -> None:
    source = (
        b'import a\ndef one(x):\n    """Says one."""\n    return (x)\ndef two():\n'
        b'    """Says two."""\n@a\ndef three(\n    x,\n): pass\n\ndef four(): pass\n'
    )
    found = list(dpo().beginnings(source + b"\0def broken(:\n", 100))
    assert found == [
        (b"def one(x):\n", b'    """Says one."""\n    return (x)\n'),
        (b"def three(\n", b"    x,\n): pass\n"),
    ]


def test_statements_are_whole() -> None:
    source = b"def f():\n    a = 1\n    b = [\n        2,\n    ]\n    return b\n"
    bodies = {
        limit: [body for _, body in dpo().beginnings(source, limit)]
        for limit in (10, 20, 30, len(source) - 1, len(source))
    }
    head, *lines, last = source.splitlines(keepends=True)
    one, two = lines[0], b"".join(lines)
    assert list(bodies.values()) == [[], [one], [one], [two], [two + last]]
    assert head + two + last == source


@pytest.mark.parametrize("count", [0, -1, 10_000])
def test_a_number_to_hold_out_that_is_not_there_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=r"Write --held-out between 1 and \d+"):
        dpo().make_pairs(text()[:300_000], config(held_out=count))


def test_numbers_that_are_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match="--lora-rank 0: write 1 or more"):
        config(lora_rank=0)
    with pytest.raises(ValueError, match="--pretrain-steps 1: write 2 or more"):
        config(pretrain_steps=1)


def test_the_mask_has_the_responses() -> None:
    chosen = dpo().encode(pairs()[1], config())
    for row, pair in enumerate(pairs()[1]):
        for side, response in enumerate((pair.chosen, pair.rejected)):
            seen = chosen["targets"][row, side][chosen["mask"][row, side]]
            assert bytes(seen.tolist()) == response


# --- the policy -----------------------------------------------------------------------


def test_factors_beside_a_matrix_are_their_product_added_to_it() -> None:
    settings = config()
    _, base, lora, _ = start(settings)
    for factors in lora["layers"]:
        for both in factors.values():
            both["b"] = torch.randn_like(both["b"])
    merged = {**base, "layers": [dict(layer) for layer in base["layers"]]}
    for layer, factors in zip(merged["layers"], lora["layers"], strict=True):
        for name, both in factors.items():
            layer[name] = layer[name] + both["b"] @ both["a"] * (16 / 3)
    tokens = torch.arange(2 * 128).reshape(2, 128) % 256
    found = dpo().forward(dpo().adapt(base, lora), tokens, settings.base)
    wanted = llama().forward(merged, tokens, settings.base)
    torch.testing.assert_close(found, wanted)
    assert (found - llama().forward(base, tokens, settings.base)).abs().max() > 0.1


# --- what is communicated -------------------------------------------------------------


def test_factors_are_reduced_once_and_the_base_never() -> None:
    settings = config()
    functions, base, lora, state = start(settings)
    placed = yf.distribute((base, lora, state), mesh_of(2))
    stage = functions.step.lower(*placed, *batches(settings, 1))
    yf.check(stage.plan)
    assert stage.cost_analysis()["unplanned_collectives"] == 0
    told = dpo().describe_reductions(stage, lora)
    # The square of the clip norm, and the loss.
    assert "28 LoRA factors and 2 scalars; of the base nothing" in told
    shapes = Counter(leaf.shape for leaf in optree.tree_leaves(state) if leaf.dim())
    factors = Counter(leaf.shape for leaf in optree.tree_leaves(lora))
    assert shapes == factors + factors  # two moments


def test_a_step_that_reduces_more_than_factors_is_told() -> None:
    settings = config()
    _, base, lora, _ = start(settings)
    optimiser = llama().make_optimiser(settings)
    train_step = llama().make_functions(settings.base, optimiser).train_step
    placed = yf.distribute((base, optimiser.init(base)), mesh_of(2))
    batch = next(llama().training_batches(torch.zeros(200).byte(), settings))
    stage = train_step.lower(*placed, batch)
    with pytest.raises(RuntimeError, match="reduces more than the factors"):
        dpo().describe_reductions(stage, lora)


# --- and it is right ------------------------------------------------------------------


def test_three_steps_are_those_of_one_device() -> None:
    settings = config()
    functions, base, *plain = start(settings)
    placed_base, *placed = yf.distribute((base, *plain), mesh_of(3))
    for batch in batches(settings, 3):
        *plain, wanted = functions.step.__wrapped__(base, *plain, batch)
        *placed, found = functions.step(placed_base, *placed, batch)
        assert_same((*placed, found), (*plain, wanted))


def test_margins_rise_from_zero_and_the_base_stays() -> None:
    settings = config(steps=8, learning_rate=0.02)
    functions, base, lora, state = start(settings)
    before = optree.tree_map(torch.clone, base)
    base, lora, state = yf.distribute((base, lora, state), mesh_of(2))
    (batch,) = batches(settings, 1)
    assert not yf.full(functions.margins(base, lora, batch)).any()
    for _ in range(settings.steps):
        lora, state, _ = functions.step(base, lora, state, batch)
    assert yf.full(functions.margins(base, lora, batch)).mean() > 0.01
    assert "bit for bit" in dpo().check_unchanged(base, before)
    # Equal, and yet not what it was.
    before["norm"], before["layers"][1]["up"] = torch.zeros(16), torch.zeros(64, 16)
    changed = optree.tree_map(torch.clone, before)
    changed["layers"][1]["up"][3, 2] = -0.0
    with pytest.raises(RuntimeError, match=r"changed: base\['layers'\]\[1\]\['up'\]$"):
        dpo().check_unchanged(changed, before)


@pytest.mark.usefixtures("one_thread")
def test_it_runs_from_a_checkpoint_and_saves_the_factors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = tmp_path / "model", tmp_path / "factors"
    folders = {"model": str(model), "output": str(output)}
    settings = config(layers=1, emulate=True, check=2, steps=2, **folders)
    params = yf.distribute(llama().init_params(settings.base), mesh_of(3))
    state = llama().make_optimiser(settings.base).init(params)
    yf.checkpoint.save(model, {"params": params, "opt_state": state, "step": 7})
    dpo().align(settings)
    printed = capsys.readouterr().out
    assert "pretrained" not in printed
    assert printed.count("check: differs from the unsharded step by") == 2
    assert "before: mean margin 0.000, above 0 in 0.0% of 10 pairs held out" in printed
    assert "after: mean margin " in printed
    assert "base: all 11 leaves are bit for bit what they were" in printed
    like = {"lora": dpo().init_lora(yf.full(params), settings)}
    found = yf.checkpoint.load(output, like)["lora"]
    assert all(both["b"].any() for both in found["layers"][0].values())
    other = config(layers=1, width=32, model=str(model))
    with pytest.raises(yf.checkpoint.CheckpointError, match="holds another tree"):
        dpo().prepare_base(other, mesh_of(2), shown=False)


@pytest.mark.usefixtures("one_thread")
def test_without_a_checkpoint_a_base_is_pretrained_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = config(layers=1, pretrain_steps=2, context=64)
    params = dpo().prepare_base(settings, mesh_of(2), shown=True)
    assert "no --model: a base is pretrained first" in capsys.readouterr().out
    initial = llama().init_params(settings.base)
    assert not torch.equal(yf.full(params)["embedding"], initial["embedding"])
