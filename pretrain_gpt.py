#!/usr/bin/env python3
"""Pretrain a GPT model, dense or mixture-of-experts: `torchrun pretrain_gpt.py <flags>` or plain `python`.

This file says what the model, the data and the loss are; `megatron.training` does the rest.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.errors import USER_ERRORS, ConfigError, exit_code
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.utils.device import resolve_device
from megatron.core.utils.unwrap import unwrap_model
from megatron.core.utils.upcast import upcast
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.batch import ATTENTION_MASK, get_batch
from megatron.training.data_loaders import core_gpt_dataset_config_from_args, ships_attention_mask
from megatron.training.global_vars import get_args, get_tokenizer
from megatron.training.training import pretrain


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
    """Build a chunk of the GPT model from the arguments."""
    args = get_args()
    config = core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, args.transformer_impl == "transformer_engine"),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings or args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        true_vocab_size=get_tokenizer().vocab_size,
        vp_stage=vp_stage,
    )


def loss_func(
    loss_mask: torch.Tensor, token_losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the losses of unmasked tokens.

    Shapes: [b, s], [b, s] -> loss sum [], token count int [], and the pair [2] that is reported.
    """
    losses = upcast(token_losses)
    loss_sum = (losses * loss_mask.to(losses.dtype)).sum()
    num_tokens = loss_mask.sum().to(torch.int64)
    report = torch.stack([loss_sum.detach(), num_tokens.to(losses.dtype)])
    return loss_sum, num_tokens, {"lm loss": report}


def forward_step(data_iterator: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Run the model on the next micro batch; returns token losses [b, s] and the function that sums them.

    Only the first and the last pipeline stage read data, unless masks are made with it; others return hidden states.
    """
    args, chunk = get_args(), unwrap_model(model)
    batch: dict[str, torch.Tensor] = {}
    if chunk.pre_process or chunk.post_process or ships_attention_mask(args):
        batch = get_batch(data_iterator, resolve_device(args.device), parallel_state.get_process_group_collection().cp)
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        attention_mask=batch.get(ATTENTION_MASK),
        labels=batch.get("labels"),
    )
    return output, partial(loss_func, batch.get("loss_mask"))


def train_valid_test_datasets_provider(num_samples: list[int | None]) -> tuple[Any, Any, Any]:
    """Build the datasets for [train, valid, test] sample counts."""
    args = get_args()
    if args.dataloader_type == "external":
        raise ConfigError(
            "dataloader_type='external': this program builds its own datasets; use --dataloader-type single or cyclic, "
            "or call megatron.training.pretrain with a provider of loaders."
        )
    config = core_gpt_dataset_config_from_args(args)
    dataset_type = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset_type, num_samples, lambda: True, config).build()


def main() -> int:
    """Train; a mistake of the user ends in a message and an exit code, not in a traceback."""
    try:
        pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
    except USER_ERRORS as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
