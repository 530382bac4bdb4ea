"""Start processes from a script or a notebook, and bring their results back.

The parent writes one file, the call; each child reads it and writes one file, its
result or its failure. Everything else is a fresh interpreter a rank, torchrun's
variables, and a store for the rendezvous that lives in the parent.
"""

import contextlib
import dataclasses
import faulthandler
import importlib
import io
import linecache
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

import cloudpickle
import torch.distributed as dist

from ._errors import ArgumentError, YafsdpError
from .checkpoint._save import wait_for_saves

Result = TypeVar("Result")

# After the first failure, the time in which a rank may still report an earlier one.
_GRACE_SECONDS = 0.4

# What a rank says whose peer is gone: such a failure is an echo of another.
_ECHOES = ("/gloo/transport/", "DistBackendError", "DistNetworkError")

_OURS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


class LaunchError(YafsdpError, RuntimeError):
    """A launched process failed: which rank, how, and its whole trace-back."""


# --- the parent ----------------------------------------------------------------------


def launch(
    fn: Callable[..., Result],
    *args: Any,
    nprocs: int,
    env: Mapping[str, str] | None = None,
) -> list[Result]:
    """Calls `fn(*args)` in `nprocs` new processes of this machine.

    Each process is a fresh interpreter (so threads of the caller are no danger) with
    torchrun's variables set, so `make_mesh` or `init_process_group` inside `fn` finds
    its peers, once a launch (torch cannot safely begin a second default group on the
    same store). The group that runs when `fn` returns is destroyed. What the processes
    print goes to this process's standard output and error, line by line.

    `fn` may be a lambda, a closure or a function of a notebook or script: cloudpickle
    sends such a function by value, together with the globals that it uses. The script
    itself is not run again, so `if __name__ == "__main__":` holds in it as ever (only
    the parent enters it), and is not needed for `launch`. A function of any other
    module is imported by its name.

    Args:
        fn: What each rank calls. Nothing that it changes is seen by the caller.
        *args: Its arguments, the same on every rank.
        nprocs: How many processes to start, at least 1.
        env: More environment variables for the processes. `OMP_NUM_THREADS`, unless
            it is set here or in the caller's environment, is the number of
            processors divided by `nprocs`, at least 1: the threads of a rank's torch.

    Returns:
        What each rank returned, in rank order: a list of `nprocs` values.

    Raises:
        LaunchError: A rank raised, was killed, or returned what cannot be pickled.
            The first failure ends all other ranks at once, also those that wait in a
            collective; the message names the rank and holds its trace-back.
        ArgumentError: `nprocs` is no positive integer, `env` holds a variable that
            `launch` sets, `fn` or `args` cannot be pickled, or this process is itself
            a rank.

    The interface is that of `torch.multiprocessing.spawn` with results; the store in
    the parent is torchrun's, and leaves no port for two processes to race for.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> def total(start):
        ...     dist.init_process_group("gloo")
        ...     value = torch.tensor(start + dist.get_rank())
        ...     dist.all_reduce(value)
        ...     return dist.get_rank(), value.item()
        >>> launch(total, 10, nprocs=2)
        [(0, 21), (1, 21)]
    """
    _check_request(nprocs, env or {})
    call = _dump_call(fn, args)
    with tempfile.TemporaryDirectory(prefix="yafsdp-launch-") as name:
        directory = Path(name)
        (directory / "call").write_bytes(call)
        with _processes(directory, nprocs, env or {}) as processes:
            failures = _wait(processes, directory)
        if failures:
            raise LaunchError(_describe(failures, nprocs))
        return [_load_result(directory, rank) for rank in range(nprocs)]


def _check_request(nprocs: int, env: Mapping[str, str]) -> None:
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise ArgumentError(
            f"launch: nprocs is {nprocs!r}, but must be an integer of at least 1; "
            "write nprocs=1 for one process."
        )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ArgumentError(
            f"launch: this process is already rank {os.environ['RANK']} of "
            f"{os.environ['WORLD_SIZE']}, started by launch or torchrun, and a rank "
            "starts no ranks; write fn(*args) here, or call launch from a script that "
            "plain python runs."
        )
    if taken := sorted(env.keys() & set(_OURS)):
        raise ArgumentError(
            f"launch: env holds {', '.join(taken)}, which launch sets for each rank; "
            "leave it out of env."
        )
    for key, value in env.items():
        if not isinstance(value, str):
            raise ArgumentError(
                f"launch: env[{key!r}] is {value!r}, but must be a string; "
                f"write {str(value)!r}."
            )


def _dump_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump((fn, args))
    except Exception as error:
        raise ArgumentError(
            f"launch: fn or its arguments cannot be sent to another process: {error!r}"
            ". Make inside fn what it cannot take along (a mesh, a lock, an open file)"
            "."
        ) from error
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, but code keeps the file that errors and trace-backs name.

    And modules of a class of their own, such as some of torch's, go by their name.
    """

    def reducer_override(self, obj: Any) -> Any:
        own_class = type(obj) is not types.ModuleType
        name = getattr(obj, "__name__", "")
        if (
            isinstance(obj, types.ModuleType)
            and own_class
            and sys.modules.get(name) is obj
        ):
            return importlib.import_module, (name,)
        return super().reducer_override(obj)

    @property
    def dispatch_table(self) -> Any:
        return super().dispatch_table.new_child({types.CodeType: self._reduce_code})

    @staticmethod
    def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
        build, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
        file = code.co_filename
        # The cell of a notebook is no file, so its lines travel along.
        lines = [] if Path(file).exists() else linecache.getlines(file)
        return _restore_code, (build, arguments, file, lines)


def _restore_code(
    build: Callable[..., types.CodeType],
    arguments: tuple[Any, ...],
    file: str,
    lines: list[str],
) -> types.CodeType:
    if lines:
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    return build(*arguments).replace(co_filename=file)


@contextlib.contextmanager
def _processes(
    directory: Path, nprocs: int, env: Mapping[str, str]
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """The running ranks; none runs any more when the block is left, however it is."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    store = _store()
    # Nobody writes to the pipe. It closes when this process ends, even by SIGKILL, and
    # that ends the ranks.
    lifeline, held = os.pipe()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(nprocs):
            variables = _variables(rank, nprocs, store.port, env)
            processes.append(_start(directory, rank, lifeline, variables))
        yield processes
    finally:
        _end(processes)
        os.close(held)
        os.close(lifeline)


def _store() -> Any:
    """The rendezvous of all ranks, on a port that is ours before it has a number."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _variables(
    rank: int, nprocs: int, port: int, env: Mapping[str, str]
) -> dict[str, str]:
    values = (rank, rank, nprocs, nprocs, "127.0.0.1", port, True)
    ours = {key: str(value) for key, value in zip(_OURS, values, strict=True)}
    threads = {"OMP_NUM_THREADS": str(max(1, _processors() // nprocs))}
    return threads | dict(os.environ) | dict(env) | ours


def _processors() -> int:
    # In a container or under taskset, fewer than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start(
    directory: Path, rank: int, lifeline: int, variables: dict[str, str]
) -> "subprocess.Popen[bytes]":
    program = (
        f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; "
        f"sys.argv[:] = {sys.argv!r}; from {__name__} import _run_rank; "
        f"_run_rank({str(directory)!r}, {rank}, {lifeline})"
    )
    warnings = [f"-W{option}" for option in sys.warnoptions]
    return subprocess.Popen(
        [sys.executable, *warnings, "-c", program],
        env=variables,
        stdin=subprocess.DEVNULL,
        pass_fds=[lifeline],
        # A session of its own: a rank ends together with its own workers, and an
        # interrupt from the keyboard reaches this process only, which ends the ranks.
        start_new_session=True,
    )


def _end(processes: list["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        if process.poll() is None:
            # It may end between the two lines.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


# --- what became of the ranks --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Failure:
    """How a rank failed.

    Attributes:
        rank: The rank.
        what: What it did, to follow "rank 1 of 2".
        trace: Its trace-back, empty if it died without one.
        when: Seconds on the monotonic clock, which all processes share.
    """

    rank: int
    what: str
    trace: str
    when: float

    @property
    def order(self) -> tuple[bool, float]:
        """Causes before echoes, then the earlier first."""
        return any(mark in self.trace for mark in _ECHOES), self.when


def _wait(
    processes: list["subprocess.Popen[bytes]"], directory: Path
) -> list[_Failure]:
    """Waits for all ranks, or the first failure; returns the failures, cause first."""
    ends = _announce_ends(processes)
    failures: list[_Failure] = []
    deadline = None
    for _ in processes:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            rank, when = ends.get(timeout=left)
        except queue.Empty:
            break
        if failure := _failure(directory, rank, processes[rank].returncode, when):
            failures.append(failure)
            deadline = deadline or time.monotonic() + _GRACE_SECONDS
    return sorted(failures, key=lambda failure: failure.order)


def _announce_ends(
    processes: list["subprocess.Popen[bytes]"],
) -> "queue.SimpleQueue[tuple[int, float]]":
    """A queue of (rank, time of its end); a thread a rank waits and tells."""
    ends: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()

    def announce(rank: int, process: "subprocess.Popen[bytes]") -> None:
        process.wait()
        ends.put((rank, time.monotonic()))

    for numbered in enumerate(processes):
        threading.Thread(target=announce, args=numbered, daemon=True).start()
    return ends


def _failure(
    directory: Path, rank: int, status: int | None, when: float
) -> _Failure | None:
    failed, returned = directory / f"failure-{rank}", directory / f"result-{rank}"
    if failed.exists():
        failure: _Failure = pickle.loads(failed.read_bytes())
        return failure
    if status == 0 and returned.exists():
        return None
    moment = "after" if returned.exists() else "before"
    what = f"{_status_text(status)} {moment} fn returned; what it printed may say why."
    return _Failure(rank, what, "", when)


def _status_text(status: int | None) -> str:
    if status is None or status >= 0:
        return f"exited with status {status}"
    hint = " (by the kernel, if memory ran out)" if -status == signal.SIGKILL else ""
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}{hint}"
    return f"was killed by signal {-status}"


def _describe(failures: list[_Failure], nprocs: int) -> str:
    first, *others = failures
    lines = [f"launch: rank {first.rank} of {nprocs} {first.what}"]
    if first.trace:
        lines += ["", first.trace.rstrip()]
    if others:
        lines += ["", "Failed later, probably for that reason:"]
    for other in others:
        last_line = other.trace.rstrip().rpartition("\n")[2]
        lines.append(f"  rank {other.rank} {other.what} {last_line}".rstrip())
    return "\n".join(lines)


def _load_result(directory: Path, rank: int) -> Any:
    try:
        return cloudpickle.loads((directory / f"result-{rank}").read_bytes())
    except Exception as error:
        raise LaunchError(
            f"launch: what rank {rank} returned cannot be loaded in this process: "
            f"{error!r}. Return plain tensors on the CPU, numbers and strings from fn."
        ) from error


# --- a child -------------------------------------------------------------------------


def _run_rank(name: str, rank: int, lifeline: int) -> None:
    """All that a child does; the program that `_start` writes calls it."""
    ends = (name, lifeline)
    threading.Thread(target=_end_with_parent, args=ends, daemon=True).start()
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        _buffer_by_line(stream)
    directory, what = Path(name), "could not load fn and its arguments."
    try:
        fn, args = cloudpickle.loads((directory / "call").read_bytes())
        what = "raised."
        result = fn(*args)
        wait_for_saves()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        what = "returned a value that cannot be pickled; return plain tensors instead."
        _write(directory / f"result-{rank}", cloudpickle.dumps(result))
    # BaseException: sys.exit() in fn is no return either.
    except BaseException as error:
        when = time.monotonic()
        trace = "".join(traceback.format_exception(error))
        failure = _Failure(rank, what, trace, when)
        _write(directory / f"failure-{rank}", pickle.dumps(failure))
        # The file comes first, for the exit cuts connections and peers fail by that.
        _exit(1)
    _exit(0)


def _exit(status: int) -> NoReturn:
    """Hard, for a soft exit waits for peers, or takes down gloo's threads at work."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _end_with_parent(directory: str, lifeline: int) -> None:
    os.read(lifeline, 1)
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _buffer_by_line(stream: TextIO) -> None:
    # Into a pipe Python writes by the block, and a killed process loses the last.
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(line_buffering=True)


def _write(path: Path, content: bytes) -> None:
    """Writes a file that is there whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(path)
