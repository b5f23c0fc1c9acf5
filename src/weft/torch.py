"""weft as the implementation of torch's own operators (`integrations/torch_async_tp`)."""

from .integrations.torch_async_tp import AsyncTP, async_tp

__all__ = ["AsyncTP", "async_tp"]
