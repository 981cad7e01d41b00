"""Specs of GPT layers: which class fills each slot, dense or MoE, layer by layer."""

from megatron.core.configs.layer_pattern import moe_layer_pattern
from megatron.core.configs.transformer import TransformerConfig
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, get_backend
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.module_api.spec_utils import ModuleSpec
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def get_gpt_layer_local_spec(
    num_experts: int | None = None, moe_grouped_gemm: bool | None = False, qk_layernorm: bool | None = False
) -> ModuleSpec:
    """Return the spec of one layer in pure PyTorch; with `num_experts` its MLP is a MoE layer.

    The kind of norm, the activation and everything about routing follow from the configuration.
    """
    backend = get_backend(use_transformer_engine=False)
    mlp = _mlp_spec(backend) if not num_experts else get_moe_module_spec(moe_grouped_gemm)
    return _layer_spec(backend, mlp, bool(qk_layernorm))


def get_gpt_decoder_block_spec(
    config: TransformerConfig, use_transformer_engine: bool = False
) -> TransformerBlockSubmodules:
    """Return the specs of all layers and of the final norm; `moe_layer_freq` says which layers are MoE.

    Raises: ConfigError if Transformer Engine is asked for, or the pattern does not fit the number of layers.
    """
    backend = get_backend(use_transformer_engine)
    is_moe = moe_layer_pattern(config.moe_layer_freq, config.num_layers, config.num_moe_experts)
    dense = _layer_spec(backend, _mlp_spec(backend), config.qk_layernorm)
    moe = _layer_spec(backend, get_moe_module_spec(), config.qk_layernorm)
    return TransformerBlockSubmodules([moe if kind else dense for kind in is_moe], layer_norm=backend.layer_norm())


def _layer_spec(backend: BackendSpecProvider, mlp: ModuleSpec, qk_layernorm: bool) -> ModuleSpec:
    norm = backend.layer_norm()
    head_norm = norm if qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _mlp_spec(backend: BackendSpecProvider) -> ModuleSpec:
    linears = MLPSubmodules(backend.column_parallel_linear(), backend.row_parallel_linear())
    return ModuleSpec(MLP, submodules=linears)
