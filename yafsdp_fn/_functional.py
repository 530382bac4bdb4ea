"""functional: any `nn.Module` as trees of tensors and a pure function of them."""

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, NoReturn

import optree
import torch
from torch import nn

from ._errors import ArgumentError
from ._tree import NAMESPACE, flatten_with_paths

Tree = dict[str, Any]
Apply = Callable[..., tuple[Any, Tree]]


def functional(module: nn.Module) -> tuple[Tree, Tree, Apply]:
    """Take a module apart into its parameters, its buffers, and a pure function.

    The trees are nested dicts that follow the attributes of the module, so that a
    layer is a subtree: `params["layers"]["3"]["attention"]["weight"]`. A tensor that
    the module holds under several names (tied weights) is one leaf, under the first.

    Args:
        module: Any module, Hugging Face models included. It is copied as it is now,
            with its hooks and in its mode (`module.train()`, `module.eval()`), and
            never touched; it may be changed or deleted afterwards.

    Returns:
        `params`: clones of the parameters that require a gradient.
        `buffers`: clones of the buffers, and of the frozen parameters (`requires_grad`
        is false), of which no gradient is taken.
        `apply(params, buffers, *args, **kwargs)`: what `module(*args, **kwargs)`
        returns, and the new buffers, such as running statistics. It edits nothing;
        other attributes that the module sets while it runs are forgotten. It composes
        with `torch.func`, `shard` and `remat`, and raises ArgumentError for trees
        with a leaf that is missing, unknown, no tensor, or of another shape.

    Raises:
        ArgumentError: Not a module; a lazy module that has no shapes yet; a module
            that cannot be copied.

    Source: `flax.linen.Module.init` and `apply`; `torch.func.functional_call`.

    Example:
        >>> import optree, torch, yafsdp_fn as yf
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> params, buffers, apply = yf.functional(model)
        >>> params["0"]["weight"].shape, buffers["1"]["running_mean"]
        (torch.Size([3, 2]), tensor([0., 0., 0.]))
        >>> output, buffers = apply(params, buffers, torch.ones(4, 2))
        >>> output.shape, buffers["1"]["num_batches_tracked"]
        (torch.Size([4, 3]), tensor(1))
        >>> def loss_fn(params, buffers, batch):
        ...     output, buffers = apply(params, buffers, batch)
        ...     return output.square().mean(), buffers
        >>> @yf.shard
        ... def step(params, buffers, batch):
        ...     grads, buffers = torch.func.grad(loss_fn, has_aux=True)(
        ...         params, buffers, batch
        ...     )
        ...     params = optree.tree_map(lambda p, g: p - 0.1 * g, params, grads)
        ...     return params, buffers
        >>> mesh = yf.make_mesh(fsdp=2, emulate=True)
        >>> params, buffers = yf.distribute((params, buffers), mesh)
        >>> params, buffers = step(params, buffers, torch.ones(4, 2))
        >>> yf.full(buffers)["1"]["num_batches_tracked"]
        tensor(2)
    """
    layout = _layout(module)
    skeleton = _skeleton(module, layout.slots)

    def apply(params: Tree, buffers: Tree, /, *args: Any, **kwargs: Any) -> Any:
        values = layout.values({"params": params, "buffers": buffers})
        filled = copy.deepcopy(skeleton, layout.filling(values))
        output = _returnable(filled(*args, **kwargs))
        return output, layout.buffers(filled, values)

    params, buffers = (_nested(_clones(module, s)) for s in layout.shapes.values())
    return params, buffers, apply


# --- where tensors belong -------------------------------------------------------------


class _Slot:
    """Where a tensor of a module has been; a copy is given another in its place."""


@dataclass(frozen=True)
class _Layout:
    """The tensors of a module by qualified name: tree, shape, and place in a skeleton.

    `shapes` has the two trees; `moving` names the buffers, which a call may change.
    """

    kind: str
    shapes: Mapping[str, Mapping[str, torch.Size]]
    slots: Mapping[str, _Slot]
    moving: Sequence[str]

    def values(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of the trees, each checked; buffers as clones to be edited."""
        values: dict[str, torch.Tensor] = {}
        for root, shapes in self.shapes.items():
            paths, leaves, _ = flatten_with_paths(given[root], root)
            found = dict(zip(paths, leaves, strict=True))
            names = {_path(root, name): name for name in shapes}
            _refuse_other_paths(self.kind, found, names)
            for path, name in names.items():
                values[name] = _checked(self.kind, path, found[path], shapes[name])
        return values | {name: values[name].clone() for name in self.moving}

    def filling(self, values: Mapping[str, torch.Tensor]) -> dict[int, Any]:
        """The memo with which a copy of the skeleton has values in its slots."""
        return {id(self.slots[name]): value for name, value in values.items()}

    def buffers(self, filled: nn.Module, values: Mapping[str, torch.Tensor]) -> Tree:
        """The tree of buffers after a call."""
        changed = {name: filled.get_buffer(name) for name in self.moving}
        kept = {name: values[name] for name in self.shapes["buffers"]}
        return _nested(kept | changed)


def _layout(module: nn.Module) -> _Layout:
    _refuse_other_modules(module)
    tensors = dict(_named(module))
    shapes: dict[str, dict[str, torch.Size]] = {"params": {}, "buffers": {}}
    for name, tensor in tensors.items():
        trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        shapes["params" if trained else "buffers"][name] = tensor.shape
    slots = {name: _Slot() for name in tensors}
    moving = [name for name, _ in module.named_buffers()]
    return _Layout(type(module).__qualname__, shapes, slots, moving)


def _named(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, each once, with their qualified names."""
    return [*module.named_parameters(), *module.named_buffers()]


def _refuse_other_modules(module: Any) -> None:
    if not isinstance(module, nn.Module):
        name = getattr(module, "__qualname__", type(module).__qualname__)
        found = f"the class {name}" if isinstance(module, type) else f"a {name}"
        raise ArgumentError(
            f"functional takes a torch.nn.Module, not {found}. Pass an instance: "
            "yf.functional(torch.nn.Linear(2, 3))."
        )
    for name, tensor in _named(module):
        if nn.parameter.is_lazy(tensor):
            raise ArgumentError(
                f"functional: {name} of {type(module).__qualname__} is lazy and has no "
                "shape yet. Call the module once on an example, module(batch), first."
            )


# --- a module without tensors ---------------------------------------------------------


def _skeleton(module: nn.Module, slots: Mapping[str, _Slot]) -> nn.Module:
    """A copy of the module with slots in the place of its tensors.

    A call fills the slots by copying once more. In contrast to swapping the tensors of
    one module, as `torch.func.functional_call` does, what the module notes of them
    while it runs (`nn.LSTM` does) is gone with the copy, and calls may nest.
    """
    memo: dict[int, Any] = {id(tensor): _Stale() for tensor in _derived(module)}
    memo |= {id(tensor): slots[name] for name, tensor in _named(module)}
    try:
        skeleton = copy.deepcopy(module, memo)
    except Exception as error:
        raise ArgumentError(_uncopied(module, str(error))) from error
    if {id(slot) for _, slot in _named(skeleton)} != {id(s) for s in slots.values()}:
        raise ArgumentError(_uncopied(module, "its copy has other tensors"))
    return skeleton


class _Stale:
    """In the place of a tensor that depends on parameters as they were."""

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any, **__: Any) -> NoReturn:
        name = getattr(func, "__name__", func)
        raise ArgumentError(
            f"the module passes {name} a tensor that it has computed of its parameters "
            "before functional was called, and that would not follow them. Compute it "
            "in forward, or in a hook before it."
        )


def _derived(module: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors among the attributes that a module has computed of its parameters."""
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                yield value


def _uncopied(module: nn.Module, reason: str) -> str:
    return (
        f"functional: {type(module).__qualname__} cannot be copied (copy.deepcopy): "
        f"{reason}. Pass the plain module, before torch.jit, DistributedDataParallel "
        "or another wrapper, and without open files or locks among its attributes."
    )


# --- trees ----------------------------------------------------------------------------


def _clones(module: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    tensors = dict(_named(module))
    return {name: tensors[name].detach().clone() for name in names}


def _nested(values: Mapping[str, torch.Tensor]) -> Tree:
    """Nested dicts of qualified names.

    >>> _nested({"layers.0.weight": 1, "scale": 2})
    {'layers': {'0': {'weight': 1}}, 'scale': 2}
    """
    tree: Tree = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _path(root: str, name: str) -> str:
    return root + "".join(f"[{part!r}]" for part in name.split("."))


def _refuse_other_paths(kind: str, found: Mapping[str, Any], wanted: Any) -> None:
    for path in [*found, *wanted]:
        if path not in found or path not in wanted:
            what = "missing" if path in wanted else "unknown"
            raise ArgumentError(f"{path} is {what}. {_REMEDY.format(kind=kind)}")


_REMEDY = (
    "Pass trees with the structure of those that yf.functional returned for the "
    "{kind}, params first: `output, buffers = apply(params, buffers, *args)`."
)


def _checked(kind: str, path: str, leaf: Any, shape: torch.Size) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        found = f"is a {type(leaf).__qualname__}, not a tensor"
        raise ArgumentError(f"{path} {found}. {_REMEDY.format(kind=kind)}")
    if leaf.shape != shape:
        raise ArgumentError(
            f"{path} has the shape {tuple(leaf.shape)} instead of {tuple(shape)}. "
            "Map over stacked parameters: torch.vmap(apply, in_dims=(0, 0, None)); "
            f"for a {kind} of another size call yf.functional on it."
        )
    return leaf


# --- outputs --------------------------------------------------------------------------


def _returnable(output: Any) -> Any:
    """The output, of which every `ModelOutput` of Hugging Face is a node of trees."""
    children: Any = output.values() if isinstance(output, dict) else output
    for child in children if isinstance(output, dict | list | tuple) else ():
        _returnable(child)
    if isinstance(output, OrderedDict) and is_dataclass(output):
        _register(type(output))
    return output


@functools.cache
def _register(kind: Any) -> None:
    """Make a dict that is a dataclass a node; `None` is what it leaves out."""

    def flatten(output: Any) -> Any:
        return [*output.values()], tuple(output), tuple(output)

    def unflatten(keys: Any, values: Any) -> Any:
        return kind(**dict(zip(keys, values, strict=True)))

    entry = optree.MappingEntry
    with contextlib.suppress(ValueError):  # the user has registered it
        optree.register_pytree_node(
            kind, flatten, unflatten, path_entry_type=entry, namespace=NAMESPACE
        )
