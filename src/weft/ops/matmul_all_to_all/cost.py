"""Models of GEMM + all-to-all: a model of signaled plans, and a model of the sequential plan, which uses cuBLAS, sorts
rows by destination and uses NCCL."""

from __future__ import annotations

from ...cost.model import AnyCost, GemmCall, Parts, SequentialCost, has_16_byte_rows
from ...cost.queues import Step, Work, side_by_side
from ...cost.signaled import Moving, SignaledCost
from ...plans import Plan, Sequential, Signaled


class SortedCost(SequentialCost):
    """Rows are sorted by destination rank between GEMM and all-to-all."""

    def sort_us(self, p: Parts, call: GemmCall) -> float:
        return p.optional("local", call.moved(call.m))


class SignaledExchange(SignaledCost):
    """When every rank has computed a group of tiles, copy engines pull the group, or NCCL's all-to-all sends it."""

    def in_place(self, n: int) -> bool:
        return True

    def takes(self, call: GemmCall) -> bool:
        return has_16_byte_rows(call)

    def by_copies(self, p: Parts, call: GemmCall, plan: Signaled, fit: Moving | None) -> list[Step]:
        fit = fit or Moving()
        barrier, nbytes, share = p.latency("barrier") + fit.gap, self.nbytes(call), (p.world - 1) / p.world
        works = [Work("gemm", "enter", barrier)]
        for gemm, before, done in self.groups_by_copies(p, call, plan):
            works.append(gemm)
            part = (done - before) * share
            if part > 0:
                pullable = Work("meet", "barrier", barrier, gemm)
                works += [pullable, Work("comm 3", "copy", p.latency("copy", part * nbytes) * fit.copy, pullable)]
        return side_by_side(works, p.slowdown("copy", 0))


EXCHANGE_COSTS: dict[type[Plan], AnyCost] = {Sequential: SortedCost(), Signaled: SignaledExchange()}
