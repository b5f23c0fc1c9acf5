"""Names for the variants of a kernel that Triton compiles, with the arguments that distinguish them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import triton.language as tl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ..emulator.ran import Pointer, Variant


def variant_names(variants: Sequence[Variant]) -> list[str]:
    """Return the name of each variant, with the arguments that distinguish it from other variants of the same kernel:
    `shift (ch.world = 2)`."""
    traits = [dict(_traits(variant)) for variant in variants]
    names = []
    for variant, trait in zip(variants, traits, strict=True):
        title = variant.kernel.__name__
        same = [t for v, t in zip(variants, traits, strict=True) if v.kernel.__name__ == title]
        distinguishing = ", ".join(f"{key} {trait[key]}" for key in _distinguishing_keys(same) if key in trait)
        names.append(f"{title} ({distinguishing})" if distinguishing else title)
    return names


def _distinguishing_keys(traits: list[dict[str, str]]) -> list[str]:
    """Return a few keys whose values distinguish these traits."""

    def kinds(keys: list[str]) -> int:
        return len({tuple(t.get(key) for key in keys) for t in traits})

    keys, chosen = list(dict.fromkeys(key for t in traits for key in t)), list[str]()
    while kinds(best := max(([*chosen, key] for key in keys), key=kinds, default=chosen)) > kinds(chosen):
        chosen = best
    return chosen


def _traits(variant: Variant) -> Iterator[tuple[str, str]]:
    for p in variant.kernel.params:
        if p.name in variant.args:
            yield from _traits_of_value(p.name, variant.args[p.name], p.is_constexpr, not p.do_not_specialize)
    yield from ((name, f"= {value}") for name, value in variant.options.items())


def _traits_of_value(path: str, value: object, constant: bool, specialised: bool) -> Iterator[tuple[str, str]]:
    """Yield (path, property that Triton compiles for) of an argument and its fields."""
    if isinstance(value, tl.constexpr):
        yield from _traits_of_value(path, value.value, True, specialised)
    elif isinstance(value, TensorDescriptor):
        yield path, f"of {value.base.dtype} by {list(value.block_shape)}"
    elif isinstance(value, tuple):
        for name, part in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
            yield from _traits_of_value(f"{path}.{name}", part, constant, True)
    elif isinstance(value, Pointer):
        yield path, f"of {value.dtype}{'' if value.aligned else ', not at a multiple of 16 bytes'}"
    elif isinstance(value, JITFunction):
        yield path, f"= {value.__name__}"
    elif constant or value is None or isinstance(value, bool):
        yield path, f"= {value}"
    elif isinstance(value, int) and specialised:
        yield path, "= 1" if value == 1 else "a multiple of 16" if value % 16 == 0 else "no multiple of 16"
    else:
        yield path, f"of {type(value).__name__}"
