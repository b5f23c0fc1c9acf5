"""What one rank's GPU did while a function ran, as spans: a track a stream, times on a clock that all ranks share."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .span import Span

_KINDS = {"kernel": "compute", "gpu_memcpy": "copy", "gpu_memset": "copy"}


def profiled(rank: int, fn: Callable[[], object]) -> list[Span]:
    """Run `fn` once; NCCL's kernels count as copies. Times in microseconds, names without their arguments."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        fn()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = []
    for event in events:
        kind = _KINDS.get(event.get("cat", ""))
        if kind:
            kind = "copy" if event["name"].startswith("nccl") else kind
            track = f"stream:{event['args']['stream']}"
            name = re.split("[(<]", event["name"].removeprefix("void "))[0].strip()
            spans.append(Span(rank, track, name, kind, event["ts"], event["ts"] + event["dur"]))
    return spans
