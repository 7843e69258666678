"""From batches of requests to generations: admission, chunked steps, cached batches, stopping, warm-up.

Knows the cache's pages and `ModelAdapter`; nothing of models, protobuf or HTTP.
"""
