"""How ranks find each other, also after a restart, and how they wait for the first one.

torchrun's store survives restarts, with the addresses of dead ranks in it. A rank that starts early would connect to
those and wait for ever, and nodes may count different numbers of restarts. So at every start the first rank invents a
name, which prefixes all keys of this start. It answers the calls of the other ranks with that name until all have
joined; answers to dead ranks have no effect.

The first rank prepares the corpus and measures clusters for all. A collective operation would give up on it after its
timeout, however well it does. So the first rank counts in the store while it works, and the others wait as long as
that count grows.
"""

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from uuid import uuid4

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from lm.system.errors import UserError

PAUSE = 0.02
"""Seconds between two checks of the store, at first."""
LONGEST_PAUSE = 1.0
"""Seconds between two checks of a rank that has waited for long; there may be thousands of ranks."""
BEAT = 5.0
"""Seconds between two signs of life of the first rank."""
PATIENCE = 300.0
"""Seconds between two notices while ranks wait."""


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


# ---- waiting for the first rank ------------------------------------------------------------------------------------


@contextmanager
def signs_of_life(store: Store, name: str) -> Iterator[None]:
    """While entered, and if it takes long, show the others that this rank works; then tell them that it is done."""
    done = threading.Event()

    def show() -> None:
        while not done.wait(BEAT):
            with suppress(RuntimeError):  # the store may be gone; whoever needs it next says so
                store.add(f"{name} signs", 1)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with suppress(RuntimeError):  # or it would hide the error that ended the work
            store.set(f"{name} done", "")


def wait_for_first(store: Store, name: str, *, timeout: timedelta, notice: Callable[[str], None]) -> None:
    """Wait until the first rank has left its `signs_of_life`; fails once there were none for the timeout."""
    began = alive = told = time.monotonic()
    signs = 0
    while not store.check([f"{name} done"]):
        now, before, signs = time.monotonic(), signs, int(store.add(f"{name} signs", 0))
        alive = now if signs != before else alive
        if now - alive > timeout.total_seconds():
            raise DistError(f"the first rank has shown no sign of life for {timeout}")
        if now - told > PATIENCE:
            told = now
            notice(f"waiting for the first rank, which has been preparing for {(now - began) / 60:.0f} minutes")
        # Not `store.wait`: each of its timeouts writes two warnings to standard error.
        time.sleep(min(max(PAUSE, (now - began) / 10), LONGEST_PAUSE))


# ---- addresses -----------------------------------------------------------------------------------------------------


def check_addresses(size: int) -> None:
    """Reject what would let ranks of several nodes look for each other in vain, until the timeout."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    there = [name for _, name in socket.if_nameindex()]
    if unknown := [name for name in chosen.split(",") if name and name not in there]:
        raise _unreachable(
            f"GLOO_SOCKET_IFNAME={chosen} names {unknown[0]}, and this host's network interfaces are "
            f"{', '.join(there)}. Try the one that the nodes share"
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) >= size:
        return
    first, name = os.environ["MASTER_ADDR"], socket.gethostname()
    if os.environ.get("GROUP_RANK", "0") != "0" and (address := _loopback(first)):
        raise _unreachable(
            f"The first node calls itself {first}, which here is {address}, this node itself. Try torchrun "
            "--local-addr=ADDRESS on the first node, with an address that the others reach, or fix /etc/hosts there"
        )
    if not chosen and (address := _loopback(name)):
        raise _unreachable(
            f"This host's name, {name}, resolves to {address}, where ranks of other nodes cannot find it. Try "
            "GLOO_SOCKET_IFNAME=eth0 and NCCL_SOCKET_IFNAME=eth0, with the interface that the nodes share, or "
            "fix /etc/hosts"
        )


def _loopback(host: str) -> str | None:
    """The address of a host that is reached from itself only; None for others, and for names that are not known."""
    try:
        address = str(socket.getaddrinfo(host, None)[0][4][0])
        return address if ipaddress.ip_address(address.partition("%")[0]).is_loopback else None
    except (OSError, ValueError):
        return None


def _unreachable(text: str) -> UserError:
    error = UserError(text)
    error.report_here = os.environ.get("LOCAL_RANK", "0") == "0"  # once on each node
    return error
