"""Text to .bin/.idx, and .bin/.idx to noised micro-batches."""
