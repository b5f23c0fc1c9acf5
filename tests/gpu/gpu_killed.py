"""Kill a rank: python -m tests.gpu.gpu_killed [--ranks N]

N plain processes run without a launcher that would end the others. The last process kills itself instead of joining an
op. With a fused plan, each of the other processes must raise a weft.Timeout that names the op and that rank, and must
end by itself. With cuBLAS and NCCL, the host waits for the GPU, and weft's watch of NCCL must end the process; if ranks
share a GPU, NCCL uses the network, and either torch's watchdog or weft's watch must.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import time

BOUND, GRACE = 5, 70  # seconds: the bound of every wait; the time in which to start, compile and end
ENDS = {  # by plan: the exit status and the report of the other processes
    "fused": (0, rf"all_gather_matmul.*after {BOUND} s.*rank \d+ did not arrive"),
    "sequential": (
        -signal.SIGABRT,
        rf"a collective of NCCL has not ended within ({4 * BOUND}|{8 * BOUND}) s|Timeout\(ms\)={4000 * BOUND}",
    ),
}


def rank_main(plan: str) -> int:
    import weft
    from tests.emulated.cases import draw

    world = weft.init()
    x, w = (draw(seed, *shape).to(world.device) for seed, shape in ((world.rank, (128, 128)), (9, (256, 128))))
    weft.all_gather_matmul(x, w, world=world, plan=plan)
    world.synchronize()
    world.exchange("ready")
    if world.rank == world.size - 1:
        time.sleep(1)  # by then the other ranks are waiting on the GPU
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.time()
    try:
        weft.all_gather_matmul(x, w, world=world, plan=plan)
        world.synchronize()
    except weft.Timeout as e:
        print(f"{time.time() - start:.1f} s: {e}", flush=True)
        os._exit(0)  # no peer is left to take part in closing the World
    print("no Timeout", flush=True)
    os._exit(1)


def run(plan: str, ranks: int) -> bool:
    """Run the processes, and return whether each of them ended as it must."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = dict(
        os.environ, WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WEFT_TIMEOUT=str(BOUND)
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.gpu_killed", "--plan", plan], env=dict(shared, RANK=str(r), LOCAL_RANK=str(r)),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for r in range(ranks)
    ]  # fmt: skip
    ok, reports, end = True, [], time.time() + GRACE + BOUND
    status, report = ENDS[plan]
    for rank, process in enumerate(running):
        try:
            text, _ = process.communicate(timeout=max(1.0, end - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0] + f"\nhung for {GRACE + BOUND} s"
        reports.append(f"{plan}, rank {rank}: exit {process.returncode}: {text.strip()[-300:]}")
        if rank < ranks - 1:
            ok &= process.returncode == status and bool(re.search(report, text))
        else:
            ok &= process.returncode == -signal.SIGKILL
    print("\n".join(reports), "ok" if ok else "FAILED", flush=True)
    return ok


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--plan", choices=ENDS)
    a = p.parse_args()
    if "RANK" in os.environ:
        return rank_main(a.plan)
    return 0 if all([run(plan, a.ranks) for plan in ENDS]) else 1


if __name__ == "__main__":
    sys.exit(main())
