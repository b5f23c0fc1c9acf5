"""Reference decoders on weft's ops."""

from .cache import Batch, Cache, Layout
from .config import Config
from .llama import Graphs, Llama

__all__ = ["Batch", "Cache", "Config", "Graphs", "Layout", "Llama"]
