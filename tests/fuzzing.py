# SPDX-License-Identifier: Apache-2.0
"""Settings of the fuzz tests, and the count of the cases that they tried.

``FUSION_PASS_FUZZ`` multiplies the number of cases (then with new random ones every time);
``FUSION_PASS_FUZZ_RECORD`` names a file for the counts (``docs/fuzz.json``). Both without pytest-xdist: its processes
would each count their own.
"""

import datetime
import json
import os
from collections import Counter
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, settings

FACTOR = float(os.environ.get("FUSION_PASS_FUZZ", "1"))
COUNTS: Counter[str] = Counter()


def cases(number: int) -> settings:
    """Hypothesis settings for ``number`` cases: the same ones in every default run."""
    return settings(
        max_examples=max(1, round(number * FACTOR)),
        deadline=None,
        derandomize=FACTOR <= 1,
        database=None,
        print_blob=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def tried(what: str) -> None:
    """Count one case of ``what``."""
    COUNTS[what] += 1


def report(write_line) -> None:
    """Print the counts, and keep them in the file that is asked for."""
    if not COUNTS:
        return
    write_line("fuzz cases: " + ", ".join(f"{what} {COUNTS[what]}" for what in sorted(COUNTS)))
    record = os.environ.get("FUSION_PASS_FUZZ_RECORD")
    if record:
        path = Path(record)
        kept = json.loads(path.read_text()) if path.is_file() else {}
        made = {"torch": torch.__version__, "date": datetime.date.today().isoformat()}
        kept |= {what: {"cases": number, **made} for what, number in COUNTS.items()}
        path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
