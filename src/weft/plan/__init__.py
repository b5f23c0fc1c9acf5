from .plan import KINDS, Decomposed, Fused, OneShot, Plan, Sequential, Signaled, TwoShot

__all__ = ["KINDS", "Decomposed", "Fused", "OneShot", "Plan", "Sequential", "Signaled", "TwoShot"]
