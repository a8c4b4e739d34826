"""Open the traces of all ranks of a launch as one in Perfetto: `python open_traces.py RUN_FOLDER [FILE]`.

The trace is written to FILE, and is served to https://ui.perfetto.dev once unless FILE is given.
"""

import gzip
import http.server
import json
import sys
import webbrowser
from pathlib import Path

PORT = 9001  # one of those from which Perfetto's page may load
VIEWER = "https://ui.perfetto.dev"


def joined(folder: Path) -> bytes:
    """Return the traces of a run folder on one clock, with the processes of each rank apart."""
    files = sorted(folder.glob("ranks/*/trace.json.gz"), key=lambda file: int(file.parent.name))
    if not files:
        raise SystemExit(f"{folder}: no ranks/*/trace.json.gz; run pytest with --aorta-profiler=torch --aorta-results")
    traces = [json.loads(gzip.decompress(file.read_bytes())) for file in files]
    base = min(trace["baseTimeNanoseconds"] for trace in traces)
    events = []
    for rank, trace in enumerate(traces):
        later_us = (trace["baseTimeNanoseconds"] - base) / 1000
        for event in trace["traceEvents"]:
            event["pid"] = f"rank {rank}: {event['pid']}"
            if "ts" in event:
                event["ts"] += later_us
            if "id" in event:
                event["id"] = f"rank {rank}: {event['id']}"
            if event["name"] == "process_name":
                event["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
            events.append(event)
    return gzip.compress(json.dumps({"traceEvents": events}).encode())


class Handler(http.server.BaseHTTPRequestHandler):
    """The answer to the page's one request."""

    content = b""

    def do_GET(self) -> None:
        """Send the trace."""
        self.send_response(200)
        self.send_header("Access-Control-Allow-Origin", VIEWER)
        self.end_headers()
        self.wfile.write(self.content)


if __name__ == "__main__":
    Handler.content = joined(Path(sys.argv[1]))
    if sys.argv[2:]:
        Path(sys.argv[2]).write_bytes(Handler.content)
    else:
        with http.server.HTTPServer(("127.0.0.1", PORT), Handler) as server:
            address = f"{VIEWER}/#!/?url=http://127.0.0.1:{PORT}/trace.json.gz"
            print(f"open {address}", flush=True)
            webbrowser.open(address)
            server.handle_request()
