"""What the tests of weights share: a server on loopback, and small files with the shapes of real ones."""

import hashlib
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from cupy_resnet.networks import describe


def tiny_checkpoint(model: str = "resnet18", value: float = 0.5) -> bytes:
    """A torch file with every tensor of `model`; each stores one number, repeated by strides of zero."""
    table = describe(model).tensor_table()
    buffer = io.BytesIO()
    torch.save({key: torch.full((1,), value).expand(shape) for key, shape in table.items()}, buffer)
    return buffer.getvalue()


def named(content: bytes, model: str = "resnet18") -> str:
    """A file name as torchvision makes them."""
    return f"{model}-{hashlib.sha256(content).hexdigest()[:8]}.pth"


class Server(ThreadingHTTPServer):
    """Serves `files`, and counts requests.

    A file's name is its path; `promised` replaces its length in the header; before the second half of a file the
    server waits for `go_on`, having set `half_sent`.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.promised: int | None = None
        self.requests: list[str] = []
        self.half_sent, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def offer(self, content: bytes, name: str | None = None) -> str:
        """Serves `content` and returns its URL."""
        name = name or named(content)
        self.files[name] = content
        return f"http://127.0.0.1:{self.server_port}/{name}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        content = self.server.files.get(self.path[1:])
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(self.server.promised or len(content)))
        self.end_headers()
        half = len(content) // 2
        self.wfile.write(content[:half])
        self.wfile.flush()
        self.server.half_sent.set()
        self.server.go_on.wait(60)
        self.wfile.write(content[half:])

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass


@contextmanager
def serving() -> Iterator[Server]:
    """A running server."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.go_on.set()
        server.shutdown()
        thread.join()
