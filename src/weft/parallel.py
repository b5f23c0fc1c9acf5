"""weft's tensor-parallel styles for torch's `parallelize_module` (`integrations/torch_parallel_styles`)."""

from .integrations.torch_parallel_styles import ColwiseParallel, RowwiseParallel, SequenceParallel, report

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel", "report"]
