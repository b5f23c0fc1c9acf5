"""The decoder of Llama-family models, tensor-parallel over a World: RMSNorm, grouped-query attention with rotary
embedding, SwiGLU or a mixture of experts, and a key-value cache.

Every rank holds some of the heads and some of the MLP's columns or experts, and the whole embedding and output head.
nn/decoder_layer.py defines the layer; this module adds attention and the MLP. The plan determines how the ranks sum
their partial outputs:

    plain      GEMMs | all-reduce | add, norm              residual [M, H] on every rank
    fused      GEMMs | all_reduce_rms_norm                 residual rows at their owners, or [M, H] if M is small
    woven      the same for two token parts; one's all_reduce_rms_norm overlaps the other's GEMMs (nn/weave.py)
    sequence   all-gather + GEMM .. GEMM + reduce-scatter  residual and norms of this rank's rows

Experts support replicated and sharded tokens (mixture.py). With experts "auto" is "sequence", since the planner
predicts no other plan for them.

In a forward pass the host never waits for the device, and copies nothing to the device: lengths, positions and cache
slots are in a Layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..backends.library_gemm import ScaledOperands
from ..chooser import Choice
from ..compute.elementwise import rotate_and_keep
from ..errors import Unsupported
from ..kernel_launch import Launch, prepared
from ..nn.decoder_layer import (
    HiddenStates,
    ReplicatedStates,
    RMSNorm,
    ShardedStates,
    all_reduce_then_norm,
    decoder_layer,
    own_rows,
)
from ..nn.mlp import ParallelMLP
from ..nn.scaled import NAMES, Activation, ScaledModule, product_operands, quantized
from ..nn.sharded import divide_by_ranks
from ..nn.weave import LayerPlan, LayerTimes, Table, halves, table
from ..ops.activation import launch_silu_mul, silu_mul_quantized
from ..ops.all_gather_matmul.op import all_gather_matmul
from ..ops.all_reduce.op import all_reduce_rms_norm
from ..ops.matmul import Shares, matmul
from ..ops.matmul_reduce.op import matmul_reduce_scatter
from ..ops.norm import rms_norm
from ..ops.scaled_gemm import multiply
from ..ops.tiles import usual_tile
from ..planner.layers import DecoderSizes, predicted
from ..scaled_tensor import ScaledTensor
from ..transport.memory import lock
from ..world import World
from .attention import attend, flash_works
from .cache import Batch, Cache, Layout, Part
from .config import Config
from .mixture import MixtureMLP, mlp_of
from .weight import Weight


class Attention(ScaledModule):
    """Projections of this rank's heads. State dict: {q,k,v,o}_proj.weight and, if the config has them,
    {q,k,v}_proj.bias and {q,k}_norm.weight, as in Transformers' LlamaAttention, Qwen2Attention and Qwen3Attention.

        parameters  qkv [(heads + 2 kv_heads) D / W, H], queries, then keys, then values; out [H, heads D / W]; bias,
                    one element for each row of qkv, and norms [2, D], of queries and keys, or None
        recipe      the recipe of 8-bit weights, as in `weft.nn`; qkv_scale and out_scale store
                    {q,k,v,o}_proj.weight_scale, or weight_scale_inv
    """

    sharded_dim = {
        **{f"{projection}_proj.{parameter}": 0 for projection in "qkv" for parameter in ("weight", "bias")},
        **{f"{projection}_norm.weight": None for projection in "qk"},
        "o_proj.weight": 1,
    }
    sharded_parameters = ("qkv", "out", "bias", "norms", "qkv_scale", "out_scale")
    qkv: nn.Parameter
    out: nn.Parameter
    qkv_scale: nn.Parameter | None
    out_scale: nn.Parameter | None

    def __init__(self, config: Config, world: World, dtype: torch.dtype) -> None:
        super().__init__(world, dtype, config.recipe)
        d, hidden = config.head_dim, config.hidden_size
        self.kv_heads = divide_by_ranks("num_key_value_heads", config.num_key_value_heads, world)
        self.heads, self.head_dim = divide_by_ranks("num_attention_heads", config.num_attention_heads, world), d
        q, kv, device = self.heads * d, self.kv_heads * d, world.device
        rows = q + 2 * kv
        self.add_matrix("qkv", [q, kv, kv], hidden)
        self.add_matrix("out", [hidden], q)
        self.name_scales("q_proj.", "k_proj.", "v_proj.", "o_proj.")
        bias = torch.zeros(rows, dtype=dtype, device=device) if config.qkv_bias else None
        norms = torch.ones(2, d, dtype=dtype, device=device) if config.qk_norm else None
        self.bias, self.norms = (None if t is None else nn.Parameter(t) for t in (bias, norms))
        self.fill({f"{projection}_proj.weight": hidden**-0.5 for projection in "qkvo"})

    @property
    def weights(self) -> tuple[Activation, Activation]:
        """Return the weights before and after attention as operands of ops."""
        return self.weight_operand("qkv"), self.weight_operand("out")

    def get_shard(self, name: str) -> Tensor | None:
        scaled = name.rpartition(".")[2] in NAMES.values()
        if name.startswith("o_proj."):
            return self.out_scale if scaled else self.out
        projection, parameter = name[0], name[2:]
        if parameter == "norm.weight":
            return None if self.norms is None else self.norms["qk".index(projection)]
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        lo, n = {"q": (0, q), "k": (q, k), "v": (q + k, k)}[projection]
        whole = self.qkv_scale if scaled else self.bias if parameter == "proj.bias" else self.qkv
        if whole is None:
            return None
        shared = len(self.qkv) // len(whole)  # rows of a block share a scale
        return whole[lo // shared : (lo + n) // shared]


class DecoderLayer(nn.Module):
    def __init__(self, config: Config, layer_index: int, world: World, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.input_layernorm = Weight(hidden, world=world, dtype=dtype)
        self.self_attn = Attention(config, world, dtype)
        self.post_attention_layernorm = Weight(hidden, world=world, dtype=dtype)
        self.mlp = mlp_of(config, layer_index, world, dtype, seed)


class _Body(nn.Module):
    def __init__(self, c: Config, world: World, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.embed_tokens = Weight(c.vocab_size, c.hidden_size, world=world, dtype=dtype, seed=seed)
        layers = range(c.num_hidden_layers)
        self.layers: Any = nn.ModuleList(DecoderLayer(c, i, world, dtype, seed + 2 + 2 * i) for i in layers)
        self.norm = Weight(c.hidden_size, world=world, dtype=dtype)


class Llama(nn.Module):
    """The decoder, for inference.

        forward     token ids [M] -> logits [requests, vocab] of every request's last token, the same on every rank
        state dict  the names of Transformers' LlamaForCausalLM, MixtralForCausalLM and so on; `load_state_dict` loads
                    this rank's parts of whole tensors, or parts; `weft.nn.full_state_dict(model)` collects the whole
                    tensors

    config: the Transformers config of a type in `config.MODEL_TYPES`, such as `transformers.LlamaConfig`, a dict with
    its keys, or a `Config`. Weights are drawn on the device; weights that every rank holds whole are drawn from `seed`,
    which must be the same on all ranks. parallel: "expert": each rank has some experts, or "tensor": each rank has some
    columns of all experts. recipe: "row" or "block": the projections have 8-bit weights, and state dicts contain their
    scales as checkpoints do (nn/scaled.py); not with experts, and not with `sms`. Raises ValueError for a config that
    is not supported (`Config.from_hf`) or cannot be split over the ranks, TypeError for a dtype other than bfloat16 and
    float16.
    """

    def __init__(
        self,
        config: object,
        *,
        world: World,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        parallel: str = "expert",
        recipe: str | None = None,
    ) -> None:
        super().__init__()
        if world.batch_invariant:
            raise Unsupported("Llama on a batch-invariant World: its attention does not keep the promise")
        c = replace(Config.from_hf(config), recipe=recipe)
        if c.mixture is not None and recipe is not None:
            raise ValueError(f"recipe {recipe!r}: experts have 16-bit weights")
        if c.mixture is not None:
            c = replace(c, mixture=replace(c.mixture, parallel=parallel))
        elif parallel != "expert":
            raise ValueError(f"parallel {parallel!r}: this config has no experts to split")
        self.config = c
        self.world = world
        self.model = _Body(c, world, dtype, seed)
        if not c.tie_word_embeddings:
            self.lm_head = Weight(c.vocab_size, c.hidden_size, world=world, dtype=dtype, seed=seed + 1)
        dense = [mlp for mlp in self.model.modules() if isinstance(mlp, ParallelMLP)]  # includes shared experts
        self.mlp_widths = {(mlp.gate_up.shape[0], mlp.inner) for mlp in dense}  # columns around the activation
        self.requires_grad_(False)
        self._rotary = torch.empty(0, c.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        weight: Tensor = self.model.embed_tokens.weight
        return weight.dtype

    @property
    def flash(self) -> bool:
        """Return whether attention is one kernel over all requests."""
        world, dtype, d = self.world, self.dtype, self.config.head_dim
        works: bool = world.cached(("flash", dtype, d), lambda: flash_works(world, dtype, d))
        return works

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.config.tie_word_embeddings:
            weight = self.model.embed_tokens.weight
            destination[f"{prefix}lm_head.weight"] = weight if keep_vars else weight.detach()

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *args: object) -> None:
        tied = {f"{prefix}lm_head.weight"} if self.config.tie_word_embeddings else set()
        if self.config.mixture is not None:  # Mixtral's checkpoints and its module name experts differently
            for key in [key for key in state_dict if ".block_sparse_moe." in key]:
                state_dict[key.replace(".block_sparse_moe.", ".mlp.")] = state_dict.pop(key)
        for key in list(state_dict):
            if key in tied or (key.startswith(prefix) and key.endswith("rotary_emb.inv_freq")):
                del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args)

    # -- plans ---------------------------------------------------------------------------------------------------------
    def plan(self, plan: str | LayerPlan, tokens: int, mode: str = "graph") -> LayerPlan:
        """Return the LayerPlan for a plan: "auto" (from the measured table, or predicted for sizes that are not in it;
        "sequence" with experts), a kind, or a LayerPlan. A woven plan gets a smart split; with one token it becomes
        "fused". mode: "graph" or "eager". "auto" is collective at the first call. Raises TypeError for other types,
        ValueError for `sms` with experts or with weights that weft's GEMM does not support."""
        c, world = self.config, self.world
        measured = table(world, c.hidden_size, c.intermediate_size) if c.mixture is None else Table()
        if isinstance(plan, str):
            plan = LayerPlan(plan) if plan != "auto" else self._auto(measured, tokens, mode)
        if c.recipe is not None and isinstance(plan, LayerPlan) and plan.sms:
            raise ValueError(f"{plan}: weft's GEMM on some of the SMs takes 16-bit operands, and weights have 8 bits")
        if not isinstance(plan, LayerPlan):
            raise TypeError(f'plan must be "auto", a kind or a LayerPlan, got {plan!r}')
        if c.mixture is not None and plan.sms:
            raise ValueError(f"{plan}: experts' GEMMs take all SMs; sms is for models without experts")
        odd = [(n, k) for gemms in self.gemms() for n, k in gemms if n % 8 or k % 8] if plan.sms else []
        if odd:
            raise ValueError(f"{plan}: weft's GEMM takes rows of whole 16-byte words; weights here are {odd}")
        if plan.kind != "woven":
            return plan
        if tokens < 2:
            return LayerPlan("fused", sms=plan.sms, norm=plan.norm)
        profile = self.waves(plan.sms, tokens) if plan.sms else measured.profile
        split = plan.split or (profile.split(tokens) if profile else halves(tokens))
        return LayerPlan("woven", split, plan.sms, plan.norm)

    def _auto(self, measured: Table, tokens: int, mode: str) -> LayerPlan:
        """Return the layer's plan, chosen like an op's plan: the earlier decision, else the stored one, else the
        predicted one."""
        if self.config.mixture is not None:
            return LayerPlan("sequence")
        sizes = DecoderSizes(*(size for part in self.gemms() for size in part))

        def expected(mode: str) -> LayerPlan:
            stored = measured.choose(tokens, mode)
            plan = LayerPlan(*predicted(self.world, sizes, tokens, mode)) if stored is None else stored
            return plan if self.config.recipe is None else replace(plan, sms=0)

        return self.world.choices.choose(Choice(("decoder", sizes, tokens, self.config.recipe), expected), mode)

    def gemms(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return (N, K) of a layer's GEMMs on this rank: the GEMMs around attention, and the MLP's GEMMs."""
        attention, mlp = self.model.layers[0].self_attn, self.model.layers[0].mlp
        return [tuple(w.shape) for w in (attention.qkv, attention.out)], [
            tuple(w.shape) for w in (mlp.gate_up, mlp.down)
        ]

    def waves(self, programs: int, rows: int) -> LayerTimes:
        """Return the times of weft's own GEMMs, in K steps of a tile."""
        t, world = usual_tile(self.world), self.world
        attention, mlp = self.gemms()

        def time(tiles: int, k: int) -> float:
            return Shares.choose(world, tiles, -(-k // t.block_k), programs).time

        return LayerTimes.of_tiles(attention, mlp, tile=(t.block_m, t.block_n), time=time, rows=rows)

    def layout(
        self,
        batch: Batch,
        cache: Cache,
        plan: str | LayerPlan = "auto",
        room: tuple[int, int, int] | None = None,
        mode: str = "graph",
    ) -> Layout:
        """Return the batch's device tables. room: (tokens, singles, several) for later batches to fill the layout with
        (see `Layout`). mode: "auto" optimises for passes captured in a CUDA graph ("graph") or for "eager" passes.
        Raises ValueError for a cache whose dtype or config differs from the model's."""
        self._check(cache)
        return Layout(batch, cache, self.plan(plan, room[0] if room else batch.tokens, mode), self.world, room)

    def _check(self, cache: Cache) -> None:
        if cache.keys.dtype != self.dtype:
            raise ValueError(f"a cache of {cache.keys.dtype} for a model of {self.dtype}")
        attention = self.model.layers[0].self_attn
        shape = len(self.model.layers), cache.slots, cache.max_len, attention.kv_heads, attention.head_dim
        if cache.keys.shape != shape:
            raise ValueError(f"a cache of another config: its keys are {list(cache.keys.shape)}, not {list(shape)}")

    # -- forward -------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def forward(
        self, ids: Tensor, batch: Batch | Layout, cache: Cache | None = None, plan: str | LayerPlan = "auto"
    ) -> Tensor:
        """Return the logits. ids: int [M], the batch's tokens in order. The cache receives keys and values. plan:
        "auto", a kind, or a LayerPlan. A Layout has its own cache and plan, and needs ids for all its rows. All ranks
        must make the same calls, with the same ids; the first call with a number of tokens and a plan checks this
        (Mismatch on every rank) and waits for the device. Raises ValueError for a batch, ids or a cache that do not
        match; see also `plan`."""
        world = self.world
        if isinstance(batch, Batch):
            if cache is None:
                raise ValueError("a batch needs a cache")
            batch = self.layout(batch, cache, plan, mode="graph" if world.backend.capturing() else "eager")
        layout = batch
        rows, last, stream = self.hidden(ids, layout), layout.last, world.current_stream()
        picked = world.empty((layout.requests, self.config.hidden_size), self.dtype)

        def pick() -> None:
            torch.index_select(rows, 0, last.clamp(min=0), out=picked)

        world.call(pick, [rows, last], [picked], stream)
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        logits = world.empty((layout.requests, self.config.vocab_size), self.dtype)
        world.backend.linear(picked, head.weight, None, stream, logits)
        world.finish(stream)
        return logits

    @torch.no_grad()
    def hidden(
        self, ids: Tensor, layout: Layout, allreduce_norm: Callable[..., tuple[Tensor, Tensor]] | None = None
    ) -> Tensor:
        """Return the normalised output of the last layer, [rows, H] of the layout, valid until the next forward pass.

        allreduce_norm: a function with the arguments of `all_reduce_rms_norm`, which sums the partial outputs in its
        place; for plans other than woven and "sequence".
        """
        world, plan, c = self.world, layout.plan, self.config
        if ids.shape != (layout.tokens,):
            raise ValueError(f"{list(ids.shape)} token ids for a layout of {layout.tokens} tokens")
        self._check(layout.cache)
        world.check()
        world.cached(("decoder", layout.tokens, plan, c), lambda: self._check_same_on_all_ranks(ids, layout))
        stream = world.current_stream()
        world.order(lock(world, "decoder"), stream)
        embedding = self.model.embed_tokens.weight
        x = world.empty((layout.tokens, c.hidden_size), self.dtype)
        world.call(lambda: torch.index_select(embedding, 0, ids, out=x), [embedding, ids], [x], stream)
        norms, memory = self._norms(), _PassMemory(self, layout)
        states = self._states(x, norms[0], layout, allreduce_norm)
        try:
            for i, layer in enumerate(self.model.layers):
                attention = _AttentionOfPass(self, layer.self_attn, i, layout, memory)
                mlp = _MlpOfPass(self, layer.mlp, i, layout, memory)
                decoder_layer(states, attention, mlp, (norms[2 * i + 1], norms[2 * i + 2]))
            return states.gathered()
        except BaseException:  # the second stream of a woven pass still reads and writes its tensors
            world.join_side_streams()
            raise

    def _states(
        self, x: Tensor, norm: RMSNorm, layout: Layout, allreduce_norm: Callable[..., tuple[Tensor, Tensor]] | None
    ) -> HiddenStates:
        """Return the hidden states before the layers, in the plan's layout, from embeddings x [M, H]."""
        world, plan = self.world, layout.plan
        if plan.kind == "sequence":
            rows = own_rows(x, world)
            return ShardedStates(world, rows, rms_norm(rows, *norm, world=world), x.shape)
        plain, normed = plan.kind == "plain", rms_norm(x, *norm, world=world)
        if allreduce_norm is None:
            allreduce_norm = all_reduce_then_norm if plain else all_reduce_rms_norm
        options: dict[str, Any] = dict(plan=plan.norm_plan, full_residual=plain, allreduce_norm=allreduce_norm)
        return ReplicatedStates(world, x, normed, layout.splits, **options)

    def _check_same_on_all_ranks(self, ids: Tensor, layout: Layout) -> None:
        """Raise Mismatch unless all ranks have the same ids and batch: the ranks must not sum partial outputs of
        different ids. Collective."""
        world = self.world
        world.finish(world.current_stream())
        slots = torch.cat([part.slots for part in layout.parts])
        batch = [number for part in layout.parts for chunk in part.chunks for number in chunk]
        world.check_same_on_all_ranks(
            "decoder",
            tokens=layout.tokens,
            plan=layout.plan,
            config=self.config,
            batch=_digest(batch),
            ids=_digest(ids[slots >= 0].tolist()),
        )

    def _norms(self) -> list[RMSNorm]:
        """Return the norms in order: the norms before each attention and each MLP, and the final norm."""
        layers = [n for layer in self.model.layers for n in (layer.input_layernorm, layer.post_attention_layernorm)]
        return [RMSNorm(module.weight, self.config.rms_norm_eps) for module in (*layers, self.model.norm)]

    def _rotary_table(self, length: int) -> Tensor:
        """Return fp32 [at least `length`, head_dim] of `Config.rotary`, on the device."""
        if self._rotary.shape[0] < length:
            c, world = self.config, self.world
            self._rotary = world.cached(
                ("rotary", c.rope, c.rope_numbers, c.rope_theta, c.head_dim, length),
                lambda: c.rotary(length, world.device),
            )
        return self._rotary

    def _heads(
        self, layer: Attention, layer_index: int, part: Part, layout: Layout, qkv: Tensor, out: Tensor
    ) -> Tensor:
        """Compute the attention between the projections: qkv [rows, ..] -> [rows, heads D], in `out` or in new
        memory."""
        world, cache = self.world, layout.cache
        keys, values = cache.keys[layer_index], cache.values[layer_index]
        heads, kv, d = layer.heads, layer.kv_heads, layer.head_dim
        rotary = self._rotary_table(cache.max_len)
        bias, norms = layer.bias, layer.norms
        eps = 0.0 if norms is None else self.config.rms_norm_eps
        launch = _rotate_and_keep(world, part.rows, cache.max_len, (heads, kv, d), eps, bias is not None)
        launch(
            world.current_stream(),
            qkv=qkv,
            bias=qkv if bias is None else bias,
            norms=qkv if norms is None else norms,
            keys=keys,
            values=values,
            rotary=rotary,
            positions=part.positions,
            slots=part.slots,
        )
        return attend(world, qkv, part, keys, values, heads, out, self.flash)


@dataclass
class _SublayerOfPass:
    """A module of layer `layer_index` in one forward pass, as a sublayer for `nn.decoder_layer`."""

    model: Llama
    module: nn.Module
    layer_index: int
    layout: Layout
    memory: _PassMemory

    def linear(self, x: Activation, weight: Activation, out: Tensor | None) -> Tensor:
        """Return x @ weight.T, by weft's own GEMM on the plan's SMs or by a library GEMM, in `out` if it is not None. x
        is quantized if the weight has 8 bits."""
        world, sms = self.model.world, self.layout.plan.sms
        if isinstance(weight, ScaledTensor):
            operands = ScaledOperands(quantized(x, weight, world), weight, None, fast_accum=True)
            out = world.empty((len(operands.x.values), len(weight.values)), self.model.dtype) if out is None else out
            multiply(world, operands, world.current_stream(), out)
            return out
        assert isinstance(x, torch.Tensor)
        out = world.empty((x.shape[0], weight.shape[0]), x.dtype) if out is None else out
        if sms:
            matmul(x, weight, out, world, sms)
        else:
            world.backend.linear(x, weight, None, world.current_stream(), out)
        return out

    def dense(self, mlp: ParallelMLP, x: Tensor, out: Tensor | None) -> Tensor:
        world, sms = self.model.world, self.layout.plan.sms
        gate_up_weight, down = mlp.weights
        gate_up, inner = (t[: x.shape[0]] for t in self.memory.mlp_buffers[mlp.gate_up.shape[0], mlp.inner])
        hidden: Activation = inner
        if sms:
            matmul(x, mlp.gate_up, inner, world, sms, gated=mlp.inner)
        else:
            self.linear(x, gate_up_weight, gate_up)
            if mlp.recipe is None:
                launch_silu_mul(gate_up, inner, world, mlp.block)
            else:
                hidden = silu_mul_quantized(gate_up, mlp.recipe, world=world)
        return self.linear(hidden, down, out)


class _AttentionOfPass(_SublayerOfPass):
    """Attention of each token part to the cache."""

    module: Attention

    def __call__(self, states: HiddenStates) -> tuple[_AttentionOfPass, Tensor]:
        return self, states.normed

    def partial(self, x: Tensor, out: Tensor | None, part: int) -> Tensor:
        attention = self.module
        qkv_weight, out_weight = attention.weights
        qkv = self.linear(x, qkv_weight, self.memory.qkv[: x.shape[0]])
        return self.linear(self.heads(qkv, part), out_weight, out)

    def sharded(self, x: Tensor, shards: Sequence[int] | None) -> Tensor:
        (qkv_weight, out_weight), dtype, world = self.module.weights, self.model.dtype, self.model.world
        rows, options = product_operands(x, qkv_weight, dtype, world)
        qkv = all_gather_matmul(rows, qkv_weight, world=world, rows=shards, **options)
        heads, options = product_operands(self.heads(qkv, 0), out_weight, dtype, world)
        return matmul_reduce_scatter(heads, out_weight, world=world, rows=shards, **options)

    def heads(self, qkv: Tensor, part: int) -> Tensor:
        out = self.memory.heads[: qkv.shape[0]]
        return self.model._heads(self.module, self.layer_index, self.layout.parts[part], self.layout, qkv, out)


class _MlpOfPass(_SublayerOfPass):
    module: ParallelMLP | MixtureMLP

    def partial(self, x: Tensor, out: Tensor | None, part: int) -> Tensor:
        mlp, shared = self.module, None
        if isinstance(mlp, ParallelMLP):
            return self.dense(mlp, x, out)
        if mlp.mixture.shared_intermediate_size:
            shared = mlp.shared(x, self.dense(mlp.shared_expert, x, out))
        return mlp.partial_sums(x, self.layout.parts[part].slots if self.layout.padded else None, shared, out)

    def sharded(self, x: Tensor, shards: Sequence[int] | None) -> Tensor:
        routed = isinstance(self.module, MixtureMLP) and self.layout.padded  # padding rows are sent to no expert
        slots = (own_rows(self.layout.parts[0].slots, self.model.world),) if routed else ()
        y: Tensor = self.module(x, shards, *slots)
        return y


class _PassMemory:
    """Buffers to which the sublayers of a forward pass write intermediate results. The two token parts share the
    buffers, because they compute in turn on one stream."""

    def __init__(self, model: Llama, layout: Layout) -> None:
        world, dtype, rows = model.world, model.dtype, max(layout.splits)
        attention = model.model.layers[0].self_attn
        self.heads = world.empty((rows, attention.out.shape[1]), dtype)
        if layout.plan.kind == "sequence":
            return
        self.qkv = world.empty((rows, attention.qkv.shape[0]), dtype)
        fused = layout.plan.sms > 0  # weft's GEMM applies the activation in its epilogue
        self.mlp_buffers = {
            (gate_up, inner): (
                world.empty((0 if fused else rows, gate_up), dtype),
                world.empty((rows, inner), dtype),
            )
            for gate_up, inner in model.mlp_widths
        }


def _digest(numbers: Sequence[int]) -> str:
    """Return the first numbers for an error message, and a checksum of all numbers."""
    shown = ", ".join(map(str, numbers[:6])) + ", .." * (len(numbers) > 6)
    return f"[{shown}] ({zlib.crc32(repr(numbers).encode()):08x})"


@prepared
def _rotate_and_keep(
    world: World, rows: int, max_len: int, heads: tuple[int, int, int], eps: float, bias: bool
) -> Launch:
    """Return the launch of the kernel. heads: the numbers of query heads, of key-value heads, and of elements per
    head."""
    queries, kv, d = heads
    return Launch(
        world,
        rotate_and_keep,
        min(world.sm_count * 4, -(-rows // 16) * (queries + 2 * kv)),
        dict(num_warps=4),
        rows=rows,
        max_len=max_len,
        HEADS=queries,
        KV=kv,
        D=d,
        BIAS=bias,
        EPS=eps,
        HALF=1 << (d // 2 - 1).bit_length(),
    )
