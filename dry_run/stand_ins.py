"""Build stand-ins for the libraries of CANN, so that MindSpore's Ascend plugin loads on any machine.

The list is not kept here: it is what the plugin of the installed wheel asks for and nothing provides.
"""
import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("stand_ins.c")
NO_COMPILER = (
    "dry_run: no C compiler found, and one is needed once, to build stand-ins for CANN's libraries. "
    "Set CC to yours, or get one from PyPI, which is then found by itself: pip install ziglang")


class StandInError(Exception):
    """The stand-ins cannot be built; the text says why and what to do."""


def read_elf(path):
    """What one shared library asks for and offers.

    Returns:
        (machine, needed, undefined, defined): the ELF machine number, the list of libraries it needs, and two
        sets of symbol names (bytes). `undefined` leaves out weak symbols and those with a version: versions
        belong to the compiler's and the system's libraries, CANN's symbols have none. None when the file is
        no 64-bit little-endian ELF file. Source: System V ABI, ELF-64 object file format.
    """
    data = Path(path).read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    machine, = struct.unpack_from("<H", data, 18)
    table, = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]

    def text(section, offset):
        start = sections[section[6]][4] + offset
        return data[start:data.index(b"\0", start)]

    by_type = {section[1]: section for section in sections}
    dynamic, symbols, versions = (by_type.get(kind) for kind in (6, 11, 0x6FFFFFFF))
    needed, undefined, defined = [], set(), set()
    if dynamic:
        for tag, value in struct.iter_unpack("<QQ", data[dynamic[4]:dynamic[4] + dynamic[5] // 16 * 16]):
            if tag == 1:
                needed.append(text(dynamic, value).decode())
    if symbols:
        entries = struct.iter_unpack("<IBBHQQ", data[symbols[4]:symbols[4] + symbols[5]])
        for i, (name, info, _, where, _, _) in enumerate(entries):
            if where:
                defined.add(text(symbols, name))
            elif info >> 4 == 1:
                version = struct.unpack_from("<H", data, versions[4] + 2 * i)[0] if versions else 1
                if version <= 1:
                    undefined.add(text(symbols, name))
    return machine, needed, undefined, defined


def missing(package):
    """The libraries and symbols of CANN that the wheel's Ascend plugin asks for.

    Args:
        package: folder of the installed `mindspore` package.

    Returns:
        (libraries, symbols): two sorted lists of str.
    """
    package = Path(package)
    lib = package / "lib"
    plugin = lib / "plugin" / "libmindspore_ascend.so.2"
    if not plugin.exists():
        raise StandInError(f"dry_run: {plugin} is missing; install mindspore for Linux from PyPI: "
                           "pip install mindspore")
    inside = [*lib.rglob("*.so*"), *package.glob("_c_*.so")]
    paths = {path.name: path for path in inside if "gpu" not in str(path.relative_to(package))}
    machine = read_elf(plugin)[0]
    wheel = {name: read_elf(path) for name, path in paths.items()}
    wheel = {name: elf for name, elf in wheel.items() if elf and elf[0] == machine}
    queue = [plugin.name, *(path.name for path in plugin.parent.glob("ascend/*.so"))]
    asking, absent = set(), set()
    while queue:  # everything that loading the plugin pulls in
        name = queue.pop()
        if name not in paths:
            absent.add(name)
        elif name in wheel and name not in asking:
            asking.add(name)
            queue += wheel[name][1]
    # CANN's libraries have plain names; a version after .so marks the system's (libm.so.6, libmpi.so.40)
    libraries = {name for name in absent if name.endswith(".so")}
    undefined = set().union(*(wheel[name][2] for name in asking))
    undefined -= set().union(*(elf[3] for elf in wheel.values()))
    system = [ctypes.CDLL(None)]
    for name in absent.difference(libraries):
        with contextlib.suppress(OSError):
            system.append(ctypes.CDLL(name))
    # more functions and libraries are looked up by name while running: the names lie in the plugin as strings
    for name in ("libmindspore_ascend.so.2", "libmindspore_ascend_res_manager.so"):
        data = paths[name].read_bytes()
        undefined |= set(re.findall(rb"(?<=\0)acl(?!nn)[A-Za-z0-9]+(?=\0)", data))
        libraries |= {found.decode() for found in re.findall(rb"lib64/(libacl_\w+\.so)\0", data)}
    symbols = sorted(name.decode() for name in undefined)
    return sorted(libraries), [name for name in symbols if not any(hasattr(part, name) for part in system)]


def compiler():
    """The C compiler's command as a list: $CC, else cc, gcc, clang, else zig from PyPI."""
    if os.environ.get("CC"):
        command = shlex.split(os.environ["CC"])
        if not shutil.which(command[0]):
            raise StandInError(f"dry_run: CC={os.environ['CC']} names no program; correct it or unset it.")
        return command
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise StandInError(NO_COMPILER)


def real_cann():
    """The folder or name of an installed CANN, or None."""
    for root in (os.environ.get("ASCEND_HOME_PATH"), os.environ.get("ASCEND_TOOLKIT_HOME")):
        if root and (Path(root) / "lib64" / "libascendcl.so").exists():
            return root
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError:
        return None
    return "libascendcl.so on LD_LIBRARY_PATH"


def cache_folder():
    """Where built stand-ins are kept: $DRY_RUN_CACHE, else dry_run in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DRY_RUN_CACHE") or Path(cache) / "mindspore_dry_run")


def build(package, version):
    """Build the stand-ins for one installed MindSpore, or find those built before.

    Args:
        package: folder of the installed `mindspore` package.
        version: its version.

    Returns:
        (folder, built): where they are, and whether they had to be built now.

    Raises:
        StandInError: they cannot be built or kept.
    """
    try:
        return _build(Path(package), version)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        raise StandInError(f"dry_run: stand-ins for CANN cannot be kept: {error}; set DRY_RUN_CACHE to a folder where "
                           "you may write") from None


def folder_of(package, version):
    """The folder of the stand-ins for one installed MindSpore."""
    stamp = hashlib.sha256(f"{SOURCE.read_text()} {Path(__file__).read_text()} {package}".encode()).hexdigest()
    return cache_folder() / f"mindspore-{version}-{platform.machine()}-{stamp[:12]}"


def _build(package, version):
    root = folder_of(package, version)
    root.parent.mkdir(parents=True, exist_ok=True)
    if os.statvfs(root.parent).f_flag & os.ST_NOEXEC:
        raise PermissionError(f"{root.parent} lies on a disk that lets no library be loaded (mounted noexec)")
    if not root.is_dir():
        command = compiler()
        libraries, symbols = missing(package)
        fresh = Path(tempfile.mkdtemp(dir=root.parent, prefix=f".{root.name}-"))
        try:
            fill(fresh, command, libraries, symbols)
            try:
                fresh.rename(root)
            except OSError:
                if not root.is_dir():  # else another process was first, with the same content
                    raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return root, True
    if not os.access(root / "latest", os.R_OK | os.X_OK):  # of another user
        raise PermissionError(f"{root} cannot be read")
    return root, False


def fill(folder, command, libraries, symbols):
    """Compile the stand-ins into `folder`, laid out like a CANN installation."""
    lib = folder / "latest" / "lib64"  # the plugin looks for this name in its libraries' path
    lib.mkdir(parents=True)
    for part in ("opp", "opp_kernel"):  # 2.7 wants both to exist
        (folder / part).mkdir()
    (folder / "python" / "hccl").mkdir(parents=True)
    (folder / "python" / "hccl" / "__init__.py").write_text("")
    (folder / "python" / "hccl" / "sys_version.py").write_text("__sys_version__ = 'stand-in'\n")

    bodies = set(re.findall(r"^\w[^;\n]*\b(\w+)\(void\) {", SOURCE.read_text(), re.MULTILINE))
    stubs = folder / "stubs.c"
    stubs.write_text("".join(f"long {name}(void) {{ return 0; }}\n"
                             for name in symbols if name not in bodies))
    target = lib / "libascendcl.so"
    command = [*command, "-shared", "-fPIC", "-O1", "-w", "-fno-builtin", "-o", str(target), str(SOURCE),
               str(stubs)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise StandInError(f"dry_run: {shlex.join(command)} failed:\n{done.stdout}")
    for name in libraries:  # one library under all names: the loader opens it once
        if not (lib / name).exists():
            (lib / name).symlink_to(target.name)
