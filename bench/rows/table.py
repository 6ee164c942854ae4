"""Every family of rows, in the order of the table."""

from bench.row import Family, Row
from bench.rows.autograd import AUTOGRAD, TRAINING
from bench.rows.calls import CALLS, THREADS
from bench.rows.costs import COSTS
from bench.rows.groups import GROUPS
from bench.rows.networks import NETWORKS
from bench.rows.startup import STARTUP
from bench.rows.tensors import TENSORS
from bench.rows.transports import TRANSPORTS

FAMILIES: tuple[Family, ...] = (
    CALLS,
    THREADS,
    TENSORS,
    TRANSPORTS,
    GROUPS,
    NETWORKS,
    AUTOGRAD,
    TRAINING,
    STARTUP,
    COSTS,
)
ROWS: dict[str, Row] = {row.name: row for family in FAMILIES for row in family.rows}

if len(ROWS) != sum(len(family.rows) for family in FAMILIES):
    raise AssertionError("two rows have the same name")
