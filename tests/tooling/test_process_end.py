"""A rank's process can end at any time after its last call."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from weft.backends.messages import Messages


def threads(name: str = "") -> set[str]:
    """Return the ids of those threads of this process whose names contain the given text."""
    return {task.parent.name for task in Path("/proc/self/task").glob("*/comm") if name in task.read_text()}


def test_gloos_threads_end_before_the_interpreter(tmp_path: Path) -> None:
    """A thread that releases a tensor while the interpreter exits would abort the process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        before = threads()
        messages = Messages(dist.group.WORLD, 60.0)
        assert messages.objects("x") == ["x"]
        assert threads("gloo_runloop") - before, "gloo must have started threads"
        assert messages.close.atexit
        messages.close()  # Python calls this at exit
        assert not threads("gloo_runloop") - before
    finally:
        dist.destroy_process_group()
