"""An ssh server for tests: runs the commands that come with the throw-away key, in a bare environment.

    python sshd.py FOLDER NAME
FOLDER holds NAME_key, the key of this host, user_key.pub, the only key that is let in, and maybe NAME_shell, a program
that is the login shell.
"""

import asyncio
import contextlib
import os
import subprocess
import sys

import asyncssh

FOLDER, NAME = sys.argv[1:]
BARE = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "SHELL": "/bin/bash",
        "HOME": f"{FOLDER}/{NAME}", "TMPDIR": f"{FOLDER}/{NAME}", "USER": "root", "LOGNAME": "root"}


async def run(process):
    """Run one command; it may live on when the connection is lost, as with sshd."""
    shell = f"{FOLDER}/{NAME}_shell"
    shell = os.readlink(shell) if os.path.islink(shell) else BARE["SHELL"]
    child = await asyncio.create_subprocess_exec(
        shell, "-c", process.command or "true", env={**BARE, **process.env, "SHELL": shell}, cwd=BARE["HOME"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    output = asyncio.gather(pump(child.stdout, process.stdout), pump(child.stderr, process.stderr))
    given = asyncio.create_task(pump(process.stdin, child.stdin))
    code = await child.wait()
    await output
    given.cancel()
    process.exit(code if code >= 0 else 128 - code)


async def pump(source, target):
    """Copy what comes, until its end or until nobody wants it any more."""
    with contextlib.suppress(OSError, asyncssh.Error):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    if isinstance(target, asyncio.StreamWriter):
        target.close()


async def serve():
    await asyncssh.listen("", 22, server_host_keys=[f"{FOLDER}/{NAME}_key"], process_factory=run, encoding=None,
                          authorized_client_keys=f"{FOLDER}/user_key.pub")
    print("listening", flush=True)
    await asyncio.Event().wait()


os.chdir("/")
asyncio.run(serve())
