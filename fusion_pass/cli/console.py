"""Output for people: results on standard output, progress on standard error, plain text where no terminal listens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Say that something is going on (a spinner on a terminal, else one line) and how long it took."""
    start = time.perf_counter()
    if err.is_terminal:
        with err.status(f"{text} ..."):
            yield
    else:
        err.print(f"{text} ...", markup=False)
        yield
    err.print(f"{text}: {time.perf_counter() - start:.1f} s", markup=False)
