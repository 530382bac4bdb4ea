"""functional: modules as trees and pure functions, plain and on a mesh."""

import copy
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from support import agree, assert_same, mesh_of
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jvp, vmap

import yafsdp_fn as yf

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("HF_HUB_OFFLINE", "1")
    import transformers

WORLDS = (1, 2, 3)
VOCABULARY = 40


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def randomised(module: nn.Module) -> nn.Module:
    """In float64, with parameters away from zero: a bias of zeros has no scale."""
    module.double()
    for seed, parameter in enumerate(module.parameters()):
        parameter.data.copy_(0.3 * normal(*parameter.shape, seed=seed) + 0.1)
    return module


def dotted(tree: Any) -> dict[str, torch.Tensor]:
    """A nested tree by qualified names."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    return {".".join(path): leaf for path, leaf in zip(paths, leaves, strict=True)}


def assert_equal(found: Any, wanted: Any) -> None:
    """Two trees are equal bit for bit."""
    assert optree.tree_structure(found) == optree.tree_structure(wanted)
    pairs = zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True)
    for have, want in pairs:
        assert torch.equal(have, want)
        assert have.dtype == want.dtype


# --- modules, and a batch for each ----------------------------------------------------

Case = tuple[nn.Module, dict[str, Any], Callable[[Any], torch.Tensor]]


class Perceptron(nn.Module):
    """Batch normalisation, a buffer that is reassigned, and a tied weight."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.norm = nn.BatchNorm1d(6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.layers[0].weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        hidden = F.gelu(self.norm(self.layers[0](input)))
        return self.tied(self.layers[1](hidden))


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def perceptron() -> Case:
    return Perceptron(), {"input": normal(7, 6)}, squares


def convolution() -> Case:
    parts = [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 3, 3),
        nn.Flatten(),
        nn.Linear(12, 5),
    ]
    return nn.Sequential(*parts), {"input": normal(6, 2, 8, 8)}, squares


def lstm() -> Case:
    module = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    return module, {"input": normal(6, 5, 3)}, lambda output: squares(output[0])


def encoder() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return module, {"src": normal(6, 5, 8)}, squares


def tokens(rows: int = 6) -> dict[str, torch.Tensor]:
    ids = (torch.arange(rows * 8).reshape(rows, 8) * 7 + 3) % VOCABULARY
    labels = ids.clone()
    labels[0] = -100  # a row without a target
    return {"input_ids": ids, "labels": labels}


def language_model(kind: str, **options: Any) -> Case:
    """A tiny random model; its config is all that is read."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config, model = {
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "bert": (transformers.BertConfig, transformers.BertForMaskedLM),
    }[kind]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 8,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if kind != "gpt2":
        sizes |= {"intermediate_size": 24}
    off = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob")
    off = (*off, "attention_probs_dropout_prob") if kind != "llama" else ()
    rates = dict.fromkeys(off, 0.0)
    made = model(config(**sizes, **rates, **options))
    return made, tokens(), lambda output: output.loss


def gpt2() -> Case:
    return language_model("gpt2")


def llama() -> Case:
    return language_model("llama", use_cache=False, num_key_value_heads=1)


def bert() -> Case:
    return language_model("bert")


CASES = [perceptron, convolution, lstm, encoder, gpt2, llama, bert]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


def prepared(case: Callable[[], Case]) -> Case:
    module, batch, loss = case()
    return randomised(module).train(), batch, loss


def train_step(apply: Any, loss: Callable[[Any], torch.Tensor]) -> Callable[..., Any]:
    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        output, buffers = apply(params, buffers, **batch)
        return loss(output), buffers

    def step(params: Any, buffers: Any, batch: Any) -> Any:
        take = grad_and_value(loss_fn, has_aux=True)
        grads, (value, buffers) = take(params, buffers, batch)
        params = optree.tree_map(lambda p, g: p - 0.1 * g, params, grads)
        return params, buffers, value

    return step


# --- it is the module -----------------------------------------------------------------


@each_case
def test_output_gradients_and_buffers_are_the_modules(
    case: Callable[[], Case],
) -> None:
    module, batch, loss = prepared(case)
    params, buffers, apply = yf.functional(module)
    for _ in range(3):  # the running statistics move
        leaves = optree.tree_map(lambda p: p.clone().requires_grad_(), params)
        output, buffers = apply(leaves, buffers, **batch)
        loss(output).backward()
        module.zero_grad()
        wanted = module(**batch)
        loss(wanted).backward()
        assert type(output) is type(wanted)
        assert torch.equal(loss(output), loss(wanted))
        assert_equal(dotted(buffers), dict(module.named_buffers()))
        grads = {name: leaf.grad for name, leaf in dotted(leaves).items()}
        assert_equal(grads, {n: p.grad for n, p in module.named_parameters()})


@each_case
def test_gradients_by_torch_func_are_those_by_autograd(
    case: Callable[[], Case],
) -> None:
    module, batch, loss = prepared(case)
    params, buffers, apply = yf.functional(module)
    grads = grad(lambda p: loss(apply(p, buffers, **batch)[0]))(params)
    loss(module(**batch)).backward()
    assert_same(dotted(grads), {n: p.grad for n, p in module.named_parameters()})


@each_case
def test_the_module_and_the_arguments_are_left_alone(case: Callable[[], Case]) -> None:
    module, batch, loss = prepared(case)
    before = {n: (id(t), t.clone()) for n, t in module.state_dict().items()}
    tensors = [*module.parameters(), *module.buffers()]
    values = [t.detach().clone() for t in tensors]
    attributes = [[*vars(part)] for part in module.modules()]
    params, buffers, apply = yf.functional(module)
    given = optree.tree_map(torch.clone, (params, buffers))
    train_step(apply, loss)(params, buffers, batch)
    yf.shard(train_step(apply, loss), mesh=mesh_of(2))(params, buffers, batch)
    assert_equal((params, buffers), given)
    assert before.keys() == module.state_dict().keys()
    assert [id(t) for t in [*module.parameters(), *module.buffers()]] == [
        id(t) for t in tensors
    ]
    assert_equal([t.detach() for t in tensors], values)
    assert [[*vars(part)] for part in module.modules()] == attributes
    assert all(p.grad is None for p in module.parameters())


def test_later_changes_of_the_module_change_nothing() -> None:
    module, batch, _ = prepared(perceptron)
    params, buffers, apply = yf.functional(module)
    wanted = apply(params, buffers, **batch)
    module.eval()
    module.register_forward_hook(lambda *_: torch.zeros(()))
    nn.init.zeros_(module.get_parameter("norm.weight"))
    assert_equal(apply(params, buffers, **batch), wanted)


def test_the_trees_are_plain_tensors_of_their_own() -> None:
    module = prepared(perceptron)[0]
    params, buffers, _ = yf.functional(module)
    pointers = {t.data_ptr() for t in [*module.parameters(), *module.buffers()]}
    for leaf in optree.tree_leaves((params, buffers)):
        assert type(leaf) is torch.Tensor
        assert not leaf.requires_grad
        assert leaf.data_ptr() not in pointers


def test_trees_follow_the_attributes() -> None:
    params, buffers, _ = yf.functional(Perceptron())
    assert params["layers"]["1"]["weight"].shape == (6, 6)
    assert set(buffers) == {"calls", "norm"}
    assert set(buffers["norm"]) == {
        "num_batches_tracked",
        "running_mean",
        "running_var",
    }


def test_evaluation_is_that_of_the_module_in_its_mode() -> None:
    module, batch, _ = prepared(convolution)
    params, buffers, apply = yf.functional(module.eval())
    output, after = apply(params, buffers, **batch)
    assert torch.equal(output, module(**batch))
    assert_equal(after, buffers)


def test_a_module_without_tensors() -> None:
    params, buffers, apply = yf.functional(nn.ReLU())
    assert (params, buffers) == ({}, {})
    assert torch.equal(
        apply({}, {}, torch.tensor([-1.0, 2.0]))[0], torch.tensor([0.0, 2])
    )


# --- tied and frozen ------------------------------------------------------------------


@pytest.mark.parametrize("case", [perceptron, gpt2])
def test_a_tied_weight_is_one_leaf_with_one_gradient(
    case: Callable[[], Case],
) -> None:
    module, batch, loss = prepared(case)
    params, buffers, apply = yf.functional(module)
    names = dict(module.named_parameters(remove_duplicate=False))
    assert len(optree.tree_leaves(params)) == len(names) - 1
    grads = grad(lambda p: loss(apply(p, buffers, **batch)[0]))(params)
    loss(module(**batch)).backward()
    first = next(iter(names))
    assert torch.equal(dotted(grads)[first], names[first].grad)


def test_gpt2s_head_is_its_embedding() -> None:
    params, _, _ = yf.functional(gpt2()[0])
    assert set(params) == {"transformer"}
    assert params["transformer"]["wte"]["weight"].shape == (VOCABULARY, 16)


def test_a_module_under_two_names_and_a_tied_buffer() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.BatchNorm1d(3)
            self.register_buffer("mean", self.first.running_mean)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)) + self.mean

    module = Twice()
    params, buffers, apply = yf.functional(module)
    assert sorted(dotted(params)) == ["first.bias", "first.weight"]
    assert len(dotted(buffers)) == 3
    x = normal(4, 3).float()
    for _ in range(2):
        output, buffers = apply(params, buffers, x)
        assert torch.equal(output, module(x))
    assert_equal(dotted(buffers), dict(module.named_buffers()))
    assert module.first.running_mean is module.mean


def test_frozen_parameters_are_buffers() -> None:
    module, batch, loss = prepared(perceptron)
    module.get_submodule("layers").requires_grad_(False)
    params, buffers, apply = yf.functional(module)
    assert set(params) == {"norm"}
    assert set(buffers["layers"]["0"]) == {"bias", "weight"}
    after = agree(train_step(apply, loss), params, buffers, batch, world=3)
    plan = after.lower(params, buffers, batch).plan
    scattered = [t for t in plan.transfers() if t.kind == "reduce_scatter"]
    shapes = [plan.values[r.id].meta.shape for t in scattered for r in t.targets]
    assert set(shapes) == {(6,)}  # those of the normalisation alone
    new = apply(params, buffers, **batch)[1]
    assert new["layers"]["0"]["weight"] is buffers["layers"]["0"]["weight"]


# --- transforms -----------------------------------------------------------------------


def small() -> Case:
    parts = [nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 2)]
    return nn.Sequential(*parts), {"input": normal(6, 4)}, squares


def test_gradients_of_each_row() -> None:
    module, batch, _ = prepared(small)
    params, buffers, apply = yf.functional(module)

    def loss(params: Any, row: torch.Tensor) -> torch.Tensor:
        return squares(apply(params, buffers, row[None])[0])

    rows = batch["input"]
    found = vmap(grad(loss), in_dims=(None, 0))(params, rows)
    wanted = [grad(loss)(params, row) for row in rows]
    assert_same(found, optree.tree_map(lambda *g: torch.stack(g), *wanted))


def test_an_ensemble_with_its_own_statistics() -> None:
    module, batch, _ = prepared(convolution)
    params, buffers, apply = yf.functional(module)
    both = (params, buffers), optree.tree_map(lambda x: x * 2, (params, buffers))
    stacked = optree.tree_map(lambda a, b: torch.stack([a, b]), *both)
    call = vmap(apply, in_dims=(0, 0, None))
    found = call(*stacked, batch["input"])
    wanted = [apply(*trees, batch["input"]) for trees in both]
    assert_same(found, optree.tree_map(lambda a, b: torch.stack([a, b]), *wanted))


def test_forward_mode() -> None:
    module, batch, _ = prepared(small)
    params, buffers, apply = yf.functional(module)
    tangents = optree.tree_map(torch.ones_like, params)

    def fn(params: Any) -> torch.Tensor:
        return squares(apply(params, buffers, **batch)[0])

    moved = jvp(fn, (params,), (tangents,))[1]
    grads = grad(fn)(params)
    torch.testing.assert_close(moved, sum(g.sum() for g in optree.tree_leaves(grads)))


def test_remat_of_it_inside_of_shard() -> None:
    module, batch, loss = prepared(llama)
    params, buffers, apply = yf.functional(module)
    step = train_step(yf.remat(apply), loss)
    assert_same(
        step(params, buffers, batch), train_step(apply, loss)(params, buffers, batch)
    )
    agree(step, params, buffers, batch, world=2, steps=1)


def test_it_is_torchs_functional_call() -> None:
    module, batch, _ = prepared(bert)
    params, buffers, apply = yf.functional(module)
    other = optree.tree_map(lambda p: p + 0.01, params)
    wanted = functional_call(module, dotted(other) | dotted(buffers), (), batch)
    assert torch.equal(apply(other, buffers, **batch)[0].logits, wanted.logits)


def test_calls_may_nest() -> None:
    outer_params, buffers, apply = yf.functional(nn.Linear(3, 3))
    inner = optree.tree_map(lambda p: 2 * p, outer_params)
    x = torch.ones(2, 3)
    deep = apply(outer_params, buffers, apply(inner, buffers, x)[0])[0]
    linear = lambda p, x: F.linear(x, p["weight"], p["bias"])  # noqa: E731
    assert torch.equal(deep, linear(outer_params, linear(inner, x)))


# --- on a mesh ------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@each_case
def test_steps_on_a_mesh_are_those_of_one_device(
    case: Callable[[], Case], world: int
) -> None:
    module, batch, loss = prepared(case)
    params, buffers, apply = yf.functional(module)
    step = agree(
        train_step(apply, loss),
        params,
        buffers,
        batch,
        world=world,
        steps=min(world, 2),
    )
    assert step.cache_size() == 1


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_a_language_model_has_no_unplanned_collective(kind: str) -> None:
    module, batch, loss = prepared(lambda: language_model(kind))  # with its cache
    params, buffers, apply = yf.functional(module)
    sharded = yf.shard(train_step(apply, loss), mesh=mesh_of(3))
    stage = sharded.lower(params, buffers, batch)
    assert stage.cost_analysis()["unplanned_collectives"] == 0
    gathers = [t for t in stage.plan.transfers() if t.kind == "all_gather"]
    counts = Counter(label for t in gathers for label in t.labels)
    assert set(counts.values()) <= {1, 2}
    assert sum(label.startswith("params") for label in counts) == len(
        optree.tree_leaves(params)
    )


def test_no_tensor_of_the_module_becomes_a_hidden_input() -> None:
    module, batch, loss = prepared(lstm)
    params, buffers, apply = yf.functional(module)
    sharded = yf.shard(train_step(apply, loss), mesh=mesh_of(2))
    graph = sharded.trace(params, buffers, batch).graph
    assert {entry.role for entry in graph.inputs} <= {"state", "batch", "constant"}


def test_steps_trace_once() -> None:
    module, batch, loss = prepared(perceptron)
    params, buffers, apply = yf.functional(module)
    sharded = yf.shard(train_step(apply, loss), mesh=mesh_of(2))
    state = yf.distribute((params, buffers), mesh_of(2))
    for _ in range(3):
        *state, _ = sharded(*state, batch)
    assert sharded.trace_count() == 1
    assert yf.full(state[1])["calls"] == 3


def test_an_unregistered_tensor_is_read_and_a_global_is_not_stale() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(normal(4))
            self.mask = torch.tensor([1.0, 0, 1, 0], dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight * self.mask * SCALE["value"]

    params, buffers, apply = yf.functional(Masked())
    sharded = yf.shard(lambda p, batch: apply(p, buffers, batch)[0], mesh=mesh_of(2))
    x = normal(4, 4)
    for value in (1.0, 3.0):
        SCALE["value"] = value
        assert_same(sharded(params, x), apply(params, buffers, x)[0])


SCALE = {"value": 1.0}


@pytest.mark.parametrize(
    "norm",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
    ],
)
def test_parametrised_weights(norm: Any) -> None:
    module = norm(nn.Linear(4, 4).double())
    params, buffers, apply = yf.functional(module)
    x = normal(6, 4)
    again = copy.deepcopy(module)
    assert torch.equal(apply(params, buffers, x)[0], again(x))
    step = train_step(apply, squares)
    agree(step, params, buffers, {"input": x}, world=2, steps=2)


def test_weights_that_a_hook_computes() -> None:
    with pytest.warns(FutureWarning):
        module = nn.utils.weight_norm(nn.Linear(4, 4).double())
    params, buffers, apply = yf.functional(module)
    x = normal(6, 4)
    assert torch.equal(apply(params, buffers, x)[0], module(x))
    step = train_step(apply, squares)
    agree(step, params, buffers, {"input": x}, world=2, steps=2)


def test_a_stored_view_of_a_weight_is_refused_where_it_is_used() -> None:
    class Half(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.first = self.weight[:2]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.first)

    params, buffers, apply = yf.functional(Half())
    with pytest.raises(yf.ArgumentError, match="passes linear a tensor that"):
        apply(params, buffers, torch.ones(2, 4))


# --- outputs of Hugging Face ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_a_model_output_is_returned_from_a_step(kind: str) -> None:
    options = {} if kind == "bert" else {"use_cache": False}
    made = lambda: language_model(kind, output_hidden_states=True, **options)  # noqa: E731
    module, batch, _ = prepared(made)
    params, buffers, apply = yf.functional(module.eval())
    wanted = apply(params, buffers, **batch)[0]
    sharded = yf.shard(lambda p, b, batch: apply(p, b, **batch)[0], mesh=mesh_of(2))
    found = sharded(params, buffers, batch)
    assert type(found) is type(wanted)
    assert len(found.hidden_states) == 3
    assert_same(dict(found), dict(wanted))
    assert "output['logits']" in sharded.lower(params, buffers, batch).traced.as_text()


def test_a_cache_that_is_returned_is_refused_by_its_path() -> None:
    module, batch, _ = prepared(gpt2)
    params, buffers, apply = yf.functional(module)
    sharded = yf.shard(lambda p, b, batch: apply(p, b, **batch)[0], mesh=mesh_of(2))
    with pytest.raises(yf.ArgumentError, match=r"output\['\w+'\] is a DynamicCache"):
        sharded(params, buffers, batch)


def test_dropout_is_refused_on_its_line() -> None:
    module, batch, loss = prepared(perceptron)
    params, buffers, apply = yf.functional(nn.Sequential(module, nn.Dropout(0.5)))
    step = train_step(apply, loss)
    with pytest.raises(yf.TraceError, match="random"):
        yf.shard(step, mesh=mesh_of(2))(params, buffers, batch)


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "found"),
    [(nn.Linear, "the class Linear"), ({}, "a dict"), (squares, "a squares")],
)
def test_what_is_no_module_is_refused(given: Any, found: str) -> None:
    with pytest.raises(yf.ArgumentError, match=f"Module, not {found}"):
        yf.functional(given)


def test_a_lazy_module_is_refused_until_it_has_shapes() -> None:
    module = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(yf.ArgumentError, match=r"0\.weight of Sequential is lazy"):
        yf.functional(module)
    module(torch.ones(2, 2))
    assert yf.functional(module)[0]["0"]["weight"].shape == (3, 2)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.handle = (n for n in range(3))  # type: ignore[assignment]
    with pytest.raises(yf.ArgumentError, match=r"Linear cannot be copied.*generator"):
        yf.functional(module)


def wrong_trees() -> list[tuple[str, Callable[[Any, Any], Any]]]:
    def without(params: Any, buffers: Any) -> Any:
        del params["layers"]["1"]["weight"]
        return params, buffers

    def extra(params: Any, buffers: Any) -> Any:
        return params, {**buffers, "more": torch.zeros(2)}

    def swapped(params: Any, buffers: Any) -> Any:
        return buffers, params

    def stacked(params: Any, buffers: Any) -> Any:
        return optree.tree_map(lambda p: torch.stack([p, p]), params), buffers

    def number(params: Any, buffers: Any) -> Any:
        return params, {**buffers, "calls": 0.0}

    def nothing(params: Any, buffers: Any) -> Any:
        return params, None

    return [
        (r"params\['layers'\]\['1'\]\['weight'\] is missing", without),
        (r"buffers\['more'\] is unknown.*apply\(params, buffers", extra),
        (r"params\['calls'\] is unknown", swapped),
        (r"params\['layers'\]\['0'\]\['weight'\] has the shape \(2, 6, 6\)", stacked),
        (r"buffers\['calls'\] is a float, not a tensor", number),
        (r"buffers\['calls'\] is missing", nothing),
    ]


@pytest.mark.parametrize(("message", "change"), wrong_trees())
def test_another_tree_is_refused_by_path(
    message: str, change: Callable[[Any, Any], Any]
) -> None:
    params, buffers, apply = yf.functional(Perceptron())
    with pytest.raises(yf.ArgumentError, match=message):
        apply(*change(params, buffers), torch.ones(2, 6))
