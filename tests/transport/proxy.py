"""A connection that can lose what it carries, between a client and a server over tcp."""

import contextlib
import socket
import threading
from types import TracebackType


class Proxy:
    """Forwards every connection to a server until told otherwise.

    Attributes:
      endpoint: where to connect instead of to the server.
      swallow: drop what comes from now on; ends with `cut`.
      swallowed: bytes dropped.
    """

    def __init__(self, server: str, own_port: int = 0) -> None:
        host, port = server.removeprefix("tcp://").rsplit(":", 1)
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", own_port))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.swallow = False
        self.swallowed = 0
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """Break all connections; later ones are forwarded again."""
        self.swallow = False
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in [self._listener, *self._open]:
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._server)
                self._open += [near, far]
                for ends in [(near, far), (far, near)]:
                    thread = threading.Thread(target=self._forward, args=ends)
                    self._threads.append(thread)
                    thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.swallow:
                    self.swallowed += len(data)
                else:
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
