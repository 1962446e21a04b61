"""Keep the coverage of a run in docs/coverage.json, for the table in docs/contributing.md.

    coverage run -m pytest TESTS ...; coverage json
    python tools/coverage_figure.py coverage.json TESTS ...
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def figures(measured: dict[str, object]) -> dict[str, list[int]]:
    """{part: [statements, covered]} out of what ``coverage json`` writes."""
    parts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path, entry in measured["files"].items():  # type: ignore[attr-defined]
        folder = "/".join(path.split("/")[: 2 if path.count("/") > 1 else 1])
        for part in (folder, "all"):
            parts[part][0] += entry["summary"]["num_statements"]
            parts[part][1] += entry["summary"]["covered_lines"]
    return dict(sorted(parts.items()))


def main(argv: list[str]) -> int:
    measured = json.loads(Path(argv[0]).read_text())
    kept = {"date": measured["meta"]["timestamp"][:10], "tests": argv[1:], "parts": figures(measured)}
    (ROOT / "docs" / "coverage.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
