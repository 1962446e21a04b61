"""``list-patterns`` and ``check-pattern``: answers, streams, exit codes."""

import json
import sys

import pytest

import fusion_pass
from fusion_pass.cli.main import main

RIGHT = """
import torch
import fusion_pass

def right(o, cos, sin):
    plain, even, odd = o[..., :-64], o[..., -64::2].float(), o[..., -63::2].float()
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(-2)
    return torch.cat((plain, turned.to(o.dtype)), -1)

def forward_rotation(o, cos, sin):
    return right(o, cos, -sin)

def raises(o, cos, sin):
    raise RuntimeError("broken on purpose")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "my_patterns.py"
    path.write_text(RIGHT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return path


def test_check_pattern(file, capsys):
    assert main(["check-pattern", f"{file}:right", "--role", "inverse_rope"]) == 0
    assert "agrees with the role 'inverse_rope'" in capsys.readouterr().out
    assert main(["check-pattern", f"{file}:forward_rotation", "--role", "inverse_rope", "--json"]) == 1
    streams = capsys.readouterr()
    answer = json.loads(streams.out)
    assert not answer["agrees"] and "element [0, 0, 448]" in answer["reason"] and "comparing" in streams.err
    assert main(["check-pattern", f"{file}:raises", "--role", "inverse_rope"]) == 1
    assert "broken on purpose" in capsys.readouterr().out


def test_check_pattern_options(file, capsys):
    file.write_text("from fusion_pass.patterns.fp8_quant import fp8_quant as q\n"
                    "def f(x):\n    return q(x, scale_rule='ue8m0')\n")
    target = ["check-pattern", f"{file}:f", "--role", "fp8_quant"]
    assert main([*target, "--scale-rule", "ue8m0"]) == 0
    assert main([*target, "--scale-rule", "fp32"]) == 1
    capsys.readouterr()
    assert main(["check-pattern", f"{file}:f", "--role", "bgemm", "--block", "32"]) == 2
    assert "has no option 'block'" in capsys.readouterr().err


@pytest.mark.parametrize(("target", "message"), [("absent.py:f", "no file"), ("x", "expected MODULE:FUNCTION")])
def test_check_pattern_usage(target, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["check-pattern", target, "--role", "fmha"]) == 2
    streams = capsys.readouterr()
    assert message in streams.err and not streams.out
    with pytest.raises(SystemExit) as stop:
        main(["check-pattern", target, "--role", "nonsense"])
    assert stop.value.code == 2


def test_list_patterns(file, capsys):
    assert main(["list-patterns"]) == 0
    text = capsys.readouterr().out
    for word in (*fusion_pass.report.ROLES, "flashinfer::merge_state", "Tensor q, Tensor kv"):
        assert word in text
    assert "\x1b" not in text, "no colour where no terminal listens"
    file.write_text(RIGHT + "\nfusion_pass.register_pattern('inverse_rope', name='of_the_list')(right)\n")
    try:
        assert main(["list-patterns", "--json", "--load", str(file)]) == 0
        values = json.loads(capsys.readouterr().out)
    finally:
        fusion_pass.unregister_pattern("of_the_list")
    assert [p["name"] for p in values["registered"]] == ["of_the_list"]
    assert [r["name"] for r in values["roles"]] == list(fusion_pass.report.ROLES)
    assert any(not row["written_out"] for row in values["declared_ops"])
    assert main(["list-patterns", "--load", "absent_module"]) == 2
