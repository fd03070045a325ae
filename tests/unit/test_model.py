"""The model: Megatron's own, its loss over the true vocabulary, its weights keyed by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnMaskType

from card_megatron.config import check, load_config
from card_megatron.config.derived import parameter_count
from card_megatron.config.precision import Precision
from card_megatron.model import build_model, build_transformer_config
from card_megatron.model.attention import TorchAttention, zigzag_positions
from card_megatron.model.specs import block_spec

pytestmark = pytest.mark.usefixtures("one_rank")

SMALL = [
    *("--model.num_layers=2", "--model.hidden_size=32", "--model.ffn_hidden_size=48", "--model.num_attention_heads=4"),
    *("--data.mock=true", "--train.train_iters=1", "--data.sequence_length=16"),
]


def configured(*overrides, vocab_size=256):
    config, _ = load_config([*SMALL, f"--model.vocab_size={vocab_size}", *overrides])
    check(config, world_size=1, cuda=False)
    return config


def built(*overrides, vocab_size=256):
    config = configured(*overrides, vocab_size=vocab_size)
    return build_model(config, build_transformer_config(config))[0]


def tokens(vocab_size, shape=(3, 16), seed=0):
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- loss


def test_the_loss_is_megatrons_own_bit_for_bit():
    config = configured()
    transformer_config = build_transformer_config(config)
    ours = build_model(config, transformer_config)[0]
    megatrons = GPTModel(
        transformer_config,
        block_spec(transformer_config, Precision("fp32", True), transformer_engine=False, vp_stage=None),
        vocab_size=256,
        max_sequence_length=2048,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    megatrons.load_state_dict(ours.state_dict())
    inputs, labels = tokens(256), tokens(256, seed=1)
    losses = [model(inputs, None, None, labels=labels) for model in (ours, megatrons)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.sum().backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), megatrons.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_padding_rows_have_no_probability_and_no_gradient():
    model = built("--model.share_embeddings_and_output_weights=false", vocab_size=200)
    inputs, labels = tokens(200), tokens(200, seed=1)
    logits = model(inputs, None, None)
    assert logits.shape[-1] == 256
    expected = F.cross_entropy(logits[..., :200].flatten(0, 1), labels.flatten(), reduction="none")
    loss = model(inputs, None, None, labels=labels)
    torch.testing.assert_close(loss.flatten(), expected)
    loss.sum().backward()
    weight_grad = model.output_layer.weight.grad
    assert (weight_grad[200:] == 0).all() and weight_grad[:200].abs().sum() > 0
    # the gradient of the true rows is that of a softmax over them alone
    plain = model.output_layer.weight.detach().clone().requires_grad_()
    hidden = _hidden_states(model, inputs)
    F.cross_entropy((hidden @ plain.T)[..., :200].flatten(0, 1), labels.T.flatten(), reduction="sum").backward()
    torch.testing.assert_close(weight_grad, plain.grad)


def _hidden_states(model, inputs):
    kept = []
    hook = model.output_layer.register_forward_pre_hook(lambda module, args: kept.append(args[0].detach()))
    model(inputs, None, None)
    hook.remove()
    return kept[0]


def test_predictions_do_not_see_later_inputs():
    model = built().eval()
    inputs = tokens(256)
    changed = inputs.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    with torch.no_grad():
        before, after = model(inputs, None, None), model(changed, None, None)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert (before[:, 9:] != after[:, 9:]).any()


# ---------------------------------------------------------------- shapes and kinds


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["--model.num_query_groups=2", "--model.share_embeddings_and_output_weights=false"],
        ["--model.normalization=LayerNorm", "--model.add_bias_linear=true", "--model.activation=gelu"],
        ["--model.qk_layernorm=true", "--model.add_qkv_bias=true", "--model.activation=geglu"],
        ["--model.kv_channels=16", "--model.activation=squared_relu"],
        ["--model.num_moe_experts=4"],
    ],
)
def test_parameter_count_is_the_models(overrides):
    config = configured(*overrides)
    model = build_model(config, build_transformer_config(config))[0]
    assert sum(param.numel() for param in model.parameters()) == parameter_count(config.model)
    loss = model(tokens(256), None, None, labels=tokens(256, seed=1))
    loss.mean().backward()
    assert torch.isfinite(loss).all()
    assert all(param.grad is not None for name, param in model.named_parameters() if "expert" not in name)


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputation_changes_nothing(granularity):
    extra = ["--model.recompute_method=uniform", "--model.recompute_num_layers=1"] if granularity == "full" else []
    models = [built(), built(f"--model.recompute_granularity={granularity}", *extra)]
    for model in models:
        model.train()
        model(tokens(256), None, None, labels=tokens(256, seed=1)).sum().backward()
    for (name, a), (_, b) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_dropout_drops_in_training_only():
    model = built("--model.hidden_dropout=0.2", "--model.attention_dropout=0.2")
    inputs = tokens(256)
    with torch.no_grad():
        assert not torch.equal(model.train()(inputs, None, None), model(inputs, None, None))
        assert torch.equal(model.eval()(inputs, None, None), model(inputs, None, None))


# ---------------------------------------------------------------- initial weights


def test_initial_weights_depend_on_the_seed_and_the_name_alone():
    first, same, other = built(), built("--model.ffn_hidden_size=64"), built("--seed=7")
    key = "decoder.layers.1.self_attention.linear_qkv.weight"
    assert torch.equal(first.state_dict()[key], same.state_dict()[key])
    assert not torch.equal(first.state_dict()[key], other.state_dict()[key])
    assert not torch.equal(first.state_dict()[key], first.state_dict()[key.replace("layers.1", "layers.0")])


def test_initial_weights_have_megatrons_scale():
    config = configured("--model.hidden_size=128", "--model.ffn_hidden_size=256")
    keyed = build_model(config, build_transformer_config(config))[0].state_dict()
    config.model.init = "megatron"
    megatrons = build_model(config, build_transformer_config(config))[0].state_dict()
    for name, weight in megatrons.items():
        if weight is not None and weight.dim() >= 2:
            assert keyed[name].std() == pytest.approx(float(weight.std()), rel=0.05), name
            assert not torch.equal(keyed[name], weight), name


# ---------------------------------------------------------------- attention


def test_attention_equals_its_definition_with_grouped_queries_and_any_mask():
    config = build_transformer_config(configured("--model.num_query_groups=2"))
    attention = TorchAttention(config, 1, AttnMaskType.causal, "self")
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(12, 3, 4, 8, generator=generator)
    key, value = (torch.randn(12, 3, 2, 8, generator=generator) for _ in range(2))
    causal = torch.ones(12, 12).triu(1).bool()[None, None]
    arbitrary = torch.rand(3, 1, 12, 12, generator=generator) < 0.5
    arbitrary[..., 0] = False  # no row without anything to attend to
    for given, meant in ((None, causal), (causal, causal), (arbitrary, arbitrary)):
        out = attention(query, key, value, given)
        torch.testing.assert_close(out, _attention_by_definition(query, key, value, meant))


def _attention_by_definition(query, key, value, forbidden):
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(forbidden, float("-inf")).softmax(-1)
    return torch.einsum("bnst,tbnd->sbnd", weights, value).flatten(2)


def test_zigzag_gives_each_rank_a_piece_from_both_ends():
    assert zigzag_positions(16, 2, 0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert zigzag_positions(16, 2, 1).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


def test_what_torch_attention_cannot_do_is_refused():
    with pytest.raises(ValueError, match="window_size needs Transformer Engine"):
        built("--model.transformer.window_size=[4, 0]")


def test_what_a_weight_in_fp8_was_drawn_as_is_keyed_too():
    """Stands in for Transformer Engine's FP8 weights, which need a GPU: a weight with the values it was drawn as."""
    from card_megatron.model.initialize import initialize_keyed

    model, config = built(), build_transformer_config(configured())
    expected = {name: value.clone() for name, value in model.state_dict().items() if value is not None}
    weight = model.decoder.layers[1].mlp.linear_fc1.weight
    drawn = torch.zeros_like(weight).detach()
    weight.get_high_precision_init_val = lambda: drawn
    weight.data.zero_()
    initialize_keyed([model], config, configured().seed)
    assert model.decoder.layers[1].mlp.linear_fc1.weight is weight
    assert torch.equal(drawn, weight) and torch.equal(weight, expected["decoder.layers.1.mlp.linear_fc1.weight"])
