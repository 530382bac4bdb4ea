"""The example that fine-tunes MiniLM: its pairs, its step, and what it writes."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import assert_same, example, llama, mesh_of

import yafsdp_fn as yf

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("HF_HUB_OFFLINE", "1")
    import transformers

    llama()  # the example imports of it
    finetune = example("finetune_embeddings")


def config(**options: Any) -> Any:
    small = {"steps": 4, "batch": 9, "context": 16, "held_out": 40}
    return finetune.Config(**{**small, "emulate": True, **options})


@functools.cache
def library() -> Sequence[Any]:
    return tuple(finetune.library_pairs())


@functools.cache
def loaded(folder: Path) -> Any:
    """The model of a folder, of whose weights none is missing and none too many."""
    model, found = transformers.AutoModel.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(found.values()), found
    return model


def by_transformers(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Embeddings as the card of the pretrained model says to compute them."""
    mask = (tokens != 0).long()
    with torch.no_grad():
        hidden = loaded(folder)(input_ids=tokens, attention_mask=mask)[0]
    weights = mask[..., None].expand_as(hidden).float()
    return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)


# --- pairs ----------------------------------------------------------------------------


def test_names_are_split_into_words() -> None:
    assert finetune.in_words("http.cookiejar.CookieJar._set_now") == (
        "http cookiejar cookie jar set now"
    )


def test_functions_are_found_wherever_they_are_defined() -> None:
    source = '''
def outer():
    """First line.

    Another one.
    """
    async def inner(): "In a function."
class Box:
    if True:
        def __len__(self): "In a class."
try: pass
except OSError as error:
    def caught(): "In a handler."
match 1:
    case 1:
        def matched(): "In a case."
def silent(): pass
'''
    found = finetune.documented(finetune.ast.parse(source), "module")
    assert [*found] == [
        ("module outer", "First line."),
        ("module outer inner", "In a function."),
        ("module box len", "In a class."),
        ("module caught", "In a handler."),
        ("module matched", "In a case."),
    ]


def test_pairs_depend_on_the_seed_and_not_on_the_order_of_files() -> None:
    found = finetune.split_pairs(library(), config())
    assert finetune.split_pairs(reversed(library()), config()) == found
    other = finetune.split_pairs(library(), config(seed=1))
    assert sorted(other[0] + other[1]) == sorted(found[0] + found[1])
    assert other[1] != found[1]


def test_what_is_held_out_shares_no_text_with_training() -> None:
    training, held_out = finetune.split_pairs(library(), config())
    assert (len(held_out), len(training) > 2000) == (40, True)
    words = [finetune.in_words(p.docstring) for p in (*training, *held_out)]
    names = [p.name for p in (*training, *held_out)]
    assert len(set(words)) == len(set(names)) == len(words)
    assert min(len(p.docstring.split()) for p in (*training, *held_out)) >= 4


def test_repeated_and_short_docstrings_are_left_out() -> None:
    rows = [
        ("b", "Close the open file."),
        ("a", "close the open File"),
        ("a", "Open the closed file."),
        ("c", "Close it."),
        ("d", "Open the closed door."),
    ]
    found = finetune.without_repeats([finetune.Pair(*row) for row in rows])
    assert found == [("a", "Open the closed file."), rows[0], rows[4]]


def test_batches_hold_each_pair_once_before_any_comes_again() -> None:
    pairs = torch.arange(20).reshape(20, 1, 1)
    batches = finetune.training_batches(pairs, config(batch=6))
    first = torch.cat([next(batches) for _ in range(3)])
    second = torch.cat([next(batches) for _ in range(3)])
    assert len(first.unique()) == len(second.unique()) == 18
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"batch": 1}, "--batch 1: write 2 or more"),
        ({"held_out": 0}, "--held-out 0: write 1 or more"),
        ({"steps": 0}, "--steps 0: write 1 or more"),
        ({"context": 513}, "--context 513: write a number from 3.* to 512"),
        ({"temperature": 0.0}, "--temperature 0.0: write a number above 0"),
    ],
    ids=str,
)
def test_options_that_cannot_be(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        config(**options)


def test_too_few_pairs_for_a_batch() -> None:
    pairs = [finetune.Pair(f"f{n}", f"Returns the number {n} twice.") for n in range(9)]
    with pytest.raises(ValueError, match=r"leaves 3 of 9 .* sum to 9 at most"):
        finetune.split_pairs(pairs, config(batch=4, held_out=6))


# --- loss and retrieval ---------------------------------------------------------------


def test_the_loss_is_the_formula_of_the_whole_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    names, docstrings = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    loss, accuracy = finetune.contrastive_loss(names, docstrings, 0.5)
    scores = (names @ docstrings.T / 0.5).exp()
    forth, back = (
        -(scores.diagonal() / scores.sum(dim)).log().mean() for dim in (1, 0)
    )
    torch.testing.assert_close(loss, (forth + back) / 2)
    assert accuracy == sum(int(row.argmax()) == n for n, row in enumerate(scores)) / 5


def test_retrieval_counts_names_that_find_their_docstrings() -> None:
    def embed(_: Any, batch: torch.Tensor) -> torch.Tensor:
        assert batch.shape == (6, 2)  # filled up
        return F.one_hot(batch[:, 0], 4).double() + batch[:, 1:] / 10

    # Three find theirs; the last one's is behind those of all others.
    pairs = torch.tensor([[[n, 0], [n, 0]] for n in range(3)] + [[[3, 0], [0, -9]]])
    found = finetune.retrieval(embed, {}, pairs, config(batch=3))
    assert found == "75.0% found first, mean reciprocal rank 0.812"


def test_a_wrong_gradient_is_no_rounding() -> None:
    grads = {"w": torch.ones(3)}
    finetune.check_step(grads, {"w": torch.ones(3) + 5e-5}, finetune.TOLERANCE)
    with pytest.raises(RuntimeError, match="differs from the unsharded one"):
        finetune.check_step(grads, {"w": torch.ones(3) + 2e-4}, finetune.TOLERANCE)


# --- the run --------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
def test_a_run_equals_the_unsharded_one_and_prints_what_it_finds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(finetune, "library_pairs", library)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # as many threads as it asks for
    settings = config(steps=3, check=2, output=str(tmp_path / "new" / "model"))
    finetune.train(settings)
    printed = capsys.readouterr().out
    assert printed.count("check: differs from the unsharded step by") == 2
    assert f"config and tokenizer written to {settings.output}\n" in printed

    tokens = finetune.tokenise(finetune.split_pairs(library(), settings)[1], settings)
    folders = {"before": finetune.PRETRAINED, "after": Path(settings.output)}
    for moment, folder in folders.items():
        (found,) = re.findall(rf"held-out {moment}: +(.*)\n", printed)
        # By transformers alone, of what is on disk.
        wanted = finetune.retrieval(by_transformers, folder, tokens, settings)
        assert found == wanted


@pytest.mark.usefixtures("one_thread")
def test_a_batch_is_learned_and_what_is_written_is_what_was_trained(
    tmp_path: Path,
) -> None:
    settings, mesh = config(), mesh_of(2)
    optimiser, model = finetune.make_optimiser(settings), finetune.make_model()
    functions = finetune.make_functions(settings, model, optimiser)
    params = finetune.read_pretrained(model.params, mesh)
    pairs = finetune.tokenise(finetune.split_pairs(library(), settings)[1], settings)
    texts = pairs[:5].flatten(0, 1)
    before = yf.full(functions.embed(params, texts))
    assert_close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-5)
    assert_close(before, by_transformers(finetune.PRETRAINED, texts))

    losses, opt_state = [], optimiser.init(params)
    for _ in range(4):
        params, opt_state, metrics = functions.train_step(params, opt_state, pairs[:9])
        losses.append(metrics["loss"].item())
    assert functions.train_step.trace_count() == 1
    # The first step is taken with the rate that the warm-up begins at, which is zero.
    assert losses[3] < 0.8 * losses[0]

    finetune.write_model(tmp_path, params, finetune.read_pretrained(model.pooler, mesh))
    after = yf.full(functions.embed(params, texts))
    assert_close(after, by_transformers(tmp_path, texts))
    assert (after - before).abs().max() > 1e-3
    like = yf.distribute(model.params, mesh)
    assert_same(yf.checkpoint.load_safetensors(tmp_path, like), yf.full(params), 0.0)


@pytest.mark.usefixtures("one_thread")
def test_what_is_written_has_its_tokenizer(tmp_path: Path) -> None:
    mesh, model = mesh_of(1), finetune.make_model()
    params = finetune.read_pretrained(model.params, mesh)
    finetune.write_model(tmp_path, params, finetune.read_pretrained(model.pooler, mesh))
    given, found = (
        transformers.AutoTokenizer.from_pretrained(folder)
        for folder in (finetune.PRETRAINED, tmp_path)
    )
    assert found("Sets a cookie.").data == given("Sets a cookie.").data
    assert found.model_max_length == given.model_max_length == finetune.POSITIONS


def test_no_gradient_is_taken_of_the_biases_that_softmax_takes_off() -> None:
    params = {"key": {"bias": torch.ones(2), "weight": torch.ones(2)}}

    def total(params: Any) -> torch.Tensor:
        key = finetune.without_key_biases(params)["key"]
        return (key["bias"] * key["weight"]).sum()

    found = torch.func.grad(total)(params)["key"]
    assert found["bias"].tolist() == [0, 0]
    assert found["weight"].tolist() == [1, 1]
