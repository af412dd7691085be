"""What Python does at the end of a process and os._exit(), by which ranks end, does not: finish_writing().

Importing it, atexit notes what is registered. That is done before MindSpore is imported.
"""

import atexit
import contextlib
import gc
import io
import logging
import multiprocessing.util
import os
import re
import sys
import threading
import traceback
from pathlib import Path


def note_at_end():
    """Have atexit note what the script, and not MindSpore, registers; once a process, whoever runs this file."""
    register, unregister, noted, begun = atexit.register, atexit.unregister, [], []
    others = None if "mindspore" in sys.modules else [multiprocessing.util._exit_function]
    register(lambda: begun.append(True))  # Python calls it right before what was registered earlier

    def note(function, /, *arguments, **keywords):
        if not str(getattr(function, "__module__", "")).startswith("mindspore"):
            noted.append((function, arguments, keywords))
        elif others:
            others.append(function)
        return register(function, *arguments, **keywords)

    def forget(function):
        noted[:] = [each for each in noted if each[0] != function]
        unregister(function)

    note.noted, note.others, note.begun = noted, others, begun
    atexit.register, atexit.unregister = note, forget


if not hasattr(atexit.register, "noted"):
    note_at_end()
AT_END = atexit.register.noted  # (function, arguments, keywords)
# What is not to be called: MindSpore's, and what end_processes() does. None if that came first, and is not known.
OTHERS = atexit.register.others
BEGUN = atexit.register.begun  # has Python?


def mindspore_is_imported():
    """What its import has registered is not the script's."""
    OTHERS.extend(function for function, *_ in AT_END if function is not logging.shutdown)
    AT_END.clear()


def call_the_earlier():
    """Call what was registered before this file was run: atexit does not say what that is, but calls all it has."""
    if OTHERS is None or BEGUN:  # Python is at it, and calls each once
        return
    for function in OTHERS:
        atexit.unregister(function)
    with contextlib.suppress(BaseException):  # of Python 3.9: it has printed each
        atexit._run_exitfuncs()


def in_time(function, seconds):
    """Call a function in a thread of its own, and wait so long at most."""
    caller = threading.Thread(target=function, daemon=True)
    with contextlib.suppress(RuntimeError):  # Python ends, has ended the threads, and from 3.12 on starts no more
        caller.start()
        caller.join(seconds)


def end_threads(seconds):
    """End pools of threads, which wait for more to do until Python ends them, and wait for the other threads, so long
    at most.
    """
    caller = threading.current_thread()

    def end():
        for call in reversed(getattr(threading, "_threading_atexits", [])):
            call()
        for thread in threading.enumerate():
            if not thread.daemon and thread not in (threading.main_thread(), caller):
                thread.join()

    in_time(end, seconds)


def end_processes(seconds):
    """End the processes of multiprocessing as Python does, which waits for those that are no daemons, but so long at
    most. In a process that the script forked there are those of its parent, too.
    """
    processes = [one for one in multiprocessing.active_children() if one._parent_pid == os.getpid()]

    def end():
        multiprocessing.util._run_finalizers(0)  # of managers and pools
        for process in processes:
            if process.daemon:
                process.terminate()
        for process in processes:
            process.join()

    if processes:
        in_time(end, seconds)
    for process in processes:
        if process.is_alive():
            print(f"process {process.pid}, {process.name}, which multiprocessing has started, still runs and is ended; "
                  "call its join() in the script", flush=True)
            process.terminate()


def writes_files():
    """Is any file open for writing, beside the standard ones and MPI's memory, which is deleted? Else no object need be
    looked at.
    """
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            flags = re.search(r"^flags:\s*(\d+)", Path(f"/proc/self/fdinfo/{number}").read_text(), re.MULTILINE)
            if int(number) > 2 and int(flags[1], 8) & 3 and os.path.exists(os.readlink(f"/proc/self/fd/{number}")):
                return True
    return False


def finish_writing(alone=False, last=True):
    """End thread pools, wait for threads (a minute at most), call what the script has registered with atexit, and write
    what open files hold back. alone: this process waits for no other rank, and for its threads 5 s only. last:
    os._exit() comes next, so end the processes of multiprocessing, too; who waits long here has lost the scheduler.
    """
    if alone and "ranks" in sys.modules:
        sys.modules["ranks"]._joined = None  # atexit may have its leave()
    end_threads(5 if alone else 60)
    while AT_END:
        function, arguments, keywords = AT_END.pop()
        atexit.unregister(function)  # under msrun Python goes on to its own end
        try:
            function(*arguments, **keywords)
        except SystemExit:  # as Python: the next one is called all the same, and the exit code stays
            pass
        except BaseException:  # noqa: BLE001
            print(f"Exception ignored in atexit callback: {function!r}", file=sys.stderr)
            traceback.print_exc()
    if last:
        call_the_earlier()
        end_processes(2 if alone else 15)
    files = [sys.stdout, sys.stderr, sys.__stdout__]
    if writes_files():
        gc.unfreeze()
        files += [item for item in gc.get_objects() if issubclass(type(item), io.IOBase)]
    for file in files:
        with contextlib.suppress(Exception):  # closed, or nobody reads it
            file.flush()
