"""Benchmarks' cases in processes of their own: timed one after the other, and a case that fails costs no other."""

import os
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import processes  # noqa: E402


def prepare(case, alone):
    """Runs in the processes."""
    with alone:
        if case == "raises":
            raise ValueError("no such case")
        if case == "dies":
            os._exit(3)

    def time_it():
        if case == "raises late":
            raise RuntimeError("broke while it was timed")
        start = time.time()
        time.sleep(0.2)
        return [{"case": case, "start": start, "end": time.time()}]

    return time_it


def test_cases(tmp_path):
    go, allowed = tmp_path / "go", []

    def allow():
        while not (tmp_path / "go.ready").exists():
            time.sleep(0.05)
        time.sleep(0.5)
        allowed.append(time.time())
        go.touch()

    thread = threading.Thread(target=allow)
    thread.start()
    cases = ["first", "raises", "dies", "raises late", "last"]
    first, raises, dies, late, last = processes.run_cases(prepare, cases, go=go, limit_s=120)
    thread.join()
    assert [row["case"] for row in (*first, *last)] == ["first", "last"]
    assert "no such case" in raises and "without a word" in dies and "broke while" in late
    assert allowed[0] <= first[0]["start"] and first[0]["end"] <= last[0]["start"], "one after the other, when allowed"
