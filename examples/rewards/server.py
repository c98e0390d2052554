"""A judging server for `type: remote`, in the standard library: `python server.py --port 8700`.

It gets one answer, `{"prompt", "response", "label", "metadata"}`, or with `batch_size` above 1
`{"batch": [...]}` of them, and sends one reward for each. Here the reward is the share of the words
in `metadata.must_mention` that an answer mentions. Put your model or your program in `judge`.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def judge(item):
    """The reward of one answer: a number, a mapping of numbers, or None (no answer found)."""
    words = item["metadata"].get("must_mention", [])
    text = item["response"].lower()
    if not text.strip() or not words:
        return None
    return sum(word.lower() in text for word in words) / len(words)


class Handler(BaseHTTPRequestHandler):
    """One connection of the run; it is kept open for many answers."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        """Judge what was sent. What cannot be read is the caller's error: 400, no retry."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            asked = json.loads(body)
            if "batch" in asked:
                answer = {"batch": [judge(item) for item in asked["batch"]]}
            else:
                answer = {"reward": judge(asked)}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.reply(400, {"error": repr(error)})
        else:
            self.reply(200, answer)

    def reply(self, status, answer):
        """Send JSON."""
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        """Write no line for each request."""


class Server(ThreadingHTTPServer):
    """A run opens up to `max_connections` connections (64) at once: let them queue."""

    request_queue_size = 128


def main():
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8700, help="0 takes a free one")
    options = parser.parse_args()
    server = Server((options.host, options.port), Handler)
    print(f"judging at http://{options.host}:{server.server_port}/", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
