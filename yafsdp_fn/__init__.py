"""yafsdp_fn: functional sharding for PyTorch.

A train step is a pure function of pytrees, written for one device and the whole batch.
`shard` turns it into the same function on a mesh.
"""

# ruff: noqa: I001 - the order is a reader's, not the alphabet's

# The transform, and its stages.
from ._shard import shard as shard
from ._shard import ShardedFunction as ShardedFunction
from ._schedule import Schedule as Schedule
from ._stages import Traced as Traced
from ._stages import Lowered as Lowered
from ._stages import Compiled as Compiled
from ._program import Program as Program
from ._check import check as check

# Transforms that compose with torch.func.
from ._accumulate import accumulate as accumulate
from ._remat import remat as remat
from ._remat import name_value as name_value

# Modules as pure functions.
from ._functional import functional as functional

# Random numbers from keys.
from . import random as random

# Meshes, and trees on them.
from ._mesh import make_mesh as make_mesh
from ._distribute import distribute as distribute
from ._distribute import full as full
from ._distribute import from_local as from_local
from ._init import init as init
from ._init import eval_shape as eval_shape

# Trees on disk.
from . import checkpoint as checkpoint

# Optimisers.
from . import optim as optim

# Tests of a step, for your own suite.
from . import testing as testing

# Processes.
from ._launch import launch as launch
from ._launch import LaunchError as LaunchError

# Errors.
from ._errors import YafsdpError as YafsdpError
from ._errors import ArgumentError as ArgumentError
from ._ranks import RankError as RankError
from .checkpoint import CheckpointError as CheckpointError
from ._errors import TraceError as TraceError
from ._errors import DonatedError as DonatedError
from ._errors import MismatchError as MismatchError
from ._errors import ProgramError as ProgramError
from ._errors import RetraceWarning as RetraceWarning
