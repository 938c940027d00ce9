"""How ranks find each other, also after a restart.

torchrun's store survives restarts, with the addresses of dead ranks in it. A rank that starts early would connect to
those and wait for ever, and nodes may count different numbers of restarts. So at every start the first rank invents a
name, which prefixes all keys of this start. It answers the calls of the other ranks with that name until all have
joined; answers to dead ranks have no effect.
"""

import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed import Store  # type: ignore[attr-defined]

PAUSE = 0.02
"""Seconds between two checks of the store."""


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
            if store.check([f"call of {other}"]):  # perhaps a dead rank's
                store.set(f"answer to {store.get(f'call of {other}').decode()}", name)
        missing = {other for other in missing if not store.check([f"{name}: {other} is here"])}
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"rank {min(missing)} has not joined in {timeout}")
        time.sleep(PAUSE if missing else 0)
    return name
