"""Keeps compiled dependencies, tools and what fuzzing has learnt between runs, outside of the checkout.

The cache is a folder of sealed archives: `PART-MACHINE-INPUTS.tar` and beside it a `.json` with its size, its SHA-256 and
the units in it. MACHINE stands for the compiler, the C library and the flags, INPUTS for manifests and lock files. Where
no archive has both, the newest one of the same machine is taken: cargo itself knows by hash which units still fit.

- Only crates of the registry are kept. Their units do not depend on where the checkout lies; ours do.
- An archive is unpacked only where the checkout has no build of that profile, and only when its SHA-256 is right; a
  damaged one is deleted. Without the cache the same commands run, only longer.
- A checkout that was built before the run gives no units: it has those of past lock files too, and needs none from here.
- Archives are written under another name and renamed. Readers and writers hold a lock on the folder.
- The newest two archives of a part stay, as long as all of them together fit into GSHARE_CI_CACHE_GB (8). One that has
  gathered more than half of that, from lock files of the past, is dropped.

The folder is GSHARE_CI_CACHE, or gshare-ci in the user's cache folder; an empty GSHARE_CI_CACHE turns it off.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import platform
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Folders in which cargo's profiles lie, at most two levels deep.
TARGETS = ("target", "target/loom", "target/msrv", "target/package", "fuzz/target")
# Folders that are not cargo's and are kept whole.
TOOLS = ("target/tools", "target/package/tools")
# Inputs that reached new code: each run of the fuzz targets goes on from them.
CORPUS = "fuzz/corpus"
# Whether the checkout had builds when this run began.
built_before = False
LIMIT = int(os.environ.get("GSHARE_CI_CACHE_GB", "8")) << 30


def folder():
    named = os.environ.get("GSHARE_CI_CACHE")
    if named is not None:
        return pathlib.Path(named) if named else None
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "gshare-ci"


def output(*argv):
    return subprocess.run(argv, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def digest(*texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def keys(tools):
    """Of each part: the key of the machine and the key of the inputs. `tools` names the tools and their versions."""
    flags = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(("RUSTFLAGS", "CARGO_PROFILE_")))
    compiler = (output("rustc", "-vV"), output("cargo", "-V"), output("gcc", "--version"), *platform.libc_ver())
    tracked = output("git", "ls-files", "*Cargo.toml", "*Cargo.lock", ".cargo/config.toml").split()
    manifests = [f"{path}\0{(ROOT / path).read_text()}" for path in tracked if (ROOT / path).is_file()]
    machine = digest(*compiler)
    return {
        "units": (digest(machine, *flags), digest(*manifests)),
        "tools": (digest(machine, platform.python_version()), digest(*tools)),
        "corpus": (digest(CORPUS), "all"),
    }


@contextlib.contextmanager
def locked(place, how):
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "lock", "a") as file:
        fcntl.flock(file, how)
        yield


def members():
    """Names of our own packages."""
    found = set()
    for manifest in ("Cargo.toml", "fuzz/Cargo.toml"):
        metadata = json.loads(output("cargo", "metadata", "--format-version=1", "--no-deps", "--manifest-path", manifest))
        found |= {package["name"] for package in metadata["packages"]}
    return found


def profiles():
    """Folders of cargo's that have been built into."""
    found = {
        path.parent
        for target in TARGETS
        for depth in ("*", "*/*")
        for path in (ROOT / target).glob(f"{depth}/.fingerprint")
    }
    return sorted(found)


def units():
    """What is kept of each profile: unit (`PROFILE/NAME-HASH`) to its files, relative to the checkout."""
    ours, found = members(), {}
    for profile in profiles():
        place = profile.relative_to(ROOT)
        by_hash = {}
        for entry in os.scandir(profile / ".fingerprint"):
            name, _, code = entry.name.rpartition("-")
            # Cargo describes a unit once it is built.
            if name not in ours and any(file.endswith(".json") for file in os.listdir(entry)):
                files = by_hash.setdefault(code, [])
                files.append(f"{place}/.fingerprint/{entry.name}")
                if (profile / "build" / entry.name).exists():
                    files.append(f"{place}/build/{entry.name}")
                found[f"{place}/{entry.name}"] = files
        for entry in os.scandir(profile / "deps"):
            code = entry.name.split(".")[0].rpartition("-")[2]
            if code in by_hash:
                by_hash[code].append(f"{place}/deps/{entry.name}")
    return found


def sha256(file):
    found = hashlib.sha256()
    with open(file, "rb") as opened:
        while block := opened.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def intact(archive):
    """The description of an archive that is as it was written; another is deleted."""
    try:
        description = json.loads(archive.with_suffix(".json").read_text())
        if archive.stat().st_size == description["size"] and sha256(archive) == description["sha256"]:
            return description
    except (OSError, ValueError, KeyError):
        pass
    print(f"cache: {archive.name} is damaged and left out")
    for file in (archive, archive.with_suffix(".json")):
        file.unlink(missing_ok=True)
    return None


def unpack(archive, wanted):
    """Unpacks beside the checkout's files, and moves into place what is not there yet."""
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as staging:
        subprocess.run(["tar", "-xf", archive, "-C", staging, *wanted], check=True)
        for path in wanted:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            os.rename(f"{staging}/{path}", ROOT / path)


def restore(tools):
    """Fills the checkout from the cache; gives the units of each part that were found."""
    global built_before
    place = folder()
    if place is None:
        return
    built_before = bool(profiles())
    (ROOT / "target").mkdir(exist_ok=True)
    with locked(place, fcntl.LOCK_EX):
        for part, (machine, inputs) in keys(tools).items():
            newest_first = sorted(place.glob(f"{part}-{machine}-*.tar"), key=lambda file: -file.stat().st_mtime)
            exact = place / f"{part}-{machine}-{inputs}.tar"
            candidates = [exact] if exact in newest_first or part == "tools" else newest_first
            for archive in candidates:
                if not archive.exists():
                    continue
                description = intact(archive)
                if description is None:
                    continue
                missing = [path for path in description["folders"] if not (ROOT / path).exists()]
                if missing:
                    unpack(archive, missing)
                    print(f"cache: {', '.join(missing)} from {archive.name}")
                os.utime(archive)
                break


def pack(place, name, kept):
    """Writes the archive `name` with what is `kept`: unit to files."""
    files = sorted({file for files in kept.values() for file in files})
    if not files:
        return
    partial = place / f"partial-{os.getpid()}.tar"
    listed = "\0".join(files).encode()
    argv = ["tar", "--format=posix", "--null", "-T", "-", "-cf", partial]
    subprocess.run(argv, input=listed, check=True, cwd=ROOT)
    size = partial.stat().st_size
    if size > LIMIT // 2:
        print(f"cache: {name} has grown to {size >> 20} MiB: the next run begins without it")
        for file in [partial, *place.glob(f"{name.split('-')[0]}-*")]:
            file.unlink()
        return
    description = {"size": size, "sha256": sha256(partial), "units": sorted(kept), "folders": tops(files)}
    archive = place / f"{name}.tar"
    # A description that does not fit its archive counts as damage: between the two renames nothing wrong can be read.
    archive.with_suffix(".json").write_text(json.dumps(description))
    partial.rename(archive)
    print(f"cache: {archive.name} written, {size >> 20} MiB")


def tops(files):
    """The folders that are unpacked or left out as a whole: a profile of cargo's, or a tool's."""
    places = [str(path.relative_to(ROOT)) for path in profiles()] + [*TOOLS, CORPUS]
    return sorted(place for place in places if any(f"{file}/".startswith(f"{place}/") for file in files))


def save(tools):
    """Brings the cache up to what this checkout has built, unless an archive of the same key has units that it has not."""
    place = folder()
    if place is None:
        return
    kept = {
        "units": {} if built_before else units(),
        "tools": {f"{path}/{tool}": [f"{path}/{tool}"] for path in TOOLS if (ROOT / path).is_dir() for tool in os.listdir(ROOT / path)},
        "corpus": {str(file): [str(file)] for file in (path.relative_to(ROOT) for path in (ROOT / CORPUS).glob("*/*"))},
    }
    with locked(place, fcntl.LOCK_EX):
        for partial in place.glob("partial-*"):
            partial.unlink()
        for part, (machine, inputs) in keys(tools).items():
            name = f"{part}-{machine}-{inputs}"
            if described(place / f"{name}.tar") < set(kept[part]):
                pack(place, name, kept[part])
        prune(place)


def described(archive):
    """The units of an archive; none where it is missing or has no description that can be read."""
    try:
        return set(json.loads(archive.with_suffix(".json").read_text())["units"]) if archive.exists() else set()
    except (OSError, ValueError, KeyError):
        return set()


def prune(place):
    """Two archives of a part, the most recently used ones, and all of them within the limit."""
    left, total = {}, 0
    for archive in sorted(place.glob("*.tar"), key=lambda file: -file.stat().st_mtime):
        part, size = archive.name.split("-")[0], archive.stat().st_size
        left[part] = left.get(part, 0) + 1
        total += size
        if left[part] > 2 or total > LIMIT:
            total -= size
            for file in (archive, archive.with_suffix(".json")):
                file.unlink(missing_ok=True)
