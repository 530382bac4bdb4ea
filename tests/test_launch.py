"""Processes start, answer in order, and fail as one: the first failure is told."""

import linecache
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from yafsdp_fn import _launch
from yafsdp_fn._errors import ArgumentError, YafsdpError
from yafsdp_fn._launch import LaunchError, launch

# Starting an interpreter with torch takes seconds on a busy machine; a collective
# whose peer is gone would block for minutes.
PROMPT_SECONDS = 30


def run_script(path: Path, source: str) -> subprocess.Popen[str]:
    """Starts a script beside this repository's modules, its output in a pipe."""
    path.write_text(textwrap.dedent(source))
    roots = [str(Path(_launch.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(roots)},
        stdout=subprocess.PIPE,
        text=True,
    )


# --- what comes back ------------------------------------------------------------------


def total(start: int) -> int:
    """Leaves its process group to `launch`."""
    dist.init_process_group("gloo")
    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    return int(value)


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def test_results_come_in_rank_order_and_variables_are_torchruns(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    unit = 3.0

    def report(scale: float) -> dict[str, Any]:
        names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "EXTRA")
        rank = int(os.environ["RANK"])
        print(f"line of rank {rank}")
        return {
            "variables": variables(*names),
            "total": total(10),
            "tensor": torch.full((2,), unit * scale * rank),
            "threads": torch.get_num_threads(),
        }

    results = launch(report, 2.0, nprocs=2, env={"EXTRA": "yes"})

    for rank, result in enumerate(results):
        assert result["variables"] == [str(rank), "2", "2", "127.0.0.1", "yes"]
        assert result["total"] == 21
        assert torch.equal(result["tensor"], torch.full((2,), 6.0 * rank))
        assert result["threads"] == max(1, _launch._processors() // 2)
    assert dict(os.environ) == before
    assert set(capfd.readouterr().out.splitlines()) == {
        "line of rank 0",
        "line of rank 1",
    }


def test_threads_that_the_user_sets_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(nprocs: int, env: dict[str, str]) -> str:
        return _launch._variables(0, nprocs, 1234, env)["OMP_NUM_THREADS"]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(_launch, "_processors", lambda: 8)
    assert [threads(nprocs, {}) for nprocs in (1, 3, 16)] == ["8", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads(2, {}) == "5"
    assert threads(2, {"OMP_NUM_THREADS": "6"}) == "6"


def test_a_script_sends_its_own_functions_and_classes(tmp_path: Path) -> None:
    # No guard: the script is not run again by the children.
    source = """
        import dataclasses, sys
        from yafsdp_fn._launch import launch

        @dataclasses.dataclass
        class Point:
            x: int

        FACTOR = 7

        def scaled(point):
            file = sys._getframe().f_code.co_filename
            return Point(point.x * FACTOR), file, sys.argv

        (point, file, argv), = launch(scaled, Point(6), nprocs=1)
        assert isinstance(point, Point) and file == __file__ and argv == sys.argv
        print(point)
    """
    with run_script(tmp_path / "script.py", source) as script:
        assert script.communicate()[0] == "Point(x=42)\n"
    assert script.returncode == 0


def test_a_function_of_no_file_takes_its_lines_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, cell = "lambda: 1 / 0  # the culprit\n", "<cell 7>"
    monkeypatch.setitem(linecache.cache, cell, (len(source), None, [source], cell))
    call = _launch._dump_call(eval(compile(source, cell, "eval")), ())
    monkeypatch.delitem(linecache.cache, cell)

    fn, _ = pickle.loads(call)
    assert fn.__code__.co_filename == cell
    assert linecache.getline(cell, 1) == source


# --- failures -------------------------------------------------------------------------


def join_all() -> int:
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_rank()


def all_reduce() -> None:
    dist.all_reduce(torch.ones(1))


def fail_while_the_other_waits() -> None:
    if join_all() == 1:
        raise ValueError("the root cause")
    all_reduce()


def fail_after_leaving_the_group() -> None:
    if join_all() == 1:
        # The other rank fails by this, and says so before this one says anything.
        dist.destroy_process_group()
        raise ValueError("the root cause")
    all_reduce()


def die_by_kill() -> None:
    if join_all() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce()


def exit_alone() -> None:
    """Rank 0 waits for a rendezvous that never comes."""
    if os.environ["RANK"] == "1":
        sys.exit(0)
    dist.init_process_group("gloo")


@pytest.mark.parametrize(
    ("fn", "headline", "trace"),
    [
        (fail_while_the_other_waits, "rank 1 of 2 raised", "the root cause"),
        (fail_after_leaving_the_group, "rank 1 of 2 raised", "the root cause"),
        (die_by_kill, "rank 1 of 2 was killed by SIGKILL", ""),
        (exit_alone, "rank 1 of 2 raised", "SystemExit: 0"),
    ],
)
def test_the_first_failure_ends_all_and_is_told(
    fn: Any, headline: str, trace: str
) -> None:
    start = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(fn, nprocs=2)
    assert time.monotonic() - start < PROMPT_SECONDS
    cause = str(caught.value).partition("Failed later")[0]
    assert cause.startswith(f"launch: {headline}")
    assert trace in cause
    if trace:
        assert f"in {fn.__name__}" in cause
    assert isinstance(caught.value, YafsdpError)


def test_causes_come_before_echoes_and_then_the_earlier_first() -> None:
    def failure(rank: int, trace: str, when: float) -> _launch._Failure:
        return _launch._Failure(rank, "raised.", trace, when)

    echo = failure(0, "RuntimeError: [/x/gloo/transport/tcp/pair.cc:1] Closed", 1.0)
    late, early = failure(1, "ValueError: late", 3.0), failure(2, "KeyError: 'a'", 2.0)
    ordered = sorted([echo, late, early], key=lambda failure: failure.order)
    assert ordered == [early, late, echo]
    text = _launch._describe(ordered, 3)
    assert text.startswith("launch: rank 2 of 3 raised.\n\nKeyError: 'a'")
    assert "  rank 1 raised. ValueError: late" in text


def test_a_result_that_cannot_be_pickled_names_the_rank() -> None:
    def lock_on_rank_1() -> Any:
        return threading.Lock() if os.environ["RANK"] == "1" else None

    with pytest.raises(LaunchError, match="rank 1 of 2 returned a value that cannot"):
        launch(lock_on_rank_1, nprocs=2)


def load_in_a_rank() -> str:
    return os.environ["RANK"]


class OnlyThere:
    """Can be pickled, but loaded in a rank only."""

    def __reduce__(self) -> tuple[Any, ...]:
        return load_in_a_rank, ()


def test_a_result_that_cannot_be_loaded_names_the_rank(tmp_path: Path) -> None:
    (tmp_path / "result-3").write_bytes(pickle.dumps(OnlyThere()))
    with pytest.raises(LaunchError, match="what rank 3 returned cannot be loaded"):
        _launch._load_result(tmp_path, 3)


def test_an_end_without_a_word_is_a_failure_unless_fn_returned(tmp_path: Path) -> None:
    def told(status: int) -> str | None:
        failure = _launch._failure(tmp_path, 0, status, 0.0)
        return failure.what.partition(";")[0] if failure else None

    assert told(0) == "exited with status 0 before fn returned"
    assert told(-signal.SIGSEGV) == "was killed by SIGSEGV before fn returned"
    (tmp_path / "result-0").touch()
    assert told(0) is None
    assert told(3) == "exited with status 3 after fn returned"
    assert told(-signal.SIGABRT) == "was killed by SIGABRT after fn returned"


# --- requests that are refused --------------------------------------------------------


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _launch._variables(1, 4, 1234, {}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=r"already rank 1 of 4.*write fn\(\*args\)"):
        launch(all_reduce, nprocs=2)


@pytest.mark.parametrize("nprocs", [0, -1, 2.0, True, "2"])
def test_nprocs_is_a_positive_integer(nprocs: Any) -> None:
    with pytest.raises(ArgumentError, match="write nprocs=1"):
        launch(all_reduce, nprocs=nprocs)


def test_variables_of_the_user_leave_those_of_launch_alone() -> None:
    with pytest.raises(ArgumentError, match="env holds RANK, WORLD_SIZE"):
        launch(all_reduce, nprocs=1, env={"WORLD_SIZE": "1", "RANK": "0"})
    number: Any = {"OMP_NUM_THREADS": 1}
    with pytest.raises(ArgumentError, match=r"env\['OMP_NUM_THREADS'\].*write '1'"):
        launch(all_reduce, nprocs=1, env=number)


def test_arguments_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"cannot be sent .* Make inside fn"):
        launch(print, threading.Lock(), nprocs=1)


# --- the end of the parent ------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    source = """
        import threading
        from yafsdp_fn._launch import launch

        def wait():
            print("ready")
            threading.Event().wait()

        try:
            launch(wait, nprocs=1)
        except KeyboardInterrupt:
            print("interrupted")
    """
    with run_script(tmp_path / "script.py", source) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "ready\n"
        script.send_signal(number)
        # The rank holds the other end of the pipe: it ends when the rank has ended.
        rest = script.communicate(timeout=PROMPT_SECONDS)[0]
    assert rest == ("interrupted\n" if number == signal.SIGINT else "")
