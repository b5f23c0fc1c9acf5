"""Tensor parallelism of Transformers models, computed by weft: model = weft.hf.weave(model).

For each row-parallel linear Transformers runs a GEMM, NCCL's all-reduce, the residual add and the norm in sequence,
with a full activation on every rank and 25 us of host time for each wrapped linear. A woven model computes the same
results in different steps:

    linears          this rank's shard, without wrappers; row-parallel linears return partial sums
    between them     `all_reduce_rms_norm`: sum over ranks, residual and norm in one kernel; with many tokens each rank
                     holds only its own rows of the residual
    attention        queries, keys and values in one GEMM; head norms and rotary embedding in one launch
    MLP              gate and up in one GEMM, SiLU-mul in one launch
    many tokens      in two parts; one part's all_reduce_rms_norm overlaps the other part's GEMMs

Decoder layers (nn/decoder_layer.py) pass on the residual and its norm in place of hidden states; the model does not
inspect these values between layers. Transformers' own code still computes the embedding, attention, caches, masks and
generate, and also the output head of a model that Transformers has not split. Woven models are for inference only.

`paged` is an attention for continuous batching. `styles`, called before a model of any architecture is loaded, replaces
single linears.
"""

from .moe import register_experts
from .paged import paged
from .styles import Styles, styles
from .weave_model import repack, report, unweave, weave

__all__ = ["Styles", "paged", "register_experts", "repack", "report", "styles", "unweave", "weave"]
