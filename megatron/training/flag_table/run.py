"""Flags of the run: data, checkpoints, logs, faults, profiling."""

from megatron.training.flag_table.rows import ValueRow, negative, no_effect, not_yet, refused, switch, value, words

FEATURES = (
    refused(
        "checkpoints in other formats",
        "torch_dist is the format here; convert others with the tools of the program that wrote them",
        value("--ckpt-format", str, "torch_dist", "torch|torch_dist|torch_dcp|fsdp_dtensor"),
        value("--ckpt-convert-format", str, None, "torch|torch_dist"),
        value("--ckpt-convert-save", str),
    ),
    not_yet(
        "short-lived checkpoints",
        "use --save-interval with --save-retain-interval",
        value("--non-persistent-save-interval", int),
        value("--non-persistent-ckpt-type", str, None, "global|local|in_memory"),
    ),
    not_yet(
        "further controls of checkpoints",
        "drop the flag",
        value("--override-ckpt-iteration", int),
        value("--verify-resume", int),
    ),
    no_effect(
        "other ways to write and read a checkpoint",
        "any layout loads any other, and files are written by threads of this process",
        switch("--auto-detect-ckpt-format"),
        value("--async-strategy", str, "nvrx", "nvrx|mcore"),
        switch("--async-ckpt-use-cpu-shm"),
        switch("--use-persistent-ckpt-worker"),
        switch("--ckpt-assume-constant-structure"),
        switch("--dist-ckpt-optim-fully-reshardable"),
        switch("--use-dist-ckpt"),
        value("--dist-ckpt-format", str),
        switch("--ckpt-fully-parallel-save", dest="ckpt_fully_parallel_save_deprecated"),
    ),
    not_yet(
        "attention masks per document from the loader",
        "use --reset-attention-mask",
        switch("--dataloader-inter-document-masking"),
    ),
    not_yet(
        "detection of faulty hardware",
        "drop the flag",
        switch("--check-for-spiky-loss"),
        switch("--check-for-large-grads"),
        value("--error-injection-rate", int, 0),
        value("--error-injection-type", str, "transient_error", "correct_result|transient_error|persistent_error"),
        value("--result-rejected-tracker-filename", str),
        value("--distributed-timeout-seconds-after-init", int),
        value("--flight-recorder-dump-path", str),
        value("--flight-recorder-trace-buffer-size", int, 2000),
        switch("--log-straggler"),
        value("--straggler-minmax-count", int, 1),
        value("--check-weight-hash-across-dp-replicas-interval", int),
        value("--gpu-sniff-test-interval", int),
    ),
    no_effect(
        "re-running of suspicious steps",
        "steps are never re-run to validate the hardware",
        value("--rerun-mode", str, "validate_results", "disabled|validate_results|report_stats"),
        negative("--no-one-logger", "enable_one_logger"),
    ),
    not_yet(
        "allocator history and NVTX ranges",
        "use --profile --use-pytorch-profiler",
        switch("--nvtx-ranges"),
        switch("--record-memory-history"),
        value("--memory-snapshot-path", str, "snapshot.pickle"),
    ),
    refused(
        "unpadded vocabularies",
        "use --make-vocab-size-divisible-by 1",
        negative("--no-pad-vocab-size", "pad_vocab_size"),
    ),
    refused(
        "weight decay conditions by name",
        "use --apply-wd-to-qk-layernorm",
        words("--no-weight-decay-cond-type", str, None),
    ),
)

VALUES = (
    ValueRow(
        "dist_ckpt_strictness",
        ("return_unexpected", "return_all"),
        "refused",
        "lists of keys returned from a load",
        "use log_unexpected or log_all",
    ),
    ValueRow(
        "tokenizer_type",
        (
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "MultimodalTokenizer",
            "NullMultimodalTokenizer",
            "SFTTokenizer",
        ),
        "refused",
        "tokenizers of other model families",
        "use HuggingFaceTokenizer, SentencePieceTokenizer, GPT2BPETokenizer, TikTokenizer or ByteTokenizer",
    ),
)
