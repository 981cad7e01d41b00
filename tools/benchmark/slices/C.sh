#!/usr/bin/env bash
# Slice C: layers of an 8x7B mixture, 8 experts top-2, width 4096.   GPUS=1 tools/benchmark/slices/C.sh [more flags]
# One GPU runs 3 layers with all experts, two run 6 layers with the experts spread over them.
set -euo pipefail
GPUS=${GPUS:-1}
cd "$(dirname "$0")/../../.."
launcher=(-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$GPUS")
if [ "$GPUS" = 1 ]; then launcher=(); fi
exec "${PYTHON:-python3}" "${launcher[@]}" pretrain_gpt.py --device cuda --init-device device --transformer-impl local --bf16 --seed 1234 \
  --num-layers $((3 * GPUS)) --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
  --kv-channels 128 --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope \
  --rotary-base 1000000 --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
  --attention-dropout 0 --hidden-dropout 0 --attention-backend fused --cross-entropy-loss-fusion \
  --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 14336 --ffn-hidden-size 14336 --moe-router-dtype fp32 \
  --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001 --moe-router-force-load-balancing \
  --moe-grouped-gemm --moe-router-fusion --moe-permute-fusion --moe-token-dispatcher-type alltoall \
  --expert-model-parallel-size "$GPUS" --micro-batch-size 2 --global-batch-size 16 --train-iters 23 \
  --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-iters 23 --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 \
  --use-distributed-optimizer --cuda-graph-warmup-steps 2 --tokenizer-type NullTokenizer --vocab-size 8063 --mock-data \
  --num-workers 2 --eval-iters 0 --log-interval 1 --log-throughput "$@"
