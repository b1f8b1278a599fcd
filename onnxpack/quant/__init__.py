"""Arithmetic: how weights and activations become int8, and what follows the int32 accumulator."""
