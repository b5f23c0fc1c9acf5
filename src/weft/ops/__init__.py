from .api import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"]
