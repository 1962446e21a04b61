"""Every corpus case at every level: positives fused with the expected roles, negatives left alone, values kept."""

import pytest
import torch
from compiling import (
    FLEX,
    NEGATIVES,
    PATHS,
    POSITIVES,
    TOLERANCE,
    case,
    compiled,
    difference,
    eager,
    exported,
    oracle_errors,
    post_grad,
    problems,
    through_inductor,
)

from fusion_pass import Config

STRICT = Config(strict=True)
WITH_INDUCTOR = ["pos_01_official_prefill", "pos_22_packed_ue8m0_int32_scales"]


def check(name, module, args, wanted, outcome):
    assert not problems(name, module.EXPECT, outcome.report)
    assert difference(outcome.values, wanted) < TOLERANCE
    errors = oracle_errors(module, args, wanted, outcome.values)
    if errors is not None and module.EXPECT["fused"]:
        of_eager, of_ours = errors
        print(f"{name}: error against float64: eager {of_eager:.2e}, compiled {of_ours:.2e}")
        assert of_ours <= 1.5 * of_eager + 1e-3


def unless_plain_fails(run, fn, args):
    """The outcome with the pass; where it raises and Inductor raises without the pass too, the test is skipped."""
    try:
        return run(fn, args, STRICT)
    except Exception:
        try:
            run(fn, args, None)
        except Exception as error:
            pytest.skip(f"plain Inductor fails: {type(error).__name__}")
        raise


@pytest.mark.parametrize("name", PATHS)
def test_aot(name):
    module, fn, args = case(name)
    check(name, module, args, eager(fn, args), compiled(fn, args))


@pytest.mark.parametrize("name", [name for name in PATHS if name not in FLEX])
def test_post_grad(name):
    module, fn, args = case(name)
    check(name, module, args, eager(fn, args), unless_plain_fails(post_grad, fn, args))


@pytest.mark.parametrize(
    "name", [n if n in WITH_INDUCTOR else pytest.param(n, marks=pytest.mark.slow) for n in PATHS])
def test_inductor(name):
    module, fn, args = case(name)
    check(name, module, args, eager(fn, args), unless_plain_fails(through_inductor, fn, args))


@pytest.mark.parametrize("name", PATHS)
def test_export(name):
    module, fn, args = case(name)
    check(name, module, args, eager(fn, args), exported(fn, args))


@pytest.mark.parametrize("name", POSITIVES[::5] + NEGATIVES[::8])
def test_export_decomposed(name):
    module, fn, args = case(name)
    check(name, module, args, eager(fn, args), exported(fn, args, decompose=True))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", POSITIVES)
def test_other_token_counts(name, tokens):
    module, fn, args = case(name, tokens=tokens)
    check(name, module, args, eager(fn, args), compiled(fn, args))


@pytest.mark.parametrize("name", PATHS)
def test_other_shapes_in_float32(name):
    """16 heads in 4 groups, 24 keys: nothing in the pass knows the corpus's shapes. In float32 no bf16 noise hides an
    error."""
    module, fn, args = case(name, tokens=4, heads=16, groups=4, o_rank=256, kv_len=24, seed=7, dtype=torch.float32)
    wanted, outcome = eager(fn, args), compiled(fn, args)
    assert not problems(name, module.EXPECT, outcome.report)
    quantised = module.EXPECT["quant"] is not None
    # A value on a rounding border of E4M3 may fall to either side; cases that round to bf16 inside do so for any dtype.
    assert difference(outcome.values, wanted) < (TOLERANCE if quantised else 5e-3)
