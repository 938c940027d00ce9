"""How ranks find each other, also when they are started again.

torchrun keeps the store at which ranks meet over its restarts, and in it the addresses of ranks that are gone: one that
comes a little early would take those for its fellows', and wait for ever. Nor do all nodes count the same restarts. So
for every start the first rank makes up a name, under which everything in the store stands from then on. It answers each
other rank's call with it until that rank is there; a call of one that is gone is answered in vain.
"""

import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed import Store  # type: ignore[attr-defined]

PAUSE = 0.02
"""Seconds between two looks into the store."""


def meet(store: Store, *, rank: int, size: int, timeout: timedelta) -> str:
    """The name of this start, the same on all ranks."""
    if rank > 0:
        call = uuid4().hex
        store.set(f"call of {rank}", call)
        name = store.get(f"answer to {call}").decode()
        store.set(f"{name}: {rank} is here", "")
        return name
    name = uuid4().hex
    missing, deadline = set(range(1, size)), time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"call of {other}"]):  # perhaps that of one that is gone
                store.set(f"answer to {store.get(f'call of {other}').decode()}", name)
        missing = {other for other in missing if not store.check([f"{name}: {other} is here"])}
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"rank {min(missing)} has not come in {timeout}")
        time.sleep(PAUSE if missing else 0)
    return name
