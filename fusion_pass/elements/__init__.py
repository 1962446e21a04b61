"""Element evaluation: what does one element of a graph's value consist of?

Everything the pass recognises is recognised by following single elements of a tensor backwards through an ATen graph.
A coordinate is always the *row-major linear index* into the logical shape of a node, so one int64 vector stands for any
number of elements of any rank. The modules, bottom up:

    sizes.py      concrete sizes for a graph, also for symbolic shapes (no guards are added)
    moves.py      operators that only move elements: output index -> (input, input index), one rule for all views
    constants.py  what a graph makes from nothing: positions, index patterns, signs
    loads.py      loads and stores by index tensors: moves where the indices are such constants
    follow.py     many elements at once back to the nodes that compute them, through moves and casts only
    symbolic.py   one element as a polynomial (polynomials.py) over elements of chosen leaves (for rotations)
    numeric.py    many elements as float64 numbers, for random values at chosen leaves (used to prove equality)
    layouts.py    where a family of elements lives: mixed-radix strides, and the view operators that rebuild it
"""
