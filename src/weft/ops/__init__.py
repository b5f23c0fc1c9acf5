"""The definitions of all operators: importing any of them registers all of them."""
# ruff: noqa: F401

from . import activation, norm, product, quantize, rotary
from .all_gather_matmul import op as _all_gather
from .all_reduce import op as _all_reduce
from .attention import op as _attention
from .matmul_all_to_all import op as _all_to_all
from .matmul_all_to_all_routed import op as _all_to_all_routed
from .matmul_reduce import op as _reduce
from .moe.dispatch_combine import op as _dispatch_combine
from .moe.expert_parallel import op as _moe
from .moe.routing import router
from .moe.tensor_parallel import op as _moe_tensor_parallel
