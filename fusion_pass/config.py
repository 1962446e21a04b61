"""What a user can set, and how it meets the environment.

Order of precedence: an explicit value, then the environment, then the default. Two exceptions, because they exist for
the operator of somebody else's program: the kill switches (``FUSION_PASS_DISABLE=1``,
``FUSION_PASS_DISABLE_RULES=a,b``) always win, and ``FUSION_PASS_KV_SPLIT`` is a cap that an explicit ``kv_split``
cannot exceed.

The environment is read when a graph is compiled (:meth:`Config.resolve`), never when it runs, and
:meth:`Config.cache_key` of the resolved configuration is part of every cache key.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

log = logging.getLogger(__name__)

KV_SPLITS = (1, 2, 4, 8, 16)
VERIFY_MODES = ("off", "first", "always")
INNERS = ("inductor", "aot_eager", "eager")
O_PROJ_MODES = ("as_written", "fp8")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")
_warned: set[str] = set()


def _warn_once(key: str, message: str, *args: object) -> None:
    if key not in _warned:
        _warned.add(key)
        log.warning(message, *args)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the pass; immutable, hashable and picklable.

    disable: leave every graph exactly as it came. Environment: ``FUSION_PASS_DISABLE=1`` (always wins).
    disable_rules: names of roles or rules not to use (``"fp8_quant"``, ``"kv_merge"``, ...): a tuple, a list or a
        string with commas. Environment: ``FUSION_PASS_DISABLE_RULES=a,b`` is added.
    kv_split: upper bound of the groups that merge split-KV partials, one of 1, 2, 4, 8, 16; None: the measured table of
        the architecture. 1 = the serial loop. Environment: ``FUSION_PASS_KV_SPLIT`` is a cap; a value outside the set
        is answered with one warning and the serial loop.
    verify: ``"off"``, ``"first"`` or ``"always"``: run each matched sub-graph against its replacement, on the first
        real inputs or on those of every call, and refuse the replacement when they disagree. None:
        ``FUSION_PASS_VERIFY``, else off.
    strict: raise instead of leaving a graph unfused when the pass itself fails.
    check_inputs: ops read their index lists and lengths before they run and raise ValueError for one that points
        outside (slow: it waits for the device). Off: such an index counts as "no key"; foreign memory is never read.
    o_proj: ``"as_written"`` keeps the numbers of the source; ``"fp8"`` computes a bf16 output projection that has FP8
        weights at hand (``fusion_pass.models.attach_fp8_weights``) in FP8, which changes the numbers: the report says
        where.
    inner: what compiles the rewritten graph: ``"inductor"``, ``"aot_eager"`` (run the traced graph) or ``"eager"`` (run
        it node by node).
    batch_invariant: a token's result is the same bits whatever other tokens share its batch: keys are not split, and
        tiles do not depend on the number of tokens. Slower for few tokens.

    Raises ValueError for a value outside the sets above, TypeError for a value of a wrong type.
    """

    disable: bool = False
    disable_rules: tuple[str, ...] = ()
    kv_split: int | None = None
    verify: str | None = None
    strict: bool = False
    check_inputs: bool = False
    o_proj: str = "as_written"
    inner: str = "inductor"
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("disable", "strict", "check_inputs", "batch_invariant"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"Config.{name}: expected a bool, got {value!r}")
        rules = self.disable_rules
        if isinstance(rules, str):
            rules = rules.split(",")
        if not isinstance(rules, Iterable):
            raise TypeError(f"Config.disable_rules: expected rule names, got {self.disable_rules!r}")
        cleaned = []
        for rule in rules:
            if not isinstance(rule, str):
                raise TypeError(f"Config.disable_rules: expected rule names, got {rule!r} among them")
            cleaned.append(rule.strip())
        object.__setattr__(self, "disable_rules", tuple(sorted({rule for rule in cleaned if rule})))
        if self.kv_split is not None and (isinstance(self.kv_split, bool) or not isinstance(self.kv_split, int)):
            raise TypeError(f"Config.kv_split: expected one of {KV_SPLITS} or None, got {self.kv_split!r}")
        _check_choice("kv_split", self.kv_split, (None, *KV_SPLITS))
        _check_choice("verify", self.verify, (None, *VERIFY_MODES))
        _check_choice("o_proj", self.o_proj, O_PROJ_MODES)
        _check_choice("inner", self.inner, INNERS)

    def resolve(self, environ: Mapping[str, str] | None = None) -> Config:
        """This configuration with the environment applied (``os.environ`` when none is given). Idempotent."""
        env = os.environ if environ is None else environ
        rules = tuple(env.get("FUSION_PASS_DISABLE_RULES", "").split(","))
        return dataclasses.replace(
            self,
            disable=self.disable or _env_flag(env, "FUSION_PASS_DISABLE"),
            disable_rules=(*self.disable_rules, *rules),
            kv_split=_capped_kv_split(self.kv_split, env.get("FUSION_PASS_KV_SPLIT", "").strip()),
            verify=self.verify or _env_verify(env.get("FUSION_PASS_VERIFY", "").strip().lower()),
        )

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and cache keys."""
        values = dataclasses.asdict(self)
        values["disable_rules"] = list(self.disable_rules)
        return values

    def cache_key(self) -> str:
        """A string that is equal exactly for equal configurations."""
        return repr(sorted(self.to_dict().items()))


FIELDS = tuple(field.name for field in dataclasses.fields(Config))


def split_options(options: Mapping[str, Any] | None, known_elsewhere: Iterable[str]) -> tuple[Config, dict[str, Any]]:
    """Split the ``options`` of ``torch.compile`` into a :class:`Config` and the options that belong to the inner
    compiler.

    known_elsewhere: every key that the inner compiler understands. Raises ValueError for a key that nobody knows,
    naming the nearest known one.
    """
    elsewhere = {key.replace("-", "_"): key for key in known_elsewhere}
    mine: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in (options or {}).items():
        normal = key.replace("-", "_")
        if normal in FIELDS:
            mine[normal] = value
        elif normal in elsewhere:
            others[normal] = value
        else:
            raise ValueError(_unknown_option(key, (*FIELDS, *elsewhere)))
    return Config(**mine), others


def _unknown_option(key: str, known: Iterable[str]) -> str:
    known = tuple(known)
    nearest = difflib.get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.0)
    hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
    return (
        f"backend 'fusion_pass': unknown option {key!r}{hint}. "
        f"Its own options are {', '.join(FIELDS)}; those of Inductor's configuration pass through."
    )


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"Config.{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


def _env_flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value not in (*_TRUE, *_FALSE):
        # A kill switch that is pulled clumsily is still pulled.
        _warn_once(f"{name}={value}", "%s=%r is neither on nor off; read as on", name, value)
        return True
    return value in _TRUE


def _capped_kv_split(explicit: int | None, raw: str) -> int | None:
    if not raw:
        return explicit
    try:
        cap = int(raw)
    except ValueError:
        cap = 0
    if cap not in KV_SPLITS:
        _warn_once(
            f"kv_split={raw}", "FUSION_PASS_KV_SPLIT=%r is not one of %s: partials are merged serially", raw, KV_SPLITS
        )
        cap = 1
    return cap if explicit is None else min(explicit, cap)


def _env_verify(raw: str) -> str:
    if not raw:
        return "off"
    if raw not in VERIFY_MODES:
        _warn_once(f"verify={raw}", "FUSION_PASS_VERIFY=%r is not one of %s: verification is off", raw, VERIFY_MODES)
        return "off"
    return raw
