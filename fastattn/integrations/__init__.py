"""Adapters to other libraries: Hugging Face transformers, and low-rank attention inside its models."""
