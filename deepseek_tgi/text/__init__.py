"""Text to token ids and back, and chat templates, from a checkpoint's own files.

Imports neither torch nor transformers, so that the router stays light.
"""
