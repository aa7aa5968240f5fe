"""Open descriptors of a process: their limit, and waiting for one."""

import asyncio
import resource


def raise_descriptor_limit(reserve: int = 0) -> None:
    """Raise the soft limit to the hard one: each client needs some, and 1,024 is the usual soft limit.

    Args:
        reserve: Descriptors to leave below the hard limit, at most an eighth of it. The process can still get these one
            by one when clients have used up the others.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most - min(reserve, most // 8), most))


async def readable(fd: int) -> None:
    """Wait until a descriptor is readable: data or a connection waits, or its peer or process has ended.

    Nobody else may watch the descriptor in this event loop meanwhile.
    """
    loop, found = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, found.set)
    try:
        await found.wait()
    finally:
        loop.remove_reader(fd)
