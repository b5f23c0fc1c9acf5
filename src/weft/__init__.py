"""weft overlaps communication with computation inside multi-GPU LLM layers.

`api` defines the public names. The first use of a public name imports it, because importing torch takes seconds and
`weft --version` does not need torch.
"""

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import *  # noqa: F403
    from .api import __all__ as __all__
    from .api import torch as torch  # not in __all__, because a star import would hide torch itself


def __getattr__(name: str) -> Any:
    """Return a public object, a submodule, or the version. The package's metadata is read only when the version is
    first requested."""
    if name == "__version__":
        return metadata.version("weft")
    if name.isidentifier() and not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    if not name.startswith("_") or name == "__all__":
        public = vars(import_module(f"{__name__}.api"))
        globals().update({key: public[key] for key in ("__all__", *public["__all__"]) if key in public})
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]
