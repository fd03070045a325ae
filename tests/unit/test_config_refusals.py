"""What the configuration refuses, and how it says so."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch

from card_megatron.config import (
    ConfigError,
    RunConfig,
    check,
    checks,
    layout_checks,
    load_config,
    objective_checks,
    precision_checks,
)
from card_megatron.platform import Ranks
from card_megatron.training.preflight import preflight
from tests.configs import MOCK, load, load_yaml
from tests.curves import tiny_config


def refusal(config: RunConfig, world_size: int = 1, **machine: bool) -> str:
    """What check() says; it must say it while there is no process group."""
    with pytest.raises(ConfigError) as caught:
        check(config, world_size=world_size, **{"cuda": False, **machine})
    assert not torch.distributed.is_initialized()
    return str(caught.value)


# ---------------------------------------------------------------- what cannot run: value, rule, remedy

REFUSALS = [
    # sizes
    ("seed=-1", 1, r"seed=-1 must lie in \[0, 2\*\*31\)"),
    ("run_dir=", 1, r"run_dir='' names no folder; give one, e\.g\. runs/card"),
    ("model.num_layers=0", 1, r"model\.num_layers=0 must be at least 1"),
    ("model.layernorm_epsilon=-1", 1, r"model\.layernorm_epsilon=-1\.0 must be positive and finite"),
    ("parallel.distributed_timeout_minutes=inf", 1, r"timeout_minutes=inf must be positive and finite"),
    ("model.hidden_dropout=1", 1, r"model\.hidden_dropout=1\.0 must lie in \[0, 1\)"),
    ("data.num_workers=-1", 1, r"data\.num_workers=-1 must be 0 or more"),
    (
        "model.rope_scaling=llama3; model.rope_low_freq_factor=4",
        1,
        r"model\.rope_low_freq_factor=4\.0 must be less than model\.rope_high_freq_factor=4\.0",
    ),
    ("eval.drafts=127", 1, r"eval\.drafts=127 must lie between 0 \(none\) and data\.sequence_length - 2 = 126"),
    ("eval.interval=-1", 1, r"eval\.interval=-1 must be 0 \(at the end only\) or more"),
    ("train.train_tokens=9", 1, r"both of train\.train_iters and train\.train_tokens given; give exactly one"),
    ("train.train_iters=null", 1, r"neither of train\.train_iters and train\.train_tokens given"),
    ("model.hidden_size=130", 1, r"hidden_size=130 is not a multiple of .*heads=4; try 128 or 132, or set .*kv_chan"),
    ("model.num_query_groups=3", 1, r"num_attention_heads=4 is not a multiple of .*num_query_groups=3; try 3 or 6"),
    ("model.rotary_percent=1.5", 1, r"model\.rotary_percent=1\.5 must lie in \[0, 1\]"),
    ("model.kv_channels=7", 1, r"heads of width 7 rotate .*percent=1\.0 .* odd number.*make model\.kv_channels .*even"),
    ("model.recompute_method=block", 1, r"recompute_method=block .* do nothing without .*granularity=full; set it"),
    ("data.sequence_length=4096", 1, r"sequence_length=4096 is longer than .*embeddings=2048; raise the latter"),
    # objective
    ("checkpoint.keep_last=0", 1, r"checkpoint\.keep_last=0 must be at least 1"),
    ("guard.max_bad_steps=0", 1, r"guard\.max_bad_steps=0 must be at least 1"),
    ("checkpoint.interval_minutes=0", 1, r"checkpoint\.interval_minutes=0\.0 must be positive and finite"),
    ("guard.hang_minutes=-1", 1, r"guard\.hang_minutes=-1\.0 must be 0 \(never\) or a positive number"),
    ("guard.flight_recorder=-1", 1, r"guard\.flight_recorder=-1 must be 0 \(remember nothing\) or more"),
    ("train.manual_gc_interval=0", 1, r"train\.manual_gc_interval=0 must be at least 1"),
    ("logging.straggler_factor=0.9", 1, r"straggler_factor=0\.9 must be more than 1, e\.g\. 1\.25, or 0"),
    ("profile.step_end=3", 1, r"profile\.step_end=3 must not be less than profile\.step_start=10"),
    ("profile.tool=torch; profile.ranks=[]", 1, r"profile\.ranks=\[\] must name at least one rank"),
    ("profile.tool=nsys", 1, r"profile\.tool=nsys .* needs CUDA; use profile\.tool=torch here"),
    (
        "train.deterministic=true; transformer.cross_entropy_loss_fusion=true",
        1,
        r"train\.deterministic=true does not go with .*cross_entropy_loss_fusion=true.*; drop one of them",
    ),
    ("ema.decay=1", 1, r"ema\.decay=1\.0 must lie in \[0, 1\), e\.g\. 0\.9999; null keeps no average"),
    ("ema.validate=true", 1, r"ema\.validate=true has no average to validate with; set ema\.decay"),
    ("objective.tail_factor=0.5", 1, r"tail_factor=0\.5 must be at least 1 \(the strict tail\); inf is random"),
    ("objective.tail_factor=.nan", 1, r"tail_factor=nan must be at least 1"),
    ("objective.decay=2", 1, r"objective\.decay=2\.0 \(the paper's p\) must lie in \[0, 1\]"),
    ("objective.beta=0", 1, r"objective\.beta=0\.0 must be positive and finite"),
    ("objective.t_min=0.9; objective.t_max=0.1", 1, r"t_min=0\.9 and t_max=0\.1 must satisfy 0 <= t_min <= t_max"),
    (
        "objective.name=arm; objective.tail_factor=2",
        1,
        r"tail_factor=2\.0 means nothing to objective\.name=arm \(only to card\); leave it out",
    ),
    ("objective.name=arm; objective.t_sampler=stratified", 1, r"t_sampler=stratified means nothing to .*=arm"),
    ("objective.block_size=4", 1, r"block_size=4 means nothing to objective\.name=card \(only to bd3lm\)"),
    ("objective.name=mdlm; objective.normalize=weights", 1, r"normalize=weights means nothing to objective\.name=mdlm"),
    ("objective.name=bd3lm; objective.clean_fraction=0.5", 1, r"clean_fraction=0\.5 means nothing to .*bd3lm \(only"),
    ("objective.name=mdlm; eval.drafts=4", 1, r"eval\.drafts=4 drafts by causal prediction, which .*mdlm does not"),
    (
        "objective.name=bd3lm; objective.t_min=0.45; objective.t_max=0.95",
        1,
        r"t_min=0\.45 and t_max=0\.95 with masks=count: .* leaves the range; set objective\.masks=bernoulli",
    ),
    ("objective.name=mdlm; objective.t_min=0.5; objective.t_max=0.5", 1, r"with masks=count.*masks=bernoulli"),
    ("objective.name=mdlm; data.eod_mask_loss=true", 1, r"eod_mask_loss=true leaves out .*mdlm .*; leave it out"),
    (
        "objective.name=bd3lm; transformer.window_size=[16, 0]",
        1,
        r"window_size=\[16, 0\] is a window of causal attention, which .*bd3lm does not have; leave it out",
    ),
    ("objective.name=bd3lm; objective.block_size=24", 1, r"block_size=24 does not divide .*=128 .*try (32|16)$"),
    ("objective.name=bd3lm; objective.block_size=0", 1, r"block_size=0 does not divide .*; try 1$"),
    ("objective.name=bd3lm; model.attention_dropout=0.1", 1, r"attention_dropout=0\.1: FlexAttention.* set it to 0"),
    ("objective.name=bd3lm; CP=2", 2, r"context_parallel_size=2 cannot cut the \[noisy ; clean\] input"),
    ("objective.clean_fraction=1.1", 1, r"objective\.clean_fraction=1\.1 must lie in \[0, 1\]"),
    # data
    ("data.train=x", 1, r"data\.mock=true and data\.train are both given.*drop one of them"),
    ("model.vocab_size=null", 1, r"data\.mock=true has no tokenizer.*set model\.vocab_size"),
    ("model.vocab_size=2", 1, r"vocab_size=2 leaves no token to data\.mock=true.*set 3 or more"),
    ("files=t.model", 1, r"data\.train is empty; give prefixes .*`card data build`.* or data\.mock=true"),
    ("data.mock=false; data.train=x", 1, r"data\.tokenizer is not set; give the tokenizer that made data\.train"),
    ("files=t.model; data.train=-1 x", 1, r"entry '-1 x' is not 'PREFIX' or 'WEIGHT PREFIX' with a positive weight"),
    ("files=t.model; data.train=a b", 1, r"entry 'a b' is not 'PREFIX'"),
    ("files=t.model; data.train=['']", 1, r"entry '' is not 'PREFIX'"),
    ("files=t.model; data.train=['1 a', b]", 1, r"mixes entries with and without a weight; give all of them one, or"),
    ("files=t.model; data.train=['1 a', '2 a']", 1, r"data\.train names a more than once.*name it once, with a weight"),
    ("data.validation.x=[]", 1, r"held-out set x=\[\] must be a list of prefixes"),
    ("data.test.x=['1 a']", 1, r"held-out set x=\['1 a'\] must be a list of prefixes, without weights"),
    ("data.split=1,2", 1, r"data\.split='1,2' is not three shares such as '98,1,1'"),
    ("data.split=1.2.3,1,1", 1, r"data\.split='1\.2\.3,1,1' is not three shares"),
    ("data.split=0,1,1", 1, r"data\.split='0,1,1' leaves nothing to train on"),
    ("data.split=8,1,1; data.test.x=[a]", 1, r"data\.split and data\.validation/data\.test are both given"),
    # optimizer
    ("optimizer.lr=inf", 1, r"optimizer\.lr=inf must be positive and finite"),
    ("optimizer.adam_eps=0", 1, r"optimizer\.adam_eps=0\.0 must be positive"),
    ("optimizer.min_lr=1", 1, r"min_lr=1\.0 must lie between 0 and optimizer\.lr=0\.0003"),
    ("optimizer.adam_beta2=1", 1, r"optimizer\.adam_beta2=1\.0 must lie in \[0, 1\)"),
    ("optimizer.clip_grad=.nan", 1, r"optimizer\.clip_grad=nan must be 0 or more, and finite"),
    ("optimizer.lr_warmup_iters=10", 1, r"lr_warmup_iters=10 does not end within .*train_iters=10; warm up for fewer"),
    ("optimizer.lr_decay_iters=5; optimizer.lr_warmup_iters=5", 1, r"decay_iters=5 must be more than .*warmup_iters=5"),
    ("optimizer.lr_wsd_decay_iters=-5", 1, r"optimizer\.lr_wsd_decay_iters=-5 must be at least 1"),
    ("optimizer.lr_decay_style=WSD; optimizer.lr_wsd_decay_iters=11", 1, r"=11 is 352 samples, but only 320 .*fewer"),
    # layout
    ("TP=2", 3, r"3 ranks cannot hold replicas of tensor 2 x pipeline 1 x context 1 = 2 ranks; start 2 or 4 ranks"),
    ("TP=8", 8, r"model\.num_attention_heads=4 is not a multiple of .*tensor_model_parallel_size=8; try 8"),
    ("TP=4; model.ffn_hidden_size=30", 4, r"ffn_hidden_size=30 is not a multiple of .*size=4; try 28 or 32"),
    ("TP=3", 3, r"vocabulary of 512 is not a multiple of .*size=3; set .*divisible_by to a multiple of 3, e\.g\. 384"),
    ("TP=3; model.num_query_groups=2", 3, r"num_query_groups=2 and .*size=3: one must be a multiple of the other"),
    ("SP=true", 1, r"sequence_parallel=true needs tensor parallelism; set .*parallel_size to 2 or more, or turn it"),
    ("CP=2; data.sequence_length=126", 2, r"sequence_length=126 is not a multiple of 4 .* x 1 .*; try 124 or 128"),
    ("TP=2; SP=true; data.sequence_length=127", 2, r"=127 is not a multiple of 1 .* x 2 .*; try 126 or 128"),
    ("VPP=2", 1, r"virtual_pipeline_model_parallel_size=2 needs a pipeline; set .* to 2 or more, or leave it out"),
    ("PP=2; VPP=1", 2, r"virtual_pipeline_model_parallel_size=1 interleaves nothing; give 2 or more, or leave"),
    ("PP=8", 8, r"num_layers=4 cannot fill 8 pipeline chunks \(8 ranks x 1 virtual\); make the pipeline shorter"),
    ("PP=2; layout=Ett|tL", 2, r"layout='Ett\|tL' has 3 layers in 2 stages; it needs .*=4 in 2: leave it out"),
    ("PP=3; layout=Et*4|L", 3, r"layout='Et\*4\|L' has 4 layers in 2 stages; .* in 3: e\.g\. Et\|tt\|tL"),
    ("PP=2; layout=tt|ttL", 2, r"layout='tt\|ttL' must begin with E \(embedding\) and end with L \(loss\)"),
    ("TP=2; parallel.tp_comm_overlap=true", 2, r"tp_comm_overlap=true needs .*sequence_parallel=true; set both or"),
    ("parallel.overlap_param_gather=true", 1, r"overlap_param_gather=true needs .*overlap_grad_reduce=true; set both"),
    ("EP=2", 1, r"expert_model_parallel_size=2 needs experts; set model\.num_moe_experts"),
    ("experts=4; EP=3", 3, r"num_moe_experts=4 is not a multiple of .*expert_model_parallel_size=3; try 3 or 6"),
    ("experts=4; EP=2", 1, r"expert_model_parallel_size=2 does not divide the data x context = 1 ranks.*start more"),
    ("experts=4; TP=2", 2, r"experts with tensor parallelism need parallel\.sequence_parallel=true"),
    ("transformer.num_layers=3", 1, r"model\.transformer\.num_layers is set by model\.num_layers; set it there"),
    ("PP=2; VPP=2; transformer.batch_p2p_comm=true", 2, r"virtual pipeline is silently wrong .*leave batch_p2p_comm"),
    ("PP=2; VPP=2; transformer.overlap_p2p_comm=false", 2, r"virtual pipeline is silently wrong"),
    # batch
    ("train.global_batch_size=100; train.micro_batch_size=12", 4, r"=100 is not a multiple of .*dp=48; try 96 or 144"),
    ("train.rampup_batch_size=[8, 8]", 1, r"=\[8, 8\] must be \[start, increment, samples\], all positive"),
    ("train.rampup_batch_size=[8, 7, 9]", 1, r"\[8, 7, 9\] does not reach .*size=32 from 8 in steps of 7"),
    ("train.rampup_batch_size=[6, 2, 9]", 1, r"passes through 6, not a multiple of .*dp=4; start at and step by"),
    ("PP=2; VPP=2; train.global_batch_size=12", 2, r"batch of 12 makes 3 micro-batches; .*=2: try a batch of 8 or 16"),
    ("PP=2; VPP=2; train.rampup_batch_size=[8, 4, 99]", 2, r"batch of 12 makes 3 micro-batches"),
    ("train.train_iters=null; train.train_tokens=9; optimizer.lr_warmup_iters=5", 1, r"warmup_iters=5 is 160 sam"),
    # tasks during training
    ("eval.tasks=[x]", 1, r"need each other: set both, or neither and evaluate beside the run \(`card eval watch`"),
    ("eval.tasks_interval=5", 1, r"eval\.tasks=\[\] and eval\.tasks_interval=5 need each other"),
    ("eval.tasks_interval=-5", 1, r"eval\.tasks_interval=-5 must be 0 \(never\) or more"),
    ("eval.tasks_limit=0", 1, r"eval\.tasks_limit=0 must be at least 1"),
    ("eval.tasks=[x]; eval.tasks_interval=5", 1, r"eval\.tasks are texts, and data\.mock=true has none; drop"),
    ("eval.tasks=[x]; eval.tasks_interval=5; CP=2", 2, r"context_parallel_size=2; drop .*`card eval watch RUN_DIR"),
    ("eval.tasks=[x]; eval.tasks_interval=5; PP=2; VPP=2", 2, r"virtual_pipeline_model_parallel_size=2; drop them"),
    ("eval.tasks=[x]; eval.tasks_interval=5; EP=2; experts=2", 2, r"expert_model_parallel_size=2; drop them"),
    # machine
    ("model.spec=te", 1, r"model\.spec=te needs CUDA, which is not here; use model\.spec=local or auto"),
    (
        "TP=2; SP=true; parallel.tp_comm_overlap=true",
        2,
        r"tp_comm_overlap=true needs CUDA and Transformer Engine's lay",
    ),
    ("transformer.cuda_graph_impl=local", 1, r"cuda_graph_impl=local needs CUDA; leave it out"),
    ("transformer.cuda_graph_impl=transformer_engine", 1, r"need Megatron-LM's own training loop; use .*impl=local"),
    ("transformer.cross_entropy_loss_fusion=true", 1, r"cross_entropy_loss_fusion needs CUDA; leave it out"),
    # precision
    ("precision=fp8_tensorwise", 1, r"needs CUDA and Transformer Engine.*silently in higher precision; use bf16 or"),
    ("transformer.fp4=e2m1", 1, r"model\.transformer\.fp4 is not supported.*remove it"),
    ("transformer.fp8=hybrid", 1, r"model\.transformer\.fp8 is set by precision\.fp8_format; set it there"),
    ("precision.grad_reduce_in_fp32=false", 1, r"grad_reduce_in_fp32=false does nothing with fp32 weights.*remove it"),
    (
        "precision=bf16; precision.fp8_recipe=blockwise",
        1,
        r"fp8_recipe=blockwise does nothing with .*preset=bf16; remov",
    ),
    (
        "precision.emulate=true",
        1,
        r"emulate=true has no FP8 to emulate with .*preset=fp32; set .*fp8_tensorwise or fp8_bl",
    ),
    (
        "EMULATED; precision.fp8_amax_history_len=4",
        1,
        r"amax_history_len=4 does nothing with the recipe tensorwise, who",
    ),
    (
        "precision=fp8_delayed; precision.fp8_amax_history_len=0",
        1,
        r"amax_history_len=0 must be at least 1; 1024 is usu",
    ),
    (
        "precision=fp8_tensorwise; checkpoint.init_from=x",
        1,
        r"init_from=x with .*would start from weights rounded to FP8",
    ),
    ("precision=mxfp8; precision.fp8_param_gather=true", 1, r"fp8_param_gather=true with mxfp8 needs .*leave it out"),
    (
        "precision=fp8_delayed; precision.first_last_layers_bf16=true",
        1,
        r"not possible with delayed scaling.*leave it out",
    ),
    (
        "EMULATED; precision.first_last_layers_bf16=false; precision.num_layers_at_end_in_bf16=2",
        1,
        r"num_layers_at_end_in_bf16=2 does nothing with first_last_layers_bf16=false; remove one of them",
    ),
    (
        "EMULATED; PP=2; precision.num_layers_at_end_in_bf16=3",
        2,
        r"=1 and .*=3 must lie between 0 and the 2 layers of a",
    ),
    ("EMULATED; model.num_layers=2", 1, r"1 layers at the start and 1 at the end in bf16 leave none of .*num_layers=2"),
    (
        "precision=fp8_delayed; precision.emulate=true",
        1,
        r"knows the recipes tensorwise and blockwise, not delayed; take",
    ),
    (
        "EMULATED; precision.fp8_param_gather=true",
        1,
        r"stores FP8 numbers, which an emulation does not have; leave it ou",
    ),
    ("EMULATED; model.spec=te", 1, r"emulate=true is of local layers: use model\.spec=local or auto"),
    ("EMULATED; experts=4", 1, r"emulate=true does not know experts; use a dense model"),
    (
        "precision=fp8_tensorwise; model.spec=local",
        1,
        r"model\.spec=local would train in bf16 without a word; use .*auto",
    ),
    ("precision=fp8_tensorwise; precision.params_dtype=fp32", 1, r"params_dtype=fp32 is for precision\.emulate=true"),
    (
        "precision=fp8_tensorwise; model.hidden_size=136",
        1,
        r"hidden_size=136 is 136 on each of 1 .*of the 16 .*try 128 or",
    ),
    ("precision=fp8_tensorwise; TP=2; model.ffn_hidden_size=400", 2, r"=400 is 200 on each of 2 .*; try 384 or 416"),
    (
        "precision=fp8_blockwise; TP=2",
        2,
        r"each of 2 .* ranks 64 columns of queries and 192 of .*multiples of 128; try model\.kv_channels=64, other",
    ),
    (
        "precision=fp8_tensorwise; data.sequence_length=126; train.micro_batch_size=2; eval.drafts=0",
        1,
        r"micro_batch_size=2 of 126 tokens a rank is not a multiple of the 8 .*; try 4, or another data\.sequence_le",
    ),
    (  # keys and values are not widened to one group a rank: 8 + 2 * 2 parts of 40 among 4 ranks are 120
        "precision=fp8_tensorwise; TP=4; model.num_attention_heads=8; model.num_query_groups=2; model.kv_channels=40",
        4,
        r"8 heads and 2 .* groups of 40 .*ranks 80 columns .* and 120 of .*of 16; try model\.kv_channels=32 or 48",
    ),
    ("transformer.fp8_wgrad=false", 1, r"fp8_wgrad=false does nothing but with delayed scaling; remove it, or take"),
    ("EMULATED; transformer.fp8_dot_product_attention=true", 1, r"attention=true does nothing without FP8; remove it"),
    ("PP=2; transformer.deallocate_pipeline_outputs=true", 2, r"outputs=true is silently wrong on gloo .*leave it out"),
    ("experts=4; transformer.moe_grouped_gemm=true", 1, r"moe_grouped_gemm needs CUDA; on a CPU leave it out"),
    ("transformer.gradient_accumulation_fusion=true", 1, r"needs NVIDIA's apex and CUDA; leave it out"),
    ("logging.wandb_project=x", 1, r"wandb_project=x needs wandb: pip install wandb, or leave it out"),
]


@pytest.mark.parametrize(("overrides", "world_size", "expected"), REFUSALS, ids=lambda value: str(value)[:60])
def test_what_cannot_run_is_refused(overrides, world_size, expected, monkeypatch):

    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    assert re.search(expected, refusal(load(overrides), world_size))


CHECKED = tuple(module.__file__ for module in (checks, layout_checks, objective_checks, precision_checks))


def test_the_table_above_has_every_refusal(monkeypatch):
    """Each `yield` of a message in the files of check() must run while the table is checked."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    ran: set[tuple[str, int]] = set()

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in CHECKED:
            return None
        ran.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    configs = [(load(overrides), world_size) for overrides, world_size, _ in REFUSALS]
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for config, world_size in configs:
            refusal(config, world_size)
    finally:
        sys.settrace(before)
    for path in CHECKED:
        for node in ast.walk(ast.parse(Path(path).read_text())):
            if isinstance(node, ast.Yield):
                lines = {(path, line) for line in range(node.lineno, node.end_lineno + 1)}
                assert ran & lines, f"{path}:{node.lineno}: no row of the table is refused here"


def test_several_problems_are_shown_at_once():
    message = refusal(load("seed=-1; objective.beta=0; data.split=x; optimizer.lr=0"))
    assert message.startswith("this run cannot start:\n  - ") and message.count("\n  - ") == 5
    layout = refusal(load("TP=3; train.global_batch_size=7; model.spec=te"), world_size=3)
    for part in ("num_attention_heads=4", "vocabulary of 512", "global_batch_size=7", "spec=te"):
        assert part in layout


def test_what_a_gpu_allows():
    fp8, engine = load("precision=fp8_tensorwise"), load("model.spec=te")
    check(fp8, world_size=1, cuda=True, transformer_engine=True)
    check(engine, world_size=1, cuda=True, transformer_engine=True)
    check(load("TP=2; SP=true; parallel.tp_comm_overlap=true"), world_size=2, cuda=True, transformer_engine=True)
    check(load("transformer.cuda_graph_impl=local"), world_size=1, cuda=True)
    overlapped = load("TP=2; SP=true; parallel.tp_comm_overlap=true; EMULATED")
    with pytest.raises(ConfigError, match="tp_comm_overlap=true needs CUDA and Transformer Engine's layers"):
        check(overlapped, world_size=2, cuda=True, transformer_engine=True)
    assert "needs Transformer Engine (pip install --no-build-isolation" in refusal(engine, cuda=True)
    assert "fp8_tensorwise needs CUDA and Transformer Engine" in refusal(fp8, cuda=True)
    check(load("experts=4; transformer.moe_grouped_gemm=true"), world_size=1, cuda=True)


LEGAL = [
    ("objective.name=mdlm; objective.t_min=0.3; objective.masks=bernoulli; CP=2", 2),
    ("objective.name=mdlm; objective.t_min=1", 1),
    ("objective.name=arm; objective.t_sampler=uniform", 1),  # as runs have it that were begun when it was the default
    ("objective.name=bd3lm; objective.masks=bernoulli; objective.block_size=4; TP=2; SP=true", 2),
    ("objective.tail_factor=inf", 1),
    ("TP=2; SP=true; CP=2; PP=2; VPP=2", 16),
    ("TP=4; model.num_query_groups=2", 4),
    ("PP=2; layout=Et|t*3L", 2),
    ("PP=2; layout=E|t*4L", 2),
    ("experts=4; EP=2", 2),
    ("train.rampup_batch_size=[8, 8, 100]", 2),
    ("PP=2; VPP=2; train.rampup_batch_size=[8, 8, 100]", 2),
    ("optimizer.lr_decay_style=WSD; optimizer.lr_wsd_decay_iters=9; optimizer.lr_warmup_iters=1", 1),
    ("model.recompute_granularity=full; model.recompute_method=uniform; model.recompute_num_layers=1", 1),
    ("data.split=.9,1,1.5", 1),
    ("EMULATED; TP=2", 2),
    ("precision=fp8_blockwise; precision.emulate=true; data.sequence_length=127", 1),
]


@pytest.mark.parametrize(("overrides", "world_size"), LEGAL, ids=str)
def test_what_is_unusual_but_legal_passes_and_megatron_agrees(overrides, world_size):
    assert preflight(load(overrides), Ranks(world_size=world_size)).transformer_config.num_layers == 4


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("transformer.aply_rope_fusion=true", r"aply_rope_fusion is no field of .*; did you mean apply_rope_fusion\?"),
        ("model.recompute_granularity=full", r"Megatron-Core refuses this model: .*recompute_method"),
        ("PP=2; layout=EEtt|ttL", r"Megatron-Core refuses this model: Embedding must be specified exactly once"),
    ],
)
def test_megatrons_own_refusals_come_before_any_process_group_too(overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        preflight(load(overrides), Ranks(world_size=2))
    assert not torch.distributed.is_initialized()


def test_a_tokenizer_without_mask_is_refused(tmp_path):
    with (tmp_path / "plain.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["some text"] * 9),
            model_writer=file,
            model_type="char",
            vocab_size=12,
            minloglevel=2,
        )
    with pytest.raises(
        ConfigError, match=r"plain\.model has no \[MASK\], .*`card data tokenizer add-mask .*plain\.model OUTPUT`"
    ):
        preflight(load(f"files={tmp_path}/plain.model; data.train=x"), Ranks())
    assert not torch.distributed.is_initialized()


def test_the_vocabulary_is_the_tokenizers_unless_a_larger_one_is_asked_for(corpus, tmp_path):
    assert preflight(tiny_config(corpus, tmp_path), Ranks()).config.model.vocab_size == 500
    assert preflight(tiny_config(corpus, tmp_path, "--model.vocab_size=600"), Ranks()).config.model.vocab_size == 600
    with pytest.raises(ConfigError, match=r"model\.vocab_size=400 is smaller than the 500 pieces of .*; raise it"):
        preflight(tiny_config(corpus, tmp_path, "--model.vocab_size=400"), Ranks())
    with pytest.raises(ConfigError, match=r"nowhere: no such file; `card data tokenizer train` trains one"):
        preflight(tiny_config(corpus, tmp_path, "--data.tokenizer=nowhere"), Ranks())


# ---------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--train.global_batchsize=4", r"key train\.global_batchsize; did you mean train\.global_batch_size\?"),
        ("--global_batch_size=4", r"did you mean train\.global_batch_size\?"),
        ("--model.global_batch_size=4", r"did you mean train\.global_batch_size\?"),
        ("--model.num-layers=4", r"did you mean model\.num_layers\?"),
        ("--qqq", r"unknown config key qqq; `card config --help` lists all keys"),
        ("--model.num_layers=abc", r"^model\.num_layers=abc is not an integer$"),
        ("--model.num_layers=1.5", r"^model\.num_layers=1\.5 is not an integer$"),
        ("--model.num_layers=", r"^model\.num_layers= is not an integer$"),
        ("--model.num_layers", r"--model\.num_layers: expected one argument"),
        ("--train.train_iters=1e3", r"^train\.train_iters=1e3 is not an integer, or null$"),
        ("--optimizer.lr=fast", r"^optimizer\.lr=fast is not a number$"),
        ("--objective.reweight=maybe", r"^objective\.reweight=maybe is not true or false$"),
        ("--objective.name=foo", r"^objective\.name=foo is not one of card, arm, mdlm, bd3lm$"),
        ("--precision=fp16", r"^precision\.preset=fp16 is not one of fp32, bf16, fp8_tensorwise, .*, mxfp8$"),
        ("--train.rampup_batch_size=8", r"^train\.rampup_batch_size=8 is not a list of integers, or null$"),
        ("--model.transformer=[1]", r"^model\.transformer=\[1\] is not a mapping of names to values$"),
        ("--preset=huge", r"preset=huge is unknown; choose from tiny, small, 110m, 1b"),
        ("--model=5", r"--model is a section; give its fields, such as --model\.num_layers value"),
        ("--config=/nowhere", r"--config /nowhere: no such file; examples/configs/ has ready ones"),
        ("stray", r"'stray' belongs to no option; fields are given as --section\.key value"),
        ("-x", r"unrecognized arguments: -x"),
    ],
)
def test_what_the_command_line_cannot_mean_is_named(argument, expected):
    with pytest.raises(ConfigError, match=expected):
        load_config([*MOCK, argument])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {num_layer: 3}", r"unknown config key model\.num_layer; did you mean model\.num_layers\?"),
        ("num_layers: 3", r"unknown config key num_layers; did you mean model\.num_layers\?"),
        ("model: {num_layers: 3.0}", r"^model\.num_layers=3\.0 is not an integer$"),
        ("model: {num_layers: true}", r"^model\.num_layers=True is not an integer$"),
        ("model: {qk_layernorm: 1}", r"^model\.qk_layernorm=1 is not true or false$"),
        ("data: {train: one}", r"^data\.train=one is not a list of texts$"),
        ("seed: null", r"seed=null is not an integer$"),
        ("model: {transformer: null}", r"model\.transformer=null is not a mapping of names to values$"),
        ("model:", r"model=null is a section; give its fields, such as model\.num_layers$"),
        ("precision: fp16", r"^precision\.preset=fp16 is not one of fp32, bf16, fp8_tensorwise, .*, mxfp8$"),
        ("precision: {dtype: bf16, preset: bf16}", r"precision\.preset is given twice, under two of its names$"),
        ("objective: {tail_factor: inf}", r"objective\.tail_factor: inf is a word in YAML; write \.inf$"),
        ("preset: [tiny]", r"preset=\['tiny'\] is unknown; choose from tiny"),
        ("model: {num_layers: 3}\nmodel: {hidden_size: 64}", r"not valid YAML: 'model' is given twice"),
        ("model: {num_layers: 3, num_layers: 4}", r"not valid YAML: 'num_layers' is given twice"),
        ("model: [", r"not valid YAML"),
        ("- tiny", r"holds a list; it must map section names to fields$"),
        ("", r"holds nothing; it must map section names to fields$"),
    ],
)
def test_what_a_file_cannot_mean_is_named(tmp_path, text, expected):
    with pytest.raises(ConfigError, match=expected):
        load_yaml(tmp_path, text, *MOCK)


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ConfigError, match="binary is not valid YAML"):
        load_config([f"--config={tmp_path}/binary"])
