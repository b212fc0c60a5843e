"""A KV cache that compresses itself, and decoding through it."""

from minikv.cache import CompressedKVCache
from minikv.chat import Chat
from minikv.generate import generate
from minikv.policy import METHODS, Policy

__all__ = ["METHODS", "Chat", "CompressedKVCache", "Policy", "generate"]
