"""weft inside other projects: torch, Transformers, vLLM and SGLang."""

import os


def plugin_state(switch: str, allowed: str, default: str = "1") -> str:
    """Return whether a plugin is on, from two environment variables: `switch`, weft's own, whose value is `default` if
    it is not set, and `allowed`, the engine's list."""
    value = os.environ.get(switch)
    if (value or default) != "1":
        return f"the plugin is off {f'by {switch}={value}' if value else f'without {switch}=1'}"
    names = os.environ.get(allowed)
    if names is not None and "weft" not in names.split(","):
        return f"the plugin is off by {allowed}={names}"
    return "the plugin is on"
