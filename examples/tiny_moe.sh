#!/usr/bin/env bash
# The quickstart: train a small mixture of experts on two CPU processes, see that it has learned, draw its loss.
#
#   bash examples/tiny_moe.sh                 a few minutes on two cores; ends with a verdict and the path of a picture
#   OUT=/tmp/run bash examples/tiny_moe.sh    files go there instead of runs/tiny_moe
#   bash examples/tiny_moe.sh --train-iters 50    further flags are handed to pretrain_gpt.py and win
#
# Four layers, eight experts, two of them per token; each process holds four experts (expert parallelism 2). The text is
# public domain (examples/data/README.md) and is read byte by byte, so nothing is downloaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TEXT=examples/data/kjv_genesis_ruth.txt
OUT=${OUT:-runs/tiny_moe}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python || command -v python3)}
ENTRY=${ENTRY:-pretrain_gpt.py}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$OUT"

if [ ! -e "$OUT/corpus_text_document.idx" ]; then
  "$PYTHON" tools/preprocess_data.py --input "$TEXT" --output-prefix "$OUT/corpus" \
    --tokenizer-type ByteTokenizer --append-eod --workers 1
fi

MODEL=(
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
  --position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 256 --disable-bias-linear
  --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights
)
MOE=(
  --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-router-dtype fp32
  --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
  --moe-token-dispatcher-type alltoall --moe-grouped-gemm --expert-model-parallel-size 2
)
TRAINING=(
  --micro-batch-size 16 --global-batch-size 32 --train-iters 300 --seed 1234
  --optimizer adam --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 20
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
  --eval-interval 100 --eval-iters 8 --log-interval 20 --log-throughput
)
DATA=(
  --data-path "$OUT/corpus_text_document" --split 90,10,0 --tokenizer-type ByteTokenizer --num-workers 0
  --data-cache-path "$OUT/cache"
)
"$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 "$ENTRY" \
  --device cpu --transformer-impl local "${MODEL[@]}" "${MOE[@]}" "${TRAINING[@]}" "${DATA[@]}" "$@" \
  2>&1 | tee "$OUT/train.log"

"$PYTHON" tools/quickstart_verdict.py "$OUT/train.log" --text "$TEXT" --picture "$OUT/loss.png"
