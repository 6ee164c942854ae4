"""Ring of nodes in two partitions, and Python replacements of pyg-lib's functions.

Node v has an edge from the next node, and one from the node across the ring, which is in the other partition.
"""

import torch
from torch_geometric.distributed import LocalFeatureStore, LocalGraphStore

PARTITIONS = 2
NODES = 40  # of the whole graph; partition 0 has the first half
HALF = NODES // PARTITIONS
STEPS = (1, HALF)


def stores(partition):
    """Return the feature store and the graph store of a partition."""
    nodes = torch.arange(HALF) + partition * HALF
    sources = torch.stack([(nodes + step) % NODES for step in STEPS], 1).flatten()
    edges = torch.stack([sources, nodes.repeat_interleave(len(STEPS))])
    edge_ids = torch.arange(edges.shape[1]) + partition * edges.shape[1]
    node_partitions = torch.arange(NODES) // HALF

    graph = LocalGraphStore.from_data(edge_ids, edges, NODES, is_sorted=True)
    graph.node_pb = node_partitions
    features = LocalFeatureStore.from_data(nodes, x=nodes[:, None].float().expand(-1, 8).contiguous())
    features.node_feat_pb = node_partitions
    for store in (graph, features):
        store.partition_idx, store.num_partitions = partition, PARTITIONS
        store.meta = {"num_parts": PARTITIONS, "is_hetero": False, "node_types": None, "edge_types": None}
    return features, graph


def dist_neighbor_sample(colptr, row, seed, count, *_):
    """Return the first neighbors of each seed: nodes, edges, end per seed."""
    edges = [torch.arange(*colptr[v : v + 2].tolist())[:count] for v in seed.tolist()]
    ends = [len(seed)]
    for mine in edges:
        ends.append(ends[-1] + len(mine))
    chosen = torch.cat(edges)
    return torch.cat([seed, row[chosen]]), chosen, ends


def merge_sampler_outputs(nodes, edges, ends, partitions, orders, *_):
    """Merge the partitions' samples in the order of the seeds."""
    places = [(p, ends[p][0], *ends[p][order : order + 2]) for p, order in zip(partitions, orders, strict=True)]
    found = torch.cat([nodes[p][begin:end] for p, _, begin, end in places])
    chosen = torch.cat([edges[p][begin - first : end - first] for p, first, begin, end in places])
    return found, chosen, None, [end - begin for _, _, begin, end in places]


def relabel_neighborhood(seed, nodes, counts, *_):
    """Return both ends of the sampled edges, as numbers of this batch."""
    numbers = {}
    for v in (*seed.tolist(), *nodes.tolist()):
        numbers.setdefault(v, len(numbers))
    ends = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return torch.tensor([numbers[v] for v in nodes.tolist()]), ends


for function in (dist_neighbor_sample, merge_sampler_outputs, relabel_neighborhood):
    setattr(torch.ops.pyg, function.__name__, function)
