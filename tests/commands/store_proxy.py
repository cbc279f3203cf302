"""An HTTP proxy before the emulator of a store, which can fail as a store does."""

import http.client
import http.server
import threading
import urllib.parse

_NOT_FORWARDED = {"connection", "expect", "host", "transfer-encoding", "content-length"}

_CODES = {403: "AccessDenied", 503: "SlowDown"}


class Request:
    """What a rule sees: `method`, `path`, `query`, `length` and start of the body.

    `answered` is the length of the body of the response.
    """

    def __init__(self, method, target, body):
        address = urllib.parse.urlsplit(target)
        self.method = method
        self.path = urllib.parse.unquote(address.path)
        self.query = dict(urllib.parse.parse_qsl(address.query, keep_blank_values=True))
        self.length = len(body)
        self.body = body[:1000]
        self.answered = 0

    def __repr__(self):
        return f"{self.method} {self.path} {self.query}"


class StoreProxy:
    """Forwards to `port` on this machine, but as `rule(request)` says.

    The rule returns None to forward a request, the status of an error, "cut" to close
    the connection after the request was forwarded, and "lost" to close it before; it
    may also block.

    Attributes:
        port: of the proxy.
        requests: all of them, in the order of their arrival.
    """

    def __init__(self, port):
        self.rule = lambda request: None
        self.requests = []
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self):
                body = self._body()
                request = Request(self.command, self.path, body)
                proxy.requests.append(request)
                answer = proxy.rule(request)
                if isinstance(answer, int):
                    code = _CODES.get(answer, "InternalError")
                    text = f"<Error><Code>{code}</Code></Error>"
                    self._respond(answer, [], text.encode())
                    return
                if answer != "lost":
                    connection = http.client.HTTPConnection("127.0.0.1", port)
                    headers = {
                        name: value
                        for name, value in self.headers.items()
                        if name.lower() not in _NOT_FORWARDED
                    }
                    headers["Host"] = self.headers["Host"]
                    connection.request(self.command, self.path, body, headers)
                    response = connection.getresponse()
                    content = response.read()
                    request.answered = len(content)
                    connection.close()
                if answer in ("lost", "cut"):
                    self.close_connection = True
                    return
                self._respond(response.status, response.getheaders(), content)

            def _body(self):
                if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                parts = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    pass
                return b"".join(parts)

            def _respond(self, status, headers, content):
                self.send_response(status)
                is_head = self.command == "HEAD"
                for name, value in headers:
                    if name.lower() not in _NOT_FORWARDED or (
                        is_head and name.lower() == "content-length"
                    ):
                        self.send_header(name, value)
                if not is_head:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if not is_head:
                    self.wfile.write(content)

            def log_message(self, *arguments):
                pass

        for method in ("DELETE", "GET", "HEAD", "POST", "PUT"):
            setattr(Handler, f"do_{method}", Handler._handle)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
