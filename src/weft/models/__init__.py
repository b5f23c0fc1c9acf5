"""Decoders (Llama, Mistral, Qwen, Mixtral) on weft's operators."""

from .cache import Batch, Cache, Layout
from .config import Config
from .graphs import Graphs
from .llama import Llama

__all__ = ["Batch", "Cache", "Config", "Graphs", "Layout", "Llama"]
