"""A rank that is killed, or stops: the others end in time and say which, and why."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import yafsdp_fn as yf
from yafsdp_fn.checkpoint import _save

TIMEOUT = 8.0  # seconds, in which all of a busy machine have started
PROMPT_SECONDS = 90  # a start, a time-out, an end
STOPPED = r"rank [02] waited in a collective for rank 1, which has ended, hangs, is st"
NEAR = r"rank [02] waited \d+ s in a collective for rank 1 \(process \d+\), which is st"
ABSENT = (
    r"rank [02] waited at the start for rank 1 of 3, which ended, hangs, or was not"
)
KILLED = r"rank 1 of 3 was killed by SIGKILL"


def harm(what: str) -> None:
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])


def train(where: str, what: str, folder: str) -> None:
    """Saves, takes a step and saves again; rank 1 comes to harm on the way."""
    unlucky = os.environ["RANK"] == "1"
    if unlucky and where == "start":
        harm(what)
    mesh = yf.make_mesh(fsdp=3, device_type="cpu", timeout=TIMEOUT)
    step = yf.shard(lambda p, batch: p - 0.1 * (batch @ p).sum(0), donate_argnums=0)
    params, batch = yf.distribute(torch.ones(300, 300), mesh), torch.ones(6, 300)
    yf.checkpoint.save(folder, params)
    params = step(params, batch)
    if unlucky and where == "step":
        harm(what)
    params = step(params, batch)
    hurt = mock.patch.object(
        _save._Planner, "resolve_data", side_effect=lambda _: harm(what)
    )
    with hurt if unlucky else mock.MagicMock():
        if where == "save":
            yf.checkpoint.save(folder, params)
        else:
            yf.checkpoint.async_save(folder, params).result()


@pytest.mark.parametrize(
    ("where", "what", "message", "near"),
    [
        ("start", "stop", ABSENT, True),
        ("step", "stop", NEAR, True),
        ("step", "stop", STOPPED, False),
        ("step", "kill", KILLED, True),
        ("save", "stop", STOPPED, True),
        ("save", "kill", KILLED, True),
        ("background", "stop", STOPPED, True),
    ],
    ids=lambda x: "" if " " in str(x) else str(x),
)
def test_the_others_say_which_rank_they_waited_for(
    where: str, what: str, message: str, near: bool, tmp_path: Path
) -> None:
    begin = time.monotonic()
    env = {} if near else {"YAFSDP_FN_SHARED_MEMORY": "0"}
    with pytest.raises(yf.LaunchError, match=message):
        yf.launch(train, where, what, str(tmp_path), nprocs=3, env=env)
    assert time.monotonic() - begin < PROMPT_SECONDS
    if where != "start":
        found = yf.checkpoint.load(tmp_path, torch.empty(300, 300))
        assert torch.equal(found, torch.ones(300, 300))


def test_torchrun_ends_and_says_it_too(tmp_path: Path) -> None:
    command: list[Any] = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nproc-per-node", "3", "--standalone", __file__, tmp_path]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=2 * PROMPT_SECONDS,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode != 0
    assert "RankError: rank" in run.stderr
    assert "for rank 1 (process" in run.stderr
    found = yf.checkpoint.load(tmp_path, torch.empty(300, 300))
    assert torch.equal(found, torch.ones(300, 300))


if __name__ == "__main__":
    train("step", "stop", sys.argv[1])
