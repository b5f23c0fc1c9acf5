"""Integrations of weft into torch, Transformers, vLLM and SGLang."""

import os
from importlib import metadata


def installed_version(*packages: str) -> str | None:
    """Return the version of the first of these packages that is installed, or None."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def switched_off(switch: str) -> bool:
    """Return whether weft's environment variable `switch` turns a plugin off, that is, has a value other than 1."""
    return (os.environ.get(switch) or "1") != "1"


def plugin_state(switch: str, allowed: str) -> str:
    """Return whether a plugin is on. Two environment variables decide this: `switch`, which is weft's own, and
    `allowed`, which is the engine's list of plugins."""
    if switched_off(switch):
        return f"the plugin is off by {switch}={os.environ[switch]}"
    names = os.environ.get(allowed)
    if names is not None and "weft" not in names.split(","):
        return f"the plugin is off by {allowed}={names}"
    return "the plugin is on"
