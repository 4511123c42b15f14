"""DeepSeek-V3.2 in JAX: a Hugging Face checkpoint to text, its attention through jax_sparse_mla."""
