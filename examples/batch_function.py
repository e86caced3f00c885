"""A function that takes several requests at once: `gshare/batch` at its deployment. Here a batch takes as long as one request."""

import http.server
import os
import time


def model(bodies):
    time.sleep(0.05)
    return [f"{len(bodies)} {body.decode()}".encode() for body in bodies]


class Function(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        lengths = [int(length) for length in self.headers["gshare-batch"].split(",")]
        answers = model([self.rfile.read(length) for length in lengths])
        self.send_response(200)
        self.send_header("gshare-batch", ",".join(str(len(answer)) for answer in answers))
        self.send_header("content-length", str(sum(len(answer) for answer in answers)))
        self.end_headers()
        self.wfile.write(b"".join(answers))


http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Function).serve_forever()
