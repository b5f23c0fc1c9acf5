"""An MoE layer by quack's grouped GEMMs, in the design of SonicMoE (Guo et al. 2025, arXiv:2512.14080): GEMM 1 gathers
the tokens' rows by an index and computes the SwiGLU in its epilogue, GEMM 2 writes its rows in the order of the
experts, and one kernel sums every token's rows.

The router and the tables are weft's (`moe.gate`, `share_routes`, `run_builder`, with tiles of one row, so that no row
is padded): They take four launches, cost less than a sort, and do not wait for the host. weft's kernel also sums the
rows. The two GEMMs are quack's.

`python -m bench.common.quack_moe TILE_M TILE_N CLUSTER_M PINGPONG` compiles both GEMMs in one form into quack's cache and checks them; it
exits with 0 if they are right.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl

import weft
from bench.common.timing import RIGHT, error_of
from weft import moe
from weft.backends.library_gemm import Form
from weft.kernel_launch import prepared
from weft.ops.moe.expert_parallel.kernels import RoutedRows, store_sums, weighted_sum
from weft.ops.moe.routing.route_tables import TableSizes, builder_of, run_builder, share_routes

# The forms that quack 0.6.5 tunes on Hopper for a gathering GEMM, and also single CTAs and tiles of 64 rows for experts
# with few rows, which quack does not try.
FORMS = (
    *(Form(128, n, cluster, True) for n in (128, 160, 192) for cluster in (2, 1)),
    *(Form(128, 256, cluster, False) for cluster in (2, 1)),
    *(Form(256, n, 2, False) for n in (128, 160, 192)),
    Form(192, 128, 2, True),
    Form(128, 224, 2, False),
    *(Form(64, n, 1, True) for n in (128, 256)),
)
TimeOf = Callable[[dict[str, Callable[[], object]]], dict[str, float]]


class Routed(NamedTuple):
    """Routes in the order of their experts. starts [E + 1]: the first row of every expert; tokens [T k]: the token of
    each row; route_rows [T k]: the row of every route; all int32. The weights of the routes are float32 [1, T, k]."""

    starts: torch.Tensor
    tokens: torch.Tensor
    route_rows: torch.Tensor
    weights: torch.Tensor


@weft.jit
def sum_routes(y, route_rows, weights, out, T, H: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr):
    """out [T, H] = the weighted sum of every token's K rows of y [T K, H], in float32. Each program sums one token's
    COLS columns."""
    PARTS: tl.constexpr = (H + COLS - 1) // COLS
    token = tl.program_id(0) // PARTS
    cols = tl.program_id(0) % PARTS * COLS + tl.arange(0, COLS)[None, :]
    acc, _ = weighted_sum(RoutedRows(y, route_rows, weights, None), token, T - token, cols, H, K, 1, COLS)
    store_sums(acc, None, out, token + tl.arange(0, 1), T, cols, H)


@prepared
def _sum_routes(world: weft.World, tokens: int, h: int, k: int) -> weft.Launch:
    cols = 1024 if h >= 1024 else 128
    programs = tokens * -(-h // cols)
    return weft.Launch(world, sum_routes, programs, dict(num_warps=4, local=True), T=tokens, H=h, K=k, COLS=cols)


def interleaved(w13: torch.Tensor) -> torch.Tensor:
    """Return [E, 2 I, H] with gate rows and up rows in pairs, as quack's gated epilogue needs them, from gate rows
    followed by up rows."""
    return torch.stack(w13.chunk(2, 1), 2).flatten(1, 2)


@functools.cache
def _config(form: Form) -> Any:
    from quack.gemm_config import GemmConfig

    tile_m, tile_n, cluster_m, pingpong = (
        form  # one object for each form, because quack caches its preparation by the identity of the object
    )
    return GemmConfig(
        tile_m=tile_m, tile_n=tile_n, pingpong=pingpong, cluster_m=cluster_m, cluster_n=1, is_dynamic_persistent=False
    )


def gated_gemm(
    form: Form, x: torch.Tensor, w13: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Return [rows, I], the SwiGLU of x[tokens] @ w13[e].T for each expert e: x is [T, H], and w13 is [E, 2 I, H] with
    interleaved rows."""
    from quack.gemm_interface import gemm_gated

    _, hidden = gemm_gated(
        x,
        w13.transpose(1, 2),
        activation="swiglu",
        store_preact=False,
        cu_seqlens_m=starts,
        A_idx=tokens,
        tuned=False,
        config=_config(form),
    )
    return hidden


def second_gemm(form: Form, hidden: torch.Tensor, w2: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return [rows, H], hidden [rows, I] @ w2[e].T for each expert e; w2 is [E, H, I]."""
    from quack.gemm import gemm

    y = hidden.new_empty(hidden.shape[0], w2.shape[1])
    tile_m, tile_n, cluster_m, pingpong = form
    gemm(hidden, w2, y, None, None, tile_m, tile_n, cluster_m, 1, pingpong=pingpong, cu_seqlens_m=starts)
    return y


class QuackExperts:
    """A layer's experts, with GEMMs in the forms `gated_form` and `down_form`. w13 [E, 2 I, H], w2 [E, H, I]: the
    operands of `moe.moe`, unpacked."""

    def __init__(self, world: weft.World, w13: torch.Tensor, w2: torch.Tensor, k: int) -> None:
        self.world, self.w13, self.w2, self.k = world, interleaved(w13), w2, k
        self.gated_form = self.down_form = FORMS[0]

    def routed(self, logits: torch.Tensor) -> Routed:
        tokens, experts = logits.shape
        ids, weights = moe.gate(logits, self.k, world=self.world)
        # The tables of a buffer do not include a list of tiles.
        builder, tables = builder_of(self.world, self.k, TableSizes(experts, tokens, 1), buffer_index=0)
        weights_all = builder.routes.shared_weights.local
        share_routes(self.world, builder.routes, ids, weights)
        run_builder(self.world, builder, tables, weights_all)
        return Routed(tables.offsets, tables.sources[: tokens * self.k], tables.route_rows, weights_all)

    def experts(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        """Return [T k, H], the rows in the order of the experts. Row 0 is finite even if no expert has a row."""
        hidden = gated_gemm(self.gated_form, x, self.w13, routed.starts, routed.tokens)
        y = second_gemm(self.down_form, hidden, self.w2, routed.starts)
        y[:1].nan_to_num_()
        return y

    def __call__(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return self.sums(x, self.routed(logits))

    def sums(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        """Return [T, H], the weighted sum of every token over the token's routes."""
        world, (tokens, h) = self.world, x.shape
        stream, out = world.current_stream(), torch.empty_like(x)
        if x.is_cuda:
            y = self.experts(x, routed)
        else:  # emulated streams run only later
            y = world.empty((tokens * self.k, h), x.dtype)
            world.call(lambda: y.copy_(self.experts(x, routed)), [x, *routed], [y], stream)
        arguments = dict(y=y, route_rows=routed.route_rows, weights=routed.weights, out=out)
        _sum_routes(world, tokens, h, self.k)(stream, **arguments)
        return out

    def tune(self, x: torch.Tensor, routed: Routed, forms: Sequence[Form], time_of: TimeOf) -> None:
        """Choose the fastest of these forms for each GEMM with this routing. Raises RuntimeError if no form runs."""
        self.gated_form = fastest({f: lambda f=f: gated_gemm(f, x, self.w13, *routed[:2]) for f in forms}, time_of)
        hidden = gated_gemm(self.gated_form, x, self.w13, *routed[:2])
        self.down_form = fastest({f: lambda f=f: second_gemm(f, hidden, self.w2, routed[0]) for f in forms}, time_of)


def local_routes(ids: torch.Tensor, weights: torch.Tensor, first_expert: int, local: int) -> Routed:
    """Return the routes to the `local` experts from `first_expert` on, for `QuackExperts.sums`. The rows of routes to
    other experts come after the rows that `starts` covers, so that no GEMM computes them; such a route reads row 0 with
    weight 0."""
    expert = ids.flatten().long() - first_expert
    is_local = (expert >= 0) & (expert < local)
    in_order, order = torch.where(is_local, expert, local).sort(stable=True)
    starts = torch.searchsorted(in_order, torch.arange(local + 1, device=ids.device), out_int32=True)
    rows = torch.where(is_local, order.argsort(), 0).int()
    kept = torch.where(is_local.view(ids.shape), weights.float(), 0)
    return Routed(starts, (order // ids.shape[1]).int(), rows, kept[None])


def fastest(fns: Mapping[Form, Callable[[], torch.Tensor]], time_of: TimeOf) -> Form:
    """Return the fastest form among the forms that run."""
    runs: dict[str, Callable[[], object]] = {}
    forms, reason = {str(form): form for form in fns}, ""
    for form, fn in fns.items():
        try:
            fn()
            runs[str(form)] = fn
        except Exception as error:  # some forms support only some shapes
            reason = f"{type(error).__name__}: {error}"
    if not runs:
        raise RuntimeError(f"no form of quack's GEMM runs; the last one: {reason}")
    us = time_of(runs)
    return forms[min(us, key=lambda name: us[name])]


def usable(seconds: float, forms: Sequence[Form] = FORMS) -> list[Form]:
    """Return the forms with correct results among the forms that could be tried within `seconds`. If quack has a folder
    for compiled code (QUACK_CACHE_DIR), each form is tried only once."""
    kept = Path(os.environ["QUACK_CACHE_DIR"]) / "right.json" if "QUACK_CACHE_DIR" in os.environ else None
    verdicts = {Form(*form): right for *form, right in json.loads(kept.read_text())} if kept and kept.exists() else {}
    verdicts |= tried(seconds, [form for form in forms if form not in verdicts])
    if kept is not None and any(verdicts.values()):
        kept.write_text(json.dumps([[*form, right] for form, right in verdicts.items()]))
    return [form for form in forms if verdicts.get(form)]


def tried(seconds: float, forms: Sequence[Form]) -> dict[Form, bool]:
    """Return, for each form that a process tried within `seconds`, whether its result was correct. Processes on all
    cores try forms concurrently, and the compiled code stays in quack's cache."""
    waiting, running, verdicts = list(forms), dict[Form, subprocess.Popen[bytes]](), dict[Form, bool]()
    deadline = time.time() + seconds
    while (waiting or running) and time.time() < deadline:
        while waiting and len(running) < max(1, (os.cpu_count() or 2) - 1):
            form = waiting.pop(0)
            command = [sys.executable, "-m", __spec__.name, *(str(int(n)) for n in form)]
            running[form] = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        for form, process in list(running.items()):
            if process.poll() is not None:
                del running[form]
                verdicts[form] = process.returncode == 0
        time.sleep(0.1)
    for process in running.values():
        process.kill()
        process.wait()
    return verdicts


def check(form: Form) -> None:
    """Check both GEMMs in this form against float32, with ragged groups, one of which is empty."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, w13, w2 = (
        torch.randn(*shape, device="cuda", generator=generator).bfloat16() * 0.1
        for shape in ((200, 512), (4, 768, 512), (4, 512, 384))
    )
    counts = [130, 0, 301, 7]
    starts = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    tokens = torch.randint(200, (sum(counts),), device="cuda", generator=generator).int()
    hidden = gated_gemm(form, x, interleaved(w13), starts, tokens)
    y = second_gemm(form, hidden, w2, starts)
    for rows, w, v, hidden_part, y_part in zip(
        x[tokens].split(counts), w13, w2, hidden.split(counts), y.split(counts), strict=True
    ):
        gate, up = (rows.float() @ w.float().t()).chunk(2, -1)
        if len(rows):
            assert (
                error_of(hidden_part, F.silu(gate) * up) < RIGHT
                and error_of(y_part, hidden_part.float() @ v.float().t()) < RIGHT
            )


if __name__ == "__main__":
    started, (m, n, cluster, pingpong) = time.time(), map(int, sys.argv[1:])
    try:
        check(Form(m, n, cluster, bool(pingpong)))
        outcome = "right"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"[:300]
    print(
        f"quack {m}x{n}, cluster {cluster}, pingpong {pingpong}: {outcome}, {time.time() - started:.0f} s", flush=True
    )
    sys.exit(outcome != "right")
