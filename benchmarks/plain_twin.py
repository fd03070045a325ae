"""The small model once more, in plain PyTorch: what the Megatron path is measured against.

The same layers, the same weights (copied), the same micro-batches, the same AdamW; no Megatron in its step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from card_megatron.config.schema import ModelConfig


class Layer(nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.heads, self.groups = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
        self.width = model.hidden_size // self.heads
        self.input_layernorm = nn.RMSNorm(model.hidden_size, eps=model.layernorm_epsilon)
        self.linear_qkv = nn.Linear(model.hidden_size, (self.heads + 2 * self.groups) * self.width, bias=False)
        self.linear_proj = nn.Linear(model.hidden_size, model.hidden_size, bias=False)
        self.pre_mlp_layernorm = nn.RMSNorm(model.hidden_size, eps=model.layernorm_epsilon)
        self.linear_fc1 = nn.Linear(model.hidden_size, 2 * model.ffn_hidden_size, bias=False)
        self.linear_fc2 = nn.Linear(model.ffn_hidden_size, model.hidden_size, bias=False)

    def forward(self, x_BSH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x_BSH.shape
        # Megatron's order: for each key/value group its queries, then its key, then its value
        qkv = self.linear_qkv(self.input_layernorm(x_BSH)).view(batch, length, self.groups, -1, self.width)
        q, k, v = qkv.split([self.heads // self.groups, 1, 1], dim=3)
        q, k, v = (x.reshape(batch, length, -1, self.width).transpose(1, 2) for x in (q, k, v))
        q, k = (x * cos + torch.cat([-x[..., self.width // 2 :], x[..., : self.width // 2]], -1) * sin for x in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)
        x_BSH = x_BSH + self.linear_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.linear_fc1(self.pre_mlp_layernorm(x_BSH)).chunk(2, -1)
        return x_BSH + self.linear_fc2(F.silu(gate) * up)


class PlainGPT(nn.Module):
    """A Llama-like decoder with untied embeddings; returns the loss of every token."""

    def __init__(self, model: ModelConfig, vocab_size: int, length: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.num_layers))
        self.final_layernorm = nn.RMSNorm(model.hidden_size, eps=model.layernorm_epsilon)
        self.output_layer = nn.Linear(model.hidden_size, vocab_size, bias=False)
        width = model.hidden_size // model.num_attention_heads
        frequencies = model.rotary_base ** (-torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        x_BSH = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSH = layer(x_BSH, self.cos, self.sin)
        logits_BSV = self.output_layer(self.final_layernorm(x_BSH))
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="none").view_as(labels_BS)

    def copy_from_megatron(self, megatron: nn.Module) -> None:
        """Take the weights of a Megatron GPTModel: the names are Megatron's, less its nesting."""
        nesting = ("decoder.", "self_attention.", "mlp.", "word_embeddings.")
        weights = {}
        for name, weight in megatron.state_dict().items():
            for prefix in nesting:
                name = name.replace(prefix, "")
            if weight is not None and not name.endswith("_extra_state"):
                weights[name] = weight
        self.load_state_dict(weights)


class PlainTrainer:
    """Its training step: micro-batches, clipping, AdamW."""

    def __init__(self, model: PlainGPT, lr: float, weight_decay: float):
        self.model = model
        decayed = [param for param in model.parameters() if param.dim() >= 2]
        other = [param for param in model.parameters() if param.dim() < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": other, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> float:
        """One update from (tokens, labels, weights) micro-batches; returns the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        count = sum(tokens.numel() for tokens, _, _ in batches)
        total = 0.0
        for tokens, labels, weights in batches:
            loss = (self.model(tokens, labels) * weights).sum() / count
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        return total
