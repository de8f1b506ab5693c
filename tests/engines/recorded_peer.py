"""An HTTP server that gives recorded answers, in pieces that are cut anywhere, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RECORDED: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "data" / "remote_recorded.json").read_text(encoding="utf-8")
)
_PIECE = 37


class RecordedPeer:
    """A server; as a context manager it runs.

    Parameters
    ----------
    answers : dict of str to (int, str)
        Status and body by ``METHOD ROUTE``; all else is 404. A callable instead is called with the handler.
    """

    def __init__(self, answers: dict[str, Any], port: int = 0) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        self._news = threading.Condition()
        peer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                name = f"{self.command} {self.path}"
                with peer._news:
                    headers = {key.lower(): value for key, value in self.headers.items()}
                    peer.asked.append((name, headers, json.loads(body) if body else None))
                    peer._news.notify_all()
                found = peer.answers.get(name, (404, '{"detail":"Not Found"}'))
                if callable(found):
                    found(self)
                    return
                status, text = found
                self.send_response(status)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                data = text.encode()
                for i in range(0, len(data), _PIECE):
                    piece = data[i : i + _PIECE]
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")

            do_GET = do_POST = _answer

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> RecordedPeer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def bodies(self, name: str) -> list[Any]:
        """What was sent to a route."""
        return [body for asked, _, body in self.asked if asked == name]

    def wait_for(self, name: str, within: float = 10.0) -> Any:
        """Wait until a route has been asked; returns the body of the last time."""
        with self._news:
            assert self._news.wait_for(lambda: self.bodies(name), within), f"nobody asked {name}"
            return self.bodies(name)[-1]


def vllm(*, tokens: bool = True) -> dict[str, Any]:
    """vLLM 0.32.0, with and without ``--enable-scale-out``."""
    recorded = RECORDED["vllm"]
    answers: dict[str, Any] = {
        "GET /version": (200, recorded["version"]),
        "GET /v1/models": (200, recorded["models"]),
        "GET /health": (200, ""),
        "POST /v1/completions": (200, recorded["completions"]),
    }
    # How it answers the empty body of the probe; a test puts its recorded answer here afterwards.
    answers["POST /inference/v1/generate"] = (400, "{}") if tokens else (403, "{}")
    return answers


def sglang(**changes: object) -> dict[str, Any]:
    """SGLang 0.5.23."""
    info = {**json.loads(RECORDED["sglang"]["server_info"]), **changes}
    return {
        "GET /server_info": (200, json.dumps(info)),
        "GET /health": (200, ""),
        "POST /generate": (200, RECORDED["sglang"]["incremental"]),
        "POST /abort_request": (200, ""),
    }
