"""weft under other projects' engines."""

import os


def plugin_state(off: str, allowed: str) -> str:
    """Whether an engine's plugin is on, by two variables of the environment: weft's own, and the engine's list."""
    if os.environ.get(off) == "0":
        return f"the plugin is off by {off}=0"
    names = os.environ.get(allowed)
    if names is not None and "weft" not in names.split(","):
        return f"the plugin is off by {allowed}={names}"
    return "the plugin is on"
