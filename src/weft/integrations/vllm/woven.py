"""Passes in two token parts over all layers (TokenWeave, section 4). The GEMMs and attention of one part overlap the
sums over ranks of the other part, on two streams and in the order of nn/weave.py.

`stages_of` cuts the graph of the stack's forward (dataflow.py) at the sums. A `Stage` is the part between two sums: the
column-parallel GEMM after the norm, vLLM's own modules (rotary embedding, attention, activation, experts), and the
row-parallel GEMM. A pass is a Python loop over the stages, without compiled code or CUDA graphs.

When attention runs, it reads its metadata and slots from vLLM's forward context, so each part has a context of its own.
The cut may be inside a request. Both parts compute on the caller's stream, so that part 0 has written its keys to the
cache before part 1 reads them. `AttentionParts` builds the metadata as vLLM does for its own micro-batches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from ...errors import WeftError
from ...nn.decoder_layer import ReplicatedStates, RMSNorm
from ...nn.weave import LayerTimes, halves
from ...ops.norm import rms_norm
from ...ops.tiles import usual_tile
from ...tensor_checks import DTYPES
from ...world import World
from .dataflow import Graph, first_item, module_of, traced
from .fp8 import product, weight_of
from .interface import VllmObject, option
from .layers import SummedNorm
from .row_norm_column import WovenLayers
from .twin import copied, with_copies

FEWEST_TOKENS = 512  # weft does not time smaller passes: their GEMMs hide little, and two parts cost host time
ATTENTION = ("FullAttentionSpec", "SlidingWindowSpec")  # caches of keys and values by token
# `split_attn_metadata` does not pass these fields of a batch on to the parts.
NOT_SPLIT = ("encoder_seq_lens", "dcp_local_seq_lens", "mm_req_doc_ranges", "num_logits_indices")


# -- stages ------------------------------------------------------------------------------------------------------------
class Stage(NamedTuple):
    """A rank's computation from one sum to the next. The stage begins with the GEMM of the linear `column` and ends
    with the GEMM of the linear `row`; either linear may be None. `body` computes the steps between the GEMMs from rows
    and positions. `norm` sums the result over the ranks."""

    column: VllmObject
    body: Callable[[Tensor, Tensor], Tensor]
    row: VllmObject
    norm: SummedNorm

    def sizes(self) -> list[tuple[int, int]]:
        """Return (N, K) of the stage's GEMMs."""
        shapes = [weight_of(linear).weight.shape for linear in (self.column, self.row) if linear is not None]
        return [(n, k) for n, k in shapes]


class Stages(NamedTuple):
    """A stack of layers. `embed` computes the rows before the first layer from token ids and positions."""

    embed: Callable[[Tensor, Tensor], Tensor]
    stages: Sequence[Stage]


def stages_of(stack: nn.Module) -> Stages:
    """Return the stages of a stack with `SummedNorm`s. Raises WeftError if the stages do not form one chain."""
    graph = traced(stack, is_sum, absent=("inputs_embeds", "intermediate_tensors"))
    inputs = {node.target: node for node in graph.nodes if node.op == "placeholder"}
    sums = [node for node in graph.nodes if is_sum(module_of(graph, node))]
    embedding = residual_of(sums[0]) if sums else None
    if embedding is None or not {"input_ids", "positions"} <= inputs.keys():
        raise WeftError(f"{len(sums)} sums before a norm, the first of which adds no residual, or other arguments")
    stages: list[Stage] = []
    rows, residual, column = embedding, embedding, None
    for node in sums:
        norm = module_of(graph, node)
        assert isinstance(norm, SummedNorm)
        if residual is None or residual_of(node) is not residual:
            raise WeftError(f"the residual of the norm {node.target} is not that of the norm before it")
        body = between(graph, (rows, inputs["positions"]), node.args[0])
        stages.append(Stage(column, body, norm.weft.row, norm))
        rows, residual, column = first_item(node), second_item(node), norm.weft.column
    if graph.nodes[-1].args[0] is not rows:
        raise WeftError("its forward returns more than the rows of its last norm")
    return Stages(between(graph, (inputs["input_ids"], inputs["positions"]), embedding), stages)


def is_sum(module: nn.Module | None) -> bool:
    return isinstance(module, SummedNorm)


def residual_of(node: fx.Node) -> fx.Node | None:
    """Return the residual that a norm adds, or None."""
    residual = node.args[1] if len(node.args) == 2 else None
    return residual if isinstance(residual, fx.Node) else None


def second_item(node: fx.Node) -> fx.Node | None:
    """Return the node that reads the second item of the pair `node`, or None."""
    return next((user for user in node.users if user.args[1:] == (1,)), None)


def between(graph: Graph, inputs: Sequence[fx.Node], output: object) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that computes `output` from `inputs`. Raises WeftError if `output` depends on anything else,
    such as sizes, which were symbolic in the trace."""
    needed, todo = set[fx.Node](), [output]
    while todo:
        node = todo.pop()
        if isinstance(node, fx.Node) and node not in needed and node not in inputs:
            needed.add(node)
            todo += node.all_input_nodes
    part = fx.Graph()
    copies = {node: part.placeholder(f"input_{i}") for i, node in enumerate(inputs)}
    for node in graph.nodes:
        if node not in needed:
            continue
        if node.op == "placeholder" or is_sum(module_of(graph, node)):
            raise WeftError(f"{output} is computed from {node.target}, not only from {', '.join(map(str, inputs))}")
        copies[node] = part.node_copy(node, copies.__getitem__)
    if any(node.meta.get("sized") for node in (*needed, *inputs)):
        raise WeftError(f"{output} depends on the sizes of tensors")
    part.output(copies[output])  # type: ignore[index]
    function: Callable[[Tensor, Tensor], Tensor] = fx.GraphModule(graph.root, part).forward
    return function


# -- attention ---------------------------------------------------------------------------------------------------------
class AttentionParts:
    """The metadata of attention for both parts of a batch. vLLM's metadata builder passes the batch to this object
    (`_keep`). Two further builders of the same class build the metadata of the parts, since all metadata of one builder
    may share the builder's buffers."""

    def __init__(
        self, builder: VllmObject, config: VllmObject, device: torch.device, interface: Mapping[str, VllmObject]
    ) -> None:
        self._builder, self._split, self._slice = builder, interface["split_metadata"], interface["token_slices"]
        self._batch: VllmObject = None  # the batch of the metadata that the builder returned last
        self._metadata: VllmObject = None
        arguments = builder.kv_cache_spec, builder.layer_names, config, device
        current_config = interface.get("current_config", nullcontext)  # builders read the configuration when made
        with current_config(config):
            self._parts = [type(builder)(*arguments) for _ in range(2)]
        for part in self._parts:
            if hasattr(part, "set_workspace_buffer"):  # builders share a buffer, since attention runs on one stream
                part.set_workspace_buffer(builder._get_workspace_buffer())
        build = builder.build

        @functools.wraps(build)
        def keep(
            common_prefix_len: int, common_attn_metadata: VllmObject, *args: VllmObject, **others: VllmObject
        ) -> VllmObject:
            self._metadata = build(common_prefix_len, common_attn_metadata, *args, **others)
            self._batch = common_attn_metadata
            return self._metadata

        builder.build = keep

    def release(self) -> None:
        """Restore vLLM's own builder."""
        del self._builder.build

    def can_split(self, metadata: VllmObject, cut: int) -> bool:
        """Return whether a pass with this metadata can be cut after `cut` tokens."""
        batch = self._batch
        if not isinstance(metadata, dict) or any(of_layer is not self._metadata for of_layer in metadata.values()):
            return False
        starts = batch.query_start_loc_cpu
        whole = batch.causal is True and int(starts[batch.num_reqs]) == batch.num_actual_tokens
        return (
            whole
            and cut < batch.num_actual_tokens
            and not any(getattr(batch, name, None) is not None for name in NOT_SPLIT)
        )

    def split(self, metadata: Mapping[str, VllmObject], cut: int) -> list[dict[str, VllmObject]]:
        """Return the metadata of the first `cut` tokens and of the remaining tokens, by layer."""
        batch = self._batch
        starts, requests = batch.query_start_loc_cpu[: batch.num_reqs + 1], batch.num_reqs
        end = int(torch.searchsorted(starts, cut))  # index after the last request with tokens before the cut
        begin = int(torch.searchsorted(starts, cut, right=True)) - 1  # the first request with tokens after the cut
        slices = [
            self._slice(slice(0, end), slice(0, cut)),
            self._slice(slice(begin, requests), slice(cut, batch.num_actual_tokens)),
        ]
        built = [
            builder.build(common_prefix_len=0, common_attn_metadata=part)
            for builder, part in zip(self._parts, self._split(slices, batch), strict=True)
        ]
        return [dict.fromkeys(metadata, part) for part in built]


def unsplit_reason(config: VllmObject, runner: VllmObject) -> str | None:
    """Return why no batch of an engine can be split, or None."""
    groups = [group for groups in getattr(runner, "attn_groups", ()) for group in groups]
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    reasons = {
        f"{len(groups)} kinds of attention: {', '.join(kinds)}": len(groups) != 1,
        f"attention by {', '.join(kinds)}": not set(kinds) <= set(ATTENTION),
        "decode context parallelism": option(config, "parallel_config.decode_context_parallel_size", 1) > 1,
        "keys and values go to other engines (kv_transfer_config)": option(config, "kv_transfer_config") is not None,
        "scales of keys come from a pass (calculate_kv_scales)": option(config, "cache_config.calculate_kv_scales"),
        "attention to a window beside the prompt (rswa_window)": option(config, "model_config.rswa_window") is not None,
        "the experts of tokens are returned": option(config, "model_config.enable_return_routed_experts"),
    }
    return next((reason for reason, so in reasons.items() if so), None)


# -- passes ------------------------------------------------------------------------------------------------------------
class PartOfPass(NamedTuple):
    """A stage in one pass, as a sublayer for `nn.decoder_layer`. `positions` and `contexts` have one entry for each
    part."""

    world: World
    stage: Stage
    positions: Sequence[Tensor]
    contexts: Sequence[VllmObject]
    entered: Callable[[VllmObject], AbstractContextManager[None]]

    def partial(self, x: Tensor, out: Tensor | None, part: int) -> Tensor:
        world, stage = self.world, self.stage
        if stage.column is not None:
            weight, scale = weight_of(stage.column)
            x = product(world, x, weight, stage.column.bias, scale)
        world.finish(world.current_stream())
        with self.entered(self.contexts[part]):
            y = stage.body(x, self.positions[part])
        if stage.row is not None:
            weight, scale = weight_of(stage.row)
            bias = None if world.rank else stage.row.bias
            if scale is None and out is not None:
                return world.backend.linear(y.contiguous(), weight, bias, world.current_stream(), out)
            y = product(world, y, weight, bias, scale)
        if out is None:
            return y
        world.copy(out, y, world.current_stream())
        return out


@dataclass(eq=False)
class WovenPass:
    """The woven passes of a stack of layers, in an engine with this configuration. `interface` contains vLLM's
    functions. `attention` is None until `attach` is called."""

    stages: Stages
    world: World
    config: VllmObject
    interface: Mapping[str, VllmObject]
    attention: AttentionParts | None = None
    _cuts: dict[int, int] = field(default_factory=dict)

    @property
    def context(self) -> VllmObject:
        """Return the forward context of the current pass."""
        return self.interface["context"]()

    def attach(self, runner: VllmObject) -> None:
        """Start observing the batches of an engine. Raises WeftError if they cannot be split."""
        if why := unsplit_reason(self.config, runner):
            raise WeftError(why)
        (group,) = (group for groups in runner.attn_groups for group in groups)
        self.attention = AttentionParts(group.get_metadata_builder(0), self.config, self.world.device, self.interface)

    def release(self) -> None:
        """Restore the engine as it was before `attach`."""
        if self.attention is not None:
            self.attention.release()
        self.attention = None

    def cut(self, tokens: int) -> int:
        """Return the number of tokens of the first part for which the GEMMs of both parts run in the fewest waves of
        tiles (TokenWeave's smart split)."""
        if tokens not in self._cuts:
            self._cuts[tokens] = smart_split(self.world, self.stages.stages, tokens)
        return self._cuts[tokens]

    def can_run(self, tokens: int) -> bool:
        """Return whether the current pass, of `tokens` tokens including padding, can be split."""
        metadata = getattr(self.context, "attn_metadata", None)
        if metadata is None:  # vLLM measures memory in a pass without attention
            return True
        return self.attention is not None and self.attention.can_split(metadata, self.cut(tokens))

    def __call__(self, form: WovenLayers, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Run a pass for which `can_run` returns true. Return the rows after the last norm."""
        world, tokens = self.world, positions.shape[-1]
        cut = self.cut(tokens)
        rows = (slice(0, cut), slice(cut, tokens))
        contexts, of_parts = list(self.contexts(rows)), [positions[..., part] for part in rows]
        norms = [RMSNorm(stage.norm.scale(), stage.norm.variance_epsilon) for stage in self.stages.stages]
        hidden = self.stages.embed(input_ids, positions)
        states = ReplicatedStates(world, hidden, hidden, (cut, tokens - cut), plan=form.norm_plan)
        try:
            for stage, norm in zip(self.stages.stages, norms, strict=True):
                part = PartOfPass(world, stage, of_parts, contexts, self.interface["entered"])
                states.add(part, states.normed, norm, last=norm is norms[-1])
            out = states.gathered()
        except BaseException:
            world.join_side_streams()
            raise
        world.finish(world.current_stream())
        return out

    def contexts(self, rows: Sequence[slice]) -> Iterator[VllmObject]:
        """Yield a context for each part, with the part's rows of the current context."""
        context = self.context
        whole, slots = getattr(context, "attn_metadata", None), context.slot_mapping or {}
        metadata: Sequence[VllmObject] = (None, None)
        if whole is not None:
            assert self.attention is not None
            metadata = self.attention.split(whole, rows[1].start)
        for of_part, part in zip(metadata, rows, strict=True):
            part_context = copy(context)
            tensors = {id(t): t[part] for t in slots.values()}
            part_context.attn_metadata = of_part
            part_context.slot_mapping = {name: tensors[id(t)] for name, t in slots.items()}
            if getattr(context, "is_padding", None) is not None:
                part_context.is_padding = context.is_padding[part]
            yield part_context


def smart_split(world: World, stages: Sequence[Stage], tokens: int) -> int:
    """Return the number of tokens of the first of two parts for which the GEMMs run in the fewest waves of tiles. The
    stages alternate between attention and MLP. Each part has at least three eighths of the tokens, since its GEMMs must
    hide the other part's sums. Without GEMMs the parts are halves."""
    of_mlp, of_attention = (stages[i].sizes() if len(stages) > 2 else [] for i in (1, 2))
    if not of_mlp and not of_attention:
        return halves(tokens)
    t = usual_tile(world)

    def time(tiles: int, k: int) -> float:
        return math.ceil(tiles / world.backend.sm_count) * k

    times = LayerTimes.of_tiles(of_attention, of_mlp, tile=(t.block_m, t.block_n), time=time, rows=tokens)
    return times.split(tokens, least=3 * tokens // 8)


# -- making them -------------------------------------------------------------------------------------------------------
class OwnNorm:
    """An RMSNorm of a rank's own rows, computed by weft's kernel, since vLLM's forward relies on a compiler to fuse the
    norm."""

    weft: World
    weight: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return rms_norm(rows, self.weight, self.variance_epsilon, world=self.weft).view(x.shape)


def woven_pass(
    stack: nn.Module,
    copies: Mapping[int, nn.Module],
    world: World,
    config: VllmObject,
    classes: VllmObject,
    interface: Mapping[str, VllmObject],
) -> WovenPass:
    """Return the woven passes of a stack, with `copies` in place of the modules that weft serves. Raises WeftError if
    the stack cannot have any."""
    missing = [name for name in ("entered", "split_metadata", "token_slices") if name not in interface]
    if missing:
        raise WeftError(f"vLLM has no {', '.join(missing)}")
    opaque = option(config, "compilation_config.static_forward_context", {}).values()
    eager = dict(copies)
    # Without symmetric memory the form is not a candidate, and the kernels may be missing.
    if world.backend.symmetric_unsupported is None:
        eager.update(kernels(stack, {*copies, *map(id, opaque)}, world, classes, interface.get("custom_op")))
    stages = stages_of(with_copies(stack, eager))
    return WovenPass(stages, world, config, interface)


def kernels(
    module: nn.Module, others: set[int], world: World, classes: VllmObject, custom_op: VllmObject
) -> Iterator[tuple[int, VllmObject]]:
    """Yield, with their ids, copies of the descendant modules that vLLM's compiler would have fused; uncompiled, the
    originals would run as single torch operations. The function does not enter the modules in `others`: attention and
    experts, which vLLM finds by name."""
    for child in module.children():
        if id(child) in others:
            continue
        if type(child) is classes.norm and classes.is_norm(child) and child.weight.dtype in DTYPES:
            yield id(child), copied(child, OwnNorm, weft=world)
        elif custom_op and isinstance(child, custom_op) and type(child).forward_cuda is not custom_op.forward_cuda:
            yield id(child), copied(child, _forward_method=child.forward_cuda)
        else:
            yield from kernels(child, others, world, classes, custom_op)
