"""The reports of this process, and those of graphs that Inductor took from its cache.

The backend rewrites before Inductor's cache is asked, so its reports need no storing. A pass in Inductor's post-grad
hook is not called on a cache hit. What a hit does replay are the changes of Inductor's counters while the graph was
compiled: the hook counts one key there whose name is the report itself, compressed. So it goes wherever the compiled
graph goes (other processes, remote caches, ``torch.compiler.save_cache_artifacts``). :func:`reports` reads the counters
and takes what it has not seen.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import json
import threading
import zlib
from collections.abc import Iterator

from . import compat
from .report import Report

_PREFIX = "fusion_pass_report_"
_lock = threading.RLock()
_reports: list[Report] = []
_seen: collections.Counter[str] = collections.Counter()


class _Collector(threading.local):
    stack: list[list[Report]] | None = None


_collector = _Collector()


def reports() -> list[Report]:
    """One report per graph that was compiled in this process, in order, also for graphs that came from a cache."""
    note_cache_hits()
    with _lock:
        return list(_reports)


def clear_reports() -> None:
    """Forget all reports of this process."""
    note_cache_hits()
    with _lock:
        _reports.clear()


def add(report: Report) -> None:
    """Keep the report of one pass: for the compilation that :func:`collect` surrounds, else for the process."""
    if _collector.stack:
        _collector.stack[-1].append(report)
        return
    with _lock:
        _reports.append(report)


@contextlib.contextmanager
def collect() -> Iterator[list[Report]]:
    """Gather the reports of one compilation (nested regions give several) instead of keeping each for the process."""
    if _collector.stack is None:
        _collector.stack = []
    gathered: list[Report] = []
    _collector.stack.append(gathered)
    try:
        yield gathered
    finally:
        _collector.stack.pop()


def collecting() -> bool:
    """True inside :func:`collect`, on this thread."""
    return bool(_collector.stack)


def add_cacheable(report: Report) -> None:
    """Keep a report so that it comes back when Inductor finds the graph in its cache."""
    key = _PREFIX + base64.urlsafe_b64encode(zlib.compress(report.to_json().encode(), 9)).decode()
    with _lock:
        note_cache_hits()
        _seen[key] += 1
        compat.counters()["inductor"][key] += 1
        _reports.append(report)


def note_cache_hits() -> None:
    """Fetch the reports of graphs that Inductor has taken from its cache since the last time.

    Called by the hook for every graph, so that counters which the user clears in between are followed.
    """
    with _lock:
        now = {key: count for key, count in compat.counters()["inductor"].items() if key.startswith(_PREFIX)}
        for key, count in now.items():
            _reports.extend(_read(key) for _ in range(count - _seen[key]))
        _seen.clear()
        _seen.update(now)


def _read(key: str) -> Report:
    try:
        text = zlib.decompress(base64.urlsafe_b64decode(key.removeprefix(_PREFIX)))
        report = Report.from_dict(json.loads(text))
    except (zlib.error, ValueError, TypeError, KeyError) as error:
        return Report(notes=[f"compiled graph came from a cache, its report cannot be read ({error})"])
    report.notes.append("compiled graph came from a cache")
    return report
