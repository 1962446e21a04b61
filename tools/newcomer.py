"""Time the newcomer's path: a clean clone, an environment, the install, the first fused report, the demo.

    python tools/newcomer.py                 print the seconds of every step
    python tools/newcomer.py --record        and keep them in docs/newcomer.json, for the table in docs/contributing.md

The commands are the README's own; downloads count as far as pip's cache does not have them. PIP_CONSTRAINT pins
versions, as in .ci/run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUSED = r"fused +fmha"                    # in the report, and in the demo
RESULT = ROOT / "docs" / "newcomer.json"


def steps(folder: Path) -> list[tuple[str, list[str] | None]]:
    """(what a newcomer does, its command); None: make the environment."""
    python = str(folder / "env" / "bin" / "python")
    return [
        ("git clone", ["git", "clone", "--quiet", str(ROOT), str(folder / "clone")]),
        ("python -m venv", None),
        ('pip install -e ".[hf]"', [python, "-m", "pip", "install", "--quiet", "-e", ".[hf]"]),
        ("python -m fusion_pass explain examples/plain_attention.py:example",
         [python, "-m", "fusion_pass", "explain", "examples/plain_attention.py:example"]),
        ("python -m fusion_pass demo", [python, "-m", "fusion_pass", "demo"]),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the figures in docs/newcomer.json")
    arguments = parser.parse_args(argv)
    took: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        environment.pop("PYTHONPATH", None)
        if "PIP_CONSTRAINT" in environment:
            environment["PIP_CONSTRAINT"] = str(Path(environment["PIP_CONSTRAINT"]).resolve())
        for what, command in steps(folder):
            begin = time.monotonic()
            if command is None:
                venv.create(folder / "env", with_pip=True)
            else:
                where = folder / "clone" if (folder / "clone").exists() else folder
                done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)
                if done.returncode:
                    print(done.stdout + done.stderr, file=sys.stderr)
                    return 1
                if "fusion_pass" in what and not re.search(FUSED, done.stdout):
                    print(f"no fused chain in what {what} says:\n{done.stdout}", file=sys.stderr)
                    return 1
            took.append({"step": what, "seconds": round(time.monotonic() - begin, 1)})
            print(f"{took[-1]['seconds']:>8} s  {what}")
    if arguments.record:
        kept = {"date": datetime.date.today().isoformat(), "cores": os.cpu_count(), "python": platform.python_version(),
                "load": round(os.getloadavg()[0], 1), "pinned": "PIP_CONSTRAINT" in os.environ, "steps": took}
        RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
