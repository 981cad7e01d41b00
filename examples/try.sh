#!/usr/bin/env bash
# Two steps of a tiny mixture of experts on CPU processes, to try a feature: N processes, then flags of pretrain_gpt.py.
#
#   bash examples/try.sh 2 --expert-model-parallel-size 2
#
# Data are made up. Flags that are given again win. The recipes of README.md run with this file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python || command -v python3)}
ENTRY=${ENTRY:-pretrain_gpt.py}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}

MODEL=(
  --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0
  --hidden-dropout 0 --untie-embeddings-and-output-weights --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64
  --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall --moe-grouped-gemm
)
TRAINING=(
  --micro-batch-size 2 --global-batch-size 8 --train-iters 2 --optimizer adam --lr 1e-3 --clip-grad 1.0 --eval-iters 0
  --log-interval 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 0
)
exec "$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "${1:?number of processes}" \
  "$ENTRY" --device cpu --transformer-impl local "${MODEL[@]}" "${TRAINING[@]}" "${@:2}"
