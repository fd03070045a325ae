"""Named models with the recipe that trains them. A value marked `ours` is not in the paper: the field's habit fills it.

The paper gives the 1B model's shape, optimizer, peak rate, warm-up and precision. Its table lists a sequence length
of 128 beside max positions of 8192 and 300B tokens, without a batch size: we read the 128 as the LM1B run's.
"""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {  # ours: ~1M parameters, trains in a minute on a laptop
    "model": dict(num_layers=4, hidden_size=128, ffn_hidden_size=384, num_attention_heads=4),
    "data": dict(sequence_length=128),
    "optimizer": dict(lr=3e-3, min_lr=3e-4, lr_warmup_iters=20),
    "train": dict(global_batch_size=8, micro_batch_size=8),
}

SMALL: dict[str, Any] = {  # ours: ~12M parameters, the size of the benchmarks
    "model": dict(
        num_layers=6,
        hidden_size=320,
        ffn_hidden_size=896,
        num_attention_heads=8,
        num_query_groups=4,
        vocab_size=8192,
        share_embeddings_and_output_weights=False,
    ),
    "data": dict(sequence_length=256),
    "optimizer": dict(lr=1e-3, min_lr=1e-4, lr_warmup_iters=100),
    "train": dict(global_batch_size=64, micro_batch_size=8),
}

PAPER_OPTIMIZER: dict[str, Any] = dict(
    lr=3e-4,
    lr_warmup_iters=2500,
    lr_decay_style="cosine",  # the paper's table; its text says constant
    min_lr=3e-5,  # ours
    weight_decay=0.1,  # ours
    adam_beta1=0.9,  # ours
    adam_beta2=0.95,  # ours
    clip_grad=1.0,  # ours
)

LM1B_110M: dict[str, Any] = {  # the paper names the size, the data set and 33B tokens
    "model": dict(
        num_layers=12,  # ours, as all of the shape: MDLM's LM1B model with a SwiGLU of the same size
        hidden_size=768,
        ffn_hidden_size=2048,
        num_attention_heads=12,
        vocab_size=30522,
        max_position_embeddings=8192,
    ),
    "data": dict(sequence_length=128),
    "optimizer": PAPER_OPTIMIZER,
    "train": dict(global_batch_size=512, micro_batch_size=64, train_tokens=33_000_000_000),  # batch: ours
    "precision": dict(preset="bf16"),
}

PAPER_1B: dict[str, Any] = {
    "model": dict(
        num_layers=33,
        hidden_size=1536,
        ffn_hidden_size=4096,
        num_attention_heads=24,
        vocab_size=50368,
        max_position_embeddings=8192,
        share_embeddings_and_output_weights=True,  # ours: 1.01B parameters; untied they are 1.09B
    ),
    "data": dict(sequence_length=2048),  # ours
    "optimizer": PAPER_OPTIMIZER,
    "train": dict(global_batch_size=512, micro_batch_size=8, train_tokens=300_000_000_000),  # batch: ours
    "precision": dict(preset="bf16"),
}

PRESETS: dict[str, dict[str, Any]] = {"tiny": TINY, "small": SMALL, "110m": LM1B_110M, "1b": PAPER_1B}
