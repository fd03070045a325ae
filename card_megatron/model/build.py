"""The model of this rank: one GPTModel, or one for each virtual pipeline stage."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
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
from card_megatron.objectives import OBJECTIVES
from card_megatron.platform import capabilities


class ObjectiveGPTModel(GPTModel):
    """GPTModel with what an objective declares; for `arm` it is GPTModel, up to the vocabulary's padding.

    Its loss is a likelihood over the true vocabulary: rows that only pad it have no probability. So training,
    validation and the exported model, which has no such rows, all measure the same thing. Where the vocabulary needs
    no padding that is GPTModel's loss, bit for bit.
    """

    true_vocab_size: int
    impossible_token: int | None
    """A token without probability in the loss, [MASK] for some objectives."""
    copies: int
    """How often the text stands in the input; outputs are those of the first."""

    def _preprocess(self, **given: Any) -> tuple[Any, ...]:
        """Megatron's rotary positions count on through the whole input: each copy of the text needs the first's."""
        decoder_input, rotary, *rest = super()._preprocess(**given)
        if self.copies > 1:
            rotary = rotary[: len(rotary) // self.copies].repeat(self.copies, 1, 1, 1)
        return decoder_input, rotary, *rest

    def _postprocess(self, *, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        """The output layer sees the first copy alone."""
        if self.copies > 1 and self.post_process:
            hidden_states = self._first_copy(hidden_states)
        return super()._postprocess(hidden_states=hidden_states, **given)

    def _first_copy(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        length = len(hidden_SBH)
        if not self.config.sequence_parallel:
            return hidden_SBH[: length // self.copies]
        # each tensor-parallel rank has a stretch of the input: cut the whole, and share out what is left
        whole = tensor_parallel.gather_from_sequence_parallel_region(hidden_SBH, tensor_parallel_output_grad=False)
        return tensor_parallel.scatter_to_sequence_parallel_region(whole[: len(whole) // self.copies])

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        local_rows = logits.shape[-1]
        first_local_row = parallel_state.get_tensor_model_parallel_rank() * local_rows
        # Written behind autograd's back, and rightly so: the softmax is 0 there, and with it the gradient.
        written = logits.detach()
        written[..., max(0, self.true_vocab_size - first_local_row) :] = float("-inf")
        if self.impossible_token is not None and 0 <= self.impossible_token - first_local_row < local_rows:
            written[..., self.impossible_token - first_local_row] = float("-inf")
        return super().compute_language_model_loss(labels, logits)


def build_model(
    config: RunConfig, transformer_config: TransformerConfig, mask_id: int | None = None
) -> list[torch.nn.Module]:
    """The model chunks of this rank, initialised, on its device; wrapped for bf16 where that is asked for.

    A loss is only right with the tokenizer's `mask_id`; logits need none.
    """
    virtual_stages = config.parallel.virtual_pipeline_model_parallel_size
    stages = range(virtual_stages) if virtual_stages else [None]
    chunks = [_build_chunk(config, transformer_config, stage, mask_id) for stage in stages]
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


def _build_chunk(
    config: RunConfig, transformer_config: TransformerConfig, vp_stage: int | None, mask_id: int | None
) -> GPTModel:
    model, machine, objective = config.model, capabilities(), OBJECTIVES[config.objective.name]
    assert model.vocab_size is not None, "preflight resolves it from the tokenizer"
    everywhere = vp_stage is None
    with_engine = uses_transformer_engine(
        model.spec,
        cuda=machine.cuda,
        transformer_engine=machine.transformer_engine is not None,
        emulate=config.precision.emulate,
    )
    chunk = ObjectiveGPTModel(
        config=transformer_config,
        transformer_layer_spec=block_spec(
            transformer_config,
            resolve_precision(config.precision),
            transformer_engine=with_engine,
            vp_stage=vp_stage,
            attention=objective.attention,
            block_size=config.objective.block_size,
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
    chunk.impossible_token = None if objective.predicts_mask else mask_id
    chunk.copies = objective.copies
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
