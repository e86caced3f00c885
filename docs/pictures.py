#!/usr/bin/env python3
"""Draws the pictures of the documents: `gshare top` and the page of `gshare up --demo`, both on simulated devices, and plots of replays.

    python3 -m venv venv && venv/bin/pip install pyte rich matplotlib
    venv/bin/python docs/pictures.py [DIR]      # the folder of the programs [default: target/release]
    target/release/replay REPLAY --csv | venv/bin/python docs/pictures.py --plot FILE.svg [COLUMN]

Writes files in docs/images; that of the page where a Chromium is in the search path. The folder needs `gshare`, `gshare-openfaas`,
`libgshare_hook.so`, `libfake_cuda.so` and `replay`. The second form draws the rows of any replay: bars of one column [default: the first
figure], or with `--series` a panel for each figure over time.
"""

import csv
import fcntl
import http.server
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import urllib.request


ROOT = pathlib.Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 110, 9
CLIENTS = [
    ("train", ["--quota", "0.2:1", "--mem", "6GiB"]),
    ("resnet", ["--quota", "0.5:0.6", "--mem", "2GiB"]),
    ("batch", ["--quota", "0.1:0.15", "--mem", "1GiB"]),
]


PLOTS = {
    "fast-fig12": (["--seeds", "1", "--headrooms", "60", "--series"], None),
}


def plot(lines, file, figure=None):
    """Draws the CSV of a replay. The program `replay` lists the columns which identify a row; all others are figures."""
    import matplotlib.pyplot as plt

    listed = re.search(r"const ABOUT[^=]*= \[(.*?)\]", (ROOT / "benches/src/replay/mod.rs").read_text(), re.DOTALL)[1]
    rows = list(csv.DictReader(lines))
    series, about = "second" in rows[0], [key for key in rows[0] if f'"{key}"' in listed]
    figures = [key for key in rows[0] if key not in about and figure in (None, key)][: None if series else 1]
    about = [key for key in about if key not in ("policy", "second")]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    inputs = list(dict.fromkeys(tuple(row[key] for key in about) for row in rows))
    number = lambda row, key: float(row[key] or "nan")
    panels = [(name, one) for one in inputs for name in figures] if series else [(name, None) for name in figures]
    drawing, axes = plt.subplots(len(panels), squeeze=False, figsize=(8, 2.4 * len(panels) + 1), layout="constrained")
    for axis, (name, one) in zip(axes[:, 0], panels):
        axis.set_ylabel(" ".join((name, *(one or ()))))
        for place, policy in enumerate(policies):
            of = [row for row in rows if row["policy"] == policy and (one is None or tuple(row[key] for key in about) == one)]
            if series:
                axis.step([number(row, "second") for row in of], [number(row, name) for row in of], where="post", label=policy)
            else:
                at = [inputs.index(tuple(row[key] for key in about)) + 0.8 * place / len(policies) for row in of]
                axis.bar(at, [number(row, name) for row in of], 0.8 / len(policies), align="edge", label=policy)
        if not series:
            axis.set_xticks([at + 0.4 for at in range(len(inputs))], [" ".join(one) for one in inputs])
    axes[-1, 0].set_xlabel("seconds" if series else " ".join(about))
    drawing.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    drawing.savefig(file)


def top(gshare, folder):
    """The screen after some seconds with three programs that always have work."""
    environment = os.environ | {"GSHARE_SOCKET": f"{folder}/gshare.sock", "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    started = [subprocess.Popen([gshare, "daemon", "--socket", environment["GSHARE_SOCKET"]], stderr=subprocess.DEVNULL)]
    try:
        while not pathlib.Path(environment["GSHARE_SOCKET"]).exists():
            time.sleep(0.05)
        for name, share in CLIENTS:
            argv = [gshare, "run", "--sim=a100", "--name", name, *share, "--", gshare, "spin"]
            started.append(subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        child, terminal = pty.fork()
        if child == 0:
            os.execve(gshare, [gshare, "top", "--interval", "500ms"], environment)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.kill(child, signal.SIGWINCH)
        import pyte

        screen = pyte.Screen(COLUMNS, ROWS)
        stream, end = pyte.ByteStream(screen), time.monotonic() + 15
        while (left := end - time.monotonic()) > 0:
            if select.select([terminal], [], [], left)[0]:
                stream.feed(os.read(terminal, 65536))
        os.write(terminal, b"q")
        return screen
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()


def svg(screen, file):
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    def colour(name):
        return None if name == "default" else f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else {"brown": "yellow"}.get(name, name)

    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True, color_system="truecolor")
    text = Text(no_wrap=True)
    for row in range(ROWS):
        for column in range(COLUMNS):
            cell = screen.buffer[row][column]
            style = Style(color=colour(cell.fg), bgcolor=colour(cell.bg), bold=cell.bold, reverse=cell.reverse)
            text.append(cell.data, style)
        text.append("\n")
    console.print(text, end="")
    # Without the fonts that it would fetch.
    file.write_text(re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="gshare top"), flags=re.DOTALL))


def page(gshare, folder, file):
    """The page in the middle of the load. The browser starts after the load, since its start would delay the functions."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not browser:
        print("no Chromium, no picture of the page")
        return
    host = subprocess.Popen([gshare, "up", "--demo", "--listen", "127.0.0.1:0"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in host.stdout:
            if found := re.search(r"load for 30 s: (\S+)/ui", line):
                break
        time.sleep(25)
        answers = {path: urllib.request.urlopen(found[1] + path).read() for path in ("/ui", "/system/state", "/system/history")}
    finally:
        host.send_signal(signal.SIGINT)
        host.wait()

    class Recorded(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers.get(self.path.split("?")[0], b""))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        argv = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/browser"]
        argv += ["--window-size=1280,1500", "--virtual-time-budget=400", f"--screenshot={file}", f"http://127.0.0.1:{server.server_port}/ui"]
        subprocess.run(argv, check=True, stderr=subprocess.DEVNULL)
        server.shutdown()


def main():
    if sys.argv[1:2] == ["--plot"]:
        return plot(sys.stdin, *sys.argv[2:])
    programs = pathlib.Path(sys.argv[1] if sys.argv[1:] else ROOT / "target/release").resolve()
    images = ROOT / "docs/images"
    images.mkdir(exist_ok=True)
    gshare = str(programs / "gshare")
    with tempfile.TemporaryDirectory() as folder:
        svg(top(gshare, folder), images / "top.svg")
        page(gshare, folder, images / "page.png")
    for name, (flags, figure) in PLOTS.items():
        rows = subprocess.run([programs / "replay", name, *flags, "--csv"], check=True, stdout=subprocess.PIPE, text=True).stdout
        plot(rows.splitlines(), images / f"{name}.svg", figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
