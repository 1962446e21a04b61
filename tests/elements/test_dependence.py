"""What a tensor depends on: made from nothing, or with elements that are known without any input."""

import torch
from programs import result, trace

from fusion_pass.elements import constants
from fusion_pass.elements.constants import made_from_nothing
from fusion_pass.elements.dependence import has_property
from fusion_pass.elements.sizes import Sizes
from fusion_pass.recognise.unchanged import Known

X = torch.randn(4, 6)


def result_of(function):
    return result(trace(function, X))


def nothing(function):
    return made_from_nothing(result_of(function), Sizes())


def test_made_from_nothing():
    assert nothing(lambda x: torch.arange(6) ^ 1)
    assert nothing(lambda x: torch.zeros_like(x) + 1), "of an input's shape, not of its elements"
    assert not nothing(lambda x: torch.arange(6) + x)
    assert not nothing(lambda x: torch.cos(torch.arange(6.0))), "a table stays a table"


def test_parts_of_several_results():
    """A part of a split depends on what was split, although the split itself has no tensor for a value."""
    assert nothing(lambda x: torch.arange(8).split(4)[1])
    assert not nothing(lambda x: x.split(2)[0])
    assert not nothing(lambda x: x.topk(2).indices)


def test_more_than_the_limit_is_taken_for_an_input(monkeypatch):
    def deep(x):
        y = torch.arange(6)
        for _ in range(8):
            y = y + 1
        return y

    assert nothing(deep)
    monkeypatch.setattr(constants, "CONE_LIMIT", 4)
    assert not nothing(deep)


def test_may_be_known():
    def possible(function):
        return Known(Sizes()).possible(result_of(function))

    assert possible(lambda x: torch.cat([x, torch.ones(4, 1)], 1) * 2)
    assert possible(lambda x: torch.nn.functional.pad(x, (0, 1)).split(2)[0])
    assert not possible(lambda x: (x + x).t())
    assert not possible(lambda x: x.split(2)[0] * 2)
    assert not possible(lambda x: torch.relu(torch.ones(4))), "not looked through"


def test_every_node_is_asked_once():
    """A ladder of sums has 2 ** 40 paths."""
    def ladder(x):
        for _ in range(40):
            x = x + x.t().t()
        return x

    asked, answers = [], {}
    assert has_property(result_of(ladder), answers, asked.append, decided_by=False)
    assert len(set(asked)) == len(answers) and len(asked) <= 3 * len(answers)
