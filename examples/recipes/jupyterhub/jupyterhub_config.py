"""Each user's notebooks run under one share of a GPU: the hook starts the user's server with `gshare run`."""

SHARES = {"teachers": ("50%", "16GiB")}
DEFAULT = ("10%:100%", "4GiB")


def under_a_share(spawner):
    groups = (group.name for group in spawner.user.groups)
    quota, mem = next((SHARES[name] for name in groups if name in SHARES), DEFAULT)
    # The name is one of the node: a user's second server would not get the same share twice.
    name = f"hub-{spawner.user.name}-{spawner.name or 'default'}"
    # `cmd` stays as it is between starts.
    program = spawner.cmd[spawner.cmd.index("--") + 1 :] if "--" in spawner.cmd else spawner.cmd
    spawner.cmd = ["gshare", "run", f"--name={name}", f"--quota={quota}", f"--mem={mem}", "--", *program]


c = get_config()  # noqa: F821
c.Spawner.pre_spawn_hook = under_a_share
