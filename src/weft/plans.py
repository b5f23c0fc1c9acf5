"""Plans: what was decided for one (op, shape, dtype, world, machine). Frozen, printable, storable as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, TypeAlias, TypeGuard

POWERS_OF_TWO = (
    *("block_m", "block_n", "block_k", "warps", "side_warps"),
    *("pull_rows", "copy_rows", "send_rows", "sum_rows"),
)

KINDS: dict[str, type[Plan]] = {}  # by kind: its class, or what its classes have in common
CLASSES: dict[str, type[Plan]] = {}  # by name


def _check_fields(title: str, of: TileShape | Plan, may_be_0: Sequence[str] = ()) -> None:
    """Raise TypeError for a field of another type than its default's, ValueError for a number that it cannot have."""
    for field in fields(of):
        name = field.name
        usual: Any = field.default
        value: Any = getattr(of, name)
        if value is usual:
            continue
        numbers = value if type(value) is tuple else (value,)
        tile = isinstance(usual, TileShape)
        if type(value) is not type(usual) or not (tile or all(type(v) in (int, bool) for v in numbers)):
            wanted = "a tuple of ints" if type(usual) is tuple else type(usual).__name__
            raise TypeError(f"{title}: {name}={value!r} must be {wanted}")
        if tile or type(usual) is bool:
            continue
        if any(v < (name not in may_be_0) for v in numbers):
            raise ValueError(f"{title}: {name}={value!r} must be at least {int(name not in may_be_0)}")
        if name in POWERS_OF_TWO and value & (value - 1):
            raise ValueError(f"{title}: {name}={value!r} must be a power of two")


def _call_of(of: TileShape | Plan) -> str:
    """The class, called with the fields that are not its defaults."""
    given = ((f.name, getattr(of, f.name)) for f in fields(of) if getattr(of, f.name) != f.default)
    return f"{type(of).__name__}({', '.join(f'{name}={value}' for name, value in given)})"


@dataclass(frozen=True)
class TileShape:
    """The tile of a GEMM that one program computes at a time, block_m x block_n elements, block_k of K in a step.

    warps: of the program. stages: steps of K that it holds in shared memory at once.
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
    """The tiles of a GEMM and their order: group_m rows of tiles are computed column by column, so that programs that
    run at once share rows and columns in the L2 cache."""

    group_m: int = 8

    def __str__(self) -> str:
        return _call_of(self)


NARROW = GemmTile(block_n=128, warps=4)  # of two programs on an SM


@dataclass(frozen=True)
class Plan:
    """Base of all plans. `kind` names the family; the fields are the parameters of one kernel, and each of them counts.
    Classes of one kind, each the plan of another kernel, have one base class of that kind, of which there are no plans.
    Raises TypeError for a field of another type than its default's, ValueError for a number that it cannot have."""

    kind: ClassVar[str] = ""
    abstract: ClassVar[bool] = True  # of the class that says so itself there are no plans
    may_be_0: ClassVar[tuple[str, ...]] = ()  # fields; other numbers are at least 1
    bounded: ClassVar[bool] = False  # what ranks wait for in it is waited for by weft's own kernels, not the library's

    def __init_subclass__(cls) -> None:
        base, namesake = KINDS.get(cls.kind, cls), CLASSES.get(cls.__name__, cls)
        again = base.__qualname__ == cls.__qualname__  # its file was loaded before
        if not again and not issubclass(cls, base):
            raise TypeError(f"{cls.__qualname__}: {base.__qualname__} is the plan of kind {cls.kind!r}")
        if (namesake.__qualname__, namesake.kind) != (cls.__qualname__, cls.kind):
            raise TypeError(f"{cls.__qualname__}: {namesake.__qualname__} is a plan of kind {namesake.kind!r}")
        CLASSES[cls.__name__] = cls
        if again:
            KINDS[cls.kind] = cls

    def __post_init__(self) -> None:
        if "abstract" in vars(type(self)):
            raise TypeError(f"{type(self).__name__} is what {_classes(self.kind)} have in common")
        _check_fields(self.kind, self, self.may_be_0)

    def __str__(self) -> str:
        """Its fields that are not its defaults."""
        return _call_of(self)

    def to_json(self) -> str:
        """All fields. "class" is given where the kind has several."""
        named = {} if type(self) is KINDS[self.kind] else {"class": type(self).__name__}
        return json.dumps({"kind": self.kind, **named, **asdict(self)}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Fields that are not given have their defaults. Raises ValueError for what is not a plan."""
        try:
            given = json.loads(text)
            plan = _class_of(given.pop("kind", None), given.pop("class", None))
            return plan(**{name: _value_of(plan, name, value) for name, value in given.items()})
        except (TypeError, AttributeError, ValueError) as e:
            raise ValueError(f"not a plan: {text!r} ({e})") from e


def _classes(kind: str) -> list[str]:
    """The names of the classes of a kind."""
    return [name for name, each in CLASSES.items() if each.kind == kind and "abstract" not in vars(each)]


def _class_of(kind: str, name: str | None) -> type[Plan]:
    """The class of a stored plan. Raises ValueError where there is none."""
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {list(KINDS)}")
    if name is None and "abstract" not in vars(KINDS[kind]):
        return KINDS[kind]
    if name not in _classes(kind):
        raise ValueError(f'"class" of kind {kind!r} must be one of {_classes(kind)}, got {name!r}')
    return CLASSES[name]


def _value_of(plan: type[Plan], name: str, value: object) -> object:
    """A field as it is stored: a tuple as a list, a tile as its fields."""
    if isinstance(value, dict):
        return replace(getattr(plan, name), **value)
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Sequential(Plan):
    """cuBLAS and NCCL, one after the other."""

    kind: ClassVar[str] = "sequential"


@dataclass(frozen=True)
class Decomposed(Plan):
    """Unmodified cuBLAS on one group of shards after the other, while a copy engine moves the other groups.

    groups: shards a group, from the own shard outwards; each a power of two that divides the shards before it
    (all-gather). Reduce-scatter and all-reduce take them from the far end inwards. Empty: every shard by itself.
    pieces: reduce-scatter goes over all shards that many times, a part of their rows each time (where shards go one by
    one and split evenly), so that only the last part's sum is left at the end. The other ops refuse more than 1.

    All-reduce and norm without a GEMM, where copy engines carry the rows to their owners and back, refuse both fields.
    """

    kind: ClassVar[str] = "decomposed"
    groups: tuple[int, ...] = ()
    pieces: int = 1


@dataclass(frozen=True)
class Fused(Plan):
    """What the fused plans have in common: a persistent GEMM in weft's own kernel, whose tiles wait for what arrives or
    are communicated as they are finished. Each operator has a class of its own, whose defaults served most shapes on
    8 H200s.

    tile: of the GEMM.
    """

    kind: ClassVar[str] = "fused"
    abstract = True
    bounded = True
    tile: GemmTile = GemmTile()


@dataclass(frozen=True)
class FusedGather(Fused):
    """All-gather + GEMM in one launch: some of its programs pull the peers' shards, the others compute tiles that wait
    for the chunks of block_m rows that they read (ops/all_gather_matmul/kernels.py).

    per_sm: programs of the launch on every SM. flatten: the loop over tiles is one with the loop over K, so that a
    tile's epilogue runs under the next one's loads. pull_programs: that pull; split of them share a chunk. They pull
    blocks of pull_rows x block_n / 2 elements, of which each has pull_stages under way.
    """

    per_sm: int = 1
    flatten: bool = True
    pull_programs: int = 4
    pull_rows: int = 128
    pull_stages: int = 5
    split: int = 1


@dataclass(frozen=True)
class FusedGatherByCopies(Fused):
    """All-gather + GEMM in one launch, whose tiles wait for the shards that a copy engine pulls.

    per_sm, flatten: as in FusedGather.
    """

    per_sm: int = 1
    flatten: bool = True


@dataclass(frozen=True)
class FusedReduce(Fused):
    """What GEMM + reduce-scatter and GEMM + all-reduce have in common: a GEMM, and a small kernel on the same SMs that
    sums finished tiles over ranks (ops/matmul_reduce/kernels.py).

    forward_programs: of the small kernel, which tell the owners of finished tiles, at most a quarter of the SMs, and
    then pull too; fewer of them space out the pulling. pull_programs: further ones, which pull alone. A pulled block is
    pull_rows (at most block_m) x block_n / 2 elements, and each program has pull_stages of them under way.
    """

    abstract = True
    may_be_0 = ("pull_programs", "lag")
    pull_programs: int = 48
    pull_rows: int = 64
    pull_stages: int = 4
    forward_programs: int = 16


@dataclass(frozen=True)
class FusedReduceScatter(FusedReduce):
    """GEMM + reduce-scatter. batch: half tiles that a program draws at once to sum."""

    batch: int = 1


@dataclass(frozen=True)
class FusedAllReduce(FusedReduce):
    """GEMM + all-reduce. lag: tiles between summing a tile and pulling the other owners' sums of it."""

    pull_programs: int = 96
    pull_rows: int = 32
    pull_stages: int = 7
    lag: int = 6


@dataclass(frozen=True)
class FusedMoe(Fused):
    """A mixture of experts in one launch of per_sm programs on every SM (ops/moe/expert_parallel/fused_kernels.py).
    Experts are padded to block_m rows.

    copy_programs: the first programs of the launch, which move rows, tokens out and sums back, at most copy_rows at
    once; each has copy_stages blocks of tokens in flight.
    """

    tile: GemmTile = NARROW
    per_sm: int = 2
    copy_programs: int = 64
    copy_rows: int = 8
    copy_stages: int = 4


@dataclass(frozen=True)
class Persistent(Plan):
    """A GEMM alone, of 8-bit operands, by weft's own kernel (compute/scaled_gemm.py).

    tile: of the GEMM, block_k in elements of 8 bits. per_sm: programs on every SM. flatten: as in FusedGather.
    """

    kind: ClassVar[str] = "persistent"
    tile: GemmTile = GemmTile(block_k=128)
    per_sm: int = 1
    flatten: bool = True


@dataclass(frozen=True)
class Awaiting(Plan):
    """All-gather + GEMM by quack's GEMM, which waits for each shard that a copy engine pulls
    (`library_gemm.awaiting`): a wait without a limit, for what comes behind a bounded barrier and waits for nobody.
    Needs weft[quack], a Hopper GPU, and equal shards of whole clusters of tiles.

    tile_m, tile_n, cluster_m, pingpong: of the GEMM (`library_gemm.Form`).
    """

    kind: ClassVar[str] = "awaiting"
    tile_m: int = 128
    tile_n: int = 192
    cluster_m: int = 2
    pingpong: bool = True


@dataclass(frozen=True)
class OneShot(Plan):
    """A collective of few rows in one launch, by low-latency rows: every rank stores its rows wherever they are needed.
    Before or after the library's GEMM, or, all-reduce with or without a norm, alone; there every rank sums all rows
    itself.

    programs: of the launch, more count as 1,024; 0: as many as the GPU has SMs. warps: of a program, at most.
    """

    kind: ClassVar[str] = "one_shot"
    may_be_0 = ("programs",)
    bounded = True
    programs: int = 0
    warps: int = 8


@dataclass(frozen=True)
class TwoShot(Plan):
    """What the two-shot plans have in common: all-reduce in one launch, in which a row is summed by its owner, which
    stores it on every rank. Alone, or after the library's GEMM.

    programs, warps: as in OneShot. pull, post: what the class does, as they say.
    """

    kind: ClassVar[str] = "two_shot"
    abstract = True
    may_be_0 = ("programs",)
    bounded = True
    pull: ClassVar[bool] = False  # the owner reads the partial rows where they are
    post: ClassVar[bool] = False  # rows are not counted: their data is their flag
    programs: int = 0
    warps: int = 16


@dataclass(frozen=True)
class TwoShotCounted(TwoShot):
    """What the two-shot plans that count blocks of rows have in common (ops/all_reduce/kernels.py).

    rows: of a block, the unit that is counted. bulk: peers are stored to by TMA. stages: rows of one source that a
    program has under way.
    """

    abstract = True
    rows: int = 1
    bulk: bool = False
    stages: int = 9


@dataclass(frozen=True)
class TwoShotPush(TwoShotCounted):
    """Two shots whose ranks store their partial rows in the owner's staging memory.

    spread: a program stores a block of one owner at a time, not one of every owner.
    """

    spread: bool = False


@dataclass(frozen=True)
class TwoShotPull(TwoShotCounted):
    """Two shots whose owners read the partial rows from all ranks' symmetric memory."""

    pull = True


@dataclass(frozen=True)
class TwoShotLowLatency(TwoShot):
    """Two shots of few rows, whose data is their flag (ops/all_reduce/low_latency_kernels.py). Rows of an output of
    another dtype than x's are counted: they go by TwoShotPush of as many programs and warps."""

    post = True


LowLatencyShot: TypeAlias = OneShot | TwoShotLowLatency


@dataclass(frozen=True)
class Multicast(Plan):
    """All-reduce in one launch, two shots by NVLink multicast: the switch sums a row for its owner, and stores it on
    every rank (TokenWeave, section 4). Of 16-bit elements. Needs symmetric memory with a multicast address.

    programs, warps: as in OneShot; few programs are enough.
    """

    kind: ClassVar[str] = "multicast"
    may_be_0 = ("programs",)
    programs: int = 8
    warps: int = 16


@dataclass(frozen=True)
class Signaled(Plan):
    """One persistent GEMM that signals groups of finished tiles; each signal starts one of the library's collectives on
    that group (FlashOverlap).

    groups: waves of tiles a group, in the order in which they are computed. Waves beyond their sum join the last group,
    groups beyond the last wave are left out. Empty: up to four groups, the last one wave. ctas: CTAs that the
    communicator may take; the GEMM has the other SMs, one program each, and a wave is one tile a program. copies: copy
    engines move the groups, not the library's collectives; ctas are then the SMs left to waits. tile: of the GEMM.
    """

    kind: ClassVar[str] = "signaled"
    groups: tuple[int, ...] = ()
    ctas: int = 16
    copies: bool = False
    tile: GemmTile = GemmTile()


@dataclass(frozen=True)
class TwoLevel(Plan):
    """The op itself on each of several nodes alike (`World.levels`), by the plan that "auto" has there, and between
    nodes the library's transfers among ranks of one place in their nodes, on a stream of their own, while the node
    computes (ops/two_level.py).

    pieces: into how many parts of its rows a shard is cut, each of which crosses and is computed by itself. GEMM +
    all-to-all refuses more than 1.
    """

    kind: ClassVar[str] = "two_level"
    pieces: int = 1


@dataclass(frozen=True)
class DispatchedGemms(Plan):
    """The base of the dispatched plans: an MoE layer's tokens go to the ranks of their experts under the first grouped
    GEMM, whose tiles wait for them; weighted sums go back under the second.

    tile: of both GEMMs; they have fewer stages where an SM has no memory for them. flatten: whether the first GEMM's
    loop over tiles is flattened. dispatch_programs, combine_programs: programs, of side_warps warps each, that share
    the SMs with a GEMM. Dispatch programs have send_stages blocks of rows in flight; combine programs sum at most
    sum_rows tokens at once. Numbers above that of the SMs count as it.
    """

    kind: ClassVar[str] = "dispatched"
    abstract = True
    tile: GemmTile = GemmTile(stages=4)
    flatten: bool = True
    side_warps: int = 4
    dispatch_programs: int = 128
    send_stages: int = 2
    combine_programs: int = 128
    sum_rows: int = 2


@dataclass(frozen=True)
class Dispatched(DispatchedGemms):
    """An MoE layer's experts in four launches (ops/moe/expert_parallel/kernels.py). Experts are padded to block_m rows.

    send_rows: the most rows of a block that is sent.
    """

    send_rows: int = 8


@dataclass(frozen=True)
class DispatchedColumns(DispatchedGemms):
    """Experts whose columns are split over ranks: a pair of launches in each half (ops/moe/tensor_parallel/op.py). Rows
    are in tiles of 128, which block_m must be. A block that is sent has as many elements as side_warps hold, whatever
    rows they belong to."""


@dataclass(frozen=True)
class Segmented(Plan):
    """Attention over gathered keys and values: the library's over this rank's own while the others' arrive, then over
    those in few calls, and one merge of the results (ops/attention).

    calls: into how many library calls, at most, the others' keys are divided that the same queries see; each starts
    when its keys are there. push_programs: programs that push keys to their readers; 0: a copy engine does.
    """

    kind: ClassVar[str] = "segmented"
    may_be_0 = ("push_programs",)
    calls: int = 2
    push_programs: int = 0


@dataclass(frozen=True)
class HeadParallel(Plan):
    """Attention of some of the heads over the whole sequence, for which queries, keys and values are exchanged, and
    results back (DeepSpeed-Ulysses; ops/attention/head_parallel.py). The ranks divide the heads, of keys too.

    programs: of a push; 0: as many as the GPU has SMs.
    """

    kind: ClassVar[str] = "head_parallel"
    may_be_0 = ("programs",)
    programs: int = 0


@dataclass(frozen=True)
class LowLatency(Plan):
    """An MoE layer's experts for few tokens, in three launches without tables
    (ops/moe/expert_parallel/low_latency_kernels.py).

    tile: of both GEMMs, of per_sm programs on every SM, which read an expert's weights once for each block_n columns,
    however many rows it has. copy_programs: programs that send rows and sums to other ranks; numbers above that of all
    programs count as it.
    """

    kind: ClassVar[str] = "low_latency"
    tile: TileShape = TileShape(block_m=16, block_n=128, warps=4, stages=4)
    per_sm: int = 2
    copy_programs: int = 64


def settings(of: Plan | TileShape) -> dict[str, object]:
    """All fields by name, those of a tile among them."""
    found: dict[str, object] = {}
    for name, value in ((field.name, getattr(of, field.name)) for field in fields(of)):
        found |= settings(value) if isinstance(value, TileShape) else {name: value}
    return found


def posts(plan: Plan) -> TypeGuard[LowLatencyShot]:
    """Whether ranks only store to each other's memory, and nothing is counted there."""
    return isinstance(plan, OneShot) or (isinstance(plan, TwoShot) and plan.post)


def partition(groups: Sequence[int], waves: int) -> tuple[int, ...]:
    """Waves of every group, for a GEMM of `waves` waves (`Signaled.groups`)."""
    if not groups:
        parts = min(3, waves - 1)
        even = [(waves - 1) // parts + (i < (waves - 1) % parts) for i in range(parts)] if parts else []
        return (*even, 1)
    out: list[int] = []
    for g in groups:
        if sum(out) < waves:
            out.append(min(g, waves - sum(out)))
    return (*out[:-1], out[-1] + waves - sum(out))


# One program's epilogue under the other's main loop.
TWO_AN_SM = FusedGather(tile=NARROW, per_sm=2, pull_stages=6, pull_programs=8)
TWO_AN_SM_BY_COPIES = FusedGatherByCopies(tile=NARROW, per_sm=2)
