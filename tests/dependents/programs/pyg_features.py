"""PyG's feature lookup over RPC, as in its own tests."""

import socket

import torch
import torch.multiprocessing as mp
from torch_geometric.distributed import DistContext, LocalFeatureStore, rpc
from torch_geometric.distributed.rpc import RPCRouter

WORLD = 2
ROWS, COLUMNS = 256, 1024  # of each


def look_up(rank, port):
    context = DistContext(rank=rank, global_rank=rank, world_size=WORLD, global_world_size=WORLD, group_name="features")
    rpc.init_rpc(context, master_addr="localhost", master_port=port)
    assert rpc.rpc_is_initialized()
    workers = rpc.rpc_partition_to_workers(context, WORLD, rank)
    assert workers == [["features-0"], ["features-1"]]
    router = RPCRouter(workers)
    assert [router.get_to_worker(partition_idx=i) for i in range(WORLD)] == ["features-0", "features-1"]

    mine = torch.arange(ROWS) + rank * ROWS
    store = LocalFeatureStore()
    store.put_global_id(mine, group_name=None)
    store.put_tensor(mine[:, None].float().expand(-1, COLUMNS).contiguous(), group_name=None, attr_name="x")
    store.num_partitions, store.partition_idx = WORLD, rank
    store.node_feat_pb = torch.arange(WORLD * ROWS) // ROWS
    store.meta = {"edge_types": None, "is_hetero": False, "node_types": None, "num_parts": WORLD}
    store.local_only = False
    store.set_rpc_router(router)

    for rows in (mine, (mine + ROWS) % (WORLD * ROWS), torch.randperm(WORLD * ROWS)):
        assert torch.equal(store.lookup_features(rows).wait(), rows[:, None].float().expand(-1, COLUMNS))
    rpc.shutdown_rpc()
    assert not rpc.rpc_is_initialized()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    children = [mp.get_context("spawn").Process(target=look_up, args=(rank, port)) for rank in range(WORLD)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * WORLD
    print("done on", torch.distributed.rpc.__name__, flush=True)
