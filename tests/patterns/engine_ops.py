"""Ops with the names and schemas of libraries and engines, and reference bodies that work on a CPU.

The bodies use the reference of the kernels (``fusion_pass.kernels.reference``), not what ``fusion_pass.patterns`` says
about the ops: the two are written independently, so a test that compares them can fail.
"""

import torch
from fusion_pass.kernels import reference
from torch import Tensor

_LIBRARIES: list[torch.library.Library] = []


def define(name: str, schema: str, body, fake=None) -> None:
    """Define ``namespace::op`` unless it exists. ``fake`` None: the op returns nothing."""
    namespace, op = name.split("::")
    if hasattr(getattr(torch.ops, namespace), op):
        return
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(op + schema)
    library.impl(op, body, "CPU")
    torch.library.register_fake(name, fake or (lambda *args, **kwargs: None), lib=library)
    _LIBRARIES.append(library)


def cos_sin(cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cache.index_select(0, positions.long()).chunk(2, -1)
    return cos, sin


def aligned(tokens: int) -> int:
    return (tokens + 3) // 4 * 4


# --------------------------------------------------------------------------------------------------------------- vLLM

def _attention(hidden_states, positions, out, layer_name):
    seed = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    values = torch.sin(seed * 977 + hidden_states.double().mean() + positions.double().view(-1, 1, 1))
    out.copy_(values.to(out.dtype))


def _attention_0_20(hidden_states, qr, kv, positions, out, layer_name):
    _attention(hidden_states, positions, out, layer_name)


def _vllm_rope_quant(o, positions, cache, heads_per_group, block, chunks, start, half, packed, fp8_max, aligned_tokens,
                     tokens, groups, d, inner, quantize=True, permuted=False):
    cos, sin = cos_sin(cache, positions)
    if not quantize:
        return reference.inverse_rope(o, cos, sin, groups), torch.empty(0, dtype=torch.float32)
    codes, scales = reference.inverse_rope_quant(o, cos, sin, groups, block, "ue8m0", 1e-10, packed)
    return codes, scales.transpose(1, 2)[:, :tokens]


def _vllm_rope_quant_fake(o, positions, cache, heads_per_group, block, chunks, start, half, packed, fp8_max,
                          aligned_tokens, tokens, groups, d, inner, quantize=True, permuted=False):
    out = torch.empty(groups, tokens, d, dtype=torch.float8_e4m3fn if quantize else o.dtype, device=o.device)
    kind = torch.int32 if packed else torch.float32
    if not quantize:
        return out, torch.empty(0, dtype=kind, device=o.device)
    scales = torch.empty(groups * inner * aligned_tokens, dtype=kind, device=o.device)
    return out, scales.as_strided((groups, tokens, inner), (inner * aligned_tokens, 1, aligned_tokens))


def _fp8_einsum(a, a_scale, b, b_scale, out, equation, recipe):
    weight = b.view(a.shape[1], -1, a.shape[2])
    factors = b_scale.view(a.shape[1], -1, b_scale.shape[-1])
    scales = torch.nn.functional.pad(a_scale.permute(1, 2, 0), (0, aligned(a.shape[0]) - a.shape[0]))
    out.copy_(reference.fp8_bgemm(a.transpose(0, 1), scales, weight, factors, 128, 128, out.dtype))


_ROPE_QUANT = ("(Tensor o, Tensor positions, Tensor cos_sin_cache, SymInt heads_per_group, SymInt quant_group_size, "
               "SymInt chunks_per_head, SymInt {start}, SymInt half_rope, bool tma_aligned_scales, float fp8_max, "
               "SymInt tma_aligned_T, SymInt num_tokens, SymInt n_groups, SymInt d, SymInt scale_inner{more}) "
               "-> (Tensor, Tensor)")


def vllm(start: str = "nope_dim", quantize: bool = True, opcode: str = "") -> None:
    """``deepseek_v4_attention`` (0.22), ``fused_inv_rope_fp8_quant_kernel`` and ``deepseek_v4_fp8_einsum``."""
    define("vllm::deepseek_v4_attention",
           "(Tensor hidden_states, Tensor positions, Tensor(a!) out, str layer_name) -> ()", _attention)
    define("vllm::deepseek_v4_fp8_einsum",
           "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor(a!) out, str equation, SymInt[] recipe) -> ()",
           _fp8_einsum)
    define("vllm::fused_inv_rope_fp8_quant_kernel",
           _ROPE_QUANT.format(start=start, more=", bool quantize" if quantize else ""), _vllm_rope_quant,
           _vllm_rope_quant_fake)


# ------------------------------------------------------------------------------------------------------- TensorRT-LLM

def _trt_rope_quant(o, positions, cache, groups, heads_per_group, nope, rope, block, is_neox):
    cos, sin = cos_sin(cache, positions)
    return reference.inverse_rope_quant(o, cos, sin, groups, block, "fp32", 1e-12)


def _trt_rope_quant_fake(o, positions, cache, groups, heads_per_group, nope, rope, block, is_neox):
    tokens, width = o.shape[0], heads_per_group * (nope + rope)
    return (o.new_empty(groups, tokens, width, dtype=torch.float8_e4m3fn),
            o.new_empty(groups, width // block, aligned(tokens), dtype=torch.float32))


def _trt_bmm(input, weight, input_scale, weight_scale, out):
    product = reference.fp8_bgemm(input, input_scale, weight, weight_scale, 128, 128, out.dtype)
    out.copy_(product.transpose(0, 1))


def _mla_rope(data, positions, cache, heads, nope, rope, inverse, is_neox):
    cos, sin = cos_sin(cache, positions)
    view = data.view(-1, heads, nope + rope)
    if is_neox:
        low, high = view[..., nope:nope + rope // 2].float(), view[..., nope + rope // 2:].float()
        cos, sin = cos.unsqueeze(1), (sin if inverse else -sin).unsqueeze(1)
        view[..., nope:] = torch.cat((low * cos + high * sin, high * cos - low * sin), -1).to(data.dtype)
        return
    view.copy_(reference.rotate_inverse(view.float(), cos, sin if inverse else -sin).to(data.dtype))


def trtllm() -> None:
    """``fused_inv_rope_fp8_quant_vllm_port``, ``cute_dsl_fp8_bmm_blackwell`` and ``mla_rope_inplace``."""
    define("trtllm::fused_inv_rope_fp8_quant_vllm_port",
           "(Tensor o, Tensor positions, Tensor cos_sin_cache, int n_groups, int heads_per_group, int nope_dim, "
           "int rope_dim, int quant_group_size, bool is_neox) -> (Tensor, Tensor)",
           _trt_rope_quant, _trt_rope_quant_fake)
    define("trtllm::cute_dsl_fp8_bmm_blackwell",
           "(Tensor input, Tensor weight, Tensor input_scale, Tensor weight_scale, Tensor(a!) out) -> ()", _trt_bmm)
    define("trtllm::mla_rope_inplace",
           "(Tensor(a!) data, Tensor position_ids, Tensor cos_sin_cache, int num_heads, int nope_dim, int rope_dim, "
           "bool inverse, bool is_neox) -> ()", _mla_rope)


# ---------------------------------------------------------------------------------------------------------- libraries

def _matmul_grouped(x, w, scales, offsets, tokens_per_expert, block_size=None):
    groups, rows, width = w.shape
    out, start = x.new_zeros(x.shape[0], rows), 0
    for group, end in enumerate(offsets.tolist()):
        codes, factors = reference.quantise(x[start:end].float().unsqueeze(0), 128, "fp32", 1e-12)
        product = reference.fp8_bgemm(codes, factors, w[group:group + 1], scales[group:group + 1], 128, 128, x.dtype)
        out[start:end] = product[:, 0]
        start = end
    return out


def finegrained(op: str = "matmul_grouped") -> None:
    """transformers' grouped product."""
    define(f"finegrained_fp8::{op}",
           "(Tensor A, Tensor B, Tensor Bs, Tensor offsets, Tensor tokens_per_expert, int[]? block_size) -> Tensor",
           _matmul_grouped, lambda x, w, *others, **named: x.new_empty(x.shape[0], w.shape[1]))


def _merge_states(v, s):
    out, stats = reference.merge_partials(v.transpose(0, 1), s.transpose(0, 1) * 0.6931471805599453, None, None,
                                          return_stats=True)
    return out, stats[..., 0] / 0.6931471805599453 + stats[..., 1].log2()


def _merge_state(v_a, s_a, v_b, s_b):
    return _merge_states(torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1))


def flashinfer() -> None:
    """``merge_state`` and ``merge_states``: log-sum-exp in base 2."""
    define("flashinfer::merge_state", "(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b) -> (Tensor, Tensor)",
           _merge_state, lambda v_a, s_a, v_b, s_b: (torch.empty_like(v_a), torch.empty_like(s_a)))
    define("flashinfer::merge_states", "(Tensor v, Tensor s) -> (Tensor, Tensor)", _merge_states,
           lambda v, s: (v.new_empty(v.shape[0], v.shape[2], v.shape[3]), s.new_empty(s.shape[0], s.shape[2])))


def _sparse_attn(q, kv, attn_sink, topk_idxs, softmax_scale, **others):
    return torch.stack([reference.attention_gathered(q[b], kv[b], topk_idxs[b], attn_sink, softmax_scale)
                        for b in range(q.shape[0])])


def sparse_attention() -> None:
    """The official ``sparse_attn`` as somebody's custom op, and AutoDeploy's source op."""
    define("someones_model::sparse_attn",
           "(Tensor q, Tensor kv, Tensor attn_sink, Tensor topk_idxs, float softmax_scale) -> Tensor", _sparse_attn,
           lambda q, *others: torch.empty_like(q))
    define("auto_deploy::torch_deepseek_v4_sparse_attention",
           "(Tensor q, Tensor kv, Tensor attn_sink, Tensor topk_idxs, float softmax_scale, Tensor? out=None, "
           "bool enable_sharding=False, str layer_type='unknown') -> Tensor", _sparse_attn,
           lambda q, *others, **named: torch.empty_like(q))


def _fused_rope_concat(nope, pe, cos, sin, inverse=False, rms_eps=0.0):
    whole = torch.cat((nope, pe), -1).flatten(0, -3).float()
    angle_sin = sin if inverse else -sin
    turned = reference.rotate_inverse(whole, cos.reshape(-1, cos.shape[-1]), angle_sin.reshape(-1, sin.shape[-1]))
    return turned.view(*nope.shape[:-1], -1).to(nope.dtype)


def _grouped_linear(input, weight, bias, **hints):
    return torch.cat([input[..., g, :] @ weight[g].T for g in range(weight.shape[0])], -1)


def auto_deploy() -> None:
    """What AutoDeploy's model of DeepSeek-V4 calls from the attention to the all-reduce."""
    names = ("q", "kv", "attn_sink", "topk_idxs", "compressor_kv", "compressor_gate", "compressor_ape",
             "compressor_norm_weight", "freqs_cis_table", "position_ids")
    define("auto_deploy::torch_deepseek_v4_sparse_attention_v2",
           "(" + ", ".join(f"Tensor {name}" for name in names) + ", float softmax_scale, Tensor? out=None, "
           "bool enable_sharding=False, str layer_type='unknown', int? layer_idx=None, int? window_size=None, "
           "int compress_ratio=0, int? max_compressed_len=None, int? head_dim=None, int? rope_dim=None, "
           "float rms_norm_eps=1e-6) -> Tensor",
           lambda q, kv, sink, picked, *rest, **named: _sparse_attn(q, kv, sink, picked, rest[6]),
           lambda q, *others, **named: torch.empty_like(q))
    define("auto_deploy::deepseek_v4_fused_rope_concat",
           "(Tensor nope, Tensor pe, Tensor cos, Tensor sin, bool inverse=False, float rms_eps=0.0) -> Tensor",
           _fused_rope_concat,
           lambda nope, pe, *others, **named: nope.new_empty((*nope.shape[:-1], nope.shape[-1] + pe.shape[-1])))
    define("auto_deploy::view",
           "(Tensor x, SymInt[] shape, int tp_scaled_dim=-1, str layer_type='unknown', int tp_min_local_shape=1) "
           "-> Tensor",
           lambda x, shape, *hints, **named: x.reshape(shape).clone(),
           lambda x, shape, *hints, **named: x.reshape(shape).clone())
    define("auto_deploy::torch_grouped_linear",
           "(Tensor input, Tensor weight, Tensor? bias, str tp_mode='none', str layer_type='unknown', "
           "int tp_min_local_shape=1) -> Tensor",
           lambda input, weight, bias, *hints, **named: _grouped_linear(input, weight, bias),
           lambda input, weight, *others, **named: input.new_empty(
               (*input.shape[:-2], weight.shape[0] * weight.shape[1])))
    define("auto_deploy::all_reduce", "(Tensor x, str layer_type='unknown') -> Tensor",
           lambda x, *others, **named: x.clone(), lambda x, *others, **named: torch.empty_like(x))


def _sglang_quant(input, output_q, output_s):
    codes, words = reference.quantise(input.float().transpose(0, 1), 128, "ue8m0", 1e-10, True)
    output_q.copy_(codes.transpose(0, 1))
    output_s.copy_(words)


def sglang() -> None:
    """``fp8_wo_a_group_major_quant_ue8m0``."""
    define("sglang::fp8_wo_a_group_major_quant_ue8m0", "(Tensor input, Tensor(a!) output_q, Tensor(b!) output_s) -> ()",
           _sglang_quant)
