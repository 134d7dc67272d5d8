"""vLLM's GPU worker on the host: decisions in, the cache and block tables out."""
