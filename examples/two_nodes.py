"""Tensor parallelism inside each node, FSDP between nodes: train an MLP for some steps, and compare every loss with that of the
unsharded MLP on one rank.

On two nodes of 8 GPUs, node 0 at ADDRESS, on each of them:
    torchrun --nnodes 2 --node-rank 0|1 --nproc-per-node 8 --master-addr ADDRESS --master-port 29500 examples/two_nodes.py
Two nodes of 2 CPU processes, on this machine:  python examples/two_nodes.py --gloo
"""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import silu

import weft

STEPS, RATE, ROUNDING = 8, 0.5, 1e-2


def whole_losses(weights, batches):
    """Return the loss of each step of the unsharded MLP in float32, over the tokens [nodes, tokens, hidden] of all nodes."""
    weights = {name: value.float().requires_grad_() for name, value in weights.items()}
    optimizer, losses = torch.optim.SGD(weights.values(), lr=RATE), []
    for x in (batch.flatten(0, 1).float() for batch in batches):
        gate, up, down = (weights[f"{name}_proj.weight"] for name in ("gate", "up", "down"))
        loss = (silu(x @ gate.t()) * (x @ up.t()) @ down.t() - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(mesh, weights, batches):
    """Return the same losses computed by all ranks. A node has one row of each batch, whose tokens its ranks split."""
    world = weft.init(mesh["tensor"].get_group())  # the ranks of this node
    hidden, intermediate = weights["down_proj.weight"].shape
    mlp = weft.nn.ParallelMLP(hidden, intermediate, world=world)
    mlp.load_state_dict(weights)
    fully_shard(mlp, mesh=mesh["data"])  # shards this rank's weights over the ranks with its index on all nodes
    if world.device.type == "cpu":
        mlp.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    optimizer, losses = torch.optim.SGD(mlp.parameters(), lr=RATE), []
    for batch in batches:
        tokens = batch[mesh["data"].get_local_rank()]
        x = tokens.chunk(world.size)[world.rank]
        loss = (mlp(x).float() - x.float().roll(1, -1)).square().sum() / tokens.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean_loss := loss.detach() / mesh["data"].size())
        losses.append(mean_loss.item())
    return losses


def main(hidden=64, intermediate=96, tokens=32):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh(
        device, (dist.get_world_size() // ranks_per_node, ranks_per_node), mesh_dim_names=("data", "tensor")
    )

    draw = torch.Generator(device).manual_seed(0)  # unsharded tensors, the same on every rank

    def randn(*shape, scale=1.0):
        return (torch.randn(*shape, generator=draw, device=device) * scale).bfloat16()

    weights = {f"{name}_proj.weight": randn(intermediate, hidden, scale=hidden**-0.5) for name in ("gate", "up")}
    weights["down_proj.weight"] = randn(hidden, intermediate, scale=intermediate**-0.5)
    batches = [randn(mesh["data"].size(), tokens, hidden)] * STEPS
    losses, expected = train(mesh, weights, batches), whole_losses(weights, batches)
    torch.testing.assert_close(losses, expected, rtol=ROUNDING, atol=0.0)
    assert expected[-1] < 0.9 * expected[0]
    world = weft.init()
    if world.rank == 0:
        nodes = max(world.nodes) + 1
        print(
            f"losses {losses[0]:.3f} to {losses[-1]:.3f}: right on {nodes} nodes of {ranks_per_node} ranks", flush=True
        )
    dist.destroy_process_group()


def free_port():
    """Return a free port outside the range that the system assigns from, so that hardly any program takes it before
    torchrun listens there."""
    while True:
        port = random.randrange(20000, 29000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def nodes_of_cpus(nodes=2, ranks_per_node=2):
    """Start one torchrun a node, as on several machines. WEFT_NODE replaces the host name as the name of a node."""
    address = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    started = []
    for node in range(nodes):
        shape = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(ranks_per_node)]
        environment = {**os.environ, "WEFT_NODE": f"node {node}", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", *shape, *address, __file__]
        started.append(subprocess.Popen(command, env=environment))
    while None in (codes := [process.poll() for process in started]) and not any(codes):
        time.sleep(0.1)
    for process in started:  # if a node has failed, the others wait for it
        process.terminate()
    return max(process.wait() for process in started)


if __name__ == "__main__":
    if sys.argv[1:] == ["--gloo"]:
        sys.exit(nodes_of_cpus())
    elif "RANK" not in os.environ:
        sys.exit(__doc__)
    main()
