"""A small root file system made of files of this host: programs with their libraries, kernel modules, an initramfs.

Whatever is copied is what runs here, so that what a test proves in there is proved for the same QEMU.
"""

import shutil
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path

#: Directories that are links into /usr on a merged system.
LINKS = ("bin", "sbin", "lib", "lib32", "lib64")
#: Where programs are looked for.
PLACES = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")


def find(program: str) -> Path:
    """Where a program is; Python's own search path may have others' in front."""
    for place in PLACES:
        path = Path(place, program)
        if path.exists():
            return path
    raise FileNotFoundError(f"there is no program {program} in {' '.join(PLACES)}")


def libraries(program: Path) -> list[Path]:
    """What the dynamic loader takes for a program, itself included; nothing for a static one."""
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        return []
    found = []
    for line in done.stdout.splitlines():
        path = line.partition("=>")[2] or line
        path = path.split("(")[0].strip()
        if path.startswith("/"):
            found.append(Path(path))
    return found


def library(name: str) -> Path:
    """Where a library is that programs load by its name."""
    done = subprocess.run([str(find("ldconfig")), "-p"], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        if line.strip().startswith(f"{name} ") and "x86-64" in line:
            return Path(line.partition("=>")[2].strip())
    raise FileNotFoundError(f"there is no library {name}")


class Root:
    """A directory that becomes a root file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._have: set[Path] = set()
        for name in LINKS:
            link = Path("/", name)
            if link.is_symlink():
                target = link.readlink()
                (root / target).mkdir(parents=True, exist_ok=True)
                (root / name).symlink_to(target)

    def inside(self, path: Path | str) -> Path:
        """Where a path of the host is in here."""
        return self.root / str(path).lstrip("/")

    def file(self, path: Path, source: Path | None = None) -> None:
        """Copies a file to the same place; what a link leads to, under the link's name."""
        if path in self._have:
            return
        self._have.add(path)
        target = self.inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source or path, target)

    def program(self, path: Path, source: Path | None = None) -> None:
        """Copies a program with its libraries."""
        self.file(path, source)
        for library in libraries(source or path):
            self.file(library)

    def programs(self, names: Iterable[str]) -> None:
        """Copies programs by their names."""
        for name in names:
            self.program(find(name))

    def tree(self, path: Path, source: Path | None = None) -> None:
        """Copies a directory; links inside become what they lead to, those that lead nowhere are left out."""
        source = source or path
        if source.is_dir():
            shutil.copytree(source, self.inside(path), dirs_exist_ok=True, ignore_dangling_symlinks=True)

    def text(self, path: str, text: str, mode: int = 0o644) -> None:
        """Writes a file."""
        target = self.inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)


class Modules:
    """The modules of an unpacked kernel package."""

    def __init__(self, unpacked: Path) -> None:
        base = next(base for base in (unpacked, unpacked / "usr") if (base / "lib/modules").is_dir())
        self.dir = next((base / "lib/modules").iterdir())
        self.release = self.dir.name
        subprocess.run([str(find("depmod")), "-b", str(base), self.release], check=True, stdin=subprocess.DEVNULL)
        lines = (self.dir / "modules.dep").read_text().splitlines()
        self._needs = {path: needs.split() for path, _, needs in (line.partition(":") for line in lines)}
        self._names = {Path(path).name.split(".ko")[0].replace("-", "_"): path for path in self._needs}

    def order(self, names: Iterable[str]) -> list[str]:
        """Paths of modules and of all that they need, each after what it needs. Those that are built in have none."""
        order: list[str] = []

        def visit(path: str) -> None:
            if path not in order:
                for need in self._needs[path]:
                    visit(need)
                order.append(path)

        for name in names:
            if name in self._names:
                visit(self._names[name])
        return order

    def below(self, *folders: str) -> list[str]:
        """Names of all modules whose path begins like one of these."""
        return [name for name, path in self._names.items() if path.startswith(folders)]

    def put(self, root: Root, names: Iterable[str]) -> None:
        """Copies modules with what `modprobe` reads."""
        for path in self.order(names):
            root.file(Path("/lib/modules", self.release, path), self.dir / path)
        for path in self.dir.glob("modules.*"):
            root.file(Path("/lib/modules", self.release, path.name), path)


def initramfs(root: Path) -> bytes:
    """A directory as a cpio archive (newc), as the kernel takes it."""
    parts: list[bytes] = []

    def add(number: int, name: str, mode: int, body: bytes) -> None:
        raw = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(body), 0, 0, 0, 0, len(raw), 0)
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + raw
        parts.extend((head, b"\0" * (-len(head) % 4), body, b"\0" * (-len(body) % 4)))

    for number, path in enumerate(sorted(root.rglob("*")), 1):
        mode = path.lstat().st_mode
        name = str(path.relative_to(root))
        if stat.S_ISLNK(mode):
            add(number, name, mode, str(path.readlink()).encode())
        else:
            add(number, name, mode, path.read_bytes() if stat.S_ISREG(mode) else b"")
    add(0, "TRAILER!!!", 0, b"")
    return b"".join(parts)
