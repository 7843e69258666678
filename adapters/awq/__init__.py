"""4-bit weight layouts of public checkpoints: descriptors, unpacking, packing.

Knows tensors only; which layer is packed, and in which dialect, is decided by `adapters.quantization`.
"""
