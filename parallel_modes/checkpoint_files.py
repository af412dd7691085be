"""Checkpoints of several ranks: FOLDER/rank_0/*.ckpt, FOLDER/rank_1/*.ckpt, ..., one file a rank.

A file is whole (every parameter in full, the same in all ranks' folders) or holds the slices of its rank: some of
the columns of the weight and of its momentum, and the rest in full.
"""

import numpy as np
import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from networks import COLUMNS, ROWS, SLICED, columns_of

NAMES = {"weight", "bias", "moments.weight", "moments.bias", "learning_rate", "momentum", "global_step"}  # in a file


# ------------------------------------------------------------------------------------------------ files
def find(folder):
    """Find the files of all ranks.

    Returns:
        The paths, in the order of the ranks.

    Raises:
        ValueError: no ranks, a rank is missing, or has no file or several.
    """
    if not folder.is_dir():
        raise ValueError(f"the folder {folder} does not exist; give the --ckpt-dir that was used for saving")
    ranks = sorted(int(path.name[5:]) for path in folder.glob("rank_*") if path.name[5:].isdigit())
    if not ranks:
        raise ValueError(f"{folder} has no folder rank_0; give the --ckpt-dir that was used for saving")
    files = []
    for rank in range(ranks[-1] + 1):
        found = [path for path in (folder / f"rank_{rank}").glob("*.ckpt") if path.name != "draft.ckpt"]
        if len(found) != 1:
            raise ValueError(f"{folder}/rank_{rank} must hold one .ckpt file, not {len(found)}; "
                             + ("copy it from where rank " + str(rank) + " ran" if not found else "remove the others"))
        files += found
    return files


def read(file):
    """Read one file: {name: Parameter}.

    Raises:
        ValueError: the file is damaged, or is no checkpoint of this lesson.
    """
    try:
        parameters = ms.load_checkpoint(str(file), crc_check=True)
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"{file} is damaged or was cut off ({file.stat().st_size} bytes); copy it again, "
                         "or use an earlier checkpoint") from error
    shapes = {name: value.shape for name, value in parameters.items()}
    lacking = NAMES - set(shapes)
    if lacking:
        raise ValueError(f"{file} lacks {', '.join(sorted(lacking))}: it was cut off or is not of this lesson")
    rows, columns = shapes["weight"]
    if rows != ROWS or COLUMNS % columns or shapes["moments.weight"] != (rows, columns):
        raise ValueError(f"{file} has a weight {shapes['weight']}; the whole one is {(ROWS, COLUMNS)}, "
                         "and slices have equal shares of its columns")
    return parameters


def read_all(folder):
    """Read the files of all ranks, which must be of one save.

    Returns:
        A list of {name: Parameter}, in the order of the ranks: all of them when they are slices, else rank 0's only.

    Raises:
        ValueError: as find() and read(); a slice is missing; files that are not of one save.
    """
    files = find(folder)
    ranks = [read(file) for file in files]
    slices = COLUMNS // ranks[0]["weight"].shape[1]
    if slices == 1:
        files, ranks = files[:1], ranks[:1]
    if slices != len(files):
        raise ValueError(f"{files[0]} holds 1 of {slices} slices, but {folder} has {len(files)} ranks: "
                         + (f"rank_{len(files)} is missing; copy it from where that rank ran" if len(files) < slices
                            else f"these are not the files of one job, move rank_{slices} and above away"))
    for file, parameters in zip(files, ranks):
        for name, value in parameters.items():
            same = value.shape if name in SLICED else value.asnumpy().tolist()
            if same != (ranks[0][name].shape if name in SLICED else ranks[0][name].asnumpy().tolist()):
                raise ValueError(f"{name} in {file} is not as in {files[0]}: the files are not of one save; "
                                 "use files of the same step")
    return ranks


def check(folder, ranks):
    """Check that a job can load a folder: whole files, or, if it holds one slice a rank, as many slices as ranks.

    Returns:
        The number of slices, 1 for whole files.

    Raises:
        ValueError: as read_all(), or slices of another number of ranks.
    """
    slices = len(read_all(folder))
    if slices not in (1, ranks):
        raise ValueError(f"{folder} holds the slices of {slices} ranks, which "
                         + (f"{ranks} ranks" if ranks > 1 else "a process that needs whole parameters")
                         + f" cannot load; convert them: python convert_checkpoints.py {folder} NEW_FOLDER "
                         f"--ranks {ranks}")
    return slices


def check_strategy(file, folder=None):
    """Check that a strategy file is of this network and, given a folder, of the job that saved it.

    Raises:
        ValueError: it is not; or as find() and read().
    """
    try:
        layout = ms.build_searched_strategy(str(file))["weight"]
        ranks = int(np.prod(layout.dev_matrix[0].dim))
        cut = [layout.dev_matrix[0].dim[-1 - axis] for axis in layout.tensor_map[0].dim if axis >= 0]
    except (ValueError, TypeError, KeyError, IndexError, OSError) as error:
        raise ValueError(f"{file} is no strategy file of this network; give the strategy.json that a semi-auto or auto "
                         "parallel job wrote to its --ckpt-dir") from error
    files = find(folder) if folder else []
    if files and len(files) != ranks:
        raise ValueError(f"the strategy of {file} is for {ranks} ranks, but {folder} has {len(files)}; "
                         "give the strategy file of the job that saved, and the folders of all its ranks")
    for saved in files:
        columns = read(saved)["weight"].shape[1]
        if columns != COLUMNS // int(np.prod(cut)):
            raise ValueError(f"by the strategy of {file} a rank holds {COLUMNS // int(np.prod(cut))} columns of the "
                             f"weight, but {saved} has {columns}; give the strategy file of the job that saved")


def write(parameters, folder, rank, **options):
    """Save a cell or [{"name", "data"}] as a rank's file: under another name first, so that no half file is found."""
    target = folder / f"rank_{rank}" / "parallel_modes.ckpt"
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name("draft.ckpt")
    draft.unlink(missing_ok=True)
    ms.save_checkpoint(parameters, str(draft), crc_check=True, **options)
    draft.replace(target)


# ---------------------------------------------------------------------------------------- save and load
def save(cell, folder, rank, rank_size, sliced):
    """Save a rank's parameters: whole ones, or the slices that it holds."""
    parameters = list(cell.get_parameters())
    if sliced or not any(parameter.layerwise_parallel for parameter in parameters):
        write(cell, folder, rank, integrated_save=not sliced)  # distributed: semi-auto and auto: gathers by itself
        return
    whole = []
    for parameter in parameters:
        data = Tensor(parameter.asnumpy())
        if parameter.layerwise_parallel and rank_size > 1:  # distributed: hybrid: gather by hand
            data = ops.AllGather()(data.T).T  # distributed: it joins rows, our slices are columns: so transposed
        whole.append({"name": parameter.name, "data": data})
    write(whole, folder, rank)


class FromRank0(nn.Cell):
    """Give every rank the tensors that rank 0 has; shapes and types must be the same on all."""

    def __init__(self):
        super().__init__()
        self.broadcast = ops.Broadcast(0)

    def construct(self, *tensors):
        received = ()
        for tensor in tensors:  # one by one: in one call, MindSpore 2.7 on CPU gives all of them the first one's type
            received += self.broadcast((tensor,))
        return received


def load(cell, folder, slices, rank, rank_size):
    """Load a folder, of which check() said how many slices it holds, into a training step."""
    targets = list(cell.get_parameters())
    hybrid = any(target.layerwise_parallel for target in targets)
    if slices > 1:
        loaded = read(find(folder)[rank])  # distributed: hybrid: every rank its own slices
    elif ms.get_auto_parallel_context("parallel_mode") in ("data_parallel", "hybrid_parallel") and rank_size > 1:
        # distributed: Rank 0 reads, broadcast gives the others the same: no rank can have read another file.
        shapes = {target.name: (ROWS, COLUMNS) if target.name in SLICED else target.shape for target in targets}
        own = read(find(folder)[0]) if rank == 0 else {
            target.name: Tensor(np.zeros(shapes[target.name]), target.dtype) for target in targets}
        values = FromRank0()(*(Tensor(own[name].asnumpy()) for name in shapes))  # distributed:
        loaded = {name: Parameter(value, name=name) for name, value in zip(shapes, values)}
        if hybrid:  # distributed: of the whole ones, this rank's columns
            for name in SLICED:
                loaded[name] = Parameter(loaded[name].asnumpy()[:, columns_of(rank, rank_size)].copy(), name=name)
    else:
        loaded = read(find(folder)[0])  # distributed: all ranks the same file; semi-auto and auto cut it themselves
    ms.load_param_into_net(cell, loaded, strict_load=True)
