"""The stages of a step; stop at each of them and read it, as in `jax.stages`."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ._arguments import Call
from ._boundary import (
    Result,
    describe_results,
    donate,
    expressible,
    input_part,
    input_placements,
    refuse_shared_donations,
    result_leaves,
    wanted_placements,
)
from ._capture import Captures
from ._errors import ArgumentError
from ._graph import Graph
from ._layout import Placements
from ._lower import lower
from ._mesh import axis_names, axis_sizes
from ._place import place
from ._plan import plan
from ._program import Program, peak
from ._results import Matcher
from ._schedule import Schedule
from ._tree import unflatten
from ._world import World, world_of


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
        program = plan(placed, lower(placed), axis_names(self.mesh))
        results = describe_results(self.call, self.graph, program, matched, self.mesh)
        return Lowered(program, self, inputs, results)


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
        """The schedule, one line an instruction."""
        return self.plan.as_text()

    def memory_analysis(self) -> dict[str, int]:
        """Bytes of values that the first rank holds.

        Returns:
            "peak_bytes": the most at any moment; "shard_bytes": the inputs, which stay;
            "output_bytes": the results.
        """
        program, first = self.plan, (0,) * len(self.plan.sizes)
        kept = {ref.id for ref in program.outputs if ref is not None}
        return {
            "peak_bytes": peak(program),
            "shard_bytes": sum(
                program.values[r.id].nbytes(first) for r in program.inputs
            ),
            "output_bytes": sum(program.values[n].nbytes(first) for n in kept),
        }

    def cost_analysis(self) -> dict[str, int]:
        """What a step communicates.

        Returns:
            "all_gathers" and "reductions": numbers of values gathered and reduced;
            "gathered_bytes" and "reduced_bytes": their global size;
            "unplanned_collectives": collectives that are neither the gather of a
            state nor the reduction of a pending sum.
        """
        values = self.plan.values
        transfers = list(self.plan.transfers())
        gathers = [t for t in transfers if t.kind == "all_gather"]
        reductions = [t for t in transfers if t.kind != "all_gather"]
        return {
            "all_gathers": sum(len(t.sources) for t in gathers),
            "reductions": sum(len(t.sources) for t in reductions),
            "gathered_bytes": _moved(values, gathers),
            "reduced_bytes": _moved(values, reductions),
            "unplanned_collectives": sum(not t.planned for t in transfers),
        }

    def compile(self) -> "Compiled":
        """Bind the program to this process, or to all emulated ranks."""
        world = world_of(self.traced.mesh)
        return Compiled(self, world, world.executor(self.plan))


def _moved(values: Any, transfers: Sequence[Any]) -> int:
    return sum(values[ref.id].meta.nbytes for t in transfers for ref in t.sources)


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
        traced = self.lowered.traced
        call, captured, key = traced.bind(args, kwargs)
        if key != traced.key:
            raise ArgumentError(
                f"{call.signature.name} was compiled for arguments of another "
                "structure, shape, dtype or placement, or for other static or captured "
                "values. Lower and compile it for these, or call the sharded function, "
                "which does so by itself."
            )
        return self.execute(call, captured)

    def execute(self, call: Call, captured: Captures) -> Any:
        """Execute on arguments that are bound already."""
        traced, results = self.lowered.traced, self.lowered.results
        entries = zip(traced.graph.inputs, self.lowered.inputs, strict=True)
        parts = [input_part(e, p, call, captured, self.world) for e, p in entries]
        refuse_shared_donations(call, self.world)
        made = self.executor(parts)
        donate(call, results, made, self.world, call.signature.name)
        leaves = result_leaves(results, made, call, self.world, traced.mesh)
        return unflatten(traced.graph.spec, leaves)

    def as_text(self) -> str:
        """The schedule, one line an instruction."""
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
