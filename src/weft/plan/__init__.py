from .plan import KINDS, Decomposed, Fused, Plan, Sequential, Signaled

__all__ = ["KINDS", "Decomposed", "Fused", "Plan", "Sequential", "Signaled"]
