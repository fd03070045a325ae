"""The model of this rank: one GPTModel, or one for each virtual pipeline stage."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model

from card_megatron.config.derived import padded_vocab_size
from card_megatron.config.precision import resolve_precision
from card_megatron.config.schema import ModelConfig, RunConfig
from card_megatron.model.initialize import initialize_keyed
from card_megatron.model.specs import block_spec, uses_transformer_engine
from card_megatron.platform import capabilities


class TrueVocabularyGPTModel(GPTModel):
    """GPTModel whose loss is a likelihood over the true vocabulary: rows that only pad it have no probability.

    So training, validation and the exported model, which has no such rows, all measure the same thing. Where the
    vocabulary needs no padding this is GPTModel, bit for bit.
    """

    true_vocab_size: int

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        first_local_row = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        padding = logits.detach()[..., max(0, self.true_vocab_size - first_local_row) :]
        # Written behind autograd's back, and rightly so: the softmax is 0 there, and with it the gradient.
        padding.fill_(float("-inf"))
        return super().compute_language_model_loss(labels, logits)


def build_model(config: RunConfig, transformer_config: TransformerConfig) -> list[torch.nn.Module]:
    """The model chunks of this rank, initialised, on its device; wrapped for bf16 where that is asked for."""
    virtual_stages = config.parallel.virtual_pipeline_model_parallel_size
    stages = range(virtual_stages) if virtual_stages else [None]
    chunks = [_build_chunk(config, transformer_config, stage) for stage in stages]
    if config.model.init == "keyed":
        initialize_keyed(chunks, transformer_config, config.seed)
    if torch.cuda.is_available():
        chunks = [chunk.cuda() for chunk in chunks]
    if transformer_config.bf16:
        chunks = [Float16Module(transformer_config, chunk) for chunk in chunks]
    return chunks


def unwrap(chunks: list[torch.nn.Module]) -> list[GPTModel]:
    """The GPTModels inside data-parallel and precision wrappers."""
    return unwrap_model(chunks)


def _build_chunk(config: RunConfig, transformer_config: TransformerConfig, vp_stage: int | None) -> GPTModel:
    model, machine = config.model, capabilities()
    assert model.vocab_size is not None, "preflight resolves it from the tokenizer"
    everywhere = vp_stage is None
    with_engine = uses_transformer_engine(
        model.spec,
        cuda=machine.cuda,
        transformer_engine=machine.transformer_engine is not None,
        emulate=config.precision.emulate,
    )
    chunk = TrueVocabularyGPTModel(
        config=transformer_config,
        transformer_layer_spec=block_spec(
            transformer_config,
            resolve_precision(config.precision),
            transformer_engine=with_engine,
            vp_stage=vp_stage,
        ),
        vocab_size=padded_vocab_size(model),
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=everywhere, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=everywhere, vp_stage=vp_stage),
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        seq_len_interpolation_factor=model.rope_scaling_factor if model.rope_scaling == "linear" else None,
        vp_stage=vp_stage,
    )
    if model.rope_scaling == "llama3":
        stretch_slow_frequencies(chunk.rotary_pos_emb, model)
    chunk.true_vocab_size = model.vocab_size
    return chunk


def stretch_slow_frequencies(rotary: RotaryEmbedding, model: ModelConfig) -> None:
    """Llama 3.1's scaling, by Megatron's own function; GPTModel would pass on the factor alone."""
    rotary.inv_freq = rotary._apply_scaling(
        rotary.inv_freq,
        factor=model.rope_scaling_factor,
        low_freq_factor=model.rope_low_freq_factor,
        high_freq_factor=model.rope_high_freq_factor,
        original_max_position_embeddings=model.rope_original_max_position_embeddings,
    )
