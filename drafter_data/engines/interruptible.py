"""HTTP sessions whose requests under way can be broken off from another thread.

A request waits for the engine in a socket's recv, up to its whole time limit. Shutting the socket down ends that wait at once.
"""

from __future__ import annotations

import socket
import threading
import weakref
from contextlib import suppress
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool


class OpenSockets:
    """The sockets of all sessions of one client."""

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

    def session(self) -> requests.Session:
        """A session without proxies whose sockets are known here."""
        session = requests.Session()
        session.trust_env = False  # a proxy between us and a loopback engine would only be a mistake
        adapter = _Adapter(self)
        session.mount("http://", adapter)
        session.mount("https://", adapter)
        return session


class _Adapter(HTTPAdapter):
    def __init__(self, sockets: OpenSockets) -> None:
        self._sockets = sockets
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Pools whose connections report their sockets."""
        super().init_poolmanager(*args, **kwargs)
        sockets = self._sockets

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

        self.poolmanager.pool_classes_by_scheme = {"http": PlainPool, "https": SecurePool}


def _shut_down(opened: socket.socket) -> None:
    with suppress(OSError):  # closed meanwhile
        opened.shutdown(socket.SHUT_RDWR)
