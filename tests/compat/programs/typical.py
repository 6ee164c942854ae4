"""A program written for torch.distributed.rpc, which runs on torch as well.

It uses what real programs use together: see the assertions. Prints which RPC it ran on, once for each worker.
"""

import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import rpc
from torch.distributed.rpc import RRef, TensorPipeRpcBackendOptions, remote, rpc_async, rpc_sync
from torch.distributed.rpc.api import _all_gather, _require_initialized
from torch.utils.data import DataLoader, Dataset

WORLD = 3


class Shop:
    def __init__(self, stock):
        self.stock = stock

    def take(self, n):
        self.stock -= n
        return self.stock

    def _count(self):
        return self.stock

    @classmethod
    def open(cls, n):
        return cls(n)

    @staticmethod
    def sum(a, b):
        return a + b

    @staticmethod
    @rpc.functions.async_execution
    def later(to, x):
        return rpc_async(to, torch.add, args=(x, 1)).then(lambda done: done.wait() + 1)


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor(i)


def add_all(rrefs):
    return sum(rref.to_here() for rref in rrefs["list"])


def fail(text):
    raise ValueError(text)


@_require_initialized
def my_rank():
    return rpc.get_worker_info().id


def where():
    return rpc.init_rpc.__module__


def calls(me, peer):
    x = torch.arange(4.0).reshape(2, 2)
    assert torch.equal(rpc_sync(peer, torch.add, args=(x, 1)), x + 1)
    assert rpc_sync(peer, min, args=[3, 2]) == 2
    assert rpc_sync(peer, my_rank) == rpc.get_worker_info(peer).id
    assert rpc_sync(rpc.get_worker_info(peer), my_rank, args=None, kwargs=None) == rpc_sync(peer, my_rank, timeout=0)
    assert rpc_sync(me, my_rank) == my_rank()
    assert rpc_sync((my_rank() + 1) % WORLD, my_rank) == (my_rank() + 1) % WORLD
    assert rpc_sync(peer, rpc.is_available) is True
    assert rpc_sync(peer, rpc.get_worker_info).name == peer
    assert rpc_sync(peer, Shop.sum, args=(1, 2)) == 3
    assert rpc_sync(peer, Shop(5).take, args=(2,)) == 3
    assert torch.equal(rpc_sync(peer, Shop.later, args=(me, x)), x + 2)
    assert torch.equal(rpc_async(peer, torch.mul, args=(x, 2)).then(lambda done: done.wait() + 1).wait(), x * 2 + 1)
    futures = [rpc_async(peer, torch.add, args=(x, i)) for i in range(50)]
    assert all(torch.equal(y, x + i) for i, y in enumerate(torch.futures.wait_all(futures)))


def references(me, peer):
    shop = remote(peer, Shop, args=(10,))
    assert isinstance(shop, rpc.PyRRef)
    assert isinstance(shop, torch._C._distributed_rpc.PyRRef)
    assert shop.owner_name() == peer
    assert not shop.is_owner()
    assert shop.rpc_sync().take(1) == 9
    assert shop.rpc_async(timeout=5).take(1).wait() == 8
    assert shop.remote().take(1).to_here() == 7
    assert shop.rpc_sync()._count() == 7
    assert shop.confirmed_by_owner()
    assert remote(peer, Shop.open, args=(4,)).rpc_sync().take(1) == 3
    mine = RRef(20)
    assert mine.local_value() == 20
    assert rpc_sync(peer, add_all, args=({"list": [mine, remote(me, int, args=("5",))]},)) == 25
    assert [r.to_here() for r in rpc_sync(peer, make_rrefs, args=(3,))] == [0, 1, 2]


def make_rrefs(n):
    return [RRef(i) for i in range(n)]


def errors(peer):
    for expected, call in (
        (ValueError, lambda: rpc_sync(peer, fail, args=("grün",))),
        (ValueError, lambda: remote(peer, fail, args=("grün",)).to_here()),
        (RuntimeError, lambda: rpc_sync(peer, time.sleep, args=(0.5,), timeout=0.1)),
        (RuntimeError, lambda: rpc_sync("unknown", my_rank)),
    ):
        try:
            call()
        except expected:
            continue
        raise AssertionError(f"{expected} expected")


def threads(peer):
    found = []
    workers = [threading.Thread(target=lambda i=i: found.append(rpc_sync(peer, int, args=(i,)))) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(found) == list(range(8))


def main(rank, directory):
    name = f"worker{rank}"
    options = TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=30, init_method=f"file://{directory}/rpc")
    rpc.init_rpc(name, rank=rank, world_size=WORLD, rpc_backend_options=options)
    dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=rank, world_size=WORLD)
    peer = f"worker{(rank + 1) % WORLD}"
    assert rpc._is_current_rpc_agent_set()
    assert {info.name for info in rpc._get_current_rpc_agent().get_worker_infos()} == {"worker0", "worker1", "worker2"}
    assert rpc.get_rpc_timeout() == 30
    calls(name, peer)
    references(name, peer)
    errors(peer)
    threads(peer)
    assert sorted(int(n) for batch in DataLoader(Numbers(), batch_size=2, num_workers=1) for n in batch) == [*range(8)]
    dist.barrier()
    calls(name, peer)
    assert _all_gather(rank) == {f"worker{i}": i for i in range(WORLD)}
    print(f"{name} ran on {where()}; {peer} on {rpc_sync(peer, where)}", flush=True)
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    start, directory = sys.argv[1:]
    if start == "spawn":
        mp.spawn(main, args=(directory,), nprocs=WORLD)
    else:
        context = mp.get_context(start)
        processes = [context.Process(target=main, args=(rank, directory)) for rank in range(WORLD)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * WORLD
