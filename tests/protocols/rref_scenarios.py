"""Small scenarios to explore completely: three workers and a few messages each.

In nearly all of them a handle may be dropped at any time. Worker 0 creates X at worker 1, and worker 2 is a third
party.
"""

from typing import Any

from rref_world import Action, Scenario

from telegrad.protocols.rref import RRefId

X, Y = RRefId(0, 1), RRefId(0, 2)
OWN = RRefId(1, 1)  # a value that worker 1 makes for itself
NEW = RRefId(1, 1 << 32)  # made by worker 1's second incarnation
CREATE = ("create", X, 1)


def world(*scripts: tuple[Action, ...], **options: Any) -> Scenario:
    return Scenario(scripts, **{"drops": "any", **options})


DEATHS: dict[str, Any] = {"kills": 1, "mortal": (0, 1, 2)}
RETURNS: dict[str, Any] = {**DEATHS, "rejoin": True}

BEGUN = {  # messages whose session may end before their tickets are made
    "forked": world((CREATE, ("begin", 2), ("share", X, 2)), (), (), cuts=1),
    "granted": world((), (("own", OWN), ("begin", 0), ("share", OWN, 0)), (), cuts=1),
    "returned": world((CREATE, ("begin", 1), ("share", X, 1)), (), (), cuts=1),
    "granted, sent in the next session": world((), (("own", OWN), ("hold", OWN, 0), ("send",)), (), cuts=2, late=True),
    "granted, sent to another process": world(
        (), (("own", OWN), ("hold", OWN, 0), ("send",)), (), kills=1, mortal=(0,), rejoin=True
    ),
    "returned, sent in the next session": world((CREATE, ("hold", X, 1), ("send",)), (), (), cuts=1),
}

FAST = {
    "create": world((CREATE,), (), (), timeouts=True, flush="free", **RETURNS),
    "fork": world((CREATE, ("share", X, 2)), (), (), timeouts=True, flush="free"),
    "fork, deaths": world((CREATE, ("share", X, 2)), (), (), **DEATHS),
    "return": world((CREATE, ("share", X, 1)), (), (), timeouts=True, flush="free"),
    "return, deaths": world((CREATE, ("share", X, 1)), (), (), timeouts=True, **DEATHS),
    "return, then grant back": world((CREATE, ("share", X, 1)), (("share", X, 0),), (), timeouts=True),
    "fork on to the owner": world((("create", X, 1), ("share", X, 2)), (), (("share", X, 1),), drops="end"),
    "fork back to the creator": world((CREATE, ("share", X, 2)), (), (("share", X, 0),)),
    "fork and return and back": world((CREATE, ("share", X, 2)), (("share", X, 2),), (("share", X, 0),)),
    "two grants and a fork": world((), (("own", OWN), ("share", OWN, 0), ("share", OWN, 2)), (("share", OWN, 0),)),
    "grant, fork, return, deaths": world(
        (("share", OWN, 2),), (("own", OWN), ("share", OWN, 0)), (("share", OWN, 1),), **DEATHS
    ),
    "fork meets grant": world((("share", OWN, 2),), (("own", OWN), ("share", OWN, 0), ("share", OWN, 2)), ()),
    "never sent": world((("unsent", X, 1), ("share", X, 2), ("fail", X)), (), (("share", X, 1),)),
    "never sent, returned": world((("unsent", X, 1), ("share", X, 1), ("share", X, 2), ("fail", X)), (), ()),
    "refused": world((("refuse", X, 1), ("share", X, 2)), (), (("share", X, 1),), drops="end", timeouts=True),
    "discarded": world((CREATE, ("discard", X, 2)), (), (), flush="free", **DEATHS),
    "unshared": world((CREATE, ("hold", X, 2), ("share", X, 2), ("hold", X, 1), ("unhold",)), (), ()),
    "to oneself": world((CREATE, ("share", X, 0), ("clone", X), ("hold", X, 0), ("unhold",)), (), (), timeouts=True),
    "owner to itself": world((), (("own", OWN), ("share", OWN, 1), ("hold", OWN, 1), ("unhold",)), (), **DEATHS),
    "remote to oneself": world((("create", X, 0), ("share", X, 1)), (("share", X, 2),), ()),
    "a reference inside a value": world((("own", X), ("create", Y, 1, X), ("share", Y, 2)), (), ()),
    "a forked reference inside a value": world((CREATE, ("create", Y, 2, X)), (), ()),
    "unshared to a returned worker": world(
        (), (("own", OWN), ("hold", OWN, 0), ("share", OWN, 0), ("unhold",)), (), kills=1, mortal=(0,), rejoin=True
    ),
    "release everything": world((CREATE, ("share", X, 2), ("release_all",)), (), (("release_all",),)),
}

SLOW = {
    "forked, two sessions end": world((CREATE, ("begin", 2), ("share", X, 2)), (), (), cuts=2),
    "never sent, deaths": world((("unsent", X, 1), ("share", X, 2), ("fail", X)), (), (("share", X, 1),), **DEATHS),
    "fork on to the owner": world((CREATE, ("share", X, 2)), (), (("share", X, 1),)),
    "unshared, timeouts": world(
        (CREATE, ("hold", X, 2), ("share", X, 2), ("hold", X, 1), ("unhold",)), (), (), timeouts=True, **DEATHS
    ),
    "fork, returns": world((CREATE, ("share", X, 2)), (), (), timeouts=True, **RETURNS),
    "fork on, deaths": world((CREATE, ("share", X, 2)), (), (("share", X, 1),), timeouts=True, **DEATHS),
    "fork back, deaths": world((CREATE, ("share", X, 2)), (), (("share", X, 0),), timeouts=True, **DEATHS),
    "fork on, batches": world((CREATE, ("share", X, 2)), (), (("share", X, 1),), flush="free", timeouts=True),
    "fork and return and back, deaths": world(
        (CREATE, ("share", X, 2)), (("share", X, 2),), (("share", X, 0),), **DEATHS
    ),
    "grant, fork, return, returns": world(
        (("share", OWN, 2),), (("own", OWN), ("share", OWN, 0)), (("share", OWN, 1),), **RETURNS
    ),
    "return and grant, deaths": world((CREATE, ("share", X, 1)), (("share", X, 0),), (), timeouts=True, **DEATHS),
    "refused, deaths": world((("refuse", X, 1), ("share", X, 2)), (), (("share", X, 1),), timeouts=True, **DEATHS),
    "never sent, returned, deaths": world(
        (("unsent", X, 1), ("share", X, 1), ("share", X, 2), ("fail", X)), (), (), **DEATHS
    ),
    "a forked reference inside a value, deaths": world((CREATE, ("create", Y, 2, X)), (), (), timeouts=True, **DEATHS),
    "a creator returns": world(
        (CREATE, ("share", X, 2)), (), (), kills=1, mortal=(0,), rejoin=True,
        reborn={0: (("create", Y, 1), ("share", Y, 2))},
    ),
    "an owner returns": world((CREATE, ("share", X, 2)), (), (("share", X, 1),), kills=1, mortal=(1,), rejoin=True),
    "an owner returns and shares": world(
        (CREATE, ("share", X, 2)), (), (), kills=1, mortal=(1,), rejoin=True,
        reborn={1: (("own", NEW), ("share", NEW, 0), ("share", NEW, 2))},
    ),
    "two deaths": world((CREATE, ("share", X, 2)), (), (("share", X, 0),), kills=2, mortal=(0, 2), rejoin=True),
    "release everything, deaths": world(
        (CREATE, ("share", X, 2), ("release_all",)), (), (("share", X, 0), ("release_all",)), **DEATHS
    ),
    "four workers in a chain": world(
        (CREATE, ("share", X, 2)), (), (("share", X, 3),), (("share", X, 1),), kills=1, mortal=(0, 2)
    ),
}  # fmt: skip
