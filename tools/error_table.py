"""Run the tests that compare with float64 and keep the errors that they print, for docs/numerics.md.

    python tools/error_table.py            writes docs/errors.json; then run tools/docs_blocks.py
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
TEST = "tests/models/test_transformers.py::test_bf16_attention_is_no_worse_than_eager"
PRINTED = re.compile(r"layer (\d+): error against float64: eager (\S+), compiled (\S+)")


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-s", TEST], cwd=ROOT, capture_output=True, text=True)
    rows = [{"layer": int(n), "eager": float(e), "compiled": float(c)} for n, e, c in PRINTED.findall(done.stdout)]
    if done.returncode or not rows:
        print(done.stdout[-2000:] + done.stderr[-2000:], file=sys.stderr)
        return 1
    made = {"test": TEST, "torch": torch.__version__, "machine": platform.machine(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "rows": rows}
    (ROOT / "docs" / "errors.json").write_text(json.dumps(made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
