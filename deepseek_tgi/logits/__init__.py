"""From raw logits to chosen tokens: penalties, grammars, cuts and the draw, each row for itself.

Knows tensors and sampling parameters; nothing of batches, caches or models.
"""
