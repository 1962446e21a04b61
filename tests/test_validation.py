"""Translation validation: agreement keeps the replacement, disagreement the source's value, and the report says so."""

import pathlib
import sys

import pytest
import torch

import fusion_pass
from fusion_pass import validation

sys.path.insert(0, str(pathlib.Path(__file__).parent / "corpus"))
from run_all import flat, fresh, load  # noqa: E402

CASES = pathlib.Path(__file__).parent / "corpus" / "cases"
NAMES = ("pos_03_hf_eager_b3", "pos_17_deepgemm_per_token_cast_fp32")


def compiled(name: str, mode: str):
    torch._dynamo.reset()
    fusion_pass.clear_reports()
    function, args = load(CASES / f"{name}.py").make(tokens=3, kv_len=12)
    call = torch.compile(function, backend="fusion_pass", fullgraph=True,
                         options={"inner": "aot_eager", "strict": True, "verify": mode})
    return function, args, call


@pytest.mark.parametrize("name", NAMES)
def test_agreement_is_measured_and_keeps_the_replacement(name: str) -> None:
    known = len(validation.records())
    function, args, call = compiled(name, "first")
    with torch.no_grad():
        call(*fresh(args))
        call(*fresh(args))
    record, = validation.records()[known:]
    assert record.agreed and record.comparisons == 1 and 0 < record.worst <= record.budget
    report, = fusion_pass.reports()
    assert len(report.fused) == 1 and any("validated" in note for note in report.notes)


def test_always_compares_at_every_call() -> None:
    known = len(validation.records())
    _, args, call = compiled(NAMES[0], "always")
    with torch.no_grad():
        for _ in range(3):
            call(*fresh(args))
    assert validation.records()[known].comparisons == 3


@pytest.mark.parametrize("name", NAMES)
def test_disagreement_keeps_the_source_and_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement that is made wrong on purpose must not reach the user."""
    from fusion_pass import replace

    right = replace.ChainWriter.tables

    def swapped(self, batch):
        cos, sin = right(self, batch)
        return [sin, cos]

    monkeypatch.setattr(replace.ChainWriter, "tables", swapped)
    function, args, call = compiled(name, "first")
    with torch.no_grad():
        expected = flat(function(*fresh(args)))
        for _ in range(2):
            found = flat(call(*fresh(args)))
            for a, b in zip(found, expected):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    report, = fusion_pass.reports()
    assert not report.fused
    assert any("validation" in miss.reason for miss in report.near_misses)
