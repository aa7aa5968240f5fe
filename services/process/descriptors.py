"""The limit of open descriptors of a process."""

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
