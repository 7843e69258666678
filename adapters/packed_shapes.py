"""The INT4 products of a model, by their shapes: what is worth measuring before it is served."""

from __future__ import annotations

from collections import Counter

from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.hub import resolve_folder
from deepseek_tgi.adapters.model_config import read_model_config
from deepseek_tgi.adapters.module_table import Kind, module_table
from deepseek_tgi.adapters.quant_schemes import cut_group
from deepseek_tgi.adapters.sharding import plan_shards
from deepseek_tgi.adapters.stored_headers import StoredForms

_TOGETHER = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")
"""Modules that read the same input and are packed as one weight."""
_ABSORBED = "kv_b_proj"


def int4_shapes(model_id: str, revision: str | None = None, world_size: int = 1) -> set[tuple[int, int, int]]:
    """`(out_features, in_features, group_size)` of the first rank's weights that `int4_linear` will be given.

    Reads headers alone. Experts and what latent attention absorbs have kernels of their own and are not among them.
    Raises what loading raises for a checkpoint that cannot be served.
    """
    config = read_model_config(resolve_folder(model_id, revision))
    shards, stored = plan_shards(config, world_size), StoredForms(config, Checkpoint(config.folder))
    widths: Counter[tuple[str, int, int]] = Counter()
    for module in module_table(config):
        place, _, last = module.name.rpartition(".")
        if module.kind is not Kind.LINEAR or ".experts." in module.name or last == _ABSORBED:
            continue
        form = stored.form(module)
        if form.bits != 4:
            continue
        outputs, inputs = shards.outputs(module, 0), shards.inputs(module, 0)
        size = cut_group(form.group_size, inputs.start, inputs.stop)
        weight = next((index for index, names in enumerate(_TOGETHER) if last in names), last)
        widths[f"{place}.{weight}", len(inputs), size] += len(outputs)
    return {(width, k, size) for (_, k, size), width in widths.items()}
