"""accumulate: a batch in several parts, without moving a row."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import optree
import torch

from ._arguments import Names, Signature, signature_of
from ._errors import ArgumentError
from ._tree import NAMESPACE, map_with_paths

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def accumulate(
    fn: Callable[Parameters, Returned],
    microbatches: int,
    *,
    batch_argnums: Names = None,
) -> Callable[Parameters, Returned]:
    """The sum of a function over equal parts of the batch.

    Part i of n holds the rows i, i + n, i + 2n, ... of every leaf of the batch. So each
    part is spread over all ranks as the batch is, and no row moves. Used on a gradient
    function, `accumulate(grad_and_value(loss), n)`, only the activations of one part
    are alive at a time; sums over ranks stay pending until all parts are added.

    Args:
        fn: A function of pytrees that returns a pytree of tensors or numbers, such as
            a loss that is a sum over rows, or its gradient.
        microbatches: The number of parts, at least 1; it must divide the rows.
        batch_argnums: Positions or names of the arguments that are cut; by default the
            one called `batch`, else the last one.

    Returns:
        A function with the same parameters that returns the sum of what `fn` returns.

    Raises:
        ArgumentError: Fewer than one part, rows that the parts do not divide, or a leaf
            of the batch without rows.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> total = yf.accumulate(lambda w, batch: (w * batch).sum(), 2)
        >>> total(torch.tensor(3.0), torch.ones(4, 2))
        tensor(24.)
    """
    if type(microbatches) is not int or microbatches < 1:
        raise ArgumentError(
            f"microbatches={microbatches!r} must be an int >= 1: the number of parts."
        )
    signature = signature_of(fn, batch_argnums, (), ())

    @functools.wraps(fn)
    def accumulated(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        if batch_argnums is None and _is_variadic(signature):
            named = _named(fn, len(args), tuple(kwargs))
            return accumulate(named, microbatches)(*args, **kwargs)
        bound = signature.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        whole = {name: bound.arguments[name] for name in signature.batch}
        total: Any = None
        for part in range(microbatches):
            for name, tree in whole.items():
                bound.arguments[name] = _part(tree, name, part, microbatches)
            result = fn(*bound.args, **bound.kwargs)
            total = result if part == 0 else _added(total, result)
        return total

    return accumulated


def _is_variadic(signature: Signature) -> bool:
    """Whether parameters have no names, as those of `grad(f)` inside of a trace."""
    kinds = [p.kind for p in signature.signature.parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _named(fn: Callable[..., Any], count: int, names: tuple[str, ...]) -> Any:
    """The function with a parameter for each argument; the batch comes last."""
    first, rest = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY
    given = [inspect.Parameter(f"argument_{n}", first) for n in range(count)]
    given += [inspect.Parameter(name, rest) for name in names]

    def named(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    named.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    return named


def _part(tree: Any, name: str, part: int, parts: int) -> Any:
    def cut(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.dim() == 0 or leaf.shape[0] % parts:
            raise ArgumentError(
                f"{path} has the shape {tuple(leaf.shape)}, whose rows {parts} parts "
                "do not divide. Choose microbatches so that it divides the batch."
            )
        return leaf.unflatten(0, (-1, parts)).select(1, part)

    return map_with_paths(cut, tree, name)


def _added(total: Any, result: Any) -> Any:
    return optree.tree_map(lambda a, b: a + b, total, result, namespace=NAMESPACE)
