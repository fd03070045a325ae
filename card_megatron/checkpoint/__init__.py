"""Distributed checkpoints: saved, verified, resumed in any layout; used by training, conversion and evaluation."""
