"""PyG's DistNeighborLoader over two partitions; `atexit` shuts RPC down.

Usage: pyg_loader.py HOW MODE [RANK PORT].

HOW is `spawn` (children of multiprocessing, as in PyG's own tests) or `main` (each a program of its own). MODE is
`sync` or `async` (the sampler puts batches into a queue). As in PyG's tests, the loader has no worker processes: these
would end without waiting for each other.
"""

import socket
import subprocess
import sys

import torch
import torch.multiprocessing as mp
from pyg_graph import HALF, NODES, PARTITIONS, STEPS, stores
from torch_geometric.distributed import DistContext, DistNeighborLoader
from torch_geometric.distributed.rpc import rpc_is_initialized

BATCH = 5


def context(rank, group):
    return DistContext(
        rank=rank, global_rank=rank, world_size=PARTITIONS, global_world_size=PARTITIONS, group_name=group
    )


def load(rank, port, mode):
    features, graph = stores(rank)
    loader = DistNeighborLoader(
        (features, graph),
        num_neighbors=[2, 2],
        batch_size=BATCH,
        input_nodes=features.get_global_id(None),
        master_addr="127.0.0.1",
        master_port=port,
        current_ctx=context(rank, "loader"),
        concurrency=4,
        async_sampling=mode == "async",
    )
    batches = list(loader)
    assert len(batches) == HALF // BATCH
    for batch in batches:
        assert torch.equal(batch.x[:, 0], batch.n_id.float())
        source, target = batch.n_id[batch.edge_index]
        assert torch.isin((source - target) % NODES, torch.tensor(STEPS)).all()
        assert batch.num_edges > 2 * BATCH
    assert {int(v) for batch in batches for v in batch.n_id[:BATCH]} == set(range(rank * HALF, (rank + 1) * HALF))
    assert rpc_is_initialized()  # `atexit` shuts it down
    print(rank, "done on", torch.distributed.rpc.__name__, flush=True)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main(how, mode):
    port = free_port()
    if how == "spawn":
        children = [mp.get_context("spawn").Process(target=load, args=(rank, port, mode)) for rank in range(PARTITIONS)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        return [child.exitcode for child in children]
    words = [sys.executable, __file__, how, mode]
    programs = [subprocess.Popen([*words, str(rank), str(port)]) for rank in range(PARTITIONS)]
    return [program.wait() for program in programs]


if __name__ == "__main__":
    how, mode, *rest = sys.argv[1:]
    if rest:
        load(int(rest[0]), int(rest[1]), mode)
    else:
        assert main(how, mode) == [0] * PARTITIONS
