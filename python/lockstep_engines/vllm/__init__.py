"""vLLM's scheduler and model classes, without a GPU and without its compiled code."""
