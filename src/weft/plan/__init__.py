from .plan import KINDS, Decomposed, Fused, OneShot, Plan, Sequential, TwoShot

__all__ = ["KINDS", "Decomposed", "Fused", "OneShot", "Plan", "Sequential", "TwoShot"]
