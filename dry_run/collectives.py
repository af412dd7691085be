"""The collectives of a plan between processes, by MPI (mpi4py): any group, any operator."""
from __future__ import annotations

import os
import pickle
import time
import traceback
import zlib
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mpi4py import MPI

import graph_ir
from plan import PlanError

TIMEOUT = float(os.environ.get("COMPUTE_TIMEOUT", "300"))  # seconds that a rank waits for another before it tells


def to_array(tensor):
    """A tensor's numbers as an array that MPI can send; bfloat16 as float32, which holds it exactly."""
    if tensor.dtype == ms.bfloat16:
        tensor = tensor.astype(ms.float32)
    array = tensor.asnumpy()
    return np.ascontiguousarray(array).reshape(array.shape)


def to_tensor(array, dtype):
    """Back again."""
    if dtype == ms.bfloat16:
        return Tensor(array, dtype)
    return Tensor.from_numpy(np.ascontiguousarray(array).reshape(array.shape))  # else () would become (1,)


OWN = (os.path.join(os.path.dirname(__file__), ""), "<")
AT_START = "the start of a new graph, as for a batch of another size, or for slices of weights that all must save"
AT_END = "its end"


def note_of_job(name):
    """A file in mpirun's folder, by which the ranks of a machine meet. The folder has the name of mpirun's PID, and may
    hold files of one that had it before and was killed; so the name gets the job's key, which is random.
    """
    key = os.getenv("OMPI_MCA_orte_precondition_transports", "")  # noqa: SIM112  # so Open MPI spells it
    return Path(os.environ["PMIX_SERVER_TMPDIR"], name + key)


class Collectives:
    """This process's connections to the other ranks."""

    def __init__(self, rank, rank_size):
        self.rank, self.rank_size = rank, rank_size
        self.doing = "the first plan, for the other ranks to come there"
        if not MPI.Is_initialized():
            if os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(rank_size):
                self.await_all()
            MPI.Init_thread()
        self.mpi, self.world = MPI, MPI.COMM_WORLD
        if self.world.size != rank_size:
            raise PlanError(f"MPI knows {self.world.size} ranks and MindSpore {rank_size}; start the ranks with "
                            "mpirun, or with dry_run/compute.py -n N")
        self.mpi_rank = {ranks: i for i, ranks in enumerate(self.world.allgather(rank))}  # of MindSpore's rank
        self.groups, self.tags = {}, {}
        self.sends = []
        self.doing = ""

    def await_all(self):
        """Wait until all ranks, of one machine, are here: MPI would wait for ever, and say nothing."""
        notes = [note_of_job(f"first_plan_{rank}") for rank in range(self.rank_size)]
        notes[int(os.environ["OMPI_COMM_WORLD_RANK"])].touch()
        deadline = time.monotonic() + TIMEOUT
        while not all(note.exists() for note in notes):
            time.sleep(0.005)
            self.look_at(deadline)

    def agree(self, doing, size=0):
        """All ranks come here, and must do the same; returns each one's size."""
        self.doing = f"{doing}, for the other ranks to come there"
        table = np.empty((self.rank_size, 2), np.int64)
        self.wait(self.world.Iallgather(np.array([size, zlib.crc32(doing.encode())], np.int64), table))
        if len(set(table[:, 1])) > 1:
            frame = graph_ir.users_frame(traceback.extract_stack(), OWN)
            line = f" ({frame.filename}:{frame.lineno})" if frame else ""
            lines = np.empty(self.rank_size, "S400")
            self.wait(self.world.Iallgather(as_bytes(np.array([
                f"rank {self.rank} is at {doing}{line}".encode()], "S400")), as_bytes(lines)))
            raise PlanError("the ranks are out of step: " + "; ".join(
                line.decode(errors="replace") for line in lines), by_all=True)
        return table[:, 0]

    def share(self, what, doing=AT_START):
        """Every rank's `what`, a list in the order of the ranks; `doing` is told if the others do not come."""
        mine = np.frombuffer(pickle.dumps((self.rank, what)), np.uint8)
        sizes = self.agree(doing, mine.size)
        everything = np.empty(sizes.sum(), np.uint8)
        self.wait(self.world.Iallgatherv(mine, [everything, sizes]))
        ends = np.cumsum(sizes)
        found = dict(pickle.loads(everything[end - size:end].tobytes()) for end, size in zip(ends, sizes))
        return [found[rank] for rank in range(self.rank_size)]

    def finish(self):
        """The end of all ranks together, as mpirun wants it."""
        self.doing = AT_END
        self.wait(self.world.Ibarrier())
        self.mpi.Finalize()

    def make_groups(self, all_groups):
        """Make the groups (tuples of ranks) that are not there yet; all ranks name the same ones."""
        for number, ranks in enumerate(sorted(set(all_groups) - self.groups.keys())):
            if self.rank in ranks:
                group = self.world.group.Incl([self.mpi_rank[member] for member in ranks])
                self.groups[ranks] = self.world.Create_group(group, tag=number % 32767)
            else:
                self.groups[ranks] = None

    def number_pairs(self, all_pairs):
        """Give each (group, MindSpore's tag, sender, receiver) a tag of MPI; all ranks name the same ones."""
        for pair in sorted(set(all_pairs) - self.tags.keys()):
            self.tags[pair] = len(self.tags)

    def wait(self, request, status=None):
        """Wait for MPI, politely at first, but not for ever."""
        if request.Test(status):
            return
        deadline, pause = time.monotonic() + TIMEOUT, 0.0
        while not request.Test(status):
            time.sleep(pause)
            pause = min(0.0005, pause + 1e-6)
            self.look_at(deadline)

    def look_at(self, deadline):
        """Say what is waited for when it takes too long."""
        if time.monotonic() > deadline:
            raise PlanError(f"rank {self.rank} has waited {TIMEOUT:g} s at {self.doing}")

    # ------------------------------------------------------------------------------- one function a kind of operator
    def operator(self, node, group, peer, say):
        """The function that runs a node's collective: input tensor (or tuple) to output tensor (or tuple)."""
        made = getattr(self, f"make_{node.op.lower()}", None)
        if made is None:
            raise PlanError(f"{say} is a collective that this program does not know")
        run = made(node, group, peer)

        def timed(*inputs):
            self.doing = say
            return run(*inputs)

        return timed

    def reduction(self, name):
        """MPI's operator, and how to finish; by MindSpore's name."""
        ops = {"sum": self.mpi.SUM, "max": self.mpi.MAX, "min": self.mpi.MIN, "prod": self.mpi.PROD}
        if name not in ops:
            raise PlanError(f"a reduction {name!r} is not known; sum, max, min and prod are")
        return ops[name]

    def reduced(self, tensor, name, start):
        """Run a reduction on what MPI can add up: float16 as float32, then rounded once."""
        array = to_array(tensor)
        if array.dtype in (np.float16, np.bool_):
            array = array.astype(np.float32 if array.dtype == np.float16 else np.uint8)
        result = start(array, self.reduction(name))
        plain = {ms.float16: np.float16, ms.bool_: np.bool_}.get(tensor.dtype)
        return to_tensor(result if plain is None else result.astype(plain), tensor.dtype)

    def make_allreduce(self, node, group, _):
        comm, op = self.groups[group], node.attributes.get("op", "sum")

        def start(array, operator):
            result = np.empty_like(array)
            self.wait(comm.Iallreduce(array, result, operator))
            return result

        return lambda tensor, *_: self.reduced(tensor, op, start)

    def make_reducescatter(self, node, group, _):
        comm, op = self.groups[group], node.attributes.get("op", "sum")

        def start(array, operator):
            result = np.empty((array.shape[0] // len(group), *array.shape[1:]), array.dtype)
            self.wait(comm.Ireduce_scatter_block(array, result, operator))
            return result

        return lambda tensor, *_: self.reduced(tensor, op, start)

    def make_allgather(self, node, group, _):
        comm = self.groups[group]

        def run(tensor, *_):
            array = to_array(tensor)
            result = np.empty((len(group) * (array.shape[0] if array.ndim else 1), *array.shape[1:]), array.dtype)
            self.wait(comm.Iallgather(as_bytes(array), as_bytes(result)))
            return to_tensor(result, tensor.dtype)

        return run

    def make_broadcast(self, node, group, _):
        comm, root = self.groups[group], group.index(node.attributes["root_rank"])

        def run(tensors, *_):
            many = isinstance(tensors, (tuple, list))
            results = []
            for tensor in tensors if many else [tensors]:
                array = np.array(to_array(tensor))
                self.wait(comm.Ibcast(as_bytes(array), root))
                results.append(to_tensor(array, tensor.dtype))
            return tuple(results) if many else results[0]

        return run

    def make_alltoall(self, node, group, _):
        comm = self.groups[group]
        split_dim, concat_dim = node.attributes["split_dim"], node.attributes["concat_dim"]
        if node.attributes["split_count"] != len(group):
            raise PlanError(f"{node.op} splits into {node.attributes['split_count']} parts in a group of {len(group)}")

        def run(tensor, *_):
            array = np.stack(np.split(to_array(tensor), len(group), split_dim))
            result = np.empty_like(array)
            self.wait(comm.Ialltoall(as_bytes(array), as_bytes(result)))
            return to_tensor(np.concatenate(list(result), concat_dim), tensor.dtype)

        return run

    def send(self, array, rank, tag):
        """Send without waiting."""
        self.sends = [(request, kept) for request, kept in self.sends if not request.Test()]
        array = np.array(array, order="C")  # a copy: it is on its way while the tensor may change
        self.sends.append((self.world.Isend(as_bytes(array), self.mpi_rank[rank], tag), array))

    def receive(self, shape, dtype, rank, tag):
        """Wait for an array of exactly this shape."""
        array = np.empty(shape, dtype)
        status = self.mpi.Status()
        self.wait(self.world.Irecv(as_bytes(array), self.mpi_rank[rank], tag), status)
        if status.Get_count(self.mpi.BYTE) != array.nbytes:
            raise PlanError(f"rank {self.rank} received {status.Get_count(self.mpi.BYTE)} bytes from rank {rank} where "
                            f"its plan has {array.nbytes}, at {self.doing}")
        return array

    def make_send(self, node, group, peer):
        tag = self.tags[pair_of(node, group, self.rank, peer)]

        def run(tensor, *_):
            self.send(to_array(tensor), peer, tag)
            return tensor

        return run

    def make_receive(self, node, group, peer):
        tag = self.tags[pair_of(node, group, peer, self.rank)]
        dtype, shape = node.planned[0]
        kind = np.float32 if dtype == ms.bfloat16 else ms.dtype_to_nptype(dtype)
        return lambda *_: to_tensor(self.receive(shape, kind, peer, tag), dtype)

    def make_neighborexchangev2(self, node, group, _):
        """Pictures (N, C, H, W) cut in height and width: the borders of the neighbours' strips are added around."""
        to, of = node.attributes["send_rank_ids"], node.attributes["recv_rank_ids"]
        lens, around = node.attributes["send_lens"], node.attributes["recv_lens"]

        def run(tensor, *_):
            array = to_array(tensor)
            for direction, rank in enumerate(to):
                if rank >= 0:
                    self.send(array[border(direction, lens, array.shape, inside=True)], rank, EXCHANGE + direction)
            result = np.zeros(widened(array.shape, around), array.dtype)
            result[inner(around, result.shape)] = array
            for direction, rank in enumerate(of):
                if rank >= 0:
                    place = border(direction, around, array.shape)
                    result[place] = self.receive(result[place].shape, array.dtype, rank, EXCHANGE + opposite(direction))
            return to_tensor(result, tensor.dtype)

        return run

    def make_neighborexchangev2grad(self, node, group, _):
        """What the borders' gradients are goes back to the neighbours, who add it to their own.

        It is sent to those of whom the borders came: MindSpore has exchanged both attributes of the forward operator.
        """
        to, of = node.attributes["send_rank_ids"], node.attributes["recv_rank_ids"]
        around, lens = node.attributes["send_lens"], node.attributes["recv_lens"]

        def run(tensor, *_):
            array = to_array(tensor)
            result = np.array(array[inner(around, array.shape)])
            for direction, rank in enumerate(to):
                if rank >= 0:
                    self.send(array[border(direction, around, result.shape)], rank, EXCHANGE + direction)
            for direction, rank in enumerate(of):
                if rank >= 0:
                    place = border(direction, lens, result.shape, inside=True)
                    result[place] += self.receive(result[place].shape, array.dtype, rank,
                                                  EXCHANGE + opposite(direction))
            return to_tensor(result, tensor.dtype)

        return run

    def make_barrier(self, node, group, _):
        comm = self.groups[group]

        def run(*inputs):
            self.wait(comm.Ibarrier())
            return inputs[0] if inputs else None

        return run


def as_bytes(array):
    """An array's memory as MPI moves it: types such as float16 are unknown to MPI."""
    return array.reshape(-1).view(np.uint8)


def pair_of(node, group, sender, receiver):
    """By what a Send and its Receive find each other."""
    return group, node.attributes.get("sr_tag", 0), sender, receiver


# The eight directions in which NeighborExchangeV2 counts: top, top right, right, bottom right, bottom, ... (clockwise).
# Its lengths are those of top, bottom, left, right.
VERTICAL = (-1, -1, 0, 1, 1, 1, 0, -1)
HORIZONTAL = (0, 1, 1, 1, 0, -1, -1, -1)
EXCHANGE = 30000  # tags of MPI from here on are those of exchanges; the numbered pairs stay below


def opposite(direction):
    """Where the receiver has the sender."""
    return (direction + 4) % 8


def span(side, before, after, length, inside):
    """One dimension of a border: at its beginning (-1), its end (1), or all of it (0).

    Args:
        before, after: how wide the borders at the beginning and at the end are.
        length: of the picture without added borders.
        inside: the border is part of the picture; else it lies around, and the picture begins at `before`.
    """
    start = 0 if inside else before
    if side == 0:
        return slice(start, start + length)
    if side < 0:
        return slice(0, before)
    return slice(length - after, length) if inside else slice(start + length, start + length + after)


def border(direction, lens, shape, inside=False):
    """The place of a border of a picture of this shape (without added borders)."""
    top, bottom, left, right = lens
    return (slice(None), slice(None), span(VERTICAL[direction], top, bottom, shape[2], inside),
            span(HORIZONTAL[direction], left, right, shape[3], inside))


def widened(shape, lens):
    """The shape with borders."""
    return (*shape[:2], shape[2] + lens[0] + lens[1], shape[3] + lens[2] + lens[3])


def inner(lens, shape):
    """The place of the picture within its borders; `shape` has them."""
    return (slice(None), slice(None), slice(lens[0], shape[2] - lens[1]), slice(lens[2], shape[3] - lens[3]))
