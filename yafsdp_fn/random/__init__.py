"""Random numbers as pure functions of a key, in the shape of `jax.random`.

The same key gives the same numbers, bit for bit, at every placement and world size, on
every device, under `vmap`, `grad` and `remat`. In a sharded step each rank makes only
its part of them. There is no global state.

>>> import torch, yafsdp_fn as yf
>>> key = yf.random.fold_in(yf.random.key(0), 17)  # of step 17
>>> for_mask, for_noise = yf.random.split(key)
>>> x = yf.random.dropout(for_mask, torch.ones(4), 0.5)
>>> x + yf.random.normal(for_noise, (4,))
tensor([ 2.5996, -1.2580,  0.0142, -0.5434])
"""

# ruff: noqa: I001 - the order is a reader's, not the alphabet's

# Keys.
from ._keys import key as key
from ._keys import split as split
from ._keys import fold_in as fold_in

# Bits, and what is decided by them.
from ._draws import bits as bits
from ._draws import uniform as uniform
from ._draws import bernoulli as bernoulli
from ._draws import dropout as dropout

# Distributions that are functions of uniform numbers.
from ._normal import normal as normal
from ._normal import categorical as categorical

# Orders.
from ._permutation import permutation as permutation
