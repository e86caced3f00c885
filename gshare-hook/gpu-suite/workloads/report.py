"""What every workload prints last: a digest of its output and the time of its steady part."""

import hashlib
import json


def report(array_bytes: bytes, seconds: float) -> None:
    print(json.dumps({"digest": hashlib.sha256(array_bytes).hexdigest(), "seconds": seconds}))
