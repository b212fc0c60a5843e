"""Transformers and tokenizers: load_model, load_tokenizer, and MODELS, the table of presets."""

from models.load import load_model, load_tokenizer, random_model
from models.zoo import MODELS

__all__ = ["MODELS", "load_model", "load_tokenizer", "random_model"]
