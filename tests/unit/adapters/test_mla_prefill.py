"""The form in which latent attention reads a prompt: each is the same model, and one keeps bits whatever the chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import TinyCheckpoint, tiny_checkpoint
from oracles import deepseek
from stepper import Placed, Stepper, relative_error

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.config import MLA_PREFILL, ShardConfig
from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kernels.latent_attention import FORMS
from deepseek_tgi.server.loading import load_options

TEXT = [(13 * i + i * i * i) % 270 for i in range(60)]


def load(checkpoint: TinyCheckpoint, form: str, dtype: str = "float32", cache: str = "auto") -> QuantizedModelAdapter:
    options = LoadOptions(dtype=dtype, kv_cache_dtype=cache, mla_prefill=form, num_threads=1)
    return QuantizedModelAdapter.get_model(str(checkpoint.path), options=options)


def test_every_form_is_the_published_model_and_none_is_another(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "deepseek_v3")
    wanted = torch.from_numpy(deepseek.logits(checkpoint.config, checkpoint.dense, TEXT)).float()
    got = {form: Stepper(load(checkpoint, form)).run(TEXT, [50]) for form in FORMS}
    for form in FORMS:
        assert relative_error(got[form], wanted) <= 1e-4, form
    assert not torch.equal(got["absorbed"], got["expanded"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache", ["auto", "int4"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_absorbed_prompts_have_the_same_bits_however_they_are_cut(
    tmp_path: Path, family: str, cache: str, dtype: str
) -> None:
    adapter = load(tiny_checkpoint(tmp_path, family, "awq-gemm"), "absorbed", dtype, cache)
    whole = Stepper(adapter).run(TEXT, [60])
    for chunks in ([16, 16], [1, 15, 17, 20], [33]):
        assert torch.equal(Stepper(adapter).run(TEXT, chunks), whole)
    stepper, first = Stepper(adapter), Placed()
    stepper.step([(first, TEXT[:35])])
    reused = stepper.step([(Placed(list(first.blocks[:2]), 32), TEXT[32:]), (Placed(), TEXT[5:9])])[0]
    assert torch.equal(reused, whole[32:])


def test_the_option_reaches_the_model_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    assert MLA_PREFILL == FORMS
    assert load_options(ShardConfig(mla_prefill="absorbed")).mla_prefill == "absorbed"
    checkpoint = tiny_checkpoint(tmp_path, "deepseek_v2")
    with pytest.raises(ConfigError, match="mla_prefill: got 'fast', expected one of auto, absorbed, expanded"):
        load(checkpoint, "fast")
