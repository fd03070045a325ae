"""What a model is worth: likelihoods, tasks of the lm-evaluation-harness, perplexities, generated text."""
