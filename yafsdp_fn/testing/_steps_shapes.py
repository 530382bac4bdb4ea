"""Operators of random steps for which shapes must fit: products, views and lookups."""

import itertools

from ._steps_writer import SkipError, Table, Writer, entered_in, meets

OPERATORS: Table = {}
operator = entered_in(OPERATORS)

# --- products and layers ---------------------------------------------------


@operator
def matmul(w: Writer) -> str:
    x = w.array()
    inner = w.values[x].shape[-1]
    y = w.real(lambda t: t.dim() >= 1 and inner in t.shape[-2:])
    shape = w.values[y].shape
    right = y if len(shape) == 1 or shape[-2] == inner else f"{y}.mT"
    if right == y and len(shape) == 1 and shape[0] != inner:
        raise SkipError
    batch = w.values[x].shape[:-2], shape[:-2]
    if not meets(*batch):
        raise SkipError
    return f"{x} @ {right} * 0.5"


@operator
def einsum(w: Writer) -> str:
    x = w.real(lambda t: t.dim() == 2)
    columns = w.values[x].shape[1]
    y = w.real(lambda t: t.dim() == 2 and t.shape[1] == columns)
    forms = ("bi,kj->bk", "bi,ki->bk", "bi,ki->bki", "bi,ki->i", "bi,ki->k")
    return f"torch.einsum({w.among(forms)!r}, {x}, {y}) * 0.3"


@operator
def layer(w: Writer) -> str:
    x = w.array(2)
    last = w.values[x].shape[-1]
    g = w.real(lambda t: t.shape == (last,))
    forms = (
        "F.layer_norm({x}, ({n},), {g}, eps=0.1)",
        "F.layer_norm({x}, ({n},), {g}, {g}, eps=0.1)",
        "F.rms_norm({x}, ({n},), {g}, eps=0.1)",
        "F.layer_norm({x}, {x}.shape[1:], eps=0.1) * {g}",
        "F.group_norm({x}[..., None], 1, eps=0.1)[..., 0] + {g}",
        "F.linear({x}, {x}.reshape(-1, {n})[:1], {g}[:1])",
        "F.batch_norm({x}.reshape(-1, {n}), None, None, {g}, {g}, True, eps=0.1)",
        "torch.addmm({g}, {x}.reshape(-1, {n}), torch.eye({n}, dtype=torch.float64))",
    )
    return w.among(forms).format(x=x, n=last, g=g)


@operator
def attention(w: Writer) -> str:
    x = w.array(2)
    forms = (
        "F.scaled_dot_product_attention({x}[None], {x}[None], {x}[None])[0]",
        "F.scaled_dot_product_attention({x}[:, None], {x}[:, None], {x}[:, None])",
        "({x} @ {x}.mT).softmax(-1) @ {x}",
        "F.cosine_similarity({x}[None] + 3, {x}[:, None], -1)",
        "torch.cdist({x} + 3, {x}.detach() - 3)",
        "({x}[:, None] * {x}[None]).sum(-1)",
        "vmap(lambda r: r.tanh() * r.sum())({x})",
        "vmap(grad(lambda r: (r.sin() * r).sum()))({x})",
        "F.conv1d({x}[None].flatten(0, -3), {x}[..., :1].flatten(0, -2)[:1, None]"
        ".expand({x}.shape[-2], {x}.shape[-2], 1))",
        "F.avg_pool1d({x}.flatten(0, -3) if {x}.dim() > 3 else {x}, 1)",
    )
    return w.among(forms).format(x=x)


# --- views -----------------------------------------------------------------


@operator
def reshape(w: Writer) -> str:
    """Merges some neighbours of a value's dimensions and splits others."""
    x = w.array()
    left = w.values[x].numel()
    shape: list[int] = []
    while left > 1 and len(shape) < 3:
        length = w.among([n for n in range(1, left + 1) if left % n == 0])
        shape.append(length)
        left //= length
    return f"{x}.reshape({', '.join(map(str, [*shape, left]))})"


@operator
def view(w: Writer) -> str:
    x = w.array()
    rank = w.values[x].dim()
    forms = (
        "{x}.permute({p})",
        "{x}.unsqueeze({d})",
        "{x}.squeeze()",
        "{x}.movedim({d}, 0)",
        "{x}.flatten()",
        "{x}.flatten(0, 1)" if rank > 1 else "{x}.view(-1, 1)",
        "{x}[None].expand(2, *{x}.shape)",
        "{x}.mT" if rank > 1 else "{x}[:, None]",
        "{x}.contiguous()",
    )
    order = w.among(list(itertools.permutations(range(rank))))
    return w.among(forms).format(x=x, p=order, d=w.dim(x))


@operator
def part(w: Writer) -> str:
    x = w.array()
    d = w.dim(x)
    length = w.values[x].shape[d]
    start = w.choose(length)
    forms = (
        "{x}.narrow({d}, {s}, {rest})",
        "{x}.select({d}, {s})",
        "{x}[::2]",
        "{x}[-1]",
        "{x}[..., {neg}:]",
        "{x}.split({some}, {d})[0]",
        "{x}.chunk(2, {d})[-1]",
        "{x}.unbind({d})[{s}]",
        "{x}.tensor_split(3, {d})[0]",
        "{x}.diagonal()" if w.values[x].dim() > 1 else "{x}.diag()",
        "{x}.tril()" if w.values[x].dim() > 1 else "{x}.diag_embed()",
        "{x}.triu(1) + 0.1" if w.values[x].dim() > 1 else "torch.outer({x}, {x})",
    )
    some, neg = start + 1, -w.values[x].shape[-1] // 2
    return w.among(forms).format(
        x=x, d=d, s=start, rest=length - start, some=some, neg=neg
    )


@operator
def join(w: Writer) -> str:
    x = w.array()
    shape = w.values[x].shape
    d = w.dim(x)
    y = w.real(lambda t: t.shape == shape)
    forms = (
        "torch.cat([{x}, {y}], {d})",
        "torch.stack([{x}, {y}], {d})",
        "torch.cat([{x}, {y} * 2, {x}.narrow({d}, 0, 1)], {d})",
        "{x}.repeat_interleave(2, {d})",
        "{x}.repeat(2, {ones})",
        "{x}.tile(2)",
        "F.pad({x}, (1, 2))",
        "F.pad({x}, ({pad}1, 0), value=0.5)",
        "torch.slice_scatter({x}, {y}.narrow({d}, 0, 1), {d}, 0, 1)",
        "torch.select_scatter({x}, {y}.select({d}, 0), {d}, -1)",
    )
    ones = ", ".join("1" for _ in shape)
    return w.among(forms).format(
        x=x, y=y, d=d, ones=ones, pad="0, 0, " * (len(shape) - 1)
    )


# --- lookups ---------------------------------------------------------------


@operator
def lookup(w: Writer) -> str:
    x = w.array()
    d = w.dim(x)
    i = w.indices(w.values[x].shape[0], lambda t: 0 < t.dim() < 3)
    forms = (
        "{x}[{i}]",
        "{x}.index_select(0, {i}.flatten())",
        "F.embedding({i}, {x}.reshape({x}.shape[0], -1))",
        "F.one_hot({i}, {n}).double().flatten(0, -2) @ {x}.reshape({n}, -1)",
        "torch.zeros_like({x}).index_add(0, {i}.flatten(), {x}[{i}.flatten()]) + 0.1",
        "{x}.index_put(({i}.flatten(),), {x}[:1] * 0.5, accumulate=True)",
        "torch.take_along_dim({x}, {i}.flatten().view(-1, {ones}), 0)",
    )
    ones = ", ".join(["1"] * (w.values[x].dim() - 1)) or "1"
    if w.values[x].dim() == 1 and ones:
        ones = ""
    form = w.among(forms)
    return form.format(x=x, d=d, i=i, n=w.values[x].shape[0], ones=ones)


@operator
def gather(w: Writer) -> str:
    x = w.array()
    shape, d = w.values[x].shape, w.dim(x)
    rest = [n for e, n in enumerate(shape) if e != d % len(shape)]
    i = w.indices(
        shape[d],
        lambda t: (
            t.dim() == len(shape)
            and [n for e, n in enumerate(t.shape) if e != d % len(shape)] == rest
        ),
    )
    forms = (
        "{x}.gather({d}, {i})",
        "{x}.scatter_add({d}, {i}, {x}.gather({d}, {i}))",
        "{x}.scatter({d}, {i}[..., :1] * 0, 0.5)",
    )
    return w.among(forms).format(x=x, d=d, i=i)


@operator
def fixed(w: Writer) -> str:
    """A value combined with a constant that the step makes."""
    x = w.array()
    rows, columns = w.values[x].shape[0], w.values[x].shape[-1]
    forms = (
        "{x} + torch.arange({n}) / 4",
        "{x} + torch.arange({n}, dtype=torch.float64).flip(0) / 5",
        "{x} @ torch.ones({n}, {n}, dtype=torch.float64).tril()",
        "{x} @ torch.eye({n}, 3, dtype=torch.float64)",
        "{x} * torch.linspace(0.1, 1, {n}, dtype=torch.float64)",
        "{x} + torch.tensor(0.25)",
        "{x}[torch.arange({r}).flip(0)]",
        "torch.where(torch.arange({n}) % 2 == 0, {x}, {x}.cos())",
        "{x} + torch.full(({n},), 0.2)",
        "torch.arange({r} * {n}).view({r}, {n}) / 30 + {x}.mean()",
        "torch.arange({r})",
        "torch.arange({r}) % 2 == 0",
        "{x} + math.pi / 4",
    )
    return w.among(forms).format(x=x, n=columns, r=rows)
