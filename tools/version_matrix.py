"""Run the test-suite against several versions of torch and transformers, each in an environment of its own.

    python tools/version_matrix.py                                  every pair of PAIRS, the whole suite
    python tools/version_matrix.py --torch 2.13.0 --transformers 5.24.0 tests/models tests/graphs

Once per release, never in CI: all torch wheels but the CPU build take gigabytes. Counts, versions and dates go to
docs/versions.json, from which ``tools/docs_blocks.py`` makes the table in docs/support-matrix.md. The exit code is 1
when a test failed in any environment.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "versions.json"
# Oldest supported, the one that CI uses, and the newest of both at the time of the last release.
PAIRS = (("2.11.0", "5.24.0"), ("2.13.0", "5.17.0"), ("2.13.0", "5.24.0"), ("2.15.0", "5.24.0"))
FACTS = """
import importlib.util, json, platform, torch, transformers
triton = importlib.util.find_spec("triton") and __import__("triton").__version__
print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, "triton": triton or None,
                  "python": platform.python_version(),
                  "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}))
"""


def environment(folder: Path, torch: str, transformers: str) -> Path:
    """The Python of an environment with these versions and the checkout's test extra; made when it is not there."""
    python = folder / f"torch-{torch}-transformers-{transformers}" / "bin" / "python"
    if not python.exists():
        venv.create(python.parent.parent, with_pip=True)
    packages = [f"torch=={torch}", f"transformers=={transformers}", "setuptools>=77", "-e", f"{ROOT}[test]"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def run(python: Path, tests: list[str], workers: int) -> dict[str, Any]:
    """One result: versions, counts, the names of failed tests, wall seconds."""
    facts = json.loads(subprocess.run([python, "-c", FACTS], check=True, capture_output=True, text=True).stdout)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        command += ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else []
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(Path(scratch) / "inductor")}  # no code of another version
        begin = time.monotonic()
        subprocess.run(command, cwd=ROOT, env={**os.environ, **caches}, check=False)
        seconds = time.monotonic() - begin
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [f"{c.get('classname')}::{c.get('name')}" for c in cases
              if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    return {**facts, "tests": tests or ["tests"], "passed": len(cases) - len(failed) - skipped, "failed": failed,
            "skipped": skipped, "seconds": round(seconds), "date": datetime.date.today().isoformat(),
            "commit": commit.stdout.strip()}


def record(result: dict[str, Any]) -> None:
    """Put a result into docs/versions.json, in place of the older ones of the same versions whose tests it ran."""
    def covered(row: dict[str, Any]) -> bool:
        ran = tuple(end for test in result["tests"] for end in (f"{test}/", f"{test}::"))
        return key(row)[:3] == key(result)[:3] and all(
            test in result["tests"] or test.startswith(ran) for test in row["tests"])

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["torch"], row["transformers"], row["device"], tuple(row["tests"])

    rows = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    rows = sorted([*(row for row in rows if not covered(row)), result], key=key)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="one version of torch instead of all pairs (with --transformers)")
    parser.add_argument("--transformers", help="the version of transformers that goes with --torch")
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "fusion_pass-versions",
                        help="folder of the environments, kept for the next run (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="processes of pytest (default: %(default)s)")
    parser.add_argument("tests", nargs="*", help="files and folders of tests (default: the whole suite)")
    arguments = parser.parse_args(argv)
    if bool(arguments.torch) != bool(arguments.transformers):
        parser.error("--torch and --transformers go together")
    pairs = [(arguments.torch, arguments.transformers)] if arguments.torch else PAIRS
    broken = 0
    for torch, transformers in pairs:
        python = environment(arguments.environments, torch, transformers)
        result = run(python, arguments.tests, arguments.workers)
        record(result)
        broken += bool(result["failed"])
        print(f"torch {result['torch']}, transformers {result['transformers']}: {result['passed']} passed, "
              f"{len(result['failed'])} failed, {result['skipped']} skipped in {result['seconds']} s", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
