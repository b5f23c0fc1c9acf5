"""Keyword arguments that functions no longer accept, and their replacements."""

from __future__ import annotations

from collections.abc import Mapping

INSTEAD = {
    "x_scale": "pass weft.ScaledTensor(x, x_scale, recipe) as x",
    "weight_scale": "pass weft.ScaledTensor(weight, weight_scale, recipe) as weight",
    "return_gathered": "call weft.{op}_with_gathered, which returns the gathered rows too",
    "reorder": "call weft.{op}_tiles, which returns the rows as the plan leaves them, and a Remap",
    "quantize": "call weft.{op}_quantized, which returns a weft.ScaledTensor",
    "scale": "call weft.{op}_quantized, which returns a weft.ScaledTensor",
}


def unexpected(op: str, keywords: Mapping[str, object]) -> TypeError:
    """Return the error for a call with keyword arguments that the function does not accept."""
    name = next(iter(keywords))
    if name not in INSTEAD:
        return TypeError(f"{op}() got an unexpected keyword argument {name!r}")
    return TypeError(f"{op}: {name}= is gone: {INSTEAD[name].format(op=op)}")
