from .all_reduce.api import all_reduce, all_reduce_rms_norm
from .api import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

__all__ = ["all_gather_matmul", "all_reduce", "all_reduce_rms_norm", "matmul_all_reduce", "matmul_reduce_scatter"]
