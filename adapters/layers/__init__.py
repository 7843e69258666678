"""The parts decoders are made of: each loads itself from a `WeightSource` and adds its output to the residual stream.

Knows kernels and packed weights; knows no checkpoint format (`adapters.quantization`), no family (`adapters.models`)
and no batch policy.
"""
