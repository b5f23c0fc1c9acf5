"""Names for the variants of a kernel that Triton compiles, by what tells them apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import triton.language as tl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ..emulator.ran import Pointer, Variant


def variant_names(variants: Sequence[Variant]) -> list[str]:
    """Each with what tells it from others of the same kernel: `shift (ch.world = 2)`."""
    traits = [dict(_traits(variant)) for variant in variants]
    names = []
    for variant, own in zip(variants, traits, strict=True):
        title = variant.kernel.__name__
        same = [t for v, t in zip(variants, traits, strict=True) if v.kernel.__name__ == title]
        apart = ", ".join(f"{at} {own[at]}" for at in _telling(same) if at in own)
        names.append(f"{title} ({apart})" if apart else title)
    return names


def _telling(traits: list[dict[str, str]]) -> list[str]:
    """A few keys whose values tell these apart."""

    def kinds(keys: list[str]) -> int:
        return len({tuple(t.get(key) for key in keys) for t in traits})

    keys, told = list(dict.fromkeys(key for t in traits for key in t)), list[str]()
    while kinds(best := max(([*told, key] for key in keys), key=kinds, default=told)) > kinds(told):
        told = best
    return told


def _traits(variant: Variant) -> Iterator[tuple[str, str]]:
    for p in variant.kernel.params:
        if p.name in variant.args:
            yield from _of(p.name, variant.args[p.name], p.is_constexpr, not p.do_not_specialize)
    yield from ((name, f"= {value}") for name, value in variant.options.items())


def _of(at: str, value: object, constant: bool, specialised: bool) -> Iterator[tuple[str, str]]:
    """(path, what Triton compiles for) of an argument and its parts."""
    if isinstance(value, tl.constexpr):
        yield from _of(at, value.value, True, specialised)
    elif isinstance(value, TensorDescriptor):
        yield at, f"of {value.base.dtype} by {list(value.block_shape)}"
    elif isinstance(value, tuple):
        for name, part in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
            yield from _of(f"{at}.{name}", part, constant, True)
    elif isinstance(value, Pointer):
        yield at, f"of {value.dtype}{'' if value.aligned else ', not at a multiple of 16 bytes'}"
    elif isinstance(value, JITFunction):
        yield at, f"= {value.__name__}"
    elif constant or value is None or isinstance(value, bool):
        yield at, f"= {value}"
    elif isinstance(value, int) and specialised:
        yield at, "= 1" if value == 1 else "a multiple of 16" if value % 16 == 0 else "no multiple of 16"
    else:
        yield at, f"of {type(value).__name__}"
