"""The settings of compressed-tensors: groups of modules, each with a scheme. No torch here.

Weights alone count: where a group also quantises activations to 8-bit floats, they stay in compute precision here,
which is nearer to the model that was quantised. Source: compressed-tensors `quantization/quant_args.py`,
`quant_scheme.py` and `utils/match.py`.
"""

from __future__ import annotations

from deepseek_tgi.adapters.awq.format import PACK_QUANTIZED
from deepseek_tgi.adapters.json_fields import Fields, shown
from deepseek_tgi.adapters.quant_schemes import EVERYTHING, Fp8Scheme, Int4Scheme, NameList, QuantSettings, Scheme
from deepseek_tgi.errors import CheckpointError, UnsupportedModelError

_FLOAT = "float-quantized"
_MIXED = "mixed-precision"
_READABLE = f"{PACK_QUANTIZED.name} (4-bit integers, weights only) and {_FLOAT} (e4m3)"
_ANY_INT = 2**31
_LINEAR = "Linear"
_SCALE = "weight_scale"
BLOCK_SIDES = "two positive integers, outputs and inputs of a block"


def read_compressed_tensors(fields: Fields) -> QuantSettings:
    """Judge a `quantization_config` of this method.

    Raises: `UnsupportedModelError` naming what is not implemented, `CheckpointError` for values that make no sense.
    """
    top_format = fields.text("format", default=PACK_QUANTIZED.name)
    for key in ("sparsity_config", "transform_config"):
        extra = fields.section(key)
        if extra and extra.data and extra.data.get("format") != "dense" and any(extra.data.values()):
            raise fields.unsupported(key, "only plain quantised weights are read")
    groups = fields.section("config_groups")
    if groups is None or not groups.data:
        raise CheckpointError(f"{fields.source}: {fields.prefix}config_groups is missing or empty; expected one group")
    named, general = [], []
    for name in groups.data:
        targets, scheme = _read_group(groups, name, top_format)
        if _LINEAR in targets:
            general.append((EVERYTHING, scheme))
        if any(target != _LINEAR for target in targets):
            named.append((_names([target for target in targets if target != _LINEAR]), scheme))
    rules = (*named, *general)
    if len({scheme for _, scheme in rules if isinstance(scheme, Fp8Scheme)}) > 1:
        raise UnsupportedModelError(
            f"{fields.source}: {fields.prefix}config_groups has 8-bit floats of several block sizes: not implemented"
        )
    return QuantSettings("compressed-tensors", fields.source, rules, _names(fields.texts("ignore")), packs_head=True)


def _names(entries: list[str] | tuple[str, ...]) -> NameList:
    """Names and patterns; an entry like `Embedding` is a class of layers, which a name does not tell."""
    classes = [entry for entry in entries if entry[:1].isupper() and "." not in entry]
    names = NameList.of(entry for entry in entries if entry not in classes)
    return NameList(names.parts, names.patterns, names.opaque or bool(classes))


def _read_group(groups: Fields, name: str, top_format: str) -> tuple[tuple[str, ...], Scheme]:
    """Targets and scheme of one config group."""
    group = groups.section(name)
    weights = group.section("weights") if group else None
    if group is None or weights is None:
        groups.fail(name, "an object with weights")
    layout = group.text("format", default=top_format)
    targets = group.texts("targets") or (_LINEAR,)
    if layout == PACK_QUANTIZED.name or (layout == _MIXED and not _is_float(weights)):
        return targets, _read_int4(group, weights)
    if layout == _FLOAT or (layout == _MIXED and _is_float(weights)):
        return targets, _read_fp8(weights)
    raise UnsupportedModelError(
        f"{groups.source}: quant_method 'compressed-tensors' with format {shown(repr(layout))} is not implemented; "
        f"supported are {_READABLE}"
    )


def _is_float(weights: Fields) -> bool:
    return weights.text("type", default="int") == "float"


def _read_int4(group: Fields, weights: Fields) -> Int4Scheme:
    if weights.integer("num_bits", low=-_ANY_INT) != 4 or _is_float(weights):
        raise weights.unsupported("num_bits", "pack-quantized is read as 4-bit integers")
    if group.has("input_activations"):
        raise group.unsupported("input_activations", "only weights may be quantised (W4A16)")
    size = weights.integer("group_size", default=-1, low=-_ANY_INT)
    strategy = weights.text("strategy", default="channel" if size == -1 else "group")
    if strategy not in ("group", "channel"):
        raise weights.unsupported("strategy", "group and channel are read")
    return Int4Scheme(
        layout=PACK_QUANTIZED,
        group_size=-1 if strategy == "channel" else weights.integer("group_size", low=-_ANY_INT),
        zero_point=not weights.flag("symmetric", default=True),
        sorted_groups=_has_sorted_groups(weights),
    )


def _has_sorted_groups(weights: Fields) -> bool:
    """`group` sorts inputs before groups are made, `weight` only the order of work; true means `group`."""
    order = weights.data.get("actorder")
    known = {None: False, False: False, True: True, "static": False, "weight": False, "dynamic": True, "group": True}
    if not isinstance(order, str | bool | None) or order not in known:
        raise weights.unsupported("actorder", "group and weight are read")
    return known[order]


def _read_fp8(weights: Fields) -> Fp8Scheme:
    if weights.integer("num_bits", low=-_ANY_INT) != 8 or not _is_float(weights):
        raise weights.unsupported("num_bits", f"{_FLOAT} is read as 8-bit floats")
    if not weights.flag("symmetric", default=True):
        raise weights.unsupported("symmetric", "8-bit floats have no zero points")
    strategy = weights.text("strategy", default="tensor")
    if strategy in ("tensor", "channel"):
        return Fp8Scheme(None, _SCALE)
    if strategy != "block":
        raise weights.unsupported("strategy", "tensor, channel and block are read")
    return Fp8Scheme(weights.pair("block_structure", BLOCK_SIDES), _SCALE)
