"""Every field of a run, with its default and its meaning.

`card --help`, `card train --help` and docs/configuration.md are made from the docstrings below. Names are
Megatron's where Megatron has one, so that a search finds them in both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Optional


@dataclass
class ModelConfig:
    """The transformer: a Megatron-Core GPTModel with rotary positions."""

    num_layers: int = 4
    """Transformer layers."""
    hidden_size: int = 128
    """Width of the residual stream."""
    ffn_hidden_size: int = 384
    """Width of the MLP's inner layer (of each half, where the activation is gated)."""
    num_attention_heads: int = 4
    """Query heads."""
    num_query_groups: Optional[int] = None
    """Key/value heads (grouped-query attention); none means as many as query heads."""
    kv_channels: Optional[int] = None
    """Width of one head; none means hidden_size / num_attention_heads."""
    vocab_size: Optional[int] = None
    """True vocabulary size; none takes the tokenizer's. Larger than the tokenizer's reserves rows."""
    make_vocab_size_divisible_by: int = 128
    """The embedding is padded to a multiple of this: fixed, so that every tensor-parallel size has the same weights."""
    max_position_embeddings: int = 2048
    """Longest sequence that the model is built for."""
    share_embeddings_and_output_weights: bool = True
    """Tie the output layer to the embedding."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Kind of norm before attention, before the MLP and at the end."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance inside every norm."""
    activation: Literal["swiglu", "geglu", "gelu", "squared_relu"] = "swiglu"
    """The MLP's activation; swiglu and geglu are gated."""
    rotary_base: int = 10000
    """Base of the rotary position frequencies."""
    rotary_percent: float = 1.0
    """Share of each head that is rotated."""
    rope_scaling: Optional[Literal["linear", "llama3"]] = None
    """Stretch rotary positions: all alike (linear), or slow frequencies only, as Llama 3.1 does (llama3)."""
    rope_scaling_factor: float = 8.0
    """With rope_scaling: how far positions are stretched."""
    rope_low_freq_factor: float = 1.0
    """With llama3: waves longer than rope_original_max_position_embeddings over this are stretched fully."""
    rope_high_freq_factor: float = 4.0
    """With llama3: waves shorter than rope_original_max_position_embeddings over this stay as they are."""
    rope_original_max_position_embeddings: int = 8192
    """With llama3: the context length before it was stretched."""
    qk_layernorm: bool = False
    """Norm queries and keys of each head (exported as Qwen3)."""
    add_bias_linear: bool = False
    """Biases in all linear layers."""
    add_qkv_bias: bool = False
    """A bias in the query/key/value projection alone."""
    hidden_dropout: float = 0.0
    """Dropout on the residual branches."""
    attention_dropout: float = 0.0
    """Dropout on attention probabilities."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights; output projections are scaled down by sqrt(2 * num_layers)."""
    init: Literal["keyed", "megatron"] = "keyed"
    """keyed: weights are a function of (seed, global parameter name), the same in every layout; megatron: its own."""
    spec: Literal["auto", "local", "te"] = "auto"
    """Layer implementation: Transformer Engine, local torch modules, or TE where it is installed with a GPU."""
    num_moe_experts: Optional[int] = None
    """Experts of a mixture-of-experts MLP; none is a dense model."""
    recompute_granularity: Optional[Literal["full", "selective"]] = None
    """Recompute activations in the backward pass: whole layers, or the attention core alone."""
    recompute_method: Optional[Literal["uniform", "block"]] = None
    """With granularity full: which layers are recomputed (Megatron's recompute_method)."""
    recompute_num_layers: Optional[int] = None
    """With granularity full: layers per recomputed chunk (uniform) or per pipeline stage (block)."""
    transformer: dict[str, Any] = field(default_factory=dict)
    """Any other field of Megatron's TransformerConfig, passed on as it is: --model.transformer.NAME VALUE."""


@dataclass
class ObjectiveConfig:
    """What the model is trained to do. docs/objective.md has the formulas and the readings of the paper."""

    name: Literal["card", "arm", "mdlm", "bd3lm"] = "card"
    """card: predict from a noised prefix; arm: next tokens; mdlm: masked diffusion; bd3lm: block diffusion."""
    tail_factor: float = 1.5
    """Mask window over mask count: 1 is the strict tail, inf masks anywhere (the random baseline)."""
    reweight: bool = True
    """Weight each token's loss by how corrupted its context is; false is the ablation with unit weights."""
    decay: float = 0.5
    """The paper's p: a masked token's effect falls by (1-p) for each position of distance."""
    beta: float = 1.0
    """Smoothing constant of the weight 1/(beta + S)."""
    score: Literal["algorithm", "appendix"] = "algorithm"
    """Reading of the ambiguity score S: the nearest masked token counts fully, or (1-p) times."""
    t_sampler: Optional[Literal["uniform", "stratified"]] = None
    """Draws of the noise level t: independent, or spread evenly over samples; none: uniform for card only."""
    t_min: float = 0.0
    """Lowest noise level; of mdlm and bd3lm in training only, and of the share of masks too (clipped schedule)."""
    t_max: float = 1.0
    """Highest noise level, likewise."""
    block_size: int = 16
    """bd3lm: tokens in a block, denoised together given the blocks before; divides data.sequence_length."""
    masks: Literal["count", "bernoulli"] = "count"
    """mdlm, bd3lm: floor(t K) + 1 of a block's K tokens; or each with probability t: a diffusion from t = 1e-3 on."""
    clean_fraction: float = 0.0
    """Share of samples that stay clean; 1 is arm."""
    keep_first: bool = True
    """Never mask a stretch's first input: nothing stands before it."""
    segments: Literal["sequence", "document"] = "sequence"
    """The stretch that noise and score run over: the whole sample, or each document packed into it."""
    normalize: Literal["tokens", "weights"] = "tokens"
    """Divide the weighted sum by the supervised tokens of the global batch, or by the sum of their weights."""


@dataclass
class DataConfig:
    """Tokenised text (.bin/.idx), and how samples are cut from it."""

    train: list[str] = field(default_factory=list)
    """Prefixes of .bin/.idx files, each 'PREFIX' or 'WEIGHT PREFIX'; without weights they blend by their tokens."""
    validation: dict[str, list[str]] = field(default_factory=dict)
    """Named validation sets, each a list of prefixes; empty takes the split's middle share of `train`."""
    test: dict[str, list[str]] = field(default_factory=dict)
    """Named test sets, evaluated once at the end; empty takes the split's last share of `train`."""
    split: Optional[str] = None
    """Shares of `train` for training, validation and test, e.g. '98,1,1'; none trains on all of it."""
    sequence_length: int = 128
    """Tokens in a sample."""
    tokenizer: Optional[str] = None
    """What made the data: a SentencePiece .model, a tokenizer.json, GPT-2's folder or `bytes`; with a [MASK]."""
    mock: bool = False
    """Megatron's mock dataset instead of files: to try a layout or measure speed."""
    eod_mask_loss: bool = False
    """Do not supervise the prediction made from an end-of-document input."""
    path_to_cache: Optional[str] = None
    """Where Megatron keeps its sample indices; none is RUN_DIR/index_cache. Share it between runs of one data set."""
    num_workers: int = 2
    """Processes per rank that read, noise and weight samples; 0 does it in the training process."""


@dataclass
class OptimizerConfig:
    """AdamW (Megatron's distributed optimizer) and the learning-rate schedule. Norms and biases are not decayed."""

    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 3e-5
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "cosine", "linear", "WSD"] = "cosine"
    """Schedule after the warm-up."""
    lr_warmup_iters: int = 0
    """Steps (of the full global batch) of linear warm-up from 0."""
    lr_decay_iters: Optional[int] = None
    """Step at which min_lr is reached; none is the end of the run."""
    lr_wsd_decay_iters: Optional[int] = None
    """With WSD: length of the final decay; none is a tenth of lr_decay_iters."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """With WSD: shape of the final decay."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.95
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 never clips."""


@dataclass
class TrainConfig:
    """Length of the run and size of its steps."""

    train_iters: Optional[int] = None
    """Steps of the run; give this or train_tokens."""
    train_tokens: Optional[int] = None
    """Tokens of the run (rounded up to whole steps); give this or train_iters."""
    global_batch_size: int = 32
    """Samples per step over all ranks."""
    micro_batch_size: int = 4
    """Samples per forward pass of one data-parallel rank."""
    rampup_batch_size: Optional[list[int]] = None
    """Batch-size ramp as Megatron's [start, increment, samples]; none starts at global_batch_size."""
    manual_gc_interval: Optional[int] = None
    """Steps between garbage collections, made by all ranks together; none: by Python, on each at another moment."""
    deterministic: bool = False
    """Only algorithms that give the same bits in every run of a layout on one kind of machine; slower on a GPU."""


@dataclass
class ParallelConfig:
    """How the model and the batch are laid out over ranks; the data-parallel size is what remains."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each matrix."""
    sequence_parallel: bool = False
    """Share activations between matrices along the sequence too (needs tensor parallelism)."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers."""
    virtual_pipeline_model_parallel_size: Optional[int] = None
    """Model chunks per pipeline rank (interleaved schedule)."""
    pipeline_model_parallel_layout: Optional[str] = None
    """Megatron's layout string, e.g. 'Et*17|t*16L'; none balances the layers, evenly divisible or not."""
    context_parallel_size: int = 1
    """Ranks that share each sequence."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass already runs (needs overlap_grad_reduce)."""
    tp_comm_overlap: bool = False
    """Overlap sequence parallelism's communication with its products (Transformer Engine's userbuffers)."""
    distributed_timeout_minutes: float = 30.0
    """A collective that takes longer ends the run."""


@dataclass
class PrecisionConfig:
    """Number formats. `preset` sets them all; any other field that is given wins over it. See docs/precision.md."""

    preset: Literal["fp32", "bf16", "fp8_tensorwise", "fp8_blockwise", "fp8_delayed", "mxfp8"] = "fp32"
    """fp32; bf16 with fp32 main weights and gradients; bf16 with FP8 linears. `precision: bf16` says the same."""
    emulate: bool = False
    """FP8's values in torch's matrix products, on any machine: to study them without a GPU (tensorwise, blockwise)."""
    params_dtype: Optional[Literal["fp32", "bf16"]] = None
    """With FP8: what surrounds it; none is bf16, or fp32 where FP8 is emulated."""
    grad_reduce_in_fp32: Optional[bool] = None
    """Sum bf16 gradients over micro-batches and ranks in fp32; none is true."""
    fp8_format: Optional[Literal["hybrid", "e4m3"]] = None
    """hybrid: E4M3 forward, E5M2 gradients; e4m3: both in E4M3."""
    fp8_recipe: Optional[Literal["tensorwise", "blockwise", "delayed", "mxfp8"]] = None
    """How scales are found: of the whole tensor, of its blocks, from earlier steps, of 32 numbers (Blackwell)."""
    fp8_param_gather: Optional[bool] = None
    """Keep linear weights in FP8 and gather them so: less memory and traffic (Megatron's fp8_param too)."""
    fp8_amax_history_len: Optional[int] = None
    """With delayed: steps whose largest values the scale comes from."""
    fp8_amax_compute_algo: Optional[Literal["max", "most_recent"]] = None
    """With delayed: the largest of the history, or its last."""
    first_last_layers_bf16: Optional[bool] = None
    """Keep the first and last layers out of FP8 (delayed cannot)."""
    num_layers_at_start_in_bf16: Optional[int] = None
    """With first_last_layers_bf16: how many at the start; none is 1."""
    num_layers_at_end_in_bf16: Optional[int] = None
    """With first_last_layers_bf16: how many at the end; none is 1."""


@dataclass
class EvalConfig:
    """Validation during and after training. Every evaluation sees the same samples with the same noise."""

    interval: int = 100
    """Steps between validations; 0 validates at the end only."""
    samples: Optional[int] = None
    """Samples of each set; none is all of them."""
    at_start: bool = True
    """Validate before the first step, so that the summary has a before and an after."""
    clean: bool = True
    """Also score clean prefixes: for card and arm that is the exact autoregressive likelihood."""
    drafts: int = 0
    """Also draft this many tokens at each sample's end: logs the accept length of block decoding; 0 does not."""
    draft_samples: int = 64
    """Samples of each set that are drafted on; two forward passes each."""
    tasks: list[str] = field(default_factory=list)
    """Tasks of the lm-evaluation-harness, evaluated by the run's own ranks; in a job of its own: `card eval watch`."""
    tasks_interval: int = 0
    """Steps between evaluations of `tasks`, each of a checkpoint that is saved for it; 0 never evaluates them."""
    tasks_data: Optional[str] = None
    """Folder of the tasks' documents, as for `card eval --data`; none takes them from the hub."""
    tasks_limit: Optional[int] = None
    """Documents of each task; none is all of them."""


@dataclass
class CheckpointConfig:
    """Saving and resuming. A run directory that has checkpoints is continued from the newest that is whole."""

    interval: Optional[int] = None
    """Steps between saves; none saves at the end, on a signal and on request (`touch RUN_DIR/save_now`) only."""
    interval_minutes: Optional[float] = None
    """Also save when this much time has passed since the last save."""
    async_save: bool = True
    """Write while training goes on; false waits for the disk."""
    max_pending: int = 1
    """Saves that may be under way at once: one more waits for the oldest."""
    keep_last: int = 3
    """Newest checkpoints that are kept."""
    keep_every: Optional[int] = None
    """Checkpoints whose step is a multiple of this are kept for ever."""
    on_save_error: Literal["continue", "stop"] = "continue"
    """A save that fails (full disk, no permission): say so and train on, or stop the run."""
    init_from: Optional[str] = None
    """A new run starts from the weights of this checkpoint (`card convert from-hf` makes one), any layout's."""
    verify: bool = True
    """Before resuming, compare every file's checksum with the manifest; false compares sizes only."""


@dataclass
class EmaConfig:
    """An exponential moving average of the weights, in fp32, sharded like the optimizer."""

    decay: Optional[float] = None
    """Share of the old average that an update keeps, e.g. 0.9999; none keeps no average."""
    validate: bool = False
    """Validate and test with the averaged weights instead of the trained ones."""


@dataclass
class GuardConfig:
    """What ends or marks a run that goes wrong."""

    max_bad_steps: int = 10
    """Steps in a row with a non-finite loss or gradient, each skipped, after which the run stops."""
    spike_sigma: float = 8.0
    """A loss this many standard deviations above its running mean is logged as a spike; 0 looks for none."""
    spike_window: int = 100
    """Steps that the running mean and deviation remember; none is a spike before as many have passed."""
    on_spike: Literal["log", "stop"] = "log"
    """A spike is only logged, with its samples, or also stops the run."""
    hang_minutes: float = 30.0
    """A rank that makes no progress for this long writes all its stacks and ends the run; 0 waits for ever."""
    flight_recorder: int = 2000
    """Collectives that each rank remembers; a hang leaves them in RUN_DIR/flight_recorder. 0 remembers none."""


@dataclass
class LoggingConfig:
    """Where metrics go: the console, RUN_DIR/metrics.jsonl, TensorBoard, Weights & Biases."""

    interval: int = 10
    """Steps between metric records; a record averages over them."""
    tensorboard: bool = True
    """Write RUN_DIR/tensorboard."""
    wandb_project: Optional[str] = None
    """Weights & Biases project; needs the wandb package."""
    wandb_entity: Optional[str] = None
    """Weights & Biases team or user."""
    straggler_factor: float = 1.25
    """A rank whose own work takes this many times its peers' median is named, with its host; 0 looks for none."""


@dataclass
class ProfileConfig:
    """Where time goes. docs/troubleshooting.md shows how to read what comes out."""

    tool: Optional[Literal["torch", "nsys"]] = None
    """torch writes traces to RUN_DIR/profile; nsys marks steps for `nsys profile --capture-range=cudaProfilerApi`."""
    step_start: int = 10
    """First step that is profiled."""
    step_end: int = 12
    """Last step that is profiled."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that are profiled."""
    timers: bool = False
    """Log the seconds of each section of a step: data, forward, backward, pipeline, gradients, optimizer, save ..."""


@dataclass
class RunConfig:
    """A training run."""

    preset: Optional[Literal["tiny", "small", "110m", "1b"]] = None
    """Start from a named model and its training recipe; every field given elsewhere wins."""
    run_dir: str = "runs/card"
    """Everything that the run writes."""
    seed: int = 1234
    """Keys initial weights, data order and noise."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The transformer: a Megatron-Core GPTModel with rotary positions."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """What the model is trained to do."""
    data: DataConfig = field(default_factory=DataConfig)
    """Tokenised text, and how samples are cut from it."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and the learning-rate schedule."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length of the run and size of its steps."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the model and the batch are laid out over ranks."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Validation during and after training."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and resuming."""
    ema: EmaConfig = field(default_factory=EmaConfig)
    """An exponential moving average of the weights."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """What ends or marks a run that goes wrong."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Where metrics go."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Where time goes."""
