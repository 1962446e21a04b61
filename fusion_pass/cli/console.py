"""Output for people: results on standard output, progress on standard error, plain text where no terminal listens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class Progress:
    """What is going on, several things at once: a spinner on a terminal, else a line when something begins; and how
    long it took when it ends."""

    def __init__(self) -> None:
        self._going: dict[str, float] = {}
        self._status: Status | None = None

    def begin(self, text: str) -> None:
        self._going[text] = time.perf_counter()
        if err.is_terminal:
            self._show()
        else:
            err.print(f"{text} ...", markup=False)

    def end(self, text: str) -> None:
        took = time.perf_counter() - self._going.pop(text)
        self._show()
        err.print(f"{text}: {took:.1f} s", markup=False)

    def still_going(self) -> None:
        """Say that nothing has ended for a while, where no spinner says it."""
        now = time.perf_counter()
        if err.is_terminal:
            self._show()
        else:
            going = ", ".join(f"{text} ({now - began:.0f} s)" for text, began in self._going.items())
            err.print(f"still going: {going or 'starting'}", markup=False)

    def close(self) -> None:
        """End everything, as after an error."""
        self._going.clear()
        self._show()

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        self.begin(text)
        try:
            yield
        finally:
            self.end(text)

    def _show(self) -> None:
        if not err.is_terminal:
            return
        if self._status is not None and not self._going:
            self._status.stop()
            self._status = None
        elif self._going:
            from rich.markup import escape

            text = escape("; ".join(self._going)) + " ..."
            if self._status is None:
                self._status = err.status(text)
                self._status.start()
            else:
                self._status.update(text)


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Say that one thing is going on and how long it took."""
    with Progress().step(text):
        yield
