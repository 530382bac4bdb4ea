"""The proof as a library: what this library's own tests are made of, for yours.

`assert_agrees` compares a step of yours with itself, unsharded. The strategies are for
hypothesis (`pip install 'yafsdp_fn[test]'`), and draw what a function of sharded trees
has to cope with: lengths that do not divide, empty leaves, every dtype, several orders
in memory, meshes of one and two axes, and whole train steps.

A test of a transform of steps, in another project:

>>> from hypothesis import given, settings
>>> import yafsdp_fn as yf
>>> def twice(step):  # what is to be tested
...     def both(params, opt_state, batch):
...         params, opt_state, _ = step(params, opt_state, batch)
...         return step(params, opt_state, batch)
...     return both
>>> @settings(max_examples=2, database=None, deadline=None)
... @given(step=yf.testing.steps(), mesh=yf.testing.meshes())
... def test_twice(step, mesh):
...     yf.testing.assert_agrees(twice(step.fn), *step.args, mesh=mesh, steps=1)
>>> test_twice()
"""

# ruff: noqa: I001 - the order is a reader's, not the alphabet's

from importlib import import_module
from typing import TYPE_CHECKING, Any

# A step of yours: sharded and unsharded.
from ._agree import assert_agrees as assert_agrees

if TYPE_CHECKING:
    # Shapes, tensors, trees, meshes.
    from ._strategies import shapes as shapes
    from ._strategies import tensors as tensors
    from ._strategies import trees as trees
    from ._strategies import meshes as meshes

    # Whole steps.
    from ._steps import steps as steps
    from ._steps import RandomStep as RandomStep

# Imported when they are asked for, so that assert_agrees does not need hypothesis.
_LAZY = {
    **dict.fromkeys(("shapes", "tensors", "trees", "meshes"), "_strategies"),
    **dict.fromkeys(("steps", "RandomStep"), "_steps"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
