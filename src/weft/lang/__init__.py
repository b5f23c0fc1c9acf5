"""The module that kernel authors import: `import weft.lang as wl`."""

from .channel import BlockChannel, calls_of, end_call, rank_of, take_ticket
from .descriptors import tiles_of
from .host import beyond, rank_copy_data, rank_notify, rank_wait
from .intrinsics import (
    bulk_fence,
    flush_stores,
    globaltimer,
    look_again,
    peek,
    post,
    release_fence,
    wait_until,
    window_fence,
    window_store,
    window_sum,
)
from .jit import Kernel, jit
from .mapping import (
    StaticMapping,
    TableMapping,
    balanced_rows,
    channel_arrivals,
    shard_tables,
    tile_channels,
    tile_rank,
    tile_rows,
)
from .primitives import (
    channel_broadcast,
    channel_notify,
    channel_wait,
    consumer_tile_wait,
    peer_tile_notify,
    peer_tile_wait,
    producer_tile_notify,
    tile_pull_data,
    tile_push_data,
)

__all__ = [
    "BlockChannel", "Kernel", "StaticMapping", "TableMapping", "balanced_rows", "beyond", "bulk_fence", "calls_of",
    "channel_arrivals", "channel_broadcast", "channel_notify", "channel_wait", "consumer_tile_wait", "end_call",
    "globaltimer", "jit", "look_again", "peek", "peer_tile_notify", "peer_tile_wait", "post", "producer_tile_notify",
    "rank_copy_data", "rank_notify", "rank_of", "rank_wait", "release_fence", "flush_stores", "shard_tables",
    "take_ticket", "tile_channels", "tile_pull_data", "tile_push_data", "tile_rank", "tile_rows", "tiles_of",
    "wait_until", "window_fence", "window_store", "window_sum",
]  # fmt: skip
