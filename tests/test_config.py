"""Config: values, environment, and the options of torch.compile."""

import logging
import pickle

import pytest

from fusion_pass import Config
from fusion_pass import config as config_module
from fusion_pass.config import split_options


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch):
    monkeypatch.setattr(config_module, "_warned", set())


def test_defaults_survive_an_empty_environment():
    assert Config().resolve({}) == Config(verify="off")
    assert not Config().resolve({}).disable


def test_frozen_hashable_picklable():
    config = Config(disable_rules=["b", "a"], kv_split=4)
    assert hash(config) == hash(pickle.loads(pickle.dumps(config))) and config == Config(
        disable_rules="a, b", kv_split=4
    )
    with pytest.raises(AttributeError):
        config.strict = True


@pytest.mark.parametrize("value, expected", [("1", True), ("true", True), ("0", False), ("", False), ("maybe", True)])
def test_kill_switch(value, expected):
    assert Config().resolve({"FUSION_PASS_DISABLE": value}).disable is expected


def test_kill_switches_always_win():
    assert Config(disable=False).resolve({"FUSION_PASS_DISABLE": "1"}).disable
    assert Config(disable=True).resolve({"FUSION_PASS_DISABLE": "0"}).disable
    rules = Config(disable_rules=("bgemm",)).resolve({"FUSION_PASS_DISABLE_RULES": "fp8_quant, kv_merge"}).disable_rules
    assert rules == ("bgemm", "fp8_quant", "kv_merge")


@pytest.mark.parametrize(
    "explicit, environment, effective",
    [
        (None, "", None),
        (4, "", 4),
        (None, "8", 8),
        (4, "8", 4),
        (16, "2", 2),
        (None, "3", 1),
        (16, "-1", 1),
        (8, "x", 1),
    ],
)
def test_kv_split_is_capped(explicit, environment, effective):
    assert Config(kv_split=explicit).resolve({"FUSION_PASS_KV_SPLIT": environment}).kv_split == effective


def test_bad_environment_warns_once(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            Config().resolve({"FUSION_PASS_KV_SPLIT": "3", "FUSION_PASS_VERIFY": "sometimes"})
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    "explicit, environment, effective", [(None, "first", "first"), ("off", "always", "off"), (None, "", "off")]
)
def test_explicit_verify_beats_the_environment(explicit, environment, effective):
    assert Config(verify=explicit).resolve({"FUSION_PASS_VERIFY": environment}).verify == effective


def test_resolve_is_idempotent():
    environment = {"FUSION_PASS_KV_SPLIT": "2", "FUSION_PASS_DISABLE_RULES": "a", "FUSION_PASS_VERIFY": "first"}
    once = Config(kv_split=8).resolve(environment)
    assert once.resolve(environment) == once


def test_resolve_reads_the_process_environment(monkeypatch):
    monkeypatch.setenv("FUSION_PASS_KV_SPLIT", "4")
    assert Config().resolve().kv_split == 4


def test_every_field_is_in_the_cache_key():
    changed = dict(
        disable=True,
        disable_rules=("x",),
        kv_split=2,
        verify="first",
        strict=True,
        check_inputs=True,
        o_proj="fp8",
        inner="eager",
        batch_invariant=True,
    )
    assert set(changed) == set(config_module.FIELDS)
    keys = {Config().cache_key(), *(Config(**{name: value}).cache_key() for name, value in changed.items())}
    assert len(keys) == len(changed) + 1


@pytest.mark.parametrize("bad", [dict(kv_split=3), dict(verify="maybe"), dict(o_proj="fp4"), dict(inner="nvfuser")])
def test_bad_values(bad):
    with pytest.raises(ValueError, match=f"Config.{next(iter(bad))}: expected one of"):
        Config(**bad)


@pytest.mark.parametrize("bad", [dict(strict=1), dict(kv_split=True), dict(kv_split="4"), dict(disable_rules=3)])
def test_bad_types(bad):
    with pytest.raises(TypeError, match=f"Config.{next(iter(bad))}: expected"):
        Config(**bad)


def test_split_options():
    config, inner = split_options({"strict": True, "triton.cudagraphs": False}, ["triton.cudagraphs"])
    assert config == Config(strict=True) and inner == {"triton.cudagraphs": False}
    assert split_options({"max-autotune": 1}, ["max_autotune"])[1] == {"max_autotune": 1}


@pytest.mark.parametrize(
    "typo, nearest", [("strct", "strict"), ("kv_splits", "kv_split"), ("triton.cudagraph", "triton.cudagraphs")]
)
def test_unknown_option_names_the_nearest(typo, nearest):
    with pytest.raises(ValueError, match=f"unknown option '{typo}'; the nearest is '{nearest}'"):
        split_options({typo: True}, ["triton.cudagraphs"])
