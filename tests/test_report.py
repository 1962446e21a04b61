"""Report: what it says, what it merges, what it becomes as JSON."""

import json
import os

import pytest

from fusion_pass import FusedChain, GatedChain, NearMiss, Report


def example() -> Report:
    return Report(
        fused=[
            FusedChain(
                roles=("fmha", "inverse_rope", "fp8_quant", "bgemm"),
                quant="ue8m0",
                group=128,
                op="fusion_pass.attention_rope_quant",
                where="model.py:12",
                gate="fused: sm_90",
            )
        ],
        gated=[
            GatedChain(
                roles=("fmha", "bgemm"),
                gate="head_dim 96 is no multiple of 128",
                where="/usr/lib/python3/site-packages/pkg/model.py:20",
            )
        ],
        near_misses=[
            NearMiss(role="inverse_rope", reason="the rotation is forward", where=f"{os.getcwd()}/model.py:30")
        ],
        notes=["a note"],
        nodes=100,
        visits=40,
        seconds=0.25,
    )


def test_text_has_every_site_with_its_line():
    assert (
        str(example())
        == """\
fusion_pass: 1 fused, 1 gated, 1 near miss in 1 graph (100 nodes, 40 visits, 0.250 s)
  fused      fmha -> inverse_rope -> fp8_quant -> bgemm [ue8m0 scales, 1x128] at model.py:12
             now fusion_pass.attention_rope_quant; gate: fused: sm_90
  gated      fmha -> bgemm at pkg/model.py:20
             left alone: head_dim 96 is no multiple of 128
  near miss  inverse_rope at model.py:30
             the rotation is forward
  note       a note"""
    )


def test_dict_is_json_and_comes_back():
    values = json.loads(example().to_json())
    assert values["schema_version"] == 1
    assert values["fused"][0]["roles"] == ["fmha", "inverse_rope", "fp8_quant", "bgemm"]
    assert Report.from_dict(values) == example()
    with pytest.raises(ValueError, match="schema_version"):
        Report.from_dict({**values, "schema_version": 99})


def test_merge_adds_counts_and_keeps_notes_once():
    merged = Report.merge([example(), example(), Report(notes=["other"])])
    assert (len(merged.fused), len(merged.gated), len(merged.near_misses)) == (2, 2, 2)
    assert merged.graphs == 3 and merged.nodes == 200 and merged.visits == 80 and merged.seconds == 0.5
    assert merged.notes == ["a note", "other"]
    assert Report.merge([]).graphs == 0


def test_merge_leaves_its_inputs_alone():
    first = example()
    Report.merge([first, example()])
    assert first == example()


def test_truth_is_about_anchors():
    assert example() and not Report(notes=["training graph"])


def test_roles_are_checked():
    with pytest.raises(ValueError, match="unknown role 'rope'"):
        FusedChain(roles=("rope",))
    with pytest.raises(ValueError, match="dataflow order"):
        GatedChain(roles=("bgemm", "fmha"), gate="x")
    assert FusedChain(roles=["fmha", "kv_merge"]).roles == ("fmha", "kv_merge")
