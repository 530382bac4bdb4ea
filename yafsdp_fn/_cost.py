"""What a step costs a rank, read off its program: memory, operations, communication."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from ._graph import filled
from ._held import peak, split_at_peak
from ._local_ops import LOCAL_OPS, onednn_product
from ._program import Compute, Program, Transfer, bind
from ._shapes import Shapes

aten = torch.ops.aten

# --- memory ---------------------------------------------------------------------------


def memory(program: Program) -> dict[str, int]:
    """Bytes that the first rank holds; `Lowered.memory_analysis` says of what."""
    first = program.first
    kept = {ref.id for ref in program.outputs if ref is not None}
    held = split_at_peak(program)
    shards = sum(program.values[ref.id].nbytes(first) for ref in program.inputs)
    beside = ("temporaries", "fresh", "outputs")
    return {
        "peak_bytes": peak(program),
        "shard_bytes": shards,
        "constant_bytes": held["shards"] - shards,
        "arena_bytes": program.arena,
        "output_bytes": sum(program.values[n].nbytes(first) for n in kept),
        "gathered_bytes": held.get("gathered", 0),
        "gradient_bytes": held.get("gradients", 0),
        "activation_bytes": held.get("activations", 0),
        "temporary_bytes": sum(held.get(kind, 0) for kind in beside),
    }


# --- communication and operations -----------------------------------------------------


def cost(program: Program) -> dict[str, int]:
    """What a step costs a rank; `Lowered.cost_analysis` says what is counted."""
    transfers = list(program.transfers())
    gathers = [t for t in transfers if t.kind == "all_gather"]
    reductions = [t for t in transfers if t.kind != "all_gather"]
    return {
        "flops": _flops(program),
        "all_gathers": sum(len(t.sources) for t in gathers),
        "reductions": sum(len(t.sources) for t in reductions),
        "gathered_bytes": _moved(program, gathers),
        "reduced_bytes": _moved(program, reductions),
        "collectives": len(transfers),
        "unplanned_collectives": sum(not t.planned for t in transfers),
    }


def _moved(program: Program, transfers: Sequence[Transfer]) -> int:
    values = program.values
    return sum(values[ref.id].meta.nbytes for t in transfers for ref in t.sources)


def _flops(program: Program) -> int:
    tensors = Shapes(program).tensors
    operators = computed(program.instructions)
    return sum(_count(each, tensors, program.first) for each in operators)


def computed(instructions: Iterable[Any]) -> Iterator[Compute]:
    """All operators, also those that have been compiled as one."""
    for instruction in instructions:
        if isinstance(instruction, Compute):
            inside = getattr(instruction.op, "instructions", None)
            yield from (instruction,) if inside is None else computed(inside)


def _count(
    instruction: Compute, tensors: Mapping[int, torch.Tensor], first: tuple[int, ...]
) -> int:
    count = _COUNTS.get(instruction.op)
    if count is None:
        packet = getattr(instruction.op, "overloadpacket", None)
        count = flop_registry.get(packet)
    if count is None:
        return 0
    bound = bind((instruction.args, dict(instruction.kwargs)), first)
    args, kwargs = filled(bound, tensors)
    made = [None if ref is None else tensors[ref.id] for ref in instruction.outputs]
    result = made[0] if len(made) == 1 else tuple(made)
    return int(count(*args, **kwargs, out_val=result))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


def _inner_product(x: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.numel()


_COUNTS: dict[Any, Any] = {
    LOCAL_OPS[aten._scaled_dot_product_flash_attention_for_cpu.default]: _attention,
    LOCAL_OPS[aten._scaled_dot_product_flash_attention_for_cpu_backward.default]: (
        _attention_backward
    ),
    onednn_product: flop_registry[aten.mm],
    aten.mv.default: _inner_product,
    aten.dot.default: _inner_product,
    aten.vdot.default: _inner_product,
}
