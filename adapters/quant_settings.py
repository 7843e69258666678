"""What a checkpoint says about its quantisation, read from its configs alone: no tensor is looked at. No torch here.

The label comes first: a method or format that cannot be read is refused here in one line, before any weight is mapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deepseek_tgi.adapters.awq.format import AWQ_VERSIONS, GPTQ_FORMATS
from deepseek_tgi.adapters.compressed_settings import BLOCK_SIDES, read_compressed_tensors
from deepseek_tgi.adapters.json_fields import Fields, read_json, shown
from deepseek_tgi.adapters.quant_schemes import EVERYTHING, Fp8Scheme, Int4Scheme, NameList, QuantSettings, Scheme
from deepseek_tgi.errors import UnsupportedModelError

__all__ = ["SUPPORTED", "QuantSettings", "read_quant_settings"]

SUPPORTED = (
    "awq (4 bits, version gemm or gemv), gptq (4 bits), fp8 (e4m3), "
    "compressed-tensors (pack-quantized with 4 bits and weights only, or float-quantized)"
)
_LEGACY_FILES = {"quant_config.json": "awq", "quantize_config.json": "gptq"}
"""Where AutoAWQ and AutoGPTQ wrote their settings before `config.json` had a place for them."""
_ANY_INT = 2**31
_SCALE_FORMATS = ("float", "ue8m0")


def read_quant_settings(folder: Path, quantization: Mapping[str, object] | None) -> QuantSettings:
    """Judge the `quantization_config` of `folder/config.json`.

    Raises: `UnsupportedModelError` naming method and format, `CheckpointError` for values that make no sense.
    """
    source = folder / "config.json"
    if quantization is None:
        for name, method in _LEGACY_FILES.items():
            legacy = folder / name
            if legacy.is_file():
                return _READERS[method](Fields(str(legacy), read_json(legacy)))
        return QuantSettings("none", str(source))
    fields = Fields(str(source), quantization, "quantization_config.")
    method = fields.text("quant_method")
    if method in _READERS:
        return _READERS[method](fields)
    layout = quantization.get("format") or quantization.get("fmt") or quantization.get("version")
    named = f" (format {shown(repr(layout))})" if layout else ""
    raise UnsupportedModelError(
        f"{source}: quant_method {shown(repr(method))}{named} is not implemented; supported are {SUPPORTED}"
    )


def _read_awq(fields: Fields) -> QuantSettings:
    bits_key = "bits" if fields.has("bits") else "w_bit"
    if fields.integer(bits_key, low=-_ANY_INT) != 4:
        raise fields.unsupported(bits_key, "AWQ is read at 4 bits")
    key = next((key for key in ("version", "checkpoint_format", "format") if fields.has(key)), "version")
    version = fields.text(key, default="gemm").lower()
    if version not in AWQ_VERSIONS:
        raise fields.unsupported(key, f"AWQ is read as {' or '.join(AWQ_VERSIONS)}")
    if fields.text("backend", default="autoawq") == "llm-awq":
        raise fields.unsupported("backend", "AWQ is read as AutoAWQ writes it")
    group_key = "group_size" if fields.has("group_size") else "q_group_size"
    scheme = Int4Scheme(
        layout=AWQ_VERSIONS[version],
        group_size=fields.integer(group_key, low=-_ANY_INT),
        zero_point=fields.flag("zero_point", default=True),
    )
    excluded = NameList.of(fields.texts("modules_to_not_convert"))
    return QuantSettings("awq", fields.source, ((EVERYTHING, scheme),), excluded)


def _read_gptq(fields: Fields) -> QuantSettings:
    if fields.integer("bits", low=-_ANY_INT) != 4:
        raise fields.unsupported("bits", "GPTQ is read at 4 bits")
    key = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    layout = fields.text(key, default="gptq").lower()
    if layout not in GPTQ_FORMATS or fields.data.get("is_marlin_format"):
        key = key if layout not in GPTQ_FORMATS else "is_marlin_format"
        raise fields.unsupported(key, f"GPTQ is read as {' or '.join(GPTQ_FORMATS)}")
    if fields.integer("pack_dtype_bits", default=32) != 32 or fields.text("pack_dtype", default="int32") != "int32":
        raise fields.unsupported("pack_dtype", "GPTQ is read in words of 32 bits")
    # Sorted groups exist only where groups were made after sorting: not with one group, not with static ones.
    size = fields.integer("group_size", default=-1, low=-_ANY_INT)
    sorted_groups = fields.flag("desc_act", default=False) and not fields.flag("static_groups", default=False)
    scheme = Int4Scheme(
        layout=GPTQ_FORMATS[layout],
        group_size=size,
        zero_point=not fields.flag("sym", default=True),
        sorted_groups=sorted_groups and size != -1,
    )
    rules, excluded = _read_dynamic(fields, scheme)
    # The config does not say which linear layers a tool passed over; `opaque` keeps a dense one from being remarked on.
    left_alone = NameList(excluded.parts, excluded.patterns, opaque=True)
    return QuantSettings("gptq", fields.source, rules, left_alone, fields.flag("lm_head", default=False))


def _read_dynamic(fields: Fields, scheme: Int4Scheme) -> tuple[tuple[tuple[NameList, Scheme], ...], NameList]:
    """Rules and exclusions of GPTQModel's `dynamic`: patterns that begin with `-:` leave alone, others override."""
    section = fields.section("dynamic")
    rules: list[tuple[NameList, Scheme]] = []
    excluded = []
    for pattern in section.data if section is not None else ():
        assert section is not None, "only a section has patterns"
        if pattern.startswith("-:"):
            excluded.append(f"re:{pattern.removeprefix('-:')}")
            continue
        own = section.section(pattern)
        if own is None:
            continue
        if own.integer("bits", default=4, low=-_ANY_INT) != 4:
            raise own.unsupported("bits", "GPTQ is read at 4 bits")
        override = Int4Scheme(
            layout=scheme.layout,
            group_size=own.integer("group_size", default=scheme.group_size, low=-_ANY_INT),
            zero_point=not own.flag("sym", default=not scheme.zero_point),
            sorted_groups=own.flag("desc_act", default=scheme.sorted_groups),
        )
        rules.append((NameList.of([f"re:{pattern.removeprefix('+:')}"]), override))
    return (*rules, (EVERYTHING, scheme)), NameList.of(excluded)


def _read_fp8(fields: Fields) -> QuantSettings:
    if fields.text("fmt", default="e4m3") != "e4m3":
        raise fields.unsupported("fmt", "8-bit floats are read as e4m3")
    if fields.text("activation_scheme", default="dynamic").lower() not in ("dynamic", "static"):
        raise fields.unsupported("activation_scheme", "expected dynamic or static")
    if fields.text("scale_fmt", default="float") not in _SCALE_FORMATS:
        raise fields.unsupported("scale_fmt", f"scales are read as {' or '.join(_SCALE_FORMATS)}")
    if fields.text("expert_dtype", default="fp8") != "fp8":
        raise fields.unsupported("expert_dtype", "experts are read as fp8")
    key = "modules_to_not_convert" if fields.has("modules_to_not_convert") else "ignored_layers"
    excluded = NameList.of(fields.texts(key))
    block = fields.pair("weight_block_size", BLOCK_SIDES) if fields.has("weight_block_size") else None
    scheme = Fp8Scheme(None, "weight_scale") if block is None else Fp8Scheme(block)
    return QuantSettings("fp8", fields.source, ((EVERYTHING, scheme),), excluded)


_READERS = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "fp8": _read_fp8,
    "compressed-tensors": read_compressed_tensors,
}
"""Reader of each implemented `quant_method`."""
