"""The parts of DeepSeek's own architectures, V2 and V3, read from `config.json`."""

from __future__ import annotations

from dataclasses import replace

from deepseek_tgi.adapters.json_fields import Fields, shown
from deepseek_tgi.adapters.part_specs import GatedMlp, LatentAttention, MixtureOfExperts
from deepseek_tgi.adapters.rope_config import LARGEST_MSCALE, RopeConfig, RopeKind, rope_section
from deepseek_tgi.errors import UnsupportedModelError
from deepseek_tgi.kernels.route import GroupRank, Routing, Scoring

_METHODS = {2: (GroupRank.NONE, GroupRank.BEST), 3: (GroupRank.BEST_TWO,)}
_MOST_EXPERTS = 2**18
"""Of all layers together; the largest published models have 23,000. Each is a row of every plan."""
_SPARSE_KEYS = ("index_topk", "index_n_heads", "index_head_dim")
"""Keys of the indexer of DeepSeek-V3.2, which attends to chosen tokens only."""


def read_deepseek(fields: Fields, generation: int) -> tuple[LatentAttention, GatedMlp, MixtureOfExperts | None]:
    """Attention, the dense layers' MLP, and the experts of generation 2 or 3.

    Raises: `CheckpointError` for values that make no sense, `UnsupportedModelError` for a routing that is not known
    and for what another model than V2 and V3 would need.
    """
    _refuse_extras(fields)
    return _read_attention(fields), _read_mlp(fields), _read_experts(fields, generation)


def published_yarn(rope: RopeConfig, fields: Fields) -> RopeConfig:
    """`rope` with the two mscales as DeepSeek's own rotary embedding and attention take them.

    An absent `mscale` is 1 and an absent `mscale_all_dim` 0, where other families need both for either to count; and
    `mscale_all_dim` scales the softmax under every kind of scaling.
    Source: `modeling_deepseek.py` beside the published V2 and V3 weights; YaRN (arXiv 2309.00071), section 3.4.
    """
    section = rope_section(fields)
    if section is None or rope.kind is RopeKind.DEFAULT:
        return rope
    return replace(
        rope,
        mscale=section.number("mscale", default=1.0, high=LARGEST_MSCALE, above=False),
        mscale_all_dim=section.number("mscale_all_dim", default=0.0, high=LARGEST_MSCALE, above=False),
    )


def _refuse_extras(fields: Fields) -> None:
    for key in _SPARSE_KEYS:
        if fields.has(key):
            raise UnsupportedModelError(
                f"{fields.source}: {key} is {shown(repr(fields.data[key]))}: sparse attention (the indexer that picks "
                "the tokens to attend to) is not implemented; models without it are"
            )
    if fields.integer("ep_size", default=1) != 1:
        raise UnsupportedModelError(
            f"{fields.source}: ep_size is {fields.data['ep_size']!r}; experts spread over ranks are not implemented, "
            "only 1 is"
        )
    if fields.flag("mlp_bias", default=False):
        raise UnsupportedModelError(
            f"{fields.source}: mlp_bias is true; DeepSeek's MLPs and experts have no biases, and none are implemented"
        )


def _read_attention(fields: Fields) -> LatentAttention:
    rope = fields.integer("qk_rope_head_dim", high=2**12)
    if rope % 2:
        fields.fail("qk_rope_head_dim", "an even number: rotary positions turn pairs")
    return LatentAttention(
        num_attention_heads=fields.integer("num_attention_heads", high=2**16),
        q_lora_rank=fields.integer("q_lora_rank", high=2**20) if fields.has("q_lora_rank") else None,
        kv_lora_rank=fields.integer("kv_lora_rank", high=2**16),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim", high=2**12),
        qk_rope_head_dim=rope,
        v_head_dim=fields.integer("v_head_dim", high=2**12),
        bias=fields.flag("attention_bias", default=False),
        rope_interleave=fields.flag("rope_interleave", default=True),
    )


def _read_mlp(fields: Fields) -> GatedMlp:
    return GatedMlp(fields.integer("intermediate_size", high=2**24), bias=False)


def _read_experts(fields: Fields, generation: int) -> MixtureOfExperts | None:
    if not fields.has("n_routed_experts"):
        return None
    inner = fields.integer("moe_intermediate_size", high=2**24)
    layers = fields.integer("num_hidden_layers", high=4096)
    fields.integer("n_routed_experts", high=_MOST_EXPERTS // layers)
    return MixtureOfExperts(
        intermediate_size=inner,
        shared_size=inner * _num_shared(fields, generation),
        first_layer=fields.integer("first_k_dense_replace", default=0 if generation == 2 else 3, low=0),
        every=fields.integer("moe_layer_freq", default=1),
        routing=_read_routing(fields, generation),
    )


def _num_shared(fields: Fields, generation: int) -> int:
    """How many experts every token goes to; null is none. For V2 the sources disagree on what absence means."""
    if "n_shared_experts" not in fields.data and generation == 2:
        fields.fail("n_shared_experts", "the number of shared experts (0 or null for none)")
    absent = "n_shared_experts" not in fields.data
    return fields.integer("n_shared_experts", default=1 if absent else 0, low=0, high=2**10)


def _read_routing(fields: Fields, generation: int) -> Routing:
    experts = fields.integer("n_routed_experts", high=2**16)
    rank = _read_rank(fields, generation)
    # Groups are read where they count only: V2-Lite's file says "greedy" and still carries a group number.
    grouped = rank is not GroupRank.NONE
    groups = fields.integer("n_group", high=experts) if grouped else 1
    if experts % groups:
        fields.fail("n_group", f"a divisor of n_routed_experts ({experts})")
    top_groups = fields.integer("topk_group", high=groups) if grouped else 1
    scoring = fields.text("scoring_func", default="softmax" if generation == 2 else "sigmoid")
    if scoring not in {each.value for each in Scoring}:
        raise UnsupportedModelError(
            f"{fields.source}: scoring_func is {shown(repr(scoring))}; implemented are "
            f"{', '.join(each.value for each in Scoring)}"
        )
    return Routing(
        num_experts=experts,
        top_k=fields.integer("num_experts_per_tok", high=experts // groups * top_groups),
        scoring=Scoring(scoring),
        group_rank=rank,
        num_groups=groups,
        top_groups=top_groups,
        normalise=fields.flag("norm_topk_prob", default=generation == 3),
        scale=fields.number("routed_scaling_factor", default=1.0 if generation == 2 else 2.5),
    )


def _read_rank(fields: Fields, generation: int) -> GroupRank:
    name = fields.text("topk_method", default=GroupRank.NONE.value if generation == 2 else GroupRank.BEST_TWO.value)
    known = [rank.value for rank in _METHODS[generation]]
    if name not in known:
        raise UnsupportedModelError(
            f"{fields.source}: topk_method is {shown(repr(name))}; deepseek_v{generation} has {', '.join(known)}"
        )
    return GroupRank(name)
