"""The stages of a step; stop at each of them and read it, as in `jax.stages`."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._arguments import Call
from ._boundary import (
    Result,
    describe_results,
    donate,
    expressible,
    give_up,
    input_part,
    input_placements,
    refuse_shared_donations,
    result_leaves,
    wanted_placements,
)
from ._capture import Captures
from ._cost import cost, memory
from ._errors import ArgumentError
from ._graph import Graph
from ._interpret import Runner
from ._layout import Placements
from ._listing import listing
from ._lower import lower
from ._mesh import axis_names, axis_sizes
from ._place import place
from ._plan import plan
from ._program import Program
from ._results import Matcher
from ._schedule import Schedule
from ._tree import unflatten
from ._world import Part, World, receives, world_of


@dataclass(frozen=True)
class Traced:
    """A step as a global graph of ATen operators, at unsharded shapes.

    Attributes:
        graph: The graph.
        mesh: The mesh that it will be placed on.
        schedule: The knobs of its schedule.
    """

    graph: Graph
    mesh: DeviceMesh
    schedule: Schedule
    call: Call = field(repr=False)
    key: Hashable = field(repr=False)
    held: Sequence[Any] = field(repr=False)  # what the key knows by its id
    match: Matcher = field(repr=False)
    bind: Callable[..., tuple[Call, Captures, Hashable]] = field(repr=False)

    def __repr__(self) -> str:
        return f"<{len(self.graph.nodes)} operators; see .as_text()>"

    def as_text(self) -> str:
        """One line for each input, operator and output."""
        return self.graph.as_text()

    def lower(self) -> "Lowered":
        """Place the graph on the mesh and schedule it.

        Raises:
            ArgumentError: A leaf of the batch has no leading dimension.
        """
        inputs = input_placements(self.graph, self.mesh)
        matched = self.match(self.call, self.graph)
        wanted = wanted_placements(self.call, matched, self.mesh)
        placed = place(
            self.graph,
            axis_sizes(self.mesh),
            inputs,
            wanted,
            lambda placements, meta: expressible(placements, meta, self.mesh),
            self.schedule,
        )
        program = plan(
            placed,
            lower(placed, self.schedule.fast_products),
            axis_names(self.mesh),
            self.schedule,
            self._donated(matched),
            receives(self.mesh),
        )
        results = describe_results(self.call, self.graph, program, matched, self.mesh)
        return Lowered(program, self, inputs, results)

    def _donated(self, matched: Sequence[int | None]) -> dict[int, int]:
        """For outputs that take the place of a donated shard, its input."""
        given, leaves = self.call.donated(), self.call.leaves
        at = {
            entry.source: n
            for n, entry in enumerate(self.graph.inputs)
            if entry.role == "state" and entry.source in given
        }
        return {
            output: at[leaf]
            for output, leaf in enumerate(matched)
            if leaf is not None and leaf in at and isinstance(leaves[leaf], DTensor)
        }


@dataclass(frozen=True)
class Lowered:
    """A step as a program: what every rank does, before it does it.

    Attributes:
        plan: The program; `yafsdp_fn.check(plan)` is its specification.
    """

    plan: Program = field(repr=False)
    traced: Traced = field(repr=False)
    inputs: Sequence[Placements] = field(repr=False)
    results: Sequence[Result] = field(repr=False)

    def __repr__(self) -> str:
        count, cost = len(self.plan.instructions), self.cost_analysis()
        return f"<{count} instructions on {self.plan.mesh}; {cost}; see .as_text()>"

    def as_text(self) -> str:
        """The schedule: a line for each collective and each run of operators.

        `.plan.as_text()` has one line for every instruction.
        """
        return listing(self.plan)

    def memory_analysis(self) -> dict[str, int]:
        """Bytes that the first rank, which never holds less than another, holds.

        Returns:
            "peak_bytes": the most at any moment: the sum of "shard_bytes",
                "constant_bytes", "arena_bytes" and of what is allocated beside them.
            "shard_bytes": inputs, which stay.
            "constant_bytes": what is computed once and kept.
            "arena_bytes": what is allocated once and computed in.
            "output_bytes": the results.
            "gathered_bytes", "gradient_bytes", "activation_bytes", "temporary_bytes":
                what is in use at the moment when most is: gathered parameters;
                gradients with what the ranks send of them; what is kept from one group
                of parameters to another; all else.
        """
        return memory(self.plan)

    def cost_analysis(self) -> dict[str, int]:
        """What a step computes and communicates.

        Returns:
            "flops": floating-point operations of the first rank, in products,
                convolutions and attention; a multiplication and an addition are two.
            "all_gathers" and "reductions": numbers of values gathered and reduced.
            "gathered_bytes" and "reduced_bytes": their global size.
            "collectives": number of exchanges; values of a group share one.
            "unplanned_collectives": those that are neither the gather of a state nor
                the reduction of a pending sum.
        """
        return cost(self.plan)

    def compile(self) -> "Compiled":
        """Bind the program to this process, or to all emulated ranks."""
        world = world_of(self.traced.mesh)
        return Compiled(self, world, world.executor(self.plan))


@dataclass(frozen=True)
class Compiled:
    """A program that can be executed on arguments like those it was made for."""

    lowered: Lowered
    world: World = field(repr=False)
    executor: Any = field(repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute the step.

        Raises:
            ArgumentError: Arguments of another structure than the program was made for.
        """
        return self.execute(*self._bound(args, kwargs))

    def _bound(self, args: Any, kwargs: Any) -> tuple[Call, Captures]:
        traced = self.lowered.traced
        call, captured, key = traced.bind(args, kwargs)
        if key != traced.key:
            raise ArgumentError(
                f"{call.signature.name} was compiled for arguments of another "
                "structure, shape, dtype or placement, or for other static or captured "
                "values. Lower and compile it for these, or call the sharded function, "
                "which does so by itself."
            )
        return call, captured

    def _parts(self, call: Call, captured: Captures) -> list[Part]:
        """What the ranks hold of the inputs."""
        inputs = self.lowered.traced.graph.inputs
        entries = zip(inputs, self.lowered.inputs, strict=True)
        return [input_part(e, p, call, captured, self.world) for e, p in entries]

    def execute(self, call: Call, captured: Captures) -> Any:
        """Execute on arguments that are bound already."""
        traced, results = self.lowered.traced, self.lowered.results
        parts = self._parts(call, captured)
        refuse_shared_donations(call, captured, self.world)
        try:
            made = self.executor(parts)
        except BaseException:  # some may have been written, and others not
            give_up(call, f"{call.signature.name}, which failed in the middle")
            raise
        donate(call, results, made, self.world, call.signature.name)
        leaves = result_leaves(results, made, call, self.world, traced.mesh)
        return unflatten(traced.graph.spec, leaves)

    def communicate(self, *args: Any, **kwargs: Any) -> None:
        """Execute the collectives of the step alone: what communication takes.

        Raises:
            ArgumentError: The ranks of the mesh are emulated, or other arguments than
                the program was made for.
        """
        self._part(args, kwargs, communication=True)

    def compute(self, *args: Any, **kwargs: Any) -> None:
        """Execute the step but for its collectives: what computing takes.

        Donated arguments hold numbers without a meaning afterwards.

        Raises:
            ArgumentError: As for `communicate`.
        """
        self._part(args, kwargs, communication=False)

    def _part(self, args: Any, kwargs: Any, communication: bool) -> None:
        if not isinstance(self.executor, Runner):
            raise ArgumentError(
                "on an emulated mesh ranks do not communicate, so there is nothing to "
                "measure. Start processes, with torchrun or yf.launch."
            )
        self.executor.part(self._parts(*self._bound(args, kwargs)), communication)

    def as_text(self) -> str:
        """See `Lowered.as_text`."""
        return self.lowered.as_text()

    def memory_analysis(self) -> dict[str, int]:
        """See `Lowered.memory_analysis`."""
        return self.lowered.memory_analysis()

    def cost_analysis(self) -> dict[str, int]:
        """See `Lowered.cost_analysis`."""
        return self.lowered.cost_analysis()

    @property
    def plan(self) -> Program:
        """The program."""
        return self.lowered.plan
