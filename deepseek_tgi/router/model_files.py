"""The files of a model that the door needs: its tokenizer and its chat template, from a folder or the hub's cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from deepseek_tgi.errors import CheckpointError
from deepseek_tgi.router.config import RouterConfig
from deepseek_tgi.text.chat_template import ChatTemplate, load_chat_template
from deepseek_tgi.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

WANTED = ["*.json", "*.jinja"]
UNWANTED = ["*.safetensors.index.json", "*.bin.index.json"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What was loaded. `sha` is the hub's commit, `pipeline_tag` what the hub says the model does, if known."""

    tokenizer: TextTokenizer
    template: ChatTemplate | None
    sha: str | None = None
    pipeline_tag: str | None = None


def load_model_files(config: RouterConfig) -> ModelFiles:
    """Read tokenizer and template. Raises `CheckpointError` naming what is missing."""
    folder = Path(config.tokenizer_name)
    sha = None
    if not folder.is_dir():
        folder = _from_hub(config)
        sha = folder.name if folder.parent.name == "snapshots" else None
    override = Path(config.tokenizer_config_path) if config.tokenizer_config_path else None
    template = load_chat_template(folder, override)
    if template is None:
        logger.warning("%s has no chat template: chat routes will answer 422", config.tokenizer_name)
    return ModelFiles(TextTokenizer.from_folder(folder), template, sha)


def _from_hub(config: RouterConfig) -> Path:
    """The model's snapshot folder; only small files are fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                config.tokenizer_name,
                revision=config.revision,
                allow_patterns=WANTED,
                ignore_patterns=UNWANTED,
                local_files_only=config.hf_hub_offline,
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{config.tokenizer_name}: neither a folder nor a model of the hub that can be had: {error}; expected the "
            "same model as the shard's, with its tokenizer.json"
        ) from error
