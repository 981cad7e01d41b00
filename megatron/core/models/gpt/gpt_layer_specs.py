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
    backend = get_backend()
    mlp = _mlp_spec(backend) if not num_experts else get_moe_module_spec(backend, bool(moe_grouped_gemm))
    return _layer_spec(backend, mlp, bool(qk_layernorm), is_moe=bool(num_experts))


def get_gpt_decoder_block_spec(
    config: TransformerConfig, use_transformer_engine: bool = False
) -> TransformerBlockSubmodules:
    """Return the specs of all layers and of the final norm; `moe_layer_freq` says which layers are MoE.

    Raises: ConfigError if the pattern does not fit the number of layers, or Transformer Engine is too old;
        MissingDependencyError if it is asked for and absent.
    """
    backend = get_backend(config, use_transformer_engine)
    is_moe = moe_layer_pattern(config.moe_layer_freq, config.num_layers, config.num_moe_experts)
    dense = _layer_spec(backend, _mlp_spec(backend), config.qk_layernorm)
    moe = _layer_spec(backend, get_moe_module_spec(backend, config.moe_grouped_gemm), config.qk_layernorm, is_moe=True)
    return TransformerBlockSubmodules([moe if kind else dense for kind in is_moe], layer_norm=backend.layer_norm())


def _layer_spec(backend: BackendSpecProvider, mlp: ModuleSpec, qk_layernorm: bool, is_moe: bool = False) -> ModuleSpec:
    norm, fused = backend.layer_norm(), backend.norm_column_parallel_linear()
    head_norm = norm if qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=fused or backend.column_parallel_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if fused else norm,
            self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if fused and not is_moe else norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _mlp_spec(backend: BackendSpecProvider) -> ModuleSpec:
    fc1 = backend.norm_column_parallel_linear() or backend.column_parallel_linear()
    linears = MLPSubmodules(fc1, backend.row_parallel_linear())
    return ModuleSpec(MLP, submodules=linears)
