"""Signatures of Transformer Engine 2.20.2 (transformer_engine_cu13, PyPI), as its sources have them, without types.

The stand-in is bound to them, and on a GPU the library is compared with them. To renew: read the sources of the new
release with `ast`, write what differs, and change VERSION.
"""

import inspect
import types
from typing import Any

import torch

VERSION = "2.20.2"

_PARALLEL = "get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True"
_COMMUNICATION = "sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, tp_size=1"
_NORM = (
    "normalized_shape=None, eps=1e-05, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False, "
    "hidden_size=None, **kwargs"
)
TEXTS = {
    "pytorch.Linear": f"in_features, out_features, {_COMMUNICATION}, {_PARALLEL}, return_bias=False, "
    "params_dtype=None, parallel_mode=None, parameters_split=None, device='cuda', ub_overlap_ag=False, "
    "ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None, "
    "delay_wgrad_compute=False, symmetric_ar_type=None, save_original_input=False, name=None",
    "pytorch.Linear.forward": "inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False",
    "pytorch.LayerNormLinear": f"in_features, out_features, eps=1e-05, {_COMMUNICATION}, get_rng_state_tracker=None, "
    "init_method=None, bias=True, normalization='LayerNorm', return_bias=False, params_dtype=None, "
    "parallel_mode=None, return_layernorm_output=False, return_layernorm_output_gathered=False, "
    "parameters_split=None, zero_centered_gamma=False, device='cuda', ub_overlap_ag=False, ub_overlap_rs=False, "
    "ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False, ub_name=None, delay_wgrad_compute=False, "
    "symmetric_ar_type=None, name=None",
    "pytorch.LayerNormLinear.forward": "inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False",
    "pytorch.GroupedLinear": f"num_gemms, in_features, out_features, {_COMMUNICATION}, {_PARALLEL}, "
    "return_bias=False, params_dtype=None, parallel_mode=None, device='cuda', ub_overlap_rs=False, "
    "ub_overlap_ag=False, ub_name=None, delay_wgrad_compute=False, save_original_input=False, "
    "single_grouped_weight=False, single_grouped_bias=False, name=None, use_grouped_tensor=None",
    "pytorch.GroupedLinear.forward": "inp, m_splits, is_first_microbatch=None, out=None, dgrad_out=None",
    "pytorch.LayerNorm": _NORM,
    "pytorch.RMSNorm": _NORM,
    "pytorch.DotProductAttention": "num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, "
    "qkv_format='sbhd', attn_mask_type='causal', window_size=None, bottom_right_diagonal=None, softcap=0.0, "
    "sequence_parallel=False, tp_size=1, get_rng_state_tracker=None, tp_group=None, layer_number=None, "
    "attention_type='self', cp_group=None, cp_global_ranks=None, cp_stream=None, cp_comm_type='p2p', "
    "softmax_scale=None, softmax_type='vanilla', return_max_logit=False, name=None",
    "pytorch.DotProductAttention.forward": "query_layer=None, key_layer=None, value_layer=None, attention_mask=None, "
    "qkv_format=None, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, "
    "max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type=None, window_size=None, bottom_right_diagonal=None, "
    "softcap=None, checkpoint_core_attention=False, core_attention_bias_type='no_bias', core_attention_bias=None, "
    "alibi_slopes=None, fast_zero_fill=True, inference_params=None, pad_between_seqs=None, fp8_output=False, "
    "bf16_backward=False, num_splits=1, score_mod=None, score_mod_bprop=None, score_mod_tensors=None, "
    "score_mod_bprop_tensors=None, qkv_layer=None, kv_layer=None, qkv_interleave_dim=-3, "
    "thd_attention_policies=None, thd_attention_policy_dispatch='auto'",
    "pytorch.autocast": "enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False",
    "pytorch.fp8_autocast": "enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False",
    "pytorch.optimizers.FusedAdam": "params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, "
    "amsgrad=False, *, bias_correction=True, adam_w_mode=True, capturable=False, master_weights=False, "
    "master_weight_dtype=torch.float32, exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32, "
    "use_decoupled_grad=False, store_param_remainders=False, set_grad_none=None",
    "pytorch.optimizers.FusedAdam.step": "closure=None, grad_scaler=None",
    "common.recipe.DelayedScaling": "margin=0, fp8_format='HYBRID', amax_history_len=1024, amax_compute_algo='max', "
    "scaling_factor_compute_algo=None, reduce_amax=True, fp8_dpa=False, fp8_mha=False, backward_override=None",
    "common.recipe.Float8CurrentScaling": "use_power_2_scales=False, fp8_format='HYBRID', fp8_gemm_fprop=None, "
    "fp8_gemm_dgrad=None, fp8_gemm_wgrad=None, fp8_dpa=False, fp8_mha=False, backward_override=None",
    "common.recipe.Float8BlockScaling": "use_f32_scales=False, fp8_format='E4M3', x_block_scaling_dim=1, "
    "w_block_scaling_dim=2, grad_block_scaling_dim=1, fp8_gemm_fprop=None, fp8_gemm_dgrad=None, fp8_gemm_wgrad=None, "
    "fp8_dpa=False, fp8_mha=False, backward_override=None",
}
"""Arguments by name below `transformer_engine`. Defaults of recipes that are objects stand for them by name or None."""


def signature_of(name: str, without: tuple[str, ...] = ()) -> inspect.Signature:
    """The signature of a row, less the arguments in `without`."""
    whole = inspect.signature(eval(f"lambda {TEXTS[name]}: None", {"torch": torch}))
    return whole.replace(parameters=[param for key, param in whole.parameters.items() if key not in without])


def bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> types.SimpleNamespace:
    """Arguments of a call by name, with defaults; TypeError for what the library would not take."""
    found = signature.bind(*args, **kwargs)
    found.apply_defaults()
    return types.SimpleNamespace(**found.arguments)
