"""Every stored module of a model as data, from its config alone: name, shape, and how ranks share it.

Choice: what is split, and along which side, stands in one table. Loading, refusals and the printed plan all read it.
Prevents: a split rule that lives in the loader of one layer and is unknown to the check before loading. Rejected: rules
by module name, which a new family would inherit without anybody having decided so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from deepseek_tgi.adapters.model_config import GroupedQueryAttention, LatentAttention, MixtureOfExperts, ModelConfig
from deepseek_tgi.kernels.route import GroupRank


class Axis(Enum):
    """What is dealt out to the ranks. Modules on one axis are cut at the same places, in units of their own."""

    HEADS = "heads"
    KV_HEADS = "kv heads"
    MLP = "mlp width"
    EXPERT = "expert width"
    SHARED = "shared expert width"
    VOCABULARY = "vocabulary"


class Side(Enum):
    """The side of a weight `[N, K]` that is cut: outputs (each rank has some columns) or inputs (partial sums)."""

    OUT = "column"
    IN = "row"


class Kind(Enum):
    """What a module stores. Only `LINEAR` and `HEAD` may be quantised."""

    LINEAR = "linear"
    GATE = "gate"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    VECTOR = "vector"


@dataclass(frozen=True, slots=True)
class Split:
    """Cut `side` along `axis`; one unit of the axis is `unit` elements of the side."""

    side: Side
    axis: Axis
    unit: int = 1

    def __str__(self) -> str:
        """`column by heads`, `row by mlp width`."""
        return f"{self.side.value} by {self.axis.value}"


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One module. `split` None: every rank has all of it. `in_features` 0: the tensor is `[out_features]`.

    Tensors are `{name}.weight` (or its packed forms) and, with `bias`, `{name}.bias`; a `VECTOR` is named itself.
    A bias is cut with the outputs, and added once where the inputs are cut.
    """

    name: str
    kind: Kind
    out_features: int
    in_features: int
    split: Split | None = None
    bias: bool = False

    @property
    def rule(self) -> str:
        """The split in words."""
        return "replicated" if self.split is None else str(self.split)


EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


def module_table(config: ModelConfig) -> Iterator[ModuleSpec]:
    """All modules of the model in the order they are loaded; a tied head is the embedding and not listed."""
    hidden, by_rows = config.hidden_size, Split(Side.OUT, Axis.VOCABULARY)
    yield ModuleSpec(EMBEDDING, Kind.EMBEDDING, config.vocab_size, hidden, by_rows)
    for index in range(config.num_hidden_layers):
        name = f"model.layers.{index}"
        yield ModuleSpec(f"{name}.input_layernorm", Kind.NORM, hidden, 0)
        spec = config.attention
        if isinstance(spec, LatentAttention):
            yield from _latent(f"{name}.self_attn", spec, hidden)
        else:
            yield from _grouped(f"{name}.self_attn", spec, hidden)
        yield ModuleSpec(f"{name}.post_attention_layernorm", Kind.NORM, hidden, 0)
        if config.experts is not None and config.experts.in_layer(index):
            yield from _experts(f"{name}.mlp", config.experts, hidden)
        else:
            yield from _mlp(f"{name}.mlp", config.mlp.intermediate_size, hidden, Axis.MLP, config.mlp.bias)
    yield ModuleSpec("model.norm", Kind.NORM, hidden, 0)
    if not config.tie_word_embeddings:
        yield ModuleSpec(HEAD, Kind.HEAD, config.vocab_size, hidden, by_rows)


def _grouped(name: str, spec: GroupedQueryAttention, hidden: int) -> Iterator[ModuleSpec]:
    dim = spec.head_dim
    queries, keys = Split(Side.OUT, Axis.HEADS, dim), Split(Side.OUT, Axis.KV_HEADS, dim)
    yield ModuleSpec(f"{name}.q_proj", Kind.LINEAR, spec.q_width, hidden, queries, spec.qkv_bias)
    yield ModuleSpec(f"{name}.k_proj", Kind.LINEAR, spec.kv_width, hidden, keys, spec.qkv_bias)
    yield ModuleSpec(f"{name}.v_proj", Kind.LINEAR, spec.kv_width, hidden, keys, spec.qkv_bias)
    if spec.qk_norm:
        yield ModuleSpec(f"{name}.q_norm", Kind.NORM, dim, 0)
        yield ModuleSpec(f"{name}.k_norm", Kind.NORM, dim, 0)
    output = Split(Side.IN, Axis.HEADS, dim)
    yield ModuleSpec(f"{name}.o_proj", Kind.LINEAR, hidden, spec.q_width, output, spec.output_bias)


def _latent(name: str, spec: LatentAttention, hidden: int) -> Iterator[ModuleSpec]:
    """Every head needs the whole latent, so what makes it is on every rank."""
    heads, rank = spec.num_attention_heads, spec.kv_lora_rank
    width, queries = heads * spec.qk_head_dim, Split(Side.OUT, Axis.HEADS, spec.qk_head_dim)
    if spec.q_lora_rank:
        yield ModuleSpec(f"{name}.q_a_proj", Kind.LINEAR, spec.q_lora_rank, hidden, None, spec.bias)
        yield ModuleSpec(f"{name}.q_a_layernorm", Kind.NORM, spec.q_lora_rank, 0)
        yield ModuleSpec(f"{name}.q_b_proj", Kind.LINEAR, width, spec.q_lora_rank, queries)
    else:
        yield ModuleSpec(f"{name}.q_proj", Kind.LINEAR, width, hidden, queries)
    latent = rank + spec.qk_rope_head_dim
    yield ModuleSpec(f"{name}.kv_a_proj_with_mqa", Kind.LINEAR, latent, hidden, None, spec.bias)
    yield ModuleSpec(f"{name}.kv_a_layernorm", Kind.NORM, rank, 0)
    unit = spec.qk_nope_head_dim + spec.v_head_dim
    yield ModuleSpec(f"{name}.kv_b_proj", Kind.LINEAR, heads * unit, rank, Split(Side.OUT, Axis.HEADS, unit))
    output = Split(Side.IN, Axis.HEADS, spec.v_head_dim)
    yield ModuleSpec(f"{name}.o_proj", Kind.LINEAR, hidden, heads * spec.v_head_dim, output, spec.bias)


def _mlp(name: str, inner: int, hidden: int, axis: Axis, bias: bool = False) -> Iterator[ModuleSpec]:
    for each in ("gate_proj", "up_proj"):
        yield ModuleSpec(f"{name}.{each}", Kind.LINEAR, inner, hidden, Split(Side.OUT, axis), bias)
    yield ModuleSpec(f"{name}.down_proj", Kind.LINEAR, hidden, inner, Split(Side.IN, axis), bias)


def _experts(name: str, spec: MixtureOfExperts, hidden: int) -> Iterator[ModuleSpec]:
    """Each expert is cut across its width, so that every rank does an equal part of whatever the router chooses."""
    experts = spec.routing.num_experts
    yield ModuleSpec(f"{name}.gate", Kind.GATE, experts, hidden)
    if spec.routing.group_rank is GroupRank.BEST_TWO:
        yield ModuleSpec(f"{name}.gate.e_score_correction_bias", Kind.VECTOR, experts, 0)
    for index in range(experts):
        yield from _mlp(f"{name}.experts.{index}", spec.intermediate_size, hidden, Axis.EXPERT)
    if spec.shared_size:
        yield from _mlp(f"{name}.shared_experts", spec.shared_size, hidden, Axis.SHARED)
