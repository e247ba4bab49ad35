"""HTTP connections whose requests under way can be broken off from another thread.

A request waits for the engine in a socket's recv, up to its whole time limit. Shutting the socket down ends that wait at once.
"""

from __future__ import annotations

import socket
import threading
import weakref
from contextlib import suppress

from requests.certs import where  # pyright: ignore[reportAttributeAccessIssue]  # the stubs lack it
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util import Url

MOST_KEPT_ALIVE = 1024


class OpenSockets:
    """The sockets of all connections of one client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._ended = False

    def add(self, opened: socket.socket) -> None:
        """Takes in a socket; once interrupted, it is shut down at once."""
        with self._lock:
            self._sockets.add(opened)
            ended = self._ended
        if ended:
            _shut_down(opened)

    def interrupt(self) -> None:
        """Ends all waits, now and in future."""
        with self._lock:
            self._ended = True
            found = list(self._sockets)
        for one in found:
            _shut_down(one)

    def pool(self, url: Url) -> HTTPConnectionPool:
        """Connections to a server, shared by all threads and kept alive, without proxies, whose sockets are known here."""
        sockets = self

        class Plain(HTTPConnection):
            def connect(self) -> None:
                super().connect()
                if isinstance(self.sock, socket.socket):
                    sockets.add(self.sock)

        class Secure(HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                if isinstance(self.sock, socket.socket):
                    sockets.add(self.sock)

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain  # pyright: ignore[reportAssignmentType]  # urllib3's protocol is stricter than its class

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure  # pyright: ignore[reportAssignmentType]

        # Named always: without a port http.client takes what follows the last colon of an IPv6 address for one.
        if url.scheme == "https":
            return SecurePool(url.host or "", url.port or 443, maxsize=MOST_KEPT_ALIVE, ca_certs=where())
        return PlainPool(url.host or "", url.port or 80, maxsize=MOST_KEPT_ALIVE)


def _shut_down(opened: socket.socket) -> None:
    with suppress(OSError):  # closed meanwhile
        opened.shutdown(socket.SHUT_RDWR)
