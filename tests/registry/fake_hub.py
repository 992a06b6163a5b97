"""A fake Hugging Face hub on the loopback interface: the requests of huggingface_hub, and a record of fetched files."""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote, urlsplit

LARGE = (".gguf", ".safetensors", ".bin", ".pt", ".dat")  # which the hub keeps elsewhere, behind a redirect


@dataclass
class Hub:
    """Repositories as {"org/name": {revision: {file: content}}}. fetched: files whose bytes were sent, in order."""

    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    server: ThreadingHTTPServer | None = None

    def add(self, repo: str, *files: str, revision: str = "main", **contents: bytes) -> None:
        """A repository of files whose content is their name and revision, or as given in `contents`."""
        made = {file: contents.get(file, f"{file} of {revision}".encode()) for file in files}
        self.repositories.setdefault(repo, {})[revision] = made | contents

    def commit(self, repo: str, revision: str) -> str:
        content = repr(sorted(self.repositories[repo][revision].items()))
        return hashlib.sha1(f"{repo} {revision} {content}".encode()).hexdigest()

    def find(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """(commit, files) of a branch or commit."""
        for name, files in self.repositories.get(repo, {}).items():
            if revision in (name, self.commit(repo, name)):
                return self.commit(repo, name), files
        return None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def elsewhere(self) -> str:
        """The same server under another name: redirects within a hub are followed while metadata is asked for."""
        return f"http://localhost:{self.server.server_address[1]}"

    def __enter__(self) -> "Hub":
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # an answer is one packet: the second of two waits for the first to be acknowledged

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._send(404, b"")

    def log_message(self, *_):
        pass

    def _answer(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[0] == "cdn":
            self._content(*self._file("/".join(parts[1:3]), parts[3], "/".join(parts[4:]))[1:])
        elif parts[:2] == ["api", "models"]:
            self._about("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _about(self, repo: str, rest: list[str]) -> None:
        """/api/models/ORG/NAME, /api/models/ORG/NAME/revision/REV and /api/models/ORG/NAME/tree/REV."""
        found = self.hub.find(repo, rest[1] if len(rest) > 1 else "main")
        if found is None:
            known = repo in self.hub.repositories
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"})
            return
        commit, files = found
        if rest[:1] == ["tree"]:
            self._json([{"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                        | ({"lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content),
                                    "pointerSize": 134}} if name.endswith(LARGE) else {})
                        for name, content in files.items()])
        else:
            self._json({"id": repo, "modelId": repo, "sha": commit, "private": False, "gated": False, "tags": [],
                        "siblings": [{"rfilename": name} for name in files]})

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        commit, _, content = self._file(repo, revision, name)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if name.endswith(LARGE):
            headers |= {"X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content)),
                        "Location": f"{self.hub.elsewhere}/cdn/{repo}/{commit}/{quote(name)}"}
            self._send(302, b"", headers)
        else:
            self._content(name, content, headers)

    def _file(self, repo: str, revision: str, name: str) -> tuple[str, str, bytes | None]:
        commit, files = self.hub.find(repo, revision) or ("", {})
        return commit, name, files.get(name)

    def _content(self, name: str, content: bytes, headers: dict[str, str] | None = None) -> None:
        if self.command == "GET":
            self.hub.fetched.append(name)
        begin = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0]
        part = content[int(begin or 0):]
        headers = {**(headers or {}), "Accept-Ranges": "bytes"}
        if len(part) < len(content):
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self._send(206 if len(part) < len(content) else 200, part, headers)

    def _json(self, value) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()
