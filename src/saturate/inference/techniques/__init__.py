"""Optimizations of inference, one per file. `_api` is their contract, `_registry` finds them."""
