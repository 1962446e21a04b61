"""What a user can do about a near miss or a gated chain, from the wording of its reason."""

from __future__ import annotations

import re

from .report import GatedChain, NearMiss

# The first row whose pattern is found in the reason answers; reasons are written in ``recognise`` and ``replace``.
_NEAR_MISSES: tuple[tuple[str, str], ...] = (
    (r"sizes but not for others",
     "Let only those sizes be symbolic that change between calls (batch, tokens, keys): mark them with "
     "torch._dynamo.mark_dynamic instead of compiling with dynamic=True, and take head counts and widths from the "
     "module, where they are numbers."),
    (r"makes inputs of Python floats",
     "Write the number into the function (a local, or a literal), or set torch._dynamo.config.specialize_float = True: "
     "the pass may not assume a value that the next call can change."),
    (r"escapes the chain|is also read by|read by more than",
     "Fusing would never write that value. If the other reader is a hook, a returned intermediate or a statistic that "
     "inference does not need, drop it; otherwise compute it from the chain's input."),
    (r"validation: the replacement",
     "The source's own value is used, so results are right. Please report the chain with this page attached."),
    (r"forward rotation",
     "The chain undoes the rotation that queries and keys got: rotate the output by the negative angle (-sin, or "
     "the conjugate). If the forward rotation is meant, there is nothing to fuse here."),
    (r"in place",
     "Trace with functionalisation (torch.compile and torch.export do; for make_fx wrap the function in "
     "torch.func.functionalize), or write to a clone."),
    (r"not the same rows",
     "The fused attention reads one latent row per token as key and as value: pass the same tensor to both."),
    (r"no query-key product", "Keys and values differ in number: append a (masked) key row per value row."),
    (r"float64", "Run the layer in bf16, fp16 or fp32; the kernels accumulate in fp32."),
    (r"is_causal", "Pass the mask explicitly, or compute causal masking with a tensor."),
    (r"no sink|one sink per head|can be the sink|elements of .* per head",
     "The sink has to be one logit per head, joined to the softmax without a value row."),
    (r"softmax scale", "Use one scale for all keys: a Python number, or a scalar tensor multiplied to the scores."),
    (r"every head has its own keys",
     "Keys have to be shared by the heads (multi-query attention on the latent), as in DeepSeek-V4."),
    (r"added to the scores|instead of masking|same for all keys|changes the scores|irregular way|too many masks",
     "Express the mask as one boolean or additive tensor that broadcasts to [batch, queries, keys]."),
    (r"regular layout|written as (a )?views?|cannot be viewed|not contiguous",
     "The operand is assembled from pieces that no strided view describes: make it contiguous before the attention."),
    (r"heads of a group|do not split into groups|neighbouring heads|neighbouring|heads and tokens are mixed",
     "Heads of a group have to be neighbours, and each group has to read its own heads: check the reshape or transpose "
     "between rotation and projection."),
    (r"merge of|partials|statistic|sum of one part|the parts",
     "Partials need one log-sum-exp each (or a maximum and a sum), all in one base, merged with a softmax over the "
     "parts."),
    (r"is .* where the", "The values differ from the role's reference: compare the sign of the rotation, its position, "
                          "the scale and the mask. fusion_pass.patterns holds the reference functions."),
)

_ROLES = {
    "fmha": "If the attention is your own kernel, declare it: fusion_pass.register_pattern('fmha').",
    "kv_merge": "If the merge is your own kernel, declare it: fusion_pass.register_pattern('kv_merge').",
    "inverse_rope": "If the rotation is your own kernel, declare it: fusion_pass.register_pattern('inverse_rope').",
    "fp8_quant": "If the quantisation is your own kernel, declare it: fusion_pass.register_pattern('fp8_quant').",
    "bgemm": "Look at what stands between the rotation and the grouped product: only views and casts may.",
}

_GATED: tuple[tuple[str, str], ...] = (
    (r"training graph|autograd", "Call the model under torch.no_grad() or torch.inference_mode()."),
    (r"switched off", "Remove the rule from disable_rules or FUSION_PASS_DISABLE_RULES."),
    (r"float64|dtype", "Run the layer in bf16, fp16 or fp32."),
    (r"scale of zero",
     "Clamp the block maximum from below before it is divided by 448 (1e-4, 1e-10 and 1e-12 are usual)."),
    (r"multiple of", "Choose a quantisation block that divides the head dimension."),
)


def advice(entry: NearMiss | GatedChain) -> str:
    """One sentence or two on how to get the chain fused."""
    if isinstance(entry, GatedChain):
        return next((text for pattern, text in _GATED if re.search(pattern, entry.gate)), "")
    found = next((text for pattern, text in _NEAR_MISSES if re.search(pattern, entry.reason)), None)
    return found or _ROLES[entry.role]
