"""Checkpoints out of Megatron-Core into a Hugging Face folder, and back."""
