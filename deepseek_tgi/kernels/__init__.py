"""The arithmetic a decoder needs, one folder an op, and the choice among implementations.

Each `<op>/__init__.py` states the contract; `reference.py` is the slow truth in float32, `cpu.py` the vectorised form
that needs nothing but torch, `native.py` the call into the C++ library of `native/`. `select.select_kernels` picks
once, at load, and hands out a `KernelSet`. This package knows tensors, packed weights and pages; it knows no model, no
checkpoint and no batch policy. Importing it costs nothing; `threads` and `library` need no torch.
"""
