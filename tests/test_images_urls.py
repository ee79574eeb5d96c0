"""URLs, against a server on loopback."""

import contextlib
import gzip
import io
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from cupy_resnet.images import ImageError, decode, expand, urls
from cupy_resnet.images.errors import RefusedError

_FILE = io.BytesIO()
Image.new("RGB", (40, 30), (10, 20, 30)).save(_FILE, "PNG")
PNG = _FILE.getvalue()


class Handler(BaseHTTPRequestHandler):
    """Answers every path in a way of its own; see the functions below."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.requests.append((self.path, dict(self.headers)))
        self.close_connection = True
        with contextlib.suppress(OSError):  # the client has heard enough
            ROUTES[self.path.partition("?")[0]](self)

    def answer(self, body: bytes, *, code: int = 200, length: int | None = None, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if length != -1:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def redirect(self, location: str, code: int = 302) -> None:
        self.answer(b"moved", code=code, Location=location)

    def log_message(self, *_: object) -> None:
        pass


def chunked(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for start in range(0, len(PNG), 50):
        piece = PNG[start : start + 50]
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
    handler.wfile.write(b"0\r\n\r\n")


def endless(handler: Handler) -> None:
    handler.answer(b"", length=-1)
    while True:
        handler.wfile.write(b"\x89PNG" * 1000)


def drip_body(handler: Handler) -> None:
    handler.answer(b"", length=-1)
    for byte in PNG * 10:
        handler.wfile.write(bytes([byte]))
        time.sleep(0.05)


def drip_headers(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    for _ in range(200):
        handler.wfile.write(b"x")
        time.sleep(0.05)


def silent(handler: Handler) -> None:
    handler.server.released.wait(10)


ROUTES: dict[str, Callable[[Handler], None]] = {
    "/photo.png": lambda h: h.answer(PNG, Content_Type="image/png"),
    "/untyped": lambda h: h.answer(PNG),
    "/misnamed.txt": lambda h: h.answer(PNG, Content_Type="text/plain"),
    "/without-length": lambda h: h.answer(PNG, length=-1),
    "/chunked": chunked,
    "/page": lambda h: h.answer(b"<!doctype html><p>Log in", Content_Type="text/html; charset=utf-8"),
    "/json": lambda h: h.answer(b'{"a": 1}', Content_Type="application/json"),
    "/empty": lambda h: h.answer(b"", Content_Type="image/png"),
    "/missing": lambda h: h.answer(b"no", code=404),
    "/broken": lambda h: h.answer(b"no", code=500),
    "/announced": lambda h: h.answer(b"", length=10**12, Content_Type="image/png"),
    "/endless": endless,
    "/short": lambda h: h.answer(PNG[:50], length=len(PNG)),
    "/gzip": lambda h: h.answer(gzip.compress(PNG), Content_Encoding="gzip"),
    "/drip-body": drip_body,
    "/drip-headers": drip_headers,
    "/silent": silent,
    "/garbage": lambda h: h.wfile.write(b"\x00\x01\x02 nonsense\r\n\r\n"),
    "/moved": lambda h: h.redirect("/photo.png", int(h.path.partition("?")[2] or 302)),
    "/moved-5": lambda h: h.redirect("/moved-4"),
    "/moved-4": lambda h: h.redirect("moved-3"),
    "/moved-3": lambda h: h.redirect(f"http://127.0.0.1:{h.server.server_port}/moved-2"),
    "/moved-2": lambda h: h.redirect("/moved"),
    "/moved-6": lambda h: h.redirect("/moved-5"),
    "/circle": lambda h: h.redirect("/circle"),
    "/to-file": lambda h: h.redirect("file:///etc/passwd"),
    "/to-ftp": lambda h: h.redirect("ftp://127.0.0.1/a.png"),
    "/nowhere": lambda h: h.answer(b"", code=302),
    "/a%20%C3%A4.png": lambda h: h.answer(PNG),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    server.requests, server.released = [], threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def base(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server.requests.clear()
    return f"http://127.0.0.1:{server.server_port}"


def load(url: str, **options) -> Image.Image:
    (source,) = expand(url)
    assert source.path == url
    return decode(source, **options)


def refusal(url: str, **options) -> str:
    with pytest.raises(ImageError) as caught:
        load(url, **options)
    assert caught.value.name == url
    return caught.value.reason


@pytest.mark.parametrize("path", ["/photo.png", "/untyped", "/misnamed.txt", "/without-length", "/chunked"])
def test_an_image_is_an_image_whatever_the_server_calls_it(base: str, path: str) -> None:
    image = load(base + path)
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (40, 30), (10, 20, 30))


def test_nothing_is_downloaded_before_it_is_decoded(base: str, server: ThreadingHTTPServer) -> None:
    sources = list(expand([base + "/photo.png", base + "/missing"]))
    assert server.requests == []
    decode(sources[0])
    ((path, headers),) = server.requests
    assert path == "/photo.png"
    assert headers["User-Agent"].startswith("cupy-resnet/")
    assert headers["Accept-Encoding"] == "identity"


def test_spaces_umlauts_queries_and_fragments(base: str, server: ThreadingHTTPServer) -> None:
    load(base + "/a ä.png#part")
    load(base + "/a%20%C3%A4.png?q=ö&r=%2F")
    assert [path for path, _ in server.requests] == ["/a%20%C3%A4.png", "/a%20%C3%A4.png?q=%C3%B6&r=%2F"]


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_are_followed(base: str, code: int) -> None:
    assert load(f"{base}/moved?{code}").size == (40, 30)


def test_five_redirects_and_no_more(base: str, server: ThreadingHTTPServer) -> None:
    assert load(base + "/moved-5").size == (40, 30)
    assert refusal(base + "/moved-6") == f"the server redirects more than 5 times, last to {base}/photo.png"
    server.requests.clear()
    assert "redirects more than 5 times" in refusal(base + "/circle")
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/to-file", "the server redirects to file:///etc/passwd: file: URLs are not read"),
        ("/to-ftp", "the server redirects to ftp://127.0.0.1/a.png: ftp: URLs are not read"),
        ("/nowhere", "the server answered 302 Found"),
        ("/missing", "the server answered 404 Not Found"),
        ("/broken", "the server answered 500 Internal Server Error"),
        ("/page", "this is a web page, not an image (the server calls it text/html)"),
        ("/json", "(the server calls it application/json)"),
        ("/empty", "there are no bytes to decode (the server calls it image/png)"),
        ("/announced", "the server announces 1000000000000 bytes, more than the limit of 1000"),
        ("/endless", "the server sends more than the limit of 1000 bytes"),
        ("/short", f"the download failed: the connection closed after 50 of {len(PNG)} bytes"),
        ("/gzip", "the server sent Content-Encoding gzip, which was not asked for"),
        ("/garbage", "the download failed: "),
    ],
)
def test_what_a_server_can_do_wrong(base: str, path: str, reason: str) -> None:
    assert reason in refusal(base + path, url_limit=1000)


def test_the_limit_is_exact(base: str) -> None:
    for path in ("/photo.png", "/without-length", "/chunked"):
        assert load(base + path, url_limit=len(PNG)).size == (40, 30)
        assert f"the limit of {len(PNG) - 1}" in refusal(base + path, url_limit=len(PNG) - 1)


@pytest.mark.parametrize("path", ["/silent", "/drip-headers", "/drip-body"])
def test_slow_servers_end_in_time(base: str, path: str) -> None:
    began = time.monotonic()
    assert refusal(base + path, url_timeout=0.4) == "the download took longer than 0.4 s"
    assert time.monotonic() - began < 5


def test_servers_that_are_not_there(base: str) -> None:
    with socket.socket() as deaf:  # has the port, so that nobody else does, and does not listen
        deaf.bind(("127.0.0.1", 0))
        reason = refusal(f"http://127.0.0.1:{deaf.getsockname()[1]}/a.png", url_timeout=5)
    assert reason.startswith("the download failed: ")
    assert "refused" in reason
    assert refusal("http://a..b/c.png").startswith("the download failed: ")


def test_https_does_not_fall_back_to_http() -> None:
    with pytest.raises(RefusedError, match="redirects from https to http://host/b, which is not encrypted"):
        urls._redirected("https://host/a", "http://host/b")
    assert urls._redirected("https://host/a.png", "//other/b.png") == "https://other/b.png"
    assert urls._redirected("http://host/a.png", "https://host/b.png") == "https://host/b.png"


def test_hosts_beyond_ascii_and_of_ipv6() -> None:
    assert urls._ascii("https://münchen.example:81/ä") == "https://xn--mnchen-3ya.example:81/%C3%A4"
    assert urls._ascii("http://[::1]:8/a?b#c") == "http://[::1]:8/a?b"


def test_a_local_file_named_like_a_scheme_is_a_file(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data:photo.png").write_bytes(PNG)
    assert load("data:photo.png").size == (40, 30)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1, with its key, that no authority has signed."""
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a certificate with")
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test"
    places = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", str(path) + ".crt"]
    subprocess.run(["openssl", *request.split(), *places], check=True, capture_output=True)
    with path.open("ab") as file:
        file.write(Path(str(path) + ".crt").read_bytes())
    return path


def test_https_works_and_certificates_are_verified(
    base: str, server: ThreadingHTTPServer, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    secure = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    secure.daemon_threads, secure.block_on_close = True, False
    secure.requests, secure.released = [], server.released
    secure.socket = context.wrap_socket(secure.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=secure.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        here = f"https://127.0.0.1:{secure.server_port}"
        assert "CERTIFICATE_VERIFY_FAILED" in refusal(here + "/photo.png")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert load(here + "/photo.png").size == (40, 30)
        assert load(here + "/moved").size == (40, 30)
        for path in ("/silent", "/drip-headers", "/drip-body"):
            assert refusal(here + path, url_timeout=0.4) == "the download took longer than 0.4 s"
    finally:
        secure.shutdown()
        secure.server_close()
        thread.join()
