"""NVIDIA's control program, played by a script: its servers and clients are lines of files beside its pipes."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = """#!/bin/sh
pipes=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -d ]; then
    touch "$pipes/control" "$pipes/servers" || exit 1
    echo "visible: ${CUDA_VISIBLE_DEVICES-all}" > "$CUDA_MPS_LOG_DIRECTORY/control.log"
    exit 0
fi
read -r command server client
echo "$command $server $client" >> "$pipes/asked"
case "$(cat "$pipes/mood" 2>/dev/null)" in
    hangs) exec sleep 1000;;
    "hangs at $command") exec sleep 1000;;
    garbage) echo "segfault at 0x12"; echo "  -3 of 17"; exit 0;;
    fails) echo "Cannot find MPS control daemon process"; exit 1;;
esac
echo "a word of greeting, version 580"
case $command in
    get_server_list) cat "$pipes/servers";;
    get_client_list) cat "$pipes/clients.$server" 2>/dev/null;;
    terminate_client)
        kill -0 "$client" && echo "$client" >> "$pipes/terminated"
        sed -i "/^$client\\$/d" "$pipes/clients.$server";;
esac
exit 0
"""
SERVER = "#!/bin/sh\nread -r _\n"


class FakeMps:
    """A control daemon.

    Args:
        folder: an empty one.
        server: the process id of its server.

    Attributes:
        pipes: where it listens.
        path: a `PATH` on which its program is found.
    """

    def __init__(self, folder: Path, server: int) -> None:
        self.pipes = folder / "pipes"
        self.pipes.mkdir()
        self.server = server
        self.path = os.pathsep.join([str(folder), os.environ["PATH"]])
        for name in ("control", "asked", "terminated"):
            (self.pipes / name).touch()
        (self.pipes / "servers").write_text(f"{server}\n")
        self.serve()

    def serve(self, *pids: int) -> None:
        """Let these be all clients."""
        (self.pipes / f"clients.{self.server}").write_text("".join(f"{pid}\n" for pid in pids))

    def be(self, mood: str) -> None:
        """Let it hang, print garbage or fail from now on."""
        (self.pipes / "mood").write_text(mood)

    def lines(self, name: str) -> list[str]:
        """What it has noted: which commands were ``asked``, and which living clients were ``terminated``."""
        return [line.strip() for line in (self.pipes / name).read_text().splitlines()]


def install(folder: Path) -> None:
    """Put the two programs into `folder`."""
    for name, text in (("nvidia-cuda-mps-control", CONTROL), ("nvidia-cuda-mps-server", SERVER)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


@contextmanager
def fake_mps(folder: Path) -> Iterator[FakeMps]:
    """A control daemon with one server that runs, and no client."""
    folder.mkdir()
    install(folder)
    server = subprocess.Popen([str(folder / "nvidia-cuda-mps-server")], stdin=subprocess.PIPE)
    try:
        yield FakeMps(folder, server.pid)
    finally:
        server.communicate()
