"""The shard's door: eight RPCs of `generate.v3` over a unix socket, and the life of its process.

Knows the wire and the engine's calls; nothing of models, tensors or HTTP.
"""
