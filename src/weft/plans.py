"""Plans: what was decided for one (op, shape, dtype, world, machine). Frozen, printable, storable as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeGuard

MAY_BE_0 = ("pullers", "pushers", "programs", "forward", "lag")
POWERS_OF_TWO = ("block_m", "block_n", "block_k", "warps", "pull_rows", "side_warps", "send_rows", "sum_rows")


KINDS: dict[str, type[Plan]] = {}  # by name


@dataclass(frozen=True)
class Plan:
    """Base of all plans. `kind` names the family; the fields are that family's parameters. Raises TypeError for a field
    of another type than its default's, ValueError for a number that it cannot have."""

    kind: ClassVar[str] = ""
    bounded: ClassVar[bool] = False  # what ranks wait for in it is waited for by weft's own kernels, not the library's

    def __init_subclass__(cls) -> None:
        if KINDS.get(cls.kind, cls).__qualname__ != cls.__qualname__:
            raise TypeError(f"{cls.__qualname__}: {KINDS[cls.kind].__qualname__} is the plan of kind {cls.kind!r}")
        KINDS[cls.kind] = cls

    def __post_init__(self) -> None:
        for field in fields(self):
            name = field.name
            usual: Any = field.default
            value: Any = getattr(self, name)
            if value is usual:
                continue
            numbers = value if type(value) is tuple else (value,)
            if type(value) is not type(usual) or any(type(v) not in (int, bool) for v in numbers):
                wanted = "a tuple of ints" if type(usual) is tuple else type(usual).__name__
                raise TypeError(f"{self.kind}: {name}={value!r} must be {wanted}")
            if type(usual) is bool:
                continue
            if any(v < (name not in MAY_BE_0) for v in numbers):
                raise ValueError(f"{self.kind}: {name}={value!r} must be at least {int(name not in MAY_BE_0)}")
            if name in POWERS_OF_TWO and value & (value - 1):
                raise ValueError(f"{self.kind}: {name}={value!r} must be a power of two")

    def __str__(self) -> str:
        """Its fields that are not its kind's defaults."""
        given = ((f, getattr(self, f.name)) for f in fields(self))
        return f"{type(self).__name__}({', '.join(f'{f.name}={value!r}' for f, value in given if value != f.default)})"

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, **asdict(self)}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Raises ValueError for what is not a plan."""
        try:
            given = json.loads(text)
            kind = given.pop("kind", None)
            if kind not in KINDS:
                raise ValueError(f"kind {kind!r} is not one of {list(KINDS)}")
            return KINDS[kind](**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
        except (TypeError, AttributeError, ValueError) as e:
            raise ValueError(f"not a plan: {text!r} ({e})") from e


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
    one and split evenly), so that only the last part's sum is left at the end.

    All-reduce and norm without a GEMM (neither field counts): copy engines carry the rows to their owners and back.
    """

    kind: ClassVar[str] = "decomposed"
    groups: tuple[int, ...] = ()
    pieces: int = 1


@dataclass(frozen=True)
class Fused(Plan):
    """A persistent GEMM gated by, or followed by, tiles that a few programs pull from the peers.

    pullers: programs that pull. All-gather: of the GEMM's own launch, of per_sm programs on every SM; 0, a copy engine
    pulls. Sums over ranks: of a small kernel that shares the SMs with the GEMM's. block_m/n/k, group_m, warps, stages:
    the GEMM. pull_rows, pull_stages: a pulled block is pull_rows (of sums at most block_m) x block_n / 2 elements, and
    that many blocks are under way. All-gather: flatten, the loop over tiles; split, pullers that share one chunk of
    block_m rows. Sums: forward, further programs, which tell the owners of finished tiles; few of them also space out
    the pulling. Reduce-scatter: batch, half tiles that a puller draws at once. All-reduce: lag, tiles between summing a
    tile and pulling the other owners' sums of it.

    A mixture of experts: one launch of per_sm programs on every SM (ops/moe/fused_kernels.py), of which the first
    `pullers` move rows, tokens out and sums back, at most pull_rows at a time, and of tokens pull_stages of these under
    way. Experts are padded to block_m rows. flatten, split, forward, batch and lag do not count.
    """

    kind: ClassVar[str] = "fused"
    bounded = True
    pullers: int = 4
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    warps: int = 8
    stages: int = 3
    per_sm: int = 1
    flatten: bool = True
    pull_rows: int = 128
    pull_stages: int = 5
    split: int = 1
    forward: int = 4
    batch: int = 1
    lag: int = 6


@dataclass(frozen=True)
class Awaiting(Plan):
    """All-gather + GEMM by quack's GEMM, which waits for each shard that a copy engine pulls (`gemms.awaiting`): a wait
    without a limit, for what comes behind a bounded barrier and waits for nobody. Needs weft[quack], a Hopper GPU, and
    equal shards of whole clusters of tiles.

    tile_m, tile_n, cluster_m, pingpong: of the GEMM (`gemms.Form`).
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
    bounded = True
    programs: int = 0
    warps: int = 8


@dataclass(frozen=True)
class TwoShot(Plan):
    """All-reduce in one launch, two shots: a row is summed by its owner, which stores it on every rank. Alone, or after
    the library's GEMM.

    programs, warps: as in OneShot. rows: of a block, the unit that is counted. pull: the owner reads the partial rows
    from all ranks' symmetric memory; else they store them in its staging memory, and spread says whether a program
    stores a block of one owner at a time or one of every owner. bulk: peers are stored to by TMA. stages: rows of one
    source that a program has under way. post: rows are not counted, but their data is their flag (low latency), for few
    rows; of the others only programs and warps count then. (An output of 8 bits goes the other way.)
    """

    kind: ClassVar[str] = "two_shot"
    bounded = True
    programs: int = 0
    warps: int = 16
    rows: int = 1
    pull: bool = False
    spread: bool = False
    bulk: bool = False
    stages: int = 9
    post: bool = False


@dataclass(frozen=True)
class Multicast(Plan):
    """All-reduce in one launch, two shots by NVLink multicast: the switch sums a row for its owner, and stores it on
    every rank (TokenWeave, section 4). Of 16-bit elements. Needs symmetric memory with a multicast address.

    programs, warps: as in OneShot; few programs are enough.
    """

    kind: ClassVar[str] = "multicast"
    programs: int = 8
    warps: int = 16


@dataclass(frozen=True)
class Signaled(Plan):
    """One persistent GEMM that signals groups of finished tiles; each signal starts one of the library's collectives on
    that group (FlashOverlap).

    groups: waves of tiles a group, in the order in which they are computed. Waves beyond their sum join the last group,
    groups beyond the last wave are left out. Empty: up to four groups, the last one wave. ctas: CTAs that the
    communicator may take; the GEMM has the other SMs, one program each, and a wave is one tile a program. copies: copy
    engines move the groups, not the library's collectives; ctas are then the SMs left to waits. block_m/n/k, group_m,
    warps, stages: the GEMM.
    """

    kind: ClassVar[str] = "signaled"
    groups: tuple[int, ...] = ()
    ctas: int = 16
    copies: bool = False
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    warps: int = 8
    stages: int = 3


@dataclass(frozen=True)
class Dispatched(Plan):
    """An MoE layer's experts in four launches: tokens to the ranks of their experts under the first grouped GEMM, whose
    tiles wait for them; weighted sums back under the second (ops/moe/kernels.py).

    block_m/n/k, group_m, warps, stages: both GEMMs; experts are padded to block_m rows, and there are fewer stages
    where an SM has no memory for them. flatten: the first one's loop over tiles. senders, summers: programs, of
    side_warps warps each, that share the SMs with a GEMM: of the sends, send_rows rows (at most) at a time and
    send_stages of these under way; and of the sums, sum_rows tokens (at most) at a time. More than SMs count as these.
    Of experts whose columns are split over ranks (ops/moe/grouped.py) likewise, one pair of the launches in each half;
    there block_m is 128, and send_rows does not count.
    """

    kind: ClassVar[str] = "dispatched"
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    warps: int = 8
    stages: int = 4
    flatten: bool = True
    side_warps: int = 4
    senders: int = 128
    send_rows: int = 8
    send_stages: int = 2
    summers: int = 128
    sum_rows: int = 2


@dataclass(frozen=True)
class Segmented(Plan):
    """Attention over gathered keys and values: the library's over this rank's own while the others' arrive, then over
    those in few calls, and one merge of the results (ops/attention).

    calls: into how many library calls, at most, the others' keys are divided that the same queries see; each starts
    when its keys are there. pushers: programs that push keys to their readers; 0: a copy engine does.
    """

    kind: ClassVar[str] = "segmented"
    calls: int = 2
    pushers: int = 0


@dataclass(frozen=True)
class HeadParallel(Plan):
    """Attention of some of the heads over the whole sequence, for which queries, keys and values are exchanged, and
    results back (DeepSpeed-Ulysses; ops/attention/heads.py). The ranks divide the heads, of keys too.

    programs: of a push; 0: as many as the GPU has SMs.
    """

    kind: ClassVar[str] = "head_parallel"
    programs: int = 0


@dataclass(frozen=True)
class LowLatency(Plan):
    """An MoE layer's experts for a few tokens, in three launches and without tables (ops/moe/few_kernels.py).

    block_m/n/k, warps, stages: both GEMMs, of per_sm programs on every SM, which read an expert's weights once for
    each block_n columns, whatever rows it has. movers: programs that send rows, and sums, to other ranks; more than
    there are count as these.
    """

    kind: ClassVar[str] = "low_latency"
    block_m: int = 16
    block_n: int = 128
    block_k: int = 64
    warps: int = 4
    stages: int = 4
    per_sm: int = 2
    movers: int = 64


def posts(plan: Plan) -> TypeGuard[OneShot | TwoShot]:
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
TWO_AN_SM = Fused(block_n=128, warps=4, per_sm=2, pull_stages=6, pullers=8)

# For worlds of a few programs a rank, as in the emulator.
SMALL = Fused(
    pullers=2,
    block_m=16,
    block_n=32,
    block_k=32,
    group_m=2,
    warps=4,
    stages=2,
    pull_rows=8,
    pull_stages=2,
    forward=1,
    batch=2,
    lag=1,
)
SMALL_REDUCE = TwoShot(warps=4, rows=2, stages=2)
SMALL_SIGNALED = Signaled(ctas=1, block_m=16, block_n=32, block_k=32, group_m=2, warps=4, stages=2)

SMALL_DISPATCHED = Dispatched(
    block_m=16, block_n=32, block_k=32, group_m=2, warps=4, stages=2, senders=2, send_rows=2, summers=2, sum_rows=2
)
