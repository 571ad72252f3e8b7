"""The radix tree and the slot allocators: indices only, no tensors."""
