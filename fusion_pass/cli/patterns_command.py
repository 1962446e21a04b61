"""``list-patterns`` and ``check-pattern``: the roles, the declared ops, and one's own functions against them."""

from __future__ import annotations

import functools
import json
import sys
from argparse import Namespace
from typing import Any

from ..patterns import opaque
from ..patterns.agreement import check_agreement
from ..patterns.registration import registered_patterns
from ..patterns.roles import ROLES, role
from .console import out, step
from .target import UsageError, load, load_module


def list_patterns(arguments: Namespace) -> int:
    """Exit code 0; 2 when a module named with ``--load`` cannot be imported."""
    try:
        for place in arguments.load:
            load_module(place)
    except (UsageError, ValueError, TypeError) as error:
        print(f"list-patterns: {error}", file=sys.stderr)
        return 2
    values: dict[str, Any] = {
        "roles": [{"name": r.name, "schema": r.schema, "options": list(r.options), "summary": _summary(r.reference),
                   "reference": f"{r.reference.__module__}.{r.reference.__name__}"} for r in ROLES.values()],
        "declared_ops": [{"name": row.name, "versions": row.versions, "roles": list(row.roles), "source": row.source,
                          "written_out": row.expand is not None}
                         for row in opaque.rows() if row.versions != "registered"],
        "registered": [{"name": p.name, "role": p.role, "options": dict(p.options), "op": p.op}
                       for p in registered_patterns()],
    }
    if arguments.json:
        print(json.dumps(values, indent=2))
        return 0
    out.print("[bold]roles[/bold] (register_pattern takes a function of the same arguments)")
    for entry in values["roles"]:
        out.print(f"  {entry['name']}", style="cyan", markup=False)
        out.print(f"    {entry['summary']}\n    {entry['schema']}", markup=False)
    out.print("[bold]declared ops[/bold] (of libraries and engines)")
    for entry in values["declared_ops"]:
        how = "" if entry["written_out"] else "; stays opaque, what follows it is fused"
        out.print(f"  {entry['name']}", style="cyan", markup=False)
        out.print(f"    {' -> '.join(entry['roles'])}; {entry['versions']}{how}", markup=False)
    out.print("[bold]registered[/bold] (by this process; --load FILE.py imports a file first)")
    for entry in values["registered"]:
        out.print(f"  {entry['name']}: {entry['role']} (op {entry['op']})", markup=False)
    if not values["registered"]:
        out.print("  none")
    return 0


def _summary(function: Any) -> str:
    return (function.__doc__ or "").strip().splitlines()[0]


def check_pattern(arguments: Namespace) -> int:
    """Exit code 0: the function agrees with the role's reference on random inputs; 1: it does not (the message names
    the first differing element); 2: wrong usage."""
    options = {key: value for key, value in (("block", arguments.block), ("scale_rule", arguments.scale_rule),
                                             ("floor", arguments.floor)) if value is not None}
    try:
        chosen = role(arguments.role)
        unknown = set(options) - set(chosen.options)
        if unknown:
            raise UsageError(f"the role {chosen.name} has no option {sorted(unknown)[0]!r}")
        function = load(arguments.target)
    except UsageError as error:
        print(f"check-pattern: {error}", file=sys.stderr)
        return 2
    except ValueError as error:      # a register_pattern in the file itself
        return _answer(arguments, str(error))
    reference = functools.partial(chosen.reference, **options)
    complaint = ""
    try:
        with step("comparing"):
            check_agreement(arguments.target, function, chosen, reference, arguments.rtol)
    except ValueError as error:
        complaint = str(error)
    return _answer(arguments, complaint)


def _answer(arguments: Namespace, complaint: str) -> int:
    if arguments.json:
        print(json.dumps({"target": arguments.target, "role": arguments.role, "agrees": not complaint,
                          "reason": complaint}, indent=2))
    elif complaint:
        print(f"disagrees: {complaint}")
    else:
        print(f"{arguments.target} agrees with the role {arguments.role!r}: register_pattern({arguments.role!r}) will "
              "take it")
    return 1 if complaint else 0
