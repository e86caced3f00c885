"""The table and the matrix of a run, both made from its JSON."""

WORDS = {"ok": "ok", "FAILED": "**fails**", "MISSED": "**missed**", "noisy": "not decided", "no time": "not run"}
# Results which fail a run, and results which leave it undecided.
BAD = ("FAILED", "MISSED")
UNDECIDED = ("noisy", "no time")
ABSENT = ("not installed", "not here")


def on(report):
    """The device of the rows, in words which never let a simulated device pass for a GPU."""
    device = report["device"]
    kind = "SIMULATED device, not a GPU" if device["simulated"] else "GPU"
    return f"{kind}: {device['name']}, driver {device['driver']}"


def line(row):
    mark = "sim " if row["simulated"] else ""
    return f"{mark}{row['row']:28} {row['result']:13} {row['seconds']:6.1f} s  {row['figure']}"


def text(report):
    rows = report["rows"]
    counts = {result: sum(row["result"] == result for row in rows) for result in dict.fromkeys(row["result"] for row in rows)}
    summary = ", ".join(f"{count} {result}" for result, count in counts.items())
    return "\n".join([*map(line, rows), f"{on(report)}; {summary}; {report['seconds']:.0f} s"])


def matrix(report):
    """A page in Markdown: frameworks by version, then every row."""
    device, host = report["device"], report["host"]
    lines = [
        "# Which libraries run",
        "",
        f"{report['date']}, form {report['form']}, suite of gshare {report['gshare']}, on a {on(report)}; "
        f"{host['cpus']} CPUs, {report['seconds']:.0f} s.",
        "",
        "| framework | version | Python | same outcome bare and hooked | fails or not decided |",
        "|---|---|---|---|---|",
    ]
    pythons = {environment["name"]: environment["python"] for environment in report["environments"]}
    seen = {}
    for row in report["rows"]:
        if row["kind"] == "outcome" and "environment" in row:
            key = (row["framework"], row["packages"].get(row["framework"], ""), pythons[row["environment"]])
            seen.setdefault(key, []).append(row)
    for (framework, version, python), rows in seen.items():
        good = [row["row"] for row in rows if row["result"] == "ok"]
        bad = [f"{row['row']} ({WORDS.get(row['result'], row['result'])})" for row in rows if row["result"] != "ok"]
        lines.append(f"| {framework} | {version} | {python} | {', '.join(good) or '-'} | {', '.join(bad) or '-'} |")
    lines += ["", "| row | result | figure |", "|---|---|---|"]
    for row in report["rows"]:
        figure = row["figure"].replace("|", "\\|")
        lines.append(f"| {row['row']} | {WORDS.get(row['result'], row['result'])} | {figure} |")
    if device["simulated"]:
        words = "Kernels of a simulated device compute nothing: only rows `values: ...` compare them, and no figure is a GPU's."
        lines += ["", words]
    return "\n".join(lines) + "\n"


def merge(reports):
    """One report of several runs on the same device: the last result of a row counts.

    `ValueError` where the devices differ.
    """
    devices = {on(report) for report in reports}
    if len(devices) > 1:
        raise ValueError(f"the reports are of different devices: {'; '.join(sorted(devices))}")
    rows, environments = {}, {}
    for report in reports:
        rows |= {row["row"]: row for row in report["rows"]}
        environments |= {environment["name"]: environment for environment in report["environments"]}

    def words(field):
        return ", ".join(dict.fromkeys(report[field] for report in reports))

    dates = sorted({report["date"] for report in reports})
    return {
        **reports[-1],
        "date": " to ".join(dict.fromkeys([dates[0], dates[-1]])),
        "gshare": words("gshare"),
        "form": words("form"),
        "rows": list(rows.values()),
        "environments": list(environments.values()),
        "seconds": sum(report["seconds"] for report in reports),
    }


def exit_code(report, strict=False):
    """0: all possible rows are ok; 1: a row failed or missed its bar; 3: a row is undecided or was not run for want of time.

    `strict`: a row that could not run for want of packages, hardware or a build is a failure too.
    """
    results = {row["result"] for row in report["rows"]}
    if results.intersection(BAD) or strict and results.intersection(ABSENT):
        return 1
    return 3 if results.intersection(UNDECIDED) else 0
