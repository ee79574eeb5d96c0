"""Downloads one file, of which the hash is known."""

import hashlib
import http.client
import logging
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

Progress = Callable[[int, int | None], None]
"""Called with the bytes that have arrived and the bytes of the file, None if the server does not tell."""

TIMEOUT = 30.0
"""Seconds without a byte after which a download is given up."""

_CHUNK = 1 << 20


class DownloadError(RuntimeError):
    """The server cannot be reached, refuses, stops early or sends something else; the message is the reason."""


def download(url: str, path: Path, sha256_prefix: str, progress: Progress | None = None) -> str:
    """Downloads `url` to `path` and checks it.

    Proxies are taken from the environment, as `urllib` does.

    Args:
        url: http or https.
        path: written as the bytes arrive: a temporary file.
        sha256_prefix: what the file's sha256 begins with, in hexadecimal.
        progress: told about every part that arrives.

    Returns:
        The whole sha256, in hexadecimal.

    Raises:
        DownloadError: there is no such file at the end.
        OSError: `path` cannot be written.
    """
    if not url.startswith(("https://", "http://")):
        raise DownloadError(f"{url} is neither an http nor an https address")
    logger.info("downloading %s", url)
    request = urllib.request.Request(url, headers={"User-Agent": "cupy_resnet"})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        raise DownloadError(f"{url} answers HTTP {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise DownloadError(f"{url} cannot be reached ({_reason(error)})") from error
    digest, received = hashlib.sha256(), 0
    with response, path.open("wb") as file:
        length = response.headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() else None
        while True:
            try:
                chunk = response.read(_CHUNK)
            except (OSError, http.client.HTTPException) as error:
                raise DownloadError(f"{url} stopped after {received} bytes ({_reason(error)})") from error
            if not chunk:
                break
            file.write(chunk)
            digest.update(chunk)
            received += len(chunk)
            if progress is not None:
                progress(received, total)
    if total is not None and received != total:
        raise DownloadError(f"{url} stopped after {received} of {total} bytes")
    sha256 = digest.hexdigest()
    if not sha256.startswith(sha256_prefix):
        raise DownloadError(f"what {url} sent ({received} bytes) has the sha256 {sha256}, expected {sha256_prefix}…")
    return sha256


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", error)) or type(error).__name__
