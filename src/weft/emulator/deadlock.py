"""The wait-for graph of a deadlock as text: the wait of each task, and the tasks that could still satisfy it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from .tasks import Collective, Poll, Task, Wait, place

if TYPE_CHECKING:
    from .machine import Machine


def graph(machine: Machine) -> str:
    """Return the wait-for graph of a machine on which no task can run."""
    stuck = [t for t in machine.tasks if not t.done and t.waits not in (None, "idle")]
    waiting = "1 task waits and cannot" if len(stuck) == 1 else f"{len(stuck)} tasks wait and none can"
    lines = [f"{waiting} go on (seed {machine.seed}, {machine.mode}):"]
    order = {"program": 0, "stream": 1, "host": 2}
    alike: dict[Hashable, list[Task]] = {}
    for task in sorted(stuck, key=lambda t: (order[t.kind], t.rank)):
        alike.setdefault(_alike(task), []).append(task)
    for tasks in alike.values():
        lines += _describe(machine, tasks)
    for rank in range(machine.size):
        for run in machine.streams.pending[rank]:
            held = ", ".join(t.name for t in machine.streams.resident[rank])
            lines.append(
                f"  rank {rank} {run.kernel.__name__}[{run.started}..{run.programs - 1}] are not resident: all "
                f"{machine.sm_count} SMs of the rank are held by {held}"
            )
        if machine.hosts[rank].done:
            lines.append(f"  rank {rank} host has returned")
    return "\n".join(lines)


def _alike(task: Task) -> Hashable:
    """Return a key that is equal for programs of one launch that wait for one value of one counter at one site."""
    if task.run is not None and isinstance(task.waits, Wait):
        return task.run, task.waits.address, task.waits.target, task.waits.site
    return task


def _describe(machine: Machine, tasks: list[Task]) -> list[str]:
    task, pad = tasks[0], "  "
    waits = task.waits
    if isinstance(waits, Wait):
        numbers = (("tile", {t.wait.tile for t in tasks}), ("peer", {t.wait.peer for t in tasks}))
        labels = [(name + "s" * (len(values) > 1), sorted(values)) for name, values in numbers if min(values) >= 0]
        suffix = "".join(f", {name} {', '.join(map(str, values))}" for name, values in labels)
        condition = f"{machine.label(waits.address)} >= {waits.target}, now {machine.peek(waits.address)}{suffix}"
        location = f" at {place(waits.site)}" if waits.site else ""
        names = ", ".join([task.name, *(t.name.removeprefix(f"rank {t.rank} ") for t in tasks[1:])])
        verb = "waits" if len(tasks) == 1 else "wait"
        return [f"{pad}{names} {verb} for {condition}{location}", *_raisers(machine, waits.address, pad)]
    if isinstance(waits, Poll):
        word = machine.label(waits.address) if waits.address else "several words"
        condition = f"polls {word}"
        if waits.plain:
            condition = f"re-reads {word} for ever, by ordinary loads,"
        elif waits.address:
            condition += f", now {machine.peek(waits.address)}"
        lines = _raisers(machine, waits.address, pad) if waits.address else []
        if task.kind == "stream":  # the name of its operation contains the place
            return [f"{pad}{machine.owner(task.agent, task.tick).name} {condition}", *lines]
        return [f"{pad}{task.name} {condition} at {place(waits.site)}", *lines]
    if isinstance(waits, Collective):
        missing = sorted(set(waits.ranks) - set(waits.arrived))
        condition = f"{waits.kind} (collective {waits.number}) of ranks {missing}"
        return [f"{pad}{task.name} waits for {condition}"]
    return [f"{pad}{task.name} waits for {waits}"]


def _raisers(machine: Machine, address: int, pad: str) -> list[str]:
    """Return lines that name the tasks that have raised a word so far, and the running tasks that have raised this word
    or another word of the same tensor."""
    region = machine.memory.find(address, address + 1)
    raisers = [u.task for u in machine.words.get(address, ())][-6:]
    so_far = ", ".join(dict.fromkeys(f"{t.name}{' (ended)' if t.done else ''}" for t in raisers))
    near: dict[str, None] = {}
    for word, entry in machine.words.items():
        if region is not None and region.base <= word < region.end:
            near.update({u.task.name: None for u in entry if not u.task.done})
    lines = [f"{pad}    raised so far by {so_far or 'nobody'}"]
    alive = ", ".join(near)
    if alive:
        lines.append(f"{pad}    could be raised by {alive}")
    else:
        lines.append(f"{pad}    nobody that still runs has raised it or a neighbour so far")
    return lines
