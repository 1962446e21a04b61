"""Commands, their arguments and their exit codes.

Exit codes: 0 success, 1 the command's own answer is no (nothing fused, numbers disagree, a self-test failed), 2 wrong
usage. Results go to standard output (``--json``: nothing but JSON), progress to standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..report import ROLES
from ..version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command != "bench":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if arguments.command == "demo":
            from . import demo

            return demo.run(arguments)
        if arguments.command == "doctor":
            from . import doctor

            return doctor.run(arguments)
        if arguments.command == "explain":
            from . import explain_command

            return explain_command.run(arguments)
        if arguments.command in ("list-patterns", "check-pattern"):
            from . import patterns_command

            listing = arguments.command == "list-patterns"
            return (patterns_command.list_patterns if listing else patterns_command.check_pattern)(arguments)
        from . import bench

        return bench.run(rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fusion_pass",
        description="Fuse DeepSeek-V4's attention, inverse RoPE, FP8 quantisation and grouped projection.",
    )
    parser.add_argument("--version", action="version", version=f"fusion_pass {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="build a random-weight DeepSeek-V4, compile it with the pass, compare with eager",
        description="Build a DeepSeek-V4 with random weights from transformers' classes, run a prefill and cached "
        "decode steps eagerly and compiled, and show what was fused, whether the numbers agree and how long it took.",
    )
    demo.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU when there is one"
    )
    demo.add_argument(
        "--form",
        choices=("both", "bf16", "fp8"),
        default=None,
        help="which form of the output projection (default: both; bf16 on a GPU)",
    )
    demo.add_argument(
        "--inner",
        choices=("auto", "inductor", "aot_eager", "eager"),
        default="auto",
        help="what compiles the rewritten graph; auto: Inductor on a GPU, aot_eager (no C++ compiler needed) on a CPU",
    )
    demo.add_argument(
        "--tokens", type=_positive, default=None, help="length of the prompt (default: 64; 2048 on a GPU)"
    )
    demo.add_argument(
        "--steps", type=_positive, default=None, help="cached decode steps after the prompt (default: 2; 1 on a GPU)"
    )
    demo.add_argument(
        "--processes",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compile every run in a process of its own, all at the same time (default: on a GPU)",
    )
    demo.add_argument("--json", action="store_true", help="print the result as JSON")

    doctor = commands.add_parser("doctor", help="versions, devices, registered ops and a self-test")
    doctor.add_argument("--json", action="store_true", help="print the result as JSON")

    explain = commands.add_parser(
        "explain",
        help="say what would be fused in your model, without compiling or running it",
        description="The target is MODULE:FUNCTION or FILE.py:FUNCTION. FUNCTION takes no arguments and returns "
        "(model, args) or (model, args, kwargs): the module or function to look at and example inputs. Exit code 0 "
        "when something would be fused, 1 when nothing would.",
    )
    explain.add_argument("target", metavar="MODULE:FUNCTION")
    explain.add_argument("--dynamic", action="store_true", help="capture with dynamic shapes")
    explain.add_argument("--json", action="store_true", help="print the report as JSON")
    explain.add_argument("--graphs", action="store_true", help="print every chain's sub-graph before and after")
    explain.add_argument("--html", metavar="FILE", help="write the report as one self-contained HTML page as well")

    listing = commands.add_parser("list-patterns", help="the roles, the declared library ops, what is registered")
    listing.add_argument(
        "--load", action="append", default=[], metavar="MODULE", help="import a module or FILE.py that registers some"
    )
    listing.add_argument("--json", action="store_true", help="print the lists as JSON")

    check = commands.add_parser(
        "check-pattern",
        help="compare your function with a role's reference",
        description="Runs FUNCTION and the role's reference on random inputs of several shapes, in fp32 and bf16. Exit "
        "code 0 when they agree, 1 when they do not (with the first differing element).",
    )
    check.add_argument("target", metavar="FILE.py:FUNCTION")
    check.add_argument("--role", required=True, choices=ROLES)
    check.add_argument("--rtol", type=float, default=None, help="tolerance relative to the largest value")
    check.add_argument("--block", type=_positive, default=None, help="fp8_quant: width of a block")
    check.add_argument("--scale-rule", choices=("fp32", "ue8m0"), default=None, help="fp8_quant: rule of the scales")
    check.add_argument("--floor", type=float, default=None, help="fp8_quant: lower bound of a block's magnitude")
    check.add_argument("--json", action="store_true", help="print the result as JSON")

    commands.add_parser("bench", help="run the benchmarks of a source checkout (python -m benchmarks)", add_help=False)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return value
