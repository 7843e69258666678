"""What a checkpoint says about its quantisation, read from its configs alone: no tensor is looked at.

The label comes first: a method or format that cannot be read is refused here in one line, before any weight is mapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepseek_tgi.adapters.awq.format import AWQ_VERSIONS, PACK_QUANTIZED, AwqFormat
from deepseek_tgi.adapters.json_fields import Fields, read_json
from deepseek_tgi.errors import CheckpointError, UnsupportedModelError

SUPPORTED = "awq (4 bits, version gemm or gemv), compressed-tensors (pack-quantized, 4 bits, weights only)"
_LEGACY_FILE = "quant_config.json"
"""Where AutoAWQ wrote its settings before `config.json` had a place for them."""
_ANY_INT = 2**31


@dataclass(frozen=True, slots=True)
class QuantSettings:
    """The declared quantisation. `layout` None means none is declared.

    `group_sizes` are the declared ones, unjudged (-1 means the whole input side): they are checked against layers.
    `excluded` are the modules declared dense; `open_ended` says that the list also holds patterns, which are not
    evaluated since the stored tensors decide. `source` is the file that says so.
    """

    method: str
    layout: AwqFormat | None
    group_sizes: tuple[int, ...]
    zero_point: bool
    excluded: tuple[str, ...]
    open_ended: bool
    source: str

    def excludes(self, module: str) -> bool:
        """True if the list names `module`, or a part of its path made of whole names.

        `mlp.gate` matches `model.layers.0.mlp.gate` and not `model.layers.0.mlp.gate_proj`.
        """
        return any(f".{entry.strip('.')}." in f".{module}." for entry in self.excluded)


def read_quant_settings(folder: Path, quantization: Mapping[str, object] | None) -> QuantSettings:
    """Judge the `quantization_config` of `folder/config.json`.

    Raises: `UnsupportedModelError` naming method and format, `CheckpointError` for values that make no sense.
    """
    source = folder / "config.json"
    if quantization is None:
        legacy = folder / _LEGACY_FILE
        if not legacy.is_file():
            return QuantSettings("none", None, (), False, (), False, str(source))
        return _read_awq(Fields(str(legacy), read_json(legacy)))
    fields = Fields(str(source), quantization, "quantization_config.")
    method = fields.text("quant_method")
    if method == "awq":
        return _read_awq(fields)
    if method == "compressed-tensors":
        return _read_compressed_tensors(fields)
    layout = quantization.get("format") or quantization.get("fmt") or quantization.get("version")
    named = f" (format {layout!r})" if layout else ""
    raise UnsupportedModelError(
        f"{source}: quant_method {method!r}{named} is not implemented; supported are {SUPPORTED}"
    )


def _refuse(fields: Fields, key: str, expected: str) -> UnsupportedModelError:
    got = fields.data.get(key)
    return UnsupportedModelError(f"{fields.source}: {fields.prefix}{key} {got!r} is not implemented; {expected}")


def _read_awq(fields: Fields) -> QuantSettings:
    bits_key = "bits" if fields.has("bits") else "w_bit"
    if fields.integer(bits_key, low=-_ANY_INT) != 4:
        raise _refuse(fields, bits_key, "AWQ is read at 4 bits")
    version = fields.text("version", default="gemm").lower()
    if version not in AWQ_VERSIONS:
        raise _refuse(fields, "version", f"AWQ is read as {' or '.join(AWQ_VERSIONS)}")
    if fields.text("backend", default="autoawq") == "llm-awq":
        raise _refuse(fields, "backend", "AWQ is read as AutoAWQ writes it")
    group_key = "group_size" if fields.has("group_size") else "q_group_size"
    excluded = fields.texts("modules_to_not_convert")
    return QuantSettings(
        method="awq",
        layout=AWQ_VERSIONS[version],
        group_sizes=(fields.integer(group_key, low=-_ANY_INT),),
        zero_point=fields.flag("zero_point", default=True),
        excluded=tuple(entry for entry in excluded if entry.strip(".")),
        open_ended=False,
        source=fields.source,
    )


def _read_compressed_tensors(fields: Fields) -> QuantSettings:
    top_format = fields.text("format", default=PACK_QUANTIZED.name)
    for key in ("sparsity_config", "transform_config"):
        extra = fields.section(key)
        if extra and extra.data and extra.data.get("format") != "dense" and any(extra.data.values()):
            raise _refuse(fields, key, "only plain pack-quantized weights are read")
    groups = fields.section("config_groups")
    if groups is None or not groups.data:
        raise CheckpointError(f"{fields.source}: {fields.prefix}config_groups is missing or empty; expected one group")
    schemes = [_read_scheme(groups, name, top_format) for name in groups.data]
    if len({zero_point for _, zero_point in schemes}) > 1:
        raise UnsupportedModelError(
            f"{fields.source}: {fields.prefix}config_groups mixes symmetric and asymmetric groups: not implemented"
        )
    ignored = fields.texts("ignore")
    return QuantSettings(
        method="compressed-tensors",
        layout=PACK_QUANTIZED,
        group_sizes=tuple(dict.fromkeys(size for size, _ in schemes)),
        zero_point=schemes[0][1],
        excluded=tuple(entry for entry in ignored if entry.strip(".") and not entry.startswith("re:")),
        open_ended=any(entry.startswith("re:") for entry in ignored),
        source=fields.source,
    )


def _read_scheme(groups: Fields, name: str, top_format: str) -> tuple[int, bool]:
    """Group size and "has zero points" of one config group."""
    group = groups.section(name)
    weights = group.section("weights") if group else None
    if group is None or weights is None:
        groups.fail(name, "an object with weights")
    layout = group.text("format", default=top_format)
    if layout != PACK_QUANTIZED.name:
        raise UnsupportedModelError(
            f"{groups.source}: quant_method 'compressed-tensors' with format {layout!r} is not implemented; "
            f"supported are {SUPPORTED}"
        )
    if weights.integer("num_bits", low=-_ANY_INT) != 4 or weights.text("type", default="int") != "int":
        raise _refuse(weights, "num_bits", "pack-quantized is read as 4-bit integers")
    if group.has("input_activations"):
        raise _refuse(group, "input_activations", "only weights may be quantised (W4A16)")
    if weights.text("actorder", default="static") not in ("static", "weight"):
        raise _refuse(weights, "actorder", "only group-contiguous weights are read")
    strategy = weights.text("strategy", default="group")
    if strategy not in ("group", "channel"):
        raise _refuse(weights, "strategy", "group and channel are read")
    size = -1 if strategy == "channel" else weights.integer("group_size", low=-_ANY_INT)
    return size, not weights.flag("symmetric", default=True)
