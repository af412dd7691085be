"""Reads and writes the checkpoints of all ranks of a job: FOLDER/rank_0/, FOLDER/rank_1/, ...

A file is whole (every parameter in full, the same in all folders), or holds the slices of its rank:
some of the columns of the weight and of its momentum in the optimizer, and the rest in full.
"""

import re

import mindspore as ms
import numpy as np

from checkpoints import Checkpoints
from network import BATCH, COLUMNS, ROWS, SAMPLES, columns_of

PREFIX = "net"  # of the files: net-<epoch>_<step>.ckpt


class Saved:
    """The newest checkpoint that all ranks of a job have saved whole; ValueError if none.

    epoch and step, from 1: after which step it was saved;
    files and ranks: the ranks' files, and what is in each, {name: Parameter}, in their order;
    slices: how many slices the weight is in; 1: the files are whole.
    """

    def __init__(self, folder):
        ranks = {int(path.name[5:]) for path in (folder.iterdir() if folder.is_dir() else ())
                 if re.fullmatch("rank_(0|[1-9][0-9]{0,4})", path.name) and any(path.iterdir())}
        if not ranks:
            raise ValueError(f"there is no {folder}/rank_0; give the --ckpt-dir of a job")
        if missing := set(range(max(ranks))) - ranks:
            raise ValueError(f"{folder}/rank_{min(missing)} is missing; copy it from where it ran")
        size = len(ranks)
        places = [Checkpoints(folder / f"rank_{rank}", PREFIX, size) for rank in range(size)]
        limit, agreed = (float("inf"),), False
        while not agreed:
            found = [place.newest(limit) for place in places]
            saved = [place for place, _ in found]
            limit, agreed = min(saved), min(saved) in ((0, 0), max(saved))
        if limit == (0, 0):
            raise ValueError(f"the ranks in {folder} share no epoch that is whole; {folder}/rank_"
                             f"{saved.index(limit)} has none, copy it from where that rank ran")
        (self.epoch, self.step), self.ranks = limit, [parameters for _, parameters in found]
        self.files = [place.files()[limit] for place in places]
        self._check(folder)

    def _check(self, folder):
        shape = getattr(self.ranks[0].get("weight"), "shape", None)
        if shape is None or shape[0] != ROWS or COLUMNS % shape[1]:
            raise ValueError(f"{self.files[0]} has a weight {shape}; the whole one is "
                             f"{(ROWS, COLUMNS)}, and slices have equal shares of its columns")
        self.slices = COLUMNS // shape[1]
        for rank, (file, parameters) in enumerate(zip(self.files, self.ranks)):
            saved_by, own = int(parameters.pop("rank_size")), int(parameters.pop("rank", rank))
            _ = [parameters.pop(name, None) for name in Checkpoints.entries]
            if saved_by != len(self.files):
                raise ValueError(f"{file} is of {saved_by} ranks, but {folder} has the folders "
                                 f"of {len(self.files)}; it takes all of one job, and no others")
            if own != rank and self.slices > 1:
                raise ValueError(f"{file} was saved by rank {own}; put it back into its folder")
            for name, value in self.ranks[0].items():
                own, sliced = parameters.get(name), self.slices > 1 and value.shape == shape
                if own is None or own.shape != value.shape or not (
                        sliced or np.array_equal(own.asnumpy(), value.asnumpy(), equal_nan=True)):
                    raise ValueError(f"{name} in {file} is not as in {self.files[0]}: they are "
                                     "not of one save; use files of the same step")

    def whole(self, net=None):
        """The parameters in full, {name: Parameter}; ValueError: slices, or not those of net."""
        if self.slices > 1:
            raise ValueError(f"{self.files[0]} holds 1 of {self.slices} slices; make them whole: "
                             "python convert_checkpoints.py FOLDER NEW_FOLDER --ranks 1")
        for own in net.get_parameters() if net else ():
            found = self.ranks[0].get(own.name)
            if found is None or found.dtype != own.dtype or (
                    found.shape != own.shape and own.name != "weight"):  # that: see _check()
                raise ValueError(f"{self.files[0]} is of another network: no such {own.name}")
        return self.ranks[0]


def of_rank(parameters, rank, rank_size, cut):
    """What a rank loads, of a file's {name: Parameter}: all, or, with cut, its columns."""
    saved_by = int(parameters.pop("rank", rank))
    # The weight, and what the optimizer has of it, of the same shape: Momentum one, Adam two.
    whole = [name for name in parameters if cut and parameters[name].shape == (ROWS, COLUMNS)]
    if cut and not whole and saved_by != rank:
        Checkpoints.refuse(f"rank {rank} finds the slices of rank {saved_by} in its own folder; "
                           f"put them back into rank_{saved_by}")
    for name in whole:
        own = parameters[name].asnumpy()[:, columns_of(rank, rank_size)]
        parameters[name] = ms.Parameter(own.copy(), name=name)
    return parameters


def write(parameters, folder, rank, rank_size, epoch, step):
    """Save {name: Parameter or Tensor} as the checkpoint of one of the ranks of a job."""
    Checkpoints(folder / f"rank_{rank}", PREFIX, rank_size).save(
        [{"name": "rank", "data": ms.Tensor(rank)}] * (rank_size > 1)
        + [{"name": name, "data": value} for name, value in parameters.items()],
        epoch, step, SAMPLES // BATCH)


def check_strategy(file, saved=None):
    """Raise a ValueError if a strategy file is not of this network, or not of the job Saved."""
    try:
        layout = ms.build_searched_strategy(str(file))["weight"]
        grid = layout.dev_matrix[0].dim
        ranks = int(np.prod(grid))
        cut = int(np.prod([grid[-1 - axis] for axis in layout.tensor_map[0].dim if axis >= 0]))
    except (ValueError, TypeError, KeyError, IndexError, OSError) as error:
        raise ValueError(f"{file} is no strategy file of this network; give the strategy.json that "
                         "a semi-auto parallel job wrote to its --ckpt-dir") from error
    if saved and (ranks, cut) != (len(saved.files), saved.slices):
        raise ValueError(f"the strategy of {file} is for {ranks} ranks and {cut} slices, not for "
                         f"{len(saved.files)} and {saved.slices}; give that of the job that saved")
