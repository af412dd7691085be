"""Loads checkpoints that may be cut off, on machines whose memory may be full of cached files."""
# Copy of resnet50_ascend/load_whole.py; tools/copies.py --fix refreshes it.

import mindspore as ms


def load(file):
    """ms.load_checkpoint, also where the system has filled the memory with cached files.

    MindSpore 2.10 refuses a file that is larger than the memory which nothing uses at all, though the system gives its
    caches to whoever needs memory: so need more than the file takes, and let go of it.

    Raises:
        ValueError: the file is damaged, or there really is too little memory.
    """
    for _ in range(4):
        try:
            return ms.load_checkpoint(str(file))
        except ValueError as error:
            if "available memory" not in str(error):
                raise
            b"1" * (4 * file.stat().st_size)
    return ms.load_checkpoint(str(file))


def load_whole(file):
    """The parameters in a checkpoint that ModelCheckpoint wrote with append_info=["epoch_num"].

    MindSpore writes to a .tmp file and renames it when it is whole, but a disk may still lose its end.

    Returns:
        {name: Parameter}; empty, with a warning, if the file is cut off or damaged.

    Raises:
        ValueError: too little memory, which says nothing about the file.
    """
    parameters = {}
    try:
        parameters = load(file)
    except ValueError as error:
        if "memory" in str(error):
            raise
    if parameters.pop("epoch_num", None) is None:  # the last entry of a file
        print(f"warning: {file} is cut off or damaged; passed over", flush=True)
        return {}
    return parameters
