"""32-bit floats in their shortest form, against numpy's own printing of `float32`."""

from __future__ import annotations

import math
import struct

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_tgi.router.numbers import shortest


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_prints_the_digits_numpy_prints(value: float) -> None:
    printed = orjson.dumps(shortest(value)).decode()
    assert float(printed) == float(np.format_float_scientific(np.float32(value), unique=True))
    assert struct.pack("f", float(printed)) == struct.pack("f", value)


def test_known_values() -> None:
    third = struct.unpack("f", struct.pack("f", -0.41210938))[0]
    assert (
        orjson.dumps([shortest(third), shortest(0.5), shortest(-0.0), shortest(1.0)]) == b"[-0.41210938,0.5,-0.0,1.0]"
    )


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_json_cannot_say_is_null(value: float) -> None:
    assert shortest(value) is None
