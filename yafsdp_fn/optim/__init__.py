"""Functional optimisers, in optax's shape.

An optimiser is two pure functions over pytrees; its state mirrors the parameters, so
that a shard of the parameters is stepped by a shard of the state.

>>> import torch, yafsdp_fn as yf
>>> optimiser = yf.optim.chain(
...     yf.optim.clip_by_global_norm(1.0),
...     yf.optim.adamw(yf.optim.warmup_cosine(3e-4, 100, 1_000)),
... )
>>> params = {"weight": torch.ones(2, 3), "bias": None}
>>> state = optimiser.init(params)
>>> grads = {"weight": torch.ones(2, 3), "bias": None}
>>> updates, state = optimiser.update(grads, state, params)
>>> params = yf.optim.apply_updates(params, updates)
"""

# ruff: noqa: I001 - the order is a reader's, not the alphabet's

# The shape of an optimiser, and how optimisers combine.
from ._transform import GradientTransformation as GradientTransformation
from ._transform import apply_updates as apply_updates
from ._transform import chain as chain
from ._transform import scale as scale

# Optimisers.
from ._adamw import AdamWState as AdamWState
from ._adamw import adamw as adamw
from ._sgd import SGDState as SGDState
from ._sgd import sgd as sgd

# Gradient clipping.
from ._clip import clip_by_global_norm as clip_by_global_norm
from ._clip import global_norm as global_norm

# Schedules of the learning rate.
from ._schedules import constant as constant
from ._schedules import warmup_cosine as warmup_cosine
from ._schedules import warmup_linear as warmup_linear
