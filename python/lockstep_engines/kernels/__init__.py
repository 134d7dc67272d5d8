"""vLLM's kernels for the cache, one by one, compared with plain loops."""
