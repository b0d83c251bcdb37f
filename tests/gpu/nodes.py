"""Ranks that share one GPU: each is a node of one process, and NCCL takes it for a host of its own.

NCCL rejects a second rank on a device within a host, and compares hosts by NCCL_HOSTID. Its transport is
then sockets. NVIDIA does not support this: times mean nothing, and a failure may be NCCL's own.
"""

from __future__ import annotations

import socket


def free_port() -> int:
    """Returns a port of this machine that no process listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def node_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Returns the variables of a rank; the ranks of a start have the same free `port`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_DEBUG": "WARN",
        "PYTHONUNBUFFERED": "1",
    }
