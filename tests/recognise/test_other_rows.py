"""Values that are not the keys: the reason says which elements each of them are, also where both lie in one tensor."""

from __future__ import annotations

import pytest
import torch
from test_other_sizes import attention_chain

import fusion_pass
from fusion_pass.advice import advice

KEYS, D = 24, 512


def said(rows, *tensors) -> str:
    """The reason for ``rows`` (tensors -> keys [N, D] and values [N, D])."""
    def source(q, cos, sin, weight, *tensors):
        keys, values = rows(*tensors)
        return attention_chain(q, keys, values, cos, sin, weight)

    torch._dynamo.reset()
    q, half = torch.randn(7, 2, 3, D), torch.randn(7, 32)
    with torch.no_grad():
        torch.compile(source, backend="fusion_pass", fullgraph=True, options={"inner": "eager"})(
            q, half, half, torch.randn(2, 16, 3, D), *tensors)
    report = fusion_pass.reports()[-1]
    (miss,) = report.near_misses
    assert miss.role == "fmha" and "same tensor to both" in advice(miss)
    return miss.reason


def test_two_tensors():
    reason = said(lambda k, v: (k, v), torch.randn(KEYS, D), torch.randn(KEYS, D))
    names = reason.removesuffix(": they are not the same rows").removeprefix("values come from ").split(", keys from ")
    assert len(set(names)) == 2 and all(name.isidentifier() for name in names), reason


@pytest.mark.parametrize("rows, shape, values, keys", [
    (lambda x: (x[:, :D], x[:, D:]), (KEYS, 2 * D), "0:24, 512:1024", "0:24, 0:512"),
    (lambda x: (x[0], x[1]), (2, KEYS, D), "1, 0:24, 0:512", "0, 0:24, 0:512"),
    (lambda x: (x[:KEYS], x[2:]), (KEYS + 2, D), "2:26, 0:512", "0:24, 0:512"),
], ids=["channels", "halves", "rows"])
def test_parts_of_one_tensor(rows, shape, values, keys):
    name, reason = one_name(said(rows, torch.randn(shape)))
    assert reason == f"values come from X[{values}], keys from X[{keys}]: they are not the same rows", name


def test_the_same_elements_in_another_order():
    name, reason = one_name(said(lambda x: (x, x.flip(0)), torch.randn(KEYS, D)))
    assert reason == ("values and keys come from X in another order (key 0: X[23, 0] as a value, X[0, 0] as a key): "
                      "they are not the same rows"), name


def one_name(reason: str) -> tuple[str, str]:
    name = reason.split("come from ")[1].split("[")[0].split(" ")[0]
    return name, reason.replace(name, "X")
