"""A client of the host of functions, `gshare up`: the REST interface of OpenFaaS gateways, with annotations of gshare."""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class HostError(RuntimeError):
    """The host refuses a request, or gives no answer. `status` is the HTTP status, or None without an answer."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Function:
    """A deployed function."""

    name: str
    state: str
    """`serving`, `training`, `completed`, `failing`, `measuring`, `parked`, `starting` or `idle`."""
    replicas: int
    available: int
    """Replicas that are ready."""
    problem: str | None
    """Why the function does not run."""
    answered: int
    within_slo: int
    """Requests answered, and those answered within the SLO."""
    gpu_seconds: float
    details: Mapping[str, Any]
    """The host's whole answer: deployment, measured points, instances with their devices."""


class Host:
    """A host at a URL. `user` and `password` are those of its `--credentials`."""

    def __init__(self, url: str = "http://127.0.0.1:8080", *, user: str = "", password: str = "", timeout: float = 70) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._headers = {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()} if user else {}

    def deploy(
        self,
        name: str,
        program: str = "",
        *,
        image: str = "",
        slo: str | None = None,
        quota: str | None = None,
        mem: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
        limits: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        update: bool = False,
    ) -> None:
        """Deploys a function: a command line that serves HTTP at `$PORT`, or a container image. Returns before the function is ready.

        - `slo`: time in which a request should be answered, such as `"69ms"`; the host measures the function and chooses its share
        - `quota`, `mem`: a share of its own instead, `"30%:80%"` and `"4GiB"`
        - `annotations`: others of the host, such as `{"gshare/workload": "training"}`
        - `update`: replace a deployed function
        """
        request, _, most = (quota or "").partition(":")
        ours = {
            "gshare/slo": slo,
            "fastgshare/gpu_quota_request": request or None,
            "fastgshare/gpu_quota_limit": most or None,
            "fastgshare/gpu_mem": mem,
        }
        body = {
            "service": name,
            "image": image or name,
            "envProcess": program or None,
            "envVars": env,
            "secrets": list(secrets) or None,
            "limits": limits,
            "labels": labels,
            "annotations": {**{key: value for key, value in ours.items() if value is not None}, **(annotations or {})},
        }
        given = {key: value for key, value in body.items() if value is not None}
        self._ask("PUT" if update else "POST", "/system/functions", json.dumps(given).encode())

    def functions(self) -> list[Function]:
        """All functions."""
        return [_function(status) for status in json.loads(self._ask("GET", "/system/functions"))]

    def function(self, name: str) -> Function:
        """A function. Raises `HostError` with status 404 if it is unknown."""
        return _function(json.loads(self._ask("GET", f"/system/function/{urllib.parse.quote(name, safe='')}")))

    def wait(self, name: str, timeout: float = 120) -> Function:
        """Waits until a function serves, trains, is parked or has completed. Raises `TimeoutError` with the function's state."""
        end = time.monotonic() + timeout
        while True:
            found = self.function(name)
            if found.state in ("serving", "training", "parked", "completed"):
                return found
            if time.monotonic() > end:
                raise TimeoutError(f"{name}: {found.state} after {timeout:g} s: {found.problem or 'no problem is known'}")
            time.sleep(0.2)

    def invoke(self, name: str, body: bytes = b"", *, path: str = "", headers: Mapping[str, str] | None = None) -> bytes:
        """Calls a function and returns the body of its answer. Raises `HostError` for a status from 400."""
        where = f"/function/{urllib.parse.quote(name, safe='')}/{path.lstrip('/')}"
        return self._ask("POST" if body else "GET", where, body or None, headers)

    def scale(self, name: str, replicas: int) -> None:
        """Sets the number of replicas."""
        body = json.dumps({"serviceName": name, "replicas": replicas}).encode()
        self._ask("POST", f"/system/scale-function/{urllib.parse.quote(name, safe='')}", body)

    def delete(self, name: str) -> None:
        """Deletes a function and its measurement."""
        self._ask("DELETE", "/system/functions", json.dumps({"functionName": name}).encode())

    def _ask(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> bytes:
        # Credentials are the host's, and a function must not see them.
        own = self._headers if path.startswith("/system/") else {}
        whole = {"Content-Type": "application/json", **(headers or {}), **own}
        request = urllib.request.Request(self.url + path, body, whole, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                raise HostError(error.read().decode(errors="replace").strip() or str(error), error.code) from None
        except OSError as error:
            raise HostError(f"{self.url}: no answer: {getattr(error, 'reason', error)}") from error


def _function(status: Mapping[str, Any]) -> Function:
    ours = status["gshare"]
    return Function(
        name=status["name"],
        state=ours["state"],
        replicas=status["replicas"],
        available=status["availableReplicas"],
        problem=ours.get("problem"),
        answered=ours["answered"],
        within_slo=ours["within_slo"],
        gpu_seconds=ours["gpu_seconds"],
        details=status,
    )
