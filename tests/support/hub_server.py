"""A model hub on this machine: as much of the Hugging Face hub's HTTP interface as its library needs for two verbs."""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_this_test"


class Hub(http.server.ThreadingHTTPServer):
    """Repositories in memory."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = {}
        """``OWNER/NAME`` -> path -> bytes."""
        self.private = set()
        self.refuses = False
        """True: any request is answered with 403."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Nothing."""

    def _answer(self, data=b"", status=200, **headers):
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.refuses or self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "not allowed"}, 403)
            return
        path = urlsplit(self.path).path
        hub = self.server.repositories
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            taken = name in hub
            hub.setdefault(name, {})
            if asked.get("private") or asked.get("visibility") == "private":
                self.server.private.add(name)
            self._answer({"url": f"{self.server.url}/{name}"}, 409 if taken else 200)
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif path.endswith("/preupload/main"):
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                     for file in json.loads(body)["files"]]  # fmt: skip
            self._answer({"files": files})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub[found[1]][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            sha = self._sha(found[1])
            self._answer({"commitUrl": f"{self.server.url}/{found[1]}/commit/{sha}", "commitOid": sha, "success": True})
        else:
            self._answer({"error": f"unknown: {path}"}, 404)

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        hub = self.server.repositories
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/main)?", path):
            if found[1] not in hub:
                self._answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
                return
            siblings = [{"rfilename": name} for name in hub[found[1]]]
            self._answer({"id": found[1], "sha": self._sha(found[1]), "siblings": siblings})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/\w+", path):
            files = hub[found[1]].items()
            self._answer([{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                          for name, data in files])  # fmt: skip
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(\w+)/(.+)", path):
            data = hub[found[1]][found[3]]
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            self._answer(data, ETag=etag, X_Repo_Commit=self._sha(found[1]), Accept_Ranges="bytes")
        else:
            self._answer({"error": f"unknown: {path}"}, 404)

    def do_HEAD(self):
        self.do_GET()

    def _sha(self, name):
        files = sorted(self.server.repositories[name].items())
        return hashlib.sha1(repr(files).encode()).hexdigest()


@contextlib.contextmanager
def served():
    """A hub that listens until the block ends."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
