"""Plans. A plan is the decision for one (op, shape, dtype, world, machine): a frozen, printable object that is stored
as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, TypeAlias, TypeGuard

POWERS_OF_TWO = (
    *("block_m", "block_n", "block_k", "warps", "side_warps"),
    *("pull_rows", "copy_rows", "send_rows", "sum_rows"),
)

KINDS: dict[str, type[Plan]] = {}  # for each kind, its class or the base of its classes
RENAMED_KINDS = {"awaiting": "flag_gated"}  # old names, which can still be read
REMOVED_FIELDS = {"push_programs": 0, "batch": 1}  # old fields, which are read only if they have this value
CLASSES: dict[str, type[Plan]] = {}  # the classes by name


def _check_fields(title: str, instance: TileShape | Plan, may_be_0: Sequence[str] = ()) -> None:
    """Raise TypeError if a field's type differs from the type of its default, and ValueError if a number is out of
    range."""
    for field in fields(instance):
        name = field.name
        default: Any = field.default
        value: Any = getattr(instance, name)
        if value is default:
            continue
        numbers = value if type(value) is tuple else (value,)
        tile = isinstance(default, TileShape)
        if type(value) is not type(default) or not (tile or all([type(v) in (int, bool) for v in numbers])):
            expected = "a tuple of ints" if type(default) is tuple else type(default).__name__
            raise TypeError(f"{title}: {name}={value!r} must be {expected}")
        if tile or type(default) is bool:
            continue
        if min(numbers, default=1) < (name not in may_be_0):
            raise ValueError(f"{title}: {name}={value!r} must be at least {int(name not in may_be_0)}")
        if name in POWERS_OF_TWO and value & (value - 1):
            raise ValueError(f"{title}: {name}={value!r} must be a power of two")


def _call_of(instance: TileShape | Plan) -> str:
    """Return the constructor call with the fields that differ from their defaults."""
    values = [(field, getattr(instance, field.name)) for field in fields(instance)]
    changed = [f"{field.name}={value}" for field, value in values if value != field.default]
    return f"{type(instance).__name__}({', '.join(changed)})"


@dataclass(frozen=True)
class TileShape:
    """The tile of a GEMM that one program computes at a time: block_m x block_n elements, in steps of block_k along K.

    warps: warps of the program. stages: the number of K steps that the program holds in shared memory at once.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    warps: int = 8
    stages: int = 3

    def __post_init__(self) -> None:
        _check_fields(type(self).__name__, self)

    def __str__(self) -> str:
        return _call_of(self)


@dataclass(frozen=True)
class GemmTile(TileShape):
    """The tiles of a GEMM and their order: group_m rows of tiles are computed column by column, so that concurrent
    programs share rows and columns in the L2 cache."""

    group_m: int = 8

    def __str__(self) -> str:
        return _call_of(self)


NARROW = GemmTile(block_n=128, warps=4)  # two programs of this tile fit on an SM


@dataclass(frozen=True)
class Plan:
    """Base of all plans. `kind` names the family of the plan; the fields are the parameters of one kernel, which uses
    all of them. If a kind has several classes, each is the plan of a different kernel, and all have one abstract base.
    Raises TypeError if a field's type differs from the type of its default, and ValueError if a number is out of
    range."""

    kind: ClassVar[str] = ""
    variant: ClassVar[str] = ""  # a word that distinguishes the class from the other classes of its kind
    abstract: ClassVar[bool] = True  # a class that sets this field itself has no instances
    may_be_0: ClassVar[tuple[str, ...]] = ()  # names of fields that may be 0; all other numbers are at least 1
    grid_barrier: ClassVar[bool] = False  # whether all programs of a launch wait for each other, even with one rank
    bounded: ClassVar[bool] = False  # whether all waits for other ranks are in weft's kernels, which time out

    def __init_subclass__(cls) -> None:
        base, namesake = KINDS.get(cls.kind, cls), CLASSES.get(cls.__name__, cls)
        again = base.__qualname__ == cls.__qualname__  # also true if the class's module is loaded a second time
        if not again and not issubclass(cls, base):
            raise TypeError(f"{cls.__qualname__}: {base.__qualname__} is the plan of kind {cls.kind!r}")
        if (namesake.__qualname__, namesake.kind) != (cls.__qualname__, cls.kind):
            raise TypeError(f"{cls.__qualname__}: {namesake.__qualname__} is a plan of kind {namesake.kind!r}")
        CLASSES[cls.__name__] = cls
        if again:
            KINDS[cls.kind] = cls

    def __post_init__(self) -> None:
        if "abstract" in vars(type(self)):
            raise TypeError(f"{type(self).__name__} is the abstract base of {_classes(self.kind)}")
        _check_fields(self.kind, self, self.may_be_0)

    def __str__(self) -> str:
        """Return the class and the fields that differ from its defaults."""
        return _call_of(self)

    @property
    def family(self) -> str:
        """Return the name of the plans whose measured times are fitted together: the plans of one kind, of one fused
        class, or the signaled plans whose groups copy engines transfer."""
        return self.kind

    def to_json(self) -> str:
        """Return all fields as JSON. "class" is included if the kind has several classes."""
        named = {} if type(self) is KINDS[self.kind] else {"class": type(self).__name__}
        return json.dumps({"kind": self.kind, **named, **asdict(self)}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan; absent fields have their defaults. Raises ValueError for text that is not a plan."""
        try:
            stored = dict(field for field in json.loads(text).items() if field not in REMOVED_FIELDS.items())
            plan = _class_of(stored.pop("kind", None), stored.pop("class", None))
            return plan(**{name: _value_of(plan, name, value) for name, value in stored.items()})
        except (TypeError, AttributeError, ValueError) as e:
            raise ValueError(f"not a plan: {text!r} ({e})") from e


def _classes(kind: str) -> list[str]:
    """Return the names of the classes of a kind."""
    return [name for name, cls in CLASSES.items() if cls.kind == kind and "abstract" not in vars(cls)]


def _class_of(kind: str, name: str | None) -> type[Plan]:
    """Return the class of a stored plan. Raises ValueError if there is none."""
    kind = RENAMED_KINDS.get(kind, kind)
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {list(KINDS)}")
    if name is None and "abstract" not in vars(KINDS[kind]):
        return KINDS[kind]
    if name not in _classes(kind):
        raise ValueError(f'"class" of kind {kind!r} must be one of {_classes(kind)}, got {name!r}')
    return CLASSES[name]


def _value_of(plan: type[Plan], name: str, value: object) -> object:
    """Return a field's value from its stored form, where a tuple is a list and a tile is a dict."""
    if isinstance(value, dict):
        return replace(getattr(plan, name), **value)
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Sequential(Plan):
    """cuBLAS and NCCL run one after the other."""

    kind: ClassVar[str] = "sequential"


@dataclass(frozen=True)
class Decomposed(Plan):
    """cuBLAS computes one group of shards after another, while a copy engine moves the other groups.

    groups: the number of shards in each group, beginning with this rank's own shard (all-gather); each number is a
    power of two that divides the number of shards before the group. Reduce-scatter and all-reduce use the reverse
    order, which ends with this rank's shard. Empty: each shard is a group. pieces: reduce-scatter makes `pieces` passes
    over all shards, each over a part of their rows (if every group is one shard and the rows divide evenly), so that
    only the last part's sum is left at the end. The other ops refuse a value above 1.

    All-reduce with norm but without a GEMM, where copy engines transfer the rows to their owners and back, refuses both
    fields.
    """

    kind: ClassVar[str] = "decomposed"
    groups: tuple[int, ...] = ()
    pieces: int = 1


@dataclass(frozen=True)
class Fused(Plan):
    """Base of the fused plans: a persistent GEMM in weft's own kernel, which waits for each tile's input to arrive, or
    communicates each tile once it is finished. Each operator has its own class; the defaults of each class were the
    fastest on most shapes on 8 H200s (bench/results).

    tile: the GEMM's tile.
    """

    kind: ClassVar[str] = "fused"
    abstract = True
    bounded = True
    tile: GemmTile = GemmTile()

    @property
    def family(self) -> str:
        return self.to_json()


@dataclass(frozen=True)
class FusedGather(Fused):
    """All-gather + GEMM in one launch: some programs pull the peers' shards; the others compute tiles, and wait for the
    chunks of at most block_m rows that a tile reads (ops/all_gather_matmul/kernels.py).

    per_sm: programs of the launch on every SM. flatten: the loops over tiles and over K are one loop, so that a tile's
    epilogue overlaps the next tile's loads. pull_programs: programs that pull; `split` of them share a chunk. Each of
    these programs pulls blocks of pull_rows x block_n / 2 elements, with pull_stages blocks in flight.
    """

    per_sm: int = 1
    flatten: bool = True
    pull_programs: int = 4
    pull_rows: int = 128
    pull_stages: int = 5
    split: int = 1


@dataclass(frozen=True)
class FusedGatherByCopies(Fused):
    """All-gather + GEMM in one launch, which waits before each tile for the shards that a copy engine pulls.

    per_sm, flatten: as in FusedGather.
    """

    variant = "by copies"
    per_sm: int = 1
    flatten: bool = True


@dataclass(frozen=True)
class FusedReduce(Fused):
    """Base of the plans of GEMM + reduce-scatter and GEMM + all-reduce: a GEMM, and a small kernel on the same SMs that
    sums finished tiles over ranks (ops/matmul_reduce/kernels.py).

    forward_programs: programs of the small kernel, at most a quarter of the SMs, that notify the owners of finished
    tiles and then pull too; a smaller number spaces out the pulling. pull_programs: further programs, which only pull.
    A pulled block has pull_rows (at most block_m) x block_n / 2 elements; each program has pull_stages blocks in
    flight.
    """

    abstract = True
    may_be_0 = ("pull_programs", "lag")
    pull_programs: int = 48
    pull_rows: int = 64
    pull_stages: int = 4
    forward_programs: int = 16


@dataclass(frozen=True)
class FusedReduceScatter(FusedReduce):
    """GEMM + reduce-scatter. A program sums one half tile after the other."""


@dataclass(frozen=True)
class FusedAllReduce(FusedReduce):
    """GEMM + all-reduce. lag: the other owners' sums of a tile are pulled `lag` tiles after the tile has been
    summed."""

    pull_programs: int = 96
    pull_rows: int = 32
    pull_stages: int = 7
    lag: int = 6


@dataclass(frozen=True)
class FusedAllToAll(Fused):
    """GEMM + all-to-all with a routing that only the device knows: the GEMM's epilogue stores each row on its
    destination rank (ops/matmul_all_to_all_routed/kernels.py)."""


@dataclass(frozen=True)
class FusedMoe(Fused):
    """A mixture of experts in one launch of per_sm programs on every SM (ops/moe/expert_parallel/fused_kernels.py).
    Each expert's rows are padded to a multiple of block_m.

    copy_programs: the first programs of the launch, which send tokens to experts and return sums, at most copy_rows
    rows at once; each has copy_stages blocks of tokens in flight. route: whether the launch includes the call's router
    (`weft.moe.TopKRouter`), if there is one; the launch then starts with the router's GEMM and top-k selection.
    """

    grid_barrier = True
    tile: GemmTile = NARROW
    per_sm: int = 2
    copy_programs: int = 64
    copy_rows: int = 8
    copy_stages: int = 4
    route: bool = False


@dataclass(frozen=True)
class Persistent(Plan):
    """A GEMM of 8-bit operands without communication, by weft's own kernel (compute/scaled_gemm.py).

    tile: the GEMM's tile, with block_k in 8-bit elements. per_sm: programs on every SM. flatten: as in FusedGather.
    """

    kind: ClassVar[str] = "persistent"
    tile: GemmTile = GemmTile(block_k=128)
    per_sm: int = 1
    flatten: bool = True


@dataclass(frozen=True)
class FlagGated(Plan):
    """All-gather + GEMM by quack's GEMM, which waits for each shard that a copy engine pulls
    (`integrations.quack.flag_gated`). That wait has no timeout. The wait ends because the copies follow a bounded
    barrier and wait for no other rank. Needs weft[quack], a Hopper GPU, and equal shards of whole clusters of tiles.

    tile_m, tile_n, cluster_m, pingpong: settings of the GEMM (`library_gemm.Form`).
    """

    kind: ClassVar[str] = "flag_gated"
    tile_m: int = 128
    tile_n: int = 192
    cluster_m: int = 2
    pingpong: bool = True


@dataclass(frozen=True)
class OneShot(Plan):
    """A collective of few rows in one launch, with low-latency rows (the data of such a row is its flag): every rank
    stores its rows on every rank that needs them. The launch runs before or after cuBLAS's GEMM. An all-reduce with or
    without a norm is the launch alone, in which every rank sums all rows.

    programs: number of programs, at most 1,024; 0: one for each SM. warps: most warps of a program.
    """

    kind: ClassVar[str] = "one_shot"
    may_be_0 = ("programs",)
    bounded = True
    programs: int = 0
    warps: int = 8


@dataclass(frozen=True)
class TwoShot(Plan):
    """Base of the two-shot plans: an all-reduce in one launch, where the owner of a row sums it and stores the sum on
    every rank. The launch runs alone; only TwoShotLowLatency can also run after cuBLAS's GEMM.

    programs, warps: as in OneShot.
    """

    kind: ClassVar[str] = "two_shot"
    abstract = True
    may_be_0 = ("programs",)
    bounded = True
    pull: ClassVar[bool] = False  # the owner reads each partial row from the memory of the rank that computed it
    low_latency: ClassVar[bool] = False  # the data of a row is its flag, so there are no counters
    programs: int = 0
    warps: int = 16


@dataclass(frozen=True)
class TwoShotCounted(TwoShot):
    """Base of the two-shot plans that count arrived rows, one block per program (ops/all_reduce/kernels.py). A launch
    has at most one program per SM.

    stages: pipeline stages; with n stages the rows of n - 1 are in flight, as far as they fit in shared memory.
    """

    abstract = True
    stages: int = 9


@dataclass(frozen=True)
class TwoShotPush(TwoShotCounted):
    """A two-shot plan in which ranks store their partial rows in the owner's staging memory.

    spread: a program stores a block for one owner at a time, instead of a block for every owner.
    """

    spread: bool = False


@dataclass(frozen=True)
class TwoShotPull(TwoShotCounted):
    """A two-shot plan in which owners read the partial rows from the symmetric memory of all ranks.

    16 programs suffice while GEMMs run: with a residual and RMSNorm, 4,096 x 8,192 bfloat16 elements take 208 us on 16
    programs, 206 us on 132, and 401 us on 8 (2 H100, 2026-11).
    """

    variant = "pulled"
    pull = True


@dataclass(frozen=True)
class TwoShotLowLatency(TwoShot):
    """A two-shot plan for few rows, with low-latency rows: the data of a row is its flag
    (ops/all_reduce/low_latency_kernels.py). If the output's dtype differs from x's, TwoShotPush runs instead, with the
    same numbers of programs and warps."""

    variant = "low latency"
    low_latency = True


LowLatencyShot: TypeAlias = OneShot | TwoShotLowLatency


@dataclass(frozen=True)
class Multicast(Plan):
    """A two-shot all-reduce in one launch by NVLink multicast: the switch sums a row for its owner, and stores it on
    every rank (TokenWeave, section 4). Elements have 16 bits. Needs symmetric memory with a multicast address.

    programs, warps: as in OneShot; few programs suffice.
    """

    kind: ClassVar[str] = "multicast"
    may_be_0 = ("programs",)
    programs: int = 8
    warps: int = 16


@dataclass(frozen=True)
class Signaled(Plan):
    """One persistent GEMM that signals groups of finished tiles; each signal starts an NCCL collective on that group
    (FlashOverlap).

    groups: the number of waves of tiles in each group, in the order of computation. If the GEMM has more waves than all
    groups together, the last group also contains the remaining waves; if it has fewer, the groups at the end are
    shortened or dropped. Empty: up to four groups, of which the last has one wave. ctas: most CTAs of the communicator;
    the GEMM runs one program on each remaining SM, and a wave is one tile of each program. copies: copy engines move
    the groups instead of NCCL (not for all-reduce); `ctas` is then the number of SMs left for waits. tile: the GEMM's
    tile.
    """

    kind: ClassVar[str] = "signaled"
    groups: tuple[int, ...] = ()
    # NCCL needs 13% to 25% more time for 64 MiB on 16 CTAs than on 24 to 32, and 46% to 120% more on 8 (4 H200,
    # 2026-11).
    ctas: int = 16
    copies: bool = False
    tile: GemmTile = GemmTile()

    @property
    def family(self) -> str:
        return f"{self.kind} by copies" if self.copies else self.kind


@dataclass(frozen=True)
class TwoLevel(Plan):
    """The op runs on each of several equal nodes (`World.levels`) with the plan that "auto" chooses for that node.
    Between nodes, NCCL moves data among ranks with the same local rank, on a stream of its own, while the node computes
    (transport/two_level.py).

    pieces: number of parts of a shard's rows, which are transferred and computed one after another. GEMM + all-to-all
    refuses a value above 1.
    """

    kind: ClassVar[str] = "two_level"
    pieces: int = 1


@dataclass(frozen=True)
class DispatchedGemms(Plan):
    """The base of the dispatched plans: kernels send an MoE layer's tokens to the ranks of their experts while the
    first grouped GEMM, which waits for tokens tile by tile, runs; kernels return weighted sums while the second GEMM
    runs.

    tile: the tile of both GEMMs, which run per_sm programs on every SM, with fewer stages if shared memory is too
    small. flatten: whether the first GEMM's loop over tiles is flattened. dispatch_programs, combine_programs: programs
    that share the SMs with a GEMM, of side_warps warps, or twice as many if they load only some routes at a time; each
    number is clamped to the number of SMs. Dispatch programs have send_stages blocks of rows in flight; combine
    programs sum at most sum_rows tokens at once.
    """

    kind: ClassVar[str] = "dispatched"
    abstract = True
    tile: GemmTile = GemmTile(stages=4)
    per_sm: int = 1
    flatten: bool = True
    side_warps: int = 4
    dispatch_programs: int = 128
    send_stages: int = 2
    combine_programs: int = 128
    sum_rows: int = 2


@dataclass(frozen=True)
class Dispatched(DispatchedGemms):
    """An MoE layer's experts in four launches (ops/moe/expert_parallel/kernels.py). Each expert's rows are padded to a
    multiple of block_m.

    send_rows: most rows of a block that is sent.
    """

    send_rows: int = 8


@dataclass(frozen=True)
class DispatchedColumns(DispatchedGemms):
    """Experts whose columns are split over ranks: the layer has two halves with a pair of launches each
    (ops/moe/tensor_parallel/op.py). block_m must be 128, the tile of the rows. A block that is sent has as many
    elements as side_warps hold, from one or several rows."""


@dataclass(frozen=True)
class Segmented(Plan):
    """Attention over gathered keys and values: the attention library's kernel runs over this rank's keys while the
    other ranks' keys arrive, then over the arrived keys in a few calls; one kernel merges the results (ops/attention).

    calls: the maximum number of library calls over the other ranks' keys for the same queries; each call starts when
    its keys have arrived.
    """

    kind: ClassVar[str] = "segmented"
    calls: int = 2


@dataclass(frozen=True)
class HeadParallel(Plan):
    """Attention of some heads over the whole sequence: ranks exchange queries, keys and values before it and results
    after it (DeepSpeed-Ulysses; ops/attention/head_parallel.py). The number of ranks must divide the numbers of query
    heads and of key heads.

    programs: programs of a push; 0: as many as the GPU has SMs.
    """

    kind: ClassVar[str] = "head_parallel"
    may_be_0 = ("programs",)
    programs: int = 0


@dataclass(frozen=True)
class LowLatency(Plan):
    """An MoE layer's experts for few tokens, in three launches without tables
    (ops/moe/expert_parallel/low_latency_kernels.py).

    tile: the tile of both GEMMs, which run per_sm programs on every SM and read an expert's weights once for each
    block_n columns, however many rows it has. copy_programs: programs that send rows and sums to other ranks, clamped
    to the number of all programs.
    """

    kind: ClassVar[str] = "low_latency"
    tile: TileShape = TileShape(block_m=16, block_n=128, block_k=128, warps=4, stages=3)
    per_sm: int = 2
    copy_programs: int = 64


def settings(plan: Plan | TileShape) -> dict[str, object]:
    """Return all fields by name, with the fields of a tile in place of the tile."""
    by_name: dict[str, object] = {}
    for name, value in ((field.name, getattr(plan, field.name)) for field in fields(plan)):
        by_name |= settings(value) if isinstance(value, TileShape) else {name: value}
    return by_name


def is_low_latency(plan: Plan) -> TypeGuard[LowLatencyShot]:
    """Return whether ranks only store to each other's memory, without counters."""
    return isinstance(plan, OneShot) or (isinstance(plan, TwoShot) and plan.low_latency)


def partition(groups: Sequence[int], waves: int) -> tuple[int, ...]:
    """Return the number of waves in each group, for a GEMM of `waves` waves (`Signaled.groups`)."""
    if not groups:
        parts = min(3, waves - 1)
        even = [(waves - 1) // parts + (i < (waves - 1) % parts) for i in range(parts)] if parts else []
        return (*even, 1)
    out: list[int] = []
    for g in groups:
        if sum(out) < waves:
            out.append(min(g, waves - sum(out)))
    return (*out[:-1], out[-1] + waves - sum(out))


# Two programs run on an SM: one program's epilogue overlaps the other program's main loop.
TWO_AN_SM = FusedGather(tile=NARROW, per_sm=2, pull_stages=6, pull_programs=8)
