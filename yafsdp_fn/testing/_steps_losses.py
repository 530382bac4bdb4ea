"""How random steps end: their losses, updates and optimisers."""

from ._steps_writer import Table, Writer, entered_in

# --- losses ---------------------------------------------------------------------------

LOSSES: Table = {}
loss = entered_in(LOSSES)


@loss
def plain(w: Writer) -> str:
    forms = (
        "({x} * {x}).mean()",
        "{x}.sum() * 0.1",
        "{x}.flatten().logsumexp(0)",
        "{x}.mean() * ({x} * {x}).mean()",
        "({x} * {x}).sum() / {x}.numel() + {x}.mean(0).pow(2).sum()",
        "(({x} - {x}.mean(0)) ** 2).mean()",
        "{x}.sigmoid().log().mean()",
        "F.mse_loss({x}, {x}.detach() * 0.5)",
        "F.smooth_l1_loss({x}, torch.full_like({x}, 9.0))",
        "({x} * {x}).mean(0).sqrt().sum()",
        "1 / (({x} * {x}).mean() + 0.5)",
        "{x}.var(0, correction=0).sum()",
    )
    return w.among(forms).format(x=w.array())


@loss
def weighted(w: Writer) -> str:
    x = w.array()
    m = w.mask(w.values[x].shape)
    forms = (
        "({x} * {m}).sum() / {m}.sum().clamp(min=1)",
        "torch.where({m}, {x} * {x}, 0).sum() / ({m}.sum() + 1)",
        "torch.where({m}, {x}, -5).flatten().logsumexp(0)",
    )
    return w.among(forms).format(x=x, m=m)


@loss
def peak(w: Writer) -> str:
    x = w.array()
    w.apart(x, range(w.values[x].dim()))
    return w.among(("{x}.max()", "{x}.amax(0).sum()", "-{x}.amin()")).format(x=x)


@loss
def pairwise(w: Writer) -> str:
    x = w.real(lambda t: t.dim() == 2)
    forms = (
        "F.cross_entropy({x} @ {x}.T, torch.arange(len({x})))",
        "({x} @ {x}.T).tril(-1).pow(2).mean()",
        "({x}[:, None] - {x}[None] + 0.1).pow(2).sum(-1).add(1).sqrt().mean()",
        "(F.normalize({x} + 2, dim=1) @ F.normalize({x} - 2, dim=1).T).exp().mean()",
    )
    return w.among(forms).format(x=x)


@loss
def classes(w: Writer) -> str:
    x = w.real(lambda t: t.dim() == 2 and t.shape[1] > 1)
    rows, columns = w.values[x].shape
    y = w.indices(columns, lambda t: t.shape == (rows,))
    forms = (
        "F.cross_entropy({x}, {y})",
        "F.cross_entropy({x}, {y}, ignore_index=0, reduction='sum')",
        "F.cross_entropy({x}, {y}, label_smoothing=0.1)",
        "F.cross_entropy({x}, {y}, weight=torch.arange({n}).double() + 1)",
        "-({x}.log_softmax(1).gather(1, {y}[:, None])).mean()",
        "F.nll_loss({x}.log_softmax(1), {y})",
        "F.binary_cross_entropy_with_logits({x}, F.one_hot({y}, {n}).double())",
    )
    return w.among(forms).format(x=x, y=y, n=columns)


# --- updates --------------------------------------------------------------------------

UPDATES = {
    "sgd": "{k: p - 0.1 * g[k] for k, p in params.items()}",
    "rate": "{k: p - opt_state['rate'] * g[k] for k, p in params.items()}",
    "normed": "{k: p - 0.1 * g[k] / (g[k].norm() + 0.1) for k, p in params.items()}",
    "rows": "{k: p - 0.1 * g[k] / (g[k].pow(2).mean(-1, True) + 0.1).sqrt()"
    " if p.dim() else p for k, p in params.items()}",
    "centred": "{k: p - 0.1 * (g[k] - g[k].mean(0)) if p.dim() and p.numel() else p"
    " for k, p in params.items()}",
    "by shape": "{k: p - 0.1 * (p.dim() + 1) * g[k] if len(p.shape) == 2 else p * 0.99"
    " for k, p in params.items()}",
    "matrix": "{k: p - 0.1 * (g[k] @ g[k].mT @ g[k]) if p.dim() == 2 else p - g[k] / 9"
    " for k, p in params.items()}",
    "bounded": "{k: (p - 0.1 * g[k]).clamp(-3, 3) for k, p in params.items()}",
    "clipped": "{k: p - 0.1 * g[k] * (1 / (norm + 0.1)).clamp(max=1.0)"
    " for k, p in params.items()}",
}
OPTIMISERS = (
    "yf.optim.sgd(0.1)",
    "yf.optim.sgd(0.1, momentum=0.9)",
    "yf.optim.adamw(0.01, eps=0.1)",
    "yf.optim.adamw(0.01, eps=0.1, weight_decay=0.1, fused=False)",
    "yf.optim.chain(yf.optim.clip_by_global_norm(0.5), yf.optim.sgd(0.1, 0.9, True))",
    "yf.optim.chain(yf.optim.clip_by_global_norm(0.1), yf.optim.adamw(0.01, eps=0.1))",
    "yf.optim.chain(yf.optim.clip_by_global_norm(0.1, 1.0), yf.optim.sgd(0.1))",
)
NORM = "sum((v * v).sum() for v in g.values()).add(1e-3).sqrt()"
