"""The global graph of a step: what `trace` hands to `place`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from ._layout import Meta


@dataclass(frozen=True)
class Ref:
    """A value of the graph, by its number."""

    id: int

    def __str__(self) -> str:
        return f"%{self.id}"

    __repr__ = __str__


@dataclass(frozen=True)
class Node:
    """One operator: arguments with `Ref`s in place of tensors, and its results."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Ref | None, ...]
    line: str


@dataclass(frozen=True)
class Input:
    """A value that exists before the step: an argument's leaf or a captured tensor.

    `source` finds it at a call: the index of an argument's leaf, the index of a
    captured tensor in the walk of `captures`, or the tensor itself.
    """

    ref: Ref
    path: str
    role: str  # "state", "batch", "captured" or "constant"
    source: int | torch.Tensor
    example: Any


@dataclass(frozen=True)
class Output:
    """A leaf of the result: a value of the graph, or a static value."""

    path: str
    value: Any  # Ref or static
    is_float: bool = False


@dataclass(frozen=True)
class Graph:
    """A traced step: what `trace` hands to `place`."""

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    metas: Mapping[int, Meta]
    spec: optree.PyTreeSpec

    def as_text(self) -> str:
        """One line for each input, operator and output, at global shapes."""
        lines = [f"{i.ref}: {self.metas[i.ref.id]} = {i.path}" for i in self.inputs]
        lines += [self._line(node) for node in self.nodes]
        lines += [f"{o.path} = {o.value}" for o in self.outputs]
        return "\n".join(lines)

    def _line(self, node: Node) -> str:
        outs = ", ".join(f"{r}: {self.metas[r.id]}" for r in node.outputs if r)
        args = ", ".join(map(str, node.args))
        return f"{outs} = {node.op}({args})    # {node.line}"


def refs(arguments: Any) -> Iterator[Ref]:
    """All references in (nested) arguments, in order."""
    if isinstance(arguments, Ref):
        yield arguments
    elif isinstance(arguments, Mapping):
        yield from refs(tuple(arguments.values()))
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from refs(argument)


def map_leaves(fn: Callable[[Any], Any], arguments: Any) -> Any:
    """Apply `fn` to all leaves of (nested) operator arguments."""
    if isinstance(arguments, Mapping):
        return {k: map_leaves(fn, v) for k, v in arguments.items()}
    if isinstance(arguments, tuple | list) and not isinstance(arguments, torch.Size):
        return type(arguments)([map_leaves(fn, a) for a in arguments])
    return fn(arguments)


def filled(arguments: Any, values: Mapping[int, Any]) -> Any:
    """(Nested) arguments with values, by their number, in the place of references."""
    return map_leaves(
        lambda leaf: values[leaf.id] if isinstance(leaf, Ref) else leaf, arguments
    )


def read_by(nodes: Iterable[Node], outputs: Iterable[Output]) -> set[int]:
    """The numbers of the values that operators and outputs read."""
    found = {ref.id for node in nodes for ref in refs((node.args, node.kwargs))}
    return found | {ref.id for output in outputs for ref in refs(output.value)}


def live_nodes(nodes: Sequence[Node], outputs: Sequence[Output]) -> tuple[Node, ...]:
    """The operators without those that no output needs."""
    needed = read_by((), outputs)
    kept: list[Node] = []
    for node in reversed(nodes):
        if any(ref and ref.id in needed for ref in node.outputs):
            needed |= read_by((node,), ())
            kept.append(node)
    return tuple(reversed(kept))


def results(out: Any) -> list[Any]:
    """An operator's results in one list, `None` for what is no tensor."""
    if isinstance(out, tuple | list):
        return [leaf for part in out for leaf in results(part)]
    return [out if isinstance(out, torch.Tensor) else None]
