# SPDX-License-Identifier: Apache-2.0
"""What each role of the chain means, and how libraries' ops spell it.

    roles.py         the roles, each with its reference function (fmha.py, kv_merge.py, inverse_rope.py, fp8_quant.py,
                     bgemm.py: one function each, in plain torch)
    opaque.py        declared opaque ops of libraries and engines: which roles they are, written out in plain torch
    registration.py  register_pattern: functions of the user's own

Importing this package imports none of them: the top-level folder may be found under the name ``patterns`` by accident.
"""


def registry_fingerprint() -> str:
    """Identity of the functions that the user registered in this process ("" when there are none)."""
    import sys

    registration = sys.modules.get(f"{__name__}.registration")
    return "" if registration is None else str(registration.fingerprint())
