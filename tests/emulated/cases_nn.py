"""Gradients, modules and compilation, written once for every backend: each function runs on one rank and returns its
error, the largest relative Frobenius distance from an unsharded float64 model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import weft
from tests.emulated.cases import distance, draw
from weft.lang.mapping import balanced_rows

Tensor = torch.Tensor


def emulate(fn: Callable[[weft.World], Any], ranks: int, seed: int = 0) -> list[Any]:
    return weft.spmd(fn, ranks, backend="emulated", seed=seed)


def leaf(t: Tensor, world: weft.World, wanted: bool = True) -> Tensor:
    return t.detach().to(world.device, copy=True).requires_grad_(wanted)


def rows_of_rank(world: weft.World, t: Tensor, shards: Sequence[int]) -> Tensor:
    return t.split(list(shards))[world.rank]


def worst(*pairs: tuple[Tensor | None, Tensor | None]) -> float:
    """Return the largest distance; a missing or superfluous gradient is infinitely far."""
    errors = [0.0]
    for actual, expected in pairs:
        if actual is None or expected is None:
            errors.append(0.0 if actual is None and expected is None else float("inf"))
        else:
            errors.append(distance(actual.detach().double().cpu(), expected.detach().double().cpu()))
    return max(errors)


# -- ops ---------------------------------------------------------------------------------------------------------------
def all_gather_grads(
    world: weft.World, shards: Sequence[int], n: int, k: int, plan: Any = "auto", wants: str = "xwb",
    keep: bool = False, through: bool = False, passes: int = 1, dtype: torch.dtype = torch.bfloat16, seed: int = 0,
) -> float:  # fmt: skip
    """`wants` names the operands that need gradients: x, weight (w) and bias (b). With `keep` the call returns the
    gathered activation; with `through` the loss uses it too. `passes` backward passes accumulate the gradients."""
    m, me = sum(shards), world.rank
    xs = draw(seed + 1, m, k, dtype=dtype)
    ws = [draw(seed + 10 + r, n, k, dtype=dtype) * 0.1 for r in range(world.size)]
    bs = [draw(seed + 20 + r, n, dtype=dtype) for r in range(world.size)]
    gs = [draw(seed + 30 + r, m, n, dtype=dtype) for r in range(world.size)]
    hs = [draw(seed + 40 + r, m, k, dtype=dtype) for r in range(world.size)]

    x, w, b = leaf(rows_of_rank(world, xs, shards), world, "x" in wants), leaf(ws[me], world, "w" in wants), None
    if "b" in wants:
        b = leaf(bs[me], world)
    g, h = gs[me].to(world.device), hs[me].to(world.device)
    rows = None if len(set(shards)) == 1 else shards
    for _ in range(passes):
        if keep or through:
            y, full = weft.all_gather_matmul_with_gathered(x, w, b, world=world, plan=plan, rows=rows)
        else:
            y = weft.all_gather_matmul(x, w, b, world=world, plan=plan, rows=rows)
        loss = (y * g).sum()
        if through:
            loss = loss + (full * h).sum()
        loss.backward()
    world.synchronize()

    rx = xs.double().requires_grad_("x" in wants)
    rw = [t.double().requires_grad_("w" in wants) for t in ws]
    rb = [t.double().requires_grad_() for t in bs]
    ys = [rx @ rw[r].t() + (rb[r] if "b" in wants else 0) for r in range(world.size)]
    total = sum((y * g.double()).sum() for y, g in zip(ys, gs, strict=True))
    if through:
        total = total + sum((rx * h.double()).sum() for h in hs)
    total.backward()  # type: ignore[union-attr]
    scale = passes
    dx = None if rx.grad is None else rows_of_rank(world, rx.grad, shards) * scale
    dw = None if rw[me].grad is None else rw[me].grad * scale
    db = rb[me].grad * scale if b is not None else None
    return worst((y, ys[me]), (x.grad, dx), (w.grad, dw), (b.grad if b is not None else None, db))


def reduce_grads(
    world: weft.World, m: int, n: int, k: int, plan: Any = "auto", wants: str = "xwb", everywhere: bool = False,
    rows: Sequence[int] | None = None, passes: int = 1, dtype: torch.dtype = torch.bfloat16, seed: int = 0,
) -> float:  # fmt: skip
    """Check GEMM + reduce-scatter, or GEMM + all-reduce; the arguments are the same as for `all_gather_grads`."""
    me, shards = world.rank, list(rows or balanced_rows(m, world.size))
    xs = [draw(seed + 1 + r, m, k, dtype=dtype) for r in range(world.size)]
    ws = [draw(seed + 10 + r, n, k, dtype=dtype) * 0.1 for r in range(world.size)]
    bias, g = draw(seed + 20, n, dtype=dtype), draw(seed + 30, m, n, dtype=dtype)

    x, w = leaf(xs[me], world, "x" in wants), leaf(ws[me], world, "w" in wants)
    b = leaf(bias.clone(), world) if "b" in wants else None
    dy = (g if everywhere else rows_of_rank(world, g, shards)).to(world.device)
    for _ in range(passes):
        if everywhere:
            y = weft.matmul_all_reduce(x, w, b, world=world, plan=plan)
        else:
            y = weft.matmul_reduce_scatter(x, w, b, world=world, plan=plan, rows=rows)
        (y * dy).sum().backward()
    world.synchronize()

    rx = [t.double().requires_grad_("x" in wants) for t in xs]
    rw = [t.double().requires_grad_("w" in wants) for t in ws]
    rb = bias.double().requires_grad_()
    whole = sum(a @ c.t() for a, c in zip(rx, rw, strict=True)) + (rb if b is not None else 0)
    (whole * g.double()).sum().backward()  # type: ignore[union-attr]
    dx, dw = (None if t.grad is None else t.grad * passes for t in (rx[me], rw[me]))
    db = rb.grad * passes if b is not None and rb.grad is not None else None
    expected = whole if everywhere else rows_of_rank(world, whole, shards)  # type: ignore[arg-type]
    return worst((y, expected), (x.grad, dx), (w.grad, dw), (b.grad if b is not None else None, db))


def silu_grads(world: weft.World, m: int, columns: int, block: int = 0, dtype: torch.dtype = torch.bfloat16) -> float:
    """Check silu_mul and its gradient for halves and for alternating blocks, whose padding must have zero gradients."""
    from weft.ops.activation import silu_mul_blocks

    gate, up, g = (draw(s, m, columns, dtype=dtype) for s in (1, 2, 3))
    if block:
        pad = -columns % block
        parts = [torch.nn.functional.pad(t, (0, pad)).view(m, -1, block) for t in (gate, up)]
        x = leaf(torch.stack(parts, 2).flatten(1), world)
        y = silu_mul_blocks(x, columns, block, world)
    else:
        x = leaf(torch.cat([gate, up], 1), world)
        y = weft.silu_mul(x, world=world)
    (y * g.to(world.device)).sum().backward()
    world.synchronize()
    assert x.grad is not None
    a, b = gate.double().requires_grad_(), up.double().requires_grad_()
    expected = torch.nn.functional.silu(a) * b
    (expected * g.double()).sum().backward()
    if not block:
        return worst((y, expected), (x.grad, torch.cat([a.grad, b.grad], 1)))  # type: ignore[list-item]
    blocks = x.grad.view(m, -1, 2, block)
    gate_up_grads = [blocks[:, :, i].flatten(1) for i in (0, 1)]
    assert not any(t[:, columns:].any() for t in gate_up_grads), "padding must have no gradient"
    return worst((y, expected), (gate_up_grads[0][:, :columns], a.grad), (gate_up_grads[1][:, :columns], b.grad))


# -- modules -----------------------------------------------------------------------------------------------------------
class WholeMLP(torch.nn.Module):
    """Hugging Face's LlamaMLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(hidden, inner, bias=False)
        self.up_proj = torch.nn.Linear(hidden, inner, bias=False)
        self.down_proj = torch.nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def whole_mlp(hidden: int, inner: int, seed: int = 0) -> dict[str, Tensor]:
    return {
        "gate_proj.weight": (draw(seed + 50, inner, hidden).float() * hidden**-0.5).bfloat16(),
        "up_proj.weight": (draw(seed + 51, inner, hidden).float() * hidden**-0.5).bfloat16(),
        "down_proj.weight": (draw(seed + 52, hidden, inner).float() * inner**-0.5).bfloat16(),
    }


def mlp_training(
    world: weft.World, shards: Sequence[int], hidden: int, inner: int, plan: Any = "auto", steps: int = 3,
    rate: float = 0.02, compiled: str = "", keep: bool = False,
) -> float:  # fmt: skip
    """Train ParallelMLP and the unsharded MLP in float64 by SGD. Compare outputs, gradients of the input and of all
    weights, and the weights after every step. Return the largest error divided by the error of torch's unsharded
    bfloat16 MLP, which rounds equally often. `compiled` is a torch.compile backend; with `keep` the module keeps the
    gathered x."""
    state, device = whole_mlp(hidden, inner), world.device
    mlp = weft.nn.ParallelMLP(hidden, inner, world=world, keep_gathered=keep, plan=plan)
    mlp.load_state_dict(state)
    exact, rounded = WholeMLP(hidden, inner).double().to(device), WholeMLP(hidden, inner).bfloat16().to(device)
    for module in (exact, rounded):
        module.load_state_dict(state)
    rows = None if len(set(shards)) == 1 else list(shards)
    run: Any = torch.compile(mlp, backend=compiled, fullgraph=True) if compiled else mlp
    optimizers = [torch.optim.SGD(module.parameters(), rate) for module in (mlp, exact, rounded)]
    worst_ratio = 0.0
    for step in range(steps):
        whole_x, g = (draw(s + step, sum(shards), hidden).to(device) for s in (100, 200))
        x = leaf(rows_of_rank(world, whole_x, shards), world)
        for optimizer in optimizers:
            optimizer.zero_grad()
        y = run(x, rows)
        (y * rows_of_rank(world, g, shards)).sum().backward()
        ours = [y, x.grad, *weight_grads(mlp)]
        references = []
        for module, dtype in ((exact, torch.float64), (rounded, torch.bfloat16)):
            tx = whole_x.to(dtype, copy=True).requires_grad_()
            ty = module(tx)
            (ty * g.to(dtype)).sum().backward()
            references.append(
                [rows_of_rank(world, ty, shards), rows_of_rank(world, tx.grad, shards), *own_weight_grads(mlp, module)]
            )
        for optimizer in optimizers:
            optimizer.step()
        world.synchronize()
        after = weft.nn.full_state_dict(mlp)
        ours += [after[name] for name in state]
        for reference, module in zip(references, (exact, rounded), strict=True):
            reference += [module.state_dict()[name] for name in state]
        for actual, expected, base in zip(ours, *references, strict=True):
            worst_ratio = max(worst_ratio, worst((actual, expected)) / max(worst((base, expected)), 1e-3))
    moved = min(distance(exact.state_dict()[name], value.double().to(device)) for name, value in state.items())
    assert moved > 0.05, f"training changed the weights by only {moved}"
    return worst_ratio


def weight_grads(mlp: weft.nn.ParallelMLP) -> list[Tensor]:
    """Return this rank's parts of the gradients of gate, up and down."""
    assert mlp.gate_up.grad is not None and mlp.down.grad is not None
    blocks = mlp.gate_up.grad.view(-1, 2, mlp.block, mlp.hidden_size)
    gate, up = (blocks[:, i].reshape(-1, mlp.hidden_size) for i in (0, 1))
    assert not gate[mlp.inner :].any() and not up[mlp.inner :].any(), "padding must have no gradient"
    return [gate[: mlp.inner], up[: mlp.inner], mlp.down.grad]


def own_weight_grads(mlp: weft.nn.ParallelMLP, whole: WholeMLP) -> list[Tensor]:
    gate, up, down = (layer.weight.grad for layer in (whole.gate_proj, whole.up_proj, whole.down_proj))
    assert gate is not None and up is not None and down is not None
    part = slice(mlp.world.rank * mlp.inner, (mlp.world.rank + 1) * mlp.inner)
    return [gate[part], up[part], down[:, part]]


def mlp_inference(world: weft.World, shards: Sequence[int], hidden: int, inner: int, plan: Any = "auto") -> float:
    """Check the gated GEMM without gradients and in inference mode."""
    state = whole_mlp(hidden, inner)
    mlp = weft.nn.ParallelMLP(hidden, inner, world=world, plan=plan)
    mlp.load_state_dict(state)
    ref = WholeMLP(hidden, inner).double()
    ref.load_state_dict({k: v.double() for k, v in state.items()})
    whole_x = draw(100, sum(shards), hidden)
    x, rows = rows_of_rank(world, whole_x, shards).to(world.device), None if len(set(shards)) == 1 else list(shards)
    errors = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = mlp(x, rows)
        world.synchronize()
        errors.append(worst((y, rows_of_rank(world, ref(whole_x.double()), shards))))
    return max(errors)


def linear_pair(
    world: weft.World, shards: Sequence[int], width: int, inner: int, reduce: str = "scatter", keep: bool = False
) -> float:
    """Compare a column-parallel and a row-parallel linear layer, both with biases, with the unsharded layers: outputs
    and all gradients."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        up_proj, down_proj = torch.nn.Linear(width, inner).bfloat16(), torch.nn.Linear(inner, width).bfloat16()
    column = weft.nn.ColumnParallelLinear.from_linear(up_proj, world=world, keep_gathered=keep)
    row = weft.nn.RowParallelLinear.from_linear(down_proj, world=world, reduce=reduce)
    whole_x, g = draw(1, sum(shards), width), draw(2, sum(shards), width)
    x = leaf(rows_of_rank(world, whole_x, shards).clone(), world)
    rows = None if len(set(shards)) == 1 else list(shards)
    y = row(column(x, rows), rows)
    (y * (g if reduce == "all" else rows_of_rank(world, g, shards)).to(world.device)).sum().backward()
    world.synchronize()
    rx = whole_x.double().requires_grad_()
    up_proj, down_proj = up_proj.double(), down_proj.double()
    expected = down_proj(up_proj(rx))
    (expected * g.double()).sum().backward()
    n = inner // world.size
    part = slice(world.rank * n, (world.rank + 1) * n)
    assert rx.grad is not None
    return worst(
        (y, expected if reduce == "all" else rows_of_rank(world, expected, shards)),
        (x.grad, rows_of_rank(world, rx.grad, shards)),
        (column.weight.grad, up_proj.weight.grad[part]),  # type: ignore[index]
        (column.bias.grad, up_proj.bias.grad[part]),  # type: ignore[index]
        (row.weight.grad, down_proj.weight.grad[:, part]),  # type: ignore[index]
        (row.bias.grad, down_proj.bias.grad),
    )


def round_trip(world: weft.World, hidden: int, inner: int) -> float:
    """Load an unsharded state dict into a module, load that module's state dict into a second module, and gather the
    second module's unsharded state dict. All bits must be equal. Return 0."""
    state = whole_mlp(hidden, inner)
    model = torch.nn.ModuleDict({"mlp": weft.nn.ParallelMLP(hidden, inner, world=world)})
    model.load_state_dict({f"mlp.{k}": v for k, v in state.items()})
    parts = model.state_dict()
    n = inner // world.size
    shapes = {k: tuple(v.shape) for k, v in parts.items()}
    assert shapes == {
        "mlp.gate_proj.weight": (n, hidden), "mlp.up_proj.weight": (n, hidden), "mlp.down_proj.weight": (hidden, n),
    }, shapes  # fmt: skip
    again = torch.nn.ModuleDict({"mlp": weft.nn.ParallelMLP(hidden, inner, world=world)})
    again.load_state_dict(parts)
    for k, v in weft.nn.full_state_dict(again).items():
        assert torch.equal(v.cpu(), state[k.removeprefix("mlp.")]), k
    for k, v in again["mlp"].named_parameters():
        assert torch.equal(v, dict(model["mlp"].named_parameters())[k]), k
    return 0.0


# -- compilation -------------------------------------------------------------------------------------------------------
def compiled_ops(world: weft.World, backend: str = "aot_eager", dynamic: bool | None = None) -> float:
    """Compile all ops into one graph: results and gradients must be bitwise equal to eager calls. Return 0."""
    from weft.plans import Sequential

    w = world.size

    def fn(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        y, full = weft.all_gather_matmul_with_gathered(x, weight, bias, world=world)
        y = weft.matmul_all_reduce(y, weight, bias, world=world, plan=Sequential())
        y = weft.silu_mul(torch.cat([y, full * 2], 1), world=world)
        return weft.matmul_reduce_scatter(y, weight, bias, world=world, rows=[x.shape[0]] * w), full

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (8, 24) if dynamic else (16,):
        inputs = draw(1 + w, rows, 64), draw(2, 64, 64) * 0.1, draw(3, 64)
        results = []
        for call in (fn, compiled):
            leaves = [leaf(t.clone(), world) for t in inputs]
            y, full = call(*leaves)
            (y.sum() + full.sum()).backward()
            with torch.no_grad():
                z, _ = call(*leaves)
            results.append([y, full, z, *(t.grad for t in leaves)])
        world.synchronize()
        for eager, compiled_result in zip(*results, strict=True):
            # Inductor keeps the values of operations that it fuses in float32
            assert (
                torch.equal(eager, compiled_result)
                if backend == "aot_eager"
                else distance(compiled_result, eager.double()) < 1e-2
            )
    return 0.0


def compiled_out(world: weft.World, backend: str = "aot_eager") -> float:
    """Compile a call with `out=`: the bits must be the same as in an eager call. Return 0."""
    torch._dynamo.reset()

    def fn(x: Tensor, weight: Tensor, gathered: Tensor, reduced: Tensor) -> Tensor:
        hidden = weft.all_gather_matmul(x, weight, world=world, out=gathered)
        return weft.matmul_reduce_scatter(hidden, weight, world=world, out=reduced)

    x, weight = draw(1, 8, 64).to(world.device), draw(2, 64, 64).to(world.device) * 0.1
    outs = [[torch.zeros(rows, 64).to(x) for rows in (8 * world.size, 8)] for _ in range(2)]
    fn(x, weight, *outs[0])
    y = torch.compile(fn, backend=backend, fullgraph=True)(x, weight, *outs[1])
    world.synchronize()
    assert y.data_ptr() == outs[1][1].data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    return 0.0


def mlp_graph(world: weft.World, rows: int, hidden: int, inner: int, replays: int = 20) -> float:
    """Capture ParallelMLP in a CUDA graph: every replay must give the same bits as an eager call with the same plan.
    Return 0."""
    mlp = weft.nn.ParallelMLP(hidden, inner, world=world, plan="fused")
    mlp.load_state_dict(whole_mlp(hidden, inner))
    x = draw(1 + world.rank, rows, hidden).to(world.device)
    with torch.no_grad():
        mlp(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = mlp(x)
        for i in range(replays):
            x.copy_(draw(10 * i + world.rank, rows, hidden))
            graph.replay()
            assert torch.equal(y, mlp(x)), f"replay {i} differs"
    world.synchronize()
    return 0.0


def gpu_cases(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    """Yield the name, the error bound and the function of each GPU case, for a driver that runs all on one World."""
    w = world.size
    inner = 200 * w
    even, uneven, odd = [256] * w, balanced_rows(1000, w), [0, 300, *[33] * (w - 2)]
    for plan in ("auto", "sequential", "decomposed", "fused"):
        for name, s in (("even", even), ("uneven", uneven), ("odd", odd)):
            label = f"{plan}, {name}"
            yield f"all-gather grads {label}", 5e-3, partial(all_gather_grads, world, s, 520, 264, plan)
            yield f"reduce-scatter grads {label}", 5e-3, partial(reduce_grads, world, sum(s), 520, 264, plan, rows=s)
            yield f"mlp training {label}", 1.5, partial(mlp_training, world, s, 256, inner, plan)
            yield f"mlp inference {label}", 1e-2, partial(mlp_inference, world, s, 256, inner, plan)
        yield f"all-reduce grads {plan}", 5e-3, partial(reduce_grads, world, 1000, 520, 264, plan, everywhere=True)
    yield "gathered kept", 5e-3, partial(all_gather_grads, world, even, 520, 264, through=True, passes=2)
    yield "mlp training, gathered kept", 1.5, partial(mlp_training, world, even, 256, inner, keep=True)
    yield "silu of halves", 5e-3, partial(silu_grads, world, 1000, 1376)
    yield "silu of blocks", 5e-3, partial(silu_grads, world, 1000, 200, 64)
    yield "linears", 1e-2, partial(linear_pair, world, uneven, 256, inner)
    yield "linears, all-reduce", 1e-2, partial(linear_pair, world, uneven, 256, inner, "all")
    yield "round trip", 0.0, partial(round_trip, world, 256, inner)
    yield "graph", 0.0, partial(mlp_graph, world, 256, 256, inner)
    yield "compiled ops", 0.0, partial(compiled_ops, world, "inductor")
    yield "compiled ops, symbolic rows", 0.0, partial(compiled_ops, world, "inductor", True)
    yield "compiled out", 0.0, partial(compiled_out, world, "inductor")
    yield "compiled mlp", 1.5, partial(mlp_training, world, even, 256, inner, compiled="inductor")


def gpu_errors(world: weft.World) -> dict[str, tuple[float, float]]:
    """Run every GPU case; return its error and its bound."""
    return {name: (run(), bound) for name, bound, run in gpu_cases(world)}
