"""Downloads one image over http or https, within a time, a size and a number of redirects, with the standard library.

Nothing else that ``urllib`` understands can be reached, neither directly nor by a redirect: no ``file:``, ``ftp:`` or
``data:``. Proxies are taken from the environment, certificates are verified.
"""

import contextlib
import functools
import http.client
import re
import socket
import string
import threading
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from .. import __version__
from .errors import RefusedError

TIMEOUT = 20.0
"""Seconds that one download may take in all."""

LIMIT = 64 << 20
"""Bytes that one image may have."""

MAX_REDIRECTS = 5

_REDIRECTS = (301, 302, 303, 307, 308)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/|(data):", re.IGNORECASE)  # two letters at least: C:/ is a drive
_CHUNK = 1 << 16
_HEADERS = {
    "User-Agent": f"cupy-resnet/{__version__}",
    "Accept": "image/*,*/*;q=0.5",
    "Accept-Encoding": "identity",
}


@dataclass(frozen=True)
class Url:
    """A URL as it was given, to be downloaded when it is decoded."""

    text: str


@dataclass(frozen=True)
class Download:
    """What a server answered: the body, and the type it says it is of, such as ``image/jpeg``; empty if it does not."""

    body: bytes
    content_type: str


def scheme(text: str) -> str | None:
    """Returns the scheme of a URL in lower case, such as ``"https"``; None for a path, Windows drives included."""
    match = _SCHEME.match(text)
    return (match[1] or match[2]).lower() if match else None


def parse(text: str) -> Url:
    """Returns a URL of a kind that `fetch` reads.

    Raises:
        RefusedError: the scheme is neither http nor https, the host is missing, or a user name is in it.
    """
    kind = scheme(text)
    if kind == "file":
        path = urllib.request.url2pathname(urllib.parse.urlsplit(text).path)
        raise RefusedError(f"file: URLs are not read; pass the path {path!r}")
    if kind not in ("http", "https"):
        raise RefusedError(f"{kind}: URLs are not read, only http: and https:")
    try:
        parts = urllib.parse.urlsplit(text)
        host, user, _ = parts.hostname, parts.username, parts.port  # the port raises if it is no number
    except ValueError as error:
        raise RefusedError(f"this is not a URL: {error}") from error
    if not host:
        raise RefusedError("the URL names no host; a URL is passed as str, with // after its scheme, not as a Path")
    if user is not None:
        raise RefusedError("URLs with a user name or password in them are not read")
    return Url(text)


def fetch(url: Url, *, timeout: float = TIMEOUT, limit: int = LIMIT) -> Download:
    """Downloads a URL into memory.

    Args:
        url: what `parse` returned.
        timeout: seconds for the whole download: redirects, headers and body.
        limit: bytes the body may have at most.

    Raises:
        RefusedError: the server cannot be reached, answers an error, takes too long, sends too much or too little, or
            redirects too often, from https to http or to another scheme.
    """
    with _Client(timeout) as client:
        try:
            with client.open(url.text) as response:
                download = _read(response, limit)
            if client.expired.is_set():  # a body without a length ends where the connection was cut
                raise TimeoutError
            return download
        except urllib.error.HTTPError as error:
            error.close()
            raise RefusedError(f"the server answered {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            if client.expired.is_set() or isinstance(reason, TimeoutError):
                raise RefusedError(f"the download took longer than {timeout:g} s") from error
            raise RefusedError(f"the download failed: {reason}") from error


def _read(response: http.client.HTTPResponse, limit: int) -> Download:
    announced = response.headers.get("Content-Length", "")
    length = int(announced) if announced.isdecimal() else None
    if length is not None and length > limit:
        raise RefusedError(f"the server announces {length} bytes, more than the limit of {limit}")
    encoding = response.headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity":
        raise RefusedError(f"the server sent Content-Encoding {encoding}, which was not asked for")
    body = bytearray()
    while chunk := response.read(min(_CHUNK, limit + 1 - len(body))):
        body += chunk
        if len(body) > limit:
            raise RefusedError(f"the server sends more than the limit of {limit} bytes")
    if length is not None and len(body) < length:
        raise OSError(f"the connection closed after {len(body)} of {length} bytes")
    return Download(bytes(body), response.headers.get_content_type() if "Content-Type" in response.headers else "")


class _Client:
    """Opens http(s) URLs; once the time is over, all of its connections are cut.

    A socket's timeout bounds a single wait, not a server that sends a byte every few seconds, in its headers or its
    body; therefore a timer shuts the sockets down, which ends whatever read is waiting.
    """

    def __init__(self, timeout: float) -> None:
        self.expired = threading.Event()
        self._timeout = timeout
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(timeout, self._cut)
        self._timer.daemon = True
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            _HTTPHandler(self),
            _HTTPSHandler(self),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
        ):
            self._opener.add_handler(handler)

    def __enter__(self) -> "_Client":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def open(self, url: str) -> Any:
        """Returns the response to a GET, redirects followed."""
        for _ in range(MAX_REDIRECTS + 1):
            request = urllib.request.Request(_ascii(url), headers=_HEADERS)
            try:
                return self._opener.open(request, timeout=self._timeout)
            except urllib.error.HTTPError as error:
                location = error.headers.get("Location") if error.code in _REDIRECTS else None
                if location is None:
                    raise
                error.close()  # unread: a redirect's body may be of any length
                url = _redirected(url, location)
        raise RefusedError(f"the server redirects more than {MAX_REDIRECTS} times, last to {url}")

    def register(self, connection: socket.socket) -> None:
        """Takes a connected socket among those to cut."""
        self._sockets.append(connection)
        if self.expired.is_set():
            raise TimeoutError

    def _cut(self) -> None:
        self.expired.set()
        for connection in list(self._sockets):
            with contextlib.suppress(OSError):  # closed already
                socket.socket.shutdown(connection, socket.SHUT_RDWR)  # the plain socket's, also under TLS


def _redirected(url: str, location: str) -> str:
    target = urllib.parse.urljoin(url, location)
    try:
        parse(target)
    except RefusedError as error:
        raise RefusedError(f"the server redirects to {target}: {error}") from error
    if scheme(url) == "https" and scheme(target) == "http":
        raise RefusedError(f"the server redirects from https to {target}, which is not encrypted")
    return target


def _ascii(url: str) -> str:
    """Returns the URL as it goes over the wire: host by IDNA, other characters beyond ASCII and spaces in percent."""
    parts = urllib.parse.urlsplit(url)
    path, query = (urllib.parse.quote(text, safe=string.punctuation) for text in (parts.path, parts.query))
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.encode("idna").decode(), path, query, ""))


class _Registered(http.client.HTTPConnection):
    """A connection whose socket the client knows, to cut it when time is up."""

    def __init__(self, client: _Client, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._client = client

    def connect(self) -> None:
        super().connect()
        self._client.register(self.sock)


class _RegisteredSecure(_Registered, http.client.HTTPSConnection):
    """The same over TLS."""


class _HTTPHandler(urllib.request.HTTPHandler):
    def __init__(self, client: _Client) -> None:
        super().__init__()
        self._client = client

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_Registered, self._client), req)


class _HTTPSHandler(urllib.request.HTTPSHandler):
    def __init__(self, client: _Client) -> None:
        super().__init__()
        self._client = client

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_RegisteredSecure, self._client), req)
