#!/usr/bin/env python3
"""Goes through the faas-provider contract, step by step, and checks status and shape of each answer.

python3 examples/hosts/openfaas/check.py URL PROGRAM USER PASSWORD

URL is a provider's (`gshare-openfaas --sim --credentials DIR --set host.callback=["127.0.0.1"]`), PROGRAM the `gpu_function` of this package.
"""
import base64, http.client, http.server, json, os, sys, tempfile, threading, time, urllib.parse

URL, PROGRAM, USER, PASSWORD = sys.argv[1:5]
ADDRESS = urllib.parse.urlparse(URL).netloc
BASIC = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


def call(method, path, body=None, auth=BASIC, headers=()):
    connection = http.client.HTTPConnection(ADDRESS, timeout=60)
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    connection.request(method, path, body, {**({"Authorization": auth} if auth else {}), **dict(headers)})
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers


def step(name, status, method, path, *args, has=(), **more):
    """One request; `has` are bytes that the answer must have."""
    got, body, headers = call(method, path, *args, **more)
    for part in [has] if isinstance(has, (str, bytes)) else has:
        part = part.encode() if isinstance(part, str) else part
        assert part in body, f"{name}: `{part.decode()}` is not in {body[:300]!r}"
    assert got == status, f"{name}: {got} and not {status}: {body[:300]!r}"
    print(f"{status}  {method:6} {path.split('?')[0]:34} {name}", flush=True)
    return body, headers


def within(what, condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.05)


def function(name="resnet"):
    status, body, _ = call("GET", f"/system/function/{name}")
    assert status == 200, (status, body)
    return json.loads(body)


def ready(count, name="resnet"):
    within(f"{count} replicas", lambda: (f := function(name))["availableReplicas"] == count == f["replicas"])


SHARES = {"fastgshare/gpu_quota_request": "0.5", "fastgshare/gpu_quota_limit": "0.8", "fastgshare/gpu_sm_partition": "50",
          "fastgshare/gpu_mem": "1073741824", "topic": "cron"}
DEPLOYMENT = {"service": "resnet", "image": "resnet:1", "envProcess": PROGRAM, "envVars": {"KERNELS": "2"}, "secrets": ["key"],
              "labels": {"team": "a"}, "annotations": SHARES, "limits": {"memory": "1Gi"}, "aFieldOfTomorrow": None}
F, S = "/system/functions", "/system/secrets"

step("healthy", 200, "GET", "/healthz", auth=None)
step("no credentials", 401, "GET", F, auth=None)
_, headers = step("wrong credentials", 401, "GET", F, auth="Basic " + base64.b64encode(b"admin:wrong").decode())
assert headers["WWW-Authenticate"] == 'Basic realm="Restricted"', headers
step("not base64", 401, "GET", F, auth="Basic %%%")
info = json.loads(step("info", 200, "GET", "/system/info")[0])
assert info["provider"] == "gshare" and info["version"]["release"] and "sha" in info["version"] and info["orchestration"], info
assert json.loads(step("namespaces need no credentials", 200, "GET", "/system/namespaces", auth=None)[0]) == ["openfaas-fn"]
step("one namespace only", 501, "POST", "/system/namespace/other", {"name": "other"}, has="openfaas-fn")
step("its name", 200, "GET", "/system/namespace/openfaas-fn", has='"name":"openfaas-fn"')

step("a secret", 202, "POST", S, {"name": "key", "value": "hunter2"})
step("twice", 409, "POST", S, {"name": "key", "value": "x"}, has="key")
step("another value, any bytes", 202, "PUT", S, {"name": "key", "rawValue": base64.b64encode(b"\x00\xff").decode()})
step("bad base64", 400, "PUT", S, {"name": "key", "rawValue": "%"}, has="rawValue")
step("of unknown name", 404, "PUT", S, {"name": "nokey", "value": "x"}, has="nokey")
step("a path for a name", 400, "POST", S, {"name": "../key", "value": "x"}, has="name")
secrets = json.loads(step("names without values", 200, "GET", S)[0])
assert secrets == [{"name": "key", "namespace": "openfaas-fn"}], secrets

step("bad JSON", 400, "POST", F, b'{"service": "x"', has="body")
step("wrong type", 400, "POST", F, {"service": 5}, has="service")
step("name that is not DNS", 400, "POST", F, {**DEPLOYMENT, "service": "Res_Net"}, has="service")
step("other namespace", 400, "POST", F, {**DEPLOYMENT, "namespace": "other"}, has="namespace")
step("a file without an end", 400, "POST", F, {**DEPLOYMENT, "annotations": {"gshare/profile": "/dev/zero"}}, has="regular file")
step("bad share", 400, "POST", F, {**DEPLOYMENT, "annotations": {"fastgshare/gpu_quota_request": "2"}}, has="quota_request")
step("unknown secret", 400, "POST", F, {**DEPLOYMENT, "secrets": ["nokey"]}, has="nokey")
step("update of unknown function", 404, "PUT", F, DEPLOYMENT, has="resnet")
assert json.loads(step("nothing was deployed", 200, "GET", F)[0]) == []
step("deploy", 202, "POST", F, DEPLOYMENT)
ready(1)
listed = json.loads(step("list", 200, "GET", F + "?namespace=openfaas-fn")[0])
status = json.loads(step("status", 200, "GET", "/system/function/resnet?usage=1")[0])
for one in [*listed, status]:
    kept = {key: DEPLOYMENT[key] for key in ("image", "envProcess", "envVars", "secrets", "labels", "annotations", "limits")}
    assert kept.items() <= one.items(), one
    assert (one["name"], one["namespace"], one["replicas"], one["availableReplicas"]) == ("resnet", "openfaas-fn", 1, 1), one
    assert one["invocationCount"] == 0 and one["createdAt"].endswith("Z"), one
assert status["usage"]["totalMemoryBytes"] > 1e6 and status["usage"]["cpu"] >= 0, status
step("unknown function", 404, "GET", "/system/function/nobody", has="nobody")
told = json.loads(step("telemetry", 200, "GET", "/system/telemetry")[0])
assert told == {"provider": "gshare", "functions": 1, "replicas": 1, "available_replicas": 1, "invocations": 0, "waiting": 0}, told
step("telemetry needs credentials", 401, "GET", "/system/telemetry", auth=None)
step("a secret in use", 409, "DELETE", S, {"name": "key"}, has="resnet")

body, _ = step("invoke, no credentials", 200, "POST", "/function/resnet", b"image", auth=None)
assert json.loads(body)["gpu_ms"] >= 4, body
step("with namespace", 200, "GET", "/function/resnet.openfaas-fn/", has="gpu_ms")
step("another namespace", 400, "GET", "/function/resnet.other", has="namespace")
_, headers = step("unknown function", 503, "GET", "/function/nobody", has="nobody")
assert headers["X-OpenFaaS-Internal"] == "proxy", headers
step("path and query", 200, "PATCH", "/function/resnet/slow?ms=1", has="slow")
seen = json.loads(step("headers", 200, "GET", "/function/resnet/headers", headers={"X-Mine": "1"}.items())[0])
assert seen["x-mine"] == "1" and seen["x-forwarded-host"] == ADDRESS and seen["x-forwarded-for"] == "127.0.0.1", seen
assert step("its secret", 200, "GET", "/function/resnet/secret/key")[0] == b"\x00\xff"
step("status of the function", 404, "GET", "/function/resnet/nothing")
body, headers = step("a path that is no UTF-8", 404, "GET", "/function/resnet/caf%E9")
assert "X-OpenFaaS-Internal" not in headers, "the function answers"
big = bytes(range(256)) * 40960
assert step("10 MB there and back", 200, "POST", "/function/resnet/echo", big)[0] == big
connection = http.client.HTTPConnection(ADDRESS, timeout=60)
# Lines for a day: those that come do so before the end.
connection.request("GET", "/function/resnet/stream?lines=2000000")
answer = connection.getresponse()
assert [json.loads(answer.readline())["line"] for _ in range(5)] == [0, 1, 2, 3, 4]
answer.close()
connection.close()
print("200  GET    /function/resnet/stream            line by line")


def parts():
    """Sent only when the part before it has come back."""
    for n in range(3):
        assert n == 0 or back.wait(60), "the answer waits for the end of the request"
        back.clear()
        yield b"part%d\n" % n


import socket
back = threading.Event()
raw = socket.create_connection((ADDRESS.split(":")[0], int(ADDRESS.split(":")[1])), 60)
raw.sendall(b"POST /function/resnet/echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
seen = b""
for part in parts():
    raw.sendall(b"%x\r\n%s\r\n" % (len(part), part))
    while part not in seen:
        more = raw.recv(4096)
        assert more, seen
        seen += more
    back.set()
raw.close()
print("200  POST   /function/resnet/echo              streamed both ways at once")
connection = http.client.HTTPConnection(ADDRESS, timeout=60)
connection.request("GET", "/function/resnet/echo", iter([b"of no ", b"length"]), {"Transfer-Encoding": "chunked"}, encode_chunked=True)
assert connection.getresponse().read() == b"of no length"
connection.close()
print("200  GET    /function/resnet/echo              a body of no length")

called = []


class Callback(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        called.append((dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


server = http.server.HTTPServer(("127.0.0.1", 0), Callback)
threading.Thread(target=server.serve_forever, daemon=True).start()
back_to = {"X-Callback-Url": f"http://127.0.0.1:{server.server_port}/done"}
_, headers = step("for later", 202, "POST", "/async-function/resnet/echo", b"later", headers=back_to.items())
within("callback", lambda: called)
told = {key.lower(): value for key, value in called[0][0].items()}
assert called[0][1] == b"later" and told["x-function-status"] == "200" and told["x-call-id"] == headers["X-Call-Id"], called
step("bad callback", 400, "POST", "/async-function/resnet", b"", headers={"X-Callback-Url": "ftp://x"}.items(), has="X-Callback-Url")
step("unknown function", 404, "POST", "/async-function/nobody", b"")
assert function()["invocationCount"] >= 9, function()

step("scale", 202, "POST", "/system/scale-function/resnet", {"serviceName": "resnet", "replicas": 3})
ready(3)
step("too much for the node: what fits is served", 202, "POST", "/system/scale-function/resnet", {"replicas": 40})
within("4 replicas: 2 fit by time, 2 by SMs", lambda: function()["availableReplicas"] == 4)
step("scale in", 202, "POST", "/system/scale-function/resnet", {"replicas": 1})
ready(1)
step("scale to 0", 202, "POST", "/system/scale-function/resnet", {"replicas": 0})
ready(0)
step("the next request wakes it up", 200, "GET", "/function/resnet", has="gpu_ms")
step("other name in the body", 400, "POST", "/system/scale-function/resnet", {"serviceName": "x", "replicas": 1}, has="serviceName")
step("negative", 400, "POST", "/system/scale-function/resnet", {"replicas": -1}, has="replicas")
step("unknown function", 404, "POST", "/system/scale-function/nobody", {"replicas": 1}, has="nobody")

before = json.loads(call("GET", "/function/resnet")[1])["pid"]
step("update", 202, "PUT", F, {**DEPLOYMENT, "envVars": {"KERNELS": "1"}})
within("the new version serves", lambda: json.loads(call("GET", "/function/resnet")[1])["pid"] != before)
ready(1)
logs = "/system/logs?name=resnet&tail=100"
within("the new version's log", lambda: b"serving, 1 kernels" in call("GET", logs)[1])
lines = [json.loads(line) for line in step("logs", 200, "GET", logs)[0].splitlines()]
assert all({"name", "namespace", "instance", "timestamp", "text"} == set(line) for line in lines), lines
assert len(step("the last one", 200, "GET", "/system/logs?name=resnet&tail=1")[0].splitlines()) == 1
step("none since then", 200, "GET", "/system/logs?name=resnet&since=2099-01-01T00:00:00Z")
step("bad time", 400, "GET", "/system/logs?name=resnet&since=yesterday", has="since")
step("of nobody", 404, "GET", "/system/logs?name=nobody", has="nobody")
connection = http.client.HTTPConnection(ADDRESS, timeout=60)
connection.request("GET", "/system/logs?name=resnet&follow=1", headers={"Authorization": BASIC})
following = connection.getresponse()
assert following.headers["Content-Type"] == "application/x-ndjson" and json.loads(following.readline())

call("INVENTED", "/healthz", auth=None)
metrics = step("metrics", 200, "GET", "/metrics", auth=None)[0].decode()
assert "INVENTED" not in metrics and 'method="other",path="/healthz"' in metrics, metrics
for name in ['provider_http_requests_total{code="202",method="POST",path="/system/functions"}',
             'gateway_function_invocation_total{function_name="resnet",code="200"}', "provider_http_request_duration_seconds_bucket",
             'gateway_service_count{function_name="resnet"} 1']:
    assert name in metrics, (name, metrics)

step("plain process, its path as image", 202, "POST", F, {"service": "plain", "image": PROGRAM, "envVars": {"KERNELS": "0"}})
step("is called before it is ready", 200, "POST", "/function/plain/echo", b"hello", has="hello")
step("a program that is not here", 400, "POST", F, {"service": "broken", "image": "/does/not/exist"}, has="/does/not/exist")
script = tempfile.NamedTemporaryFile("w", delete=False)
script.write("#!/does/not/exist\n")
script.close()
os.chmod(script.name, 0o755)
step("one that does not start", 202, "POST", F, {"service": "broken", "image": script.name})
within("its log says why", lambda: b"does not start" in call("GET", "/system/logs?name=broken")[1])
os.unlink(script.name)
for name in ["resnet", "plain", "broken"]:
    step("delete", 202, "DELETE", F, {"functionName": name})
step("again", 404, "DELETE", F, {"functionName": "resnet"}, has="resnet")
step("bad JSON", 400, "DELETE", F, {"name": "resnet"}, has="functionName")
step("its secret", 202, "DELETE", S, {"name": "key"})
assert json.loads(step("nothing is left", 200, "GET", F)[0]) == []
while line := following.readline():
    json.loads(line)
step("unknown path", 404, "GET", "/nowhere")
step("wrong method", 405, "PATCH", F)
print("the contract holds")
