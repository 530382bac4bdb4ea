"""The schedule as text: one line for a collective, one for a run of operators.

What a reader wants to see of a step: which parameters are gathered when, into which
bytes of the arena, under which of the model's lines; what is reduced, and under what.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from ._cost import computed
from ._program import (
    Adjust,
    Buffer,
    Compute,
    Free,
    Program,
    Start,
    Transfer,
    Wait,
)


def listing(program: Program) -> str:
    """The readable schedule of a program."""
    writer = _Writer(program)
    lines = [f"schedule on mesh {program.mesh}, arena of {_bytes(program.arena)}"]
    if program.constants:
        lines.append(f"once      {len(program.constants)} operators on constants")
    return "\n".join([*lines, *writer.lines()])


class _Writer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.runs = _runs(program)
        self.under = _under(self.runs)
        self.number: dict[int, int] = {}  # of a transfer, by its identity

    def lines(self) -> Iterator[str]:
        for run in self.runs:
            head = run[0]
            if isinstance(head, Start):
                self.number[id(head.transfer)] = len(self.number)
                yield self._start(head.transfer)
            elif isinstance(head, Wait):
                yield f"{'wait':<9} {self._name(head.transfer)}"
            else:
                yield self._computed(run)

    def _name(self, transfer: Transfer) -> str:
        number = self.number[id(transfer)]
        return f"{_word(transfer)} {number}: {self._what(transfer)}"

    def _start(self, transfer: Transfer) -> str:
        program = self.program
        moved = sum(program.values[ref.id].meta.nbytes for ref in transfer.sources)
        axis = program.axes[transfer.axis]
        text = f"{'start':<9} {self._name(transfer)}, {_bytes(moved)} over {axis}"
        places = self._places(transfer)
        under = self.under[id(transfer)]
        planned = "" if transfer.planned else ", unplanned"
        return f"{text}{places}{planned}, under {under}"

    def _what(self, transfer: Transfer) -> str:
        """The leaves that are gathered, or what is reduced."""
        labels = [label for label in transfer.labels if label]
        if labels:
            first, *rest = labels
            return f"{first} and {len(rest)} more" if rest else first
        names = [self.program.name(ref) for ref in transfer.sources]
        shown = names[0].partition(": ")[2].partition(" pending")[0]
        return f"{shown} and {len(names) - 1} more" if len(names) > 1 else shown

    def _places(self, transfer: Transfer) -> str:
        """Which bytes of the arena the whole values take."""
        owner, buffers = self.program.owner, self.program.buffers
        refs = transfer.whole
        found = [buffers[n] for r in refs if (n := owner.get(r.id, r.id)) in buffers]
        if not found:
            return ""
        ranges = [f"{b.offset}..{b.end}" for b in _together(found)]
        return f", at {_few(ranges)}"

    def _computed(self, run: "_Run") -> str:
        operators = list(computed(run))
        text = f"{'compute':<9} {_where(operators)}, {_operators(len(operators))}"
        regions = sum(hasattr(getattr(i, "op", None), "instructions") for i in run)
        text += f" ({regions} region{'s' * (regions > 1)})" if regions else ""
        leaves = list(dict.fromkeys(self._leaves(operators)))
        return f"{text} on {_few(leaves)}" if leaves else text

    def _leaves(self, operators: "list[Compute]") -> Iterator[str]:
        """The gathered parameters that operators read."""
        gathered = self._gathered
        owner = self.program.owner
        for operator in operators:
            for ref in operator.reads:
                label = gathered.get(owner.get(ref.id, ref.id))
                if label:
                    yield label

    @cached_property
    def _gathered(self) -> Mapping[int, str]:
        gathers = [t for t in self.program.transfers() if t.kind == "all_gather"]
        pairs = (zip(t.targets, t.labels, strict=True) for t in gathers)
        return {target.id: label for rows in pairs for target, label in rows}


_Run = list[Any]  # operators, or one start or wait


def _runs(program: Program) -> list[_Run]:
    """Instructions in runs: transfers alone, operators between them together."""
    shown = [i for i in program.instructions if not isinstance(i, Free)]
    grouped = itertools.groupby(enumerate(shown), lambda row: _key(*row))
    return [[instruction for _, instruction in group] for _, group in grouped]


def _key(position: int, instruction: Any) -> int:
    """Equal for neighbours that belong to one run."""
    return -1 if isinstance(instruction, Compute | Adjust) else position


def _is_computed(run: _Run) -> bool:
    return isinstance(run[0], Compute | Adjust)


def _under(runs: list[_Run]) -> dict[int, str]:
    """For every transfer the lines that are computed from its start to its wait."""
    found: dict[int, str] = {}
    for n, run in enumerate(runs):
        if isinstance(run[0], Start):
            transfer = run[0].transfer
            inside: list[_Run] = []
            for later in runs[n + 1 :]:
                if isinstance(later[0], Wait) and later[0].transfer is transfer:
                    break
                inside += [later] if _is_computed(later) else []
            merged = [i for each in inside for i in computed(each)]
            count = _operators(len(merged))
            where = f"{count} of {_where(merged)}" if merged else "nothing"
            found[id(transfer)] = where
    return found


def _where(run: _Run) -> str:
    """The user's lines of a run."""
    lines = [i.line.rpartition("/")[2] for i in run if isinstance(i, Compute)]
    unique = list(dict.fromkeys(line for line in lines if line))
    files: dict[str, list[str]] = {}
    for line in unique:
        file, _, number = line.rpartition(":")
        files.setdefault(file, []).append(number)
    return "; ".join(f"{f}:{_few(numbers, ',')}" for f, numbers in files.items())


def _few(names: list[str], separator: str = ", ") -> str:
    shown = names if len(names) <= _SHOWN else [*names[: _SHOWN - 1], "…", names[-1]]
    return separator.join(shown)


_SHOWN = 4


def _operators(count: int) -> str:
    return "1 operator" if count == 1 else f"{count} operators"


def _together(buffers: list[Buffer]) -> list[Buffer]:
    """Ranges, those that touch as one."""
    found: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda b: b.offset):
        if found and found[-1].end >= buffer.offset:
            nbytes = max(found[-1].end, buffer.end) - found[-1].offset
            found[-1] = replace(found[-1], nbytes=nbytes)
        else:
            found.append(buffer)
    return found


def _word(transfer: Transfer) -> str:
    return (
        "gather" if transfer.kind == "all_gather" else transfer.kind.replace("_", "-")
    )


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
