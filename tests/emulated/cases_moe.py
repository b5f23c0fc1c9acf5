"""Layers of experts, whole or split by columns: shapes, weights and routings, and the results and gradients that every
plan must produce. Each function runs on one rank. A `Run` is a function that calls a layer; cases_expert_parallel.py
and cases_tensor_parallel.py define them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import weft
from tests.emulated.cases import distance, draw, on_stream
from weft import moe
from weft.ops.moe.call import Layer, Weights
from weft.plans import Plan

Ids = Callable[[int, int, int, Layer, int], torch.Tensor]  # (call, rank, T, layer, world) to int32 [T, k]
Tensors = Mapping[str, torch.Tensor | None]
Run = Callable[..., torch.Tensor]  # (world, model, ids, *Tensors of NAMES); options: rows, plan, keep
NAMES = ("x", "weights", "w13", "w2", "b13", "b2", "shared")


# -- routings ----------------------------------------------------------------------------------------------------------


def at_random(call: int, rank: int, t: int, layer: Layer, world: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(100 * call + rank)
    return torch.rand(t, layer.experts, generator=g).topk(layer.k, -1).indices


def some_nowhere(call: int, rank: int, t: int, layer: Layer, world: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(100 * call + rank + 50)
    ids = at_random(call, rank, t, layer, world)
    return torch.where(torch.rand(ids.shape, generator=g) < 0.4, -1, ids)


def to_few(call: int, rank: int, t: int, layer: Layer, world: int) -> torch.Tensor:
    """Route all tokens of a call to the same experts of one rank, so that most experts are empty. The experts change
    from call to call."""
    return ((call * layer.k + torch.arange(layer.k)) % layer.experts).expand(t, -1)


def nowhere(call: int, rank: int, t: int, layer: Layer, world: int) -> torch.Tensor:
    return torch.full((t, layer.k), -1)


def in_turn(call: int, rank: int, t: int, layer: Layer, world: int) -> torch.Tensor:
    return (at_random, to_few, nowhere, some_nowhere)[call % 4](call, rank, t, layer, world)


# -- one layer ---------------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {  # layers and routings for `layer_case` and `training_case`
    "gelu": dict(activation="gelu", biases=True, inner=40),
    "gpt_oss": dict(activation="gpt_oss", biases=True, hidden=24, dtype=torch.float16),
    "some nowhere": dict(ids_of=some_nowhere, k=3),
    "to few": dict(ids_of=to_few, k=1, biases=True),
    "nowhere": dict(ids_of=nowhere),
    "uneven": dict(tokens=(40, 31)),
}


def interleaved(w: torch.Tensor, block: int) -> torch.Tensor:
    """Interleave gate and up [El, 2 I, ..] into blocks of rows [El, blocks, 2, block, ..], and pad the last block."""
    gate, up = w.chunk(2, 1)
    inner = gate.shape[1]
    blocks = -(-inner // block)
    gate_up = w.new_zeros(w.shape[0], 2, blocks * block, *w.shape[2:])
    gate_up[:, 0, :inner], gate_up[:, 1, :inner] = gate, up
    return gate_up.view(w.shape[0], 2, blocks, block, *w.shape[2:]).transpose(1, 2).contiguous()


def expert(
    x: torch.Tensor, w13: Any, w2: Any, b13: Any, b2: Any, activation: str, kept: torch.dtype | None = None
) -> torch.Tensor:
    """Compute one expert. The activation's input is rounded to the dtype `kept`; its gradient ignores the rounding."""
    gate_up = x @ w13.t() + b13
    if kept is not None:
        gate_up = gate_up.detach().to(kept).to(gate_up.dtype) + (gate_up - gate_up.detach())
    if activation == "gelu":
        return torch.nn.functional.gelu(gate_up) @ w2.t() + b2
    gate, up = gate_up.chunk(2, -1)
    if activation == "gpt_oss":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ w2.t() + b2
    return (torch.nn.functional.silu(gate) * up) @ w2.t() + b2


class Model:
    """The weights of one layer: all ranks' weights on the host, and this rank's on the device. A rank has whole experts
    or, if `tp_size` ranks share each expert, `inner` columns of each."""

    def __init__(self, world: weft.World, layer: Layer, biases: bool, seed: int = 0, tp_size: int = 1) -> None:
        e, h, i, wide = layer.experts, layer.hidden, layer.inner, 1 if layer.activation == "gelu" else 2
        self.layer, self.tp_size, self.inner = layer, tp_size, i // tp_size
        self.ranks, self.rank, self.block = world.size, world.rank, world.backend.scale.interleave
        self.w13 = draw(seed + 1, e, wide * i, h, dtype=layer.dtype) * 0.2
        self.w2 = draw(seed + 2, e, h, i, dtype=layer.dtype) * 0.2
        self.b13, self.b2 = (draw(seed + j, e, n, dtype=layer.dtype) * biases for j, n in ((3, wide * i), (4, h)))
        if layer.activation == "gpt_oss":
            self.w13 *= 8  # so that the activation clamps some values
        w13, w2, b13, b2 = (t.contiguous().to(world.device) for t in self.part(*self.whole))
        adds_b2 = biases and self.rank % tp_size == 0
        self.local_weights = Weights(w13, w2, b13 if biases else None, b2 if adds_b2 else None)

    @property
    def whole(self) -> tuple[torch.Tensor, ...]:
        return self.w13, self.w2, self.b13, self.b2

    def part(
        self, w13: torch.Tensor, w2: torch.Tensor, b13: torch.Tensor, b2: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return this rank's part of all experts' weights or gradients, in the layout of the ops."""
        local = self.layer.experts * self.tp_size // self.ranks
        group, part = divmod(self.rank, self.tp_size)
        experts, columns = slice(group * local, (group + 1) * local), slice(part * self.inner, (part + 1) * self.inner)

        def part_of_w13(t: torch.Tensor) -> torch.Tensor:
            if self.layer.activation == "gelu":
                return t[experts, columns]
            halves = [half[:, columns] for half in t[experts].chunk(2, 1)]
            return interleaved(torch.cat(halves, 1), self.block)

        return part_of_w13(w13), w2[experts][:, :, columns], part_of_w13(b13), b2[experts]

    @property
    def flat(self) -> Weights:
        """Return the weights in the layout of the plans' steps."""
        w13, w2, b13, b2 = self.local_weights
        local, h = w13.shape[0], w13.shape[-1]
        return Weights(w13.reshape(local, -1, h), w2, None if b13 is None else b13.reshape(local, -1), b2)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """float32 [T, H]."""
        out = torch.zeros(x.shape, dtype=torch.float32)
        for e in range(self.layer.experts):
            t, slot = (ids == e).nonzero(as_tuple=True)
            y = expert(x[t].float(), *(w[e].float() for w in self.whole), self.layer.activation)
            out.index_add_(0, t, weights[t, slot, None] * y)
        return out


class Routed(NamedTuple):
    """One rank's operands of a call, on the host. `dy` is the gradient of the result."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor
    dy: torch.Tensor


def routed(call: int, rank: int, t: int, layer: Layer, world: int, ids_of: Ids = at_random) -> Routed:
    seed = 1000 * call + 10 * rank
    return Routed(
        draw(seed, t, layer.hidden, dtype=layer.dtype),
        ids_of(call, rank, t, layer, world).int().contiguous(),
        draw(seed + 1, t, layer.k, dtype=torch.float32).abs(),
        draw(seed + 2, t, layer.hidden, dtype=layer.dtype),
        draw(seed + 3, t, layer.hidden, dtype=layer.dtype),
    )


def counts_of(tokens: Sequence[int], call: int, ranks: int) -> list[int]:
    """Return every rank's number of tokens, which differs in every call."""
    return [tokens[(rank + call) % len(tokens)] for rank in range(ranks)]


def values_of(model: Model, operands: Sequence[torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Return the arguments of a `Run` in the order of NAMES: x, weights, shared, and the model's weights."""
    x, weights, shared = operands
    return dict(zip(NAMES, (x, weights, *model.local_weights, shared), strict=True))


# -- calls -------------------------------------------------------------------------------------------------------------


class Memory:
    """One rank's operands in a stream-ordered program. Operations on the current stream rewrite the operands for every
    call and copy the results, without any synchronisation."""

    def __init__(self, world: weft.World) -> None:
        self.world, self.tensors = world, dict[Any, torch.Tensor]()

    def write(self, name: Any, values: torch.Tensor) -> torch.Tensor:
        stream = self.world.current_stream()
        held = self.tensors.setdefault((stream, name, values.shape), self.world.empty(values.shape, values.dtype))
        self.world.call(lambda: held.copy_(values), [], [held], stream)
        return held

    def copy(self, t: torch.Tensor) -> torch.Tensor:
        copied = self.world.empty(t.shape, t.dtype)
        self.world.call(lambda: copied.copy_(t), [t], [copied], self.world.current_stream())
        return copied

    def call(
        self, run: Run, model: Model, operands: Routed, shared: bool = False, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of a layer, and its reference."""
        x, ids, weights, shared_out, _ = operands
        values = values_of(
            model, [self.write("x", x), self.write("weights", weights), self.write("shared", shared_out)]
        )
        values |= dict(out=self.write("out", x)) | ({} if shared else dict(shared=None))
        actual = self.copy(run(self.world, model, self.write("ids", ids), values, **options))
        expected = model(x, ids, weights)
        return actual, expected + shared_out.float() if shared else expected


def layer_case(
    world: weft.World, run: Run, experts: int = 4, k: int = 2, hidden: int = 32, inner: int = 24,
    tokens: Sequence[int] = (7, 5, 0, 9), activation: str = "swiglu", biases: bool = False, shared: bool = False, calls: int = 3,
    ids_of: Ids = at_random, plan: str | Plan | Sequence[Plan] = "dispatched", dtype: torch.dtype = torch.bfloat16,
    tp_size: int = 1, layers: int = 1, streams: Sequence[str] = ("main",), **options: Any,
) -> float:  # fmt: skip
    """Return the largest error over calls with new tokens and routings, each of which passes through all layers. Calls
    cycle through the plans and the streams without any synchronisation. `inner` is a rank's number of columns."""
    models = [
        Model(
            world, Layer(max(tokens) + 1 + 5 * j, experts, k, hidden + 8 * j, inner * tp_size, dtype, activation), biases,
            10 * j, tp_size,
        )
        for j in range(layers)
    ]  # fmt: skip
    plans = [plan] if isinstance(plan, str | Plan) else plan
    memory, pairs = Memory(world), list[tuple[torch.Tensor, torch.Tensor]]()
    for call in range(calls):
        counts = counts_of(tokens, call, world.size)
        with on_stream(world, streams[call % len(streams)]):
            for j, model in enumerate(models):
                operands = routed(call + 20 * j, world.rank, counts[world.rank], model.layer, world.size, ids_of)
                chosen = plans[len(pairs) % len(plans)]
                pairs.append(memory.call(run, model, operands, shared, rows=counts, plan=chosen, **options))
    world.synchronize()
    return max((distance(actual, expected) for actual, expected in pairs if actual.numel()), default=0.0)


# -- gradients ---------------------------------------------------------------------------------------------------------


def reference_gradients(model: Model, operands: Sequence[Routed]) -> dict[str, torch.Tensor]:
    """Return the float64 gradients of this rank's x, weights and shared, and of its part of the experts. The gradients
    are computed for the whole layer in one process. `operands` lists every rank's operands. The activation's input is
    rounded as the op saves it, because the rounding determines on which side of a clamp's limit the input falls."""
    me, experts = model.rank, [t.double().requires_grad_() for t in model.whole]
    xs = [o.x.double().requires_grad_() for o in operands]
    weights = [o.weights.double().requires_grad_() for o in operands]
    total = torch.zeros((), dtype=torch.float64)
    for x, weight, o in zip(xs, weights, operands, strict=True):
        for e in range(model.layer.experts):
            t, slot = (o.ids == e).nonzero(as_tuple=True)
            y = expert(x[t], *(w[e] for w in experts), model.layer.activation, model.layer.dtype)
            total = total + (weight[t, slot, None] * y * o.dy.double()[t]).sum()
    wanted = [xs[me], weights[me], *experts]
    grads = torch.autograd.grad(total, wanted, allow_unused=True)
    dx, dweights, *of_experts = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, grads, strict=True)]
    return dict(zip(NAMES, (dx, dweights, *model.part(*of_experts), operands[me].dy), strict=True))


def gradients(
    world: weft.World, run: Run, model: Model, operands: Routed, wants: Sequence[str] = NAMES, **options: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Return the result and the requested gradients."""
    x, ids, weights, shared, dy = (t.to(world.device) for t in operands)
    leaves = {
        name: None if t is None else t.detach().clone().requires_grad_(name in wants)
        for name, t in values_of(model, (x, weights, shared)).items()
    }
    y = run(world, model, ids, leaves, **options)
    y.backward(dy)
    return y.detach(), {name: None if t is None else t.grad for name, t in leaves.items()}


def training_case(
    world: weft.World, run: Run, experts: int = 4, k: int = 2, hidden: int = 32, inner: int = 24,
    tokens: Sequence[int] = (7, 5, 0, 9), tp_size: int = 1, activation: str = "swiglu", biases: bool = False, calls: int = 3,
    ids_of: Ids = at_random, plan: Any = "dispatched", keep: Sequence[str] = moe.KEEPS, dtype: torch.dtype = torch.bfloat16,
    wants: Sequence[str] = NAMES,
) -> dict[str, float]:  # fmt: skip
    """Return the largest error of each operand's gradient over calls with new tokens and routings that save different
    tensors, without any synchronisation. `inner` is a rank's number of columns."""
    layer = Layer(max(tokens), experts, k, hidden, inner * tp_size, dtype, activation)
    model, pairs = Model(world, layer, biases, tp_size=tp_size), []
    for call in range(calls):
        counts = counts_of(tokens, call, world.size)
        operands = [routed(call, r, t, layer, world.size, ids_of) for r, t in enumerate(counts)]
        kept = keep[call % len(keep)]
        _, grads = gradients(world, run, model, operands[world.rank], wants, rows=counts, plan=plan, keep=kept)
        pairs.append((grads, reference_gradients(model, operands)))
    world.synchronize()
    worst = dict.fromkeys(wants, 0.0)
    for grads, expected in pairs:
        for name in NAMES:
            gradient, has = grads[name], getattr(model.local_weights, name, 0) is not None
            assert (gradient is not None) == (name in wants and has)
            if gradient is not None and gradient.numel():
                worst[name] = max(worst[name], distance(gradient.cpu(), expected[name]))
    return worst
