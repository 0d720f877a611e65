"""Print where a training run listens, and which of its files other users can access, as JSON (Linux only).

    python benchmarks/exposure.py [--runtime ray] [--decentralized]

The script trains PPO on CartPole-v1 with two remote workers. During training, it lists the sockets on which the
processes of the run listen (from /proc/net), and the files that these processes have open for writing, the files in
Ray's directory, and Ray's token file. A file is open to others if its mode grants a permission to the group or to all
users, and if others may also search each folder that contains the file.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import re
import stat
import struct
from pathlib import Path
from typing import Any

from process_table import descendants, name_of, ray_directories, running_processes
from results import print_result

from pytorchrl import ASYNC, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv

LISTENING = "0A"
# Devices and the files of the terminal are not files of the run.
NOT_OURS = ("/dev/null", "/dev/pts", "/dev/tty", "/dev/urandom", "/dev/random", "/proc", "/sys")


def own_processes() -> dict[int, str]:
    """Return a map from process id to name, for this process and all its descendants."""
    return {pid: name_of(pid) for pid in sorted(descendants({os.getpid()}, running_processes()))}


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address of a row in /proc/net/tcp or tcp6, in which each word of four bytes has the host's order."""
    words = [int(text[i:i + 8], 16) for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words))
    return getattr(address, "ipv4_mapped", None) or address


def sockets(pids: dict[int, str]) -> list[dict[str, Any]]:
    """Return the TCP sockets on which processes listen, and their UDP sockets that are not connected."""
    owners = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor.path)):
                        owners.setdefault(match[1], pid)
    found = []
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", protocol).read_text().splitlines()[1:]:
                fields = line.split()
                is_open = fields[3] == (LISTENING if protocol.startswith("tcp") else "07")
                if is_open and fields[9] in owners:
                    host, _, port = fields[1].partition(":")
                    address, pid = address_of(host), owners[fields[9]]
                    found.append({"protocol": protocol, "address": str(address), "port": int(port, 16),
                                  "process": pids[pid], "is_loopback": address.is_loopback})
    return sorted(found, key=lambda row: (row["process"], row["port"]))


def open_files(pids: dict[int, str]) -> set[Path]:
    """Return the regular files that processes have open for writing, except the standard streams of this process."""
    streams = {os.path.realpath(f"/proc/self/fd/{number}") for number in range(3)}
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(descriptor.path)
                    flags = Path(f"/proc/{pid}/fdinfo/{descriptor.name}").read_text().split("flags:")[1].split()[0]
                    if target.startswith("/") and target not in streams and int(flags, 8) & os.O_ACCMODE:
                        found.add(Path(target))
    return {path for path in found if not str(path).startswith(NOT_OURS) and path.exists()}


def is_open_to_others(path: Path) -> bool:
    """Return whether the modes of a file and of the folders that contain it permit others to access the file."""
    return bool(path.stat().st_mode & 0o077) and all(folder.stat().st_mode & 0o011 for folder in path.parents)


def files(pids: dict[int, str]) -> list[dict[str, Any]]:
    """Return the mode of each file of the run."""
    folders = set(filter(Path.is_dir, ray_directories(pids)))
    paths = {path for folder in folders for path in [folder, *folder.rglob("*")]}
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    paths |= open_files(pids) | ({token} if token.exists() else set())
    rows = []
    for path in sorted(paths):
        with contextlib.suppress(OSError):  # the file was removed in the meantime
            if not path.is_symlink() and path.stat().st_uid == os.getuid():
                rows.append({"path": str(path), "mode": oct(stat.S_IMODE(path.stat().st_mode)),
                             "is_open_to_others": is_open_to_others(path)})
    return rows


def main() -> None:
    """Parse the command line, train, and print the sockets and files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=("ray", "processes", "threads"), default="ray")
    parser.add_argument("--decentralized", action="store_true",
                        help="use two gradient workers that average gradients among themselves")
    options = parser.parse_args()
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
    workers: dict[str, Any] = {"num_col_workers": 2, "col_communication": ASYNC}
    if options.decentralized:
        workers = {"num_grad_workers": 2, "distribute_gradients": True}
    scheme = Scheme(
        PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
        GAEBuffer.create_factory(32), envs, seed=1, runtime=options.runtime, **workers)
    try:
        for _ in range(3):
            scheme.step()
        pids = own_processes()
        result = {"runtime": options.runtime, "processes": sorted(pids.values()), "sockets": sockets(pids),
                  "files": files(pids)}
    finally:
        scheme.stop()
    print_result(result)


if __name__ == "__main__":
    main()
