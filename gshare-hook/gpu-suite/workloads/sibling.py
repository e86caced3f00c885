"""`busy.py` in a child, while this process has launched one kernel and only holds a context, as a launcher or API server does."""

import os
import subprocess
import sys

import device

launch, mark = device.Driver().spinner()
launch()
mark()()
worker = os.path.join(os.path.dirname(os.path.abspath(__file__)), "busy.py")
# The child answers the suite itself: it owns both streams.
sys.exit(subprocess.call([sys.executable, worker, *sys.argv[1:]]))
