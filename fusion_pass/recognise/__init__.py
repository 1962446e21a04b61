"""Recognition: which parts of a graph compute the chain.

    anchors.py       contractions whose operand may be a rotated attention output (cheap: most graphs have none)
    quant_path.py    the way from a contraction's operand through (de)quantisation back to what was quantised
    rotation.py      the inverse rotation: which channels, which pairs, which sign, from which tables
    quantisation.py  the FP8 block quantisation: block, scale rule, floor, proved on random values
    projection.py    the grouped contraction: groups of heads, and FP8 weights with block scales
    attention.py     what computes the attention output, proved on random values
    chain.py         all of it together: one Chain per anchor, or a Refusal that says what was found instead
"""
