# SPDX-License-Identifier: Apache-2.0
"""Cases that take long to compile: each is prepared in a process of its own, all at the same time; then they are timed
one after the other, while no other of them works."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
Timing = Callable[[], list[Row]]
# prepare(case, alone): compile and run the case once; what it returns times it. `alone`: a lock for steps that take
# much of the GPU's memory. A function of a module (the processes import it).
Prepare = Callable[[Any, Any], Timing]
LIMIT_S, TIMING_LIMIT_S = 900.0, 40.0
OUT_OF_MEMORY_TRIES = 3


class Alone:
    """A lock between processes, which a process that dies gives back."""

    def __init__(self, path: str):
        self.path = path

    def __enter__(self) -> None:
        self.file = open(self.path)
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self.file, fcntl.LOCK_UN)  # whoever was forked meanwhile has the file open as well
        self.file.close()


def run_cases(
    prepare: Prepare,
    cases: Sequence[Any],
    *,
    go: Path | None = None,
    limit_s: float = LIMIT_S,
) -> list[list[Row] | str]:
    """For each case its rows, or the end of the traceback that it failed with; a case that fails costs the others
    nothing.

    go: when every case is prepared, write ``go`` + ".ready" and wait for the file ``go`` before the first is timed, so
    that a script can prepare several tables and have the GPU to itself for each. limit_s: seconds for all preparations
    together, and for the wait; a case's timing gets ``TIMING_LIMIT_S``. What is not done then counts as failed. Raises
    TimeoutError when ``go`` does not appear.
    """
    context = torch.multiprocessing.get_context("spawn")
    turn = tempfile.NamedTemporaryFile()
    alone = Alone(turn.name)
    threads = max(2, (os.cpu_count() or 2) // max(1, len(cases)))
    pipes, processes = [], []
    for case in cases:
        ours, theirs = context.Pipe()
        process = context.Process(target=_case, args=(prepare, case, theirs, alone, threads), daemon=False)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        deadline = time.monotonic() + limit_s
        found = [_answer(pipe, deadline) for pipe in pipes]
        if go is not None:
            _wait_for(go, limit_s)
        return [_timed(pipe) if answer is None else answer for pipe, answer in zip(pipes, found, strict=True)]
    finally:
        turn.close()
        for pipe in pipes:
            pipe.close()  # a process that still waits ends with it
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _wait_for(go: Path, limit_s: float) -> None:
    go.with_name(go.name + ".ready").touch()
    deadline = time.monotonic() + limit_s
    while not go.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{go} did not appear within {limit_s:.0f} s")
        time.sleep(0.05)


def _answer(pipe: Any, deadline: float) -> Any:
    """What a process says next, or why it says nothing."""
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            return pipe.recv()
    except (EOFError, OSError):
        return "its process ended without a word"
    return "not done within the time limit"


def _timed(pipe: Any) -> Any:
    try:
        pipe.send("time it")
    except OSError:
        return "its process ended without a word"
    return _answer(pipe, time.monotonic() + TIMING_LIMIT_S)


def _case(prepare: Prepare, case: Any, pipe: Any, alone: Any, threads: int) -> None:
    """In the process: None when prepared, then the rows when asked for them; instead of either, what went wrong."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    torch.set_num_threads(2)
    try:
        time_it = _prepared(prepare, case, alone)
        pipe.send(None)
        pipe.recv()
        pipe.send(time_it())
        pipe.recv()  # stays until all are timed: to take down what it holds of the GPU would disturb the others
    except EOFError:
        return
    except Exception:
        pipe.send(traceback.format_exc(limit=-3)[-600:])


def _prepared(prepare: Prepare, case: Any, alone: Any) -> Timing:
    from benchmarks import harness

    for attempt in range(OUT_OF_MEMORY_TRIES):
        try:
            return prepare(case, alone)
        except torch.OutOfMemoryError:  # the others' peaks pass
            if attempt == OUT_OF_MEMORY_TRIES - 1:
                raise
        torch.compiler.reset()
        harness.free()
        time.sleep(5)
    raise AssertionError("unreachable")
