"""Serves the dashboard, which `make web` builds into `control_plane/static`.

    /assets/<name>-<hash>.<ext>   cached forever, because changed content gets another name; served compressed
                                  from `<name>.gz` if the browser accepts gzip
    /<name>.<ext>                 files in the folder of index.html, for example the runbook
    any other path                index.html: paths are pages of the dashboard, so links and reloads work

Invariant: pages run only scripts and styles from this server. The server reads only files in `control_plane/static`.
"""

from __future__ import annotations

import mimetypes
import secrets
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

STATIC: Final = Path(__file__).resolve().parents[1] / "static"
NONCE: Final = "__CSP_NONCE__"
"""Placeholder in index.html. The dashboard's script sets this nonce on styles that it creates at run time."""
_IMMUTABLE: Final = "public, max-age=31536000, immutable"
_HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
}
_PLAIN_POLICY: Final = (
    "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of static pages without scripts, such as the runbook."""
_NOT_BUILT: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Everstep</title>
<h1>The dashboard is not built</h1>
<p>This server runs from a checkout. Build the dashboard once and reload this page:</p>
<pre>make web</pre>
<p>The API works without it: \
<a href="/v1/openapi.json">/v1/openapi.json</a>, and so does the command line: <code>everstep --help</code>.</p>
</html>"""


class Dashboard:
    """ASGI application for paths without a route. `directory` may be missing. `otherwise` answers paths under /v1."""

    def __init__(self, otherwise: ASGIApp, directory: Path = STATIC) -> None:
        self._otherwise = otherwise
        self._directory = directory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if scope["type"] != "http" or path == "/v1" or path.startswith("/v1/"):
            await self._otherwise(scope, receive, send)
            return
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(405)
        await self._answer(path, Headers(scope=scope))(scope, receive, send)

    def _answer(self, path: str, headers: Headers) -> Response:
        is_asset = path.startswith("/assets/")
        name = path.removeprefix("/assets/" if is_asset else "/")
        if is_asset or "." in name:
            # Only a single file name is accepted, so the path cannot leave the directory.
            if "/" in name or "\\" in name or "\0" in name or name.startswith(".") or name in ("", "index.html"):
                return _missing() if is_asset else self._page()
            file = self._directory / "assets" / name if is_asset else self._directory / name
            if file.is_file():
                return _file(file, headers, cache=_IMMUTABLE if is_asset else "no-cache")
            if is_asset:
                return _missing()
        return self._page()

    def _page(self) -> Response:
        try:
            text = (self._directory / "index.html").read_text(encoding="utf-8")
        except FileNotFoundError:
            return HTMLResponse(
                _NOT_BUILT,
                503,
                {**_HEADERS, "cache-control": "no-store", "content-security-policy": "default-src 'none'"},
            )
        nonce = secrets.token_urlsafe(16)
        return HTMLResponse(
            text.replace(NONCE, nonce),
            headers={**_HEADERS, "cache-control": "no-store", "content-security-policy": policy(nonce)},
        )


_TYPES: Final = {".js": "text/javascript", ".woff2": "font/woff2"}
"""Some machines' MIME tables lack these extensions, or have other types for them."""


def policy(nonce: str) -> str:
    """Return the Content-Security-Policy of a page whose run-time styles have `nonce`."""
    return (
        "default-src 'none'; script-src 'self'; "
        f"style-src 'self' 'nonce-{nonce}'; "
        "img-src 'self' data:; font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    )


def _file(file: Path, headers: Headers, *, cache: str) -> Response:
    media_type = _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    answer = {**_HEADERS, "cache-control": cache, "vary": "accept-encoding"}
    if file.suffix == ".html":
        answer["content-security-policy"] = _PLAIN_POLICY
    packed = file.with_name(file.name + ".gz")
    if "gzip" in headers.get("accept-encoding", "") and packed.is_file():
        return FileResponse(packed, headers={**answer, "content-encoding": "gzip"}, media_type=media_type)
    return FileResponse(file, headers=answer, media_type=media_type)


def _missing() -> Response:
    """Return 404 for a missing file. The browser would run index.html as a script."""
    return Response(
        "There is no such file; reload the page.",
        404,
        {**_HEADERS, "cache-control": "no-store"},
        media_type="text/plain",
    )
