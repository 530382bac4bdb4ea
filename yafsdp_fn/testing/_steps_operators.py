"""Operators of random steps on the numbers of a value: one by one, or many in one."""

from ._steps_writer import Table, Writer, entered_in, meets

OPERATORS: Table = {}
operator = entered_in(OPERATORS)

# --- elementwise -----------------------------------------------------------


@operator
def smooth(w: Writer) -> str:
    forms = (
        "{x}.tanh()",
        "{x} * 0.7",
        "{x} + 0.3",
        "{x} * {x}",
        "-{x}",
        "(0.3 * {x}).exp()",
        "{x}.sin()",
        "{x}.sigmoid()",
        "F.gelu({x})",
        "F.silu({x})",
        "F.softplus({x})",
        "({x} * {x} + 0.5).sqrt()",
        "1 / ({x} * {x} + 1)",
        "({x} * {x}).log1p()",
        "{x} / 3 - 1",
        "2 - {x}",
        "{x}.clone()",
        "{x}.detach() * 0.5 + {x}",
        "torch.complex({x}, {x} * 0.5 + 1).abs()",
        "torch.view_as_real(torch.complex({x}, {x}.cos()))",
        "torch.zeros_like({x}) + {x}",
        "torch.ones_like({x}) * 0.1 - {x}",
    )
    return w.among(forms).format(x=w.real())


@operator
def kinked(w: Writer) -> str:
    forms = (
        ("{x}.relu()", (0.0,)),
        ("{x}.abs()", (0.0,)),
        ("{x}.clamp(-0.3, 0.4)", (-0.3, 0.4)),
        ("torch.where({x} > 0.1, {x}, {x} * {x})", (0.1,)),
        ("{x}.sign() + {x}", (0.0,)),
        ("F.leaky_relu({x}, 0.2)", (0.0,)),
        ("{x}.masked_fill({x} < 0, 0.5)", (0.0,)),
        ("{x} > 0.2", (0.2,)),
        ("(3 * {x}).floor().long() % 3", tuple(n / 3 for n in range(-12, 13))),
        ("({x} > 0).to(torch.float64)", (0.0,)),
        ("({x} < 0.5).long()", (0.5,)),
    )
    form, points = w.among(forms)
    x = w.real()
    w.away(x, *points)
    return form.format(x=x)


@operator
def binary(w: Writer) -> str:
    x = w.real()
    shape = w.values[x].shape
    y = w.real(lambda t: meets(t.shape, shape))
    forms = (
        "{x} + {y}",
        "{x} * {y}",
        "{x} - {y}",
        "{x} / ({y} * {y} + 0.5)",
        "torch.lerp({x}, {y}, 0.3)",
        "torch.addcmul({x}, {y}, {x}, value=0.5)",
        "torch.atan2({x}, {y} * {y} + 0.5)",
        "torch.add({x}, {y}, alpha=0.5)",
        "torch.hypot({x} + 5, {y})",
    )
    return w.among(forms).format(x=x, y=y)


@operator
def masked(w: Writer) -> str:
    x = w.real()
    m = w.mask(w.values[x].shape)
    forms = (
        "torch.where({m}, {x}, 0.0)",
        "{x} * {m}",
        "{x}.masked_fill({m}, -0.5)",
        "torch.where({m}, {x}.sin(), {x})",
        "torch.where({m}, {x}, -9.0).softmax({d})",
    )
    return w.among(forms).format(m=m, x=x, d=w.dim(x) if w.values[x].dim() else 0)


@operator
def integral(w: Writer) -> str:
    """Operators on integers and truth values."""
    x = w.pick(lambda t: not t.dtype.is_floating_point and t.dim() > 0)
    d = w.dim(x)
    forms = (
        "{x}.sum()",
        "{x}.sum({d})",
        "{x}.cumsum({d})",
        "{x}.long().amax({d})",
        "{x}.long() * 2 + 1",
        "({x} == 0).any({d})",
        "({x} == 0).all()",
        "{x}.flip({d})",
        "{x}.to(torch.float64)",
        "{x}.float().sum().double()",
        "torch.count_nonzero({x})",
        "~({x} == 0)",
        "{x}.long().reshape(-1)",
    )
    return w.among(forms).format(x=x, d=d)


# --- reductions and scans --------------------------------------------------


@operator
def reduce(w: Writer) -> str:
    x = w.array()
    forms = (
        "{x}.sum({d}, keepdim={k})",
        "{x}.mean({d}, keepdim={k})",
        "{x}.logsumexp({d}, keepdim={k})",
        "{x}.var({d}, correction=0, keepdim={k})",
        "({x} + 3).norm(dim={d}, keepdim={k})",
        "torch.linalg.vector_norm({x} + 9, 3, dim={d}, keepdim={k})",
        "torch.linalg.vector_norm({x} + 9, 1, dim={d}, keepdim={k})",
    )
    form = w.among(forms)
    return form.format(x=x, d=w.dims(x), k=bool(w.choose(2)))


@operator
def extreme(w: Writer) -> str:
    x = w.array()
    d, k = w.dims(x), bool(w.choose(2))
    w.apart(x, d)
    forms = ("{x}.amax({d}, {k})", "{x}.amin({d}, {k})")
    alone = (
        "{x}.max({d}, {k})[0]",
        "{x}.argmax({d}, {k})",
        "{x}.min({d}, {k})[1]",
        "{x}.median({d}, {k})[0]",
        "{x}.kthvalue(1, {d}, {k})[0]",
        "{x}.argsort({d})",
        "{x}.sort({d}, descending={k})[0]",
        "{x}.topk(1, {d})[0]",
        "{x}.topk(({x}.shape[{d}] + 1) // 2, {d}).indices",
        "{x}.cummax({d})[0]",
    )
    form = w.among(forms + alone if len(d) == 1 else forms)
    return form.format(x=x, d=d if form in forms else d[0], k=k)


@operator
def everything(w: Writer) -> str:
    """Reduces a value to a number."""
    x = w.array()
    forms = (
        "{x}.sum()",
        "{x}.mean()",
        "({x} * {x}).mean()",
        "{x}.norm()",
        "{x}.flatten().logsumexp(0)",
        "({x} * 0.1 + 1).prod()",
        "torch.trace({x}.flatten(0, -1)[:, None] * {x}.flatten())",
    )
    return w.among(forms).format(x=x)


@operator
def along(w: Writer) -> str:
    x = w.array()
    forms = (
        "{x}.softmax({d})",
        "{x}.log_softmax({d})",
        "{x}.cumsum({d})",
        "({x} * 0.1 + 1).cumprod({d})",
        "{x}.logcumsumexp({d})",
        "{x}.flip({d})",
        "{x}.roll(1, {d})",
        "F.normalize({x} + 3, dim={d})",
        "{x} - {x}.mean({d}, keepdim=True)",
        "torch.diff({x}, dim={d}, prepend={x}.narrow({d}, 0, 1) * 0.5)",
        "F.glu(torch.cat([{x}, {x} * 0.5], {d}), {d})",
        "torch.stack([{x}, {x}.sin()], {d}).sum({d})",
    )
    return w.among(forms).format(x=x, d=w.dim(x))
