"""Making checkpoints on disk: GGUF files to Hugging Face folders, dense folders to AWQ, the small real model.

Knows files and number formats; runs no model and serves nothing. Doors: `import_gguf.import_gguf`,
`quantize.quantize_rtn`, `small_model.ensure_small_model`. They are not re-exported here: two of them need torch.
"""
