"""weft as a plugin of vLLM (`integrations/vllm`)."""

from .integrations.vllm import register, report

__all__ = ["register", "report"]
