"""Command line: ``python -m benchmarks NAME [options]``; ``all`` runs every table that exists."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

import torch

import benchmarks
from benchmarks import harness

NOT_TABLES = {"unfused", "harness", "shapes", "peers", "inputs", "merge_inputs", "processes", "kernel_profile"}


def tables() -> list[str]:
    """Names of the benchmark modules: every module of the package that is no helper and has a ``run`` function."""
    names = (m.name for m in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(n for n in names if n not in NOT_TABLES and not n.startswith("_"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    parser.add_argument("name", choices=[*tables(), "all"])
    harness.add_arguments(parser)
    args = parser.parse_args(argv)
    for name in tables() if args.name == "all" else [args.name]:
        if args.seed is not None:
            torch.manual_seed(args.seed)
        module = importlib.import_module(f"benchmarks.{name}")
        if getattr(module, "NEEDS_GPU", True) and not torch.cuda.is_available():
            print(f"benchmark {name} needs a CUDA GPU; none is visible to this PyTorch", file=sys.stderr)
            return 1
        rows = module.run(args)
        path = harness.write_results(name, rows, args.output)
        harness.print_table(name, rows)
        drawn = None if args.no_plot else harness.plot(name, rows, args.output)
        print(f"wrote {path}" + (f" and {drawn}" if drawn else ""))
        harness.free()
    return 0


if __name__ == "__main__":
    sys.exit(main())
