"""Pure functions on tensors: they know neither strategies nor models."""
