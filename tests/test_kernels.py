"""Operators in given memory: the bits that they make by themselves, and none beside."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from support import mesh_of
from zoo import ZOO

import yafsdp_fn as yf
from yafsdp_fn import _bind
from yafsdp_fn._graph import Ref
from yafsdp_fn._kernels import update, updates, writer
from yafsdp_fn._layout import Meta
from yafsdp_fn._local_ops import LOCAL_OPS
from yafsdp_fn._memory import may_overwrite
from yafsdp_fn._program import Compute, Local, Program

aten = torch.ops.aten
Args = tuple[Any, ...]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_bits(found: torch.Tensor, wanted: torch.Tensor, what: Any) -> None:
    assert found.shape == wanted.shape, what
    assert found.dtype == wanted.dtype, what
    if not torch.equal(bits(found), bits(wanted)):
        pytest.fail(f"{what}: {found} should be {wanted}")


# --- operators with arguments ---------------------------------------------------------

DTYPES = (torch.float64, torch.bfloat16, torch.complex128, torch.int64, torch.bool)


def functional_operators() -> list[Any]:
    """All of ATen that can be computed into given memory."""
    packets = (getattr(aten, name) for name in dir(aten))
    found = [
        getattr(packet, name)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for name in packet.overloads()
    ]
    return [op for op in found if not op._schema.is_mutable and writer(op)]


def argument(kind: str, dtype: torch.dtype, seed: int) -> Any:
    """An argument of a type of a schema."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "Tensor":
        drawn = torch.rand(4, 6, generator=generator, dtype=torch.float64)
        return (drawn * 0.8 + 0.1).to(dtype)
    return {"number": 2, "int": 2, "float": 0.5, "bool": True, "str": "none"}[kind]


def arguments(op: Any, dtype: torch.dtype) -> Args | None:
    """Arguments of an operator on values of a dtype, if it takes them."""
    required = [a for a in op._schema.arguments if not a.has_default_value()]
    try:
        made = [argument(str(a.type), dtype, n) for n, a in enumerate(required)]
        return tuple(made) if isinstance(op(*made), torch.Tensor) else None
    except (KeyError, RuntimeError, IndexError, TypeError, ValueError):
        return None


def normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator)


ROWS = torch.tensor([[2, 0, 1, 1, 3, 0], [1, 1, 0, 2, 3, 3]])
ONE = torch.tensor([[3], [0], [2], [2]])
BY_HAND: list[tuple[Any, Args]] = [
    (aten.mm.default, (normal(4, 5), normal(5, 6))),
    (aten.mm.default, (normal(5, 4).t(), normal(6, 5).t())),
    (aten.mm.default, (normal(4, 5).bfloat16(), normal(5, 6).bfloat16())),
    (aten.bmm.default, (normal(2, 4, 5), normal(2, 5, 6))),
    (aten.bmm.default, (normal(2, 5, 4).mT, normal(2, 6, 5).mT)),
    (aten.addmm.default, (normal(6), normal(4, 5), normal(5, 6))),
    (aten.baddbmm.default, (normal(2, 1, 6), normal(2, 4, 5), normal(2, 5, 6))),
    (aten.mv.default, (normal(4, 5), normal(5))),
    (aten.sum.dim_IntList, (normal(4, 6), [0])),
    (aten.sum.dim_IntList, (normal(4, 6).t(), [1], True)),
    (aten.sum.dim_IntList, (ROWS > 1, None)),
    (aten.cat.default, ([normal(4, 6), normal(4, 3)], 1)),
    (aten.cat.default, ([normal(4, 6), normal(2, 6)],)),
    (aten.gather.default, (normal(4, 6), 0, ROWS)),
    (aten.index_select.default, (normal(4, 6), 1, torch.tensor([5, 0, 0]))),
    (aten.cumsum.default, (normal(4, 6), 1)),
    (aten._softmax.default, (normal(4, 6), 1, False)),
    (aten._softmax.default, (normal(4, 6), 0, False)),
    (aten._log_softmax.default, (normal(4, 6), 1, False)),
    (
        aten._softmax_backward_data.default,
        (normal(4, 6), normal(4, 6).softmax(1), 1, torch.float32),
    ),
    (
        aten._log_softmax_backward_data.default,
        (normal(4, 6), normal(4, 6).log_softmax(1), 1, torch.float32),
    ),
    (aten.clamp.default, (normal(4, 6), -0.5, 0.5)),
    (aten.clamp.Tensor, (normal(4, 6), normal(6), None)),
    (aten.add.Tensor, (normal(4, 6), normal(6))),
    (aten.add.Scalar, (normal(4, 6), 2)),
    (aten.where.self, (normal(4, 6) > 0, normal(4, 6), normal(1, 6))),
    (aten.scatter.value, (normal(4, 6), 1, ONE, 7.0)),
    (aten.scatter.src, (normal(4, 6), 0, ROWS, normal(2, 6))),
    (aten.scatter_add.default, (normal(4, 6), 0, ROWS, normal(2, 6))),
    (aten.index_add.default, (normal(4, 6), 0, ROWS[0, :3], normal(3, 6))),
    (aten.index_put.default, (normal(4, 6), [ROWS[0, :3]], normal(3, 6))),
    (aten.index_put.default, (normal(4, 6), [None, ROWS[1]], normal(6), True)),
    (aten.clone.default, (normal(6, 4).t(),)),
    (aten.reshape.default, (normal(6, 4).t(), [3, 8])),
    (aten.reshape.default, (normal(2, 3, 4).transpose(0, 1), [-1])),
    (aten.embedding.default, (normal(4, 6), ROWS, -1, False, False)),
    (aten.full.default, ([4, 6], 2.5)),
    (aten.scalar_tensor.default, (2.5,)),
    (aten.cumsum.default, (ROWS.int(), 1)),
    (aten.cat.default, ([normal(4, 6), ROWS],)),
]
WITH_OPTIONS: list[tuple[Any, Args, dict[str, Any]]] = [
    (aten.add.Tensor, (normal(4, 6), normal(6)), {"alpha": 3}),
    (aten.sub.Scalar, (normal(4, 6), 2), {}),
    (aten.div.Tensor_mode, (normal(4, 6), 0.3), {"rounding_mode": "floor"}),
    (aten.round.decimals, (normal(4, 6),), {"decimals": 1}),
    (aten.sum.dim_IntList, (normal(4, 6), [0]), {"dtype": torch.float64}),
    (aten.sum.dim_IntList, (ROWS.int(), [1]), {"dtype": torch.int32}),
    (aten.cumsum.default, (ROWS, 0), {"dtype": torch.float32}),
    (aten.gelu.default, (normal(4, 6),), {"approximate": "tanh"}),
    (aten._to_copy.default, (normal(6, 4).t(),), {"dtype": torch.bfloat16}),
    (
        aten.clone.default,
        (normal(6, 4).t(),),
        {"memory_format": torch.contiguous_format},
    ),
    (aten.full.default, ([4, 6], 2), {"dtype": torch.float64, "pin_memory": False}),
]


def cases() -> Iterator[tuple[Any, Args, dict[str, Any]]]:
    yield from ((op, args, {}) for op, args in BY_HAND)
    yield from WITH_OPTIONS
    for op in functional_operators():
        for dtype in DTYPES:
            args = arguments(op, dtype)
            if args is not None:
                yield op, args, {}


def copies(args: Any) -> Any:
    """Arguments in memory of their own, with their strides."""
    if isinstance(args, torch.Tensor):
        return args.clone(memory_format=torch.preserve_format)
    return type(args)(map(copies, args)) if isinstance(args, tuple | list) else args


def turned(args: Any) -> Any:
    """Matrices in column-major order; everything else as it is."""
    if isinstance(args, torch.Tensor) and args.dim() == 2:
        return args.mT.contiguous().mT
    return type(args)(map(turned, args)) if isinstance(args, tuple | list) else args


PADDING = 16


def padded(like: torch.Tensor) -> torch.Tensor:
    """Memory with the layout of a tensor, and more behind it; all of it ones."""
    last = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    flat = torch.ones(last + 1 + PADDING, dtype=like.dtype)
    return flat.as_strided(like.shape, like.stride())


# --- given memory ---------------------------------------------------------------------


@functools.cache
def supported() -> list[tuple[Any, Args, dict[str, Any]]]:
    found = list(cases())
    assert len({op for op, *_ in found}) > 230
    return found


@pytest.mark.parametrize("layout", [copies, turned], ids=["contiguous", "transposed"])
def test_an_operator_gives_the_same_bits_in_a_place_for_its_result(
    layout: Callable[[Args], Args],
) -> None:
    for op, args, options in supported():
        args = layout(args)
        wanted = op(*args, **options)
        place = padded(wanted)
        write = writer(op)
        assert write is not None
        write([place], *args, **options)
        assert_bits(place, wanted, (op, args))
        behind = place.untyped_storage().nbytes() // place.element_size() - PADDING
        rest = place.as_strided((PADDING,), (1,), behind)
        assert bool((rest == 1).all()), (op, "writes beside its place")


@pytest.mark.parametrize("op", [aten.add.Scalar, aten.sub.Scalar], ids=str)
def test_a_factor_may_be_given_by_position(op: Any) -> None:
    write, place = writer(op), normal(4, 6)
    assert write is not None
    write([place], normal(4, 6), 2, 3)
    assert_bits(place, op(normal(4, 6), 2, 3), op)


def test_results_are_right_in_a_transposed_place() -> None:
    for op, args in BY_HAND:
        wanted = op(*args)
        if "softmax" in str(op):  # writes rows; but so its result always lies
            assert op(*turned(args)).is_contiguous()
        elif wanted.dim() == 2:
            place = turned(torch.full_like(wanted, 7))
            write = writer(op)
            assert write is not None
            write([place], *args)
            torch.testing.assert_close(place, wanted)


def test_an_operator_gives_the_same_bits_in_the_place_of_its_operand() -> None:
    tried = set()
    for op, args, options in supported():
        wanted = op(*args, **options)
        for n, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and overwrites(op, args, n, wanted):
                mine = copies(args)
                write = writer(op)
                assert write is not None
                write([mine[n]], *mine, **options)
                assert_bits(mine[n], wanted, (op, n))
                tried.add(op)
    assert len(tried) > 180
    assert {aten.scatter.src, aten.index_put.default, aten._softmax.default} <= tried


def overwrites(op: Any, args: Args, position: int, result: torch.Tensor) -> bool:
    """Whether a plan may put a result in the place of an operand of its form."""
    tensors = {n: a for n, a in enumerate(args) if isinstance(a, torch.Tensor)}
    refs = tuple(Ref(n) if n in tensors else a for n, a in enumerate(args))
    values = {n: Local(Meta.of(tensor), ()) for n, tensor in tensors.items()}
    program = Program((), (), values, (), (), ())
    operand = args[position]
    return (
        may_overwrite(program, Compute(op, refs, {}, (Ref(-1),)), [Ref(position)])
        and (operand.shape, operand.dtype) == (result.shape, result.dtype)
        and operand.stride() == result.stride()
    )


# --- in programs ----------------------------------------------------------------------


def checking(op: Any) -> Any:
    """A writer that compares what it has written with what the operator makes."""
    write = writer(op)
    if write is None:
        return None

    def checked(outs: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        # Of the same memory: how operands lie decides whether a kernel uses vectors.
        wanted = op(*args, **kwargs)
        write(outs, *args, **kwargs)
        assert_bits(outs[0], wanted, (op, args))

    return checked


MODELS = ["llama", "lstm", "mixture_of_experts", "resnet_with_batch_norm"]


@pytest.mark.parametrize("name", MODELS)
def test_what_a_program_writes_has_the_bits_of_its_operators(name: str) -> None:
    step, *state, batch = ZOO[name](4)
    mesh = mesh_of(2)
    with mock.patch.object(_bind, "writer", checking):
        sharded = yf.shard(step, mesh=mesh, donate_argnums=range(len(state)))
        state = yf.distribute(state, mesh)
        for _ in range(2):
            *state, _ = sharded(*state, batch)


# --- optimisers -----------------------------------------------------------------------

FUSED = [aten._fused_adamw.default, aten._fused_adam.default]
OPTIONS = {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "weight_decay": 0.1,
    "eps": 1e-3,
    "maximize": False,
}


def optimiser_args(amsgrad: bool, turn: bool) -> list[list[torch.Tensor]]:
    """Parameters, gradients, moments and counts."""
    shapes = [(4, 6), (6, 4), (3,)]
    lists = [[normal(*shape).abs() + n for shape in shapes] for n in range(5)]
    lists = [turned(tensors) for tensors in lists] if turn else lists
    lists[4] = lists[4] if amsgrad else []
    return [*lists, [torch.ones(()) for _ in shapes]]


@pytest.mark.parametrize("op", FUSED, ids=str)
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("turn", [False, True], ids=["", "transposed"])
def test_optimisers_in_place_are_the_functional_ones(
    op: Any, amsgrad: bool, scaled: bool, turn: bool
) -> None:
    assert updates(op)
    options = OPTIONS | {"amsgrad": amsgrad}
    if scaled:
        options |= {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0)}
    args = optimiser_args(amsgrad, turn)
    contiguous = [[t.contiguous() for t in tensors] for tensors in args]
    wanted = [t for tensors in op(*contiguous, **options) for t in tensors]
    count = len(wanted)
    gradients = range(3, 6)
    for given in (range(0), range(count), (0, 4, 7)):
        flags = [n in given and n not in gradients for n in range(count)]
        mine = copies(args)
        found = update(LOCAL_OPS[op], mine, options, flags)
        operands = [t for tensors in mine[:5] for t in tensors]
        before = [t for tensors in args[:5] for t in tensors]
        for n in range(count):
            assert_bits(found[n], wanted[n], n)
            if flags[n] and not turn:
                assert found[n] is operands[n]
            elif not flags[n]:
                assert_bits(operands[n], before[n], f"operand {n}")
