"""``list-patterns``: the roles, the declared library ops, and what this process registered."""

from __future__ import annotations

import inspect
import json
from argparse import Namespace

from ..patterns import opaque
from ..patterns.registration import registered_patterns
from ..patterns.roles import ROLES


def run(arguments: Namespace) -> int:
    """Always succeeds."""
    roles = {name: {"signature": role.schema, "meaning": _first_line(role.reference)} for name, role in ROLES.items()}
    ops = [{"op": row.name, "versions": row.versions, "roles": list(row.roles), "source": row.source,
            "written_out": row.expand is not None} for row in opaque.ROWS]
    registered = [str(one) for one in registered_patterns()]
    if arguments.json:
        print(json.dumps({"roles": roles, "declared_ops": ops, "registered": registered}, indent=2))
        return 0
    print("roles (reference semantics: fusion_pass.patterns.<role>)")
    for name, facts in roles.items():
        print(f"  {name:14}{facts['meaning']}\n{'':16}{facts['signature']}")
    print("declared ops (Config(disable_rules=...) takes their names)")
    for op in ops:
        kind = "" if op["written_out"] else ", known as opaque"
        print(f"  {op['op']}\n{'':16}{' + '.join(op['roles'])}{kind}; {op['versions']}; {op['source']}")
    print("registered in this process" if registered else "registered in this process: none")
    for line in registered:
        print(f"  {line}")
    return 0


def _first_line(function: object) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]
