"""weft inside other projects: torch, Transformers, vLLM and SGLang."""

import os


def plugin_state(switch: str, allowed: str) -> str:
    """Return whether a plugin is on, as set by two environment variables: `switch`, weft's own, and `allowed`, the
    engine's list."""
    value = os.environ.get(switch)
    if (value or "1") != "1":
        return f"the plugin is off by {switch}={value}"
    names = os.environ.get(allowed)
    if names is not None and "weft" not in names.split(","):
        return f"the plugin is off by {allowed}={names}"
    return "the plugin is on"
