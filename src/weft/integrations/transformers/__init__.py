"""A Transformers model's tensor parallelism by weft: model = weft.hf.weave(model).

Transformers leaves a full activation on every rank behind each row-parallel linear: a GEMM, NCCL's all-reduce, the add
of the residual and the norm, one after another, and 25 us of host time for each linear that it wraps. A woven model
computes the same in other steps:

    linears          this rank's part alone, without wrappers; the row-parallel ones leave partial sums
    joints           `all_reduce_rms_norm`: sum over ranks, residual and norm in one, where the residual is held by
                     rows at their owners if tokens are many
    attention        queries, keys and values in one GEMM; norms of heads and rotary embedding in one launch
    MLP              gate and up in one GEMM, SiLU-mul in one launch
    many tokens      in two parts, one's joint under the other's GEMMs

Decoder layers hand on (residual, normed) in place of hidden states; the model between them does not look inside. What
Transformers does beside (embedding, attention, caches, masks, generate) stays its own, and so does the output head of a
model that it has not split. For inference.

Beside `weave`: `paged`, an attention for continuous batching, and `styles`, single linears of any architecture, before
loading.
"""

from .moe import register_experts
from .paged import paged
from .styles import Styles, styles
from .weaving import repack, report, unweave, weave

__all__ = ["Styles", "paged", "register_experts", "repack", "report", "styles", "unweave", "weave"]
