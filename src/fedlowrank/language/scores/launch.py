"""Started by the sandbox as a script of its own: gives up what it may, then becomes the program to be run.

Runs under ``python -I -S``, so it imports nothing but the standard library. What could not be had is reported
through a pipe and not an error: that is for the caller to say.
"""

import ctypes
import json
import os
import resource
import signal
import sys

NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
SET_DEATH_SIGNAL, SET_KEEP_CAPABILITIES, SET_NO_NEW_PRIVILEGES = 1, 8, 38
AMBIENT, RAISE_AMBIENT, READ_ANY, CAPABILITY_VERSION = 47, 2, 2, 0x20080522
CHANGE_OWNER, SET_GROUP, SET_USER = 0, 6, 7
NOBODY = 65534


def unshare(libc: ctypes.CDLL) -> int:
    """Leave the network and the processes of the caller; returns the flags of what was granted."""
    uid, gid = os.getuid(), os.getgid()
    for flags in (NEWNET | NEWPID, NEWUSER | NEWNET | NEWPID, NEWUSER | NEWNET, NEWNET):
        if libc.unshare(flags) == 0:
            if flags & NEWUSER:
                for name, text in (
                    ("setgroups", "deny"),
                    ("uid_map", f"{uid} {uid} 1"),
                    ("gid_map", f"{gid} {gid} 1"),
                ):
                    with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - beside calls of os
                        file.write(text)
            return flags
    return 0


def may_change_user() -> bool:
    """Whether this process has the capabilities for :func:`become_nobody`; a container may lack them."""
    with open("/proc/self/status") as file:  # noqa: PTH123 - beside calls of os
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    needed = sum(1 << capability for capability in (CHANGE_OWNER, READ_ANY, SET_GROUP, SET_USER))
    return effective & needed == needed


def become_nobody(libc: ctypes.CDLL, program: str) -> str:
    """As root: give up all rights, but for reading if the interpreter could not be reached otherwise."""
    os.chown(os.getcwd(), NOBODY, NOBODY)  # noqa: PTH109 - beside calls of os
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    needed = ((sys.executable, os.X_OK), (os.__file__, os.R_OK), (program, os.R_OK))
    reached = all(os.access(path, mode, effective_ids=True) for path, mode in needed)
    os.seteuid(0)
    os.setegid(0)
    if not reached:
        _call(libc, "prctl", SET_KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    if reached:
        return "nobody"
    # effective, permitted and inheritable, in two words each; what is inherited must be raised once more to
    # outlive exec
    only = 1 << READ_ANY
    _call(
        libc,
        "capset",
        (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0),
        (ctypes.c_uint32 * 6)(only, only, only, 0, 0, 0),
    )
    _call(libc, "prctl", AMBIENT, RAISE_AMBIENT, READ_ANY, 0, 0)
    return "nobody, reading as root"


def _call(libc: ctypes.CDLL, name: str, *given: object) -> None:
    if getattr(libc, name)(*given) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def main(cpu: int, memory: int, file_size: int, report: int, program: str) -> None:
    """Limit this process and run the program in its place.

    Args:
        cpu: seconds of processor time.
        memory: bytes of address space.
        file_size: bytes of any one file.
        report: file descriptor to which it is written what is in force.
        program: path of the program.
    """
    os.set_inheritable(report, False)
    libc = ctypes.CDLL(None, use_errno=True)
    root = os.getuid() == 0
    granted = unshare(libc)
    if granted & NEWPID:
        # the first child is the first process of the new namespace: when it ends, so does everything in there
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
    # in a user namespace of its own, root may change to nobody no more
    droppable = root and not granted & NEWUSER and may_change_user()
    user = become_nobody(libc, program) if droppable else "the caller"
    # after the change of user, which clears it
    libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    for limit, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_CORE, 0),
        # itself, and no other process or thread
        (resource.RLIMIT_NPROC, 1),
    ):
        ceiling = resource.getrlimit(limit)[1]
        bound = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
        resource.setrlimit(limit, (bound, bound))
    found = {
        "network": bool(granted & NEWNET),
        "contained": bool(granted & NEWPID),
        # the system counts no processes of root
        "single": droppable or not root,
        "user": user,
    }
    os.write(report, json.dumps(found).encode())
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", "-X", "utf8", program])


if __name__ == "__main__":
    try:
        cpu, memory, file_size, report = map(int, sys.argv[1:5])
        main(cpu, memory, file_size, report, sys.argv[5])
    except OSError as error:
        # on a line of its own: the program never began, which is no fault of the program
        os.write(report, f"\n{error}".encode())
        sys.exit(1)
