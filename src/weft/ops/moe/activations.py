"""The activations of experts, as constants of kernels."""

import triton.language as tl

# silu(gate) * up; gelu; (up + 1) * gate * sigmoid(1.702 gate) with gate at most 7, up clamped to [-7, 7]
SWIGLU, GELU, CLAMPED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
