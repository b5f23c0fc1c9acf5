"""weft as a backend of Transformers models (`integrations/transformers`)."""

from .integrations.transformers import Styles, paged, register_experts, repack, report, styles, unweave, weave

__all__ = ["Styles", "paged", "register_experts", "repack", "report", "styles", "unweave", "weave"]
