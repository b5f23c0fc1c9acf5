from .plan import KINDS, Decomposed, Fused, Plan, Sequential

__all__ = ["KINDS", "Decomposed", "Fused", "Plan", "Sequential"]
