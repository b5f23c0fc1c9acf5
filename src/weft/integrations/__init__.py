"""weft inside other projects: torch, Transformers, vLLM and SGLang."""

import os


def plugin_state(off: str, allowed: str) -> str:
    """Return whether a plugin is on, from two environment variables: `off`, weft's own, and `allowed`, the engine's
    list."""
    if os.environ.get(off) == "0":
        return f"the plugin is off by {off}=0"
    names = os.environ.get(allowed)
    if names is not None and "weft" not in names.split(","):
        return f"the plugin is off by {allowed}={names}"
    return "the plugin is on"
