"""Reads known_errors.txt: finds its entries in logs, and writes the troubleshooting pages from it.

    python tools/known_errors.py hint LOG CODE        (LOG - is stdin)

prints "MEANS: DO" of the first entry that fits the end of a log or "exit code CODE", or nothing. The launchers call it
when a rank has failed, so it needs nothing but Python.
"""

import itertools
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILE = HERE / "known_errors.txt"
TAIL_LINES, TAIL_BYTES, MOST_BYTES = 200, 1 << 20, 256 << 20
EDGE, LONG = 10_000, 5_000  # explain() looks at so many lines at each end of a log, at so many characters of each
# How much memory was asked for when there was none: as MindSpore on CPU, Ascend and GPU, NumPy and CUDA say it.
ASKED = re.compile(r"(?:alloc size ?: ?|Request memory size: ?|required size ?\[|Alloc device memory ?\[|for size: |"
                   r"Unable to allocate |tried to allocate |bytesize=)(\d+(?:\.\d+)?) ?([KMGTPE]i?B|B)?", re.I)
# An error of the script's own, which earlier lines do not explain: it has one line, as MindSpore's seldom have, or ...
OTHERS = r"(?!(Runtime|System|Memory|OS|IO|Connection\w*|BrokenPipe|Timeout|BlockingIO)Error\b)"
OWN = re.compile(OTHERS + r"[\w.]+(Error|Exception): ")
ANY = re.compile(OTHERS + r"[A-Za-z_][\w.]*(:|$)")  # ... is raised outside of it
OUR = re.compile(rf'/mindspore/|{re.escape(str(HERE))}/|/ranks\.py"')  # here it tells of other ranks
NETWORK = re.compile(r"(Connection\w*|OS|Timeout)Error: \[Errno (98|101|104|110|111|113)\]")
LOCKED = re.compile(r"BlockingIOError: \[Errno 11\]")
LIBRARY = re.compile(r'/lib/python3|-packages/|"<frozen ')
AT_EXIT = re.compile("(Exception ignored|Error) in atexit")  # what follows is no reason
PAGES = {"": HERE.parent / "TROUBLESHOOTING.md", "_cn": HERE.parent / "TROUBLESHOOTING_CN.md"}
VERIFIED = {
    "": {"test": "a test provokes it", "hand": "seen, by hand", "documentation": "not seen here, from documentation"},
    "_cn": {"test": "由测试触发", "hand": "手工见过", "documentation": "未在此见过，来自文档"},
}
TEXTS = {
    "": ["""# Troubleshooting

English | [中文](TROUBLESHOOTING_CN.md)

<!-- Written by "python tools/doctor.py troubleshooting" from tools/known_errors.txt: change it there. -->

First let the machine be looked at, then the log; both commands need nothing but Python:

```bash
python3 tools/doctor.py
python3 tools/doctor.py explain log_output/1/rank.0/stdout
```

The first says what is missing and what to do about it; its report belongs in every issue. \
The second looks for the messages of this page. When a rank fails, \
the launchers look, too, and print a line with `hint:`.

## Messages

| message | what it means | what to do | verified |
|---|---|---|---|""", """
## Without a message

| what you see | what it means | what to do | verified |
|---|---|---|---|"""],
    "_cn": ["""# 故障排查

[English](TROUBLESHOOTING.md) | 中文

<!-- 由 "python tools/doctor.py troubleshooting" 根据 tools/known_errors.txt 生成：请改那里。 -->

先检查机器，再看日志；两条命令都只需要 Python：

```bash
python3 tools/doctor.py
python3 tools/doctor.py explain log_output/1/rank.0/stdout
```

第一条指出缺什么、怎么办；提 issue 时请附上它的报告。\
第二条在日志中查找本页的消息。某个进程失败时，启动脚本也会查找，并打印带 `hint:` 的一行。

## 消息

| 消息 | 含义 | 怎么办 | 如何验证 |
|---|---|---|---|""", """
## 没有消息时

| 现象 | 含义 | 怎么办 | 如何验证 |
|---|---|---|---|"""],
}


def read(file=FILE):
    """The entries of the file in their order: dictionaries of its fields and "name"; without pattern a mere symptom."""
    entries = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            entries.append({"name": line.strip("[]")})
        elif line and not line.startswith("#"):
            field, text = line.split(": ", 1)
            entries[-1][field] = text
    return entries


def find(lines, entries):
    """Which entries fit a log, upper and lower case alike.

    Returns:
        [(entry, number of the first line that fits, from 1)], in the order of the entries.
    """
    found = []
    for entry in entries:
        if "pattern" in entry:
            pattern = re.compile(entry["pattern"], re.IGNORECASE)
            number = next((number for number, line in enumerate(lines, 1) if pattern.search(line)), None)
            if number:
                found.append((entry, number))
    return found


def memory_asked(lines):
    """What a job asked for when memory ran out: "2.15 GB", the largest number that its log has; "" without one."""
    found = [(float(number) * 1024 ** ("BKMGTPE".index((unit or "B")[0].upper())))
             for line in lines for number, unit in ASKED.findall(line)]
    if not found or max(found) < 1e6:
        return ""
    size = max(found)
    unit = next(unit for unit in (1e18, 1e15, 1e12, 1e9, 1e6) if size >= unit)
    return f"{size / unit:.3g} {dict(zip((1e18, 1e15, 1e12, 1e9, 1e6), ('EB', 'PB', 'TB', 'GB', 'MB')))[unit]}"


def own_error(lines):
    """The lines of a log, none empty, from the error of the script's own on that ends it; [] if none does. Where it is
    one of its own connections, which reads as if ranks found no others, or a lock that another rank has, which reads
    as if there were too many processes, those before it.
    """
    lines = list(itertools.takewhile(lambda line: not AT_EXIT.match(line), lines))
    *_, begin = [-1, *(number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call"))]
    error = next((number for number in range(begin + 1, len(lines)) if not lines[number].startswith(" ")), -1)
    before = lines[begin - 1] if begin > 0 else ""
    if "direct cause of the following" in before:
        return []  # which says more
    if lines and OWN.match(lines[-1]):
        return lines[-1:]
    frames = [line for line in lines[begin:error] if line.startswith("  File ")]
    *_, where = ["/mindspore/", *(line for line in frames if "/mindspore/" in line or not LIBRARY.search(line))]
    last = lines[-1] if lines else ""
    locked = LOCKED.match(last) and where in frames[-1:] and "fork" not in lines[error - 1]
    if locked or (NETWORK.match(last) and not OUR.search(where)):
        return lines[:begin] or [""]
    return lines[error:] if "/mindspore/" not in where + before and "During handling" not in before and (
        ANY.match(lines[error])) else []


def hint(log, code, shown=()):
    """"MEANS: DO" of the first entry that fits the end of a log or "exit code CODE"; else "".

    Args:
        log: path of the log, or "-" for stdin.
        code: the exit code.
        shown: the last lines as the launcher has them: the log may be on another machine, or lack them on a full disk.
    """
    try:
        with open(0 if log == "-" else log, "rb") as file:
            if file.seekable():
                file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
    except OSError:
        lines = []  # what the exit code says is better than nothing
    lines += [line for line in shown if line not in lines]
    lines = [line for line in lines if line.strip() and set(re.findall(r"exit code (\d+)", line)) <= {str(code)}]
    lines = own_error(lines) or lines
    found = find([*lines, f"exit code {code}"], read())
    if not found:
        return ""
    entry, _ = found[0]
    asked = memory_asked(lines) if entry["name"].endswith("out-of-memory") else ""
    return f"{entry['means']}{f', when {asked} more were asked for' if asked else ''}: {entry['do']}"


def explain(names):
    """Print what is known about the messages of logs ("-" is stdin); 0, 1 if nothing is, 2 if one cannot be read."""
    code, entries = 1, read()
    if not names:
        print("doctor.py: name a log: python3 tools/doctor.py explain log_output/1/rank.0/stdout (- is stdin)",
              file=sys.stderr)
        return 2
    for name in names:
        try:
            with open(0 if name == "-" else name, "rb", closefd=name != "-") as file:
                data = file.read(MOST_BYTES)
            if len(data) == MOST_BYTES:
                raise OSError(0, f"it has {MOST_BYTES >> 20} MB or more; its end will do: tail -c 1000000 {name} | "
                              "python3 tools/doctor.py explain -")
            text = data.decode("utf-8", "replace")
        except OSError as error:
            way = "" if error.errno == 0 else "; give the path of a log, or - for stdin"
            print(f"doctor.py: cannot read {name}: {error.strerror}{way}", file=sys.stderr)
            return 2
        lines = text.splitlines()
        passed_over = max(0, len(lines) - 2 * EDGE)
        looked_at = [line[:LONG] for line in (*lines[:EDGE], *lines[EDGE + passed_over:])]
        found = [(entry, number + passed_over * (number > EDGE)) for entry, number in find(looked_at, entries)]
        for entry, number in found:
            print(f"{name}:{number}: {lines[number - 1].strip()[:200]}\n    means: {entry['means']}\n"
                  f"    do:    {entry['do']}")
        if found:
            code = 0
        else:
            where = f"the first and last {EDGE} of {len(lines)}" if passed_over else len(lines)
            print(f"{name}: no message that is known here, in {where} lines; see TROUBLESHOOTING.md")
    return code


def page(language):
    """The troubleshooting page in a language: "" is English, "_cn" Chinese."""
    rows = {True: [], False: []}
    for entry in read():
        has_pattern = "pattern" in entry
        message = f"`{entry['message']}`" if has_pattern else entry["message" + language]
        cells = (message, entry["means" + language], entry["do" + language], VERIFIED[language][entry["verified"]])
        rows[has_pattern].append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    messages, symptoms = TEXTS[language]
    return "\n".join([messages, *rows[True], symptoms, *rows[False]]) + "\n"


def write_pages():
    """Write both pages; returns the exit code."""
    for language, file in PAGES.items():
        file.write_text(page(language), encoding="utf-8")
        print(file.name)
    return 0


def main():
    if len(sys.argv) != 4 or sys.argv[1] != "hint":
        print("usage: python tools/known_errors.py hint LOG CODE", file=sys.stderr)
        sys.exit(2)
    found = hint(*sys.argv[2:])
    if found:
        print(found)


if __name__ == "__main__":
    main()
